"""Reads the format, size and orientation of an image from its header, without decoding pixels.

JPEG, PNG and WebP are parsed here, not by Pillow, since every image of a collection is parsed: a JPEG takes 7
microseconds, a third of Pillow's time. These parsers also check that the file is complete, since truncation is the most
common damage in collections. Other formats are rare, and can only be packed as re-encoded copies. Pillow opens them,
and a truncated TIFF or BMP is found when it is decoded.

The JPEG parser reads markers (ITU-T T.81, annex B). Like libjpeg, it skips fill bytes and bytes between segments, and
treats an unknown marker as damage. The parsers of PNG and WebP read the names and lengths of chunks.
"""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from shards.errors import ImageRefusedError, InvalidDataError
from shards.files.local_files import at_home, open_local_file
from shards.images.config import (
    DEFAULT_LIMITS,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    PACKED_FORMATS,
    WIDEST_LIMITS,
    ImageLimits,
)
from shards.images.decoding_cost import gif_blocks, gif_palette_bytes, refuse_costly, webp_size
from shards.orientation import EXIF_PREFIX, TAG, TURNS, UPRIGHT, orientation_of

# Pillow's mode for (bits, colour type). Pillow reads 16-bit colours as 8-bit.
_PNG_MODES = {
    (1, 0): "1",
    **dict.fromkeys([(2, 0), (4, 0), (8, 0)], "L"),
    (16, 0): "I;16",
    **dict.fromkeys([(8, 2), (16, 2)], "RGB"),
    **dict.fromkeys([(1, 3), (2, 3), (4, 3), (8, 3)], "P"),
    (8, 4): "LA",
    **dict.fromkeys([(16, 4), (8, 6), (16, 6)], "RGBA"),
}
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_HEADER = struct.Struct(">I4sIIBBBBBI")
_WEBP_CHUNK = struct.Struct("<4sI")
_WEBP_HAS_ALPHA = 0x10
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)  # skips fill bytes and bytes between segments
_START, _END, _SCAN, _APP1 = 0xD8, 0xD9, 0xDA, 0xE1
_RESTARTS = bytes(range(0xD0, 0xD8))  # restart markers, which have no length and do not matter here
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended and progressive, Huffman-coded
_OTHER_FRAMES = {
    **dict.fromkeys((0xC3, 0xC7, 0xCB, 0xCF), "lossless"),
    **dict.fromkeys((0xC5, 0xC6, 0xCD, 0xCE), "hierarchical"),
    **dict.fromkeys((0xC9, 0xCA), "arithmetic-coded"),  # Pillow, browsers and GPU decoders do not read these
}
_TAKEN = _FRAMES | {_SCAN, 0xC4, 0xCC, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)}  # also tables, comments, APPn
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}  # by number of components; Pillow calls YCCK CMYK
_MAGIC = {
    "jpg": (b"\xff\xd8\xff",),
    "png": (b"\x89PNG\r\n\x1a\n",),
    "webp": (b"RIFF",),
    "gif": (b"GIF87a", b"GIF89a"),
    "tif": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),  # those with + are BigTIFF
    "bmp": (b"BM",),
}
_PILLOW_FORMATS = {"gif": "GIF", "tif": "TIFF", "bmp": "BMP"}
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # TIFF tags
_WHITE_IS_ZERO, _SIGNED = 0, 2
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_ISO_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}
# No flag changes these limits, so those on the cost of decoding are as wide as the flags of `pack` can make them.
_LIMITS = replace(WIDEST_LIMITS, max_bytes=MAX_IMAGE_BYTES, max_pixels=MAX_IMAGE_PIXELS)


@dataclass(frozen=True, kw_only=True)
class ImageHeader:
    """The properties of an image that its header gives. For an animation, they are those of its first frame or its
    canvas.

    `height`, `width`: the size as stored, before the image is turned. `orientation`: the EXIF orientation (1: upright).
    `ext`: jpg, png, webp, gif, tif or bmp. `mode`: Pillow's name for the stored pixels: 1, L, LA, I;16, P, RGB, RGBA,
    or CMYK (also for YCCK).
    """

    ext: str
    height: int
    width: int
    mode: str
    orientation: int


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """An encoded image. Height and width are in pixels as stored, before `orientation` (EXIF's, 1 to 8) is applied."""

    data: bytes
    height: int
    width: int
    orientation: int


def read_header(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> ImageHeader:
    """Reads the header of an image in one of the six formats. Raises ImageRefusedError, with the reason, for anything
    else."""
    if not data:
        raise ImageRefusedError("empty file")
    if len(data) > limits.max_bytes:
        raise ImageRefusedError(f"too large: {len(data)} bytes, allowed: {limits.max_bytes}")
    ext = _format(data)
    refuse_costly(data, limits)  # before any parser walks through millions of segments
    if ext == "jpg":
        height, width, mode, orientation = jpeg_facts(data)
    elif ext == "png":
        height, width, mode, orientation = png_facts(data)
    elif ext == "webp":
        height, width, mode, orientation = webp_facts(data)
    else:
        height, width, mode, orientation = _ask_pillow(data, ext)
    if height < 1 or width < 1:
        raise ImageRefusedError(f"no pixels: {height}x{width}")
    if height * width > limits.max_pixels:
        raise ImageRefusedError(f"too large: {height}x{width} pixels, allowed: {limits.max_pixels} in all")
    return ImageHeader(ext=ext, height=height, width=width, mode=mode, orientation=orientation)


def read_image_file(path: Path) -> ImageFile:
    """Reads the JPEG, PNG or WebP file at `path`, without decoding it. Raises ImageRefusedError, with the reason, if it
    is missing, unreadable, truncated, of another format or above the limits."""
    try:
        with open_local_file(at_home(str(path))) as file:
            data = file.read(_LIMITS.max_bytes + 1)
    except IsADirectoryError:
        raise ImageRefusedError("it is a folder; give the images in it") from None
    except OSError as error:
        raise ImageRefusedError(f"it cannot be read: {error.strerror}") from error
    except InvalidDataError as error:  # the path is a pipe or a device, or has a null byte
        raise ImageRefusedError(str(error)) from error
    header = read_header(data, _LIMITS)
    if header.ext not in PACKED_FORMATS:
        raise ImageRefusedError(f"it is in the format {header.ext}; allowed: JPEG, PNG and WebP: convert it")
    return ImageFile(data=data, height=header.height, width=header.width, orientation=header.orientation)


def refusal_of(error: Exception) -> ImageRefusedError:
    """Returns the error to raise instead of an error from Pillow. Its message is one line, and the same in every
    process."""
    if isinstance(error, UnidentifiedImageError):  # its own message contains a memory address
        return ImageRefusedError("damaged or truncated image header")
    text = _ADDRESS.sub("", " ".join(str(error).split()))[:200]
    return ImageRefusedError(f"damaged image: {type(error).__name__}: {text}")


def upright(image: Image.Image, header: ImageHeader) -> Image.Image:
    """Turns the loaded image upright. Pillow itself turns a TIFF, but no other format, when it loads one."""
    how = None if header.ext == "tif" else TURNS[header.orientation].transpose
    return image if how is None else image.transpose(how)


def _format(data: bytes) -> str:
    for ext, magic in _MAGIC.items():
        if data.startswith(magic):
            return ext
    if data[4:8] == b"ftyp" and (name := _ISO_BRANDS.get(data[8:12])):
        raise ImageRefusedError(f"{name} is not read here; convert it to JPEG or PNG first")
    raise ImageRefusedError("not a JPEG, PNG, WebP, GIF, TIFF or BMP image")


def _ask_pillow(data: bytes, ext: str) -> tuple[int, int, str, int]:
    if ext == "gif":
        check_first_gif_frame(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about damaged tags, and about sizes, which the caller checks
            with Image.open(io.BytesIO(data), formats=(_PILLOW_FORMATS[ext],)) as image:
                height, width, mode = image.height, image.width, image.mode
                found = image.getexif().get(TAG) if ext == "tif" else UPRIGHT
                misread = _misread_tiff(image) if ext == "tif" else ""
    except Image.DecompressionBombError as error:
        raise ImageRefusedError(f"too large: {error}") from error
    except MemoryError:  # this concerns the machine, not the image
        raise
    except Exception as error:  # Pillow's parsers raise nearly any exception for damage
        raise refusal_of(error) from error
    if misread:
        raise ImageRefusedError(f"a TIFF with {misread}, which is not read correctly here; convert it to PNG first")
    orientation = found if isinstance(found, int) and found in TURNS else UPRIGHT
    if ext == "tif" and TURNS[orientation].is_exchanged:  # only for TIFF, Pillow returns the size after rotation
        height, width = width, height
    return height, width, mode, orientation


def _misread_tiff(image: Image.Image) -> str:
    """Returns a text that says which of a TIFF's pixels Pillow 13.0.0 would decode wrongly without an error; empty if
    there are none."""
    tags = getattr(image, "tag_v2", {})
    bits, formats = tags.get(_BITS, (1,)), tags.get(_SAMPLE_FORMAT, (1,))
    if image.mode.startswith("I;16") and bits[0] != 16:
        return f"grey pixels of {bits[0]} bits"  # Pillow does not scale them: white is 4,095 of 65,535
    if image.mode.startswith("I;16") and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        return "grey pixels of 16 bits in which 0 is white"  # Pillow does not invert them
    if bits[0] == 8 and formats[0] == _SIGNED:
        return "pixels of 8 bits with a sign"  # Pillow takes them for 0 to 255
    return ""


def jpeg_facts(data: bytes) -> tuple[int, int, str, int]:
    """Returns the height and the width as stored, the mode and the EXIF orientation. Raises ImageRefusedError, with the
    reason, for a file that is damaged or cannot be used."""
    frame: tuple[int, int, str] | None = None
    exif: list[bytes] = []
    position = 2
    while True:
        marker, position, following = _segment(data, position)
        if marker == _SCAN:
            break
        if marker in _FRAMES:
            if frame:
                raise ImageRefusedError("damaged JPEG header: two frames")
            frame = _frame(data[position:following])
        elif marker == _APP1 and data.startswith(EXIF_PREFIX, position):
            exif.append(data[position + len(EXIF_PREFIX) : following])
        position = following
    if frame is None:
        raise ImageRefusedError("damaged JPEG header: no frame before the first scan")
    # Within a scan, 0xFF is followed by 0 or a restart, so only a real end is found. The backward search is fast if the
    # image is complete. An embedded thumbnail ends before the scan.
    if data.rfind(b"\xff\xd9", following) < 0:
        raise ImageRefusedError(f"truncated: a JPEG without its end, {len(data)} bytes")
    return (*frame, _orientation(exif) if exif else 1)


def _segment(data: bytes, position: int) -> tuple[int, int, int]:
    """Returns the next segment: its marker, and the offsets at which its contents begin and end."""
    marker = _RESTARTS[0]
    while marker in _RESTARTS:
        found = _NEXT_MARKER.search(data, position)
        if found is None:
            raise ImageRefusedError("truncated: ends within the JPEG header")
        position = found.end()
        marker = data[position - 1]
    if marker not in _TAKEN:
        raise _refusal_of_marker(marker)
    following = position + int.from_bytes(data[position : position + 2], "big")
    if following > len(data) or position + 2 > len(data):
        raise ImageRefusedError("truncated: ends within the JPEG header")
    if following < position + 2:
        raise ImageRefusedError("damaged JPEG header: a segment of no length")
    return marker, position + 2, following


def _frame(contents: bytes) -> tuple[int, int, str]:
    """Returns height, width and mode from the contents of a frame's segment."""
    if len(contents) < 6 or len(contents) != 6 + 3 * contents[5]:
        raise ImageRefusedError("damaged JPEG header: frame of a wrong length")
    bits, num_components = contents[0], contents[5]
    if bits != 8 or num_components not in _MODES:
        raise ImageRefusedError(f"JPEG with {num_components} components of {bits} bits; allowed: 1, 3 or 4 of 8 bits")
    height, width = int.from_bytes(contents[1:3], "big"), int.from_bytes(contents[3:5], "big")
    if not height and width:
        raise ImageRefusedError("JPEG whose height follows its first scan (DNL), which decoders do not read")
    return height, width, _MODES[num_components]


def _orientation(exif: Iterable[bytes]) -> int:
    """Returns the orientation from all EXIF segments, since a block of more than 64 KiB is split over several."""
    return orientation_of(b"".join(exif).removeprefix(EXIF_PREFIX))


def png_facts(data: bytes) -> tuple[int, int, str, int]:
    """Returns the height and the width as stored, the mode and the EXIF orientation. Raises ImageRefusedError, with the
    reason, for a file that is damaged or cannot be used."""
    try:
        length, name, width, height, bits, colour, *_, checksum = _PNG_HEADER.unpack_from(data, 8)
    except struct.error:
        raise ImageRefusedError("truncated: ends within the PNG header") from None
    mode = _PNG_MODES.get((bits, colour))
    if length != 13 or name != b"IHDR" or zlib.crc32(data[12:29]) != checksum or mode is None:
        raise ImageRefusedError("damaged PNG header")
    position, has_pixels, exif = 33, False, b""
    while name != b"IEND":
        try:
            length, name = _PNG_CHUNK.unpack_from(data, position)
        except struct.error:
            raise ImageRefusedError(f"truncated: a PNG without its end, {len(data)} bytes") from None
        contents = position + 8
        position = contents + length + 4
        if not name.isalpha():
            raise ImageRefusedError("damaged PNG: a chunk without a name")
        if name == b"IDAT":
            has_pixels = True
        elif name == b"eXIf":
            exif = data[contents : contents + length]
    if position > len(data):
        raise ImageRefusedError(f"truncated: a PNG without its end, {len(data)} bytes")
    if not has_pixels:
        raise ImageRefusedError("PNG without pixels")
    return height, width, mode, orientation_of(exif)


def webp_facts(data: bytes) -> tuple[int, int, str, int]:
    """Returns the height and the width as stored, the mode and the EXIF orientation. Raises ImageRefusedError, with the
    reason, for a file that is damaged or cannot be used."""
    if len(data) < 30:
        raise ImageRefusedError("truncated: ends within the WebP header")
    if data[8:12] != b"WEBP":
        raise ImageRefusedError("RIFF file that is not WebP")
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise ImageRefusedError(f"truncated: {len(data)} bytes of {end}")
    name = data[12:16]
    if name == b"VP8X":
        return _extended_webp(data, end)
    if name == b"VP8L":
        return (*webp_size(data), _lossless_mode(data, 20), 1)
    # The chunk must be a key frame with its start code (RFC 6386, section 9.1).
    if name != b"VP8 " or data[20] & 1 or data[23:26] != b"\x9d\x01\x2a":
        raise ImageRefusedError("damaged WebP header")
    return (*webp_size(data), "RGB", 1)


def _lossless_mode(data: bytes, position: int) -> str:
    """Returns the mode from the contents of a VP8L chunk at `position`."""
    if data[position : position + 1] != b"\x2f" or position + 5 > len(data):
        raise ImageRefusedError("damaged WebP header")
    (bits,) = struct.unpack_from("<I", data, position + 1)
    return "RGBA" if bits >> 28 & 1 else "RGB"


def _extended_webp(data: bytes, end: int) -> tuple[int, int, str, int]:
    """Reads the extended format, which animations, transparency and metadata need."""
    mode = "RGBA" if data[20] & _WEBP_HAS_ALPHA else "RGB"
    height, width = webp_size(data)
    position, has_pixels, exif = 30, False, b""
    while position + 8 <= end:
        name, length = _WEBP_CHUNK.unpack_from(data, position)
        contents = position + 8
        position = contents + length + length % 2
        if contents + length > end:
            raise ImageRefusedError("damaged WebP: a chunk beyond its end")
        if name == b"VP8L":
            mode = _lossless_mode(data, contents)
        has_pixels = has_pixels or name in {b"VP8 ", b"VP8L", b"ANMF"}
        if name == b"EXIF":
            exif = data[contents : contents + length].removeprefix(EXIF_PREFIX)
    if not has_pixels:
        raise ImageRefusedError("WebP without pixels")
    return height, width, mode, orientation_of(exif)


def check_first_gif_frame(data: bytes) -> None:
    """Raises ImageRefusedError unless the first image is complete. The trailer after the last image is not required,
    since many GIFs have none."""
    try:
        *_, position = gif_blocks(data)
        if data[position] != 0x2C:
            raise ImageRefusedError("damaged GIF: no image in it")
        _after_gif_blocks(data, position + 11 + gif_palette_bytes(data[position + 9]))
    except IndexError:
        raise ImageRefusedError(f"truncated: a GIF that ends within its first image, {len(data)} bytes") from None


def _after_gif_blocks(data: bytes, position: int) -> int:
    """Returns the offset at which a chain of blocks ends. Each block begins with its length, and the last is empty."""
    while length := data[position]:
        position += 1 + length
    return position + 1


def _refusal_of_marker(marker: int) -> ImageRefusedError:
    if marker in _OTHER_FRAMES:
        return ImageRefusedError(f"{_OTHER_FRAMES[marker]} JPEG, which the decoders do not read")
    names = {_END: "it ends before its first scan", _START: "two starts"}
    return ImageRefusedError(f"damaged JPEG header: {names.get(marker, f'unknown marker 0x{marker:02x}')}")
