"""Curves keep every spike, and read whatever a file holds."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.runs.curves import COLUMNS, Curves, read_tail_of_curves
from pipeline.runs.summary_file import NAME, read_curves


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


def written(path: Path, steps: range, *, spikes: dict[int, float] = {}) -> None:  # noqa: B006 - nobody changes it
    """Appends a line for each step."""
    with path.open("a") as file:
        for step in steps:
            loss = spikes.get(step, 1 + step % 5 / 10)
            file.write(json.dumps({"step": step, "loss": loss, "epoch": step / 10, "time/step": 0.25}) + "\n")


def plain(found: Curves) -> object:
    """All that was read, as values that can be compared."""
    curves = [(one.name, list(one.steps), list(one.values), one.num_not_finite) for one in found.curves]
    losses = [list(each) for each in (found.losses.steps, found.losses.sums, found.losses.counts)]
    return curves, losses, found.lines, found.num_unusable, found.num_repeated


MOST_POINTS = 1 << 13  # a quarter of the real bounds, to be quick
SPIKES = {7_001: 50.0, 13_333: -3.0, 27_777: 49.0}
LONG = range(1, 3 * MOST_POINTS + 4_000)


@pytest.fixture(scope="module")
def long_metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Metrics of more steps than are held, with their summary beside them. Tests copy the folder."""
    path = tmp_path_factory.mktemp("long") / "metrics.jsonl"
    written(path, LONG, spikes=SPIKES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.runs.curves.MOST_POINTS", MOST_POINTS)
        patch.setattr("pipeline.runs.curves.NUM_STRETCHES", MOST_POINTS // 8)
        patch.setattr("pipeline.runs.summary_file._LEAST_LINES", MOST_POINTS)
        read_curves(path)
        yield path


def test_a_long_curve_keeps_the_least_and_the_most_of_each_stretch_in_bounded_memory(long_metrics: Path) -> None:
    found = read_curves(long_metrics)
    loss = found.curves[0]
    assert len(loss.steps) <= MOST_POINTS + 1024
    assert SPIKES.items() <= dict(zip(loss.steps, loss.values, strict=True)).items()
    assert SPIKES.items() <= dict(loss.envelope()).items()
    assert (loss.steps[0], loss.steps[-1]) == (LONG[0], LONG[-1])
    assert sum(found.losses.counts) == len(LONG)
    means = found.losses.columns(200)
    assert (len(means), means[-1][0]) == (200, LONG[-1])
    assert all(abs(mean - 1.2) < 0.5 for _, mean in means)
    width = loss.steps[-1] // COLUMNS
    assert max(b - a for (a, _), (b, _) in pairwise(loss.envelope())) <= 2 * width


def test_what_is_kept_beside_the_metrics_gives_the_same_as_reading_them(long_metrics: Path, tmp_path: Path) -> None:
    shutil.copytree(long_metrics.parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "metrics.jsonl"
    assert (tmp_path / NAME).exists()
    more = range(LONG[-1] + 1, LONG[-1] + MOST_POINTS + 10)
    written(path, more, spikes={more[5]: 99.0})
    grown = plain(read_curves(path))
    (tmp_path / NAME).unlink()
    assert plain(read_curves(path)) == grown


def renamed(path: Path) -> None:
    """Puts another file with the same content in its place."""
    shutil.copy(path, path.with_name("x"))
    path.with_name("x").replace(path)


def changed_in_the_middle(path: Path) -> None:
    """Replaces a file by one of the same length in which one value has changed."""
    data = bytearray(path.read_bytes())
    data[data.index(b": 1.4", len(data) // 2) + 4] = ord("9")
    path.with_name("x").write_bytes(data)
    path.with_name("x").replace(path)


def cut(path: Path) -> None:
    """Ends the file at its half, as a run does that resumes there."""
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\n", len(data) // 2) + 1])


def summary_changed(change: Callable[[bytes], bytes], *, is_sealed: bool) -> Callable[[Path], None]:
    """Changes the summary, with the digest that fits if `is_sealed`."""

    def damage(path: Path) -> None:
        summary = path.with_name(NAME)
        digest, _, body = summary.read_bytes().partition(b"\n")
        body = change(body)
        digest = hashlib.sha256(body).hexdigest().encode() if is_sealed else digest
        summary.write_bytes(digest + b"\n" + body)

    return damage


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(renamed, id="copied"),
        pytest.param(changed_in_the_middle, id="another value"),
        pytest.param(cut, id="cut"),
        pytest.param(lambda path: path.with_name(NAME).write_bytes(b"x"), id="no summary"),
        pytest.param(summary_changed(lambda body: body[:-1] + b"x", is_sealed=False), id="a flipped byte"),
        pytest.param(summary_changed(lambda body: body[:-8], is_sealed=True), id="too short"),
        pytest.param(summary_changed(lambda body: body + bytes(8), is_sealed=True), id="too long"),
        pytest.param(summary_changed(lambda body: body[:-8] + b"\xff" * 8, is_sealed=True), id="not finite"),
        pytest.param(
            summary_changed(lambda body: body.replace(b'"num_lines": ', b'"num_lines": -'), is_sealed=True),
            id="a negative count",
        ),
        pytest.param(
            summary_changed(lambda body: body.replace(b'"num_points": ', b'"num_points": 9'), is_sealed=True),
            id="too many points",
        ),
        pytest.param(
            summary_changed(lambda body: body.replace(b'"why": "last"', b'"why": "best x"'), is_sealed=True),
            id="a best line without its score",
        ),
        pytest.param(
            summary_changed(lambda body: body.replace(b'"format": 1', b'"format": 2'), is_sealed=True), id="newer"
        ),
    ],
)
def test_a_summary_that_does_not_fit_is_made_again(
    long_metrics: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    shutil.copytree(long_metrics.parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "metrics.jsonl"
    change(path)
    found = plain(read_curves(path))
    path.with_name(NAME).unlink(missing_ok=True)
    assert found == plain(read_curves(path))


def test_a_short_file_has_no_summary(tmp_path: Path) -> None:
    written(tmp_path / "metrics.jsonl", range(1, 100))
    read_curves(tmp_path / "metrics.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_lines_that_are_kept_say_what_all_of_them_say(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 1, "loss": 1.0, "epoch": 0.5, "test_accuracy": 0.9, "eval/a/accuracy": 0.1},
        {"step": 2, "test_accuracy": 0.9, "test_ema_accuracy": 0.2},
        {"step": 3, "test_accuracy": 0.5, "fewshot/5_shots": 0.3, "epoch": "x"},
        {"step": 4, "test_accuracy": 7},
        {"step": 5, "loss": 2.0},
        {"step": 6},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["step"] for line in read_curves(path).lines] == [1, 2, 3, 6]


def test_the_end_of_the_curves_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, range(1, 1_000))
    (loss, _) = read_tail_of_curves(path, most_bytes=2_000).curves
    assert loss.steps[-1] == 999
    assert 10 < len(loss.steps) < 40
    assert plain(read_tail_of_curves(path, most_bytes=1 << 20)) == plain(read_curves(path))
