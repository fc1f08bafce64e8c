"""Removes colour profiles from PNGs before OpenCV decodes them.

No decoder here applies them. But libpng checks them and repeats the profile's name, which is the image's to choose, in
warnings that it writes to the file descriptor of standard error itself, past everything that escapes control characters
(libpng 1.6.58, `png_icc_profile_error`).
"""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PROFILE, _PIXELS = b"iCCP", b"IDAT"
_LENGTH_BYTES, _KIND_BYTES, _CRC_BYTES = 4, 4, 4


def without_profile(data: bytes | memoryview) -> bytes | memoryview:
    """The same image without profiles; data that is no PNG, or has none, as it is. libpng ignores those after the first
    pixels."""
    if data[: len(_SIGNATURE)] != _SIGNATURE:
        return data
    kept, begin, at = [], 0, len(_SIGNATURE)
    while at + _LENGTH_BYTES + _KIND_BYTES <= len(data):
        content = at + _LENGTH_BYTES + _KIND_BYTES
        kind = bytes(data[content - _KIND_BYTES : content])
        end = content + int.from_bytes(data[at : at + _LENGTH_BYTES], "big") + _CRC_BYTES
        if kind == _PIXELS:
            break
        if kind == _PROFILE:
            kept.append(data[begin:at])
            begin = end
        at = end
    return b"".join([*kept, data[begin:]]) if kept else data
