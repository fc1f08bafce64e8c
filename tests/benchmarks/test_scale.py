"""The figures of docs/scale.md are those of `plan` and of the committed results."""

from pathlib import Path

from benchmarks.scale import all_rows, plan_table, result_table

DOC = Path("docs/scale.md")


def test_the_table_of_the_docs_is_what_plan_predicts() -> None:
    assert plan_table() in DOC.read_text()


def test_the_guide_shows_every_figure_and_each_that_misses_its_aim() -> None:
    rows, guide = all_rows(), DOC.read_text()
    assert {row.part for row in rows} == {"reads", "host", "start", "resume"}
    assert result_table(rows).strip() in guide
    for row in rows:
        assert row.is_met or f"misses its aim, {row.aim:g} CPU-seconds" in guide, row.figure
