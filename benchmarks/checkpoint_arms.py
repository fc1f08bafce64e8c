"""A rank of the checkpoint benchmark: trains a state, and saves it with each arm in turn. checkpoint.py starts two."""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.rounds import say
from pipeline.checkpoints.checkpoint import Checkpoints, Fragment
from pipeline.checkpoints.commit import draft_manifest
from pipeline.checkpoints.config import Retention
from pipeline.checkpoints.manifest import CheckpointId, CheckpointManifest
from pipeline.checkpoints.saves import NAMES, Saves, lay_out
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.copies import BackgroundWriter, HostBuffer, InlineWriter
from pipeline.models import ModelConfig, build_model
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.world import World, current_world, enter, leave
from pipeline.training.saving.save import saved_job
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, TrainingJob
from pipeline.training.step import StepSums, SumSource
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.engine import Engine
from shards.store import open_store
from tests.rigs.positions import position_at

IMAGE_SIZE, NUM_CLASSES, MICRO_BATCH, RATE = 32, 1000, 2, 1e-4
STEPS, SAVED_STEP = 20, 1
KEPT = Retention(keep_newest=1)


class Bench:
    """A rank that trains, and what it saves."""

    def __init__(self, world: World, folder: Path, model: str) -> None:
        self.world, self.folder = world, folder
        config = ModelConfig(name=model, image_size=IMAGE_SIZE, num_classes=NUM_CLASSES)
        batch = MICRO_BATCH * world.num_ranks
        engine = EngineConfig(zero_stage=1, precision="fp32")
        self.job = TrainingJob(model=config, global_batch=batch, engine=engine, steps=10)
        plan = plan_batch(batch, micro_batch=0, num_ranks=world.num_ranks, lanes=1)
        optimizer = OptimizerConfig(name="adamw")
        self.engine = Engine(build_model(config), config=engine, plan=plan, optimizer=optimizer, clip_norm=0.0)
        self.images = torch.randint(0, 256, (MICRO_BATCH, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=torch.uint8)
        self.labels = torch.randint(0, NUM_CLASSES, (MICRO_BATCH,))
        self.checkpoints = Checkpoints(
            open_store(str(folder / "checkpoints")),
            world,
            run_dir=folder,
            recorded=lambda: None,
            has_records=lambda: False,
        )
        self.num_saves = 0

    def step(self, sums: StepSums | None = None) -> dict[str, float]:
        """One training step, with the sums that ranks add up in it."""
        self.engine.train(True)
        loss = self.engine.accumulate(self._loss)
        own = sums or StepSums((), device=self.world.device)
        found = own.reduced(loss)
        update = self.engine.update(learning_rate=RATE)
        return own.by_name(own.read_back(found, grad_norm=update.grad_norm))

    def draft(self) -> CheckpointManifest:
        """The manifest of the next save."""
        self.num_saves += 1
        return draft_manifest(
            CheckpointId(step=self.num_saves, attempt=self.checkpoints.attempt.token),
            shapes=self.engine.shapes,
            position=position_at(self.num_saves),
            num_updates=self.num_saves,
            job=saved_job(self.job),
            record={},
        )

    def slowest(self, seconds: float) -> float:
        """The most that any rank took."""
        return max(float(each) for each in gather_json(seconds, device=self.world.device))

    def _loss(self, model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(self.images), self.labels)


def timed(bench: Bench, arm: Callable[[], object]) -> float:
    """Seconds of the slower rank; both begin together."""
    dist.barrier()
    began = time.perf_counter()
    arm()
    return bench.slowest(time.perf_counter() - began)


class Arms:
    """The arms, which save the same state in turn. `seconds`: of each, one value per round."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.seconds: dict[str, list[float]] = {}
        fragments = bench.engine.fragments()
        self.views = [view for fragment in fragments for view in fragment.slots.values()]
        self.copies = [torch.zeros_like(view) for view in self.views]
        self.writer = Writer()
        buffer = HostBuffer(self.writer.buffer, bench.world.device)
        buffer.fit(lay_out(fragments).head.num_bytes)
        self.asynchronous = Saves(bench.checkpoints, BackgroundWriter(self.writer, buffer), KEPT)
        self.group = dist.new_group(backend="gloo")  # a thread of async_save's uses it
        self.synchronous = Saves(bench.checkpoints, InlineWriter(bench.checkpoints.store), KEPT)

    def run_all(self) -> None:
        """One round."""
        self._add("memcpy", timed(self.bench, self._memcpy))
        self._add("patchline", timed(self.bench, lambda: self._begin(self.asynchronous)))
        self._add("patchline, committed after", timed(self.bench, self.asynchronous.wait))
        self.asynchronous.settle()
        self._add("patchline, sync", timed(self.bench, lambda: self._save_at_once(self.synchronous)))
        self._others()

    def resume(self) -> float:
        """Seconds to find, verify and load the newest checkpoint."""
        return timed(self.bench, self._load)

    def steps(self, *, saves: bool) -> dict[str, float]:
        """Seconds of 20 steps, of which the second is saved, until the last has ended; the commit may come later. And
        what of it the slower rank's training thread was ready to run but had no core, and its CPU time."""
        own = self.asynchronous
        sums = StepSums((SumSource(names=NAMES, read=own.flags),), device=self.bench.world.device)
        before = scheduled()
        seconds = timed(self.bench, lambda: self._train(sums, saves=saves))
        on_core, waited = (now - then for now, then in zip(scheduled(), before, strict=True))
        found = {"seconds": seconds, "cpu": self.bench.slowest(on_core), "without_core": self.bench.slowest(waited)}
        own.wait()
        own.settle()
        return found

    def _train(self, sums: StepSums, *, saves: bool) -> None:
        for step in range(STEPS):
            self.asynchronous.advance(self.bench.step(sums))
            if saves and step == SAVED_STEP:
                self._begin(self.asynchronous)

    def _memcpy(self) -> None:
        for view, copy in zip(self.views, self.copies, strict=True):
            copy.copy_(view)

    def _begin(self, saves: Saves) -> None:
        saves.begin(lay_out(self.bench.engine.fragments()), self.bench.draft())

    def _save_at_once(self, saves: Saves) -> None:
        self._begin(saves)
        saves.wait()
        saves.settle()

    def _others(self) -> None:
        """The arms of DeepSpeed and PyTorch; what they have written is removed at once."""
        bench, folder, coming = self.bench, self.bench.folder / "others", list[Any]()
        engine = bench.engine._deepspeed
        self._add("deepspeed", timed(bench, lambda: engine.save_checkpoint(str(folder), tag="step")))
        self._remove(folder)
        self._add("dcp save", timed(bench, lambda: save(self._state(), checkpoint_id=folder, process_group=self.group)))
        self._remove(folder)
        self._add("dcp async_save", timed(bench, lambda: coming.append(self._async(folder))))
        self._add("dcp async_save, done after", timed(bench, lambda: coming.pop().result()))
        self._remove(folder)

    def _async(self, folder: Path) -> Any:
        return async_save(self._state(), checkpoint_id=folder, process_group=self.group)

    def _state(self) -> dict[str, torch.Tensor]:
        """What the rank owns, under names of its own."""
        own = self.bench.world.rank
        fragments = self.bench.engine.fragments()
        return {f"{own}:{slot}:{f.name}": view for f in fragments for slot, view in f.slots.items()}

    def _remove(self, folder: Path) -> None:
        dist.barrier()
        if self.bench.world.is_first:
            shutil.rmtree(folder)
        dist.barrier()

    def _load(self) -> None:
        checkpoints = self.bench.checkpoints
        manifest = checkpoints.newest()
        if manifest is None:
            raise RuntimeError("no checkpoint was committed")

        wanted: list[tuple[Fragment, str]] = []
        self.bench.engine.load(
            lambda fragment, slot: wanted.append((fragment, slot)),
            moments=list(manifest.moments),
            num_updates=manifest.num_updates,
            filled=lambda: checkpoints.load(manifest, wanted),
        )
        checkpoints.loaded()

    def _add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(round(seconds, 4))
        if self.bench.world.is_first:
            say(f"{name}: {seconds:.3f} s")


def cpu_seconds(pid: int) -> float:
    """Of one process, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def scheduled() -> tuple[float, float]:
    """Seconds that the calling thread has run so far, and that it was ready to run but had no core."""
    on_core, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(on_core) / 1e9, int(waited) / 1e9


def main() -> None:
    """Runs all rounds; rank 0 writes FOLDER/report.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    options = parser.parse_args()
    world = current_world("cpu", threads=1)
    enter(world)
    bench = Bench(world, options.folder, options.model)
    bench.checkpoints.begin_attempt(None)
    bench.step()  # makes the moments
    arms = Arms(bench)
    for _ in range(options.rounds):
        arms.run_all()
    arms.copies.clear()  # nothing copies into them any more, and memory is short
    pairs = []
    for number in range(options.pairs):
        before = cpu_seconds(arms.writer.pid)
        turns = ("without", "with") if number % 2 == 0 else ("with", "without")
        pair: dict[str, Any] = {turn: arms.steps(saves=turn == "with") for turn in turns}
        pairs.append(pair | {"writer_cpu_seconds": cpu_seconds(arms.writer.pid) - before})
        if world.is_first:
            say(f"{STEPS} steps: {pairs[-1]}")
    resumed = [arms.resume() for _ in range(2)]
    if world.is_first:
        report = {
            "parameters": sum(torch.Size(shape).numel() for shape in bench.engine.shapes.values()),
            "rank_file_bytes": sum(view.numel() * view.element_size() for view in arms.views),
            "seconds": arms.seconds,
            "steps": pairs,
            "resume_seconds": resumed,
            "torch": torch.__version__,
        }
        (options.folder / "report.json").write_text(json.dumps(report))
    dist.barrier()
    arms.asynchronous.writer.close()
    leave()


if __name__ == "__main__":
    main()
