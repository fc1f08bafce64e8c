"""Sorting in runs gives what sorting in memory gives."""

import random

import pytest

from shards.sources.big_sort import BATCH_ROWS, Row, sorted_rows


@pytest.mark.parametrize(
    ("num_rows", "run_rows"),
    [
        (0, 10),
        (1, 10),
        (9, 10),  # in memory
        (10, 10),  # one run, exactly full
        (11, 10),
        (5000, 4000),  # two runs of several batches
        (3000, BATCH_ROWS),
        (100, 1),
    ],
)
def test_rows_come_sorted(num_rows: int, run_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.sources.big_sort.RUN_ROWS", run_rows)
    rng = random.Random(num_rows)
    rows: list[Row] = [(rng.randbytes(rng.randrange(4)), b"%d" % number) for number in range(num_rows)]
    assert list(sorted_rows(iter(rows))) == sorted(rows, key=lambda row: row[0])


def test_one_that_stops_early_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.sources.big_sort.RUN_ROWS", 10)
    rows = sorted_rows((b"%d" % number,) for number in range(100))
    assert next(rows) == (b"0",)
    rows.close()  # type: ignore[attr-defined]
