"""Curves keep every spike, and read whatever a file holds."""

import json
from pathlib import Path

from pipeline.runs.curves import read_curves


def test_the_envelope_keeps_every_spike_and_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    spikes = {7_001: 50.0, 19_999: -3.0}
    lines = [{"step": step, "loss": spikes.get(step, 1 + step % 5 / 10)} for step in range(1, 20_002)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (loss,) = read_curves(path).curves
    points = loss.envelope(100)
    assert spikes.items() <= dict(points).items()
    assert (points[0][0], points[-1][0]) == (1, 20_001)
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert len(points) <= 400


def test_lines_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": NaN, "perf/mfu": 0.3, "data/bytes": 3}\n[1]\n{"step": 3, "loss": 2}\n'
        '{"step": 2, "loss": 9}\n{"step": 4, "loss": "x", "time/forward": 0.5}\n{"step": 5, "lo'
    )
    found = read_curves(path)
    assert (found.num_unusable, found.num_repeated, found.has_half_line) == (1, 1, True)
    assert {one.name: (list(one.values), one.num_not_finite) for one in found.curves} == {
        "loss": ([2.0], 2),
        "perf/mfu": ([0.3], 0),
        "time/forward": ([0.5], 0),
    }
    assert read_curves(tmp_path / "nothing").curves == ()


def test_what_is_too_small_for_a_scale_is_zero(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = (0.0, 2e-323, 1e-310, -1e-300, 1e-38)
    path.write_text("".join(f'{{"step": {step}, "loss": {value}}}\n' for step, value in enumerate(values)))
    (loss,) = read_curves(path).curves
    assert list(loss.values) == [0.0, 0.0, 0.0, 0.0, 1e-38]


def test_scores_on_other_datasets_and_few_shot_accuracies_are_curves(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    scores = {"eval/digits-test/accuracy": 0.5, "eval/digits-test/ema_accuracy": 0.25, "fewshot/5_shots": 0.75}
    path.write_text(json.dumps({"step": 1, "loss": 1.0, **scores, "eval/digits-test/top5": 1.0}) + "\n")
    assert {one.name: list(one.values) for one in read_curves(path).curves} == {
        "loss": [1.0],
        **{name: [value] for name, value in scores.items()},
    }
