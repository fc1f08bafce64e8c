"""The client of an S3 server, its credentials, and the translation of its errors into ours. No other file imports
boto3.

botocore reads a credentials file once, and asks a provider again only when the lifetime that the provider stated is
over. A run may last longer than the credentials, and their renewal may be late. So a request that is refused because
its credentials have expired, or because their key was replaced by another, is retried with the credentials that
botocore's chain finds by then, until the store's deadline. If the server has never accepted any credentials, there is
no wait, because they are probably wrong.
"""

import hashlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NoReturn

import boto3
import botocore.exceptions as boto_errors
import botocore.session
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from urllib3.exceptions import HTTPError

from shards.errors import StorageError, UnreachableError, UserError
from shards.output.url_secrets import without_secrets
from shards.storage.fork_lock import ForkLock
from shards.storage.objects import MissingObjectError
from shards.storage.retries import RetryConfig

log = logging.getLogger(__name__)
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_REPLACED_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch")  # the key was deleted, or has another secret
_HEAD_EXPIRED = "400"  # the answer to a HEAD has no body, so only a status
# The login that credentials come from has ended, or was never made.
_SSO_LOGIN_ENDED = (boto_errors.SSOError, boto_errors.TokenRetrievalError)
_LOGIN_ENDED = getattr(boto_errors, "LoginError", boto_errors.SSOError)  # an older botocore has no `aws login`
# The process, service or login that provides credentials has failed, which may pass.
CREDENTIALS_FAILED = (
    boto_errors.CredentialRetrievalError,
    boto_errors.MetadataRetrievalError,
    *_SSO_LOGIN_ENDED,
    _LOGIN_ENDED,
)
DEADLINE_SECONDS = RetryConfig().deadline_seconds
PAUSE_SECONDS = 1.0  # between two requests to the chain
CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 15  # how long a read may wait for more bytes
WORK_TIMEOUT_SECONDS = 60  # for requests that take long on a server, such as completing an upload
PART_BYTES = 32 << 20
UPLOADS = TransferConfig(multipart_threshold=2 * PART_BYTES, multipart_chunksize=PART_BYTES)
_NO_OBJECT = ("NoSuchKey", "404", "NotFound")
HEAD_DENIED = "403"
_DENIED = ("AccessDenied", HEAD_DENIED, "401", *_REPLACED_KEYS)
_OTHER_REGION = ("PermanentRedirect", "TemporaryRedirect", "301", "307", "AuthorizationHeaderMalformed")
_REGION = re.compile(r"[a-z0-9-]{1,64}")
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?")
_SKEWED = ("RequestTimeTooSkewed", "RequestExpired")
_MOST_SKEW_SECONDS = 15 * 60  # S3 refuses requests from a clock that is further off
_REPLACED = ("PreconditionFailed", "412")
# A body that breaks off raises one of these; botocore retries requests, but never a body (boto3 issue 4111).
_BROKEN_BODY = (
    boto_errors.ReadTimeoutError,
    boto_errors.ResponseStreamingError,
    boto_errors.IncompleteReadError,
    HTTPError,  # from urllib3: botocore does not translate all of them, for example TLS errors
)
_UNREACHABLE = (boto_errors.HTTPClientError, boto_errors.ConnectionError)
_THROTTLES = (429, 503)
_PASSING_STATUS = (*_THROTTLES, 500, 502, 504)
_THROTTLE_CODES = ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests")
_PASSING_CODES = (*_THROTTLE_CODES, "RequestTimeout", "InternalError", "ServiceUnavailable")
_NO_CREDENTIALS = (boto_errors.NoCredentialsError, boto_errors.PartialCredentialsError, boto_errors.ProfileNotFound)
# The errors of requests that `fault_of` accepts.
REQUEST_ERRORS = (boto_errors.ClientError, *_UNREACHABLE, *CREDENTIALS_FAILED)


def says_expired(code: str, operation: str) -> bool:
    """Returns whether an error's code may mean that the credentials have expired or were replaced."""
    return code in (*_EXPIRED, *_REPLACED_KEYS) or (code == _HEAD_EXPIRED and operation.startswith("Head"))


class RenewedCredentials:
    """Replaces botocore's credentials, and the chain that finds them.

    `is_accepted`: whether the server has accepted a request with these credentials. `profile`: the profile to use
    instead of the environment's. The constructor raises the chain's error if the chain fails, and UserError if its
    settings are wrong.
    """

    def __init__(self, *, is_accepted: bool = False, profile: str = "") -> None:
        self.is_accepted, self._signed, self._profile = is_accepted, b"", profile
        self._found = _credentials(profile)
        self._lock, self._read_at = ForkLock(), time.monotonic()

    def load_credentials(self) -> "RenewedCredentials | None":
        """Returns the credentials to a session, or None if there are none."""
        return self if self._found else None

    @property
    def method(self) -> str:
        """How the credentials were found, for the user agent."""
        return str(self._found.method)

    def get_frozen_credentials(self) -> Any:
        """Returns keys and a token that belong together. botocore calls this for each request.

        If the provider fails, or if its credentials have already expired, asks again until the deadline. Does not wait
        if the server has never accepted credentials.
        """
        began = time.monotonic()
        while True:
            try:
                with _provider_errors():
                    frozen = self._found.get_frozen_credentials()
                self._signed = _identity(frozen)
                return frozen
            except CREDENTIALS_FAILED as error:
                if not self._is_waited_for(began, _reason(error)):
                    raise

    def get_deferred_property(self, name: str) -> Callable[[], Any]:
        """Returns a property that is looked up when it is needed, such as the account's id."""
        found: Callable[[], Any] = self._found.get_deferred_property(name)
        return found

    def renew(self) -> bool:
        """Asks the chain again, at most once in PAUSE_SECONDS / 2, and returns whether the credentials differ from
        those of the latest request.

        If the chain finds none, for example because their file is being replaced, the old credentials are kept.
        """
        with self._lock:
            if time.monotonic() - self._read_at >= PAUSE_SECONDS / 2:
                try:
                    found = _credentials(self._profile)
                except (boto_errors.BotoCoreError, UserError) as error:
                    log.debug("the credentials could not be read again: %s", type(error).__name__)
                    found = None
                self._found, self._read_at = found or self._found, time.monotonic()
        try:
            with _provider_errors():
                return _identity(self._found.get_frozen_credentials()) != self._signed
        except CREDENTIALS_FAILED:
            return False

    def retry(self, *, operation: Any, request_dict: dict[str, Any], response: Any = None, **_: object) -> float | None:
        """Handles botocore's event `needs-retry`: returns the seconds until the request is repeated with credentials
        that were read again, or None if the credentials are not the reason."""
        code = response[1].get("Error", {}).get("Code", "") if response else ""
        if not says_expired(code, operation.name):
            return None
        began = request_dict["context"].setdefault("waits_for_credentials", time.monotonic())
        return 0.0 if self._is_waited_for(began, code) else None

    def answered(self, *, http_response: Any, **_: object) -> None:
        """Handles botocore's event `after-call`. An answer about a missing object counts as accepted, too: clients
        without access do not get it."""
        self.is_accepted = self.is_accepted or http_response.status_code < 400 or http_response.status_code == 404

    def _is_waited_for(self, began: float, why: str) -> bool:
        """Reads the credentials again. If they have not changed, pauses and reads them once more. Returns False if the
        deadline is over, or if the server has never accepted credentials."""
        if self.renew():
            return True
        waited = time.monotonic() - began
        if not self.is_accepted or waited + PAUSE_SECONDS > DEADLINE_SECONDS:
            return False
        log.info("the S3 credentials cannot be used (%s); waiting for new ones since %.0f s", why, waited)
        time.sleep(PAUSE_SECONDS)
        self.renew()
        return True


def _credentials(profile: str) -> Any:
    """Returns what botocore's chain finds, or None if it finds nothing."""
    with _settings_errors():
        chain = botocore.session.Session(profile=profile or None).get_component("credential_provider")
        with _provider_errors():
            return chain.load_credentials()


@contextmanager
def _settings_errors() -> Iterator[None]:
    """Turns errors about values in AWS's files and variables into UserError. Errors about credentials and connections
    pass."""
    try:
        yield
    except (*_NO_CREDENTIALS, *CREDENTIALS_FAILED, *_UNREACHABLE):
        raise
    except (boto_errors.BotoCoreError, ValueError) as error:
        raise _wrong_setting(error) from error


@contextmanager
def _provider_errors() -> Iterator[None]:
    """Turns what a provider of credentials raises on its own into CredentialRetrievalError: a token's file is missing,
    a process printed something that is not JSON, the credentials have expired. A wrong setting becomes UserError here,
    too, because a provider sends its requests with a client of its own."""
    try:
        yield
    except (*_NO_CREDENTIALS, *CREDENTIALS_FAILED, *_UNREACHABLE):
        raise
    except boto_errors.BotoCoreError as error:
        raise _wrong_setting(error) from error
    # EOFError: it asked for a code, and nobody is there. RuntimeError: the credentials were renewed but have expired.
    except (OSError, ValueError, EOFError, RuntimeError) as error:
        raise boto_errors.CredentialRetrievalError(provider="", error_msg=type(error).__name__) from error


def _wrong_setting(error: Exception) -> UserError:
    what = without_secrets(" ".join(str(error).split())).rstrip(".")
    todo = "correct ~/.aws/config, ~/.aws/credentials or the AWS_ variable with this value"
    return UserError(f"S3 cannot be used: {what}", todo=todo)


def _reason(error: Exception) -> str:
    """Says why credentials could not be fetched. The error's text is left out, because it may contain what the
    credential process printed, and so is a file's name unless it is a path, because it may be part of a command."""
    cause = error.__cause__
    if isinstance(cause, RuntimeError):
        return "they have expired"
    path = _unreadable_file(error)
    return type(cause or error).__name__ + (f": {path}" if path else "")


def _unreadable_file(error: Exception) -> str:
    """Returns the path of the file that a provider could not read, or "" if that is not why it failed."""
    name = error.__cause__.filename if isinstance(error.__cause__, OSError) else None
    return name if isinstance(name, str) and name.startswith("/") else ""


def _identity(frozen: Any) -> bytes:
    """Returns a digest that distinguishes the credentials from others, so that their secret is not held twice."""
    parts = frozen.access_key, frozen.secret_key, frozen.token or ""
    return hashlib.sha256("\0".join(parts).encode()).digest()


class BadAnswerError(StorageError):
    """The storage keeps answering with errors or damaged data."""


class DeleteRefusedError(UserError):
    """The bucket does not let objects be deleted."""


class ReplacedError(BadAnswerError):
    """An object was replaced after its first bytes were read."""


@dataclass(frozen=True, kw_only=True)
class RequestFault:
    """The reason why a request failed, if a retry may succeed."""

    name: str
    is_throttle: bool
    is_answer: bool = True  # False: the storage did not answer, so a retry costs no budget
    is_expired: bool = False  # the credentials have expired or were replaced, and must be read again


def code_of(error: Exception) -> str:
    """Returns the code of a server's answer, which is its status if the answer has no body; "" for other errors."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def fault_of(error: Exception) -> RequestFault | None:
    """Returns the fault behind one of REQUEST_ERRORS, or None if a retry would get the same answer."""
    if not isinstance(error, boto_errors.ClientError):
        return RequestFault(name=type(error).__name__, is_throttle=False, is_answer=False)
    code = code_of(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if says_expired(code, error.operation_name):
        return RequestFault(name=code, is_throttle=False, is_answer=False, is_expired=True)
    if code not in _PASSING_CODES and status not in _PASSING_STATUS:
        return None
    name = code if code == str(status) else f"{status} {code}"
    return RequestFault(name=name, is_throttle=status in _THROTTLES or code in _THROTTLE_CODES)


class Body:
    """The body of an answer to GetObject. If it breaks off, a read returns no bytes, as at its end."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._stream = answer["Body"]
        # Some servers send the headers alone and wait for their acknowledgement before they send a small body (Nagle's
        # algorithm, the default in Ceph): a delay of 40 ms. There is no public way to the socket.
        with suppress(AttributeError, OSError):
            connection = self._stream._raw_stream._fp.fp.raw._sock
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def read(self, most: int) -> bytes:
        """Reads up to `most` bytes as they arrive. Returns b"" at the end, or if the body breaks off."""
        try:
            data: bytes = self._stream.read(most)
        except _BROKEN_BODY as error:
            log.debug("a body broke off: %s", type(error).__name__)
            return b""
        return data

    def readinto(self, buffer: memoryview) -> int:
        """Reads into `buffer` and returns the number of bytes: 0 at the end, or if the body breaks off."""
        try:
            return int(self._stream.readinto(buffer))
        except _BROKEN_BODY as error:
            log.debug("a body broke off: %s", type(error).__name__)
            return 0

    def close(self) -> None:
        """Releases the connection. It is not reused if the body was not read to its end."""
        self._stream.close()


@dataclass(frozen=True, kw_only=True)
class _Clients:
    """The clients of a process. `reading` never retries, because its callers do. `fresh` is like `reading`, with a new
    connection for each request. `retrying` is for everything else."""

    reading: Any
    fresh: Any
    retrying: Any
    credentials: RenewedCredentials


class ClientOfProcess:
    """The boto3 clients of a process, created at first use, because a client must not be used after a fork.

    `was_let_in`: whether the server had accepted the credentials in the process where this object was pickled.
    """

    def __init__(self, *, was_let_in: bool = False) -> None:
        self._lock, self._was_let_in = ForkLock(), was_let_in
        self._pid = -1
        self._clients: _Clients | None = None
        self.has_answered = False  # even an error counts as an answer

    def __reduce__(self) -> tuple[Callable[..., "ClientOfProcess"], tuple[()]]:
        return partial(type(self), was_let_in=self.is_accepted), ()

    def get(self) -> Any:
        """Returns this process's client for GETs, which never retries."""
        return self._of_process().reading

    def fresh(self) -> Any:
        """Returns this process's client for GETs that opens a new connection for each request."""
        return self._of_process().fresh

    def retrying(self) -> Any:
        """Returns this process's client for everything but GETs."""
        return self._of_process().retrying

    def renew(self) -> bool:
        """Looks up the credentials again, for all clients. Returns False if they have not changed and were never
        accepted, since they are then probably wrong."""
        credentials = self._of_process().credentials
        return credentials.renew() or credentials.is_accepted

    @property
    def is_accepted(self) -> bool:
        """Whether the server has accepted the credentials of this process."""
        return self._was_let_in or (self._clients is not None and self._clients.credentials.is_accepted)

    def _of_process(self) -> _Clients:
        with self._lock:
            if self._clients is None or self._pid != os.getpid():
                self._pid, self._clients = os.getpid(), _new_clients(self._answered, was_let_in=self._was_let_in)
            return self._clients

    def _answered(self, **_: object) -> None:
        self.has_answered = True


class GivenClient(ClientOfProcess):
    """A single client for GETs, with the settings of a probe."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self._given = client

    def get(self) -> Any:
        """Returns the client."""
        return self._given


def probing_client(*, endpoint: str = "", profile: str = "") -> Any:
    """Returns a client for a probe, which does not retry. Without an endpoint or a profile, the environment's is used.
    Raises UserError for a profile, an endpoint or another setting that cannot be used."""
    try:
        session = _session(RenewedCredentials(profile=profile), profile=profile)
    except boto_errors.ProfileNotFound as error:
        todo = "add it to ~/.aws/credentials, or correct s3_profile"
        raise UserError(f"there is no profile {error.kwargs['profile']!r}", todo=todo) from error
    except (*_NO_CREDENTIALS, *CREDENTIALS_FAILED) as error:
        user = f"profile {profile!r}" if profile else "this process"
        raise _credentials_error(error, user, away=UnreachableError) from error
    return _new_client(session, attempts=1, read_timeout_seconds=READ_TIMEOUT_SECONDS, endpoint=endpoint)


@contextmanager
def storage_errors(path: str, *, bucket: str, url: str, clients: ClientOfProcess) -> Iterator[None]:
    """Turns the client's errors about the object `path` of the store `url` into ours, which say what to do."""
    try:
        yield
    except boto_errors.ClientError as error:
        where = f"bucket {bucket!r} at {_endpoint(clients)} (for {url})"
        ended = StorageError if clients.is_accepted else UserError  # raised if the credentials have expired
        _raise_client_error(error, path, url=url, where=where, ended=ended)
    except (boto_errors.ParamValidationError, boto_errors.EndpointResolutionError) as error:
        what = without_secrets(" ".join(str(error).split()))
        raise UserError(f"cannot use {url}: {what}", todo="correct the URL or AWS_ENDPOINT_URL") from error
    except (*_NO_CREDENTIALS, *CREDENTIALS_FAILED) as error:
        raise _credentials_error(error, url, away=_away(clients)) from error
    except _UNREACHABLE as error:
        what = f"S3 is unreachable for {url} at {_endpoint(clients)} ({type(error).__name__})"
        raise _away(clients)(what, todo="start the server or correct AWS_ENDPOINT_URL") from error


def _away(clients: ClientOfProcess) -> type[StorageError | UnreachableError]:
    return StorageError if clients.has_answered else UnreachableError


def _credentials_error(
    error: Exception, purpose: str, *, away: type[StorageError | UnreachableError]
) -> UserError | StorageError:
    """Returns the error for credentials that are missing, or that could not be fetched (`away`)."""
    keys = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if isinstance(error, _NO_CREDENTIALS):
        return UserError(
            f"no usable S3 credentials for {purpose} ({type(error).__name__})", todo=f"{keys}, or AWS_PROFILE"
        )
    todo = "try again"
    if isinstance(error, _SSO_LOGIN_ENDED):
        todo = "run aws sso login with the same profile"
    elif isinstance(error, _LOGIN_ENDED):
        todo = "run aws login with the same profile"
    elif _unreadable_file(error):
        todo = "make this file readable or correct its path"
    what = f"the S3 credentials for {purpose} could not be fetched ({_reason(error)})"
    return away(what, todo=f"{todo}, or {keys}")


def _raise_client_error(
    error: boto_errors.ClientError, path: str, *, url: str, where: str, ended: type[StorageError | UserError]
) -> NoReturn:
    code = code_of(error)
    if code == "NoSuchBucket" or (code in _NO_OBJECT and error.operation_name == "HeadBucket"):
        raise UserError(f"there is no {where}", todo="create the bucket or correct the URL") from error
    if code in _NO_OBJECT:
        raise MissingObjectError(path, url=url) from None
    if code in _OTHER_REGION:
        raise _other_region(error, where) from error
    is_expired = code in _EXPIRED  # status 400 of a HEAD may have any reason
    if (is_expired or code in (*_SKEWED, *_DENIED)) and (skew := _clock_skew(error, is_certain=code in _SKEWED)):
        what = f"{where} refuses requests because {skew}"
        raise UserError(what, todo="set the clock of this machine") from error
    if is_expired:
        what = f"the credentials for {where} have expired ({code})"
        raise ended(what, todo="renew them, then run it again") from error
    if code in _REPLACED_KEYS and ended is StorageError:
        what = f"the credentials for {where} are no longer accepted ({code})"
        raise ended(what, todo="put the new key where the old one was found, then run it again") from error
    if code in _DENIED and error.operation_name == "DeleteObject":
        todo = f"allow s3:DeleteObject below {url}, or delete there by hand what is no longer needed"
        what = f"{where} refuses to delete ({code}), as object lock does"
        raise DeleteRefusedError(what, todo=todo) from error
    if code in _DENIED:
        todo = "use credentials that may read it, and write to it when packing"
        object_ = f": {error.operation_name} of {url}/{path}" if path else ""
        raise UserError(f"access denied ({code}) to {where}{object_}", todo=todo) from error
    if code == "InvalidRange":
        raise EOFError(f"{url}/{path}: the range asked begins after its end") from error
    if code in _REPLACED:
        raise ReplacedError(f"{url}/{path} was replaced while it was read") from error
    raise BadAnswerError(f"{error.operation_name} of {url}/{path} failed: {code}") from error


def _other_region(error: boto_errors.ClientError, where: str) -> UserError:
    """Returns the error for a bucket in another region or on another server. It repeats their names from the answer
    only if they have a valid form."""
    answer = error.response
    headers, told = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}), answer.get("Error", {})
    region = str(headers.get("x-amz-bucket-region") or told.get("Region") or "")
    host = str(told.get("Endpoint") or "")
    region, host = (text if form.fullmatch(text) else "" for form, text in ((_REGION, region), (_HOST, host)))
    code = told.get("Code", "")
    what = f"{where} is in another region ({code})" if not region else f"{where} is in the region {region} ({code})"
    todo = f"set AWS_DEFAULT_REGION={region}" if region else "set AWS_DEFAULT_REGION to its region"
    return UserError(what, todo=todo + (f", and AWS_ENDPOINT_URL to the server {host}" if host else ""))


def _clock_skew(error: boto_errors.ClientError, *, is_certain: bool) -> str:
    """Says how wrong this machine's clock is according to the server's date; returns "" if it is right. The date
    decides, because the answer to a HEAD gives no reason for a refusal."""
    try:
        date = parsedate_to_datetime(error.response["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, ValueError, TypeError):
        return "the clock of this machine is wrong" if is_certain else ""
    seconds = time.time() - date.timestamp()
    if abs(seconds) <= _MOST_SKEW_SECONDS and not is_certain:
        return ""
    way = "ahead of" if seconds > 0 else "behind"
    return f"the clock of this machine is {abs(seconds) / 60:,.0f} minutes {way} the server's"


def _endpoint(clients: ClientOfProcess) -> str:
    return without_secrets(clients.get().meta.endpoint_url)


def _new_clients(answered: Callable[..., None], *, was_let_in: bool) -> _Clients:
    """Creates the clients, which call `answered` for every answer. `was_let_in`: as in ClientOfProcess."""
    credentials = RenewedCredentials(is_accepted=was_let_in)
    session = _session(credentials)
    reading, fresh = (_new_client(session, attempts=1, read_timeout_seconds=READ_TIMEOUT_SECONDS) for _ in range(2))
    fresh.meta.events.register("before-send.s3", _close_afterwards)
    retrying = _new_client(session, attempts=4, read_timeout_seconds=WORK_TIMEOUT_SECONDS)
    retrying.meta.events.register("needs-retry.s3", credentials.retry)
    for client in (reading, fresh, retrying):
        client.meta.events.register("after-call.s3", answered)
        client.meta.events.register("after-call.s3", credentials.answered)
    return _Clients(reading=reading, fresh=fresh, retrying=retrying, credentials=credentials)


def _session(credentials: RenewedCredentials, *, profile: str = "") -> Any:
    core = botocore.session.Session(profile=profile or None)
    core.register_component("credential_provider", credentials)
    with _settings_errors():
        return boto3.session.Session(botocore_session=core)


def _new_client(session: Any, *, attempts: int, read_timeout_seconds: int, endpoint: str = "") -> Any:
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
        client = session.client("s3", config=config, endpoint_url=endpoint or None)
    except ValueError as error:
        todo = "set AWS_ENDPOINT_URL to http://HOST:PORT or https://HOST, and AWS_DEFAULT_REGION to a region's name"
        raise UserError(f"S3 cannot be used: {without_secrets(str(error))}", todo=todo) from error
    except boto_errors.BotoCoreError as error:
        raise _wrong_setting(error) from error
    if ".amazonaws.com" in client.meta.endpoint_url or (client.meta.config.s3 or {}).get("addressing_style"):
        return client
    # Few other servers resolve bucket.host; users of such a server set `addressing_style` in their AWS configuration.
    paths = config.merge(Config(s3={"addressing_style": "path"}))
    return session.client("s3", config=paths, endpoint_url=endpoint or None)


def _close_afterwards(request: Any, **_: object) -> None:
    """Asks the server to close the connection. The header is set after the request is signed, because a proxy may
    change it."""
    request.headers["Connection"] = "close"
