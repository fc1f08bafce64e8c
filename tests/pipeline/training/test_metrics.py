"""metrics.jsonl: floats bit for bit, and nothing beyond the step a run continues from."""

import json
import math
import struct
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.training.metrics import Metrics, cut_after, read_metrics


def line(step: int) -> str:
    return json.dumps({"step": step, "loss": step / 7}) + "\n"


@pytest.mark.parametrize(
    ("content", "step", "kept"),
    [
        pytest.param(line(1) + line(2) + line(3), 2, [1, 2], id="later steps are cut"),
        pytest.param(line(1) + line(2), 2, [1, 2], id="nothing to cut"),
        pytest.param(line(1) + line(2), 0, [], id="from scratch"),
        pytest.param(line(1) + '{"step": 2, "lo', 5, [1], id="a half-written line"),
        pytest.param(line(1) + line(2).rstrip("\n"), 5, [1, 2], id="only the line's end is missing"),
        pytest.param(line(1) + "\0" * 30, 5, [1], id="zeros after a power cut"),
        pytest.param("", 5, [], id="an empty file"),
    ],
)
def test_cutting(tmp_path: Path, content: str, step: int, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    cut_after(path, step=step)
    assert path.read_text() == "".join(line(number) for number in kept)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_there_is_left_so(tmp_path: Path) -> None:
    cut_after(tmp_path / "metrics.jsonl", step=3)
    assert list(tmp_path.iterdir()) == []


def test_floats_read_back_bit_for_bit_and_a_continued_run_has_each_step_once(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e-45, math.pi * 1e300, struct.unpack("<f", struct.pack("<f", 2.3025851))[0]]
    first = Metrics(tmp_path, step=0)
    for step, value in enumerate(values, start=1):
        first.write(step, {"loss": value, "learning_rate": value / 3})
    first.close()
    assert [(found["step"], found["loss"]) for found in read_metrics(tmp_path)] == list(enumerate(values, start=1))
    continued = Metrics(tmp_path, step=2)
    continued.write(3, {"loss": 9.0})
    continued.close()
    assert [found["step"] for found in read_metrics(tmp_path)] == [1, 2, 3]
    assert read_metrics(tmp_path)[-1] == {"step": 3, "loss": 9.0}
    boards = list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert boards
    assert all(board.stat().st_size > 0 for board in boards)


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, step=0)
    metrics.write(1, {"loss": 2.5})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5}]
    metrics.close()


def test_reading_leaves_out_a_half_written_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(1) + '{"step": 2')
    assert [found["step"] for found in read_metrics(tmp_path)] == [1]


def test_a_loss_that_is_no_number_is_read_as_such(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, step=0)
    metrics.write(1, {"loss": math.nan, "grad_norm": math.inf})
    metrics.close()
    (found,) = read_metrics(tmp_path)
    assert math.isnan(found["loss"])
    assert found["grad_norm"] == math.inf


def test_curves_are_named_as_the_lines_and_a_continued_run_has_each_step_once(tmp_path: Path) -> None:
    first = Metrics(tmp_path, step=0)
    for step in range(1, 5):
        first.write(step, {"loss": step / 4, "data/bytes": 1e9 * step})
    first.close()
    continued = Metrics(tmp_path, step=2)
    continued.write(3, {"loss": 8.0, "data/bytes": 5.0, "data/requests": 7.0})
    continued.close()

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    curves = {name: [(point.step, point.value) for point in board.Scalars(name)] for name in board.Tags()["scalars"]}
    assert curves == {
        "loss": [(1, 0.25), (2, 0.5), (3, 8.0)],
        "data/bytes": [(1, 1e9), (2, 2e9), (3, 5.0)],
        "data/requests": [(3, 7.0)],
    }


def test_the_last_line_gets_more_values(tmp_path: Path) -> None:
    """Of an evaluation that was given up and is made up for."""
    metrics = Metrics(tmp_path, step=0)
    for step in (1, 2):
        metrics.write(step, {"loss": step / 7})
    metrics.amend(2, {"test_loss": 0.5})
    metrics.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1 / 7}, {"step": 2, "loss": 2 / 7, "test_loss": 0.5}]
