"""Where bytes lie: a folder, or an S3 prefix. The one file that knows boto3."""

import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import boto3
import botocore.exceptions as boto_errors
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from shards.errors import StorageError, UserError
from shards.local import LocalStore
from shards.objects import MissingObjectError, Store, checked_path

__all__ = ["LocalStore", "MissingObjectError", "S3Store", "Store", "open_store"]

log = logging.getLogger(__name__)
MAX_ATTEMPTS = 6
BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 60
PIECE_BYTES = 256 << 10
PART_BYTES = 32 << 20

_NO_OBJECT = ("NoSuchKey", "404", "NotFound")
_DENIED = ("AccessDenied", "403", "401", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
# What a body that breaks off looks like; botocore retries requests, but never a body (boto3 issue 4111).
_BROKEN_BODY = (
    boto_errors.ReadTimeoutError,
    boto_errors.ResponseStreamingError,
    boto_errors.IncompleteReadError,
)
_UNREACHABLE = (boto_errors.HTTPClientError, boto_errors.ConnectionError)
_NO_CREDENTIALS = (boto_errors.NoCredentialsError, boto_errors.PartialCredentialsError, boto_errors.ProfileNotFound)
# A process or service that hands out credentials and failed this time.
_CREDENTIALS_FAILED = (
    boto_errors.CredentialRetrievalError,
    boto_errors.TokenRetrievalError,
    boto_errors.MetadataRetrievalError,
)


def open_store(url: str) -> Store:
    """The store at a folder path or `s3://bucket/prefix`. Touches neither disk nor network."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise UserError("a dataset URL is empty; give a folder or s3://bucket/prefix")
        return LocalStore(str(Path(url)))
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise UserError(f"cannot open {url!r}; give a folder or s3://bucket/prefix")
    try:
        return S3Store(bucket=bucket, prefix=checked_path(prefix.strip("/")) if prefix.strip("/") else "")
    except ValueError as error:
        raise UserError(f"cannot open {url!r}: {error}") from error


class ClientOfProcess:
    """One boto3 client a process, made at the first use: a client must not be carried across a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid, self._client = -1, None

    def __reduce__(self) -> tuple[type["ClientOfProcess"], tuple[()]]:
        return type(self), ()

    def get(self) -> Any:
        """The client of the process that asks."""
        with self._lock:
            if self._client is None or self._pid != os.getpid():
                self._pid, self._client = os.getpid(), _new_client()
            return self._client


@dataclass(frozen=True, kw_only=True)
class S3Store:
    """Objects of a bucket below a prefix. Endpoint and credentials come from botocore's own chain."""

    bucket: str
    prefix: str = ""
    clients: ClientOfProcess = field(default_factory=ClientOfProcess, compare=False, repr=False)

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def read(self, path: str) -> bytes:
        """The whole object."""
        return self._fetch(path, 0, None)

    def read_range(self, path: str, first: int, end: int) -> bytes:
        """Bytes first..end-1; EOFError where the object is shorter."""
        return self._fetch(path, first, end) if end > first else b""

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
        root = f"{self.prefix}/" if self.prefix else ""
        below = root + (f"{checked_path(prefix.strip('/'))}/" if prefix.strip("/") else "")
        with self._errors(prefix):
            pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=below)
            for page in pages:
                for item in page.get("Contents", ()):
                    yield item["Key"].removeprefix(root)

    def write(self, path: str, data: bytes) -> None:
        """One PUT."""
        with self._errors(path):
            self._client().put_object(Bucket=self.bucket, Key=self._key(path), Body=data)

    def write_file(self, path: str, local_file: Path) -> None:
        """One PUT, or a multipart upload of a large file."""
        with local_file.open("rb") as file:
            self._upload(path, file)

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """Yield an unnamed temporary file; uploaded when the block ends well."""
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            self._upload(path, file)

    def delete(self, path: str) -> None:
        """Remove the object if it is there."""
        with self._errors(path):
            self._client().delete_object(Bucket=self.bucket, Key=self._key(path))

    def discard_unfinished(self) -> None:
        """Nothing to do: an interrupted upload is invisible."""

    def child(self, prefix: str) -> "S3Store":
        """The store whose root is the folder `prefix` of this one; it shares the client."""
        return S3Store(bucket=self.bucket, prefix=self._key(prefix.strip("/")), clients=self.clients)

    def _client(self) -> Any:
        return self.clients.get()

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{checked_path(path)}".lstrip("/")

    def _upload(self, path: str, file: BinaryIO) -> None:
        config = TransferConfig(multipart_threshold=2 * PART_BYTES, multipart_chunksize=PART_BYTES)
        with self._errors(path):
            self._client().upload_fileobj(file, self.bucket, self._key(path), Config=config)

    def _fetch(self, path: str, first: int, end: int | None) -> bytes:
        """GET with our own continuing: a body that breaks off goes on from its last good byte, same ETag."""
        got, etag = bytearray(), ""
        for attempt in range(MAX_ATTEMPTS):
            asked = first + len(got)
            with self._errors(path):
                answer = self._client().get_object(**self._request(path, asked, end, etag))
            etag, size = answer["ETag"], _object_size(answer)
            end = size if end is None else end
            if end > size:
                raise EOFError(f"{self.url}/{path}: bytes {first}..{end - 1} asked, the object has {size}")
            _read_body(answer, got, asked=asked, needed=end - first)
            if first + len(got) == end:
                return bytes(got)
            time.sleep(random.uniform(0, min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2**attempt)))  # noqa: S311
        where = f"{self.url}/{path} at byte {first + len(got)}"
        raise ConnectionError(f"the body broke off {MAX_ATTEMPTS} times, last in {where}")

    def _request(self, path: str, asked: int, end: int | None, etag: str) -> dict[str, str]:
        request = {"Bucket": self.bucket, "Key": self._key(path)}
        if end is not None:
            request["Range"] = f"bytes={asked}-{end - 1}"
        return request | ({"IfMatch": etag} if etag else {})

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except boto_errors.ClientError as error:
            self._client_error(error, path)
        except boto3.exceptions.S3UploadFailedError as error:
            raise UserError(f"cannot upload {self.url}/{path}: {error}") from error
        except (boto_errors.ParamValidationError, boto_errors.EndpointResolutionError) as error:
            what = " ".join(str(error).split())
            raise UserError(f"cannot use {self.url}: {what}; correct the URL or AWS_ENDPOINT_URL") from error
        except _NO_CREDENTIALS as error:
            what = f"no usable S3 credentials for {self.url}"
            todo = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            raise UserError(f"{what} ({type(error).__name__}); {todo}") from error
        except _CREDENTIALS_FAILED as error:
            what = f"the S3 credentials for {self.url} could not be fetched: {error}"
            raise StorageError(f"{what}; try again, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
        except _UNREACHABLE as error:
            what = f"S3 is unreachable for {self.url} at {self._endpoint()} ({type(error).__name__})"
            raise StorageError(f"{what}; start the server or correct AWS_ENDPOINT_URL") from error

    def _client_error(self, error: boto_errors.ClientError, path: str) -> NoReturn:
        code = str(error.response.get("Error", {}).get("Code", ""))
        where = f"bucket {self.bucket!r} at {self._endpoint()} (for {self.url})"
        if code == "NoSuchBucket" or (code in _NO_OBJECT and error.operation_name == "HeadBucket"):
            raise UserError(f"there is no {where}; create the bucket or correct the URL") from error
        if code in _NO_OBJECT:
            raise MissingObjectError(path, url=self.url) from None
        if code in _DENIED:
            allowed = "credentials that may read it, and write to it when packing"
            raise UserError(f"access denied ({code}) to {where}; use {allowed}") from error
        if code == "InvalidRange":
            raise EOFError(f"{self.url}/{path}: the range asked begins behind its end") from error
        if code in ("PreconditionFailed", "412"):
            raise ConnectionError(f"{self.url}/{path} was replaced while it was read") from error
        raise ConnectionError(f"{error.operation_name} of {self.url}/{path} failed: {code}") from error

    def _endpoint(self) -> str:
        return str(self._client().meta.endpoint_url)


def _new_client() -> Any:
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 4},
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        read_timeout=READ_TIMEOUT_SECONDS,
        max_pool_connections=64,
        # Checksum trailers, botocore's newer default, are refused by many S3-compatible stores.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = boto3.session.Session()
    try:
        client = session.client("s3", config=config)
    except ValueError as error:
        todo = "set AWS_ENDPOINT_URL to http://HOST:PORT or https://HOST, and AWS_DEFAULT_REGION to a region's name"
        raise UserError(f"S3 can not be used: {error}; {todo}") from error
    if ".amazonaws.com" in client.meta.endpoint_url:
        return client
    # Only Amazon resolves bucket.host; a server of one's own has one host name.
    return session.client("s3", config=config.merge(Config(s3={"addressing_style": "path"})))


def _object_size(answer: dict[str, Any]) -> int:
    content_range = answer.get("ContentRange", "")
    return int(content_range.rpartition("/")[2] or answer["ContentLength"])


def _read_body(answer: dict[str, Any], got: bytearray, *, asked: int, needed: int) -> None:
    """Append what arrives to `got`; a body that does not begin at the byte asked for is left unread."""
    content_range = answer.get("ContentRange", "bytes 0-")
    begins = int(content_range.split()[-1].partition("-")[0])
    body = answer["Body"]
    try:
        while begins == asked and len(got) < needed and (piece := body.read(PIECE_BYTES)):
            got += piece
    except _BROKEN_BODY as error:
        log.warning("a body broke off after %d of %d bytes: %s", len(got), needed, error)
    finally:
        body.close()
    del got[needed:]  # a store that ignores Range sends the whole object
