"""Which images the library decodes, which it leaves to other decoders, and which are refused before it is called."""

import shutil
from collections.abc import Callable
from ctypes import util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.data import transform
from pipeline.data.augment import Crop, Viewport
from pipeline.data.crop_decoder import LIBRARY_NAME, SOURCES, CropDecoder
from pipeline.data.decode import Pixels, turn_of
from pipeline.data.transform import checked_decoder, crop_decoder
from pipeline.data.view_plan import Box, ViewPlan, plan_view
from tests.rigs.jpegs import KINDS, jpeg_of

HEIGHT, WIDTH = 60, 80
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


def test_another_library_is_refused() -> None:
    name = util.find_library("m")
    if name is None:
        pytest.skip("the system's mathematics library is not found by name")
    with pytest.raises(ValueError, match="is another library"):
        CropDecoder(Path(name))


class _WrongInOne(CropDecoder):
    """Returns a wrong last value for views that have all the properties in `wrong`."""

    wrong: frozenset[str] = frozenset()

    def fill(self, data: bytes | memoryview, plan: ViewPlan, *, out: Pixels) -> bool:
        is_filled = super().fill(data, plan, out=out)
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
    decoder: CropDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    path = Path(transform.__file__).parent / LIBRARY_NAME
    monkeypatch.setattr(transform, "CropDecoder", _WrongInOne)
    assert checked_decoder(path) is not None
    monkeypatch.setattr(_WrongInOne, "wrong", frozenset(wrong.split()))
    assert checked_decoder(path) is None
    assert f"gives other pixels ({decoder.name})" in caplog.text


def test_a_stale_library_is_not_used(decoder: CropDecoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(transform.__file__).parent
    for name in (LIBRARY_NAME, *SOURCES):
        shutil.copy(folder / name, tmp_path)
    assert checked_decoder(tmp_path / LIBRARY_NAME) is not None
    with (tmp_path / SOURCES[0]).open("a") as source:
        source.write("/* a newer one */\n")
    assert checked_decoder(tmp_path / LIBRARY_NAME) is None
    assert f"{LIBRARY_NAME} is made of other sources than the crop_decoder.c" in caplog.text
    assert "install patchline again to renew it (or: make setup)" in caplog.text
