"""Runs on data with a bad batch go back to a checkpoint and leave it out; killed at any moment, they end the same."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import exit_codes
from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.checkpoints.manifest import CheckpointId, CheckpointManifest, manifest_from_json
from pipeline.data.position import Skipped, StepRange
from pipeline.ranks.world import World
from pipeline.training.controls import Controls
from pipeline.training.guard import BadStep
from pipeline.training.loop import open_loop
from pipeline.training.prepare import prepare
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.rewind import plan_rewind, why_not
from pipeline.training.settings.job import EngineConfig, GuardConfig
from pipeline.training.watchdog.stopping import Signals, Stopping
from tests.pipeline.checkpoints.test_manifest import MANIFEST
from tests.rigs.checkpoints import checkpoints_of
from tests.rigs.kills import run_and_kill, step_at_least
from tests.rigs.poisoned import BATCH, packed_with_poison
from tests.rigs.positions import position_at
from tests.rigs.processes import run_ranks
from tests.rigs.training import losses, resumed_steps, run

POISON, STEPS = 20, 26  # the data step with the bad batch; steps of a run
MODEL = (
    *("--model.image-size", "16", "--model.width", "16", "--model.depth", "1", "--model.mlp-width", "32"),
    *("--model.num-heads", "2", "--model.dropout", "0.1"),
)
WORDS = (
    *MODEL,
    *("--steps", str(STEPS), "--global-batch", str(BATCH), "--data.lanes", "4", "--schedule.warmup-steps", "0"),
    *("--schedule.learning-rate", "0.03", "--device", "cpu", "--engine.precision", "fp32", "--engine.compile", "off"),
    *("--checkpoint.every-steps", "4", "--checkpoint.keep-newest", "9", "--guard.min-history", "12"),
)
REWIND = ("--guard.on-spike", "rewind", "--guard.skip-steps", "3")
SKIPPED = [{"first": 19, "end": 22}]
TWO_RANKS = ("--engine.zero-stage", "3", "--ema-decay", "0.9")
ONE_RANK = ("--engine.zero-stage", "1", "--micro-batch", "4", "--data.mixup.alpha", "0.1")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return packed_with_poison(tmp_path_factory.mktemp("poisoned"), [POISON])


def words_of(url: str, run_dir: Path, *more: str) -> list[str]:
    return ["pretrain", "digits_smoke", "--data.url", url, "--run-dir", str(run_dir), *WORDS, *more]


def manifests(run_dir: Path) -> dict[int, CheckpointManifest]:
    """By step, of the latest attempt that saved it."""
    paths = sorted((run_dir / "checkpoints").glob("step-*/*/MANIFEST.json"))
    found = [manifest_from_json(path.read_bytes()) for path in paths]
    return {manifest.id.step: manifest for manifest in found}


def findings(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "guard.jsonl").read_text().splitlines()]


def last_bits(run_dir: Path) -> dict[str, str]:
    """What the last checkpoint holds, and the losses of all steps."""
    last = manifests(run_dir)[STEPS]
    hashes = {name: " ".join(file.sha256) for name, file in last.files.items()}
    return hashes | {f"loss {step}": loss.hex() for step, loss in losses(run_dir).items()}


def as_killed_after_the_rewind(run_dir: Path, copy: Path) -> None:
    """What a run leaves that was killed between its rewind and its next save."""
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("DONE", "weights", "attempt-0002-*"))
    ledger = (copy / "ledger.jsonl").read_text().splitlines(keepends=True)
    number = next(number for number, line in enumerate(ledger) if '"rewind"' in line)
    (copy / "ledger.jsonl").write_text("".join(ledger[: number + 1]))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "options"), [(1, ONE_RANK), pytest.param(2, TWO_RANKS, marks=pytest.mark.long)])
def test_a_rewound_run_ends_the_same_however_often_it_is_killed(
    url: str, tmp_path: Path, num_ranks: int, options: tuple[str, ...]
) -> None:
    unbroken, resumed, killed = tmp_path / "unbroken", tmp_path / "resumed", tmp_path / "killed"
    assert run(words_of(url, unbroken, *REWIND, *options), num_ranks=num_ranks, log_dir=tmp_path) == 0
    assert resumed_steps(unbroken) == [0, 16]
    last = manifests(unbroken)[STEPS]
    assert (last.num_updates, last.position.data_step) == (STEPS, STEPS + 3)
    assert last.position.to_json()["skipped"] == SKIPPED
    assert max(losses(unbroken).values()) < 2, "the bad batch is in no line"
    lines = read_metrics(unbroken)
    assert [line["guard/skipped_steps"] for line in lines] == [0] * 16 + [3] * 10
    (found,) = findings(unbroken)
    assert (found["kind"], found["action"], found["step"], found["rewound_to"]) == ("spike", "rewound", POISON + 1, 16)
    assert (found["first_position"], found["end_position"]) == (POISON * BATCH, (POISON + 1) * BATCH)
    (line,) = [json.loads(line) for line in (unbroken / "ledger.jsonl").read_text().splitlines() if '"rewind"' in line]
    assert (line["step"], line["rewind"]["first_skipped"], line["rewind"]["end_skipped"]) == (16, 19, 22)

    as_killed_after_the_rewind(unbroken, resumed)
    assert run(words_of(url, resumed, *REWIND, *options), num_ranks=num_ranks, log_dir=tmp_path) == 0
    assert resumed_steps(resumed) == [0, 16, 16], "not the checkpoint of step 20, which was saved before the rewind"
    records = sorted((resumed / "checkpoints" / "attempts").glob("*.json"))
    assert [json.loads(record.read_text())["skipped"] for record in records] == [[], SKIPPED, SKIPPED]
    assert last_bits(resumed) == last_bits(unbroken)

    words = words_of(url, killed, *REWIND, *options)
    for step in (6, 19, 22):  # one may come too late
        run_and_kill(words, killed, moment=step_at_least(step), num_ranks=num_ranks, log_dir=tmp_path)
    assert len(resumed_steps(killed)) > 2
    assert run(words, num_ranks=num_ranks, log_dir=tmp_path) == 0
    assert last_bits(killed) == last_bits(unbroken), "the losses before the spike came from the checkpoints"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        pytest.param(
            ("--guard.max-rewinds", "0"),
            "spike",
            "it was rewound 0 times already, and --guard.max-rewinds is 0",
            id="no rewind is allowed",
        ),
        pytest.param(
            ("--checkpoint.every-steps", "20"),
            "spike",
            "no checkpoint of step 19 or before is there to rewind to",
            id="the only checkpoint has seen data that would be skipped",
        ),
        pytest.param(
            ("--guard.on-non-finite", "rewind", "--schedule.learning-rate", "1e30", "--clip-norm", "0"),
            "non_finite",
            "no checkpoint of step",
            id="a loss that is not finite",
        ),
    ],
)
def test_a_run_that_may_not_go_back_ends_with_78_and_the_evidence(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], kind: str, message: str
) -> None:
    run_dir = tmp_path / "run"
    assert run(words_of(url, run_dir, *REWIND, *options), num_ranks=1, log_dir=tmp_path) == exit_codes.WILL_NOT_SUCCEED
    said = " ".join(capfd.readouterr().err.split())
    assert message in said
    assert f"{run_dir}/guard.jsonl has the evidence" in said
    (found,) = findings(run_dir)
    assert (found["kind"], found["action"]) == (kind, "ended")
    assert not (run_dir / "DONE").exists()


@pytest.mark.slow
def test_a_checkpoint_to_go_back_to_is_kept_even_if_only_the_newest_is(url: str, tmp_path: Path) -> None:
    """That of step 20 has seen data that is to be skipped."""
    run_dir = tmp_path / "run"
    words = words_of(url, run_dir, *REWIND, "--checkpoint.keep-newest", "1")
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    assert resumed_steps(run_dir) == [0, 16]


@pytest.mark.long
def test_a_spike_may_be_left_without_an_update(url: str, tmp_path: Path) -> None:
    run_dir, killed = tmp_path / "run", tmp_path / "killed"
    assert run(words_of(url, run_dir, "--guard.on-spike", "skip"), num_ranks=2, log_dir=tmp_path) == 0
    last = manifests(run_dir)[STEPS]
    assert (last.num_updates, last.position.data_step, last.position.skipped) == (STEPS - 1, STEPS, ())
    (found,) = findings(run_dir)
    assert (found["step"], found["action"], found["was_skipped"]) == (POISON + 1, "no update", True)
    assert 0.01 < found["grad_norm"] < 1e3, "that of the spike itself"
    seen = losses(run_dir)
    assert seen[POISON + 1] > 2 > max(loss for step, loss in seen.items() if step != POISON + 1)

    words = words_of(url, killed, "--guard.on-spike", "skip")
    run_and_kill(words, killed, moment=step_at_least(18), num_ranks=2, log_dir=tmp_path)
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    assert last_bits(killed) == last_bits(run_dir), "the losses before the spike came from a checkpoint"


@pytest.mark.long
def test_fine_tuning_on_mixed_datasets_goes_back_too(url: str, tmp_path: Path) -> None:
    """With micro-batches and clipping. Six images of a batch come from the dataset with the bad batch: its eight are in
    two steps."""
    plain, base = packed_with_poison(tmp_path / "plain", []), tmp_path / "base"
    assert run(words_of(url, base, "--guard.on-spike", "skip"), num_ranks=1, log_dir=tmp_path) == 0

    def words(run_dir: Path) -> list[str]:
        mixed = ("--initial.weights", f"{base}/weights", "--data.mix", url, "3", plain, "1", "--run-dir", str(run_dir))
        more = ("--steps", "34", "--schedule.learning-rate", "0.01", "--micro-batch", "2", "--clip-norm", "1")
        return ["finetune", "digits_48", *mixed, *WORDS, *REWIND, *more]

    assert run(words(tmp_path / "run"), num_ranks=2, log_dir=tmp_path) == 0
    found = findings(tmp_path / "run")
    assert [(one["kind"], one["action"], one["data_step"]) for one in found] == [("spike", "rewound", 26)]
    assert (found[0]["first_skipped"], found[0]["end_skipped"]) == (25, 28), "both steps"
    run_and_kill(
        words(tmp_path / "killed"), tmp_path / "killed", moment=step_at_least(30), num_ranks=2, log_dir=tmp_path
    )
    assert run(words(tmp_path / "killed"), num_ranks=2, log_dir=tmp_path) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "run")
    assert manifests(tmp_path / "killed")[34].files == manifests(tmp_path / "run")[34].files


@pytest.mark.slow
def test_saves_after_a_rewind_have_new_numbers(url: str, tmp_path: Path) -> None:
    """The writer, which stays, would take a number that it has seen for a save that is waited for already."""
    assert run(words_of(url, tmp_path / "run", *REWIND), num_ranks=1, log_dir=tmp_path) == 0
    reports = (tmp_path / "run" / "checkpoints").glob("step-*/*/rank-00000.json")
    found = [(report.parent.name, json.loads(report.read_text())["save"]) for report in reports]
    assert len({attempt for attempt, _ in found}) == 2
    assert sorted(number for _, number in found) == [1, 2, 3, 4, 6, 7, 8], "the fifth was of step 20, and is retired"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_the_guard_ends_commits_the_save_that_is_under_way(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], num_ranks: int
) -> None:
    """That of step 20, which began right before the bad batch."""
    words = words_of(url, tmp_path / "run", "--guard.on-spike", "skip", "--max-skipped-updates", "0")
    code = run([*words, "--checkpoint.every-steps", str(POISON)], num_ranks=num_ranks, log_dir=tmp_path)
    assert code == exit_codes.WILL_NOT_SUCCEED
    assert list(manifests(tmp_path / "run")) == [POISON]
    assert f"the last good checkpoint is of step {POISON}" in " ".join(capfd.readouterr().err.split())


FOUND = BadStep(
    kind="spike",
    step=31,
    data_step=40,
    first_position=640,
    end_position=656,
    loss=9.0,
    median=2.0,
    mad=0.1,
    z=47.0,
    grad_norm=3.0,
    learning_rate=0.1,
    was_skipped=False,
)


def ranges(*pairs: tuple[int, int]) -> Skipped:
    return tuple(StepRange(first=first, end=end) for first, end in pairs)


@pytest.mark.parametrize(
    ("skipped", "skip", "last_step"),
    [
        pytest.param((), (36, 44), 36, id="nothing skipped so far: steps are data steps"),
        pytest.param(ranges((5, 15)), (36, 44), 26, id="what was skipped before took no step"),
        pytest.param(ranges((38, 39)), (39, 44), 38, id="what was skipped just before it is not gone back to"),
    ],
)
def test_it_goes_back_to_before_what_it_skips(skipped: Skipped, skip: tuple[int, int], last_step: int) -> None:
    plan = plan_rewind(FOUND, skipped, config=GuardConfig(skip_steps=8))
    assert (plan.skip.first, plan.skip.end, plan.last_step) == (*skip, last_step)


@pytest.mark.parametrize(
    ("skipped", "step", "reason"),
    [
        pytest.param((), 20, "", id="the first"),
        pytest.param(ranges((21, 22), (24, 25)), 20, "", id="the third to one checkpoint"),
        pytest.param(ranges((21, 22), (24, 25), (27, 30)), 20, "3 rewinds to the checkpoint of step 20", id="a fourth"),
        pytest.param(ranges((1, 2), (3, 4), (27, 30)), 20, "", id="those to earlier checkpoints do not count"),
        pytest.param(ranges((1, 2), (3, 4), (5, 6), (7, 8)), 20, "rewound 4 times already", id="the most"),
        pytest.param((), None, "no checkpoint of step 36 or before", id="no checkpoint"),
    ],
)
def test_how_often_a_run_goes_back(skipped: Skipped, step: int | None, reason: str) -> None:
    config = GuardConfig(max_rewinds=4)
    plan = plan_rewind(FOUND, (), config=config)
    found = None
    if step is not None:
        before = tuple(one for one in skipped if one.first < step)
        found = replace(
            MANIFEST,
            id=CheckpointId(step=step, attempt="0001-x"),
            position=position_at(0).at(step, skipped=before),
            num_updates=step,
        )
    why = why_not(plan, skipped, found, config=config)
    assert reason in why
    assert bool(reason) == bool(why)


def built_twice(world: World, url: str, run_dir: Path) -> dict[str, object]:
    """What the second loop of one process shares with the first."""
    run_dir.mkdir()
    base = digits_smoke()
    job = replace(
        base,
        run_dir=str(run_dir),
        data=replace(base.data, url=url),
        engine=EngineConfig(compile="off", precision="fp32"),
        checkpoint=CheckpointConfig(asynchronous="off"),
    )
    prepared, checkpoints = prepare(job, world), checkpoints_of(run_dir, world)
    checkpoints.begin_attempt(None)
    controls = Controls(signals=Signals(run_dir, watch_markers=True), stopping=Stopping(), ledger=Ledger(run_dir))
    with open_loop(prepared, checkpoints, controls, None, None, before=None) as first:
        batch = first.train_step.next_batch()
        first.train_step.launch(batch)
    with open_loop(prepared, checkpoints, controls, None, None, before=first) as second:
        return {
            "engine": second.train_step.gradients.engine is first.train_step.gradients.engine,
            "plan": second.train_step.gradients.plan is first.train_step.gradients.plan,
            "writer": second.saving.saves.writer is first.saving.saves.writer,
            "batches": second.train_step.stream is first.train_step.stream,
            "steps": (first.train_step.stream.typed_position.next_step, second.step),
            "first batch again": second.train_step.next_batch().sample_ids.tolist() == batch.sample_ids.tolist(),
        }


def test_a_rewound_run_keeps_its_engine_and_its_writer_and_begins_its_batches_again(
    digits_url: str, tmp_path: Path
) -> None:
    (found,) = run_ranks(built_twice, digits_url, tmp_path / "run", num_ranks=1)
    assert found == {
        "engine": True,
        "plan": True,
        "writer": True,
        "batches": False,
        "steps": (1, 0),
        "first batch again": True,
    }
