"""The lines of some steps, out of a file that may be long and is being written."""

from pathlib import Path

import pytest

from pipeline.training.reporting.logger_thread import lines_between
from pipeline.training.reporting.metrics import Metrics
from shards.errors import InvalidDataError


@pytest.mark.parametrize(
    ("after", "last", "steps"),
    [
        pytest.param(0, 7, [[1, 2, 3], [4, 5, 6], [7]], id="all"),
        pytest.param(2, 5, [[3, 4, 5]], id="after one, up to and with the other"),
        pytest.param(7, 9, [], id="none"),
        pytest.param(5, 3, [], id="the service is ahead"),
    ],
)
def test_which(tmp_path: Path, after: int, last: int, steps: list[list[int]]) -> None:
    metrics = Metrics(tmp_path, step=0)
    for step in range(1, 8):
        metrics.write(step, {"loss": 1 / step, "data/bytes": 3.0})
    metrics.close()
    found = list(lines_between(tmp_path / "metrics.jsonl", after=after, last=last, most_at_once=3))
    assert [[line.step for line in some] for some in found] == steps
    for line in (line for some in found for line in some):
        assert line.values == {"train/loss": 1 / line.step, "work/data/bytes": 3.0}


def test_what_is_no_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    bad = [
        '{"step": 1, "loss": 1}x',
        '{"step": true}',
        '{"step": -1}',
        "[1]",
        "NaN",
        '{"step": 5, "loss": "1"}',
        "\xff",
    ]
    path.write_text(
        "\n".join([*bad, '{"step": 2, "loss": NaN, "name": [], "far": 1' + "0" * 400 + "}", '{"step": 3, "loss": 1'])
    )
    (some,) = lines_between(path, after=0, last=9, most_at_once=100)
    assert [(line.step, list(line.values)) for line in some] == [(5, []), (2, ["train/loss"])]


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    import os  # noqa: PLC0415

    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(InvalidDataError):
        list(lines_between(tmp_path / "metrics.jsonl", after=0, last=1, most_at_once=1))
