"""All ranks take one micro-batch: that of the smallest budget, or of the checkpoint."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.recipes import pretrain
from pipeline.ranks.world import World
from pipeline.training.fitting.fit import Budget, agreed_fit, fitted, recorded_micro_batch, words_of
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import plan_batch
from shards.errors import UserError
from tests.rigs.processes import run_ranks
from tests.rigs.training import pretrain_words, run


def job_of() -> TrainingJob:
    job = pretrain.RECIPES["digits_smoke"]()
    return replace(
        job, model=replace(job.model, num_classes=10), engine=replace(job.engine, precision="fp32"), global_batch=64
    )


JOB = job_of()
RECORD = {"topology": {"num_ranks": 2}, "engine": {"micro_batch": 8}}


def needed(micro_batch: int) -> int:
    return memory_of(JOB, Topology(num_ranks=2, is_on_gpu=False), micro_batch=micro_batch).peak


def agreed(world: World, budgets: list[int], record: dict[str, Any] | None) -> tuple[int, int, str]:
    """The plan's micro-batch and accumulation, or a refusal."""
    whole = plan_batch(JOB.global_batch, micro_batch=0, num_ranks=2, lanes=8)
    own = Budget(total_bytes=budgets[world.rank], reserve_bytes=0, where=f"rank {world.rank}'s host")
    try:
        plan = agreed_fit(JOB, whole, own, world, record=record).plan
    except UserError as error:
        return 0, 0, str(error)
    return plan.micro_batch, plan.accumulation, ""


def test_the_rank_with_least_memory_decides_for_all() -> None:
    found = run_ranks(agreed, [needed(32), needed(16)], None, num_ranks=2)
    assert found == [(16, 2, "")] * 2
    assert run_ranks(agreed, [needed(32), needed(32)], RECORD, num_ranks=2) == [(8, 4, "")] * 2
    refused = run_ranks(agreed, [needed(32), 1000], None, num_ranks=2)
    assert refused[0] == refused[1]
    assert "but rank 1's host has 0 MB for it" in refused[0][2]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param(RECORD, 8, id="as many ranks"),
        pytest.param(RECORD | {"topology": {"num_ranks": 4}}, None, id="other ranks"),
        pytest.param(RECORD | {"engine": {"micro_batch": 0}}, None, id="of no images"),
        pytest.param(RECORD | {"engine": {"micro_batch": True}}, None, id="no number"),
        pytest.param(RECORD | {"engine": {"micro_batch": -8}}, None, id="negative"),
        pytest.param(RECORD | {"engine": [8]}, None, id="another type"),
        pytest.param({}, None, id="nothing"),
    ],
)
def test_what_a_record_says(record: dict[str, Any], expected: int | None) -> None:
    whole = plan_batch(JOB.global_batch, micro_batch=0, num_ranks=2, lanes=8)
    assert recorded_micro_batch(record, whole) == expected


def test_the_whole_share_on_a_cpu_is_nothing_to_talk_about() -> None:
    found = run_ranks(said, [needed(32), needed(16)], num_ranks=2)
    assert found[0].startswith("micro-batch 16 x 2 passes x 2 ranks (the largest that fits): 0.0 GB of the 0.0 GB")
    assert run_ranks(said, [needed(32), needed(32)], num_ranks=2) == ["", ""]
    assert found[1] == ""


def said(world: World, budgets: list[int]) -> str:
    """What is logged while the ranks agree."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pipeline.training.fitting.fit")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    agreed(world, budgets, None)
    return "".join(lines)


def test_the_line_has_the_numbers() -> None:
    job = pretrain.RECIPES["vit_h14_jft"]()
    job = replace(job, model=replace(job.model, num_classes=18_291))
    whole = plan_batch(4096, micro_batch=0, num_ranks=8, lanes=64)
    budget = Budget(total_bytes=85_000_000_000, reserve_bytes=8_800_000_000, where="NVIDIA H100")
    words = words_of(fitted(job, whole, budget, is_on_gpu=True), budget)
    assert words == (
        "micro-batch 128 x 4 passes x 8 ranks (the largest that fits): 49.4 GB of the 76.2 GB that NVIDIA H100 has for "
        "it (weights 1.3, states 1.0, gradients 3.0, activations 43.9; reserve 8.8)"
    )


def test_a_run_that_continues_keeps_its_micro_batch(digits_url: str, tmp_path: Path) -> None:
    """The first start names one; the second leaves it open, and would take the whole share of 32 if it started anew."""
    run_dir = tmp_path / "run"
    for more in (("--steps", "4", "--micro-batch", "8"), ("--steps", "6", "--extend")):
        assert run(pretrain_words(digits_url, run_dir, *more), num_ranks=1, log_dir=tmp_path / "logs") == 0
    manifests = sorted((run_dir / "checkpoints").glob("step-*/attempt-*/MANIFEST.json"))
    records = [json.loads(path.read_text())["record"] for path in manifests]
    assert [record["engine"]["micro_batch"] for record in records] == [8, 8]
