"""Flags about nodes that contradict each other, or say nothing: one message each."""

import pytest

from tests.rigs.processes import patchline


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("--nodes", "8"), "--nodes 8 says nothing without --gpu; add --gpu h100", id="no GPU"),
        pytest.param(("--gpu", "h100", "--price", "2"), "--price 2.0 says nothing without --nodes", id="no nodes"),
        pytest.param(("--gpu", "h100", "--simulate"), "--simulate says nothing without --nodes", id="a switch"),
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
        pytest.param(
            ("--gpu", "h100", "--nodes", "512", "--training.steps", "1000000000", "--simulate"),
            "at most 20,000,000 are simulated",
            id="too much to simulate",
        ),
    ],
)
def test_mistakes_about_nodes(words: tuple[str, ...], message: str) -> None:
    ended = patchline("plan", "vit_h14_jft", *words)
    assert ended.code == 2
    assert message in " ".join(ended.errors.split())
    assert "Traceback" not in ended.errors
