"""A JPEG of which a part is missing is told from a sound one."""

import io
import re
from pathlib import Path

import pytest
import simplejpeg
from PIL import Image

from shards.images.damage import jpeg_damage
from tests.rigs.images import half_missing, image_bytes, noisy_jpeg


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(half_missing(noisy_jpeg()), "extraneous bytes", id="zeros of a bad disk"),
        pytest.param(half_missing(noisy_jpeg(progressive=True)), "extraneous bytes", id="zeros, progressive"),
        pytest.param(half_missing(noisy_jpeg(), b""), "premature end of data segment", id="cut, with an end mark"),
        pytest.param(half_missing(noisy_jpeg(progressive=True), b""), "premature end", id="cut, progressive"),
        pytest.param(half_missing(noisy_jpeg(), b"\x11\x22\x33"), "Corrupt JPEG data", id="other bytes"),
        pytest.param(half_missing(noisy_jpeg(mode="L")), "extraneous bytes", id="zeros, grey"),
        pytest.param(half_missing(noisy_jpeg(mode="CMYK")), "extraneous bytes", id="zeros, CMYK"),
        pytest.param(half_missing(noisy_jpeg(keep_rgb=True)), "extraneous bytes", id="zeros, stored as RGB"),
        pytest.param(bytes(noisy_jpeg()), "", id="sound"),
        pytest.param(bytes(noisy_jpeg(keep_rgb=True)), "", id="sound, stored as RGB"),
        pytest.param(b"", "", id="empty"),
        pytest.param(image_bytes(1, image_format="PNG")[:-40], "", id="another format"),
        pytest.param(bytes(noisy_jpeg(progressive=True)), "", id="sound, progressive"),
        pytest.param(bytes(noisy_jpeg(mode="CMYK")), "", id="sound, CMYK"),
        pytest.param(bytes(noisy_jpeg()) + b"after the end" * 9, "", id="something behind the end mark"),
    ],
)
def test_jpegs_of_which_a_part_is_missing(data: bytes, said: str) -> None:
    damage = jpeg_damage(data)
    assert said in damage
    assert bool(said) == bool(damage)
    assert jpeg_damage(memoryview(data)) == damage


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_progressive_jpeg_that_was_cut_between_two_scans(mode: str) -> None:
    """With an end mark, every decoder takes it for whole; only what the scans hold tells."""
    data = noisy_jpeg(mode=mode, progressive=True)
    assert jpeg_damage(data) == ""
    behind = data.index(b"\xff\xda") + 1
    cuts = [behind + found.start() for found in re.finditer(rb"\xff(\xc4|\xda)", data[behind:])]
    assert len(cuts) > 4
    for place in cuts:
        cut = data[:place] + b"\xff\xd9"
        assert simplejpeg.decode_jpeg(cut).shape[:2] == (300, 400)
        assert jpeg_damage(cut) == "scans of a progressive JPEG are missing"


def test_photographs_lack_nothing(test_data: Path) -> None:
    for path in sorted((test_data / "imagenet-sample").iterdir())[:50]:
        assert jpeg_damage(path.read_bytes()) == ""
        with Image.open(path) as image:
            file = io.BytesIO()
            image.convert("RGB").save(file, "JPEG", progressive=True)
        assert jpeg_damage(file.getvalue()) == ""
