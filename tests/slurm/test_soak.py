"""The matrix of faults (tests/soak/cluster.py): no cell of it is empty, and the guide promises what it shows."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.soak.cluster import BUILT, CELLS, RESULT, Cell, Found, campaign, table
from tests.soak.cluster_faults import has_memory_groups

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "slurm.md"


def test_no_cell_is_empty_or_wrong() -> None:
    result = json.loads(RESULT.read_text())
    found = {Cell(row["fault"], row["place"], row["moment"]): row for row in result["cells"]}
    left = [Cell(**row) for row in result["not_tried_yet"]]
    assert {*found, *left} == {*BUILT}
    assert [str(cell) for cell, row in found.items() if not row["is_right"]] == []
    assert len(BUILT) + len(result["not_built"]) == len(CELLS)
    assert all(re.search(r"\w", row["why"]) for row in result["not_built"])


def test_the_guide_has_the_matrix_as_a_table() -> None:
    result, guide = json.loads(RESULT.read_text()), GUIDE.read_text()
    assert table(result) in guide
    assert f"Each of the {len(result['cells'])} jobs" in guide


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0 or not has_memory_groups(), reason="needs root, and control groups for memory")
def test_kills_of_each_kind_of_job_cost_no_work() -> None:
    found: list[Found] = []
    places = ("batch script", "gate", "evaluation", "packing task")
    assert campaign([Cell("kill", place, "start") for place in places], keep=found.extend), found
    assert len(found) == len(places)
