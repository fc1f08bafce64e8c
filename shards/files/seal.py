"""JSON with a digest of itself: its last field, `digest`, is the sha256 of all bytes before that field. Pure.

A single changed bit anywhere is found before anything in the JSON counts.
"""

import hashlib

_BEFORE, _AFTER = b', "digest": "', b'"}\n'


def sealed(text: bytes) -> bytes:
    """The text of a JSON object, with its digest added."""
    body = text.rstrip().removesuffix(b"}").rstrip()
    return body + _BEFORE + _digest(body) + _AFTER


def unsealed(data: bytes) -> bytes:
    """The text without its digest. ValueError if the digest is missing, or is not that of the text."""
    body, mark, rest = data.rpartition(_BEFORE)
    if not mark:
        raise ValueError("it does not end with its digest")
    if rest != _digest(body) + _AFTER:
        raise ValueError("its digest does not fit: it was changed after it was written")
    return body + b"}"


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
