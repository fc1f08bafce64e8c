"""Flattening: an image becomes 8 bits a channel without transparency, and what was transparent lies on white.

Packing, `verify`, training, evaluation and predictions all come through here, so that the same image gives the same
pixels by every way. Of an animation, the first image of the file counts: of an APNG its default image.
"""

import numpy as np
from PIL import Image

_GREY = frozenset(("1", "L", "LA", "La", "I;16", "I;16L", "I;16B", "I;16N"))
_BACKGROUND = "white"
_BAND_PIXELS = 1 << 22
_MOST_16_BIT = 65_535
_STEPS = {"L;2": 85, "L;4": 17}  # Pillow scales grey pixels of 2 and 4 bits to 8, but not the transparent value


def flattened(image: Image.Image) -> Image.Image:
    """Returns the image as L if it is grey, else as RGB. An image that is L or RGB and opaque is returned as it is.

    Grey of 16 bits is scaled; colours of 16 bits keep their higher byte, as Pillow decodes them. It works band by band,
    so that the largest images are not in memory four times. It raises what Pillow's decoders raise for damage: nearly
    any of Python's exceptions.
    """
    if isinstance(image.info.get("transparency"), str):  # a PNG's text of that name, not its transparent value
        del image.info["transparency"]
    _scale_transparent_value(image)
    image.load()
    mode = "L" if image.mode in _GREY else "RGB"
    if image.mode == mode and not image.has_transparency_data:
        return image
    flat = Image.new(mode, image.size)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        flat.paste(_opaque(band).convert(mode), (0, top))
    flat.info = {name: value for name, value in image.info.items() if name != "transparency"}  # EXIF stays
    return flat


def _scale_transparent_value(image: Image.Image) -> None:
    """Brings a PNG's transparent value to the 8 bits of the pixels. Pillow leaves it as it is in the file."""
    tiles = getattr(image, "tile", None)
    if not tiles:  # pixels that are decoded already do not say how many bits they had
        return
    value, bits = image.info.get("transparency"), tiles[0].args
    if isinstance(value, int) and bits in _STEPS:
        image.info["transparency"] = value * _STEPS[bits]
    elif isinstance(value, tuple) and bits == "RGB;16B":
        image.info["transparency"] = tuple(part >> 8 for part in value)


def _opaque(band: Image.Image) -> Image.Image:
    if band.mode.startswith("I;16"):
        pixels = np.asarray(band).astype(np.uint32)
        if band.has_transparency_data:
            pixels[pixels == band.info["transparency"]] = _MOST_16_BIT
        return Image.fromarray(((pixels * 255 + _MOST_16_BIT // 2) // _MOST_16_BIT).astype(np.uint8))
    if not band.has_transparency_data:
        return band
    colours = band.convert("LA").convert("RGBA") if band.mode == "La" else band.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colours.size, _BACKGROUND), colours)
