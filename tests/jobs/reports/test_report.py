"""`patchline report` of a real run that was killed three times, on another number of ranks once, with a spike that was
rewound and samples in quarantine; and of folders that are no run, or a damaged one."""

import json
import os
import shutil
import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from jobs.reports.facts import gather
from jobs.reports.report import Kind, curve_plot, kind_of, render, summary, time_bar
from jobs.reports.worth import ScoreSheet, worth_of
from pipeline.runs.curves import Curve
from pipeline.runs.starts import Cause
from pipeline.runs.time import Restart
from shards.output.quantities import percent
from tests.jobs.reports.test_ls import make
from tests.pipeline.training.test_rewind import POISON, REWIND, STEPS, words_of
from tests.rigs.browser import CHROMIUM, browser
from tests.rigs.kills import Moment, run_and_kill, step_at_least
from tests.rigs.poisoned import packed_with_poison
from tests.rigs.processes import patchline
from tests.rigs.training import AT_ONCE, losses, run

pytestmark = pytest.mark.slow
KIND = Kind(title="A curve", unit="<i>")


@dataclass(frozen=True, kw_only=True)
class Made:
    run_dir: Path
    wall_seconds: float


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("report")
    url = packed_with_poison(folder / "data", [POISON])
    for shard in sorted((Path(url) / "shards").glob("*.tar")):
        data = bytearray(shard.read_bytes())
        data[data.index(b"IDAT") + 6] ^= 0xFF  # of the first image
        shard.write_bytes(data)
    run_dir = folder / "run <b>"
    words = words_of(url, run_dir, *REWIND, *AT_ONCE, "--micro-batch", "4", "--data.max-quarantined", "0.5")
    began: list[float] = []

    def moment_of(step: int) -> Moment:
        def reached(run_dir: Path) -> bool:
            if not began and (run_dir / "starts.jsonl").exists():
                began.append(time.monotonic())
            return step_at_least(step)(run_dir)

        return reached

    for step, num_ranks in ((6, 1), (11, 2), (15, 1)):
        assert run_and_kill(words, run_dir, moment=moment_of(step), num_ranks=num_ranks, log_dir=folder)
    assert run(words, num_ranks=1, log_dir=folder) == 0
    return Made(run_dir=run_dir, wall_seconds=time.monotonic() - began[0])


def test_every_restart_has_its_cause_and_cost_and_the_bar_is_the_wall_time(made: Made) -> None:
    facts = gather(made.run_dir)
    found = facts.time
    starts = [one for one in found.restarts if one.cause.kind != "rewound by the guard"]
    assert [one.cause.kind for one in starts] == ["killed or crashed"] * 3
    assert all(one.seconds > 0 and one.step is not None and one.startup_seconds for one in starts)
    assert [one.topology for one in starts] == [
        "1 rank, ZeRO-1, cpu -> 2 ranks, ZeRO-1, cpu",
        "2 ranks, ZeRO-1, cpu -> 1 rank, ZeRO-1, cpu",
        "",
    ]
    (rewind,) = [one for one in found.restarts if one not in starts]
    assert (rewind.step, rewind.lost_steps) == (16, POISON + 1 - 16)
    assert sum(found.parts.values()) == pytest.approx(found.wall_seconds, abs=1e-6)
    # measured from the first record, which comes a moment after the start, to the end of the last process
    assert found.wall_seconds == pytest.approx(made.wall_seconds, abs=2.0)
    assert found.parts["other"] < 0.2 * found.wall_seconds
    lost = sum(one.seconds for one in found.restarts)
    assert lost == pytest.approx(found.parts["restarts"], rel=0.1, abs=1.0)


def test_a_copy_of_the_run_has_the_same_times(made: Made, tmp_path: Path) -> None:
    copy = shutil.copytree(made.run_dir, tmp_path / "copy")
    later = time.time() + 86_400
    for path in copy.rglob("*"):
        os.utime(path, (later, later))
    found, expected = gather(copy).time, gather(made.run_dir).time
    assert found.wall_seconds == pytest.approx(expected.wall_seconds, abs=2.0)
    assert sum(found.parts.values()) == pytest.approx(found.wall_seconds, abs=1e-6)


def test_curves_have_no_gap_and_no_jump_back(made: Made) -> None:
    facts = gather(made.run_dir)
    loss = next(one for one in facts.curves.curves if one.name == "loss")
    assert list(loss.steps) == list(range(1, STEPS + 1))
    assert dict(zip(loss.steps, loss.values, strict=True)) == losses(made.run_dir)
    assert (facts.curves.num_repeated, facts.curves.num_unusable) == (0, 0)


def test_the_lists_of_bad_samples_are_those_of_all_ranks(made: Made) -> None:
    lines = [line for path in (made.run_dir / "quarantine").iterdir() for line in path.read_text().splitlines()]
    found = gather(made.run_dir).quarantine
    assert found.num_lines == len(lines) > found.num_samples, "each start lists what it meets"
    assert {path.name for path in (made.run_dir / "quarantine").iterdir()} == {"rank-00000.jsonl", "rank-00001.jsonl"}


def test_the_terminal_shows_it_in_80_columns(made: Made) -> None:
    ended = patchline("report", str(made.run_dir))
    assert ended.code == 0
    assert all(len(line) <= 80 for line in ended.output.splitlines())
    for words in ("restart 0002 from step", "rewound by the guard", "guard: step 21: spike, rewound", "quarantine: "):
        assert words in ended.output, ended.output


def test_many_restarts_are_counted_by_cause(made: Made) -> None:
    """The last ones are shown one by one, too; the page shows all of them."""
    facts = gather(made.run_dir)
    restarts = tuple(
        Restart(
            attempt=f"{number:04}-a",
            cause=Cause("hung", f"hung in step {number}")
            if number % 4
            else Cause("stopped", "stopped with step 8 saved", is_pause=True),
            step=number,
            lost_steps=2 if number % 4 else None,
            seconds=60.0,
            startup_seconds=1.0,
        )
        for number in range(2, 202)
    )
    time_ = replace(facts.time, wall_seconds=9e3 + 65, parts=facts.time.parts | {"paused": 9e3}, restarts=restarts)
    many = replace(facts, time=time_)
    lines = summary(many).splitlines()
    assert any(" images in 1 min 5 s" in line for line in lines), "without the pauses"
    begin = lines.index("200 restarts: cost 2 h 30 min, 300 steps lost, start-up 3 min 20 s")
    assert lines[begin + 1] == "    150 x hung: cost 2 h 30 min, 300 steps lost, start-up 2 min 30 s"
    assert lines[begin + 2] == "    50 x stopped: paused 50 min 0 s, start-up 50 s"
    assert [line.partition(" from")[0] for line in lines if line.startswith("restart ")] == [
        f"restart {number:04}" for number in range(197, 202)
    ]
    page = render(many, worth_of(made.run_dir, running_seconds=1.0), ScoreSheet()).decode()
    assert page.count("hung in step ") == 150
    assert '<td class="num" data-label="restarts">150</td>' in page
    assert page.count(">paused 1 min 0 s<") == 50


def test_the_page_has_everything_and_is_only_text(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert patchline("report", str(made.run_dir), "--out", str(out)).code == 0
    page = out.read_text()
    assert "<script" not in page
    assert "run &lt;b&gt;" in page
    fingerprint = next(value for name, value in gather(made.run_dir).data if name == "fingerprint")
    for words in (
        fingerprint,
        "the data steps from 19 to before 22 are left out",
        "digits_smoke, as the run recorded",
        "killed or crashed",
        "versions.torch",
        "2 ranks, ZeRO-1",
    ):
        assert words in page


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_in_a_browser_nothing_is_asked_for_and_nothing_is_too_wide(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert patchline("report", str(made.run_dir), "--out", str(out)).code == 0
    big = tmp_path / "big.html"
    long_run = make(tmp_path / "long")
    with (long_run / "metrics.jsonl").open("w") as file:
        for step in range(1, 300_001):
            values = {"loss": 9.0 if step == 123_456 else 3.0, "learning_rate": 1 / step, "grad_norm": step % 7}
            file.write(json.dumps({"step": step, **values}) + "\n")
    began = time.monotonic()
    assert patchline("report", str(long_run), "--out", str(big)).code == 0
    assert time.monotonic() - began < 60
    assert "most 9 at step 123,456" in big.read_text()
    assert big.stat().st_size < 500_000
    with browser(tmp_path / "profile") as opened:
        for width in (1280, 420):
            light, dark = (opened.open(out, width=width, is_dark=is_dark) for is_dark in (False, True))
            for seen in (light, dark):
                assert (seen.requests, seen.console) == ([], [])
                assert (seen.width, seen.scroll_width) == (width, width)
            assert (light.background, dark.background) == ("rgb(247, 247, 245)", "rgb(15, 18, 20)")
        assert opened.open(big, width=1280, is_dark=False).seconds < 60


def test_half_a_ledger_no_metrics_and_no_tensorboard_are_notes(made: Made, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made.run_dir, copy, ignore=shutil.ignore_patterns("events.out.tfevents.*", "metrics.jsonl"))
    ledger = copy / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-40])
    (copy / "starts.jsonl").unlink()
    said = summary(gather(copy))
    assert "ledger.jsonl: 1 line cannot be used" in said
    assert "metrics.jsonl has no line yet" in said
    assert "no file of TensorBoard" in said
    assert "unknown: starts.jsonl is missing" in said


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [1e-9, 1e9], [-5.0, 0.0, 3.0], [0.0, 0.0], [1e299, -1e299]])
def test_any_values_have_a_picture(values: list[float]) -> None:
    steps = array("q", range(1, len(values) + 1))
    curve = Curve(name="time/<b>", steps=steps, values=array("d", values), num_not_finite=0)
    plot = curve_plot(curve, KIND, marks=(1, 2))
    assert "time/&lt;b&gt; over steps" in plot
    assert "<b>" not in plot
    assert "&lt;i&gt;" in plot
    assert "<i>" not in plot
    assert "nan" not in plot


def test_a_schedule_keeps_its_shape() -> None:
    curve = Curve(name="rate", steps=array("q", [1, 2, 3]), values=array("d", [1e-6, 1.0, 0.5]), num_not_finite=0)
    assert "log scale" in curve_plot(curve, KIND)
    assert "log scale" not in curve_plot(curve, replace(KIND, may_be_log=False))


def test_the_bar_is_described() -> None:
    assert 'aria-label="Where the time went: a 25.0 %, b 75.0 %."' in time_bar({"x": 1, "y": 3}, {"x": "a", "y": "b"})


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("test_accuracy", "Accuracy on the held-out dataset"),
        ("eval/digits-test/accuracy", "Accuracy on digits-test"),
        ("eval/digits-test/ema_accuracy", "Accuracy on digits-test of the averaged weights"),
        ("fewshot/5_shots", "5-shot accuracy"),
    ],
)
def test_scores_are_shown_in_percent_beside_the_loss(name: str, title: str) -> None:
    kind = kind_of(name)
    assert (kind.title, kind.text, kind.is_cost) == (title, percent, False)
