"""What the metrics of a step cost: its parts, MFU and memory in a line of metrics.jsonl and TensorBoard per step, and
the norms by group and the picture of the position embeddings at the intervals of a recipe.

Both arms are the training loop on one engine and one rank, with and without metrics. They take turns in short segments,
and the order changes from pair to pair, so that whatever slows the machine down slows both. `pairs_ratio` is the CPU
time of all threads of the process, with / without, by pairs: wall time would also count what other processes take.

Steps with norms or a picture are too rare for a median of pairs to show them, so what they cost more is measured by
itself (`norms_seconds`, `picture_seconds`: of a step that is due) and shared among the steps of an interval. So is the
time inside the calls of every step (`own_seconds`), which has the precision that pairs lack on a busy machine.

    python -m benchmarks.metrics --out benchmarks/results/metrics.json

It takes pairs until there are `--rounds` of them or `--seconds` are over: 8 minutes, and less than one for the rest.
"""

import argparse
import logging
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.loop_arms import OurLoop, Setting, batches, job_of, timed, timed_engine
from benchmarks.measure import machine
from benchmarks.rounds import Aim, aims_table, say, spread, write
from pipeline.inspection.weight_pictures import picture
from pipeline.models.loss import classification_loss
from pipeline.ranks.streams import streams_of
from pipeline.ranks.world import World, current_world, enter, leave
from pipeline.training.reporting.metrics import Metrics
from pipeline.training.reporting.norms import Norms, PositionView
from pipeline.training.reporting.utilisation import Utilisation
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.step_times import Part, StepTimes

MOST_SHARE = 0.005
_CALLS, _DUE_CALLS = 2000, 20


class NoTimes(StepTimes):
    """Marks nothing."""

    def begins(self) -> None:
        """See StepTimes."""

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:  # noqa: ARG002
        """See StepTimes."""
        yield


def measure(setting: Setting, world: World, folder: Path, stack: ExitStack, *, seconds: float) -> dict[str, Any]:
    """CPU and wall seconds per step by arm, in pairs of segments; the metrics' own CPU seconds per step; what a step
    that is due costs more. `seconds`: after which no other pair begins."""
    engine = timed_engine(setting, world)
    arms = {}
    for name, times in (("with", None), ("without", NoTimes())):
        (folder / name).mkdir()
        arms[name] = OurLoop(setting, world, engine, folder / name, stack, times=times)
        arms[name](2)
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    wall: dict[str, list[float]] = {name: [] for name in arms}
    began = time.monotonic()
    for number in range(setting.rounds):
        for name in list(arms)[:: 1 if number % 2 else -1]:
            lasted, spent = timed(arms[name], setting, world)
            cpu[name].append(spent / setting.steps)
            wall[name].append(lasted / setting.steps)
        if time.monotonic() - began > seconds:
            break
    own = own_seconds(setting, world, folder)
    return {"cpu_seconds": cpu, "wall_seconds": wall, "own_seconds": own} | due_seconds(setting, world, engine, folder)


def own_seconds(setting: Setting, world: World, folder: Path) -> float:
    """Per step: the marks of a step of one micro-batch, the values of its line, and their way into the files."""
    times = StepTimes()
    utilisation = Utilisation(job_of(setting, world), world, times)
    parts: tuple[Part, ...] = ("data_wait", "to_device", "forward_backward", "optimizer")
    (folder / "own").mkdir()
    with closing(Metrics(folder / "own", step=0)) as metrics:
        began = time.process_time()
        for step in range(1, _CALLS + 1):
            times.begins()
            for part in parts:
                with times.part(part):
                    pass
            metrics.write(step, utilisation.values(1.0, step=step))
            utilisation.words(1.0, step=step)
        return (time.process_time() - began) / _CALLS


def due_seconds(setting: Setting, world: World, engine: Engine, folder: Path) -> dict[str, float]:
    """What a step with norms, and one with a picture, costs more: medians of a few calls behind one backward pass."""
    job = job_of(setting, world)
    norms, view = (
        Norms(engine, every=1, device=world.device),
        PositionView(job, engine, world, streams_of(world.device)),
    )
    (own,) = batches(setting, world)[:1]
    engine.accumulate(lambda model: classification_loss(model(own.images), own.labels, name="softmax"))
    (folder / "due").mkdir()
    with closing(Metrics(folder / "due", step=0)) as metrics:

        def write_norms(step: int) -> None:
            sums = dict(zip(norms.names, norms.squares().tolist(), strict=True))
            metrics.write(step, norms.values(sums))

        def show_picture(step: int) -> None:
            launched = view.launched()
            if launched:
                metrics.show_picture("weights/position_similarity", step, picture(launched.arrived()))

        found = {"norms_seconds": _median_seconds(write_norms), "picture_seconds": _median_seconds(show_picture)}
    engine.update(learning_rate=0.0)
    return found


def _median_seconds(call: Callable[[int], None]) -> float:
    found = []
    for step in range(1, _DUE_CALLS + 1):
        began = time.process_time()
        call(step)
        found.append(time.process_time() - began)
    return statistics.median(found)


def result_of(found: dict[str, Any], setting: Setting, job: TrainingJob) -> dict[str, Any]:
    """What is kept: shares of a step."""
    cpu = found["cpu_seconds"]
    ratios = [one / other for one, other in zip(cpu["with"], cpu["without"], strict=True)]
    step = statistics.median(cpu["without"])
    every = {"norms": job.norms_every_steps, "picture": job.similarity_every_steps}
    shares = {name: found[f"{name}_seconds"] / interval / step for name, interval in every.items()}
    shares = {"own": found["own_seconds"] / step} | shares
    rare = shares["norms"] + shares["picture"]
    aims = [
        Aim(what="CPU time inside the metrics, share of a step", limit=MOST_SHARE, found=[sum(shares.values())]),
        Aim(
            what="CPU time with / without, by pairs, and the share of norms and picture",
            limit=1 + MOST_SHARE,
            found=[ratio + rare for ratio in ratios],
        ),
    ]
    return {
        "machine": machine(),
        "torch": torch.__version__,
        "model": setting.model,
        "batch": setting.batch,
        "pairs": len(ratios),
        "steps_per_segment": setting.steps,
        "step_cpu_seconds": spread(cpu["without"]),
        "step_wall_seconds": spread(found["wall_seconds"]["without"]),
        **{name: found[name] for name in ("own_seconds", "norms_seconds", "picture_seconds")},
        "every_steps": every,
        "shares": shares,
        "pairs_ratio": spread(ratios),
        "aims": [aim.row() for aim in aims],
    }


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_ti4")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200, help="pairs")
    parser.add_argument("--steps", type=int, default=3, help="of a segment: per arm and pair")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which no other pair begins")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    setting = Setting(
        model=given.model,
        precision="fp32",
        compiled=False,
        device="cpu",
        batch=given.batch,
        rounds=given.rounds,
        steps=given.steps,
    )
    logging.disable(logging.WARNING)
    world = current_world("cpu")
    enter(world)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = measure(setting, world, Path(folder), stack, seconds=given.seconds)
        result = result_of(found, setting, job_of(setting, world))
    leave()
    command = shlex.join(["python", "-m", "benchmarks.metrics", *sys.argv[1:]])
    write(given.out, {"command": command, **result})
    say(aims_table(result["aims"]))


if __name__ == "__main__":
    main()
