"""`patchline plan` over nodes and over image sizes: tables of 80 columns, JSON, pictures, and one message for each pair
of flags that contradict each other."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from jobs.planning.scaling import at_sizes, few
from jobs.resolve import default_job
from tests.rigs.processes import patchline

NODES = ("plan", "vit_h14_jft", "--gpu", "h200", "--nodes", "32", "1", "8")
WORDS = ("plan", "vit_b16_i21k", "--image-sizes", "384", "224")


def test_the_tables_over_the_nodes() -> None:
    command = (*NODES, "--training.data.lanes", "64", "--price", "2.5", "--max-time", "24")
    ended = patchline(*command)
    assert ended.code == 0, ended.errors
    on_8 = json.loads(patchline(*command, "--json").output)["nodes"][1]
    rate, hours, cost = (f"{on_8[name]:,.0f}" for name in ("images_per_second", "gpu_hours", "cost"))
    days = f"{on_8['days']:.2f}"
    compute, host, exchange = on_8["step"].values()
    step = " ".join(few(1e3 * seconds) for seconds in (compute, host, exchange, compute + host + exchange))
    assert all(len(line) <= 80 for line in ended.output.splitlines())
    assert "…" not in ended.output, "no column is cut"
    shown = [line.split() for line in ended.output.splitlines()]
    by_nodes = {row[0]: row for row in shown if "%" in row and row[0] in ("1", "8", "32")}
    assert list(by_nodes) == ["1", "8", "32"], "in ascending order"
    assert by_nodes["8"] == ["8", "64", rate, "99.5", "%", "0.10", "3", days, hours, cost]
    text = " ".join(ended.output.split())
    for words in (
        "0.0065 failures per node and day, 10 min 2 s to restart, 3 min 0 s of start-up; jobs of at most 24 hours",
        f"8 64 64 {step} {100 * on_8['mfu_reached']:.1f}",
        "with 3,200 Gbit/s of network per node (--network-gbits), after the backward pass",
        "compute: at 44% of nominal operations",
        "vit_h14 compiled, attention cudnn, 256 images a pass, measured on NVIDIA H200",
        "nobody has measured 64 or 16 images a pass",
        f"{few(on_8['least_images_per_second'])} to {few(on_8['most_images_per_second'])} on 8, ",
        "At a batch of 4,096, at least half of a step computes on up to 256 GPUs.",
        "images of 110,000 bytes (--image-bytes) in blocks of 64: 7.2 MB per request",
        "With 32 nodes ranks share lanes and read them several times",
        "A run does not begin with more ranks than lanes.",
        "nodes above RSC-2 Llama 3 RSC-1 OPT-175B RSC 1k GPUs",
    ):
        assert words in text, ended.output


def test_without_a_price_there_is_no_cost() -> None:
    ended = patchline(*NODES)
    assert ended.code == 0
    assert "cost" not in ended.output


def test_json_has_everything() -> None:
    found = json.loads(patchline(*NODES, "--price", "3", "--json").output)
    assert found["forecast"] is None
    assert [one["num_nodes"] for one in found["nodes"]] == [1, 8, 32]
    for one in found["nodes"]:
        assert one["cost"] == pytest.approx(3 * one["gpu_hours"])
    assert json.loads(patchline("plan", "vit_h14_jft", "--gpu", "h200", "--json").output)["nodes"] == []


def test_a_small_run_is_not_shown_as_nothing() -> None:
    ended = patchline("plan", "digits_smoke", "--gpu", "h100", "--nodes", "1", "--price", "2")
    assert ended.code == 0
    assert "…" not in ended.output
    assert "3 min 0 s" in ended.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("--nodes", "8"), "--nodes 8 says nothing without --gpu; add --gpu h100", id="no GPU"),
        pytest.param(("--gpu", "h100", "--price", "2"), "--price 2.0 says nothing without --nodes", id="no nodes"),
        pytest.param(
            ("--gpu", "h100", "--nodes", "1", "--num-gpus", "16"), "--nodes 1 with --num-gpus: nodes have", id="both"
        ),
        pytest.param(("--gpu", "h100", "--nodes", "2", "2"), "allowed: different numbers", id="twice"),
        pytest.param(("--gpu", "h100", "--nodes", "0"), "--nodes is 0; allowed: 1 to 1,000,000", id="none"),
        pytest.param(("--gpu", "h100", "--nodes", "3"), "--nodes 3: --training.global-batch is 4096, not", id="3"),
        pytest.param(("--gpu", "v100", "--nodes", "1"), "--gpu is 'v100'; known: a100-40", id="unknown GPU"),
        pytest.param(("--gpu", "h100", "--nodes", "1", "--out", "a.pdf"), "that ends in .svg or .html", id="suffix"),
        pytest.param(
            ("--gpu", "h100", "--nodes", "1", "--out", "no/a.svg"), "cannot be written: No such file", id="no folder"
        ),
    ],
)
def test_mistakes_about_nodes(words: tuple[str, ...], message: str) -> None:
    ended = patchline("plan", "vit_h14_jft", *words)
    assert ended.code == 2
    assert message in " ".join(ended.errors.split())
    assert "Traceback" not in ended.errors


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
        (("224", "224"), "--image-sizes is 224 224; allowed: different sizes, such as --image-sizes 224 384 512"),
        (("224", "--out", "a.png"), "--out is 'a.png'; allowed: a name that ends in .svg or .html"),
    ],
)
def test_mistakes(sizes: tuple[str, ...], message: str) -> None:
    ended = patchline("plan", "vit_b16_i21k", "--image-sizes", *sizes)
    assert ended.code == 2
    assert message in " ".join(ended.errors.split())
