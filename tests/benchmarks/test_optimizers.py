"""The comparison of optimisers: it chooses the best rate, and it runs, on digits and for a few steps."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.optimizers import RATES, SEEDS, Trials, of_optimizers, spread
from jobs.data.pack import PackJob, run
from shards.sources.kinds import DigitsSource


def finished(runs: Path, name: str, *, loss: float) -> None:
    """A run as if it had been made."""
    (runs / name).mkdir(parents=True)
    (runs / f"{name}.json").write_text(json.dumps({"cpu_seconds": 60.0}))
    scores = {"test_accuracy": 0.5, "test_loss": loss}
    lines = [{"step": step, "loss": loss} | (scores if step == 2 else {}) for step in (1, 2)]
    (runs / name / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_further_seeds_have_the_rate_of_the_least_loss(tmp_path: Path) -> None:
    """Each optimiser its own."""
    for optimizer, best in (("adamw", 1e-3), ("muon", 4e-3)):
        for rate in RATES:
            finished(tmp_path, f"{optimizer}-{rate:g}-0", loss=1.0 if rate == best else 2.0)
        for seed in SEEDS[1:]:
            finished(tmp_path, f"{optimizer}-{best:g}-{seed}", loss=1.0 + seed)
    results, spreads = of_optimizers(Trials(cifar10="", digits="", runs=tmp_path))
    assert len(results) == 2 * (len(RATES) + len(SEEDS) - 1)
    assert {name: found["learning_rate"] for name, found in spreads.items()} == {"adamw": 1e-3, "muon": 4e-3}
    assert spreads["muon"]["last_losses"] == [1.0, 2.0, 3.0]
    assert spread(results[:1])["cpu_seconds"] == [60.0] * 3


@pytest.mark.long
def test_a_run_is_made_once_and_measured(tmp_path: Path) -> None:
    for ending, split in (("", "train"), ("-test", "test")):
        source = DigitsSource(split=split)  # type: ignore[arg-type]
        assert run(PackJob(out=str(tmp_path / f"digits{ending}"), source=source, split=split)) == 0
    short = ("--steps=2", "--schedule.warmup-steps=0", "--global-batch=32", "--data.lanes=8", "--device=cpu")
    trials = Trials(cifar10="", digits=str(tmp_path / "digits"), runs=tmp_path, more=short)
    found = trials.of_moment("bf16", 1)
    assert 0 <= found["test_accuracy"] <= 1
    assert found["cpu_seconds"] > 0
    assert trials.of_moment("bf16", 1) == found
    record = yaml.safe_load((tmp_path / "moment-bf16-1" / "job.yaml").read_text())["job"]
    assert (record["optimizer"]["first_moment"], record["seed"]) == ("bf16", 1)
