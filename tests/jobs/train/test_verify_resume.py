"""`patchline verify-resume`: when it kills runs, as a function of numbers, and real ranks.

Those have an exact continuation, other topologies, and a planted difference.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.ranks import Ranks
from jobs.recipes.finetune import digits_48
from jobs.recipes.of_training import trial_of
from jobs.recipes.pretrain import digits_smoke
from jobs.record import read_record
from jobs.resolve import default_job
from jobs.settings.runs import VerifyResumeJob
from jobs.train.verify_resume import TrialTopology, planned_moments, verify
from pipeline.checkpoints.manifest import MANIFEST_NAME
from pipeline.training.settings.job import LoggersConfig, TrainingJob
from shards.errors import TransientError
from shards.files.typed_json import sealed, unsealed
from shards.store import open_store
from tests.rigs.forked_ranks import fork_ranks
from tests.rigs.forks import ONE_THREAD
from tests.rigs.processes import patchline

CHECKOUT = Path(__file__).resolve().parents[3]
STEPS = 12


def trial(url: str, folder: Path, **changes: Any) -> VerifyResumeJob:
    """Of a tiny model that trains in a second, and waits for its saves: each of them is committed at once."""
    recipe = digits_smoke()
    training = replace(
        recipe,
        data=replace(recipe.data, url=url),
        model=replace(recipe.model, width=32, depth=2, mlp_width=64, num_heads=2),
        steps=STEPS,
        global_batch=32,
        schedule=replace(recipe.schedule, warmup_steps=2),
        checkpoint=replace(recipe.checkpoint, every_steps=3, asynchronous="off"),
        engine=replace(recipe.engine, precision="fp32"),
        ema_decay=0.9,
        device="cpu",
    )
    job = trial_of("digits_smoke", training, command="pretrain")
    return replace(job, **{"run_dir": str(folder), "kills": 1, "json": True, **changes})


@dataclass
class Starts:
    """Starts ranks, forked; `plant` is called before each start with the number of the run's starts so far."""

    plant: Any = lambda *_: None
    counts: dict[str, int] = field(default_factory=dict)

    def __call__(self, words: list[str], *, num_ranks: int, log_dir: Path) -> Ranks:
        run_dir = Path(words[words.index("--run-dir") + 1])
        number = self.counts.get(run_dir.name, 0)
        self.counts[run_dir.name] = number + 1
        self.plant(run_dir, number)
        return fork_ranks(words, num_ranks=num_ranks, environ={**ONE_THREAD, **os.environ}, log_dir=log_dir)


@pytest.mark.slow
def test_a_killed_run_is_exact_and_one_on_other_topologies_equal_to_rounding(
    digits_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = Starts()
    assert verify(trial(digits_url, tmp_path, ranks=(1, 2), stages=(2,)), start=starts) == 0
    assert starts.counts == {"unbroken-0": 1, "killed-0": 2, "unbroken-1": 1, "killed-1": 2, "changing": 2}
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["folder"], len(found["runs"])) == (True, None, 3)
    for run in found["runs"]:
        assert run["right"]
        assert (run["losses"], len(run["kills"]), len(run["continued_from"])) == (STEPS, 1, 1)
        assert run["continued_from"][0] > 0
    one, two, changing = found["runs"]
    assert (one["exact"], two["exact"], changing["exact"]) == (True, True, False)
    assert one["checkpoints_compared"] == [3, 6, 9, 12]
    assert (changing["checkpoints_compared"], changing["first_loss_above_tolerance"]) == ([12], None)
    assert 0 < changing["largest_loss_difference"]["relative"] <= changing["tolerance"]
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def change_one_value(run_dir: Path, *, step: int) -> None:
    """In the last tensor of a checkpoint, whose checksums and seals then fit again."""
    (path,) = (run_dir / "checkpoints").glob(f"step-{step:08d}/*/{MANIFEST_NAME}")
    manifest = json.loads(unsealed(path.read_bytes()))
    place = manifest["tensors"]["head.weight"]["slots"]["exp_avg"][0]
    data = bytearray((path.parent / place["file"]).read_bytes())
    value = np.frombuffer(data, np.float32, count=1, offset=place["offset"] + 4 * 5)
    value.flags.writeable = True
    value += np.float32(0.5)
    (path.parent / place["file"]).write_bytes(data)
    record = manifest["files"][place["file"]]
    size = record["part_bytes"]
    record["sha256"] = [hashlib.sha256(data[first : first + size]).hexdigest() for first in range(0, len(data), size)]
    path.write_bytes(sealed(json.dumps(manifest).encode()))


@pytest.mark.slow
def test_a_planted_difference_is_named_by_step_and_tensor(
    digits_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    planted: list[int] = []

    def plant(run_dir: Path, number: int) -> None:
        if run_dir.name == "killed-0" and number == 1:
            manifests = (run_dir / "checkpoints").glob(f"step-*/*/{MANIFEST_NAME}")
            planted.append(max(int(path.parent.parent.name.removeprefix("step-")) for path in manifests))
            change_one_value(run_dir, step=planted[0])

    assert verify(trial(digits_url, tmp_path), start=Starts(plant)) == 1
    found = json.loads(capsys.readouterr().out)
    (run,) = found["runs"]
    first = run["first_tensor"]
    assert (first["step"], first["slot"], first["name"]) == (planted[0], "exp_avg", "head.weight")
    assert (first["element"], run["tensors_different"]) == (5, 1)
    assert first["found"] == pytest.approx(first["expected"] + 0.5)
    assert run["first_loss"]["step"] == planted[0] + 2, "the loss of the next step precedes its update"
    assert not found["same"]
    assert Path(found["folder"], "killed-0", "metrics.jsonl").is_file()
    assert f"the first checkpoint that differs is that of step {planted[0]}" in caplog.text
    assert "the exp_avg of head.weight is the first of 1 tensor" in caplog.text


@pytest.mark.long
def test_checkpoints_on_s3_are_compared_and_removed(
    digits_url: str, tmp_path: Path, s3_bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = trial(digits_url, tmp_path)
    store = open_store(f"s3://{s3_bucket}/saved")
    store.write("other", b"not ours")
    job = replace(job, checkpoint=replace(job.checkpoint, url=store.url))
    assert verify(job, start=Starts()) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["exact"], run["checkpoints_compared"], len(run["kills"])) == (True, [3, 6, 9, 12], 1)
    assert list(store.list()) == ["other"]


def test_a_run_that_cannot_start_ends_with_its_own_message(tmp_path: Path) -> None:
    words = ("--data.url", str(tmp_path / "nowhere"), "--run-dir", str(tmp_path / "trials"), "--device", "cpu")
    ended = patchline("verify-resume", "digits_smoke", *words)
    assert ended.code == 2
    said = " ".join(ended.errors.split())
    assert "1 rank, ZeRO-1, unbroken ended with code 2; its last lines:" in said
    assert "nowhere" in said
    assert list((tmp_path / "trials").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("digits_smoke",), "--data.url is missing", id="no data"),
        pytest.param(
            ("digits_48", "--data.url", "x"), "--initial.weights is missing: a fine-tuning recipe", id="no weights"
        ),
        pytest.param(("digits_smoke", "--data.url", "x", "--kills", "20"), "--kills is 20 with --steps 20", id="kills"),
        pytest.param(("digits_smoke", "--data.url", "x", "--ranks", "1", "1"), "--ranks is 1 1; allowed", id="ranks"),
        pytest.param(
            ("digits_smoke", "--data.url", "x", "--stages", "4"), "--stages is 4; allowed: 1 to 3", id="stage"
        ),
        pytest.param(("folder", "--data.url", "x"), "verify-resume takes those of pretrain or finetune", id="stage's"),
        pytest.param(("nothing",), "nothing", id="no recipe"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = patchline("verify-resume", *words)
    assert ended.code == 2
    assert message in " ".join(ended.errors.split())


def test_a_trial_is_the_recipe_but_for_its_length() -> None:
    job = default_job("verify-resume", "digits_48")
    recipe = digits_48()
    differing = {one.name for one in fields(TrainingJob) if getattr(job, one.name) != getattr(recipe, one.name)}
    assert (job.command, job.steps, differing) == ("finetune", 20, {"steps", "schedule"})
    assert job.schedule == replace(recipe.schedule, warmup_steps=job.schedule.warmup_steps)


def test_no_service_gets_the_runs_of_a_trial(tmp_path: Path) -> None:
    seen: list[LoggersConfig] = []

    def start(words: list[str], **_: Any) -> Ranks:
        seen.append(read_record(Path(words[1]), stage="pretrain", kind=TrainingJob).loggers)
        raise TransientError("enough")

    loggers = LoggersConfig(wandb=True, mlflow=True, mlflow_uri="http://localhost:5000")
    with pytest.raises(TransientError):
        verify(trial("x", tmp_path / "runs", loggers=loggers), start=start)
    assert seen == [LoggersConfig()]


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_and_removes_the_runs(digits_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jobs.cli", "verify-resume", "digits_smoke", "--data.url", digits_url]
    command += ["--steps", "4000", "--checkpoint.every-steps", "500", "--device", "cpu", "--run-dir", str(tmp_path)]
    with (tmp_path.parent / "said").open("w") as said:
        process = subprocess.Popen([*command, "--ranks", "2"], cwd=CHECKOUT, stdout=said, stderr=said)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("*/unbroken-0/metrics.jsonl")):
        assert process.poll() is None, (tmp_path.parent / "said").read_text()
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.iterdir()) == []


@given(st.integers(2, 500), st.integers(1, 40), st.integers(1, 60), st.integers(0, 9))
def test_every_kill_is_within_the_run_and_in_order(num_steps: int, num_kills: int, save_steps: int, seed: int) -> None:
    moments = planned_moments(num_kills, num_steps=num_steps, save_steps=save_steps, seed=seed)
    assert len(moments) == num_kills
    steps = [moment.step for moment in moments]
    assert steps == sorted(steps)
    assert all(1 <= step < num_steps for step in steps)
    assert all(moment.is_in_save <= (moment.step % save_steps == 0) for moment in moments)
    assert all(step > save_steps for step in steps) or num_steps <= save_steps + 1
    assert moments == planned_moments(num_kills, num_steps=num_steps, save_steps=save_steps, seed=seed)


def test_kills_fall_into_saves_and_between_them() -> None:
    moments = planned_moments(6, num_steps=100, save_steps=5, seed=1)
    assert [moment.is_in_save for moment in moments] == [True, False] * 3
    others = planned_moments(6, num_steps=100, save_steps=5, seed=2)
    assert [moment.step for moment in moments] != [moment.step for moment in others]


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (TrialTopology(num_ranks=1, zero_stage=3), "1 rank, ZeRO-3"),
        (TrialTopology(num_ranks=8, zero_stage=1), "8 ranks, ZeRO-1"),
    ],
)
def test_a_topology_in_words(topology: TrialTopology, words: str) -> None:
    assert str(topology) == words
