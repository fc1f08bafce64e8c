"""Perceptual hashes, and the search for near-duplicates of evaluation images."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from shards.images.config import DEFAULT_MAX_DISTANCE, HASH_BITS
from shards.images.near_duplicates import (
    COARSE_BITS,
    COARSE_DISTANCE,
    EvaluationIndex,
    evaluation_hashes,
    perceptual_hash,
)
from tests.rigs.images import image_bytes

Hashes = NDArray[np.uint8]
FLAT = np.full((90, 120), 250, np.uint8)
ACROSS, DOWN = np.meshgrid(np.linspace(0, 255, 120), np.linspace(0, 255, 90))


def random_hashes(count: int, rng: np.random.Generator) -> Hashes:
    return rng.integers(0, 256, (count, 32), dtype=np.uint8)


def flipped(hashes: Hashes, *, coarse: int, fine: int, rng: np.random.Generator) -> Hashes:
    """Copies that differ in given numbers of coarse and other bits."""
    bits = np.unpackbits(hashes, axis=1)
    for row in bits:
        row[rng.choice(COARSE_BITS, coarse, replace=False)] ^= 1
        row[COARSE_BITS + rng.choice(256 - COARSE_BITS, fine, replace=False)] ^= 1
    return np.packbits(bits, axis=1)


def by_brute_force(hashes: Hashes, queries: Hashes, max_distance: int) -> list[tuple[int, int]]:
    """The definition, computed pair by pair."""
    result = []
    for query in queries:
        bits = np.unpackbits(hashes ^ query, axis=1)
        distance = bits.sum(axis=1)
        is_match = (distance <= max_distance) & (bits[:, :COARSE_BITS].sum(axis=1) <= COARSE_DISTANCE)
        ordered = sorted((int(distance[row]), row) for row in np.flatnonzero(is_match).tolist())
        result.append((ordered[0][1], ordered[0][0]) if ordered else (-1, 0))
    return result


def found(index: EvaluationIndex, queries: Hashes, max_distance: int) -> list[tuple[int, int]]:
    rows, distances = index.closest(queries, max_distance=max_distance)
    assert rows.dtype == np.dtype(np.int64)
    assert distances.dtype == np.dtype(np.int32)
    return list(zip(rows.tolist(), distances.tolist(), strict=True))


@pytest.mark.parametrize("max_distance", [0, 1, 3, 4, 7, 8, 11, 12, 40, DEFAULT_MAX_DISTANCE, 127])
def test_the_closest_is_that_of_brute_force(max_distance: int) -> None:
    rng = np.random.default_rng(max_distance)
    hashes = random_hashes(3000, rng)
    planted = [
        flipped(hashes[rng.integers(0, 3000, 8)], coarse=coarse, fine=fine, rng=rng)
        for coarse in (0, 1, 3, 4, 7, 8, 11, 12, 16)
        for fine in (0, 1, 4, 28, 29, 53, 60)
    ]
    queries = np.concatenate([*planted, random_hashes(100, rng)])
    expected = by_brute_force(hashes, queries, max_distance)
    assert found(EvaluationIndex(hashes), queries, max_distance) == expected
    assert sum(row >= 0 for row, _ in expected) >= 8


@given(seed=st.integers(0, 2**32 - 1), max_distance=st.integers(0, 127), data=st.data())
def test_the_closest_of_crowded_hashes_is_that_of_brute_force(
    seed: int, max_distance: int, data: st.DataObject
) -> None:
    """All hashes are close to each other: many matches per query, ties, and words shared by many hashes."""
    rng = np.random.default_rng(seed)
    centre = random_hashes(1, rng)
    sizes = data.draw(st.tuples(st.integers(1, 40), st.integers(0, 40)))
    coarse, fine = data.draw(st.tuples(st.integers(0, 8), st.integers(0, 40)))
    hashes, queries = (flipped(np.repeat(centre, size, axis=0), coarse=coarse, fine=fine, rng=rng) for size in sizes)
    assert found(EvaluationIndex(hashes), queries, max_distance) == by_brute_force(hashes, queries, max_distance)


def test_of_equal_hashes_the_first_is_found() -> None:
    rng = np.random.default_rng(0)
    one, other = random_hashes(2, rng)
    assert found(EvaluationIndex(np.stack([one, other, other])), other[None], 64) == [(1, 0)]


def test_many_equal_queries_and_hashes_are_compared_in_small_pieces() -> None:
    """A placeholder image that occurs thousands of times in a collection must not need memory for all pairs at once."""
    rng = np.random.default_rng(0)
    hashes = np.repeat(random_hashes(1, rng), 70_000, axis=0)
    queries = np.repeat(flipped(hashes[:1], coarse=0, fine=5, rng=rng), 20, axis=0)
    assert found(EvaluationIndex(hashes), queries, 64) == [(0, 5)] * 20


@pytest.mark.parametrize(("num_hashes", "num_queries"), [(0, 0), (0, 3), (3, 0)])
def test_empty(num_hashes: int, num_queries: int) -> None:
    rng = np.random.default_rng(0)
    index = EvaluationIndex(random_hashes(num_hashes, rng))
    assert found(index, random_hashes(num_queries, rng), 64) == [(-1, 0)] * num_queries


@pytest.mark.parametrize(
    "wrong",
    [lambda: np.zeros((3, 31), np.uint8), lambda: np.zeros((3, 32), np.int8), lambda: np.zeros(32, np.uint8)],
)
def test_other_shapes_are_refused(wrong: Callable[[], Hashes]) -> None:
    with pytest.raises(ValueError, match=r"must be uint8\[n, 32\]"):
        EvaluationIndex(wrong())
    with pytest.raises(ValueError, match=r"must be uint8\[n, 32\]"):
        EvaluationIndex(np.zeros((1, 32), np.uint8)).closest(wrong(), max_distance=1)


def encoded(image: Image.Image, image_format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def picture(*, height: int = 240, width: int = 320) -> Image.Image:
    """An image with content at every frequency of the hash, like a photograph."""
    cells = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)


def distance(one: bytes | None, other: bytes | None) -> int:
    assert one is not None
    assert other is not None
    assert len(one) == len(other) == HASH_BITS // 8
    return (int.from_bytes(one) ^ int.from_bytes(other)).bit_count()


def deep(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 200 + 1000)


def transparent(image: Image.Image) -> Image.Image:
    """Black ink of varying density: on white, it looks like the picture in grey."""
    result = Image.new("RGBA", image.size, "black")
    result.putalpha(ImageOps.invert(image.convert("L")))
    return result


@pytest.mark.parametrize(
    ("copy", "most_bits"),
    [
        (encoded, 0),
        (lambda image: encoded(image, "JPEG", quality=30), 12),
        (lambda image: encoded(image, "WEBP", quality=30), 12),
        (lambda image: encoded(image.resize((100, 75)), "JPEG", quality=50), 12),
        (lambda image: encoded(image.resize((1600, 1200)), "JPEG"), 12),
        (lambda image: encoded(image.convert("L")), 0),
        (lambda image: encoded(image.convert("CMYK"), "JPEG", quality=90), 12),
        (lambda image: encoded(image.convert("P", palette=Image.Palette.ADAPTIVE)), 40),
        (lambda image: encoded(deep(image)), 12),
        (lambda image: encoded(deep(image), "TIFF"), 12),
        (lambda image: encoded(image, "BMP"), 0),
        (lambda image: encoded(image.convert("L"), "GIF"), 0),
        (lambda image: encoded(transparent(image)), 12),
    ],
    ids=["same", "jpeg", "webp", "small", "large", "L", "CMYK", "P", "I;16", "tiff", "bmp", "gif", "RGBA"],
)
def test_the_hash_stays_when_the_encoding_changes(copy: Callable[[Image.Image], bytes], most_bits: int) -> None:
    image = picture()
    assert distance(perceptual_hash(encoded(image)), perceptual_hash(copy(image))) <= most_bits


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_hashed_as_they_are_seen(orientation: int, image_format: str) -> None:
    upright = picture()
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = picture()
    # How to transform the upright image so that the EXIF rotation restores it.
    undo = {2: [0], 3: [3], 4: [1], 5: [5], 6: [2], 7: [6], 8: [4]}
    for transpose in undo.get(orientation, []):
        stored = stored.transpose(Image.Transpose(transpose))
    data = encoded(stored, image_format, exif=exif)
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size == upright.size
    assert distance(perceptual_hash(encoded(upright)), perceptual_hash(data)) <= 12


def test_other_images_have_other_hashes() -> None:
    hashes = [perceptual_hash(image_bytes(seed, height=96, width=128)) for seed in range(20)]
    distances = [distance(one, other) for number, one in enumerate(hashes) for other in hashes[:number]]
    assert min(distances) > DEFAULT_MAX_DISTANCE


@pytest.mark.parametrize(
    ("pixels", "why"),
    [
        (FLAT, "one colour"),
        (FLAT + np.random.default_rng(0).integers(0, 4, FLAT.shape, dtype=np.uint8), "one colour with noise"),
        (ACROSS.astype(np.uint8), "nothing but a gradient"),
        ((ACROSS > 128).astype(np.uint8) * 255, "two halves"),
        (DOWN.astype(np.uint8), "a gradient downwards"),
        (np.zeros((1, 1), np.uint8), "a pixel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
def test_images_without_structure_have_no_hash(pixels: NDArray[np.uint8], why: str, image_format: str) -> None:
    data = encoded(Image.fromarray(pixels), image_format)
    assert perceptual_hash(data) is None, why
    assert evaluation_hashes(data) is None, why


def test_evaluation_hashes_are_those_of_the_image_its_mirror_image_and_what_is_inside() -> None:
    image = picture(height=400, width=600)
    inside = image.crop((15, 10, 585, 390))
    hashes = evaluation_hashes(encoded(image))
    assert hashes is not None
    for found, expected in zip(hashes, (image, ImageOps.mirror(image), inside, ImageOps.mirror(inside)), strict=True):
        assert distance(found, perceptual_hash(encoded(expected))) <= 8
    assert hashes[0] == perceptual_hash(encoded(image))


def test_what_is_seen_at_the_rim_alone_stands_for_the_inside_too() -> None:
    rim = Image.new("L", (400, 400), 255)
    rim.paste(picture().convert("L").resize((400, 9)), (0, 0))
    hashes = evaluation_hashes(encoded(rim))
    assert hashes is not None
    assert hashes[2:] == hashes[:2]


def test_copies_of_photographs_are_found_and_others_are_not(test_data: Path) -> None:
    """docs/benchmarks.md has the numbers on all 500 of the sample."""
    files = sorted((test_data / "imagenet-sample").glob("*.JPEG"))[:60]
    if not files:
        pytest.skip("no photographs: imagenet-sample is not in the test data")
    evaluation = [evaluation_hashes(path.read_bytes()) for path in files[:30]]
    index = EvaluationIndex(rows([item for hashes in evaluation for item in hashes or ()]))
    queries = []
    for path in files:
        image = Image.open(path).convert("RGB")
        crop = image.crop((image.width // 30, image.height // 30, image.width * 29 // 30, image.height * 29 // 30))
        queries.append(perceptual_hash(encoded(ImageOps.mirror(crop).resize((256, 200)), "JPEG", quality=60)) or b"")
    found, _ = index.closest(rows(queries), max_distance=DEFAULT_MAX_DISTANCE)
    assert (found[:30] // 4).tolist() == list(range(30))
    assert (found[30:] == -1).all()


def test_without_its_library_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['imagehash'] = None\n"
        "from shards.errors import UserError\n"
        "from shards.images.near_duplicates import perceptual_hash\n"
        "from tests.rigs.images import image_bytes\n"
        "try: perceptual_hash(image_bytes(0, height=96, width=128))\n"
        "except UserError as error: assert 'pip install imagehash' in str(error)\n"
        "else: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])


def rows(hashes: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BITS // 8)
