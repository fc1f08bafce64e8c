"""What a rank of preflight's job prints, alone."""

import json

from tests.rigs.processes import patchline


def test_a_rank_prints_before_and_after_the_exchange() -> None:
    ended = patchline("__probe", "n1")
    assert ended.code == 0, ended.errors
    before, after = map(json.loads, ended.output.splitlines())
    assert (before["has_exchanged"], after["has_exchanged"], after["fault"]) == (False, True, "")
    assert (after["node"], after["product_seconds"] > 0) == ("n1", True)


def test_it_needs_the_nodes_name() -> None:
    assert patchline("__probe").code == 2
