"""Turns a sample's bytes into its training or evaluation view. It decodes no more than the view needs.

There are two paths to a view: the library of crop_decoder.py, if it was built, and simplejpeg with OpenCV or Pillow.
They give the same pixels and refuse the same images, so a run that began with one can continue with the other. That is
checked when the library is loaded. In training, the library makes the views of a chunk of a batch at once
(`train_views`). Views that it leaves out are made by `train_view`.
"""

import hashlib
import logging
import zlib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from pipeline.data.augment import (
    Crop,
    ViewPlan,
    Viewport,
    draw_crop,
    evaluation_viewport,
    largest_denominator,
    plan_view,
    training_viewport,
)
from pipeline.data.config import AugmentConfig
from pipeline.data.crop_decoder import LIBRARY_NAME, CropDecoder, ViewSettings
from pipeline.data.decode import DecodeError, Pixels, decode_stored, is_jpeg, turn_of, turned
from pipeline.data.randaugment import OPERATIONS, Strength
from pipeline.data.window_resize import show
from pipeline.shared_settings import EvaluationTransform
from shards.images.config import DEFAULT_LIMITS, ImageLimits
from shards.orientation import UPRIGHT, Turn

_LOG = logging.getLogger(__name__)
_TRIAL_SIZE = (75, 101)


class Encoded(Protocol):
    """An image as stored in the shards. Height and width are as stored, before the orientation (1 to 8) is applied.
    `data` is None if the bytes could not be read; making a view of it raises DecodeError."""

    @property
    def data(self) -> bytes | memoryview | None: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def orientation(self) -> int: ...


def training_plan(sample: Encoded, draws: NDArray[np.float64], *, config: AugmentConfig, size: int) -> ViewPlan:
    """Returns the plan for the crop that the sample's draws choose, shown as size x size pixels."""
    turn = _turn(sample, exif=config.exif)
    height, width = _seen_size(sample, turn)
    crop = draw_crop(height, width, draws, config=config)
    viewport = training_viewport(crop, draws, config=config, size=size)
    may_scale = config.scaled_decode and sample.data is not None and is_jpeg(sample.data)
    denominator = largest_denominator(crop, height=viewport.height, width=viewport.width) if may_scale else 1
    return plan_view((sample.height, sample.width), turn, crop, viewport, denominator=denominator)


def train_view(
    sample: Encoded,
    draws: NDArray[np.float64],
    *,
    config: AugmentConfig,
    out: Pixels,
    limits: ImageLimits = DEFAULT_LIMITS,
    use_library: bool = False,
) -> None:
    """Writes the crop that the sample's draws choose into `out`, uint8[size, size, 3]. Raises DecodeError if the image
    is damaged, or if decoding it would cost more than `limits` allow. `use_library`: whether to try the library, which
    `train_views` has done before it leaves a sample out."""
    plan = training_plan(sample, draws, config=config, size=out.shape[0])
    decoder = crop_decoder() if use_library else None
    if decoder is None or sample.data is None or not decoder.fill(sample.data, plan, out=out):
        _fill_from_all(sample.data, plan, out=out, limits=limits)


def train_views(samples: NDArray[Any], settings: ViewSettings | None, *, out: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Makes the views of a chunk of a batch with the library (CropDecoder.fill_all). Returns bool[n]: which views are
    done; none are without the library or without settings. They include RandAugment, but not 3-Augment or the colour
    jitter. If one of these two is on, they do not include RandAugment either, since it comes later."""
    decoder = crop_decoder() if settings else None
    if decoder is None or settings is None:
        return np.zeros(samples.size, dtype=np.bool_)
    return decoder.fill_all(samples, settings, out=out)


def evaluation_view(
    sample: Encoded,
    transform: EvaluationTransform,
    *,
    out: Pixels,
    use_library: bool = True,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> None:
    """Writes the evaluation view of a sample into `out`, uint8[size, size, 3]. JPEGs are decoded at their full size.
    Raises DecodeError, as `train_view` does."""
    turn = _turn(sample, exif=transform.exif)
    whole = _without_border(*_seen_size(sample, turn), border=transform.border)
    viewport = evaluation_viewport(whole.height, whole.width, transform, size=out.shape[0])
    plan = plan_view((sample.height, sample.width), turn, whole, viewport, denominator=1)
    decoder = crop_decoder() if use_library else None
    if decoder is None or sample.data is None or not decoder.fill(sample.data, plan, out=out):
        _fill_from_all(sample.data, plan, out=out, limits=limits)


def evaluation_view_of_pixels(pixels: Pixels, transform: EvaluationTransform, *, out: Pixels) -> None:
    """Writes the evaluation view of a decoded, upright image, uint8[height, width, 3], into `out`."""
    whole = _without_border(pixels.shape[0], pixels.shape[1], border=transform.border)
    inner = pixels[whole.top : whole.top + whole.height, whole.left : whole.left + whole.width]
    show(inner, evaluation_viewport(whole.height, whole.width, transform, size=out.shape[0]), out=out)


def _without_border(height: int, width: int, *, border: int) -> Crop:
    """Returns the crop that is the image without its border. Raises DecodeError if nothing is left."""
    if min(height, width) <= 2 * border:
        raise DecodeError(f"nothing of {height} x {width} pixels is left without a border of {border}")
    return Crop(top=border, left=border, height=height - 2 * border, width=width - 2 * border, flip=False)


def decoder_name() -> str:
    """Returns, for logs, what decodes JPEGs: the crop decoder with its libjpeg-turbo, or simplejpeg."""
    decoder = crop_decoder()
    if decoder is None:
        return "simplejpeg"
    return f"crop decoder ({decoder.name}{', which also decodes the Huffman codes' if decoder.leaves_huffman else ''})"


def crop_decoder() -> CropDecoder | None:
    """Returns the library, or None if it was not built or does not give the right pixels on this machine."""
    return _own_decoder()[0]


def why_no_crop_decoder() -> str:
    """Returns why `crop_decoder` returns None: the library was not built, or it is refused. Empty if it is used."""
    return _own_decoder()[1]


@cache
def _own_decoder() -> tuple[CropDecoder | None, str]:
    path = Path(__file__).parent / LIBRARY_NAME
    if not path.exists():
        return None, "the faster crop decoder was not built"
    decoder, reason = checked_decoder(path)
    if reason:
        _LOG.warning("the crop decoder is not used, but simplejpeg: %s", reason)
    return decoder, f"the crop decoder that was built is refused: {reason}" if reason else ""


def checked_decoder(path: Path) -> tuple[CropDecoder | None, str]:
    """Returns the library at this path, or why it must not be used. If the pixels are right only with libjpeg-turbo's
    own decoder of Huffman codes, the library uses that one from then on."""
    try:
        decoder = CropDecoder(path)
    except (OSError, ValueError) as error:
        return None, f"{error}; install patchline again to renew it (or: make setup)"
    is_unknown = decoder.leaves_huffman
    is_right = _gives_the_right_pixels(decoder)
    if not is_right and not is_unknown:
        decoder.leaves_huffman = True
        is_right = _gives_the_right_pixels(decoder)
    if not is_right:
        return None, f"{path} gives other pixels ({decoder.name})"
    if decoder.leaves_huffman:
        why = "is newer than the versions that are known" if is_unknown else "gives other pixels with Patchline's"
        _LOG.warning("data.huffman_decoder is libjpeg-turbo, whatever the job says: %s %s", decoder.name, why)
    return decoder, ""


def _turn(sample: Encoded, *, exif: bool) -> Turn:
    """Returns how to turn the stored pixels: by the orientation in the index or, if `exif` is False, not at all."""
    return turn_of(sample.orientation if exif else UPRIGHT)


def _seen_size(sample: Encoded, turn: Turn) -> tuple[int, int]:
    return (sample.width, sample.height) if turn.is_exchanged else (sample.height, sample.width)


def _fill_from_all(
    data: bytes | memoryview | None, plan: ViewPlan, *, out: Pixels, limits: ImageLimits = DEFAULT_LIMITS
) -> None:
    """Decodes the whole image and makes a planned view of it."""
    if data is None:
        raise DecodeError("there are no bytes to decode")
    stored = decode_stored(
        data, height=plan.stored_height, width=plan.stored_width, denominator=plan.denominator, limits=limits
    )
    box = plan.box
    part = stored[box.top : box.top + box.height, box.left : box.left + box.width]
    show(turned(part, plan.turn), plan.viewport, out=out)


def _gives_the_right_pixels(decoder: CropDecoder) -> bool:
    """Returns whether the library's views of a few small images are right. With another version of libjpeg or OpenCV,
    they could differ."""
    crop = Crop(top=15, left=9, height=43, width=39, flip=True)
    *usual, progressive = _trial_images()
    for data, denominator, orientation in product((*usual, progressive), (1, 2), (1, 8)):
        # One view is wide enough for all loops over rows.
        size = 224 if data is progressive and denominator == 1 else 16
        is_antialiased = (denominator == 2) != (orientation == 8)  # both values occur with each denominator
        viewport = Viewport(
            height=size + 4, width=size + 3, top=2, left=1, is_mirrored=True, is_antialiased=is_antialiased
        )
        plan = plan_view(_TRIAL_SIZE, turn_of(orientation), crop, viewport, denominator=denominator)
        views = np.zeros((2, size, size, 3), dtype=np.uint8)
        _fill_from_all(data, plan, out=views[0])
        if not decoder.fill(data, plan, out=views[1]) or not np.array_equal(views[0], views[1]):
            return False
    return decoder.crc32(data) == zlib.crc32(data) and _operates_equally(decoder)


def _operates_equally(decoder: CropDecoder) -> bool:
    """Returns whether every operation of RandAugment gives the same result on noise as randaugment.py."""
    pixels = np.frombuffer(hashlib.shake_256().digest(24 * 19 * 3), dtype=np.uint8).reshape(24, 19, 3)
    strength = Strength(magnitude=3, sign=-1, centre=(0.4, 0.7))
    for number, operation in enumerate(OPERATIONS.values()):
        found = decoder.operate(pixels, number, magnitude=3, sign=-1, centre=strength.centre)
        if found is None or not np.array_equal(found, operation(pixels, strength)):
            return False
    return True


def _trial_images() -> list[bytes]:
    """Returns JPEGs of noise, one for each chroma sampling; the last one is progressive. The noise comes from a hash,
    since making NumPy's first generator takes half as long as the whole check."""
    height, width = _TRIAL_SIZE
    noise = np.frombuffer(hashlib.shake_256().digest(height * width * 3), dtype=np.uint8).reshape(height, width, 3)
    grey = noise[:, :, :1].copy()
    images = [simplejpeg.encode_jpeg(noise, quality=75, colorsubsampling=kind) for kind in ("444", "420", "422", "440")]
    images.append(simplejpeg.encode_jpeg(grey, quality=75, colorspace="GRAY", colorsubsampling="Gray"))
    images.append(cv2.imencode(".jpg", noise, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes())
    return images
