"""Finds secrets in URLs, and replaces them for display.

A secret is the part of an address before its @, or a value in its query that is named like a signature or a key.
"""

import re

# The pattern also matches a single slash, which is left when a URL has been treated as a path.
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,15}(?=://)|https?|s3)(:/[^\s\"'<>`]+)")
_PASSWORD = re.compile(r"://[^/\s:@]*:(?![0-9]{1,5}(?:/|$))[^\s@]+@")  # a colon with a number is a port, not a password
_USER = re.compile(r"^(:/{1,2})[^/?#]*@")  # up to the last @, because a password may contain one
_SIGNS = re.compile(r"([?&;#])")  # the separators before the names in a query
_PART = re.compile(r"signature|credential|token|secret|passw|api[-_]?key|access[-_]?(key|id)|key-pair-id|policy")
_NAMES = frozenset(("sig", "key", "auth", "authorization", "pwd", "hmac", "jwt", "code", "sid", "session"))
_HIDDEN = "***"


def is_secret_field(name: str) -> bool:
    """Returns whether a field of a query has the name of a secret, such as sig, X-Amz-Signature or access_token."""
    name = name.strip().lower()
    return name in _NAMES or _PART.search(name) is not None


def has_password(text: str) -> bool:
    """Returns whether the text has a URL such as https://user:password@host."""
    return bool(_PASSWORD.search(text))


def has_user(text: str) -> bool:
    """Returns whether the text has a URL such as https://user@host, whose user may be a token."""
    return any(_USER.search(url[2]) for url in _URL.finditer(text))


def has_secret(text: str) -> bool:
    """Returns whether the text has a URL with a password, a signature or a key."""
    if "://" not in text:
        return False
    fields = (piece for url in _URL.finditer(text) for piece in _SIGNS.split(url[2])[2::2])
    return has_password(text) or any(value and is_secret_field(name) for name, _, value in map(_divided, fields))


def without_secrets(text: str) -> str:
    """Returns the text with *** in place of the users and passwords of its URLs, and of the query values of web
    addresses. In other URLs, only values that are named like secrets are replaced, because an S3 key may contain a
    question mark."""
    if ":/" not in text:
        return text
    return _URL.sub(_without, _PASSWORD.sub(f"://{_HIDDEN}@", text))


def _without(url: re.Match[str]) -> str:
    is_web = url[1].lower() in ("http", "https")
    first, *others = _SIGNS.split(_USER.sub(rf"\1{_HIDDEN}@", url[2]))
    for place in range(1, len(others), 2):
        name, equals, value = _divided(others[place])
        if value and (is_web or is_secret_field(name)):
            others[place] = f"{name}{equals}{_HIDDEN}"
    return url[1] + "".join((first, *others))


def _divided(field: str) -> tuple[str, str, str]:
    return field.partition("=")
