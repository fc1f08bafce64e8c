"""Images fetched from web servers, which may be slow, wrong, or hostile: limits on time, size and redirects."""

import http.client
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from functools import cache

from shards.errors import ImageRefusedError
from shards.sources.entry import ImageBytes, too_large
from shards.sources.url_secrets import secret_reason
from shards.storage.ahead import Hold, no_wait

RETRIES = 2
BACKOFF_SECONDS = 0.5
SILENCE_SECONDS = 20.0  # without a byte from the server
FETCH_SECONDS = 120.0  # for a whole image, so that a trickle ends too
_PIECE_BYTES = 64 << 10
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_AS_THEY_ARE = "%/:=&?~#+!$,;'@()*[]"


def is_web(location: str) -> bool:
    """Whether a location is on a web server."""
    return location[:8].lower().startswith(("http://", "https://"))


def fetch_url(url: str, *, max_bytes: int, hold: Hold = no_wait) -> ImageBytes:
    """The body of a GET request, retried up to RETRIES times; the last error if none succeeds.

    Redirects lead to http and https only. At most `max_bytes` are read.
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
            # The standard phrase, since the server's own may contain the address that it redirects to.
            error = OSError(f"the server answers {refusal.code} {http.client.responses.get(refusal.code, '')}".rstrip())
            if refusal.code not in _RETRIED:
                return error
        except (ValueError, http.client.InvalidURL):  # their texts may contain a password of the URL
            return ImageRefusedError("not a usable URL")
        except (OSError, http.client.HTTPException) as fault:
            cause = fault.reason if isinstance(fault, urllib.error.URLError) else fault
            error = OSError(" ".join(str(cause).split()) or type(cause).__name__)
    return error


def _get(url: str, max_bytes: int, hold: Hold) -> bytes | ImageRefusedError:
    deadline = time.monotonic() + FETCH_SECONDS
    request = urllib.request.Request(urllib.parse.quote(url, safe=_AS_THEY_ARE))  # noqa: S310 - the opener knows no file:
    request.add_header("User-Agent", "patchline")
    with _opener().open(request, timeout=SILENCE_SECONDS) as response:
        promised = response.headers.get("Content-Length", "")
        if promised.isdecimal() and int(promised) > max_bytes:
            return too_large(int(promised), max_bytes=max_bytes)
        waited = _wait(hold, int(promised) if promised.isdecimal() else 0)
        pieces, num_bytes = [], 0
        while piece := response.read1(_PIECE_BYTES):
            pieces.append(piece)
            num_bytes += len(piece)
            waited += _wait(hold, num_bytes)
            if num_bytes > max_bytes:
                return ImageRefusedError(f"too large: more than {max_bytes} bytes")
            if time.monotonic() - waited > deadline:
                raise TimeoutError(f"not complete after {FETCH_SECONDS:.0f} s")
    if promised.isdecimal() and num_bytes != int(promised):
        raise OSError(f"the body broke off at byte {num_bytes} of {promised}")
    return b"".join(pieces)


def _wait(hold: Hold, num_bytes: int) -> float:
    """Wait for room; returns the seconds that it took."""
    begin = time.monotonic()
    hold(num_bytes)
    return time.monotonic() - begin


@cache
def _opener() -> urllib.request.OpenerDirector:
    """Without the handlers of file:, ftp: and data: that urlopen has."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener
