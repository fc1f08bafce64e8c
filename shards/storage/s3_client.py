"""The client of an S3 server, and its errors as ours. The one file that knows boto3."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import boto3
import botocore.exceptions as boto_errors
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from urllib3.exceptions import HTTPError

from shards.errors import StorageError, UnreachableError, UserError
from shards.storage.fork_lock import ForkLock
from shards.storage.objects import MissingObjectError, without_secrets

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 15  # between two arrivals, of an answer that has only bytes to send
WORK_TIMEOUT_SECONDS = 60  # of what a server has work with: ending an upload, listing
PART_BYTES = 32 << 20
UPLOADS = TransferConfig(multipart_threshold=2 * PART_BYTES, multipart_chunksize=PART_BYTES)

_NO_OBJECT = ("NoSuchKey", "404", "NotFound")
_DENIED = ("AccessDenied", "403", "401", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
_REPLACED = ("PreconditionFailed", "412")
# What a body that breaks off looks like; botocore retries requests, but never a body (boto3 issue 4111).
_BROKEN_BODY = (
    boto_errors.ReadTimeoutError,
    boto_errors.ResponseStreamingError,
    boto_errors.IncompleteReadError,
    HTTPError,  # urllib3's: botocore lets some through as they are, a fault in TLS among them
)
_UNREACHABLE = (boto_errors.HTTPClientError, boto_errors.ConnectionError)
_THROTTLES = (429, 503)
_PASSING_STATUS = (*_THROTTLES, 500, 502, 504)
_THROTTLE_CODES = ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests")
_PASSING_CODES = (*_THROTTLE_CODES, "RequestTimeout", "InternalError", "ServiceUnavailable")
_NO_CREDENTIALS = (boto_errors.NoCredentialsError, boto_errors.PartialCredentialsError, boto_errors.ProfileNotFound)
# A process or service that hands out credentials and failed this time.
_CREDENTIALS_FAILED = (
    boto_errors.CredentialRetrievalError,
    boto_errors.TokenRetrievalError,
    boto_errors.MetadataRetrievalError,
)
# What a request may raise that is worth asking `fault_of` about.
REQUEST_ERRORS = (boto_errors.ClientError, *_UNREACHABLE, *_CREDENTIALS_FAILED)


class BadAnswerError(StorageError):
    """Storage that answers, but with errors."""


class ReplacedError(BadAnswerError):
    """An object is not the one any more of which the first bytes were read."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a request failed that may go well when it is asked again."""

    name: str
    is_throttle: bool
    is_answer: bool = True  # the storage's own; False: nobody has answered


def fault_of(error: Exception) -> Fault | None:
    """What is wrong, for one of REQUEST_ERRORS; None where asking again gives the same answer."""
    if not isinstance(error, boto_errors.ClientError):
        return Fault(name=type(error).__name__, is_throttle=False, is_answer=False)
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code not in _PASSING_CODES and status not in _PASSING_STATUS:
        return None
    name = code if code == str(status) else f"{status} {code}"
    return Fault(name=name, is_throttle=status in _THROTTLES or code in _THROTTLE_CODES)


class Body:
    """The body of an answer to GetObject, whose reads end where it breaks off."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._stream = answer["Body"]
        # A server that sends the headers by themselves and waits for their acknowledgement before it sends a small
        # body (Nagle's algorithm, on by default in Ceph) would wait for 40 ms. There is no public way to the socket.
        with suppress(AttributeError, OSError):
            connection = self._stream._raw_stream._fp.fp.raw._sock
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def read(self, most: int) -> bytes:
        """What comes, up to `most` bytes; nothing at the end or where the body broke off."""
        try:
            data: bytes = self._stream.read(most)
        except _BROKEN_BODY as error:
            log.debug("a body broke off: %s", type(error).__name__)
            return b""
        return data

    def readinto(self, buffer: memoryview) -> int:
        """As `read`, into `buffer`; how many bytes came."""
        try:
            return int(self._stream.readinto(buffer))
        except _BROKEN_BODY as error:
            log.debug("a body broke off: %s", type(error).__name__)
            return 0

    def close(self) -> None:
        """Lets go of the connection; one whose body is not read to its end is not used again."""
        self._stream.close()


@dataclass(frozen=True, kw_only=True)
class _Clients:
    """`reading` asks once, because its callers ask again by themselves; `fresh` does so over a new connection each
    time; `retrying` is for everything else."""

    reading: Any
    fresh: Any
    retrying: Any


class ClientOfProcess:
    """The boto3 clients of a process, made at the first use: a client must not be carried across a fork."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._pid = -1
        self._clients: _Clients | None = None
        self.has_answered = False  # anything, be it an error

    def __reduce__(self) -> tuple[type["ClientOfProcess"], tuple[()]]:
        return type(self), ()

    def get(self) -> Any:
        """The client for GETs, in the process that asks. It tries nothing again."""
        return self._of_process().reading

    def fresh(self) -> Any:
        """As `get`, over connections that nobody has used yet and nobody will use again."""
        return self._of_process().fresh

    def retrying(self) -> Any:
        """The client for everything else."""
        return self._of_process().retrying

    def _of_process(self) -> _Clients:
        with self._lock:
            if self._clients is None or self._pid != os.getpid():
                self._pid, self._clients = os.getpid(), _new_clients(self._answered)
            return self._clients

    def _answered(self, **_: object) -> None:
        self.has_answered = True


@contextmanager
def storage_errors(path: str, *, bucket: str, url: str, clients: ClientOfProcess) -> Iterator[None]:
    """Turns the client's errors about the object `path` of the store `url` into ours, which say what to do."""
    try:
        yield
    except boto_errors.ClientError as error:
        _raise_client_error(error, path, url=url, where=f"bucket {bucket!r} at {_endpoint(clients)} (for {url})")
    except (boto_errors.ParamValidationError, boto_errors.EndpointResolutionError) as error:
        what = without_secrets(" ".join(str(error).split()))
        raise UserError(f"cannot use {url}: {what}; correct the URL or AWS_ENDPOINT_URL") from error
    except _NO_CREDENTIALS as error:
        what = f"no usable S3 credentials for {url}"
        todo = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        raise UserError(f"{what} ({type(error).__name__}); {todo}") from error
    except _CREDENTIALS_FAILED as error:
        # Without the error's text: it may hold what the process that hands out credentials printed.
        what = f"the S3 credentials for {url} could not be fetched ({type(error).__name__})"
        todo = "try again, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise _away(clients)(f"{what}; {todo}") from error
    except _UNREACHABLE as error:
        what = f"S3 is unreachable for {url} at {_endpoint(clients)} ({type(error).__name__})"
        raise _away(clients)(f"{what}; start the server or correct AWS_ENDPOINT_URL") from error


def _away(clients: ClientOfProcess) -> type[StorageError | UnreachableError]:
    return StorageError if clients.has_answered else UnreachableError


def _raise_client_error(error: boto_errors.ClientError, path: str, *, url: str, where: str) -> NoReturn:
    code = str(error.response.get("Error", {}).get("Code", ""))
    if code == "NoSuchBucket" or (code in _NO_OBJECT and error.operation_name == "HeadBucket"):
        raise UserError(f"there is no {where}; create the bucket or correct the URL") from error
    if code in _NO_OBJECT:
        raise MissingObjectError(path, url=url) from None
    if code in _DENIED:
        allowed = "credentials that may read it, and write to it when packing"
        raise UserError(f"access denied ({code}) to {where}; use {allowed}") from error
    if code == "InvalidRange":
        raise EOFError(f"{url}/{path}: the range asked begins behind its end") from error
    if code in _REPLACED:
        raise ReplacedError(f"{url}/{path} was replaced while it was read") from error
    raise BadAnswerError(f"{error.operation_name} of {url}/{path} failed: {code}") from error


def _endpoint(clients: ClientOfProcess) -> str:
    return without_secrets(clients.get().meta.endpoint_url)


def _new_clients(answered: Callable[..., None]) -> _Clients:
    """`answered` is called with every answer."""
    session = boto3.session.Session()
    reading, fresh = (_new_client(session, attempts=1, read_timeout_seconds=READ_TIMEOUT_SECONDS) for _ in range(2))
    fresh.meta.events.register("before-send.s3", _close_afterwards)
    retrying = _new_client(session, attempts=4, read_timeout_seconds=WORK_TIMEOUT_SECONDS)
    for client in (reading, fresh, retrying):
        client.meta.events.register("after-call.s3", answered)
    return _Clients(reading=reading, fresh=fresh, retrying=retrying)


def _new_client(session: Any, *, attempts: int, read_timeout_seconds: int) -> Any:
    config = Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        read_timeout=read_timeout_seconds,
        max_pool_connections=64,
        # Checksum trailers, botocore's newer default, are refused by many S3-compatible stores.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        client = session.client("s3", config=config)
    except ValueError as error:
        todo = "set AWS_ENDPOINT_URL to http://HOST:PORT or https://HOST, and AWS_DEFAULT_REGION to a region's name"
        raise UserError(f"S3 cannot be used: {without_secrets(str(error))}; {todo}") from error
    if ".amazonaws.com" in client.meta.endpoint_url or (client.meta.config.s3 or {}).get("addressing_style"):
        return client
    # Few others resolve bucket.host, and those who have such a server say so in their AWS configuration.
    return session.client("s3", config=config.merge(Config(s3={"addressing_style": "path"})))


def _close_afterwards(request: Any, **_: object) -> None:
    """After the signature is made, which must not cover what a proxy on the way may change."""
    request.headers["Connection"] = "close"
