"""Passwords and signatures in the addresses of images: they must never be written into a dataset."""

import re
from urllib.parse import unquote

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET_PART = re.compile(r"signature|credential|token|secret|passw|api[-_]?key|access[-_]?(key|id)|key-pair-id|policy")
_SECRET_NAMES = frozenset(("sig", "key", "auth", "authorization", "pwd", "hmac", "jwt", "code", "sid", "session"))
_ADVICE = "use s3://bucket/key with credentials from the environment, or a public URL"


def is_address(location: str) -> bool:
    """Whether a location begins like a URL of any kind."""
    return _SCHEME.match(location) is not None


def secret_reason(location: str) -> str:
    """Why an address is refused: it contains a secret. Empty if it contains none that is recognised."""
    authority, rest = _split(location)
    if "@" in authority:
        return f"its address contains a user name or password; {_ADVICE}"
    if _is_odd(authority):
        return f"its port is not a number, as if it were a password with a slash; {_ADVICE}"
    if any(_is_secret(piece.partition("=")[0]) for piece in re.split(r"[?&;#]", unquote(unquote(rest)))[1:]):
        return f"its address contains a signature or key; {_ADVICE}"
    return ""


def shown_address(location: str) -> str:
    """An address as a name: without its query, and without what may be a password."""
    scheme = _SCHEME.match(location)
    authority, rest = _split(location)
    path = re.split(r"[?#]", rest, maxsplit=1)[0]
    if any(_is_secret(piece.partition("=")[0]) for piece in path.split(";")[1:]):
        path = path.partition(";")[0]
    _, at, host = authority.rpartition("@")
    if _is_odd(host):
        host, at, path = "***", "", ""
    return f"{scheme[0] if scheme else ''}{'***@' if at else ''}{host}{path}"


def _split(location: str) -> tuple[str, str]:
    """(user, host and port; everything after them). A relative path has no host."""
    scheme = _SCHEME.match(location)
    behind = location[scheme.end() :] if scheme else location
    end = re.search(r"[/?#\\]", behind) if scheme else None
    at = end.start() if end else len(behind) if scheme else 0
    return behind[:at], behind[at:]


def _is_odd(authority: str) -> bool:
    """Whether the port is not a number; an IPv6 address has colons in brackets."""
    _, colon, port = authority.rpartition("]")[2].partition(":")
    return bool(colon) and not (port.isascii() and (port.isdecimal() or not port))


def _is_secret(name: str) -> bool:
    name = name.strip().lower()
    return name in _SECRET_NAMES or _SECRET_PART.search(name) is not None
