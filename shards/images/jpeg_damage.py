"""JPEGs of which a part is missing: zeroed by a bad disk, or cut and closed with an end mark.

Pillow, like most decoders, fills what is missing with grey or noise and says nothing.
"""

import simplejpeg

_JPEG = b"\xff\xd8\xff"
_LOST = ("Corrupt JPEG data", "Premature end of JPEG file")


def jpeg_damage(data: bytes | memoryview) -> str:
    """Returns what a strict decoder says of a JPEG with missing parts; "" for a sound one, or another format.

    It decodes an eighth of the size in grey, which reads every coded coefficient: 0.75 CPU-milliseconds for a
    photograph of 0.1 MB, two thirds of a whole decode. libjpeg also warns of oddities that change no pixel; only its
    words for lost data count.
    """
    if data[:3] != _JPEG:
        return ""
    try:
        simplejpeg.decode_jpeg(data, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        reason = " ".join(str(error).split())
        return reason if reason.startswith(_LOST) else ""
    return ""
