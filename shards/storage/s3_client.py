"""The client of an S3 server, and its errors as ours. The one file that knows boto3."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import boto3
import botocore.exceptions as boto_errors
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from shards.errors import StorageError, UserError
from shards.storage.objects import MissingObjectError, without_secrets

CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 60
PART_BYTES = 32 << 20
UPLOADS = TransferConfig(multipart_threshold=2 * PART_BYTES, multipart_chunksize=PART_BYTES)

_NO_OBJECT = ("NoSuchKey", "404", "NotFound")
_DENIED = ("AccessDenied", "403", "401", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
# What a body that breaks off looks like; botocore retries requests, but never a body (boto3 issue 4111).
BROKEN_BODY = (
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


@contextmanager
def storage_errors(path: str, *, bucket: str, url: str, clients: ClientOfProcess) -> Iterator[None]:
    """What went wrong at the store `url` with the object `path`, as errors of ours that say what to do."""
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
        raise StorageError(f"{what}; try again, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
    except _UNREACHABLE as error:
        what = f"S3 is unreachable for {url} at {_endpoint(clients)} ({type(error).__name__})"
        raise StorageError(f"{what}; start the server or correct AWS_ENDPOINT_URL") from error


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
    if code in ("PreconditionFailed", "412"):
        raise ConnectionError(f"{url}/{path} was replaced while it was read") from error
    raise ConnectionError(f"{error.operation_name} of {url}/{path} failed: {code}") from error


def _endpoint(clients: ClientOfProcess) -> str:
    return without_secrets(clients.get().meta.endpoint_url)


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
        raise UserError(f"S3 can not be used: {without_secrets(str(error))}; {todo}") from error
    if ".amazonaws.com" in client.meta.endpoint_url:
        return client
    # Only Amazon resolves bucket.host; a server of one's own has one host name.
    return session.client("s3", config=config.merge(Config(s3={"addressing_style": "path"})))
