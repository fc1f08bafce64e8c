"""`patchline compare`: the numbers of real runs, the page, and marks that are joined by line, described, and never
markup of a name."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.reports.compare import NUM_COLOURS, PlotPoint, render, scatter
from jobs.reports.points import gather, point_of
from pipeline.models.config import ModelConfig
from pipeline.models.flops import training_flops
from tests.rigs.browser import CHROMIUM, browser
from tests.rigs.processes import patchline
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words

SMALL = ("--model.width", "32", "--model.depth", "2", "--model.mlp-width", "64", "--model.num-heads", "2")
SHORT = ("--steps=4", "--schedule.warmup-steps=0", "--checkpoint.every-steps=4", "--device=cpu", "--global-batch=32")


@pytest.fixture(scope="module")
def study(finished_runs: FinishedRuns, digits_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on all digits, one on a part, and a sweep that fine-tunes the first with two seeds."""
    folder = tmp_path_factory.mktemp("study") / "runs"
    shutil.copytree(finished_runs.scored(), folder / "all")
    scored = ("--evaluation.url", digits_url, "--fewshot.url", digits_url, "--fewshot.test-url", digits_url)
    part = (*scored, "--fewshot.shots", "2", "--data.subset.count=500", "--data.lanes=8")
    ended = patchline(*pretrain_words(digits_url, folder / "part", *part))
    assert ended.code == 0, ended.errors
    words = (
        "--data.url",
        digits_url,
        "--evaluation.url",
        digits_url,
        "--initial.weights",
        str(folder / "all" / "weights"),
    )
    tuned = ("sweep", "finetune", "digits_48", *words, *SMALL, *SHORT, "--run-dir", str(folder / "tuned"))
    ended = patchline(*tuned, "--schedule.learning-rate", ".01", ".03", "--data.held-out.share=.1", "--seeds=2")
    assert ended.code == 0, ended.errors
    return folder


def points_of(*words: object) -> dict[str, dict[str, Any]]:
    ended = patchline("compare", *map(str, words), "--json")
    assert ended.code == 0, ended.errors
    return {one["name"]: one for one in map(json.loads, ended.output.splitlines())}


@pytest.mark.slow
def test_numbers_are_those_of_the_runs(study: Path) -> None:
    points = points_of(study)
    assert sorted(points) == ["all", "part", "tuned"]
    last = json.loads((study / "all" / "metrics.jsonl").read_text().splitlines()[-1])
    own = points["all"]
    assert (own["accuracy"], own["fewshot"]) == (last["test_accuracy"], {"2": last["fewshot/2_shots"]})
    assert [points[name]["num_images"] for name in ("all", "part", "tuned")] == [1438, 500, 1438]
    config = json.loads((study / "all" / "weights" / "config.json").read_text())["model"]
    flops = training_flops(ModelConfig(**config)) * STEPS * 32 / 1e18
    assert own["exaflops"] == pytest.approx(flops, rel=1e-12)
    sweep, tuned = json.loads((study / "tuned" / "sweep.json").read_text()), points["tuned"]
    assert (tuned["accuracy"], tuned["deviation"], tuned["num_runs"]) == (sweep["mean"], sweep["deviation"], 2)
    config = json.loads((study / "tuned" / "seeds" / "0" / "weights" / "config.json").read_text())["model"]
    tuning = training_flops(ModelConfig(**config)) * 4 * 32 / 1e18
    assert tuned["exaflops"] == pytest.approx(flops + tuning, rel=1e-12)
    assert tuned["reasons"] == []


@pytest.mark.slow
def test_the_command_of_a_point_runs_it_again(study: Path, tmp_path: Path) -> None:
    words = shlex.split(points_of(study)["part"]["command"])
    assert patchline(*words[1:-1], str(tmp_path / "again")).code == 0
    first, again = (losses(one) for one in (study / "part", tmp_path / "again"))
    assert first == again


@pytest.mark.slow
def test_weights_whose_run_is_gone_are_said(study: Path, tmp_path: Path) -> None:
    record = (
        (study / "tuned" / "seeds" / "0" / "job.yaml").read_text().replace(str(study / "all"), str(tmp_path / "gone"))
    )
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "job.yaml").write_text(record)
    (tmp_path / "tuned" / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0, "epoch": 0.5, "test_accuracy": 7}\n')
    point = point_of(tmp_path / "tuned", name="tuned")
    assert (point.exaflops, point.num_images, point.accuracy, point.step) == (None, None, None, 2)
    assert "are not there: what their training took is not known" in point.reasons[0]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)")
def test_the_page_sorts_and_asks_for_nothing(study: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ended = patchline("compare", str(study), "--out", str(page))
    assert ended.code == 0, ended.errors
    assert [line.split()[0] for line in ended.output.splitlines()] == ["run", "all", "part", "tuned"]
    names = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[0].dataset.value)"
    click = "[...document.querySelectorAll('th button')].find(one => one.textContent == '{}').click() ?? 0"
    asks = [names, click.format("images"), names, click.format("images"), names, click.format("few-shot"), names]
    with browser(tmp_path / "profile") as opened:
        for width, is_dark in ((1280, False), (420, False), (1280, True), (420, True)):
            seen = opened.open(page, width=width, is_dark=is_dark, asks=asks)
            assert (seen.requests, seen.console) == ([], [])
            assert seen.scroll_width == width, "nothing is wider than the page"
            assert seen.answers[2][2] == "part"
            assert seen.answers[4][0] == "part"
            assert seen.answers[6][-1] == "tuned", "what has no value is last"
    assert (seen.background == "rgb(255, 255, 255)") is False


@pytest.mark.slow
def test_names_in_runs_are_only_text(study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<!--"
    folder.mkdir()
    record = (study / "part" / "job.yaml").read_text().replace("name: vit", "name: '<img src=x>'", 1)
    (folder / "job.yaml").write_text(record)
    (folder / "metrics.jsonl").write_text((study / "part" / "metrics.jsonl").read_text())
    points, notes = gather([folder], root=tmp_path)
    page = render(points, [*notes, "<b>a note</b>"]).decode()
    assert page.count("<script") == 1, "its own"
    assert "<img" not in page
    assert "<b>" not in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json",), "no run is given; usage: patchline compare RUN|FOLDER"),
        (("{folder}",), "no training run in '{folder}', down to 3 levels; give run directories or folders of them"),
        (("nowhere",), "cannot list 'nowhere': No such file or directory"),
        (("{folder}", "--out", "page.txt"), "--out is 'page.txt'; allowed: the name of an .html file"),
        (("{folder}", "--out"), "--out is ''; allowed: the name of an .html file"),
        (("{folder}", "--sort"), "unknown flag '--sort'; usage"),
    ],
)
def test_what_cannot_be_compared(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    ended = patchline("compare", *(word.format(folder=tmp_path) for word in words))
    assert (ended.code, "Traceback" in ended.errors) == (2, False), ended.errors
    assert message.format(folder=tmp_path) in " ".join(ended.errors.split())


def mark(x: float, y: float, *, line: str = "vit", name: str = "a", deviation: float = 0.0) -> PlotPoint:
    return PlotPoint(x=x, y=y, line=line, name=name, row="row-0", deviation=deviation)


def test_marks_of_a_line_are_joined_in_order_of_x() -> None:
    drawn = scatter(
        [mark(100, 50), mark(1, 20), mark(10, 30), mark(10, 70, line="bit")],
        x_name="images",
        y_name="Accuracy (%)",
        lines=["vit", "bit"],
    )
    assert drawn.count("<polyline") == 1
    points = drawn.partition('points="')[2].partition('"')[0].split()
    places = [float(one.partition(",")[0]) for one in points]
    assert places == sorted(places)
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2), "equal ratios are equally far apart"
    assert drawn.count("<circle") == 4
    assert 'class="part-1"' in drawn


def test_marks_at_one_place_are_not_joined() -> None:
    assert "<polyline" not in scatter([mark(5, 20), mark(5, 30)], x_name="x", y_name="y", lines=["vit"])


def test_a_line_goes_through_the_mean_of_marks_at_one_place() -> None:
    drawn = scatter([mark(1, 0), mark(5, 20), mark(5, 40), mark(25, 60)], x_name="x", y_name="y", lines=["vit"])
    points = [tuple(map(float, one.split(","))) for one in drawn.partition('points="')[2].partition('"')[0].split()]
    assert len(points) == 3
    assert points[1][1] == pytest.approx((points[0][1] + points[2][1]) / 2, abs=0.2)


def test_lines_beyond_the_colours_are_rings_and_dashes() -> None:
    lines = [str(number) for number in range(NUM_COLOURS + 1)]
    drawn = scatter([mark(1, 5, line=lines[-1]), mark(9, 6, line=lines[-1])], x_name="x", y_name="y", lines=lines)
    assert drawn.count('class="ring line-0"') == 2
    assert drawn.count('class="joined dashed line-0"') == 1


def test_deviations_are_bars_around_the_mean() -> None:
    drawn = scatter([mark(1, 50, deviation=10), mark(9, 50)], x_name="x", y_name="y", lines=["vit"])
    top, bottom = drawn.partition("V")[0].rpartition(" ")[2], drawn.partition("V")[2].partition('"')[0]
    middle = drawn.partition('cy="')[2].partition('"')[0]
    assert float(top) - float(middle) == pytest.approx(float(middle) - float(bottom), abs=0.2)


def test_names_are_only_text() -> None:
    drawn = scatter(
        [mark(1, 50, name="<script>alert(1)</script>", line='"><b>')], x_name="x", y_name="y", lines=['"><b>']
    )
    assert "<script" not in drawn
    assert "<b>" not in drawn
