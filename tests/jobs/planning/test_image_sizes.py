"""`patchline plan --image-sizes`: what an image costs at other resolutions, as a table, as JSON and as a picture."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from jobs.planning.scaling import at_sizes
from jobs.resolve import default_job
from shards.errors import UserError
from tests.rigs.processes import patchline

WORDS = ("plan", "vit_b16_i21k", "--image-sizes", "384", "224")


def test_attention_grows_with_the_square_of_the_tokens_and_the_rest_with_the_tokens() -> None:
    job = replace(default_job("plan", "vit_b16_i21k"), image_sizes=(448, 224))
    small, large = at_sizes(job)
    assert (small.image_size, small.num_tokens, large.num_tokens) == (224, 197, 785)
    assert small.attention_flops == 2 * 2 * 12 * 197**2 * 768
    assert large.attention_flops / small.attention_flops == pytest.approx((785 / 197) ** 2)
    rest = [at.forward_flops - at.attention_flops for at in (small, large)]
    assert rest[1] / rest[0] == pytest.approx(785 / 197, rel=5e-3)  # but the head and the class token
    assert large.activation_bytes / small.activation_bytes == pytest.approx(785 / 197, rel=0.01)


def test_axial_attention_grows_with_the_tokens_times_the_side() -> None:
    job = default_job("plan", "vit_b16_axial_jft")
    small, large = at_sizes(replace(job, image_sizes=(448, 224)))
    assert (small.num_tokens, large.num_tokens) == (196, 784)
    assert small.attention_flops == 2 * 2 * 24 * 196 * 14 * 768
    assert large.attention_flops == 8 * small.attention_flops


def test_a_resnet_has_no_tokens() -> None:
    (at,) = at_sizes(replace(default_job("plan", "bit_r50x1_jft"), image_sizes=(225,)))
    assert (at.num_tokens, at.attention_flops) == (0, 0)
    assert at.forward_flops > 0


def test_the_table_the_json_and_the_picture(tmp_path: Path) -> None:
    ended = patchline(*WORDS, "--out", str(tmp_path / "sizes.svg"))
    assert ended.code == 0, ended.errors
    rows = [line.split() for line in ended.output.splitlines() if line.strip().startswith(("224 ", "384 "))]
    assert rows == [["224", "197", "35.2", "1.00", "4.1%", "71.9"], ["384", "577", "111", "3.16", "11.1%", "210"]]
    assert max(map(len, ended.output.splitlines())) <= 80
    text = (tmp_path / "sizes.svg").read_text()
    ET.fromstring(text)  # noqa: S314 - our own
    assert "GFLOP, forward" in text
    assert "Goodput" not in text
    found = json.loads(patchline(*WORDS, "--json").output)["image_sizes"]
    assert [one["image_size"] for one in found] == [224, 384]
    both = ("--gpu", "h200", "--nodes", "1", "--out", str(tmp_path / "both.html"))
    assert patchline(*WORDS, *both).code == 0
    assert (tmp_path / "both.html").read_text().count("<svg") == 5


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("225",), "--image-sizes has 225, not a multiple of the patch (16 px); take 224 or 240"),
        (("5",), "not a multiple of the patch (16 px); take 16"),
        (("224", "224"), "--image-sizes is (224, 224); allowed: different sizes, such as --image-sizes 224 384 512"),
        (("224", "--out", "a.png"), "--out is 'a.png'; allowed: a name that ends in .svg or .html"),
    ],
)
def test_mistakes(sizes: tuple[str, ...], message: str) -> None:
    ended = patchline("plan", "vit_b16_i21k", "--image-sizes", *sizes)
    assert ended.code == 2
    assert message in " ".join(ended.errors.split())


def test_a_job_says_the_same() -> None:
    with pytest.raises(UserError, match="--image-sizes has 230"):
        at_sizes(replace(default_job("plan", "vit_b16_i21k"), image_sizes=(224, 230)))
