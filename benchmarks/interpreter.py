"""The interpreter's time that the loader takes per sample, which a training loop in the same process cannot use.

The images have 8 x 8 pixels, so little is left but the work around them. What is counted is the CPU time of the whole
process less the time inside the calls of the C library, which hold no interpreter lock. It is an upper bound: NumPy's
larger operations and the reads of files hold no lock either. Command (two minutes):

    python -m benchmarks.interpreter --out benchmarks/results/interpreter.json

With --many-cores, it shows what would hold one process back on a host of many cores. Decoding is replaced by a wait of
a millisecond per image, which takes no core and holds no lock, so that 16 threads can work at a time on two cores. What
is left is the work of the interpreter: the rate, the CPU time of each kind of thread, and how long the planning thread
is busy. Each size of batch is also measured with the chunks that it had before `chunk_size`. The rate depends on how
soon a thread wakes up, so on a machine that does other work give the command a high priority (`chrt -r 1`). Command
(two minutes):

    python -m benchmarks.interpreter --many-cores --out benchmarks/results/interpreter_many_cores.json
"""

import argparse
import ctypes
import io
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from benchmarks.measure import machine
from benchmarks.rounds import Report, cell, in_turn, spread, summary, values, write
from jobs.data.pack import PackJob, run
from pipeline.data.batches import TrainBatches
from pipeline.data.config import AugmentConfig, DataConfig, RandAugmentConfig
from pipeline.data.stream import train_batches
from pipeline.data.transform import crop_decoder
from shards.sources.kinds import FolderSource

NUM_IMAGES, NUM_CLASSES = 16_384, 16
BATCH = 256  # samples of this rank
WARM_UP, MEASURED = 16, 128  # batches
FIGURE, LIBRARY = "held_us", "library_us"
# Samples of each lane in a batch, and operations of RandAugment; with the aim in microseconds a sample.
ARMS = {
    "32 samples a lane": (32, 0, 10),
    "32 samples a lane, RandAugment of 2": (32, 2, 20),
    "4 samples a lane": (4, 0, 10),
    "4 samples a lane, RandAugment of 2": (4, 2, 20),
}
NUM_THREADS = 16
IMAGE_SECONDS = 1e-3  # of a thread: about what an H200's host took (gpu_h200.json)
LANE_SAMPLES = 4  # of a batch
MANY_SECONDS = 4.0  # of one measurement
# Samples of a batch, and whether its chunks have the size that they had before `chunk_size`.
MANY_ARMS = {
    "batches of 64, one image a call": (64, True),
    "batches of 64, chunks": (64, False),
    "batches of 256, four images a call": (256, True),
    "batches of 256, chunks": (256, False),
}
RATE, BUSY, PLANS, PLANS_CPU, QUEUED = "images_per_second", "busy", "plans", "plans_on_a_core", "waits_for_a_core"
KINDS = ("plan", "decode", "take", "other")  # of threads
MANY_FIGURES = (RATE, FIGURE, BUSY, PLANS, PLANS_CPU, QUEUED, *(f"{kind}_us" for kind in KINDS))


def main() -> None:
    """Measures every arm; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--many-cores", action="store_true", help="replace decoding by a wait, and use 16 threads")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    decoder = crop_decoder()
    if decoder is None:
        raise SystemExit("the crop decoder is not built: make setup")
    if arguments.many_cores:
        many_cores(arguments.rounds, arguments.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        url = packed(Path(folder))
        clock = Clock(decoder._library.sample_views_fill)
        with mock.patch.object(decoder._library, "sample_views_fill", clock):
            rounds = in_turn(
                list(ARMS), lambda name: arm(url, name, clock), rounds=arguments.rounds, keep=lambda _: None
            )
    found, library = ({name: spread(values(rounds, name, each)) for name in ARMS} for each in (FIGURE, LIBRARY))
    command = f"python -m benchmarks.interpreter --rounds {arguments.rounds} --out benchmarks/results/interpreter.json"
    write(arguments.out, {"command": command, "machine": machine(), FIGURE: found, LIBRARY: library})
    sys.stdout.write(table(found, library))


class Clock:
    """A function of the C library, with the CPU seconds that its calls have taken."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> None:
        began = time.thread_time()
        self.function(*arguments)
        self.seconds += time.thread_time() - began


def packed(folder: Path) -> str:
    """The URL of a dataset of noise."""
    draw = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        path = folder / "images" / f"class{number % NUM_CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(data, "JPEG")
        path.write_bytes(data.getvalue())
    job = PackJob(out=str(folder / "packed"), source=FolderSource(root=str(folder / "images")))
    if run(job):
        raise SystemExit("packing failed")
    return job.out


def arm(url: str, name: str, clock: Clock) -> dict[str, Any]:
    """Microseconds a sample that may have held the interpreter."""
    of_lane, num_ops, _ = ARMS[name]
    config = DataConfig(
        lanes=BATCH // of_lane,
        num_threads=1,
        augment=AugmentConfig(crop="random_resized"),
        randaugment=RandAugmentConfig(num_ops=num_ops, magnitude=9) if num_ops else RandAugmentConfig(),
    )
    with train_batches(url, global_batch=BATCH, image_size=8, config=config) as batches:
        next(itertools.islice(batches, WARM_UP, None))
        began, native = time.process_time(), clock.seconds
        next(itertools.islice(batches, MEASURED - 1, None))
        held = time.process_time() - began - (clock.seconds - native)
    in_library = clock.seconds - native
    return {FIGURE: held / (MEASURED * BATCH) * 1e6, LIBRARY: in_library / (MEASURED * BATCH) * 1e6}


def table(found: dict[str, list[float]], library: dict[str, list[float]]) -> str:
    """Microseconds a sample, one row per arm."""
    lines = ["| | aim, µs a sample | measured (quartiles) | in the library |", "|---|---|---|---|"]
    lines += [f"| {name} | at most {ARMS[name][2]} | {cell(found[name])} | {cell(library[name])} |" for name in ARMS]
    return "\n".join(lines) + "\n"


def many_cores(num_rounds: int, out: Path | None) -> None:
    """Measures the arms of many threads; prints and keeps the table."""
    decoder = crop_decoder()
    assert decoder is not None
    with tempfile.TemporaryDirectory() as folder:
        url = packed(Path(folder))
        with mock.patch.object(decoder._library, "sample_views_fill", wait):
            rounds = in_turn(
                list(MANY_ARMS), lambda name: many_threads(url, name), rounds=num_rounds, keep=lambda _: None
            )
    arms = summary(rounds, MANY_FIGURES)
    for name, found in arms.items():
        found["most_images_per_second"] = round(max(values(rounds, name, RATE)))
    command = "python -m benchmarks.interpreter --many-cores "
    command += f"--rounds {num_rounds} --out benchmarks/results/interpreter_many_cores.json"
    if os.sched_getscheduler(0) == os.SCHED_RR:
        command = f"chrt -r 1 {command}"
    about = {"num_threads": NUM_THREADS, "image_seconds": IMAGE_SECONDS, "lane_samples": LANE_SAMPLES}
    write(out, {"command": command, "machine": machine(), **about, "arms": arms})
    sys.stdout.write(many_table(arms))


def wait(samples: int, count: int, settings: Any, out: int, are_done: int) -> None:  # noqa: ARG001
    """Stands for the library's `sample_views_fill`: takes its time, without a core and without the lock."""
    time.sleep(count * IMAGE_SECONDS)
    ctypes.memset(are_done, 1, count)


class Planning:
    """The planning thread's `_plan`, with the seconds that its calls have taken, and those on a core."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Counts the calls of all streams."""
        plan = TrainBatches._plan

        def counted(*arguments: Any) -> Any:
            began, cpu = time.monotonic(), time.thread_time()
            coming = plan(*arguments)
            self.seconds += time.monotonic() - began
            self.cpu_seconds += time.thread_time() - cpu
            return coming

        with mock.patch.object(TrainBatches, "_plan", counted):
            yield


def many_threads(url: str, name: str) -> Report:
    """Returns an arm's rate, and what its threads did."""
    batch, is_before = MANY_ARMS[name]
    config = DataConfig(
        lanes=batch // LANE_SAMPLES, num_threads=NUM_THREADS, augment=AugmentConfig(crop="random_resized")
    )
    planning = Planning()
    with ExitStack() as stack:
        stack.enter_context(planning.measured())
        if is_before:
            stack.enter_context(mock.patch("pipeline.data.batches.chunk_size", chunk_size_before))
        batches = stack.enter_context(train_batches(url, global_batch=batch, image_size=8, config=config))
        next(itertools.islice(batches, WARM_UP, None))
        began, cpu, before = time.monotonic(), time.process_time(), thread_seconds()
        seconds, cpu_seconds = planning.seconds, planning.cpu_seconds
        num_images = 0
        while time.monotonic() - began < MANY_SECONDS:
            num_images += next(batches).images.shape[0]
        wall, held, after = time.monotonic() - began, time.process_time() - cpu, thread_seconds()
        plans = planning.seconds - seconds
        plans_cpu = planning.cpu_seconds - cpu_seconds
    ran = {kind: after[kind] - before[kind] for kind in (*KINDS, QUEUED)}
    return {
        RATE: num_images / wall,
        FIGURE: held / num_images * 1e6,
        BUSY: held / wall,
        PLANS: plans / wall,
        PLANS_CPU: plans_cpu / wall,
        QUEUED: ran[QUEUED] / wall,
        **{f"{kind}_us": ran[kind] / num_images * 1e6 for kind in KINDS},
    }


def chunk_size_before(num_samples: int, *, num_threads: int, steps_ahead: int) -> int:  # noqa: ARG001
    """Returns the number of samples of a call as it was before `pipeline.data.batches.chunk_size`."""
    return -(-num_samples // (4 * num_threads))


def thread_seconds() -> dict[str, float]:
    """Returns the CPU-seconds of this process's threads since they began, by their kind, and how long they waited for a
    core."""
    found = dict.fromkeys((*KINDS, QUEUED), 0.0)
    for thread in threading.enumerate():
        on_core, waited, _ = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
        kind = "take" if thread is threading.main_thread() else thread.name
        found[kind if kind in KINDS else "other"] += int(on_core) / 1e9
        found[QUEUED] += int(waited) / 1e9
    return found


def many_table(arms: dict[str, Report]) -> str:
    """The arms of many threads as Markdown."""
    lines = [
        "| | images/s | CPU time per image, µs | in planning | in decoding | in taking | in others | cores busy | "
        "planning, share of the time | of it on a core |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in arms.items():
        figures = (FIGURE, *(f"{kind}_us" for kind in KINDS), BUSY, PLANS, PLANS_CPU)
        cells = [f"{cell(found[RATE])}, at most {found['most_images_per_second']}"]
        cells += [cell(found[figure]) for figure in figures]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
