"""Each operation against Pillow or a plain formula, and bit for bit against what TensorFlow gave."""

import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from pipeline.data.config import DRAWS_PER_OP, RandAugmentConfig
from pipeline.data.randaugment import OPERATIONS, Strength, randaugment
from pipeline.data.transform import crop_decoder
from shards.hashing import hash_array, uniforms

Pixels = NDArray[np.uint8]
TWO_OF_15 = RandAugmentConfig(num_ops=2, magnitude=15)

# crc32 of the bytes that TensorFlow 2.12 (NumPy 1.23, in a graph, positive sign, centre 0.3, 0.8) makes of picture() by
# the definitions of big_vision's pp/autoaugment.py, at magnitudes 0, 10, 15 and 20. Sharpness rounds otherwise there.
TENSORFLOW = {
    "AutoContrast": (0x28A8F312, 0x28A8F312, 0x28A8F312, 0x28A8F312),
    "Equalize": (0x30A975AB, 0x30A975AB, 0x30A975AB, 0x30A975AB),
    "Invert": (0x2DE00224, 0x2DE00224, 0x2DE00224, 0x2DE00224),
    "Rotate": (0xB837931D, 0xA0B7A646, 0xB2647882, 0x3B13F8BC),
    "Posterize": (0xFD3810AD, 0xB49335BF, 0x00BB80F1, 0xB837931D),
    "Solarize": (0x2DE00224, 0x2DE00224, 0x72E152B7, 0x2DE00224),
    "Color": (0x4320F0B3, 0xC0F36A52, 0x3617D099, 0x376E5F2C),
    "Contrast": (0x1E87046A, 0x52F8DAE7, 0xE8C411FF, 0xC888FCFA),
    "Brightness": (0x14D9D85E, 0x0731E88B, 0x1430BF3F, 0xF83B4E18),
    "ShearX": (0xB837931D, 0xE2A6E829, 0xBC8B46A2, 0x53D70B21),
    "ShearY": (0xB837931D, 0x29406BAB, 0xDDE67417, 0xBAC65AFB),
    "TranslateX": (0xB837931D, 0xAB36D61D, 0xAB36D61D, 0xAB36D61D),
    "TranslateY": (0xB837931D, 0xAB36D61D, 0xAB36D61D, 0xAB36D61D),
    "Cutout": (0xB837931D, 0xAFC1B779, 0x55B4114D, 0xAB36D61D),
    "SolarizeAdd": (0xB837931D, 0x0614A589, 0x6AD2A533, 0x1CD66D83),
}


def picture(height: int = 60, width: int = 80) -> Pixels:
    """Slopes with noise, the same for ever."""
    noise = hash_array(np.arange(height * width * 3), key=1) >> np.uint64(58)
    rows, columns = np.mgrid[:height, :width]
    slopes = np.stack([3 * rows, 2 * columns, rows + columns], axis=-1)
    levels: NDArray[np.int64] = slopes + noise.astype(np.int64).reshape(slopes.shape)
    return levels.clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def photographs(test_data: Path) -> list[Pixels]:
    paths = sorted((test_data / "imagenet-sample").glob("*.JPEG"))[::250]
    return [np.asarray(Image.open(path).convert("RGB").resize((224, 224))) for path in paths]


def applied(name: str, pixels: Pixels, magnitude: int, sign: int = 1) -> Pixels:
    return OPERATIONS[name](pixels, Strength(magnitude=magnitude, sign=sign, centre=(0.3, 0.8)))


@pytest.mark.parametrize("name", TENSORFLOW)
def test_the_bits_are_tensorflows(name: str) -> None:
    got = tuple(zlib.crc32(applied(name, picture(), magnitude).tobytes()) for magnitude in (0, 10, 15, 20))
    assert got == TENSORFLOW[name]


def factor(magnitude: int) -> float:
    return 0.1 + 0.18 * magnitude


def of_pillow(edit: Callable[[Image.Image, int], Image.Image]) -> Callable[[Pixels, int], Pixels]:
    return lambda pixels, magnitude: np.asarray(edit(Image.fromarray(pixels), magnitude))


def contrast(pixels: Pixels, magnitude: int) -> Pixels:
    """From the grey that the number of pixels alone sets."""
    grey = math.floor(min(255.0, pixels.shape[0] * pixels.shape[1] / 256))
    moved: NDArray[np.float64] = grey + factor(magnitude) * (pixels.astype(np.float64) - grey)
    return moved.clip(0, 255).astype(np.uint8)


def solarize_add(pixels: Pixels, magnitude: int) -> Pixels:
    added = np.minimum(pixels.astype(int) + 11 * magnitude, 255).astype(np.uint8)
    return np.where(pixels < 128, added, pixels)


def cutout(pixels: Pixels, magnitude: int) -> Pixels:
    row, column = (int(share * side) for share, side in zip((0.3, 0.8), pixels.shape, strict=False))
    rows, columns = np.mgrid[: pixels.shape[0], : pixels.shape[1]]
    low, high = -4 * magnitude, 4 * magnitude
    inside = (low <= rows - row) & (rows - row < high) & (low <= columns - column) & (columns - column < high)
    return np.where(inside[..., None], 128, pixels).astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "reference", "tolerance"),  # greatest difference in levels, as the factor grows to 2.8
    [
        pytest.param(
            "AutoContrast", of_pillow(lambda p, _: ImageOps.autocontrast(p)), 1, id="autocontrast: fp32 or 64"
        ),
        pytest.param("Equalize", of_pillow(lambda p, _: ImageOps.equalize(p)), 0, id="equalize"),
        pytest.param("Invert", of_pillow(lambda p, _: ImageOps.invert(p)), 0, id="invert"),
        pytest.param("Posterize", of_pillow(lambda p, m: ImageOps.posterize(p, 4 * m // 10)), 0, id="posterize"),
        pytest.param("Solarize", of_pillow(lambda p, m: ImageOps.solarize(p, {3: 76, 7: 179, 10: 0, 15: 128}[m])), 0),
        pytest.param("Brightness", of_pillow(lambda p, m: ImageEnhance.Brightness(p).enhance(factor(m))), 0),
        pytest.param(
            "Color", of_pillow(lambda p, m: ImageEnhance.Color(p).enhance(factor(m))), 3, id="color: other grey"
        ),
        pytest.param("Sharpness", of_pillow(lambda p, m: ImageEnhance.Sharpness(p).enhance(factor(m))), 3),
        pytest.param("Contrast", contrast, 1, id="contrast: fp32 or 64"),
        pytest.param("SolarizeAdd", solarize_add, 0, id="solarize_add"),
        pytest.param("Cutout", cutout, 0, id="cutout"),
    ],
)
@pytest.mark.parametrize("magnitude", [3, 7, 10, 15])
def test_levels_against_pillow_or_a_formula(
    name: str,
    reference: Callable[[Pixels, int], Pixels],
    tolerance: int,
    magnitude: int,
    photographs: list[Pixels],
) -> None:
    for pixels in [picture(), *photographs]:
        difference = applied(name, pixels, magnitude).astype(int) - reference(pixels, magnitude)
        assert np.abs(difference).max() <= tolerance


def around_the_centre(degrees: float, height: int, width: int) -> tuple[float, ...]:
    """Pillow's six numbers of the rotation whose output (x, y) comes from the turned place."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return cos, -sin, (width - cos * width + sin * height) / 2, sin, cos, (height - sin * width - cos * height) / 2


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [3, 10, 15])
@pytest.mark.parametrize("name", ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"])
def test_places_against_pillow(name: str, magnitude: int, sign: int, photographs: list[Pixels]) -> None:
    """Pillow counts from pixel corners, in steps of 2 ** -16; 0.002 more takes it to the higher of two pixels at a tie.
    Left are ties of the rotation and halves below 0."""
    slope, shift = sign * 0.03 * magnitude, sign * 10 * magnitude
    for pixels in [picture(), *photographs]:
        affine = {
            "Rotate": around_the_centre(sign * 3 * magnitude, *pixels.shape[:2]),
            "ShearX": (1, slope, -slope / 2 + 0.002, 0, 1, 0),
            "ShearY": (1, 0, 0, slope, 1, -slope / 2 + 0.002),
            "TranslateX": (1, 0, shift, 0, 1, 0),
            "TranslateY": (1, 0, 0, 0, 1, shift),
        }[name]
        image = Image.fromarray(pixels)
        expected = image.transform(
            image.size, Image.Transform.AFFINE, affine, Image.Resampling.NEAREST, fillcolor=(128, 128, 128)
        )
        same = (applied(name, pixels, magnitude, sign) == np.asarray(expected)).all(axis=2).mean()
        assert same == 1 if "Translate" in name else same > 0.985


def test_shear_takes_the_pixel_beyond_a_half() -> None:
    """Row 5 at slope 0.3 comes from 1.5 further on, which is 2; the other way from -1.5, -0.5, 0.5: -2, -1, 1."""
    row = picture()[5]
    assert (applied("ShearX", picture(), 10, sign=1)[5, :-2] == row[2:]).all()
    assert (applied("ShearX", picture(), 10, sign=-1)[5, 2:] == row[1:-1]).all()
    assert (applied("ShearX", picture(), 10, sign=-1)[5, :2] == 128).all()


@pytest.mark.parametrize(
    ("magnitude", "names"),
    [
        (0, ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"]),
        (5, ["Color", "Contrast", "Brightness", "Sharpness"]),
        (20, ["Posterize"]),
    ],
)
def test_levels_that_change_nothing(magnitude: int, names: list[str]) -> None:
    for name in names:
        assert (applied(name, picture(), magnitude) == picture()).all(), name


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (3, 2), (300, 5)])
def test_small_and_flat_images(name: str, shape: tuple[int, int]) -> None:
    for pixels in (picture(*shape), np.full((*shape, 3), 77, dtype=np.uint8)):
        result = applied(name, pixels, 10)
        assert (result.dtype, result.shape) == (np.dtype(np.uint8), pixels.shape)
    if name in ("AutoContrast", "Equalize"):
        assert (result == 77).all()  # one level: nothing to stretch


def test_off_and_what_is_drawn() -> None:
    assert (randaugment(picture(), np.empty(0), config=RandAugmentConfig()) == picture()).all()
    assert (RandAugmentConfig().num_draws, TWO_OF_15.num_draws) == (0, 2 * DRAWS_PER_OP)
    with pytest.raises(ValueError, match=r"shape \(7,\), not \(8,\)"):
        randaugment(picture(), np.zeros(7), config=TWO_OF_15)


def test_operations_are_applied_in_turn_with_their_draws() -> None:
    """Rotate (4 of 16) to the left, then Cutout (15 of 16) around 0.25, 0.75."""
    draws = np.array([3.5 / 16, 0.49, 0.9, 0.9, 14.5 / 16, 0.0, 0.25, 0.75])
    rotated = OPERATIONS["Rotate"](picture(), Strength(magnitude=15, sign=-1))
    expected = OPERATIONS["Cutout"](rotated, Strength(magnitude=15, centre=(0.25, 0.75)))
    assert (randaugment(picture(), draws, config=TWO_OF_15) == expected).all()


def chosen_operation(draw: float, outcomes: dict[bytes, str]) -> str:
    pixels = randaugment(
        picture(40, 50), np.array([draw, 0.9, 0.5, 0.5]), config=RandAugmentConfig(num_ops=1, magnitude=2)
    )
    return outcomes[pixels.tobytes()]


def test_operations_are_chosen_uniformly() -> None:
    """Of 8,000 draws each of 16 operations takes 500, with a standard deviation of 22; each is told by its outcome."""
    outcomes = {OPERATIONS[name](picture(40, 50), Strength(magnitude=2)).tobytes(): name for name in OPERATIONS}
    assert len(outcomes) == 16
    draws = uniforms(np.arange(8000), 1, key=3)[:, 0].tolist()
    names = [chosen_operation(draw, outcomes) for draw in draws]
    counts = np.array([names.count(name) for name in OPERATIONS])
    assert ((counts - 500) ** 2 / 500).sum() < 37.7  # chi-squared, 15 degrees of freedom: 1 in 1,000
    assert chosen_operation(0.0, outcomes) == "AutoContrast"
    assert chosen_operation(np.nextafter(1, 0), outcomes) == "SolarizeAdd"


def test_both_signs_are_drawn_equally_often() -> None:
    config = RandAugmentConfig(num_ops=1, magnitude=1)
    right = OPERATIONS["TranslateX"](picture(4, 30), Strength(magnitude=1, sign=1))
    draws = uniforms(np.arange(2000), 1, key=4)[:, 0]
    positive = [
        (randaugment(picture(4, 30), np.array([12.5 / 16, draw, 0, 0]), config=config) == right).all() for draw in draws
    ]
    assert 900 < sum(positive) < 1100


@settings(max_examples=60)
@given(sample=st.integers(0, 2**40), magnitude=st.integers(0, 20), num_ops=st.integers(0, 4))
def test_the_input_stays_and_views_are_read_as_they_look(sample: int, magnitude: int, num_ops: int) -> None:
    config = RandAugmentConfig(num_ops=num_ops, magnitude=magnitude)
    draws = uniforms(np.array([sample]), config.num_draws, key=5)[0]
    pixels = picture(30, 40)
    pixels.flags.writeable = False
    expected = randaugment(pixels, draws, config=config)
    assert (pixels == picture(30, 40)).all()
    mirrored = np.ascontiguousarray(pixels[:, ::-1])[:, ::-1]
    assert (randaugment(mirrored, draws, config=config) == expected).all()


def test_threads_do_not_disturb_each_other(photographs: list[Pixels]) -> None:
    draws = uniforms(np.arange(200), TWO_OF_15.num_draws, key=6)
    chosen = [photographs[number % len(photographs)] for number in range(200)]
    alone = [randaugment(pixels, d, config=TWO_OF_15) for pixels, d in zip(chosen, draws, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda pixels, d: randaugment(pixels, d, config=TWO_OF_15), chosen, draws))
    assert all((one == other).all() for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 6), (2, 2), (3, 3), (16, 16), (33, 21)])
def test_the_library_gives_the_same_pixels(height: int, width: int) -> None:
    decoder = crop_decoder()
    if decoder is None:
        pytest.skip("the crop decoder was not built: a C compiler and libjpeg-turbo's headers make it")
    flat = np.full((height, width, 3), 77, dtype=np.uint8)
    pictures = (picture(height, width), picture(height, width) // 9 + 90, flat)
    for magnitude in range(21):
        pixels, sign, centre = pictures[magnitude % 3], 1 - magnitude % 2 * 2, (0.05 * magnitude % 1, 0.3)
        for number, (name, operation) in enumerate(OPERATIONS.items()):
            expected = operation(pixels, Strength(magnitude=magnitude, sign=sign, centre=centre))
            found = decoder.operate(pixels, number, magnitude=magnitude, sign=sign, centre=centre)
            assert found is not None
            np.testing.assert_array_equal(found, expected, err_msg=f"{name} at {magnitude}")
    assert decoder.operate(flat, 16, magnitude=1, sign=1, centre=(0.5, 0.5)) is None
    assert decoder.operate(flat, 0, magnitude=21, sign=1, centre=(0.5, 0.5)) is None
