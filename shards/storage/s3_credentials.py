"""Credentials that are read again, and waited for, once they have expired.

botocore reads a file of credentials once, and asks a provider again only when the lifetime that the provider named is
over. A run outlives both: somebody renews the file, or a service answers late. So a request that is refused because its
credentials have expired is repeated with what botocore's chain finds by then, up to the deadline of a store. Those that
were never accepted are not waited for: they are probably the wrong ones.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import botocore.exceptions as boto_errors
import botocore.session

from shards.storage.fork_lock import ForkLock
from shards.storage.retries import RetryConfig

log = logging.getLogger(__name__)
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_HEAD_EXPIRED = "400"  # the answer to a HEAD has no body that could say more
# The process or service that provides credentials failed this time.
CREDENTIALS_FAILED = (
    boto_errors.CredentialRetrievalError,
    boto_errors.TokenRetrievalError,
    boto_errors.MetadataRetrievalError,
)
DEADLINE_SECONDS = RetryConfig().deadline_seconds
PAUSE_SECONDS = 1.0  # between two looks at the chain


def says_expired(code: str, operation: str) -> bool:
    """Whether an error's code may mean that the credentials have expired."""
    return code in _EXPIRED or (code == _HEAD_EXPIRED and operation.startswith("Head"))


class RenewedCredentials:
    """What botocore's clients take for credentials, and for the chain that finds them. `is_accepted`: the server has
    let a request in. Raises what the chain raises if it finds none that can be used at first."""

    def __init__(self, *, is_accepted: bool = False) -> None:
        self.is_accepted, self._signed = is_accepted, ("", "")
        self._found = botocore.session.get_session().get_credentials()
        self._lock, self._read_at = ForkLock(), time.monotonic()

    def load_credentials(self) -> "RenewedCredentials | None":
        """Called by a session; None if there are no credentials."""
        return self if self._found else None

    @property
    def method(self) -> str:
        """How the credentials were found, for the user agent."""
        return str(self._found.method)

    def get_frozen_credentials(self) -> Any:
        """Called for each request: keys and token that belong together. A provider that fails, or whose credentials
        have expired already, is asked again until the deadline."""
        began = time.monotonic()
        while True:
            try:
                frozen = self._found.get_frozen_credentials()
                self._signed = _identity(frozen)
                return frozen
            except CREDENTIALS_FAILED as error:
                if not self._is_waited_for(began, type(error).__name__):
                    raise
            except RuntimeError as error:  # botocore's, for credentials that were renewed and have expired all the same
                if not self._is_waited_for(began, "they have expired"):
                    failed = {"provider": self.method, "error_msg": "they have expired"}
                    raise boto_errors.CredentialRetrievalError(**failed) from error

    def get_deferred_property(self, name: str) -> Callable[[], Any]:
        """A property that is looked up when it is needed, such as the account's id."""
        found: Callable[[], Any] = self._found.get_deferred_property(name)
        return found

    def renew(self) -> bool:
        """Asks the chain again, at most once in a while; returns whether there are others than those of the latest
        request. Credentials that the chain does not find now, such as those of a file that is being replaced, stay what
        they were."""
        with self._lock:
            if time.monotonic() - self._read_at >= PAUSE_SECONDS / 2:
                try:
                    found = botocore.session.get_session().get_credentials()
                except boto_errors.BotoCoreError as error:
                    log.debug("the credentials could not be read again: %s", type(error).__name__)
                    found = None
                self._found, self._read_at = found or self._found, time.monotonic()
        try:
            return _identity(self._found.get_frozen_credentials()) != self._signed
        except (*CREDENTIALS_FAILED, RuntimeError):
            return False

    def retry(self, *, operation: Any, request_dict: dict[str, Any], response: Any = None, **_: object) -> float | None:
        """botocore's event `needs-retry`: seconds until the request is repeated, with credentials that were read again;
        None if they are not what is wrong."""
        code = response[1].get("Error", {}).get("Code", "") if response else ""
        if not says_expired(code, operation.name):
            return None
        began = request_dict["context"].setdefault("waits_for_credentials", time.monotonic())
        return 0.0 if self._is_waited_for(began, code) else None

    def answered(self, *, http_response: Any, **_: object) -> None:
        """botocore's event `after-call`: an object that is missing is missing for those that are let in."""
        self.is_accepted = self.is_accepted or http_response.status_code < 400 or http_response.status_code == 404

    def _is_waited_for(self, began: float, why: str) -> bool:
        """Reads the credentials again, after a moment if they are no others; False once the deadline is over."""
        if self.renew():
            return True
        waited = time.monotonic() - began
        if not self.is_accepted or waited + PAUSE_SECONDS > DEADLINE_SECONDS:
            return False
        log.info("the S3 credentials cannot be used (%s); waiting for new ones since %.0f s", why, waited)
        time.sleep(PAUSE_SECONDS)
        self.renew()
        return True


def _identity(frozen: Any) -> tuple[str, str]:
    """What tells credentials from others."""
    return frozen.access_key, frozen.token or ""
