"""Objects of an S3 bucket. A body that breaks off is continued from its last good byte."""

import io
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, BinaryIO

from shards.errors import UnreachableError, UserError
from shards.storage.objects import MOST_OBJECT_BYTES, MissingObjectError, any_path, checked_path, folder_prefix
from shards.storage.retries import RetryBudget, RetryConfig
from shards.storage.s3_client import UPLOADS, BadAnswerError, ClientOfProcess, storage_errors
from shards.storage.s3_read import PIECE_BYTES, ObjectRead, ObjectSource
from shards.storage.temporary import temporary_file
from shards.storage.traffic import Traffic


class PieceFile(io.RawIOBase):
    """Reads forward and keeps one piece at most. Closing it ends the generator of the pieces."""

    def __init__(self, pieces: Generator[bytes, None, None]) -> None:
        super().__init__()
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        """Fills the buffer from the current piece; 0 only at the end."""
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def close(self) -> None:
        """Drops the current piece and ends the generator."""
        self._left = memoryview(b"")
        self._pieces.close()
        super().close()


log = logging.getLogger(__name__)
PAGE_KEYS = 1000
RETRIES = RetryConfig()


@dataclass(frozen=True, kw_only=True)
class S3Store:
    """Objects of a bucket below a prefix. Endpoint and credentials come from botocore's own chain."""

    bucket: str
    prefix: str = ""
    clients: ClientOfProcess = field(default_factory=ClientOfProcess, compare=False, repr=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)
    budget: RetryBudget = field(default_factory=lambda: RetryBudget(RETRIES), compare=False, repr=False)
    is_fresh: bool = False

    def fresh(self) -> "S3Store":
        """The same objects, each read over a new connection."""
        return replace(self, is_fresh=True)

    def with_traffic(self, traffic: Traffic) -> "S3Store":
        """The same objects over the same connections, with other counters."""
        return replace(self, traffic=traffic)

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def read(self, path: str, *, most_bytes: int = MOST_OBJECT_BYTES, stop: threading.Event | None = None) -> bytes:
        """The whole object; ReadStoppedError once `stop` is set, but only at the next byte or timeout.
        InvalidDataError if it has more than `most_bytes`."""
        return self._object(path, 0, None, stop=stop).whole(most_bytes)

    def read_range(self, path: str, first: int, end: int, *, stop: threading.Event | None = None) -> bytes:
        """Bytes first..end-1; EOFError if the object is shorter, ReadStoppedError as `read`."""
        return self._object(path, first, end, stop=stop).data() if end > first else b""

    def read_into(
        self, path: str, first: int, end: int, take: Callable[[int], memoryview], *, stop: threading.Event | None = None
    ) -> memoryview:
        """Bytes first..end-1, into the memory that `take` returns. Raises as `read_range`."""
        return self._object(path, first, end, stop=stop).data_in(take)

    @contextmanager
    def open_read(self, path: str) -> Iterator[BinaryIO]:
        """One GET, continued if it breaks off. The first bytes are requested here, so that errors come early."""
        with io.BufferedReader(PieceFile(self._object(path, 0, None).pieces()), PIECE_BYTES) as file:
            file.peek(1)
            yield file

    def local_path(self, path: str) -> None:
        """Returns None, because a bucket has no files."""

    def size(self, path: str) -> int:
        """Bytes of the object."""
        with self._errors(path):
            return int(self._client().head_object(Bucket=self.bucket, Key=self._key(path))["ContentLength"])

    def exists(self, path: str) -> bool:
        """Whether the object is there."""
        try:
            self.size(path)
        except MissingObjectError:
            # A HEAD has no body to say whether the object or its bucket is missing.
            with self._errors(path):
                self._client().head_bucket(Bucket=self.bucket)
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[str]:
        """All objects below `prefix`, page by page."""
        return (path for path, _ in self.list_sizes(prefix))

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """All objects below `prefix` with their sizes, which the listing contains."""
        below = self._root + folder_prefix(prefix)
        with self._errors(prefix):
            pages = self._client().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=below, PaginationConfig={"PageSize": PAGE_KEYS}):
                for item in page.get("Contents", ()):
                    yield item["Key"].removeprefix(self._root), int(item["Size"])

    def write(self, path: str, data: bytes) -> None:
        """One PUT."""
        with self._errors(path):
            self._client().put_object(Bucket=self.bucket, Key=self._key(path), Body=data)

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """Yields an unnamed temporary file. If the block ends without an error it is uploaded, in parts if large."""
        with temporary_file() as file:
            yield file
            file.seek(0)
            with self._errors(path):
                self._client().upload_fileobj(file, self.bucket, self._key(path), Config=UPLOADS)

    def upload(self, path: str, file: BinaryIO, *, progress: Callable[[], None]) -> None:
        """One PUT, or parts read from the file as they are sent."""
        with self._errors(path):
            self._client().upload_fileobj(
                file, self.bucket, self._key(path), Config=UPLOADS, Callback=lambda _num_bytes: progress()
            )

    def delete(self, path: str) -> None:
        """Removes the object if it is there."""
        with self._errors(path):
            self._client().delete_object(Bucket=self.bucket, Key=self._key(path))

    def discard_unfinished(self, is_ours: Callable[[str], bool] = any_path) -> None:
        """Aborts unfinished multipart uploads below this prefix: their parts are invisible but take up space.

        If the server refuses, a warning is logged; the objects are right all the same.
        """
        try:
            with self._errors(self.prefix):
                for key, upload in list(self._unfinished_uploads()):
                    if not is_ours(key.removeprefix(self._root)):
                        continue
                    with suppress(self._client().exceptions.NoSuchUpload):
                        self._client().abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload)
        except UnreachableError:
            raise
        except (UserError, MissingObjectError, BadAnswerError) as error:
            log.warning("unfinished uploads below %s are left as they are: %s", self.url, error)

    def _client(self) -> Any:
        return self.clients.retrying()

    @property
    def _root(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""

    def _key(self, path: str) -> str:
        return self._root + checked_path(path)

    def _unfinished_uploads(self) -> Iterator[tuple[str, str]]:
        """(key, upload) below this root. Some stores ignore the prefix; uploads of others must not be aborted."""
        pages = self._client().get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=self.bucket, Prefix=self._root):
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(self._root):
                    yield item["Key"], item["UploadId"]

    def _object(self, path: str, first: int, end: int | None, *, stop: threading.Event | None = None) -> ObjectRead:
        source = ObjectSource(
            name=f"{self.url}/{path}",
            get=self._get,
            request={"Bucket": self.bucket, "Key": self._key(path)},
            errors=partial(self._errors, path),
            budget=self.budget,
            traffic=self.traffic,
            renew=self.clients.renew,
            stop=stop,
        )
        return ObjectRead(source, first, end)

    def _get(self, request: dict[str, str]) -> dict[str, Any]:
        client = self.clients.fresh() if self.is_fresh else self.clients.get()
        answer: dict[str, Any] = client.get_object(**request)
        return answer

    def _errors(self, path: str) -> AbstractContextManager[None]:
        return storage_errors(path, bucket=self.bucket, url=self.url, clients=self.clients)
