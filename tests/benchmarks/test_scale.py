"""The figures of docs/scale.md are those of `plan` and of the committed results, and `plan` assumes measured times.
docs/benchmarks.md has the table of the committed result of benchmarks/scale_resume.py."""

import json
import re
from pathlib import Path

from benchmarks import scale_resume
from benchmarks.scale import (
    ENGINE,
    PAGE,
    RATES,
    RESUME,
    all_rows,
    host_constants,
    packaged_rates,
    slowest_host,
    tables,
)
from pipeline.planning import step_time
from pipeline.planning.rates import PACKAGED


def test_plan_assumes_the_times_that_were_measured() -> None:
    assumed = {name: getattr(step_time, name) for name in host_constants()}
    assert assumed == host_constants(), "run `python -m benchmarks.scale --update`"
    assert slowest_host() == step_time.SLOWEST_HOST, "run `python -m benchmarks.scale --update`"


def test_plan_has_the_rates_that_were_measured() -> None:
    assert RATES.read_text() == packaged_rates(), "run `python -m benchmarks.scale --update`"
    assert [path.relative_to(Path.cwd()) for path in PACKAGED.glob("*")] == [RATES]


def test_the_page_has_the_tables_of_plan_and_of_the_results() -> None:
    page = PAGE.read_text()
    for table in tables():
        assert table in page, "run `python -m benchmarks.scale --update`"


def test_the_benchmarks_have_the_table_of_what_a_resume_reads() -> None:
    page = PAGE.with_name("benchmarks.md").read_text()
    assert scale_resume.table(json.loads(RESUME.read_text())) in page, "run `python -m benchmarks.scale_resume`"


def test_the_guide_shows_every_figure_and_each_that_misses_its_aim() -> None:
    rows, guide = all_rows(), PAGE.read_text()
    assert {row.part for row in rows} == {"reads", "host", "start", "resume"}
    for row in rows:
        assert row.is_met or f"misses its aim, {row.aim:g} CPU-seconds" in guide, row.figure
    assert json.loads(ENGINE.read_text())["machine"]["cpu"] in re.sub(r"\s+", " ", guide)
