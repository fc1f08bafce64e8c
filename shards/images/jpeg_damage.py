"""JPEGs of which a part is missing: zeroed by a bad disk, or cut and closed with an end mark.

Pillow, like most decoders, fills what is missing with grey or noise and says nothing.
"""

import re

import simplejpeg

_JPEG = b"\xff\xd8\xff"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)  # restarts have no length, and may be millions
_END, _SCAN, _PROGRESSIVE = 0xD9, 0xDA, 0xC2
_COEFFICIENTS = 64
_LOST = ("Corrupt JPEG data", "Premature end of JPEG file")


def jpeg_damage(data: bytes | memoryview) -> str:
    """Returns what a strict decoder says of a JPEG with missing parts; "" for a sound one, or another format.

    It decodes an eighth of the size in grey, which reads every coded coefficient in less time than a whole decode.
    libjpeg also warns of oddities that change no pixel; only its words for lost data count.
    """
    if data[:3] != _JPEG:
        return ""
    try:
        simplejpeg.decode_jpeg(data, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
    except Exception as error:  # a ValueError, but for what it does not expect
        reason = " ".join(str(error).split())
        return reason if reason.startswith(_LOST) else ""
    try:
        return "scans of a progressive JPEG are missing" if _lacks_scans(data) else ""
    except (IndexError, KeyError, ValueError):  # what the decoder took is no reason to stop
        return ""


def _lacks_scans(data: bytes | memoryview) -> bool:
    """Whether the scans of a progressive JPEG leave a coefficient out, or not at its full precision (ITU-T T.81, annex
    G): of a file that was cut between two scans, a decoder notices nothing. False for a baseline JPEG."""
    missing_bits: dict[int, list[int]] = {}  # by component, of each coefficient; 16: it has no scan yet
    position = 2
    while found := _MARKER.search(data, position):
        marker, body = data[found.end() - 1], found.end() + 2
        if marker == _END:
            break
        position = body - 2 + int.from_bytes(data[body - 2 : body], "big")
        if marker == _PROGRESSIVE:
            missing_bits = {data[body + 6 + 3 * place]: [16] * _COEFFICIENTS for place in range(data[body + 5])}
        elif marker == _SCAN and not missing_bits:
            break
        elif marker == _SCAN:
            num_components = data[body]
            first, last, bits = data[body + 1 + 2 * num_components : body + 4 + 2 * num_components]
            for component in data[body + 1 : body + 1 + 2 * num_components : 2]:
                missing_bits[component][first : last + 1] = [bits & 0xF] * (last + 1 - first)
    return any(any(bits) for bits in missing_bits.values())
