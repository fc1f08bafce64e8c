"""The optional library of crop_decoder.c and sample_views.c, which turns JPEG bytes directly into the augmented view.
`fill_all` makes the views of a chunk of a batch in one call, without the interpreter lock; it checks the bytes, draws
the crops, decodes, resizes, mirrors and applies RandAugment. `fill` makes one view that was planned in Python.

The library decodes only the rows and columns that the crop needs, with libjpeg-turbo and a faster decoder of Huffman
codes (huffman_decoder.c). It leaves everything unusual to the decoders that are always available. Its Huffman decoder
replaces a function in a private structure of libjpeg-turbo, which is the same in versions 2.1 to 3.1. With newer
versions, libjpeg-turbo itself decodes the Huffman codes. nvImageCodec can decode regions without a GPU, too, but it
gives other pixels, is larger (80 MB against 60 kB), and was slower (740 images/s per core against 840) even before this
library had its own Huffman decoder.
"""

import ctypes
import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from pipeline.data.augment import ViewPlan
from pipeline.data.config import DataConfig
from pipeline.data.decode import Pixels

LIBRARY_NAME = "libcrop_decoder.so"  # made by hatch_build.py, beside this file
_FOR_READING = 0x100  # PyBUF_READ
_OLDEST_LIBJPEG = (2, 1)
_NEWEST_LIBJPEG = (3, 1)  # the newest version whose private structure crop_decoder.c knows
_LIBJPEG_VERSION = re.compile(rb"([\w-]+) version (\d+)\.(\d+)([\w.]*) \(build ")  # in every build since 1.5
_NAME = re.compile(r"libjpeg-turbo (\d+)\.(\d+)")
_MOST_LIBJPEG_BYTES = 64 << 20
_CROPS = {"inception": 1, "random_resized": 2}  # enum crop of sample_views.c; other crops take the whole image
_LATE_CROPS = {"resize_crop": 1, "short_side_crop": 2}  # enum late_crop
# struct sample of sample_views.h. `data` is the address of the bytes, or 0 if there are none. Height and width are as
# stored. The keys for the crop and the operations come from shards/hashing.py.
SAMPLE = np.dtype(
    [
        *((name, np.uint64) for name in ("data", "num_bytes")),
        ("sample_id", np.int64),
        *((name, np.uint64) for name in ("crop_key", "operation_key")),
        ("crc32", np.uint32),
        *((name, np.int32) for name in ("height", "width", "orientation")),
    ]
)


class _Request(ctypes.Structure):
    """struct request of crop_decoder.h, with the fields of its target at the end."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            *("stored_height", "stored_width", "denominator"),
            *("top", "left", "height", "width"),
            *("is_exchanged", "is_upside_down", "is_leftright", "is_antialiased", "leaves_huffman"),
            *("resized_height", "resized_width", "window_top", "window_left", "window_height", "window_width"),
            "is_mirrored",
        )
    )


class ViewSettings(ctypes.Structure):
    """struct settings of sample_views.h: how all samples of a run are augmented."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("min_area", "max_area", "min_ratio", "max_ratio")),
        *((name, ctypes.c_int32) for name in ("crop", "late_crop", "size", "resize_pixels", "flip", "is_antialiased")),
        *((name, ctypes.c_int32) for name in ("scaled_decode", "exif", "num_ops", "magnitude", "leaves_huffman")),
    )


class _Operation(ctypes.Structure):
    """struct operation of view_operations.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("number", "magnitude", "sign")),
        *((name, ctypes.c_double) for name in ("row", "column")),
    )


def view_settings(data: DataConfig, *, size: int, resize_pixels: int) -> ViewSettings | None:
    """Returns the settings of `fill_all` for views of size x size. Returns None for settings that the library does not
    support: the area and bicubic filters, and simple_random. `resize_pixels`: the side to which resize_crop and
    short_side_crop resize before they cut."""
    augment, randaugment = data.augment, data.randaugment
    if augment.filter != "bilinear" or augment.crop == "simple_random":
        return None
    return ViewSettings(
        min_area=augment.min_area,
        max_area=augment.max_area,
        min_ratio=augment.min_ratio,
        max_ratio=augment.max_ratio,
        crop=_CROPS.get(augment.crop, 0),
        late_crop=_LATE_CROPS.get(augment.crop, 0),
        size=size,
        resize_pixels=resize_pixels,
        flip=augment.flip,
        is_antialiased=augment.antialias,
        scaled_decode=augment.scaled_decode,
        exif=augment.exif,
        # Pillow changes colours before the operations, so if it does, Python applies the operations, too.
        num_ops=0 if augment.num_colour_draws else randaugment.num_ops,
        magnitude=randaugment.magnitude,
        leaves_huffman=data.huffman_decoder == "libjpeg-turbo",
    )


def sources_in(folder: Path) -> list[Path]:
    """Returns the library's sources: all C files in the folder, as in hatch_build.py. Wheels contain them, too."""
    return sorted(folder.glob("*.[ch]"))


class _LoadedFrom(ctypes.Structure):
    """Dl_info of dlfcn.h: the file that an address belongs to."""

    _fields_ = (
        *(("path", ctypes.c_char_p), ("base", ctypes.c_void_p)),
        *(("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)),
    )


def loaded_libjpeg(address: int) -> str:
    """Returns the name and version of the libjpeg that an address belongs to, such as "libjpeg-turbo 2.1.5". They are
    searched for in the library's file, since libjpeg has no function that returns them. Raises ValueError for another
    library, or for a version before 2.1."""
    found = _LoadedFrom()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(found)) or not found.path:
        raise ValueError("the file of the libjpeg that was loaded is unknown")
    with Path(found.path.decode(errors="surrogateescape")).open("rb") as file:
        said = _LIBJPEG_VERSION.search(file.read(_MOST_LIBJPEG_BYTES))
    if said is None:
        raise ValueError(f"{found.path!r} does not say which libjpeg it is; needed is libjpeg-turbo 2.1 or newer")
    name, major, minor, rest = (part.decode(errors="replace") for part in said.groups())
    if name != "libjpeg-turbo" or (int(major), int(minor)) < _OLDEST_LIBJPEG:
        raise ValueError(f"{name} {major}.{minor}{rest} was loaded; needed is libjpeg-turbo 2.1 or newer")
    return f"{name} {major}.{minor}{rest}"


def is_newer_than_known(name: str) -> bool:
    """Returns whether a libjpeg, such as "libjpeg-turbo 3.2.0", is newer than all versions whose private structure is
    known. A name without a version counts as newer."""
    found = _NAME.match(name)
    return found is None or (int(found[1]), int(found[2])) > _NEWEST_LIBJPEG


_SETTINGS, _REQUEST, _OPERATION = map(ctypes.POINTER, (ViewSettings, _Request, _Operation))
_ADDRESS = ctypes.c_void_p
# The return type of each function of the library, followed by the types of its arguments.
_FUNCTIONS = {
    "crop_decoder_sources": (ctypes.c_char_p,),
    "crop_decoder_headers": (ctypes.c_char_p,),
    "crop_decoder_libjpeg": (ctypes.c_size_t,),
    "crop_decoder_view": (ctypes.c_int32, _ADDRESS, ctypes.c_size_t, _REQUEST, _ADDRESS),
    "sample_views_fill": (None, _ADDRESS, ctypes.c_int32, _SETTINGS, _ADDRESS, _ADDRESS),
    "sample_views_plan": (ctypes.c_int32, _ADDRESS, _SETTINGS, _REQUEST),
    "sample_views_checks_crc32": (ctypes.c_int32,),
    "sample_views_crc32": (ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t),
    "view_operations_apply": (ctypes.c_int32, _ADDRESS, ctypes.c_int32, ctypes.c_int32, _OPERATION),
}
_MEMORY_VIEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class CropDecoder:
    """The loaded library. Raises OSError if it cannot be loaded, and ValueError if it was not built from the sources
    beside it. `leaves_huffman`: whether libjpeg-turbo decodes all Huffman codes, whatever the settings say."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        try:
            for name, (result, *arguments) in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise ValueError(f"{path} is another library or an old one: {error}") from error
        sources = sources_in(path.parent)
        digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
        if self._library.crop_decoder_sources().decode() != digest:
            named = ", ".join(source.name for source in sources)
            raise ValueError(f"{path} is made of other sources than the {named} beside it")
        address = self._library.crop_decoder_libjpeg()  # 0 if libjpeg is linked statically
        headers = self._library.crop_decoder_headers().decode()
        self.name = loaded_libjpeg(address) if address else f"libjpeg-turbo {headers}"
        self.leaves_huffman = is_newer_than_known(self.name)
        self.checks_crc32 = bool(self._library.sample_views_checks_crc32())  # False: this class checks them with ISA-L
        self._view_memory = _MEMORY_VIEW(("PyMemoryView_FromMemory", ctypes.pythonapi))

    def fill(self, data: bytes | memoryview, plan: ViewPlan, *, out: Pixels, leaves_huffman: bool = False) -> bool:
        """Fills `out`, uint8[height, width, 3], with the planned view of a JPEG, and returns whether it succeeded.
        `leaves_huffman`: whether libjpeg-turbo decodes the Huffman codes. If the result is False, the content of `out`
        is undefined, and another decoder must make the view. That happens for damage, another size, a rare kind of
        JPEG, the area and bicubic filters, values that are cut off, and reflected edges. Releases the interpreter lock;
        any number of threads may call it at once."""
        box, turn, viewport, (height, width) = plan.box, plan.turn, plan.viewport, out.shape[:2]
        if out.dtype != np.uint8 or out.shape[2:] != (3,) or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"out is {out.dtype}{list(out.shape)}; needed is a contiguous uint8[height, width, 3]")
        if viewport.is_area or viewport.is_bicubic or viewport.is_cut_off or viewport.num_reflected:
            return False
        if not (0 <= viewport.top <= viewport.height - height and 0 <= viewport.left <= viewport.width - width):
            raise ValueError(f"{height} x {width} pixels are not inside of {viewport}")
        encoded = np.frombuffer(data, dtype=np.uint8)
        request = _Request(
            *(plan.stored_height, plan.stored_width, plan.denominator),
            *(box.top, box.left, box.height, box.width),
            *(turn.is_exchanged, turn.is_upside_down, turn.is_leftright, viewport.is_antialiased),
            leaves_huffman or self.leaves_huffman,
            *(viewport.height, viewport.width, viewport.top, viewport.left, height, width),
            viewport.is_mirrored,
        )
        view = self._library.crop_decoder_view
        return bool(view(encoded.ctypes.data, encoded.size, ctypes.byref(request), out.ctypes.data))

    def fill_all(self, samples: NDArray[Any], settings: ViewSettings, *, out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Fills `out`, uint8[n, size, size, 3], with the views of `samples`, SAMPLE[n]. Returns bool[n]: which views
        are done. The content of the other views is undefined: `fill` would refuse them, or their samples have no bytes
        or another CRC-32 than in the index. The caller must keep the bytes in memory until the call returns. Releases
        the interpreter lock; any number of threads may call it at once."""
        shape = (samples.size, settings.size, settings.size, 3)
        if samples.dtype != SAMPLE or samples.ndim != 1 or not samples.flags.c_contiguous:
            raise ValueError(f"samples is {samples.dtype}{list(samples.shape)}; needed is a contiguous SAMPLE[n]")
        if out.dtype != np.uint8 or out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"out is {out.dtype}{list(out.shape)}; needed is a contiguous uint8{list(shape)}")
        if not self.checks_crc32:
            samples = samples.copy()
            columns = (samples[name].tolist() for name in ("data", "num_bytes", "crc32"))
            samples["data"][[not self._is_whole(*row) for row in zip(*columns, strict=True)]] = 0
        if self.leaves_huffman:
            settings = ViewSettings.from_buffer_copy(settings)
            settings.leaves_huffman = True
        are_done = np.zeros(samples.size, dtype=np.bool_)
        fill = self._library.sample_views_fill
        fill(samples.ctypes.data, samples.size, ctypes.byref(settings), out.ctypes.data, are_done.ctypes.data)
        return are_done

    def _is_whole(self, address: int, num_bytes: int, expected: int) -> bool:
        """Returns whether the sample has bytes, and their CRC-32 is the expected one."""
        return address != 0 and crc32(self._view_memory(address, num_bytes, _FOR_READING)) == expected

    def crc32(self, data: bytes) -> int:
        """Returns the CRC-32 of the data, as zlib computes it."""
        return int(self._library.sample_views_crc32(data, len(data)))

    def plan(self, sample: NDArray[Any], settings: ViewSettings) -> dict[str, int] | None:
        """Returns the fields of the struct request that `fill_all` makes for a sample, SAMPLE[1]. Returns None if the
        library leaves the sample to other decoders."""
        request = _Request()
        is_planned = self._library.sample_views_plan(sample.ctypes.data, ctypes.byref(settings), ctypes.byref(request))
        return {name: getattr(request, name) for name, *_ in _Request._fields_} if is_planned else None

    def operate(
        self, pixels: Pixels, number: int, *, magnitude: int, sign: int, centre: tuple[float, float]
    ) -> Pixels | None:
        """Returns a copy of the pixels, uint8[height, width, 3], after operation `number` of OPERATIONS
        (randaugment.py). Returns None if the library cannot apply it."""
        result = np.array(pixels, dtype=np.uint8, order="C")
        operation = _Operation(number=number, magnitude=magnitude, sign=sign, row=centre[0], column=centre[1])
        apply = self._library.view_operations_apply
        is_done = apply(result.ctypes.data, *result.shape[:2], ctypes.byref(operation))
        return result if is_done else None
