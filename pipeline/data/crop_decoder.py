"""The optional library of crop_decoder.c: JPEG bytes straight to the resized crop.

It decodes only the rows and columns that the crop needs, and leaves everything unusual to the decoders that are always
available. nvImageCodec can decode regions without a GPU too, but it is slower (740 images/s per core against 840),
larger (80 MB against 40 kB), and gives other pixels.
"""

import ctypes
import hashlib
from pathlib import Path

import numpy as np

from pipeline.data.decode import Pixels
from pipeline.data.view_plan import ViewPlan

LIBRARY_NAME = "libcrop_decoder.so"  # made by hatch_build.py, beside this file
SOURCES = ("crop_decoder.c", "view_resize.c", "view_resize.h")  # as in hatch_build.py; a wheel has them, too
_INTERFACE = 1  # of crop_decoder.c


class _Request(ctypes.Structure):
    """struct request of crop_decoder.c, the target's fields after its own."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            *("stored_height", "stored_width", "denominator"),
            *("top", "left", "height", "width"),
            *("is_exchanged", "is_upside_down", "is_leftright", "is_antialiased"),
            *("resized_height", "resized_width", "window_top", "window_left", "window_height", "window_width"),
            "is_mirrored",
        )
    )


def sources_digest(folder: Path) -> str:
    """The SHA-256 of the library's sources, one after the other: what hatch_build.py compiles into it."""
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in SOURCES)).hexdigest()


class CropDecoder:
    """Raises OSError if the library cannot be loaded, ValueError if it was not made from the sources beside it."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        try:
            interface, request_bytes = library.crop_decoder_interface, library.crop_decoder_request_bytes
            self._view, name = library.crop_decoder_view, library.crop_decoder_library
            sources = library.crop_decoder_sources
        except AttributeError as error:
            raise ValueError(f"{path} is another library or an old one: {error}") from error
        sources.restype = name.restype = ctypes.c_char_p
        if sources().decode() != sources_digest(path.parent):
            raise ValueError(f"{path} is made of other sources than the {', '.join(SOURCES)} beside it")
        interface.restype = request_bytes.restype = self._view.restype = ctypes.c_int32
        if (interface(), request_bytes()) != (_INTERFACE, ctypes.sizeof(_Request)):
            raise ValueError(f"{path} is of version {interface()}, this code of version {_INTERFACE}")
        self.name = str(name().decode())  # for example libjpeg-turbo 2.1.5
        self._view.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(_Request), ctypes.c_void_p)

    def fill(self, data: bytes | memoryview, plan: ViewPlan, *, out: Pixels) -> bool:
        """The planned view of a JPEG into `out`, uint8[height, width, 3].

        False, with anything in `out`, if the other decoder must try: damage, another size, a rare kind of JPEG, and
        what the library does not know: the area and bicubic filters, and reflected edges.
        Releases the interpreter lock; any number of threads may call it at once.
        """
        box, turn, viewport, (height, width) = plan.box, plan.turn, plan.viewport, out.shape[:2]
        if out.dtype != np.uint8 or out.shape[2:] != (3,) or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"out is {out.dtype}{list(out.shape)}; needed is a contiguous uint8[height, width, 3]")
        if viewport.is_area or viewport.is_bicubic or viewport.num_reflected:
            return False
        if not (0 <= viewport.top <= viewport.height - height and 0 <= viewport.left <= viewport.width - width):
            raise ValueError(f"{height} x {width} pixels are not inside of {viewport}")
        encoded = np.frombuffer(data, dtype=np.uint8)
        request = _Request(
            *(plan.stored_height, plan.stored_width, plan.denominator),
            *(box.top, box.left, box.height, box.width),
            *(turn.is_exchanged, turn.is_upside_down, turn.is_leftright, viewport.is_antialiased),
            *(viewport.height, viewport.width, viewport.top, viewport.left, height, width),
            viewport.is_mirrored,
        )
        return bool(self._view(encoded.ctypes.data, encoded.size, ctypes.byref(request), out.ctypes.data))
