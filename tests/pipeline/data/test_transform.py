"""Both ways to a view, the library's and the whole decode's, give the same pixels and refuse the same bytes."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from pipeline.data import transform
from pipeline.data.augment import Viewport, draw_crop, draws_of
from pipeline.data.config import AugmentConfig
from pipeline.data.crop_decoder import CropDecoder
from pipeline.data.decode import DecodeError, decode_stored, turn_of, turned
from pipeline.data.transform import (
    checked_decoder,
    crop_decoder,
    decoder_name,
    evaluation_view,
    evaluation_view_of_pixels,
    train_view,
    training_plan,
)
from pipeline.data.window_resize import show
from pipeline.shared_settings import EvaluationTransform
from shards.images.image_header import read_header
from shards.orientation import TURNS
from tests.rigs.images import image_bytes
from tests.rigs.jpegs import KINDS, jpeg_of

PLAIN, ANTIALIASED = AugmentConfig(), AugmentConfig(antialias=True)
needs_library = pytest.mark.skipif(
    crop_decoder() is None, reason="the crop decoder was not built: a C compiler and libjpeg-turbo's headers make it"
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    data: bytes | memoryview
    height: int
    width: int
    orientation: int = 1


def draws(seed: int) -> NDArray[np.float64]:
    row: NDArray[np.float64] = draws_of(np.array([seed]), np.array([0]), seed=1)[0]
    return row


def trained(sample: Sample, seed: int, config: AugmentConfig, *, size: int, use_library: bool) -> NDArray[np.uint8]:
    """The library's view of a JPEG that it takes; otherwise, and without it, Python's."""
    out = np.full((size, size, 3), 77, dtype=np.uint8)
    decoder = crop_decoder() if use_library else None
    plan = training_plan(sample, draws(seed), config=config, size=size)
    if decoder is None or not decoder.fill(sample.data or b"", plan, out=out):
        train_view(sample, draws(seed), config=config, out=out)
    return out


def evaluated(sample: Sample, how: EvaluationTransform, *, size: int, use_library: bool) -> NDArray[np.uint8]:
    out = np.full((size, size, 3), 77, dtype=np.uint8)
    evaluation_view(sample, how, out=out, use_library=use_library)
    return out


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the library's fill returned, call by call."""
    decoder, calls = crop_decoder(), []
    assert decoder is not None
    fill = decoder.fill

    def noted(*args: object, **named: object) -> bool:
        calls.append(fill(*args, **named))  # type: ignore[arg-type]
        return calls[-1]

    monkeypatch.setattr(decoder, "fill", noted)
    return calls


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(
    height=st.integers(1, 200),
    width=st.integers(1, 200),
    orientation=st.sampled_from(list(TURNS)),
    size=st.sampled_from((3, 8, 13, 16, 24, 40)),
    seed=st.integers(0, 1000),
    config=st.sampled_from((PLAIN, ANTIALIASED, AugmentConfig(crop="none"))),
)
def test_both_ways_give_the_same_training_view(
    kind: str, height: int, width: int, orientation: int, size: int, seed: int, config: AugmentConfig
) -> None:
    """Every sampling, odd sizes, all scales: small views of large images are decoded at 1/2, 1/4 and 1/8."""
    sample = Sample(
        data=jpeg_of(kind, height=height, width=width, seed=seed), height=height, width=width, orientation=orientation
    )
    ours, theirs = (trained(sample, seed, config, size=size, use_library=use) for use in (True, False))
    np.testing.assert_array_equal(ours, theirs)


@needs_library
@pytest.mark.parametrize("mode", ["resize", "central_crop"])
@pytest.mark.parametrize("orientation", TURNS)
def test_both_ways_give_the_same_evaluation_view(mode: str, orientation: int, filled: list[bool]) -> None:
    for kind in KINDS:
        sample = Sample(data=jpeg_of(kind, height=75, width=131), height=75, width=131, orientation=orientation)
        for antialias in (False, True):
            how = EvaluationTransform(mode=mode, antialias=antialias)  # type: ignore[arg-type]
            ours, theirs = (evaluated(sample, how, size=48, use_library=use) for use in (True, False))
            np.testing.assert_array_equal(ours, theirs)
    assert filled == [True] * 2 * len(KINDS)


@needs_library
@pytest.mark.parametrize("orientation", TURNS)
def test_few_shot_views_are_cut_off_both_ways(orientation: int, filled: list[bool]) -> None:
    """The library rounds, so it leaves them to the other way."""
    sample = Sample(data=jpeg_of(KINDS[0], height=75, width=131), height=75, width=131, orientation=orientation)
    for antialias in (False, True):
        how = EvaluationTransform(mode="fewshot", antialias=antialias)
        ours, theirs = (evaluated(sample, how, size=48, use_library=use) for use in (True, False))
        np.testing.assert_array_equal(ours, theirs)
    assert filled == [False, True]


@needs_library
def test_photographs_are_the_same_both_ways(test_data: Path, filled: list[bool]) -> None:
    """Each with its own crops, turned and not, at its own size and scaled."""
    paths = sorted((test_data / "imagenet-sample").glob("*.JPEG"))
    for number, path in enumerate(paths):
        data = path.read_bytes()
        header = read_header(data)
        sample = Sample(
            data=memoryview(data), height=header.height, width=header.width, orientation=1 + number % len(TURNS)
        )
        for seed, (config, size) in enumerate(((PLAIN, 224), (ANTIALIASED, 224), (PLAIN, 64), (ANTIALIASED, 32))):
            ours, theirs = (trained(sample, 4 * number + seed, config, size=size, use_library=u) for u in (True, False))
            assert np.array_equal(ours, theirs), path.name
    assert filled == [True] * 4 * len(paths)


@pytest.mark.parametrize(("config", "bound"), [(PLAIN, 8.0), (ANTIALIASED, 5.0)], ids=["plain", "antialiased"])
def test_scaled_decoding_smooths_and_can_be_switched_off(test_data: Path, config: AugmentConfig, bound: float) -> None:
    """Photographs of 1600 x 1200 by some grey levels on average; without it the view is that of the full decode."""
    differences = []
    for number, path in enumerate(sorted((test_data / "imagenet-sample").glob("*.JPEG"))[:12]):
        file = io.BytesIO()
        Image.open(path).convert("RGB").resize((1600, 1200), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        sample = Sample(data=file.getvalue(), height=1200, width=1600)
        scaled = trained(sample, number, config, size=224, use_library=True)
        exact = trained(sample, number, replace(config, scaled_decode=False), size=224, use_library=True)
        crop = draw_crop(1200, 1600, draws(number), config=config)
        viewport = Viewport(height=224, width=224, is_mirrored=crop.flip, is_antialiased=config.antialias)
        whole = decode_stored(sample.data, height=1200, width=1600)
        expected = np.empty_like(exact)
        show(whole[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width], viewport, out=expected)
        assert np.array_equal(exact, expected)
        differences.append(np.abs(scaled.astype(int) - exact.astype(int)).mean())
    assert 0.5 < np.mean(differences) < bound, differences


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_data_cut_off_anywhere_is_a_decode_error_either_way(kind: str) -> None:
    data = jpeg_of(kind, height=40, width=56)
    for size in range(2, len(data) - 2, 7):
        sample = Sample(data=data[:size], height=40, width=56)
        messages = set()
        for use_library in (True, False):
            with pytest.raises(DecodeError) as caught:
                trained(sample, size, PLAIN, size=16, use_library=use_library)
            messages.add(str(caught.value))
        assert len(messages) == 1, "the reason goes to quarantine.jsonl"


def outcome(sample: Sample, seed: int, config: AugmentConfig, *, use_library: bool) -> str | bytes:
    try:
        return trained(sample, seed, config, size=16, use_library=use_library).tobytes()
    except DecodeError as error:
        return str(error)


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Flipped bits, a marker, lost or extra bytes, an early end: anywhere, or among the pixels."""
    body, start = bytearray(data), int(rng.choice([2, data.rindex(b"\xff\xda") + 12]))
    place = int(rng.integers(start, len(body) - 2))
    kind = int(rng.integers(0, 5))
    if kind == 0:
        for spot in rng.integers(start, len(body), size=3):
            body[spot] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:
        body[place : place + 2] = bytes([0xFF, int(rng.integers(0, 256))])
    elif kind == 2:
        del body[place : place + int(rng.integers(1, 30))]
    elif kind == 3:
        body[place:place] = rng.integers(0, 256, size=int(rng.integers(1, 30)), dtype=np.uint8).tobytes()
    else:
        body[place:] = b"\xff\xd9"
    return bytes(body)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_damage_has_the_same_end_either_way(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for number in range(150):
        whole = jpeg_of(kind, height=57, width=43, seed=number % 5)
        sample = Sample(data=damaged(whole, rng), height=57, width=43)
        config = (PLAIN, ANTIALIASED)[number % 2]
        ours, theirs = (outcome(sample, number, config, use_library=use) for use in (True, False))
        assert ours == theirs, f"damage {number}"


@pytest.mark.parametrize("use_library", [True, False])
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", TURNS)
def test_a_view_is_the_crop_of_the_image_as_it_is_seen(image_format: str, orientation: int, use_library: bool) -> None:
    """The crop is drawn from the upright size, whatever the format and way."""
    data = image_bytes(5, height=40, width=60, image_format=image_format)
    sample = Sample(data=data, height=40, width=60, orientation=orientation)
    upright = turned(decode_stored(data, height=40, width=60), turn_of(orientation))
    expected = np.zeros((48, 48, 3), dtype=np.uint8)
    for seed in range(5):
        crop = draw_crop(upright.shape[0], upright.shape[1], draws(seed), config=PLAIN)
        part = upright[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
        show(part, Viewport(height=48, width=48, is_mirrored=crop.flip), out=expected)
        np.testing.assert_array_equal(trained(sample, seed, PLAIN, size=48, use_library=use_library), expected)


def test_pixels_are_shown_as_their_file_is() -> None:
    data = image_bytes(7, height=50, width=70, image_format="PNG")
    for how in (EvaluationTransform(), EvaluationTransform(mode="central_crop", antialias=True)):
        out = np.zeros((24, 24, 3), dtype=np.uint8)
        evaluation_view_of_pixels(decode_stored(data, height=50, width=70), how, out=out)
        sample = Sample(data=data, height=50, width=70)
        np.testing.assert_array_equal(out, evaluated(sample, how, size=24, use_library=False))


@pytest.mark.parametrize("use_library", [True, False])
def test_a_scaled_decode_shows_what_the_whole_one_shows(use_library: bool) -> None:
    y, x = np.mgrid[0:400, 0:520]
    smooth = np.stack([y * 255 // 400, x * 255 // 520, 255 - y // 2], axis=2).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(smooth).save(file, format="JPEG", quality=95)
    sample = Sample(data=file.getvalue(), height=400, width=520)
    for seed in range(8):
        small = trained(sample, seed, PLAIN, size=40, use_library=use_library).astype(int)
        crop = draw_crop(400, 520, draws(seed), config=PLAIN)
        part = smooth[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
        expected = np.asarray(Image.fromarray(part).resize((40, 40), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(small - (expected[:, ::-1] if crop.flip else expected)).max() <= 8


@needs_library
def test_threads_do_not_disturb_each_other() -> None:
    samples = [Sample(data=jpeg_of(kind, height=150, width=90), height=150, width=90) for kind in KINDS]
    expected = [trained(sample, 3, PLAIN, size=32, use_library=True) for sample in samples]
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(timeout=60)
        for turn in range(40):
            entry = (number + turn) % len(samples)
            found = trained(samples[entry], 3, PLAIN, size=32, use_library=True)
            assert np.array_equal(found, expected[entry])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_a_library_that_gives_other_pixels_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Other:
        name, leaves_huffman = "libjpeg 9", False

        def __init__(self, path: Path) -> None:
            self.path = path

        def fill(self, *_: object, out: NDArray[np.uint8]) -> bool:
            out[...] = 0
            return True

    monkeypatch.setattr(transform, "CropDecoder", Other)
    path = tmp_path / "lib.so"
    assert checked_decoder(path) == (None, f"{path} gives other pixels (libjpeg 9)")


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + bytes(60)])
def test_a_file_that_is_no_library_is_not_used(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    decoder, reason = checked_decoder(path)
    assert decoder is None
    assert reason.startswith(f"{path}: ")


def test_the_decoder_has_a_name_for_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = crop_decoder()
    assert decoder is None or isinstance(decoder, CropDecoder)
    assert decoder_name() == ("simplejpeg" if decoder is None else f"crop decoder ({decoder.name})")
    monkeypatch.setattr(transform, "crop_decoder", lambda: None)
    assert decoder_name() == "simplejpeg"


def test_without_the_library_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(data=image_bytes(1), height=24, width=32)
    expected = trained(replace(sample, data=memoryview(image_bytes(1))), 1, PLAIN, size=16, use_library=True)
    monkeypatch.setattr(transform, "crop_decoder", lambda: pytest.fail("the library was asked"))
    np.testing.assert_array_equal(trained(sample, 1, PLAIN, size=16, use_library=False), expected)


@pytest.mark.parametrize("use_library", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize("mode", ["resize", "central_crop", "fewshot"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_border_is_cut_off_first(
    mode: Literal["resize", "central_crop", "fewshot"], orientation: int, use_library: bool
) -> None:
    """The view is that of the image without it, however the image is stored."""
    data = image_bytes(5, height=60, width=90)
    sample = Sample(data=data, height=60, width=90, orientation=orientation)
    upright = turned(decode_stored(data, height=60, width=90), turn_of(orientation))
    how = EvaluationTransform(mode=mode)
    expected, found, of_pixels = (np.zeros((24, 24, 3), dtype=np.uint8) for _ in range(3))
    evaluation_view_of_pixels(np.ascontiguousarray(upright[3:-3, 3:-3]), how, out=expected)
    evaluation_view(sample, replace(how, border=3), out=found, use_library=use_library)
    evaluation_view_of_pixels(upright, replace(how, border=3), out=of_pixels)
    np.testing.assert_array_equal(of_pixels, expected)
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1
    with pytest.raises(DecodeError, match=r"nothing of .* pixels is left without a border of 30"):
        evaluation_view(sample, replace(how, border=30), out=found, use_library=use_library)
