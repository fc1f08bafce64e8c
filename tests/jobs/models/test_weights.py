"""`patchline weights`: the weights of any checkpoint, bit for bit, usable like those of a finished run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from jobs import exit_codes
from pipeline.checkpoints.stored import read_best
from pipeline.models.weights.folder import open_weights
from shards.store import open_store
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.processes import Ended, patchline
from tests.rigs.training import STEPS, TINY, FinishedRuns, pretrain_words, start

pytestmark = pytest.mark.slow
EMA = ("--ema-decay", "0.9")
FILES = ("config.json", "model.safetensors")


def stage(number: int) -> tuple[str, str]:
    return "--engine.zero-stage", str(number)


def same_bytes(first: Path, second: Path) -> bool:
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in FILES)


def weights(run_dir: Path, out: Path, *more: str) -> Ended:
    return patchline("weights", str(run_dir), "--out", str(out), *more)


@pytest.mark.parametrize(
    ("zero_stage", "num_ranks"), [(1, 1), *(pytest.param(stage, 2, marks=pytest.mark.long) for stage in (1, 2)), (3, 2)]
)
def test_the_last_steps_weights_are_those_of_the_run(
    finished_runs: FinishedRuns, tmp_path: Path, zero_stage: int, num_ranks: int
) -> None:
    """Averaged by default. An average changes nothing in training, so the raw ones are those of the run without it."""
    run_dir = finished_runs.get(num_ranks, *stage(zero_stage), *EMA)
    before = sorted(run_dir.rglob("*"))
    assert weights(run_dir, tmp_path / "average").code == 0
    assert weights(run_dir, tmp_path / "raw", "--raw", "--step", str(STEPS)).code == 0
    assert same_bytes(tmp_path / "average", run_dir / "weights")
    without = finished_runs.get(num_ranks, *stage(zero_stage))
    assert same_bytes(tmp_path / "raw", without / "weights")
    assert not same_bytes(tmp_path / "raw", tmp_path / "average")
    assert sorted(run_dir.rglob("*")) == before, "the run is only read"


@pytest.fixture(scope="module")
def scored(finished_runs: FinishedRuns, digits_url: str) -> Path:
    """A run with scores at steps 8 and 16, and checkpoints at 4, 8, 12 and 16."""
    return finished_runs.get(
        2, *stage(1), "--engine.precision", "fp32", "--evaluation.url", digits_url, "--evaluation.every-steps", "8"
    )


def test_an_earlier_steps_weights_score_as_the_run_did_then(scored: Path, tmp_path: Path, digits_url: str) -> None:
    """And are exported, predict, and are fine-tuned."""
    out = tmp_path / "at-8"
    ended = weights(scored, out, "--step", "8")
    assert (ended.code, "raw weights of step 8 of" in ended.errors) == (0, True)
    ended = patchline("evaluate", "--weights", str(out), "--data.url", digits_url, "--json", "--device", "cpu")
    found = json.loads(ended.output)
    line = next(line for line in map(json.loads, (scored / "metrics.jsonl").open()) if line["step"] == 8)
    assert found["accuracy"] == line["test_accuracy"]
    assert found["loss"] == pytest.approx(line["test_loss"], rel=1e-5)
    assert open_weights(str(out)).labels == open_weights(str(scored / "weights")).labels
    assert patchline("export", str(out), "--out", str(tmp_path / "timm"), "--format", "timm").code == 0
    tuned = patchline(
        *("finetune", "digits_48", "--initial.weights", str(out), "--data.url", digits_url),
        *("--run-dir", str(tmp_path / "tuned"), *TINY, "--steps", "3"),
    )
    assert tuned.code == 0, tuned.errors


def test_the_best_is_the_one_that_is_named(scored: Path, tmp_path: Path) -> None:
    best = read_best(scored)
    assert best
    assert weights(scored, tmp_path / "best", "--best").code == 0
    assert weights(scored, tmp_path / "step", "--step", str(best.step)).code == 0
    assert same_bytes(tmp_path / "best", tmp_path / "step")


def test_a_run_that_goes_on_is_only_read(digits_url: str, tmp_path: Path) -> None:
    """It keeps one checkpoint and makes one per step: the one that is read may go at any time."""
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--steps", "40000", "--checkpoint.every-steps", "1")
    ranks = start([*words, "--checkpoint.keep-newest", "1"], num_ranks=1, log_dir=tmp_path)
    try:
        assert wait_until(ranks, step_at_least(3), run_dir)
        for number in range(3):
            ended = weights(run_dir, tmp_path / f"out-{number}")
            assert ended.code == 0, ended.errors
            assert load_file(tmp_path / f"out-{number}" / "model.safetensors")
        (run_dir / "STOP").touch()
        assert ranks.wait() == exit_codes.CONTINUE
    finally:
        ranks.kill()
    newest = weights(run_dir, tmp_path / "stopped")
    (last,) = (run_dir / "checkpoints").glob("step-*")
    assert f"weights of step {int(last.name[5:])} of" in newest.errors


def test_checkpoints_in_a_bucket(finished_runs: FinishedRuns, tmp_path: Path, s3_bucket: str) -> None:
    run_dir = finished_runs.get(2, *stage(1))
    copy, store = tmp_path / "run", open_store(f"s3://{s3_bucket}/run")
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints")
    here = open_store(str(run_dir / "checkpoints"))
    for path in here.list():
        store.write(path, here.read(path))
    record = copy / "job.yaml"
    record.write_text(record.read_text().replace("    url: ''\n", f"    url: s3://{s3_bucket}/run\n", 1))
    ended = weights(copy, tmp_path / "out")
    assert (ended.code, f"s3://{s3_bucket}" in record.read_text()) == (0, True), ended.errors
    assert same_bytes(tmp_path / "out", run_dir / "weights")


def without_data(run_dir: Path) -> None:
    record = run_dir / "job.yaml"
    text = record.read_text()
    url = next(line.split()[1] for line in text.splitlines() if line.strip().startswith("url: /"))
    record.write_text(text.replace(url, "/nowhere"))


def flip(run_dir: Path) -> None:
    for path in run_dir.glob("checkpoints/step-00000016/*/rank-00001.safetensors"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)


def damage_all(run_dir: Path) -> None:
    for path in run_dir.glob("checkpoints/step-*/*/MANIFEST.json"):
        path.write_bytes(path.read_bytes().replace(b'"num_updates":', b'"num_updates":1'))


def of_another_version(run_dir: Path) -> None:
    record = run_dir / "job.yaml"
    record.write_text(record.read_text().replace("ema_decay:", "ema_decays:"))


def of_another_stage(run_dir: Path) -> None:
    record = run_dir / "job.yaml"
    record.write_text(record.read_text().replace("stage: pretrain", "stage: evaluate"))


def occupied(run_dir: Path) -> None:
    (run_dir.parent / "out").mkdir()
    (run_dir.parent / "out" / "mine.txt").write_text("mine")


MISTAKES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], str]] = {
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), (), "has no committed checkpoint in"),
    "another step": (lambda _: None, ("--step", "5"), "no checkpoint of step 5 is in"),
    "steps there are": (lambda _: None, ("--step", "5"), "there are those of steps 16, 12, 8, 4"),
    "no best": (lambda _: None, ("--best",), "best.json is missing: a run names its best checkpoint once"),
    "damaged": (flip, ("--step", "16"), "cannot be used: step-00000016/"),
    "all damaged": (damage_all, (), "none of the 4 checkpoints in"),
    "another version": (of_another_version, (), "ema_decays"),
    "another stage": (of_another_stage, (), "is of the stage 'evaluate'; only pretrain and finetune have checkpoints"),
    "occupied": (occupied, (), "which has other content: mine.txt"),
    "no run": (lambda run: (run / "job.yaml").unlink(), (), "no run at"),
    "no data": (without_data, (), "the run's dataset cannot be opened (there is nothing at '/nowhere'"),
    "wrong names": (
        lambda run: (run.parent / "names").write_text("a\nb\n"),
        ("--labels-file", "names"),
        "'names' has 2 names, 2 different ones; the head has 10 classes",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_message(
    finished_runs: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    prepare, words, message = MISTAKES[kind]
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2, *stage(1)), run_dir)
    monkeypatch.chdir(tmp_path)
    prepare(run_dir)
    ended = weights(run_dir, tmp_path / "out", *words)
    errors = [line for line in ended.errors.splitlines() if line.startswith("error: ")]
    assert ended.code == exit_codes.USER_MISTAKE, ended.errors
    assert len(errors) == 1
    assert message in " ".join(ended.errors.split())
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_damaged_newest_is_passed_over_with_the_reason(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2, *stage(1)), run_dir)
    flip(run_dir)
    ended = weights(run_dir, tmp_path / "out")
    assert ended.code == 0
    assert "skipping checkpoint step-00000016/" in ended.errors
    assert "weights of step 12 of" in ended.errors


@pytest.mark.parametrize("out", ["run", "run/weights"])
def test_the_runs_own_folders_are_refused(finished_runs: FinishedRuns, tmp_path: Path, out: str) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2, *stage(1)), run_dir)
    shutil.rmtree(run_dir / "weights")
    ended = weights(run_dir, tmp_path / out)
    assert ended.code == exit_codes.USER_MISTAKE
    assert "where the weights are read from; give another" in ended.errors


def test_names_from_a_file_replace_those_of_the_data(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2, *stage(1)), run_dir)
    without_data(run_dir)
    names = tuple(f"digit {number}" for number in range(10))
    (tmp_path / "names").write_text("\n".join(names))
    assert weights(run_dir, tmp_path / "out", "--labels-file", str(tmp_path / "names")).code == 0
    assert open_weights(str(tmp_path / "out")).labels == names
    own, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", run_dir / "weights"))
    assert all(bool((own[name] == theirs[name]).all()) for name in theirs)
