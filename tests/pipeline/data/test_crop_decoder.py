"""Which images the library decodes, which it leaves to other decoders, and which are refused before it is called."""

import ctypes
import io
import random
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from pipeline.data import crop_decoder as module
from pipeline.data import transform
from pipeline.data.augment import (
    Box,
    Crop,
    ViewPlan,
    Viewport,
    draw_crop,
    draws_of,
    largest_denominator,
    late_crop_pixels,
    plan_view,
    training_viewport,
)
from pipeline.data.config import AugmentConfig, DataConfig, RandAugmentConfig
from pipeline.data.crop_decoder import (
    LIBRARY_NAME,
    SAMPLE,
    CropDecoder,
    ViewSettings,
    is_newer_than_known,
    sources_in,
    view_settings,
)
from pipeline.data.decode import DecodeError, Pixels, turn_of
from pipeline.data.transform import checked_decoder, crop_decoder, train_view
from pipeline.machine.probes import decoder_checks
from shards.hashing import CROPS
from tests.rigs.coded_jpegs import CodedJpeg, coded_jpeg
from tests.rigs.costly_images import progressive_jpeg, sequential_jpeg
from tests.rigs.jpegs import KINDS, jpeg_of

HEIGHT, WIDTH = 60, 80
TALL, BROAD = 180, 240  # large enough for our decoder of Huffman codes
PLAN = plan_view(
    (HEIGHT, WIDTH),
    turn_of(1),
    Crop(top=7, left=9, height=30, width=40, flip=False),
    Viewport(height=16, width=16),
    denominator=1,
)


@pytest.fixture
def decoder() -> CropDecoder:
    found = crop_decoder()
    if found is None:
        pytest.skip("the crop decoder was not built: a C compiler and libjpeg-turbo's headers make it")
    return found


def view() -> Pixels:
    return np.zeros((16, 16, 3), dtype=np.uint8)


def test_it_says_what_it_was_built_on(decoder: CropDecoder) -> None:
    assert decoder.name.startswith("libjpeg-turbo ")


@pytest.mark.parametrize("kind", KINDS)
def test_every_usual_jpeg_is_taken(decoder: CropDecoder, kind: str) -> None:
    out = view()
    assert decoder.fill(jpeg_of(kind, height=HEIGHT, width=WIDTH), PLAN, out=out)
    assert out.any()


def crop_of(decoder: CropDecoder, data: bytes, box: Box, *, height: int, width: int) -> Pixels | None:
    """The pixels of the box, not resized; None if they are left to others."""
    plan = plan_view(
        (height, width),
        turn_of(1),
        Crop(top=box.top, left=box.left, height=box.height, width=box.width, flip=False),
        Viewport(height=box.height, width=box.width),
        denominator=1,
    )
    out = np.zeros((box.height, box.width, 3), dtype=np.uint8)
    return out if decoder.fill(data, plan, out=out) else None


# Full blocks, the longest codes, runs of zeros that are as long as can be, and coefficients in the last place.
DENSE: dict[str, dict[str, object]] = {
    "noise, finest": {"quality": 100, "subsampling": 0},
    "noise, restarts": {"quality": 100, "subsampling": 2, "restart_marker_blocks": 3},
    "two colours, finest": {"quality": 100, "subsampling": 0},
    "two colours, coarse": {"quality": 10, "subsampling": 0, "optimize": True},
    "chequered, finest": {"quality": 100, "subsampling": 2},
    "chequered, coarsest": {"quality": 1, "subsampling": 0, "optimize": True},
}


def dense_jpeg(kind: str, *, height: int, width: int, seed: int) -> bytes:
    """A JPEG of one of DENSE."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    if kind.startswith("two colours"):
        pixels = np.where(pixels < 128, 0, 255).astype(np.uint8)
    if kind.startswith("chequered"):
        pixels = np.repeat((np.indices((height, width)).sum(axis=0) % 2 * 255).astype(np.uint8)[..., None], 3, axis=2)
        pixels[::9] = rng.integers(0, 256)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", **DENSE[kind])
    return file.getvalue()


BOXES = (
    Box(top=0, left=0, height=450, width=350),
    Box(top=133, left=120, height=130, width=107),
    Box(top=400, left=0, height=50, width=350),
    Box(top=0, left=340, height=3, width=10),
    Box(top=449, left=349, height=1, width=1),
)


@pytest.mark.parametrize("kind", DENSE)
def test_full_blocks_are_decoded_and_skipped_to_the_bit(decoder: CropDecoder, kind: str) -> None:
    for seed in range(3):
        data = dense_jpeg(kind, height=450, width=350, seed=seed)
        assert len(data) > 4096, "large enough for our decoder of Huffman codes"
        whole = simplejpeg.decode_jpeg(data)
        for box in BOXES:
            expected = whole[box.top : box.top + box.height, box.left : box.left + box.width]
            np.testing.assert_array_equal(crop_of(decoder, data, box, height=450, width=350), expected)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """With a few bytes of the coded data changed, inserted, or left out, or with an early end."""
    changed = bytearray(data)
    if rng.random() < 0.3:
        del changed[rng.randrange(data.index(b"\xff\xda") + 14, len(data) - 2) : -2]
        return bytes(changed)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(data.index(b"\xff\xda") + 14, len(changed) - 2)
        given = [b"", bytes([changed[place] ^ 1 << rng.randrange(8)]), b"\xff", b"\xff\x00\x00", rng.randbytes(3)]
        changed[place : place + rng.randint(0, 2)] = rng.choice(given)
    return bytes(changed)


def test_damaged_data_gives_the_same_pixels_or_is_left_to_others(decoder: CropDecoder) -> None:
    rng, num_done = random.Random(0), 0
    for seed in range(300):
        kind = rng.choice(["420", "444", "Gray", "optimised", "restart blocks", "restart rows"])
        data = damaged(jpeg_of(kind, height=TALL, width=BROAD, seed=seed), rng)
        box = rng.choice([Box(top=0, left=0, height=TALL, width=BROAD), Box(top=60, left=90, height=75, width=50)])
        found = crop_of(decoder, data, box, height=TALL, width=BROAD)
        if found is not None:
            num_done += 1
            whole = simplejpeg.decode_jpeg(data, strict=False)
            expected = whole[box.top : box.top + box.height, box.left : box.left + box.width]
            np.testing.assert_array_equal(found, expected, err_msg=f"{kind}, seed {seed}")
    assert 10 < num_done < 290, "both happen"


def test_any_tables_and_samplings_are_decoded_to_the_bit(decoder: CropDecoder) -> None:
    num_large = 0
    for seed in range(120):
        coded = coded_jpeg(random.Random(seed), most_height=200, most_width=200)
        box = Box(
            top=coded.height // 3, left=coded.width // 4, height=coded.height // 2 + 1, width=coded.width // 2 + 1
        )
        found = crop_of(decoder, coded.data, box, height=coded.height, width=coded.width)
        if found is not None:  # else a run leads beyond a block
            num_large += len(coded.data) > 4096
            encoded = np.frombuffer(coded.data, dtype=np.uint8)
            whole = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
            assert whole is not None
            expected = whole[box.top : box.top + box.height, box.left : box.left + box.width]
            np.testing.assert_array_equal(found, expected, err_msg=f"seed {seed}")
    assert num_large >= 12, "large enough for our decoder of Huffman codes"


def with_a_restart_marker_out_of_turn(data: bytes) -> bytes:
    return data.replace(b"\xff\xd1", b"\xff\xd5", 1)


def with_bytes_before_a_restart(data: bytes) -> bytes:
    return data.replace(b"\xff\xd1", b"\x55\x55\xff\xd1")


def without_bytes_before_a_restart(data: bytes) -> bytes:
    place = data.index(b"\xff\xd1")
    return data[: place - 4] + data[place:]


@pytest.mark.parametrize(
    "damage", [with_a_restart_marker_out_of_turn, with_bytes_before_a_restart, without_bytes_before_a_restart]
)
def test_what_is_wrong_between_restart_markers_is_left_to_others(
    decoder: CropDecoder, damage: Callable[[bytes], bytes]
) -> None:
    data, box = jpeg_of("restart blocks", height=TALL, width=BROAD), Box(top=0, left=0, height=TALL, width=BROAD)
    assert crop_of(decoder, data, box, height=TALL, width=BROAD) is not None
    assert crop_of(decoder, damage(data), box, height=TALL, width=BROAD) is None


def cut_off(data: bytes) -> bytes:
    return data[:-200]


def ended_early(data: bytes) -> bytes:
    return data[: len(data) // 3] + b"\xff\xd9"


def without_an_end(data: bytes) -> bytes:
    return data[:-2]


def with_a_marker_below_the_crop(data: bytes) -> bytes:
    return data[:-20] + b"\xff\xc4" + data[-18:]


@pytest.mark.parametrize("damage", [cut_off, ended_early, without_an_end, with_a_marker_below_the_crop])
def test_damage_is_left_to_others(decoder: CropDecoder, damage: Callable[[bytes], bytes]) -> None:
    data = jpeg_of("420", height=HEIGHT, width=WIDTH)
    assert not decoder.fill(damage(data), PLAN, out=view())
    large = jpeg_of("420", height=TALL, width=BROAD)
    box = Box(top=20, left=30, height=80, width=90)
    assert crop_of(decoder, damage(large), box, height=TALL, width=BROAD) is None


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(replace(PLAN, stored_height=HEIGHT + 1), id="another height"),
        pytest.param(replace(PLAN, stored_width=WIDTH - 1), id="another width"),
        pytest.param(replace(PLAN, box=Box(top=40, left=0, height=21, width=8)), id="beyond the bottom"),
        pytest.param(replace(PLAN, box=Box(top=0, left=73, height=8, width=8)), id="beyond the right"),
        pytest.param(replace(PLAN, box=Box(top=-1, left=0, height=8, width=8)), id="above the top"),
        pytest.param(replace(PLAN, box=Box(top=0, left=0, height=0, width=8)), id="nothing"),
        pytest.param(replace(PLAN, box=Box(top=2**31 - 1, left=0, height=8, width=8)), id="a sum beyond 31 bits"),
        pytest.param(replace(PLAN, denominator=2), id="the crop of another scale"),
    ],
)
def test_a_plan_that_does_not_fit_the_image_is_not_followed(decoder: CropDecoder, plan: ViewPlan) -> None:
    box = Box(top=20, left=30, height=25, width=40) if plan.denominator == 2 else plan.box
    data = jpeg_of("420", height=HEIGHT, width=WIDTH)
    assert not decoder.fill(data, replace(plan, box=box), out=view())


@pytest.mark.parametrize("denominator", [-1, 0, 3, 5, 16])
def test_other_scales_are_left_to_others(decoder: CropDecoder, denominator: int) -> None:
    box = Box(top=0, left=12, height=2, width=2)
    for height, width in ((HEIGHT, WIDTH), (TALL, BROAD)):
        plan = replace(PLAN, stored_height=height, stored_width=width, denominator=denominator, box=box)
        assert not decoder.fill(jpeg_of("420", height=height, width=width), plan, out=view())


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", bytes(100)])
def test_what_is_no_jpeg_is_left_to_others(decoder: CropDecoder, data: bytes) -> None:
    assert not decoder.fill(data, PLAN, out=view())


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(np.zeros((16, 16, 3), dtype=np.int16), id="other numbers"),
        pytest.param(np.zeros((16, 16, 4), dtype=np.uint8), id="four channels"),
        pytest.param(np.zeros((16, 16), dtype=np.uint8), id="one channel"),
        pytest.param(np.zeros((16, 32, 3), dtype=np.uint8)[:, ::2], id="gaps"),
        pytest.param(np.zeros((17, 16, 3), dtype=np.uint8), id="more than the viewport"),
        pytest.param(np.frombuffer(bytes(16 * 16 * 3), dtype=np.uint8).reshape(16, 16, 3), id="read-only"),
    ],
)
def test_an_output_that_can_not_be_filled_is_refused(
    decoder: CropDecoder, out: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
) -> None:
    with pytest.raises(ValueError, match=r"needed is a contiguous|are not inside of"):
        decoder.fill(jpeg_of("420", height=HEIGHT, width=WIDTH), PLAN, out=out)


class _WrongInOne(CropDecoder):
    """Returns a wrong last value for views that have all the properties in `wrong`."""

    wrong: frozenset[str] = frozenset()

    def fill(self, data: bytes | memoryview, plan: ViewPlan, *, out: Pixels, leaves_huffman: bool = False) -> bool:
        is_filled = super().fill(data, plan, out=out, leaves_huffman=leaves_huffman)
        is_so = {
            "wide": out.shape == (224, 224, 3),
            "progressive": b"\xff\xc2" in bytes(data),
            "scaled": plan.denominator == 2,
            "turned": plan.turn.is_exchanged,
            "antialiased": plan.viewport.is_antialiased,
            "plain": not plan.viewport.is_antialiased,
        }
        if self.wrong and all(is_so[name] for name in self.wrong):
            out[-1, -1, -1] ^= 1
        return is_filled


@pytest.mark.parametrize(
    "wrong", ["wide plain", "wide antialiased", "progressive scaled", "turned plain", "turned antialiased", "scaled"]
)
def test_one_wrong_number_is_found_when_it_is_loaded(
    decoder: CropDecoder, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    path = Path(transform.__file__).parent / LIBRARY_NAME
    monkeypatch.setattr(transform, "CropDecoder", _WrongInOne)
    assert checked_decoder(path)[0] is not None
    monkeypatch.setattr(_WrongInOne, "wrong", frozenset(wrong.split()))
    refused, reason = checked_decoder(path)
    assert refused is None
    assert reason == f"{path} gives other pixels ({decoder.name})"


@pytest.mark.usefixtures("decoder")
def test_a_stale_library_is_not_used(tmp_path: Path) -> None:
    folder = Path(transform.__file__).parent
    for path in (folder / LIBRARY_NAME, *sources_in(folder)):
        shutil.copy(path, tmp_path)
    assert checked_decoder(tmp_path / LIBRARY_NAME)[0] is not None
    with (tmp_path / "crop_decoder.c").open("a") as source:
        source.write("/* a newer one */\n")
    stale, reason = checked_decoder(tmp_path / LIBRARY_NAME)
    assert stale is None
    assert f"{LIBRARY_NAME} is made of other sources than the crop_decoder.c" in reason
    assert reason.endswith("install patchline again to renew it (or: make setup)")


def test_a_library_that_is_refused_was_built_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not (Path(transform.__file__).parent / LIBRARY_NAME).exists():
        pytest.skip("the crop decoder was not built: a C compiler and libjpeg-turbo's headers make it")
    monkeypatch.setattr(transform, "_own_decoder", transform._own_decoder.__wrapped__)
    monkeypatch.setattr(transform, "checked_decoder", lambda _: (None, "it gives other pixels"))
    assert crop_decoder() is None
    assert transform.why_no_crop_decoder() == "the crop decoder that was built is refused: it gives other pixels"
    assert "the crop decoder is not used, but simplejpeg: it gives other pixels" in caplog.text
    (check,) = decoder_checks()
    assert check.found == "simplejpeg: the crop decoder that was built is refused: it gives other pixels"
    monkeypatch.setattr(transform, "LIBRARY_NAME", "none.so")
    assert transform.why_no_crop_decoder() == "the faster crop decoder was not built"


def test_it_says_which_libjpeg_was_loaded(decoder: CropDecoder) -> None:
    """The headers may be of another version."""
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libjpeg" in line}
    said = {subprocess.run(["strings", file], capture_output=True, text=True, check=True).stdout for file in files}
    assert any(f"{decoder.name.replace(' ', ' version ')} (build " in text for text in said) or not files


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (
            b"libjpeg-turbo version 2.0.6 (build 20230203)",
            r"^libjpeg-turbo 2\.0\.6 was loaded; needed is .* 2\.1 or newer$",
        ),
        (b"libjpeg-turbo version 1.5.3 (build 1)", r"^libjpeg-turbo 1\.5\.3 was loaded"),
        (b"mozjpeg version 4.1.1 (build 20230203)", r"^mozjpeg 4\.1\.1 was loaded"),
        (b"6b  27-Mar-1998", r"does not say which libjpeg it is; needed is libjpeg-turbo 2\.1 or newer$"),
        (b"libjpeg-turbo version 3.1.0 (build 20241214)", ""),
        (b"libjpeg-turbo version 10.0.0 (build 20241214)", ""),
    ],
)
def test_the_libjpeg_that_was_loaded_is_asked_for_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: bytes, reason: str
) -> None:
    """The headers' version says what it was compiled with, not what the system loads."""
    file = tmp_path / "libjpeg.so"
    file.write_bytes(bytes(1000) + says + bytes(1000))

    class Process:
        def dladdr(self, _: object, found: Any) -> int:
            found._obj.path = str(file).encode()
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Process())
    if reason:
        with pytest.raises(ValueError, match=reason):
            module.loaded_libjpeg(1)
    else:
        assert module.loaded_libjpeg(1) == says.decode().split(" (")[0].replace(" version", "")


@pytest.mark.parametrize(
    ("name", "is_newer"),
    [
        ("libjpeg-turbo 2.1.5", False),
        ("libjpeg-turbo 3.1.99", False),
        ("libjpeg-turbo 3.2.0", True),
        ("libjpeg-turbo 3.10.0", True),
        ("libjpeg-turbo 10.0.0", True),
        pytest.param("libjpeg-turbo beta", True, id="without a version"),
    ],
)
def test_the_private_structure_is_used_only_in_versions_that_are_known(name: str, is_newer: bool) -> None:
    assert is_newer_than_known(name) == is_newer


def test_a_newer_libjpeg_decodes_the_huffman_codes(
    decoder: CropDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_NEWEST_LIBJPEG", (2, 0))
    newer, reason = checked_decoder(Path(transform.__file__).parent / LIBRARY_NAME)
    assert newer is not None
    assert (newer.leaves_huffman, reason) == (True, "")
    assert f"data.huffman_decoder is libjpeg-turbo, whatever the job says: {decoder.name} is newer" in caplog.text
    monkeypatch.setattr(transform, "_own_decoder", lambda: (newer, ""))
    assert transform.decoder_name() == f"crop decoder ({decoder.name}, which also decodes the Huffman codes)"


class _HuffmanCodesAreWrong(CropDecoder):
    """Returns wrong pixels unless libjpeg-turbo decodes the Huffman codes."""

    def fill(self, data: bytes | memoryview, plan: ViewPlan, *, out: Pixels, leaves_huffman: bool = False) -> bool:
        is_filled = super().fill(data, plan, out=out, leaves_huffman=leaves_huffman)
        out[0, 0, 0] ^= not self.leaves_huffman
        return is_filled


def test_if_our_huffman_decoder_gives_other_pixels_libjpegs_is_used(
    decoder: CropDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transform, "CropDecoder", _HuffmanCodesAreWrong)
    found, reason = checked_decoder(Path(transform.__file__).parent / LIBRARY_NAME)
    assert found is not None
    assert (found.leaves_huffman, reason) == (True, "")
    assert f"{decoder.name} gives other pixels with Patchline's" in caplog.text


def test_a_chunk_leaves_the_huffman_codes_too(decoder: CropDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, asked = view_settings(DataConfig(), size=16, resize_pixels=16), []
    assert settings

    class Library:
        def sample_views_fill(self, _data: int, _count: int, given: Any, *_: int) -> None:
            asked.append(given._obj.leaves_huffman)

    monkeypatch.setattr(decoder, "_library", Library())
    for leaves in (False, True):
        monkeypatch.setattr(decoder, "leaves_huffman", leaves)
        decoder.fill_all(np.zeros(1, dtype=SAMPLE), settings, out=np.zeros((1, 16, 16, 3), dtype=np.uint8))
    assert (asked, settings.leaves_huffman) == ([0, 1], 0)


def test_structures_are_as_large_as_in_c() -> None:
    """The C files assert the same numbers when they are compiled."""
    sizes = [ctypes.sizeof(module._Request), SAMPLE.itemsize, ctypes.sizeof(ViewSettings)]
    assert [*sizes, ctypes.sizeof(module._Operation)] == [76, 56, 80, 32]


@pytest.mark.parametrize("kind", ["420", "444", "Gray", "optimised", "restart blocks"])
def test_libjpegs_own_decoder_of_huffman_codes_gives_the_same(decoder: CropDecoder, kind: str) -> None:
    plan = plan_view(
        (TALL, BROAD),
        turn_of(1),
        Crop(top=31, left=45, height=90, width=100, flip=False),
        Viewport(height=90, width=100),
        denominator=1,
    )
    data = jpeg_of(kind, height=TALL, width=BROAD)
    assert len(data) > 4096, "large enough for our decoder of Huffman codes"
    views = np.zeros((2, 90, 100, 3), dtype=np.uint8)
    for leaves, view in zip((False, True), views, strict=True):
        assert decoder.fill(data, plan, out=view, leaves_huffman=leaves)
    np.testing.assert_array_equal(*views)


def test_the_setting_reaches_the_library(decoder: CropDecoder) -> None:
    config = DataConfig(huffman_decoder="libjpeg-turbo")
    ours, theirs = (view_settings(data, size=16, resize_pixels=16) for data in (DataConfig(), config))
    assert ours
    assert theirs
    sample = np.zeros(1, dtype=SAMPLE)
    sample[0] = (0, 0, 1, 2, 3, 4, 60, 80, 1)
    plans = [decoder.plan(sample, settings) for settings in (ours, theirs)]
    assert [plan and plan["leaves_huffman"] for plan in plans] == [0, 1]


UNUSUAL = ([(4, 2), (1, 1), (1, 1)], [(2, 4), (1, 1), (1, 1)], [(4, 1), (2, 1), (1, 1)], [(2, 2), (2, 1), (1, 2)])
USUAL = (
    *(
        [(1, 1)] * 3,
        [(2, 1)] * 3,
        [(1, 2)] * 3,
        [(2, 1), (1, 1), (1, 1)],
        [(1, 2), (1, 1), (1, 1)],
        [(2, 2), (1, 1), (1, 1)],
    ),
    *([(4, 1), (1, 1), (1, 1)], [(1, 4), (1, 1), (1, 1)], [(3, 1)]),
)


@pytest.mark.parametrize("denominator", [1, 2, 4])
def test_only_samplings_whose_crops_are_exact_are_taken(decoder: CropDecoder, denominator: int) -> None:
    """Of others, libjpeg-turbo before 3.0 leaves columns unwritten, and all versions differ in narrow crops."""
    for sampling in (*USUAL, *UNUSUAL):
        coded = coded_jpeg(random.Random(3), most_height=200, most_width=200, sampling=sampling)
        tall, broad = -(-coded.height // denominator), -(-coded.width // denominator)
        for left, width in ((0, broad), (broad // 3, broad // 2), (broad // 2, 1), (broad // 2, 2)):
            plan = ViewPlan(
                stored_height=coded.height,
                stored_width=coded.width,
                denominator=denominator,
                box=Box(top=0, left=left, height=tall, width=width),
                turn=turn_of(1),
                viewport=Viewport(height=tall, width=width),
            )
            view = np.zeros((tall, width, 3), dtype=np.uint8)
            is_done = decoder.fill(coded.data, plan, out=view)
            assert is_done == (sampling in USUAL), (sampling, left, width)
            if is_done:
                expected = fully_decoded(coded, denominator)[:, left : left + width]
                np.testing.assert_array_equal(view, expected, err_msg=f"{sampling}, {left}, {width}")


@pytest.mark.parametrize(
    ("height", "width", "costly"),
    [
        pytest.param(1500, 1500, progressive_jpeg(1500, 1500, num_scans=882), id="scans"),
        pytest.param(13_000, 8200, progressive_jpeg(13_000, 8200, num_scans=22, band=21), id="pixels of scans"),
        pytest.param(11_000, 11_000, progressive_jpeg(11_000, 11_000, num_scans=1, num_components=3), id="memory"),
        pytest.param(11_000, 11_000, sequential_jpeg(11_000, 11_000, [[1], [2], [3]]), id="memory, sequential"),
    ],
)
def test_what_may_cost_too_much_is_left_to_python_at_once(
    decoder: CropDecoder, height: int, width: int, costly: bytes
) -> None:
    plan = replace(PLAN, stored_height=height, stored_width=width)
    began = time.process_time()
    assert not decoder.fill(costly, plan, out=view())
    assert time.process_time() - began < 0.2, "nothing was decoded"
    sample = replace(STORED, data=costly, height=height, width=width)
    draws = draws_of(np.array([5]), np.array([0]), seed=0)[0]
    with pytest.raises(DecodeError, match=r"costly to decode: .*; allowed: \d+ \(--limits\."):
        train_view(sample, draws, config=AugmentConfig(), out=view())


@dataclass(frozen=True, kw_only=True)
class Stored:
    """An image as a shard holds it."""

    data: bytes = b""
    height: int = HEIGHT
    width: int = WIDTH
    orientation: int = 1


STORED = Stored()


def fully_decoded(coded: CodedJpeg, denominator: int) -> Pixels:
    """All of it, by Pillow."""
    with Image.open(io.BytesIO(coded.data)) as image:
        image.draft("RGB", (image.width // denominator, image.height // denominator))
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (AugmentConfig(), 224),
        (AugmentConfig(min_area=0.3, scaled_decode=False, flip=False), 16),
        (AugmentConfig(min_area=1e-6, max_area=0.1, min_ratio=0.01, max_ratio=100.0), 7),
        (AugmentConfig(min_area=1.0, min_ratio=1.0, max_ratio=1.0), 32),  # often no crop fits
        (AugmentConfig(crop="random_resized"), 224),
        (AugmentConfig(crop="random_resized", min_area=1e-6, min_ratio=0.01, max_ratio=100.0), 1),
        (AugmentConfig(crop="random_resized", min_area=1.0), 16),  # often none fits
        (AugmentConfig(crop="resize_crop", exif=False), 32),
        (AugmentConfig(crop="short_side_crop"), 32),
        (AugmentConfig(crop="short_side_crop", resize_pixels=256), 224),
        (AugmentConfig(crop="none", antialias=True), 8),
    ],
)
def test_it_plans_what_python_plans(decoder: CropDecoder, config: AugmentConfig, size: int) -> None:
    settings = view_settings(DataConfig(augment=config), size=size, resize_pixels=late_crop_pixels(config, size))
    assert settings
    sides = np.random.default_rng(size).integers(1, [[4, 60, 600, 5000]], size=(30, 4))
    for number in range(200):
        height, width = int(sides[number % 30, number % 4]), int(sides[number // 7, number // 4 % 4])
        ids, epochs, orientation = np.array([number * 7919]), np.array([number % 3]), number % 8 + 1
        sample = np.zeros(1, dtype=SAMPLE)
        key = CROPS.key(3, number % 3)
        sample[0] = (0, 0, number * 7919, key, 0, 0, height, width, orientation)
        draws, turn = draws_of(ids, epochs, seed=3)[0], turn_of(orientation if config.exif else 1)
        crop = draw_crop(*((width, height) if turn.is_exchanged else (height, width)), draws, config=config)
        viewport = training_viewport(crop, draws, config=config, size=size)
        may_scale = config.scaled_decode
        denominator = largest_denominator(crop, height=viewport.height, width=viewport.width) if may_scale else 1
        plan = plan_view((height, width), turn, crop, viewport, denominator=denominator)
        assert decoder.plan(sample, settings) == {
            "stored_height": height,
            "stored_width": width,
            "denominator": denominator,
            "top": plan.box.top,
            "left": plan.box.left,
            "height": plan.box.height,
            "width": plan.box.width,
            "is_exchanged": turn.is_exchanged,
            "is_upside_down": turn.is_upside_down,
            "is_leftright": turn.is_leftright,
            "is_antialiased": config.antialias,
            "leaves_huffman": 0,
            "resized_height": viewport.height,
            "resized_width": viewport.width,
            "window_top": viewport.top,
            "window_left": viewport.left,
            "window_height": size,
            "window_width": size,
            "is_mirrored": viewport.is_mirrored,
        }, (number, height, width, orientation)


@pytest.mark.parametrize(
    ("height", "width", "orientation"), [(0, 9, 1), (9, -1, 1), (9, 1 << 30, 1), (9, 9, 0), (9, 9, 9)]
)
def test_an_index_that_cannot_be_right_is_left_to_python(
    decoder: CropDecoder, height: int, width: int, orientation: int
) -> None:
    sample = np.zeros(1, dtype=SAMPLE)
    sample[0] = (0, 0, 1, 2, 3, 4, height, width, orientation)
    settings = view_settings(DataConfig(), size=16, resize_pixels=16)
    assert settings
    assert decoder.plan(sample, settings) is None


@pytest.mark.parametrize("num_bytes", [0, 1, 15, 16, 63, 64, 65, 79, 80, 127, 128, 129, 1000, 4095])
def test_its_crc32_is_zlibs(decoder: CropDecoder, num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).bytes(num_bytes + 1)[1:]
    assert decoder.crc32(data) == zlib.crc32(data)


@pytest.mark.parametrize("checks_crc32", [True, False], ids=["by the library", "by ISA-L"])
def test_a_chunk_says_which_of_its_samples_are_done(decoder: CropDecoder, checks_crc32: bool) -> None:
    decoder = CropDecoder(Path(transform.__file__).parent / LIBRARY_NAME)
    decoder.checks_crc32 = decoder.checks_crc32 and checks_crc32
    good = jpeg_of("420", height=HEIGHT, width=WIDTH)
    data = [good, None, b"", cut_off(good), b"\x89PNG", good, good, memoryview(good)]
    samples = np.zeros(len(data), dtype=SAMPLE)
    samples["height"], samples["width"], samples["orientation"] = HEIGHT, WIDTH, 1
    samples["num_bytes"] = [len(own or b"") for own in data]
    samples["data"] = [np.frombuffer(own, np.uint8).ctypes.data if own else 0 for own in data]
    samples["crc32"] = [zlib.crc32(own or b"") for own in data]
    samples["crc32"][5] += 1
    samples["height"][6] += 1
    settings = view_settings(DataConfig(randaugment=RandAugmentConfig(num_ops=2)), size=16, resize_pixels=16)
    assert settings
    views = np.zeros((len(data), 16, 16, 3), dtype=np.uint8)
    assert decoder.fill_all(samples, settings, out=views).tolist() == [True, *6 * [False], True]
    np.testing.assert_array_equal(views[0], views[-1])
    assert views[0].any()
    with pytest.raises(ValueError, match=r"needed is a contiguous uint8\[8, 16, 16, 3\]"):
        decoder.fill_all(samples, settings, out=views[:, ::-1])
    with pytest.raises(ValueError, match=r"needed is a contiguous uint8\[7, 16, 16, 3\]"):
        decoder.fill_all(samples[1:], settings, out=views)
    with pytest.raises(ValueError, match=r"needed is a contiguous SAMPLE\[n\]"):
        decoder.fill_all(samples[::2], settings, out=views[::2])
