"""The memory of one view: at most BYTES_A_PIXEL for each pixel of the stored image, and OTHER_BYTES, as SECURITY.md
promises, whatever the format, the transform and the aspect."""

import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.data.augment import draws_of
from pipeline.data.config import AugmentConfig
from pipeline.data.decode import DecodeError, Pixels
from pipeline.data.transform import crop_decoder, evaluation_view, train_view, training_plan
from pipeline.shared_settings import EvaluationTransform

BYTES_A_PIXEL, OTHER_BYTES = 24, 200_000_000
SIZE = 224
NUM_PIXELS = 1 << 27  # the most that `pack` takes without a flag

AUGMENTS = {
    "inception": AugmentConfig(),
    "all of it": AugmentConfig(crop="none", scaled_decode=False),
    "all of it, antialiased": AugmentConfig(crop="none", antialias=True, scaled_decode=False),
    "all of it, bicubic": AugmentConfig(crop="none", filter="bicubic", scaled_decode=False),
    "all of it, area": AugmentConfig(crop="none", filter="area", scaled_decode=False),
    "resize_crop, area": AugmentConfig(crop="resize_crop", filter="area"),
    "short_side_crop": AugmentConfig(crop="short_side_crop"),
    "short_side_crop, antialiased": AugmentConfig(crop="short_side_crop", antialias=True),
    "short_side_crop, area": AugmentConfig(crop="short_side_crop", filter="area"),
    "simple_random": AugmentConfig(crop="simple_random"),
    "simple_random, bicubic": AugmentConfig(crop="simple_random", filter="bicubic"),
}
EVALUATIONS = {
    "evaluation": EvaluationTransform(),
    "few-shot": EvaluationTransform(mode="fewshot"),
    "evaluation, central_crop": EvaluationTransform(mode="central_crop"),
    "evaluation, central_crop, antialiased": EvaluationTransform(mode="central_crop", antialias=True),
    "evaluation, central_crop, bicubic": EvaluationTransform(mode="central_crop", filter="bicubic"),
    "evaluation, central_crop, area": EvaluationTransform(mode="central_crop", filter="area"),
}
TRANSFORMS = (*AUGMENTS, *EVALUATIONS)


@dataclass(frozen=True, kw_only=True)
class Stored:
    data: bytes
    height: int
    width: int
    orientation: int


def viewed(sample: Stored, how: str, *, use_library: bool) -> Pixels | None:
    """The view; None for a DecodeError."""
    out = np.zeros((SIZE, SIZE, 3), dtype=np.uint8)
    try:
        if how in EVALUATIONS:
            evaluation_view(sample, EVALUATIONS[how], out=out, use_library=use_library)
        else:
            draws = draws_of(np.array([5]), np.array([0]), seed=0)[0]
            plan = training_plan(sample, draws, config=AUGMENTS[how], size=SIZE)
            decoder = crop_decoder() if use_library else None
            if decoder is None or not decoder.fill(sample.data, plan, out=out):
                train_view(sample, draws, config=AUGMENTS[how], out=out)
    except DecodeError:
        return None
    return out


def in_child(work: Callable[[], bytes]) -> bytes:
    """What `work` returns in a forked process, so that it can be measured on its own."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(work())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
    return result


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def cost(sample: Stored, how: str, *, use_library: bool) -> tuple[int, float]:
    """The most bytes that the view took beside what the process had before, and its seconds."""

    def work() -> bytes:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the former peak
        before, began = memory("VmRSS"), time.process_time()
        viewed(sample, how, use_library=use_library)
        return f"{memory('VmHWM') - before} {time.process_time() - began}".encode()

    num_bytes, seconds = in_child(work).split()
    return int(num_bytes), float(seconds)


def encoded(image_format: str, mode: str, size: tuple[int, int], **options: object) -> bytes:
    """An image of one colour, (height, width) pixels; encoded in a child, whose memory is given back."""

    def work() -> bytes:
        file = io.BytesIO()
        colour: object = 7 if mode in ("L", "P", "I;16") else (9, 99, 199, 80)[: len(mode)]
        Image.new(mode, size[::-1], colour).save(file, image_format, **options)  # type: ignore[arg-type]
        return file.getvalue()

    return in_child(work)


def excess(sample: Stored, how: str, *, use_library: bool) -> str:
    """What is above the bound, or takes more than a minute."""
    num_bytes, seconds = cost(sample, how, use_library=use_library)
    most = BYTES_A_PIXEL * sample.height * sample.width + OTHER_BYTES
    if num_bytes <= most and seconds < 60:
        return ""
    return (
        f"{how}, {sample.height} x {sample.width}, turned by {sample.orientation}, library {use_library}: "
        f"{num_bytes / 1e6:.0f} MB of {most / 1e6:.0f}, {seconds:.1f} s"
    )


@pytest.mark.parametrize(
    ("image_format", "is_tall"),
    [
        ("JPEG", True),
        ("PNG", False),
        pytest.param("JPEG", False, marks=pytest.mark.long),
        pytest.param("PNG", True, marks=pytest.mark.long),
    ],
)
def test_a_line_of_pixels_is_never_resized_whole(image_format: str, is_tall: bool) -> None:
    """A PNG of 275 bytes, 1 x 65,500, would become 13 GB where its short side is resized."""
    crop_decoder()
    size = (65_500, 1) if is_tall else (1, 65_500)
    data = encoded(image_format, "RGB", size)
    orientation = 6 if is_tall else 1
    sample = Stored(data=data, height=size[0], width=size[1], orientation=orientation)
    faults = [
        excess(sample, how, use_library=use_library)
        for how, use_library in product(TRANSFORMS, (True, False))
        if use_library is False or image_format == "JPEG"
    ]
    assert not any(faults), "\n".join(filter(None, faults))


@pytest.mark.skipif(crop_decoder() is None, reason="there is no crop decoder to compare with")
@pytest.mark.parametrize(
    "size", [(3, 65_500), *(pytest.param(size, marks=pytest.mark.long) for size in ((1, 65_500), (65_500, 2)))]
)
def test_both_ways_make_the_same_view_of_a_line(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=90, subsampling=0)
    for how, orientation in product(TRANSFORMS, (1, 6)):
        sample = Stored(data=file.getvalue(), height=size[0], width=size[1], orientation=orientation)
        views = [viewed(sample, how, use_library=use_library) for use_library in (True, False)]
        assert views[0] is not None, how
        np.testing.assert_array_equal(views[0], views[1], err_msg=how)


LARGEST: dict[str, tuple[str, str, dict[str, object]]] = {
    "JPEG": ("JPEG", "RGB", {"subsampling": 0}),
    "progressive JPEG": ("JPEG", "RGB", {"subsampling": 0, "progressive": True}),
    "progressive CMYK": ("JPEG", "CMYK", {"progressive": True}),
    "PNG": ("PNG", "RGB", {"compress_level": 1}),
    "transparent PNG": ("PNG", "RGBA", {"compress_level": 1}),
    "16-bit PNG": ("PNG", "I;16", {"compress_level": 1}),
    "palette PNG": ("PNG", "P", {"compress_level": 1}),
    "WebP": ("WEBP", "RGB", {"method": 0}),
    "transparent WebP": ("WEBP", "RGBA", {"lossless": True, "method": 0, "quality": 0}),
}


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("kind", LARGEST)
def test_the_largest_images_stay_within_the_bound(kind: str) -> None:
    crop_decoder()
    image_format, mode, options = LARGEST[kind]
    side = int(NUM_PIXELS**0.5)
    data = encoded(image_format, mode, (side, side), **options)
    faults = [
        excess(Stored(data=data, height=side, width=side, orientation=orientation), how, use_library=use_library)
        for how, orientation, use_library in product(TRANSFORMS, (1, 6), (True, False))
        if use_library is False or image_format == "JPEG"
    ]
    assert not any(faults), "\n".join(filter(None, faults))
