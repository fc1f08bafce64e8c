"""docs/models.md agrees with the code: its tables are those that the functions print, and the tests it names exist."""

import re
from pathlib import Path

from docs.models_tables import TABLE_6, costs, sizes
from tests.pipeline.models.parity import BOUND, HEADER, ROWS, words_of
from tests.pipeline.models.test_flops import TABLE_6 as TESTED

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = (CHECKOUT / "docs" / "models.md").read_text()


def test_sizes_and_costs_are_those_that_are_counted() -> None:
    assert sizes() in PAGE, "print them again: python -m docs.models_tables"
    assert costs() in PAGE, "print them again: python -m docs.models_tables"


def test_every_row_of_the_papers_table_is_one_that_is_tested() -> None:
    assert [tuple(row.values[:3]) for row in TESTED] == list(TABLE_6)


def test_the_parity_table_has_every_row_and_none_beyond_the_bound() -> None:
    lines = PAGE[PAGE.index("| " + " | ".join(HEADER)) :].split("\n\n")[0].splitlines()[2:]
    cells = [tuple(line.strip("| ").split(" | ")) for line in lines]
    assert [row[:-1] for row in cells] == [words_of(row) for row in ROWS]
    assert all(0 < float(row[-1]) < BOUND for row in cells)


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)
    assert named
    for file, name in named:
        (path,) = (CHECKOUT / "tests" / "pipeline" / "models").rglob(file)
        assert f"def {name}(" in path.read_text(), f"{file} has no {name}"
