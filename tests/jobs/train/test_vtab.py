"""`patchline vtab`: a run for each task, one after the other, with one seed or several, and the means."""

import io
import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from jobs.data import pack
from jobs.recipes.paper_vtab import GROUPS, TASKS
from jobs.train import vtab
from jobs.train.trials import Trial, TrialScore
from jobs.train.vtab import TaskRow, seed_facts, seed_table, task_facts, task_table
from pipeline.evaluation.predictor import load_model
from pipeline.models import ModelConfig, build_model
from pipeline.models.weights.folder import save_weights
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.sources.digits import DigitsSource
from tests.rigs.fake_runs import override, runs_are_over_at_once
from tests.rigs.processes import patchline
from tests.rigs.vtab_tasks import BLOCK, MADE, case_image, write

TINY = ("--steps=2", "--global-batch=64", "--schedule.warmup-steps=0", "--device=cpu")
MODEL = ModelConfig(name="vit", image_size=16, patch=4, depth=1, width=32, mlp_width=32, num_heads=2, num_classes=10)
SIZES = ("--model.image-size=16", "--model.patch=4", "--model.depth=1", "--model.width=32", "--model.mlp-width=32")
# fp32, as load_model has it: bf16 may decide otherwise between logits that are nearly equal.
FEW = (
    *("--steps=8", "--global-batch=64", "--schedule.warmup-steps=0", "--schedule.learning-rate=.1", "--device=cpu"),
    *("--engine.precision=fp32", "--model.num-heads=2"),
)
IMAGES = ("--model.num-heads=2", "--data.augment.crop=none", "--data.augment.resize-pixels=0")


def scored(task: str, accuracy: float | None) -> TaskRow:
    trial = Trial(folder=Path("r") / task, values=(), words=("finetune", f"vtab_{task}", "--x=a b"))
    state = "done" if accuracy is not None else "stopped"
    (found,) = (one for one in TASKS if one.name == task)
    return TaskRow(task=found, score=TrialScore(trial=trial, state=state, accuracy=accuracy))  # type: ignore[arg-type]


def test_groups() -> None:
    assert [len(tasks) for tasks in GROUPS.values()] == [7, 4, 8]
    assert GROUPS["specialized"][0].name == "patch_camelyon"
    assert GROUPS["structured"][0].name == "clevr_count"


def test_means() -> None:
    rows = [scored(task.name, number / 100) for number, task in enumerate(TASKS)]
    lines = task_table(rows).splitlines()
    assert lines[0].split() == ["natural", "caltech101", "0.0000"]
    assert lines[7].split() == ["mean", "of", "7", "0.0300"]
    assert lines[12].split() == ["mean", "of", "4", "0.0850"]
    assert lines[-1].split() == ["all", "mean", "of", "19", "0.0900"], "each task counts the same, not each group"
    assert task_facts(rows)["mean"] == pytest.approx(0.09)
    assert task_facts(rows)["structured"] == pytest.approx(0.145)


def test_no_mean_of_a_part() -> None:
    rows = [
        scored("dtd", 0.5),
        scored("eurosat", None),
        TaskRow(task=TASKS[-1], lacks="x/smallnorb has no manifest\x1b"),
    ]
    assert [line.split(None, 1)[-1] if line[0] != " " else line.strip() for line in task_table(rows).splitlines()] == [
        "dtd                   0.5000",
        "1 of 7 tasks have a score: no mean",
        "eurosat               stopped",
        "0 of 4 tasks have a score: no mean",
        "smallnorb_elevation   missing: x/smallnorb has no manifest\\x1b",
        "0 of 8 tasks have a score: no mean",
        "1 of 19 tasks have a score: no mean",
    ]
    facts = task_facts(rows)
    assert (facts["mean"], facts["natural"]) == (None, None)
    assert facts["tasks"]["dtd"]["command"] == "patchline finetune vtab_dtd '--x=a b'"
    assert facts["tasks"]["smallnorb_elevation"]["state"] == "missing"


@pytest.mark.slow
def test_tasks_that_are_there_are_run_and_the_others_named(tmp_path: Path) -> None:
    for name in ("dtd", "dtd-test", "eurosat"):
        job = pack.PackJob(out=str(tmp_path / "data" / name), source=DigitsSource(split="test"), split="test")
        assert pack.run(job) == 0
    state = build_model(MODEL).state_dict()
    save_weights(tmp_path / "w", config=MODEL, labels=tuple("0123456789"), tensor=lambda name: state[name])
    words = ["vtab", str(tmp_path / "w"), "--data-root", f"{tmp_path}/data/", "--run-dir", str(tmp_path / "runs")]
    ended = patchline(*words, "--tasks", "dtd", "eurosat", *TINY, *SIZES, *IMAGES)
    assert ended.code == 0, ended.errors
    assert "dtd has 359 images; VTAB-1k has 1,000" in ended.errors
    assert f"--source.task eurosat --source.root TFDS --split test --out {tmp_path}/data/eurosat-test\n" in ended.errors
    assert re.search(r"natural +dtd +0\.\d{4}\n", ended.output)
    assert re.search(r"specialized +eurosat +missing: there is nothing at .*/eurosat-test'\n", ended.output)
    assert json.loads((tmp_path / "runs" / "vtab.json").read_text())["tasks"]["dtd"]["state"] == "done"


def as_seen(task: str, case: int) -> torch.Tensor:
    """uint8[16, 16, 3]: an image of a made dataset at the model's size, without our reader, decoder or resizing. Most
    are of one colour. Those of dSprites have blocks, of each of which an output pixel sees the middle."""
    with Image.open(io.BytesIO(case_image(task, case))) as image:
        pixels = np.array(image.convert("RGB"))
    if "dsprites" in task:
        return torch.from_numpy(255 * pixels[1::BLOCK, 1::BLOCK])
    return torch.from_numpy(np.broadcast_to(pixels[0, 0], (16, 16, 3)).copy())


def answers_of(task: str, weights: Path) -> list[int]:
    """What a task's model says of each case."""
    images = torch.stack([as_seen(task, case) for case in range(len(MADE[task].cases))])
    with torch.no_grad():
        answers: list[int] = load_model(str(weights), device="cpu").model(images).argmax(dim=1).tolist()
    return answers


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param({"structured": ["dsprites_location"]}, id="one task"),
        pytest.param(
            {name: [task.name for task in tasks] for name, tasks in GROUPS.items()},
            id="all 19",
            marks=[pytest.mark.slow, pytest.mark.long],
        ),
    ],
)
def test_tasks_from_tfds_files_to_scores(groups: dict[str, list[str]], tmp_path: Path) -> None:
    tasks = [name for group in groups.values() for name in group]
    for task in tasks:
        write(tmp_path / "tfds" / task, task)
        source = ("--source.task", task, "--source.root", str(tmp_path / "tfds" / task))
        for split, ending in (("train", ""), ("test", "-test")):
            ended = patchline("pack", "vtab", *source, "--split", split, "--out", f"{tmp_path}/data/{task}{ending}")
            assert ended.code == 0, ended.errors
    state = build_model(MODEL).state_dict()
    save_weights(tmp_path / "w", config=MODEL, labels=tuple("0123456789"), tensor=lambda name: state[name])
    words = ["vtab", f"{tmp_path}/w", "--data-root", f"{tmp_path}/data", "--run-dir", f"{tmp_path}/runs", *FEW, *SIZES]
    for group in groups.values():  # a command for each: the last one shows all
        ended = patchline(*words, "--tasks", *group)
        assert (ended.code, "images; VTAB-1k has" in ended.errors) == (0, False), ended.errors
    assert patchline(*words, "--tasks", *tasks).code == 0
    found = json.loads((tmp_path / "runs" / "vtab.json").read_text())
    scores = {}
    for task in tasks:
        weights, made = tmp_path / "runs" / task / "weights", MADE[task]
        labels = open_dataset(f"{tmp_path}/data/{task}").label_names
        assert load_model(str(weights), device="cpu").labels == labels
        answers = answers_of(task, weights)
        is_right = [answer == label for answer, (_, label) in zip(answers, made.cases, strict=True)]
        ((_, first, end),) = made.parts["test"]
        scores[task] = statistics.fmean(is_right[number % len(is_right)] for number in range(first, end))
        assert found["tasks"][task]["accuracy"] == pytest.approx(scores[task]), task
    assert found["mean"] == (pytest.approx(statistics.fmean(scores.values())) if len(tasks) == len(TASKS) else None)
    assert sum(0 < score < 1 for score in scores.values()) > len(tasks) / 2, "the scores tell something"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data-root=x",), "usage: patchline vtab WEIGHTS"),
        (("w", "--run-dir", "r"), "--data-root is missing"),
        (("w", "--data-root", "r"), "--run-dir is missing"),
        (
            ("w", "--data-root", "x", "--run-dir", "r", "--tasks", "mnist"),
            "'mnist' is no task of VTAB; allowed: caltech",
        ),
        (
            ("w", "--data-root", "/nowhere", "--run-dir", "r"),
            "/nowhere has no task of VTAB: there is nothing at '/nowhere/caltech101'; pack each as TASK and TASK-test, "
            "for example with patchline pack vtab --source.task caltech101 --source.root TFDS --out "
            "/nowhere/caltech101 patchline pack vtab --source.task caltech101 --source.root TFDS --split test --out "
            "/nowhere/caltech101-test TASK is one of caltech101,",
        ),
    ],
)
def test_one_message(words: tuple[str, ...], message: str) -> None:
    ended = patchline("vtab", *words)
    assert (ended.code, "Traceback" in ended.errors) == (2, False)
    assert message in " ".join(ended.errors.split())


def test_each_task_runs_with_each_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("dtd", "dtd-test", "eurosat", "eurosat-test"):
        job = pack.PackJob(out=str(tmp_path / "data" / name), source=DigitsSource(split="test"), split="test")
        assert pack.run(job) == 0
    started = runs_are_over_at_once(monkeypatch, lambda job: 0.5 + job.seed / 4)
    words = ["w", "--data-root", f"{tmp_path}/data", "--run-dir", f"{tmp_path}/runs", "--tasks", "dtd", "eurosat"]
    for _ in range(2):
        assert vtab.run([*words, "--seeds", "2"], override=override, environ={}) == 0
    assert [one.removeprefix(f"{tmp_path}/runs/") for one in started] == [
        *("seed-0/dtd", "seed-0/eurosat", "seed-1/dtd", "seed-1/eurosat")
    ]
    facts = json.loads((tmp_path / "runs" / "vtab.json").read_text())
    assert [one["tasks"]["dtd"]["accuracy"] for one in facts["seeds"]] == [0.5, 0.75]
    assert facts["seeds"][1]["tasks"]["dtd"]["command"].endswith(" --seed=1")
    assert "dtd                   0.6250 ± 0.1768" in capsys.readouterr().out
    for more, message in (
        (["--seeds=0"], "--seeds is '0'; allowed: 1 to 1000"),
        (["--seeds"], "--seeds is ''; allowed: 1 to 1000"),
        (["--seeds=2", "--seed", "5"], "--seed and --seeds do not go together"),
    ):
        with pytest.raises(UserError, match=message):
            vtab.run([*words, *more], override=override, environ={})


def test_the_scores_of_other_weights_are_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dtd", "dtd-test"):
        job = pack.PackJob(out=str(tmp_path / "data" / name), source=DigitsSource(split="test"), split="test")
        assert pack.run(job) == 0
    started = runs_are_over_at_once(monkeypatch, lambda _: 0.5)
    more = ["--data-root", f"{tmp_path}/data", "--run-dir", f"{tmp_path}/runs"]
    for _ in range(2):
        assert vtab.run(["w", *more], override=override, environ={}) == 0
        assert started == [f"{tmp_path}/runs/dtd"]
    before = (tmp_path / "runs" / "vtab.json").read_bytes()
    with pytest.raises(UserError, match=r"dtd holds a run with other values:\n  initial\.weights: before w, now v"):
        vtab.run(["v", *more], override=override, environ={})
    assert (tmp_path / "runs" / "vtab.json").read_bytes() == before


def test_a_mean_of_each_seed_and_the_deviation_of_these() -> None:
    """Not the mean of the tasks' deviations: their differences cancel within a seed."""
    first = [scored(task.name, 0.5 + (0.25 if place % 2 else -0.25)) for place, task in enumerate(TASKS)]
    second = [scored(task.name, 0.5 - (0.25 if place % 2 else -0.25)) for place, task in enumerate(TASKS)]
    found = seed_facts({0: first, 1: second})
    means = [task_facts(rows)["mean"] for rows in (first, second)]
    assert found["mean"] == pytest.approx(0.5)
    assert found["deviations"]["mean"] == pytest.approx(abs(means[0] - means[1]) / 2**0.5)
    assert found["deviations"]["specialized"] == pytest.approx(0)
    assert [one["seed"] for one in found["seeds"]] == [0, 1]
    lines = seed_table({0: first, 1: second}).splitlines()
    assert lines[0] == "natural       caltech101            0.5000 ± 0.3536"
    assert lines[12] == "              mean of 4             0.5000 ± 0.0000"
    assert lines[-1] == "all           mean of 19            0.5000 ± 0.0186"


def test_no_mean_while_a_seed_lacks_a_task() -> None:
    lacking = TaskRow(task=TASKS[-1], lacks="x/smallnorb has no manifest")
    first, second = ([scored("dtd", 0.5), scored("eurosat", accuracy), lacking] for accuracy in (0.5, None))
    assert [line.split(None, 1)[-1] for line in seed_table({0: first, 1: second}).splitlines()] == [
        "dtd                   0.5000 ± 0.0000",
        "of 2 seeds have a score of all 7 tasks: no mean",
        "eurosat               1 of 2 seeds have a score: seed 1 stopped",
        "of 2 seeds have a score of all 4 tasks: no mean",
        "smallnorb_elevation   missing: x/smallnorb has no manifest",
        "of 2 seeds have a score of all 8 tasks: no mean",
        "0 of 2 seeds have a score of all 19 tasks: no mean",
    ]
    found = seed_facts({0: first, 1: second})
    assert (found["mean"], found["deviations"]["mean"]) == (None, None)


def test_one_seed_has_no_deviation() -> None:
    rows = [scored(task.name, 0.5) for task in TASKS]
    assert (
        seed_table({0: rows}).splitlines()[-1] == "all           mean of 19            0.5000 (one seed: no deviation)"
    )
    assert seed_facts({0: rows})["deviations"]["mean"] is None
