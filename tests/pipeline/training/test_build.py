"""A loop is built from its parts, and after a rewind again around the same engine; whole runs are in test_run.py."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.ranks.world import World
from pipeline.training import build
from pipeline.training.build import Parts, build_loop
from pipeline.training.controls import Watch
from pipeline.training.prepare import prepare
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.settings.job import EngineConfig
from pipeline.training.start_parts import StartParts
from pipeline.training.watchdog.signals import Signals
from pipeline.training.watchdog.stopping import Stopping
from pipeline.training.zero.batch_plan import BatchPlan
from tests.rigs.checkpoints import checkpoints_of
from tests.rigs.processes import one_world, run_ranks


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
    watch = Watch(signals=Signals(run_dir, watch_markers=True), stopping=Stopping(), ledger=Ledger(run_dir))
    parts = Parts(prepared=prepared, checkpoints=checkpoints, watch=watch, writer=None)
    with ExitStack() as stack:
        first = build_loop(parts, None, stack, before=None)
        batch = first.train_step.next_batch()
        first.train_step.launch(batch)
    with ExitStack() as stack:
        second = build_loop(parts, None, stack, before=first)
        return {
            "engine": second.engine is first.engine,
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


@pytest.mark.parametrize(
    ("planned", "tried", "checked"),
    [
        pytest.param(1, 1, [1], id="the trial went well"),
        pytest.param(1, 2, [1, 2], id="several passes now: DeepSpeed adds them up in other code"),
        pytest.param(2, 4, [2], id="there were several before"),
    ],
)
def test_gradients_are_checked_as_they_are_added_up(
    monkeypatch: pytest.MonkeyPatch, planned: int, tried: int, checked: list[int]
) -> None:
    def plan_of(accumulation: int) -> BatchPlan:
        return BatchPlan(global_batch=16, micro_batch=8 // accumulation, accumulation=accumulation, num_ranks=2)

    seen = []
    monkeypatch.setattr(build, "agreed_fit", lambda *_, **__: SimpleNamespace(plan=plan_of(planned)))
    monkeypatch.setattr(build, "start_engine", lambda *_, **__: (None, plan_of(tried)))
    monkeypatch.setattr(build, "fill_engine", lambda *_: None)
    monkeypatch.setattr(build, "checks_gradients", lambda *_: True)
    monkeypatch.setattr(build, "check_gradients", lambda _job, plan, _world: seen.append(plan.accumulation))
    prepared: Any = SimpleNamespace(
        job=digits_smoke(),
        world=one_world(1, 2),
        plan=None,
        budget=None,
        is_compiled=False,
        parts=StartParts(),
    )
    parts: Any = SimpleNamespace(prepared=prepared, checkpoints=None)
    assert build._engine(parts, None)[1] == plan_of(tried)
    assert seen == checked
