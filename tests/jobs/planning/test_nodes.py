"""`patchline plan --nodes`: tables of 80 columns, JSON, and one message for flags that contradict each other."""

import json

import pytest

from tests.rigs.processes import patchline

NODES = ("plan", "vit_h14_jft", "--gpu", "h200", "--nodes", "32", "1", "8")


def test_the_tables_over_the_nodes() -> None:
    ended = patchline(*NODES, "--training.data.lanes", "64", "--price", "2.5", "--max-time", "24")
    assert ended.code == 0, ended.errors
    assert all(len(line) <= 80 for line in ended.output.splitlines())
    assert "…" not in ended.output, "no column is cut"
    shown = [line.split() for line in ended.output.splitlines()]
    by_nodes = {row[0]: row for row in shown if "%" in row and row[0] in ("1", "8", "32")}
    assert list(by_nodes) == ["1", "8", "32"], "in ascending order"
    assert by_nodes["8"] == ["8", "64", "15,947", "99.6", "%", "0.16", "4", "3.09", "4,743", "11,858"]
    text = " ".join(ended.output.split())
    for words in (
        "0.0065 failures per node and day, 10 min 2 s to restart, 3 min 0 s of start-up; jobs of at most 24 hours",
        "8 64 64 232 5.12 19.7 257 25.3",
        "with 3,200 Gbit/s of network per node (--network-gbits), after the backward pass",
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
