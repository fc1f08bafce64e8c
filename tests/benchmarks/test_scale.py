"""The figures of docs/scale.md are those of `plan`."""

from pathlib import Path

from benchmarks.scale import plan_table

DOC = Path("docs/scale.md")


def test_the_table_of_the_docs_is_what_plan_predicts() -> None:
    assert plan_table() in DOC.read_text()
