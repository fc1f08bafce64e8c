"""What a run is worth, for its report: cost, Table 2, and scores, confusions and predictions from a real evaluation and
from damaged files."""

import base64
import io
import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jobs.reports.ls import run_at
from jobs.reports.run_scores import evaluations_of
from jobs.reports.worth import (
    COLUMNS,
    CORE_DAYS,
    TABLE_2,
    Classes,
    ExampleImage,
    Repeats,
    ScoreSheet,
    device_days,
    read_scores,
    worth_of,
)
from pipeline.runs.starts import Left, Start, read_starts
from pipeline.shared_settings import SCORES_FOLDER
from shards.pages.page import whole_flags
from tests.rigs.browser import CHROMIUM, browser
from tests.rigs.processes import patchline
from tests.rigs.training import STEPS, FinishedRuns, pretrain_words

EVIL = "<img src=http://127.0.0.1:9/x onerror=alert(1)>"
LABELS = {"labels": ["a"], "images": [1], "right": [0], "classes": ["b"], "confusion": [], "confusion_right": []}


def start(total_seconds: float, num_ranks: int) -> Start:
    return Start(
        attempt="a",
        unix_time=1e9,
        startup_seconds=1.0,
        total_seconds=total_seconds,
        resumed_from=None,
        num_ranks=num_ranks,
        zero_stage=1,
        device="cpu",
        left=Left(),
    )


def test_device_days_are_of_the_ranks_of_each_start() -> None:
    """Two ranks for half a day, then eight for a quarter."""
    day = 86_400
    assert device_days([start(0, 2), start(day / 2, 8)], running_seconds=day * 3 / 4) == pytest.approx(1 + 2)
    after_a_pause = replace(start(day * 2, 8), paused_seconds=day * 3 / 2)
    assert device_days([start(0, 2), after_a_pause], running_seconds=day * 3 / 4) == pytest.approx(1 + 2)
    assert device_days([], running_seconds=5.0) is None


def test_table_2_is_whole() -> None:
    """Row by row as printed: https://openreview.net/forum?id=YicbFdNTTy, Table 2."""
    assert len(COLUMNS) == len(CORE_DAYS) == 5
    assert {name: " | ".join(row) for name, row in TABLE_2.items()} == {
        "ImageNet": "88.55 ± 0.04 | 87.76 ± 0.03 | 85.30 ± 0.02 | 87.54 ± 0.02 | 88.4 / 88.5",
        "ImageNet-ReaL": "90.72 ± 0.05 | 90.54 ± 0.03 | 88.62 ± 0.05 | 90.54 | 90.55",
        "CIFAR-10": "99.50 ± 0.06 | 99.42 ± 0.03 | 99.15 ± 0.03 | 99.37 ± 0.06 | –",
        "CIFAR-100": "94.55 ± 0.04 | 93.90 ± 0.05 | 93.25 ± 0.05 | 93.51 ± 0.08 | –",
        "Oxford-IIIT Pets": "97.56 ± 0.03 | 97.32 ± 0.11 | 94.67 ± 0.15 | 96.62 ± 0.23 | –",
        "Oxford Flowers-102": "99.68 ± 0.02 | 99.74 ± 0.00 | 99.61 ± 0.02 | 99.63 ± 0.03 | –",
        "VTAB (19 tasks)": "77.63 ± 0.23 | 76.28 ± 0.46 | 72.72 ± 0.21 | 76.29 ± 1.70 | –",
    }
    assert CORE_DAYS == ("2.5k", "0.68k", "0.23k", "9.9k", "12.3k")


def test_means_of_vtab_are_those_that_are_whole(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir = shutil.copytree(finished_runs.get(1), tmp_path / "run")
    (run_dir / "vtab").mkdir()
    facts = {"tasks": {}, "natural": 0.5, "specialized": None, "structured": "0.4", "mean": 0.25}
    facts |= {"deviations": {"natural": None, "specialized": 0.5, "mean": 0.125}}
    (run_dir / "vtab" / "vtab.json").write_text(json.dumps(facts))
    assert worth_of(run_dir, running_seconds=1.0).vtab == (("natural", 0.5, None), ("VTAB (19 tasks)", 0.25, 0.125))
    assert patchline("report", str(run_dir)).code == 0
    page = (run_dir / "report.html").read_text()
    assert "this run, natural tasks" in page
    assert "76.29 ± 1.70" in page
    assert "<strong>25.00 ± 12.50</strong>" in page
    (run_dir / "vtab" / "vtab.json").write_text("[1]")
    assert worth_of(run_dir, running_seconds=1.0).vtab == ()


@pytest.mark.slow
def test_the_report_has_the_papers_row_and_the_figures(digits_url: str, tmp_path: Path) -> None:
    """Digits under the name of CIFAR-10: the row is chosen by the name of the dataset."""
    shutil.copytree(digits_url, tmp_path / "cifar10-test")
    run_dir, scored = tmp_path / "run", ("--evaluation.url", str(tmp_path / "cifar10-test"))
    assert patchline(*pretrain_words(digits_url, run_dir, *scored)).code == 0
    assert patchline("inspect", str(run_dir), "--device=cpu").code == 0
    (run_dir / "inspect" / "rollout.png").write_bytes(b"<svg onload=alert(1)>")  # no PNG
    assert patchline("report", str(run_dir)).code == 0
    page = (run_dir / "report.html").read_text()
    assert "CIFAR-10, beside the paper&#39;s Table 2" in page or "CIFAR-10, beside the paper's Table 2" in page
    assert page.count('<img class="figure" src="data:image/png;base64,') == 2
    worth = worth_of(run_dir, running_seconds=100.0)
    assert worth.point is not None
    assert worth.point.accuracy is not None
    assert f"{100 * worth.point.accuracy:.2f}" in page
    assert worth.device_days == device_days(read_starts(run_dir), running_seconds=100.0)


def test_the_papers_row_is_of_the_dataset_and_not_of_the_part_that_is_held_out(digits_url: str, tmp_path: Path) -> None:
    """With both, the accuracy of the run is that of the held-out part."""
    shutil.copytree(digits_url, tmp_path / "cifar10-test")
    run_dir = tmp_path / "seeds" / "0"
    scored = ("--evaluation.url", str(tmp_path / "cifar10-test"), "--data.held-out.share", ".1", "--steps", "4")
    assert patchline(*pretrain_words(digits_url, run_dir, *scored)).code == 0
    facts = {
        "seeds": [{"folder": f"seeds/{seed}"} for seed in range(2)],
        "mean": 0.5,
        "deviation": 0.1,
        "score": "accuracy",
    }
    (tmp_path / "sweep.json").write_text(json.dumps(facts))
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/cifar10-test/accuracy"] != last["test_accuracy"]
    worth = worth_of(run_dir, running_seconds=1.0)
    assert (worth.dataset, worth.accuracy) == ("CIFAR-10", last["eval/cifar10-test/accuracy"])
    assert patchline("report", str(run_dir)).code == 0
    page = (run_dir / "report.html").read_text()
    assert f"<strong>{100 * last['eval/cifar10-test/accuracy']:.2f}</strong>" in page
    assert f"<strong>{100 * last['test_accuracy']:.2f}</strong>" not in page
    assert "accuracy on the part that is held out 50.00 ± 10.00 %" in page
    assert "<strong>50.00" not in page, "the mean of a sweep is of the same part"


def test_a_run_that_is_damaged_has_reasons(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished_runs.get(1), copy)
    assert worth_of(copy, running_seconds=1.0).dataset == "", "it was not scored"
    record = (copy / "job.yaml").read_text()
    (copy / "job.yaml").write_text(record.replace("  steps: ", "  steps: x"))
    worth = worth_of(copy, running_seconds=1.0)
    assert worth.point is None
    assert "its cost is not known" in worth.reasons[0]


@pytest.mark.parametrize(
    ("score", "metric"),
    [
        ({"score": "accuracy"}, "accuracy"),
        ({}, None),
        ({"score": "mean_per_class"}, "mean_per_class"),
        ({"score": "<b>"}, None),
    ],
)
def test_the_metric_of_the_repetitions_is_the_sweeps(tmp_path: Path, score: dict[str, str], metric: str | None) -> None:
    (tmp_path / "seeds" / "0").mkdir(parents=True)
    facts = {"seeds": [{"folder": f"seeds/{seed}"} for seed in range(2)], "mean": 0.5, "deviation": 0.1} | score
    (tmp_path / "sweep.json").write_text(json.dumps(facts))
    found = worth_of(tmp_path / "seeds" / "0", running_seconds=1.0).repeats
    assert (found.metric if found else None) == metric


def png(side: int = 2) -> str:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def shown(**values: Any) -> dict[str, Any]:
    whole = {"sample_id": 3, "source": "a.png", "labels": ["7"], "said": "1", "confidence": 0.5, "is_right": False}
    return whole | {"image": png()} | values


@pytest.fixture(scope="module")
def scored(finished_runs: FinishedRuns, digits_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that was scored on the digits that it was trained on."""
    run_dir = tmp_path_factory.mktemp("scored") / "run"
    shutil.copytree(finished_runs.get(1), run_dir)
    words = ("--weights", str(run_dir / "weights"), "--data.url", digits_url, "--run-dir", str(run_dir / SCORES_FOLDER))
    assert patchline("evaluate", *words, "--examples", "5", "--device=cpu").code == 0
    return run_dir


def test_the_sheet_has_what_was_evaluated(scored: Path, digits_url: str) -> None:
    sheet = read_scores(scored)
    listed = run_at(scored.parent, scored, time.time())
    assert listed is not None
    assert sheet.scores is not None
    assert listed.facts.accuracy == sheet.scores.accuracy, "`ls` shows it, too"
    assert (sheet.dataset, sheet.is_real, sheet.reasons) == (digits_url, False, ())
    assert (sheet.weights, sheet.settings, sheet.is_part) == ("", (), False)
    assert sheet.classes is not None
    wrong = sum(count for _, _, count, _ in sheet.classes.confusions())
    assert 0 < wrong <= round((1 - sheet.scores.accuracy) * sheet.scores.num_images)
    assert ("images", "1,438") in sheet.facts
    assert (len(sheet.right), len(sheet.wrong)) == (5, 5)
    assert all(one.said in one.labels for one in sheet.right)
    assert not any(one.said in one.labels for one in sheet.wrong)
    assert [one.confidence for one in sheet.wrong] == sorted((one.confidence for one in sheet.wrong), reverse=True)
    assert len({one.source for one in (*sheet.right, *sheet.wrong)}) == 10


def test_a_report_begins_with_the_outcome_and_the_confusions(scored: Path, digits_url: str) -> None:
    ended = patchline("report", str(scored))
    assert ended.code == 0, ended.errors
    lines = ended.output.splitlines()
    assert lines[0].endswith(", done")
    assert re.fullmatch(rf"step {STEPS}/{STEPS}, [\d,]+ images in [\d.]+ m?s, [\d,]+ images/s", lines[1]), lines[1]
    assert re.fullmatch(r"loss [\d.]+, least [\d.]+ at step \d+", lines[2]), lines[2]
    place = next(at for at, line in enumerate(lines) if line.startswith("confusions "))
    assert place < next(at for at, line in enumerate(lines) if line.startswith("wall time "))
    sheet = read_scores(scored)
    assert sheet.classes
    label, said, count, _ = sheet.classes.confusions()[0]
    rows = [line for line in lines if " taken for " in line]
    assert len(rows) == 5
    assert re.match(rf"    {label} +taken for {said} +{count} images? ", rows[0])
    page = (scored / "report.html").read_text()
    assert "no confusions yet" not in (page + ended.output).lower()
    order = ['<dl class="numbers">', "Most frequent confusions", "Confusion matrix", "Hardest labels", 'id="curves"']
    assert sorted(order, key=page.index) == order


def test_the_newest_evaluation_of_the_runs_own_weights_is_found(scored: Path, tmp_path: Path) -> None:
    """Such as that of a chain, which writes it beside the run; others' evaluations are not this run's."""
    run_dir = shutil.copytree(scored, tmp_path / "tuned" / "0", ignore=shutil.ignore_patterns(SCORES_FOLDER))
    assert read_scores(run_dir) == ScoreSheet()
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().rstrip().removesuffix("}") + ', "test_accuracy": 0.5}\n')
    ended = patchline("report", str(run_dir))
    said = " ".join(ended.output.replace("\\\n", "").split())
    assert f"no confusions yet: patchline evaluate {run_dir} --data.url URL" in said
    assert "No confusions yet" in (run_dir / "report.html").read_text()
    for place, (name, weights) in enumerate(
        (("tuned/old", run_dir), ("tuned/new", run_dir / "weights"), ("tuned/other", scored), ("evaluate/0", run_dir))
    ):
        folder = shutil.copytree(scored / SCORES_FOLDER, tmp_path / name)
        record = folder / "job.yaml"
        own = re.sub(r"(?m)^( +weights: ).*$", rf"\g<1>{weights}", record.read_text())
        record.write_text(re.sub(r"(?m)^( +url: ).*$", rf"\g<1>{name}", own))
        os.utime(folder / "scores.json", (place, place))
    found = read_scores(run_dir)
    assert (found.dataset, found.weights, found.reasons) == ("evaluate/0", "", ())
    kept, reasons = evaluations_of(run_dir, step=STEPS)
    assert ([one.on.urls for one in kept], reasons) == ([("evaluate/0",)], []), "compare shows what report shows"
    for name, next_newest in (("evaluate/0", "tuned/new"), ("tuned/new", "tuned/old")):
        shutil.rmtree(tmp_path / name)
        assert read_scores(run_dir).dataset == next_newest


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium (Debian: apt-get install chromium)")
def test_the_page_shows_it_without_a_request(scored: Path, tmp_path: Path) -> None:
    assert patchline("report", str(scored)).code == 0
    path = scored / "report.html"
    assert path.read_text().count("<figure>") == 10
    asks = ["[...document.querySelectorAll('.answers img')].filter(one => one.naturalWidth > 0).length"]
    asks.append("[...document.querySelectorAll('.scroll')].every(one => one.scrollWidth <= one.clientWidth)")
    with browser(tmp_path / "profile") as opened:
        for width in (1280, 420):
            seen = opened.open(path, width=width, is_dark=False, asks=asks)
            assert (seen.requests, seen.console) == ([], [])
            assert (seen.width, seen.scroll_width) == (width, width)
            assert seen.answers == [10, True], "the matrix of ten classes fits a phone"


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("num", [*(pytest.param(num, marks=pytest.mark.long) for num in (2, 12)), 30])
def test_names_in_the_matrix_are_whole(scored: Path, tmp_path: Path, num: int) -> None:
    """Of as many characters as are shown, some of them wide; on a phone the matrix scrolls."""
    run_dir = tmp_path / "run"
    shutil.copytree(scored, run_dir)
    some = ("great white sharks", "WWWWWWWWWMMMMMMMMM", "鮫" * 18, "cat")
    names = [f"{some[at % 4][: -len(str(at))]}{at}" for at in range(num)]
    cells = [[at, at, 1] for at in range(num)]
    classes = {"labels": names, "images": [1] * num, "right": [1] * num, "classes": names}
    classes |= {"confusion": cells, "confusion_right": cells}
    (run_dir / SCORES_FOLDER / "classes.json").write_text(json.dumps(classes))
    assert patchline("report", str(run_dir)).code == 0
    boxes = """(() => {
        const svg = document.querySelector('.scroll svg'), box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text.name')].map(one => one.getBoundingClientRect()).map(one =>
            Math.min(one.left - box.left, box.right - one.right, one.top - box.top, box.bottom - one.bottom));
    })()"""
    with browser(tmp_path / "profile") as opened:
        for width in (1280, 420):
            seen = opened.open(run_dir / "report.html", width=width, is_dark=False, asks=(boxes,))
            assert (seen.width, seen.scroll_width) == (width, width)
            assert len(seen.answers[0]) == 2 * num
            assert min(seen.answers[0]) >= 0


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        pytest.param("scores.json", {"accuracy": 2.0}, "is missing", id="fields that are missing"),
        pytest.param("classes.json", LABELS | {"images": []}, "not equally long", id="lengths"),
        pytest.param("classes.json", {"labels": ["a"], "images": [], "right": []}, "classes is missing", id="a field"),
        pytest.param(
            "classes.json",
            LABELS | {"confusion": [[0, 1, 1]]},
            "numbers in range",
            id="a class that is not there",
        ),
        pytest.param("examples.json", {}, "a list of images", id="no list"),
        pytest.param("examples.json", [shown(image="http://127.0.0.1/x.png")], "no small PNG or JPEG", id="an address"),
        pytest.param("examples.json", [shown(image="data:image/svg+xml;base64,PHN2Zz4=")], "no small PNG", id="SVG"),
        pytest.param("examples.json", [shown(image="data:image/png;base64,AAAA")], "no small PNG", id="not its kind"),
        pytest.param("examples.json", [shown(confidence=1.5)], "0.confidence", id="out of range"),
    ],
)
def test_files_that_are_damaged_are_left_out_with_the_reason(
    scored: Path, tmp_path: Path, name: str, content: object, reason: str
) -> None:
    shutil.copytree(scored / SCORES_FOLDER, tmp_path / SCORES_FOLDER)
    (tmp_path / SCORES_FOLDER / name).write_text(json.dumps(content))
    sheet = read_scores(tmp_path)
    (said,) = sheet.reasons
    assert said.startswith(f"{SCORES_FOLDER}/{name} is damaged: ")
    assert reason in said


def test_a_run_without_scores_has_an_empty_sheet(tmp_path: Path) -> None:
    assert read_scores(tmp_path).scores is None
    assert read_scores(tmp_path).reasons == ()


def test_confusions_and_hardest_labels() -> None:
    classes = Classes(
        labels=("a", "b", "c"),
        images=(4, 2, 0),
        right=(1, 2, 0),
        classes=("b", "a", "d"),
        confusion=((0, 1, 1), (0, 0, 2), (0, 2, 1), (1, 0, 2)),
        confusion_right=((0, 1, 1), (1, 0, 2)),
    )
    assert classes.confusions() == [("a", "b", 2, 0.5), ("a", "d", 1, 0.25)]
    assert classes.hardest() == [("a", 4, 0.25), ("b", 2, 1.0)]
    picture = classes.picture()
    assert picture is not None
    assert picture.count('class="part-1"') == 2, "right answers, of the two labels that have images"
    assert picture.count("<rect") == 6
    allowed = replace(classes, confusion_right=((0, 0, 1), (0, 1, 1), (0, 2, 1), (1, 0, 1)))
    assert allowed.confusions() == [("a", "b", 1, 0.25)], "what is right is none, nor a label with itself"
    picture = allowed.picture()
    assert picture is not None
    assert picture.count('class="part-1"') == 2, "half of a cell is not most of it"
    many = tuple(str(number) for number in range(31))
    cells = ((0, 0, 1),)
    whole = Classes(
        labels=many, images=(1,) * 31, right=(1,) * 31, classes=many, confusion=cells, confusion_right=cells
    )
    assert whole.picture() is None, "too many to draw"


def test_answers_that_a_class_map_allows_are_no_confusions(scored: Path, digits_url: str, tmp_path: Path) -> None:
    """With the digits 7 and 8, for which every answer but 0 is right; and the report says what was scored, and how."""
    run_dir = tmp_path / "run"
    shutil.copytree(scored, run_dir)
    (tmp_path / "map.json").write_text(json.dumps({label: list("123456789") for label in "78"}))
    words = ("--weights", str(scored / "weights"), "--data.url", digits_url, "--run-dir", str(run_dir / SCORES_FOLDER))
    how = ("--class-map", str(tmp_path / "map.json"), "--subset.share", "0.5", "--device=cpu")
    assert patchline("evaluate", *words, *how).code == 0
    sheet = read_scores(run_dir)
    assert sheet.classes is not None
    assert sheet.scores is not None
    assert {said for _, said, _, _ in sheet.classes.confusions()} <= {"0"}
    assert sum(row[2] for row in sheet.classes.confusion_right) == sum(sheet.classes.right)
    assert sum(sheet.classes.right) == round(sheet.scores.accuracy * sheet.scores.num_images)
    assert sheet.settings == ("--subset.share 0.5", f"--class-map {tmp_path / 'map.json'}")
    assert (sheet.weights, sheet.is_part) == (str(scored / "weights"), True)
    assert patchline("report", str(run_dir)).code == 0
    page = (run_dir / "report.html").read_text()
    assert "which are not this run" in page
    assert whole_flags("--subset.share 0.5, --class-map") in page


def test_lists_of_a_part_or_of_other_weights_are_not_this_runs_row(scored: Path, tmp_path: Path) -> None:
    """Of ImageNet-ReaL beside Table 2."""
    run_dir = tmp_path / "run"
    shutil.copytree(scored, run_dir)
    path = run_dir / SCORES_FOLDER / "job.yaml"
    record = path.read_text().replace("real: ''", "real: real.json")
    row = "<strong>this run</strong>"
    own = record.replace(str(scored / "weights"), str(run_dir / "weights"))
    for text, expected in (
        (own, row),
        (own.replace(str(tmp_path), "/nowhere"), row),  # moved since
        (record, f"<strong>weights {str(scored)[:10]}"),
        (own.replace("share: 1.0", "share: 0.5"), ""),
    ):
        assert text.count("real: real.json") == 1
        path.write_text(text)
        assert patchline("report", str(run_dir)).code == 0
        page = (run_dir / "report.html").read_text()
        assert ("ImageNet-ReaL, beside the paper" in page) == bool(expected)
        assert expected in page
        assert (row in page) == (expected == row)


def test_names_of_strangers_are_text(scored: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(scored, run_dir)
    (run_dir / SCORES_FOLDER / "examples.json").write_text(json.dumps([shown(labels=[EVIL], said=EVIL, source=EVIL)]))
    classes = {"labels": [EVIL], "images": [1], "right": [0], "classes": ["b"], "confusion": [[0, 0, 1]]}
    (run_dir / SCORES_FOLDER / "classes.json").write_text(json.dumps(classes))
    assert patchline("report", str(run_dir)).code == 0
    page = (run_dir / "report.html").read_text()
    assert "<img src=http" not in page
    assert "&lt;img src=http" in page


def test_the_repetitions_of_a_sweep(scored: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "sweep" / "seeds" / "0"
    shutil.copytree(scored, run_dir)
    assert worth_of(run_dir, running_seconds=1.0).repeats is None
    facts = {
        "seeds": [{"folder": f"seeds/{seed}"} for seed in range(3)],
        "mean": 0.75,
        "deviation": 0.01,
        "score": "accuracy",
    }
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(facts))
    assert worth_of(run_dir, running_seconds=1.0).repeats == Repeats(num_runs=3, mean=0.75, deviation=0.01)
    assert patchline("report", str(run_dir)).code == 0
    assert "75.00 ± 1.00" in (run_dir / "report.html").read_text()
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(facts | {"mean": "x"}))
    assert worth_of(run_dir, running_seconds=1.0).repeats is None


def test_an_image_is_small_and_of_a_known_kind() -> None:
    assert ExampleImage(**shown(labels=("7",))).image == png()
    with pytest.raises(ValueError, match="no small PNG or JPEG"):
        ExampleImage(**shown(labels=("7",), image="data:image/png;base64," + "A" * (2 << 20)))
