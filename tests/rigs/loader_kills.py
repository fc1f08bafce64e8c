"""Kills a process that streams batches again and again; each start continues from the last position that an earlier one
saved. Also makes the dataset."""

import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from jobs.data.pack import PackJob, run
from shards.output.progress import Progress
from shards.sources.kinds import FolderSource
from shards.store import open_store
from tests.rigs.images import image_bytes
from tests.rigs.loader import (
    DEADLINE_SECONDS,
    SHARED_MEMORY,
    Position,
    Record,
    Streaming,
    abandoned,
    kill,
    left_behind,
    names_in,
    read_lines,
    start,
    wait_for_batch,
)

NUM_SAMPLES = 61  # a prime number
KILLED_EARLY = 0.25  # share of kills before the first batch: while importing, opening or reading
LONGEST_SECONDS = 1.0  # seconds of streaming after the first batch


@dataclass(kw_only=True)
class Campaign:
    """The results of the kills. `first_batch_seconds`: from each start to its first batch, including the interpreter's
    start."""

    kills: int = 0
    kills_before_a_batch: int = 0
    batches_repeated: int = 0
    first_batch_seconds: list[float] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    by_step: dict[int, Record] = field(default_factory=dict)
    position: Position | None = None

    @property
    def stop_step(self) -> int:
        """One more than the last step reached."""
        return max(self.by_step, default=-1) + 1

    def add(self, lines: Path) -> None:
        """Adds what one process wrote, after checking that it started at its position and repeated every batch
        identically."""
        found, position = read_lines(lines)
        begin = self.position["next_step"] if self.position else 0
        assert [record.step for record in found] == list(range(begin, begin + len(found)))
        for record in found:
            self.batches_repeated += record.step in self.by_step
            assert self.by_step.setdefault(record.step, record) == record, f"step {record.step} was another batch"
        self.position = position or self.position


def killed_often(streams: list[Streaming], *, num_kills: int, seed: int, folder: Path) -> Campaign:
    """Streams in turn; each process is killed at a random moment, and the next one continues from the last saved
    position."""
    draw, done, pause = random.Random(seed), Campaign(), threading.Event()
    datasets = [Path(streaming.url) for streaming in streams if "://" not in streaming.url]
    before = names_in(SHARED_MEMORY, *datasets)
    with Progress("kills", num_kills, unit="kills") as progress:
        for number in range(num_kills):
            began = time.monotonic()
            started = start(streams[number % len(streams)], done.position, folder=folder)
            try:
                # Early kills depend on the usual time of a start, which later ones measure.
                if done.first_batch_seconds and draw.random() < KILLED_EARLY:
                    pause.wait(draw.uniform(0, statistics.median(done.first_batch_seconds)))
                else:
                    wait_for_batch(started)
                    done.first_batch_seconds.append(time.monotonic() - began)
                    pause.wait(draw.uniform(0, LONGEST_SECONDS))
            except BaseException:
                started.process.kill()  # and nothing is asked of it, which would hide what went wrong
                started.process.wait(DEADLINE_SECONDS)
                raise
            kill(started)
            done.kills += 1
            done.kills_before_a_batch += not read_lines(started.lines)[0]
            done.left_behind += left_behind(started)
            done.left_behind += abandoned(names_in(SHARED_MEMORY, *datasets) - before)
            done.add(started.lines)
            progress.advance(1, note=f"step {done.stop_step}")
    return done


def packed(folder: Path, images: list[bytes] | None = None) -> str:
    """A dataset of NUM_SAMPLES images (generated ones unless given) in blocks of 4."""
    if images is None:
        formats = ("JPEG", "JPEG", "PNG", "WEBP")
        images = [
            image_bytes(seed, height=80 + 4 * (seed % 30), width=120, image_format=formats[seed % 4])
            for seed in range(NUM_SAMPLES)
        ]
    assert len(images) == NUM_SAMPLES
    root = folder / "images"
    for number, data in enumerate(images):
        path = root / f"c{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    out = str(folder / "packed")
    assert run(PackJob(out=out, source=FolderSource(root=str(root)), samples_per_shard=16, samples_per_block=4)) == 0
    return out


def copied(url: str, to: str) -> str:
    """The same objects elsewhere."""
    source, target = open_store(url), open_store(to)
    for path in source.list():
        target.write(path, source.read(path))
    return to
