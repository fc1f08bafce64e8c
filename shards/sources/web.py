"""Reads images from web servers.

An address with a password or a signature is refused and never shown, because it must not be written into a dataset.
Servers may be slow, faulty or hostile, so time, size and redirects are limited.
"""

import http.client
import io
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from functools import cache, partial
from typing import Any

from shards.config_values import shown_text, whole_number
from shards.errors import ImageRefusedError
from shards.output.url_secrets import is_secret_field
from shards.sources.entry import ImageBytes, too_large
from shards.storage.ahead import Hold, no_wait

RETRIES = 2
BACKOFF_SECONDS = 0.5
SILENCE_SECONDS = 20.0  # how long a server may send nothing
FETCH_SECONDS = 120.0  # the time limit for a whole image, with its headers
_PIECE_BYTES = 64 << 10
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_AS_THEY_ARE = "%/:=&?~#+!$,;'@()*[]"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ADVICE = "use s3://bucket/key with credentials from the environment, or a public URL"


def is_address(location: str) -> bool:
    """Returns whether a location is a URL of any kind."""
    return _SCHEME.match(location) is not None


def is_web(location: str) -> bool:
    """Returns whether a location is on a web server."""
    return location[:8].lower().startswith(("http://", "https://"))


def secret_reason(location: str) -> str:
    """Returns why an address that contains a secret is refused, or "" if no secret is recognised."""
    authority, rest = _split(location)
    if "@" in authority:
        return f"its address contains a user name or password; {_ADVICE}"
    if _is_odd(authority):
        return f"its port is not a number, as if it were a password with a slash; {_ADVICE}"
    readable = urllib.parse.unquote(urllib.parse.unquote(rest))
    if any(is_secret_field(piece.partition("=")[0]) for piece in re.split(r"[?&;#]", readable)[1:]):
        return f"its address contains a signature or key; {_ADVICE}"
    return ""


def shown_address(location: str) -> str:
    """Returns an address in a form that may be shown: without its query, and without anything that may be a
    password."""
    scheme = _SCHEME.match(location)
    authority, rest = _split(location)
    path = re.split(r"[?#]", rest, maxsplit=1)[0]
    if any(is_secret_field(piece.partition("=")[0]) for piece in path.split(";")[1:]):
        path = path.partition(";")[0]
    _, at, host = authority.rpartition("@")
    if _is_odd(host):
        host, at, path = "***", "", ""
    return f"{scheme[0] if scheme else ''}{'***@' if at else ''}{host}{path}"


def _split(location: str) -> tuple[str, str]:
    """Returns the part of a URL with user, host and port, and the rest. For a path without a scheme, the first part is
    empty."""
    scheme = _SCHEME.match(location)
    behind = location[scheme.end() :] if scheme else location
    end = re.search(r"[/?#\\]", behind) if scheme else None
    at = end.start() if end else len(behind) if scheme else 0
    return behind[:at], behind[at:]


def _is_odd(authority: str) -> bool:
    """Returns whether the port is not a number. The colons of an IPv6 address are in brackets and do not count."""
    _, colon, port = authority.rpartition("]")[2].partition(":")
    return bool(colon) and not (port.isascii() and (port.isdecimal() or not port))


def fetch_url(url: str, *, max_bytes: int, hold: Hold = no_wait) -> ImageBytes:
    """Returns the body of a GET request, which is retried up to RETRIES times, or the last error if no try succeeds.

    Only redirects to http and https are followed. An image of more than `max_bytes` is refused.
    """
    if reason := secret_reason(url):
        return ImageRefusedError(reason)
    error = OSError("not requested")
    for retry in range(1 + RETRIES):
        if retry:
            time.sleep(random.uniform(0.5, 1) * BACKOFF_SECONDS * 4**retry)  # noqa: S311
        try:
            return _get(url, max_bytes, hold)
        except urllib.error.HTTPError as refusal:
            refusal.close()
            # Uses the standard phrase, because the server's own may contain the address that it redirects to.
            error = OSError(f"the server answers {refusal.code} {http.client.responses.get(refusal.code, '')}".rstrip())
            if refusal.code not in _RETRIED:
                return error
        except (ValueError, http.client.InvalidURL):  # the error's text may contain the URL's password
            return ImageRefusedError("not a usable URL")
        except (OSError, http.client.HTTPException) as fault:
            cause = fault.reason if isinstance(fault, urllib.error.URLError) else fault
            error = OSError(" ".join(str(cause).split()) or type(cause).__name__)
    return error


def _get(url: str, max_bytes: int, hold: Hold) -> bytes | ImageRefusedError:
    deadline = _Deadline()
    request = urllib.request.Request(urllib.parse.quote(url, safe=_AS_THEY_ARE))  # noqa: S310 - the opener refuses file:
    request.add_header("User-Agent", "patchline")
    with _opener().open(request, timeout=_Silence.until(deadline)) as response:
        header = response.headers.get("Content-Length", "")
        promised = whole_number(header)
        if header.isdecimal() and (promised is None or promised > max_bytes):
            return too_large(shown_text(header), max_bytes=max_bytes)
        deadline.extend(_wait(hold, promised or 0))
        pieces, num_bytes = [], 0
        while piece := response.read1(_PIECE_BYTES):
            pieces.append(piece)
            num_bytes += len(piece)
            deadline.extend(_wait(hold, num_bytes))
            if num_bytes > max_bytes:
                return ImageRefusedError(f"too large: more than {max_bytes} bytes")
    if promised is not None and num_bytes != promised:
        raise OSError(f"the body broke off at byte {num_bytes} of {promised}")
    return b"".join(pieces)


def _wait(hold: Hold, num_bytes: int) -> float:
    """Waits for room in memory, and returns how many seconds that took."""
    begin = time.monotonic()
    hold(num_bytes)
    return time.monotonic() - begin


class _Deadline:
    """The time by which an image must be complete, with redirects and headers. The time spent waiting for room in
    memory does not count."""

    def __init__(self) -> None:
        self._until = time.monotonic() + FETCH_SECONDS

    def extend(self, seconds: float) -> None:
        """Postpones the deadline by `seconds`."""
        self._until += seconds

    def check(self) -> None:
        """Raises TimeoutError once the deadline has passed."""
        if time.monotonic() > self._until:
            raise TimeoutError(f"not complete after {FETCH_SECONDS:.0f} s")


class _Silence(float):
    """The timeout of a single read, which also carries the deadline of all reads. urllib passes it from the request to
    the connection."""

    deadline: _Deadline

    @classmethod
    def until(cls, deadline: _Deadline) -> "_Silence":
        silence = cls(SILENCE_SECONDS)
        silence.deadline = deadline
        return silence


class _TimedReads(io.RawIOBase):
    """The bytes of a connection, which can be read until the deadline. A server that sends a byte now and then must not
    hold a thread forever."""

    def __init__(self, raw: io.RawIOBase, deadline: _Deadline) -> None:
        super().__init__()
        self._raw, self._deadline = raw, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int | None:  # type: ignore[override]
        self._deadline.check()
        count: int | None = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that can be read until the deadline."""

    def __init__(self, deadline: _Deadline, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fp = io.BufferedReader(_TimedReads(self.fp.detach(), deadline))


class _TimedHandler(urllib.request.HTTPSHandler):
    """Opens http and https addresses, whose responses can be read until the deadline."""

    http_request = urllib.request.AbstractHTTPHandler.do_request_

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(http.client.HTTPConnection, req)

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> http.client.HTTPResponse:
        def connection(host: str, *, timeout: _Silence, **more: Any) -> http.client.HTTPConnection:
            made: http.client.HTTPConnection = http_class(host, timeout=timeout, **more)
            made.response_class = partial(_Response, timeout.deadline)  # type: ignore[assignment]
            return made

        return super().do_open(connection, req, **options)  # type: ignore[arg-type]


@cache
def _opener() -> urllib.request.OpenerDirector:
    """Returns an opener that, unlike urlopen, does not handle file:, ftp: and data: addresses."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        _TimedHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener
