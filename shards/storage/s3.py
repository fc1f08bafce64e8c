"""Lists, writes and reads the objects of an S3 bucket.

A GET is retried. If its body breaks off, the read continues after the last good byte. If an object is replaced during a
read, the bytes of the old and the new object are never mixed.
"""

import io
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, TypeVar

from shards.errors import InvalidDataError, UnreachableError, UserError
from shards.storage.objects import (
    MOST_OBJECT_BYTES,
    MissingObjectError,
    Traffic,
    TrafficCounts,
    any_path,
    checked_path,
    folder_prefix,
    too_large,
)
from shards.storage.retries import ReadStoppedError, RequestRetries, RetryBudget, RetryConfig
from shards.storage.s3_client import (
    HEAD_DENIED,
    REQUEST_ERRORS,
    UPLOADS,
    BadAnswerError,
    Body,
    ClientOfProcess,
    ReplacedError,
    RequestFault,
    code_of,
    fault_of,
    storage_errors,
)
from shards.storage.temporary import temporary_file

log = logging.getLogger(__name__)
Read = TypeVar("Read", bytes, memoryview)
PIECE_BYTES = 256 << 10  # fits a processor's cache: botocore copies each piece once more
RESTARTS = 3  # how many times a range is read again because its object was replaced during the read
PAGE_KEYS = 1000
RETRIES = RetryConfig()


@dataclass(frozen=True, kw_only=True)
class S3Store:
    """Objects of a bucket below a prefix. The endpoint and the credentials come from botocore's own chain."""

    bucket: str
    prefix: str = ""
    clients: ClientOfProcess = field(default_factory=ClientOfProcess, compare=False, repr=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)
    budget: RetryBudget = field(default_factory=lambda: RetryBudget(RETRIES), compare=False, repr=False)
    is_fresh: bool = False

    def fresh(self) -> "S3Store":
        """Returns a store of the same objects that opens a new connection for each read."""
        return replace(self, is_fresh=True)

    def with_traffic(self, traffic: Traffic) -> "S3Store":
        """Returns a store of the same objects over the same connections, with other counters."""
        return replace(self, traffic=traffic)

    @property
    def url(self) -> str:
        """The store's URL: `s3://bucket/prefix`."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def read(self, path: str, *, most_bytes: int = MOST_OBJECT_BYTES, stop: threading.Event | None = None) -> bytes:
        """Reads the whole object. Raises InvalidDataError if it has more than `most_bytes`, and ReadStoppedError at the
        next byte or timeout once `stop` is set."""
        return ObjectRead(self, path, 0, None, stop=stop).whole(most_bytes)

    def read_range(self, path: str, first: int, end: int, *, stop: threading.Event | None = None) -> bytes:
        """Reads bytes first..end-1. Raises EOFError if the object is shorter, and ReadStoppedError as `read` does."""
        return ObjectRead(self, path, first, end, stop=stop).data() if end > first else b""

    def read_into(
        self, path: str, first: int, end: int, take: Callable[[int], memoryview], *, stop: threading.Event | None = None
    ) -> memoryview:
        """Reads bytes first..end-1 into the memory that `take` returns. Raises the errors of `read_range`."""
        return ObjectRead(self, path, first, end, stop=stop).data_in(take)

    @contextmanager
    def open_read(self, path: str) -> Iterator[BinaryIO]:
        """Opens the object with one GET, which is continued if it breaks off. The first bytes are requested at once, so
        that errors come early."""
        with io.BufferedReader(PieceFile(ObjectRead(self, path, 0, None).pieces()), PIECE_BYTES) as file:
            file.peek(1)
            yield file

    def local_path(self, path: str) -> None:
        """Returns None, because the objects of a bucket are not files."""

    def size(self, path: str) -> int:
        """Returns the number of bytes of the object."""
        asked = {"Bucket": self.bucket, "Key": self.key(path)}
        with self.errors(path):
            try:
                answer = self._client().head_object(**asked)
            except REQUEST_ERRORS as error:
                if code_of(error) != HEAD_DENIED:
                    raise
                # The answer to a HEAD does not say whether the access key was replaced. The answer to a GET does, and
                # the client then waits for the new key.
                self._client().get_object(**asked)["Body"].close()
                answer = self._client().head_object(**asked)
            return int(answer["ContentLength"])

    def exists(self, path: str) -> bool:
        """Returns whether the object exists."""
        try:
            self.size(path)
        except MissingObjectError:
            # The answer to a HEAD has no body, so it cannot say whether the object or its bucket is missing.
            with self.errors(path):
                self._client().head_bucket(Bucket=self.bucket)
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yields all objects below `prefix`, page by page."""
        return (path for path, _ in self.list_sizes(prefix))

    def list_sizes(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yields all objects below `prefix` with their sizes, which the listing contains."""
        below = self._root + folder_prefix(prefix)
        with self.errors(prefix):
            pages = self._client().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=below, PaginationConfig={"PageSize": PAGE_KEYS}):
                for item in page.get("Contents", ()):
                    yield item["Key"].removeprefix(self._root), int(item["Size"])

    def write(self, path: str, data: bytes) -> None:
        """Writes the object with one PUT."""
        with self.errors(path):
            self._client().put_object(Bucket=self.bucket, Key=self.key(path), Body=data)

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """Yields an unnamed temporary file. If the block ends without an error, the file is uploaded, in parts if it is
        large."""
        with temporary_file() as file:
            yield file
            file.seek(0)
            self.upload(path, file, progress=lambda: None)

    def upload(self, path: str, file: BinaryIO, *, progress: Callable[[], None]) -> None:
        """Writes the object with one PUT, or in parts that are read from the file as they are sent."""
        with self.errors(path):
            self._client().upload_fileobj(
                file, self.bucket, self.key(path), Config=UPLOADS, Callback=lambda _num_bytes: progress()
            )

    def delete(self, path: str) -> None:
        """Removes the object if it exists."""
        with self.errors(path):
            self._client().delete_object(Bucket=self.bucket, Key=self.key(path))

    def discard_unfinished(self, is_ours: Callable[[str], bool] = any_path) -> None:
        """Aborts unfinished multipart uploads below this prefix. Their parts are invisible but take up space.

        If the server refuses, a warning is logged; no object is affected.
        """
        try:
            with self.errors(self.prefix):
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

    def key(self, path: str) -> str:
        """Returns the key of an object in the bucket. Raises ValueError for an impossible path."""
        return self._root + checked_path(path)

    def _unfinished_uploads(self) -> Iterator[tuple[str, str]]:
        """Yields (key, upload) for all unfinished uploads below this root. Checks each key, because some stores ignore
        the prefix, and other uploads must not be aborted."""
        pages = self._client().get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=self.bucket, Prefix=self._root):
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(self._root):
                    yield item["Key"], item["UploadId"]

    def answer(self, request: dict[str, str]) -> dict[str, Any]:
        """Returns the answer to a GetObject with these arguments. Raises the client's errors."""
        client = self.clients.fresh() if self.is_fresh else self.clients.get()
        answer: dict[str, Any] = client.get_object(**request)
        return answer

    def errors(self, path: str) -> AbstractContextManager[None]:
        """Turns the client's errors about an object into ours."""
        return storage_errors(path, bucket=self.bucket, url=self.url, clients=self.clients)


class PieceFile(io.RawIOBase):
    """The pieces of a generator as a file that is read from front to back. It holds one piece at most. Closing it ends
    the generator."""

    def __init__(self, pieces: Generator[bytes, None, None]) -> None:
        super().__init__()
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        """Fills the buffer from the current piece. Returns 0 only at the end."""
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


class ObjectRead:
    """One read of bytes first..end-1 of an object, or from `first` to its end if `end` is None. It can be used once.

    Raises MissingObjectError, EOFError if the object is shorter, ReplacedError, ReadStoppedError once `stop` is set,
    and StorageError if the storage does not recover.
    """

    def __init__(
        self, store: S3Store, path: str, first: int, end: int | None, *, stop: threading.Event | None = None
    ) -> None:
        self._store, self._path, self._first, self._end, self._stop = store, path, first, end, stop
        self._name = f"{store.url}/{path}"
        self._request = {"Bucket": store.bucket, "Key": store.key(path)}
        self._position, self._version = first, ""
        self._match = ""  # the ETag for If-Match, which servers may compare
        self._retries = RequestRetries(self._name, store.budget, pause=stop.wait if stop else time.sleep)

    def pieces(self) -> Generator[bytes, None, None]:
        """Yields the pieces as they arrive, each of at most PIECE_BYTES."""
        pieces, seconds = self._pieces(), 0.0
        try:
            while True:
                began = time.perf_counter()
                piece = next(pieces, b"")
                seconds += time.perf_counter() - began  # the caller's work between two pieces is not counted
                if not piece:
                    break
                yield piece
        finally:
            pieces.close()
            self._count_read(seconds)

    def data(self) -> bytes:
        """Returns all bytes at once. If the object is replaced during the read, reads it again from the start, since no
        byte has been returned yet."""

        def filled() -> bytes:
            memory = io.BytesIO()  # `getvalue` returns its bytes without a copy

            def grown(num_bytes: int) -> memoryview:
                memory.seek(num_bytes - 1)
                memory.write(b"\0")
                return memory.getbuffer()

            self._filled(grown).release()
            return memory.getvalue()

        return self._restarted_if_replaced(filled)

    def data_in(self, take: Callable[[int], memoryview]) -> memoryview:
        """Reads the bytes that `data` would return into the memory that `take(num_bytes)` returns."""
        return self._restarted_if_replaced(lambda: self._filled(take))

    def whole(self, most_bytes: int) -> bytes:
        """Returns all bytes of an object of unknown size. Raises InvalidDataError once there are more than
        `most_bytes`."""
        with self._counted():
            return b"".join(self._pieces_within(most_bytes))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except ReadStoppedError:
            raise
        except BaseException:
            self._position = self._first  # the bytes that have arrived are useless
            self._count_read(time.perf_counter() - began)
            raise
        self._count_read(time.perf_counter() - began)

    def _count_read(self, seconds: float) -> None:
        self._store.traffic.add(TrafficCounts(requests=1, bytes=self._position - self._first, seconds=seconds))

    def _pieces(self) -> Generator[bytes, None, None]:
        for body in self._bodies():
            while piece := body.read(min(PIECE_BYTES, self._left())):
                self._position += len(piece)
                yield piece
                self._check_stop()

    def _pieces_within(self, most_bytes: int) -> Iterator[bytes]:
        for piece in self._pieces():
            if self._position - self._first > most_bytes:
                raise InvalidDataError(too_large(self._name, most_bytes))
            yield piece

    def _restarted_if_replaced(self, read: Callable[[], Read]) -> Read:
        with self._counted():
            for _ in range(RESTARTS):
                try:
                    return read()
                except ReplacedError:
                    if not self._retries.again_after_answer("it was replaced while it was read"):
                        raise
                    self._count(retries=1)
                    self._position, self._version, self._match = self._first, "", ""
            return read()

    def _filled(self, take: Callable[[int], memoryview]) -> memoryview:
        """Reads all bytes into the memory that `take` returns. Calls `take` once the answer's headers say how many
        bytes there are."""
        view = memoryview(b"")
        for body in self._bodies():
            view = view or take(self._position - self._first + self._left())
            while count := body.readinto(view[self._position - self._first :][:PIECE_BYTES]):
                self._position += count
                self._check_stop()
        return view

    def _left(self) -> int:
        return 0 if self._end is None else self._end - self._position

    def _bodies(self) -> Generator[Body, None, None]:
        """Yields one body after another, each beginning at the next byte, until all bytes have been read."""
        while self._end is None or self._left():
            begun = self._position
            answer = self._answer()
            with closing(Body(answer)) as body:
                fault = self._fault_of(answer)
                if not fault:
                    yield body
                    if self._position > begun:
                        self._store.budget.silence.received()
                        self._store.budget.has_sent |= bool(answer.get("ContentRange"))
                    if not self._left():
                        return
            self._check_stop()
            self._broke_off(begun, fault or "the body broke off")

    def _answer(self) -> dict[str, Any]:
        """Requests the bytes from the next one on, and retries until the GET is answered."""
        request = dict(self._request)
        if self._end is not None:
            request["Range"] = f"bytes={self._position}-{self._end - 1}"
        if self._match:
            request["IfMatch"] = self._match
        while True:
            self._check_stop()
            with self._store.errors(self._path):
                try:
                    answer = self._store.answer(request)
                except REQUEST_ERRORS as error:
                    self._check_stop()
                    fault = fault_of(error)
                    if fault is None or not self._again(fault):
                        raise
                    continue
            self._store.budget.has_answered = True
            return answer

    def _again(self, fault: RequestFault) -> bool:
        if fault.is_expired:
            if not self._store.clients.renew():
                return False
            self._store.budget.has_answered = True
        log.info("reading %s failed: %s", self._name, fault.name)
        self._count(throttled=int(fault.is_throttle))
        if not self._retries.again_after_failure(fault.name, is_answer=fault.is_answer):
            return False
        self._count(retries=1)
        return True

    def _fault_of(self, answer: dict[str, Any]) -> str:
        """Returns why the body does not begin with the next byte, or "" if it does. Raises ReplacedError if the object
        was replaced, EOFError if it is too short, and BadAnswerError if its length is unknown."""
        content_range, version = answer.get("ContentRange", ""), _version(answer)
        if self._version and version != self._version:  # the store ignores If-Match
            raise ReplacedError(f"{self._name} was replaced while it was read")
        span, _, total = content_range.rpartition("/")
        begins, _, last = span.rpartition(" ")[2].partition("-")
        if (begins or "0") != str(self._position):
            return f"another range was answered ({content_range})" if content_range else "the range asked was ignored"
        size = _size(total, last, answer)
        if size is None:
            raise BadAnswerError(f"{self._name}: the storage does not say how long it is", todo="use another storage")
        self._end = size if self._end is None else self._end
        if self._end > size:
            asked = f"bytes {self._first}..{self._end - 1} asked"
            raise EOFError(f"{self._name}: {asked}, the object has {size}")
        self._version = version
        etag = answer.get("ETag", "")
        self._match = "" if etag.startswith("W/") else etag  # a weak ETag matches nothing, not even itself
        return ""

    def _broke_off(self, begun: int, fault: str) -> None:
        where = f"{self._name} at byte {self._position}"
        log.info("%s: %s", where, fault)
        self._count(broken_bodies=1)
        if self._position > begun:
            # Many small bodies complete a read, too, but each costs the storage a request, so a small body earns a
            # small share of a retry.
            self._retries.progressed(min(1.0, (self._position - begun) / PIECE_BYTES))
        if not self._retries.again_after_answer(f"{fault} at byte {self._position}"):
            tries = self._store.budget.config.fruitless_tries
            raise BadAnswerError(f"{fault} {tries} times, last in {where}")
        self._count(retries=1)

    def _check_stop(self) -> None:
        if self._stop and self._stop.is_set():
            raise ReadStoppedError(self._position - self._first)

    def _count(self, *, retries: int = 0, broken_bodies: int = 0, throttled: int = 0) -> None:
        self._store.traffic.add(TrafficCounts(retries=retries, broken_bodies=broken_bodies, throttled=throttled))


def _version(answer: dict[str, Any]) -> str:
    """Returns a text that differs between an object and the one that replaces it at the same path."""
    return str(answer.get("ETag") or answer.get("LastModified") or "")


def _size(total: str, last: str, answer: dict[str, Any]) -> int | None:
    """Returns the object's number of bytes. If the answer does not give it, returns where the answer ends, or None if
    that is unknown too."""
    if total.isdecimal():
        return int(total)
    if last.isdecimal():  # bytes 0-9/*
        return int(last) + 1
    length = answer.get("ContentLength")
    return None if length is None else int(length)
