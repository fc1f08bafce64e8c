"""Streams batches in its own process and prints a record of each, one per line, until it is killed.

python -m tests.rigs.loader STREAMING POSITION   (two JSON objects; POSITION may be null)

The process has its own temporary, home and working folders, and its children inherit its mark, so that everything it
leaves behind can be found. Importing this module imports torch but nothing for packing, since it is started often.
"""

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from pipeline.data.config import DataConfig, RandAugmentConfig
from pipeline.data.stream import train_batches

CHECKOUT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is looked at, not written to
DEADLINE_SECONDS = 120.0  # deadline for the first batch: long enough for a busy machine
SAVE_EVERY = 3  # batches per saved position
_MARK = "PATCHLINE_LOADER_RIG"
_POLL_SECONDS = 0.005

Position = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """The settings of a stream: small batches of a small dataset."""

    url: str
    rank: int = 0
    num_ranks: int = 1
    num_threads: int = 2
    global_batch: int = 16
    lanes: int = 8
    image_size: int = 32
    randaugment_ops: int = 0


@dataclass(frozen=True, kw_only=True)
class Record:
    """The contents of a batch; the sha256 are those of each augmented image's pixels."""

    step: int
    sample_ids: tuple[int, ...]
    sha256: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Started:
    """A streaming process, its lines, its standard error, and the folder in which it may write."""

    process: "subprocess.Popen[bytes]"
    mark: str
    lines: Path
    errors: Path
    own: Path


def records(streaming: Streaming, position: Position | None = None) -> Iterator[tuple[Record, Position]]:
    """Every batch from `position` on, and the position after it. Endless."""
    config = DataConfig(
        lanes=streaming.lanes,
        window_blocks=2,
        num_threads=streaming.num_threads,
        randaugment=RandAugmentConfig(num_ops=streaming.randaugment_ops),
    )
    with train_batches(
        streaming.url,
        global_batch=streaming.global_batch,
        image_size=streaming.image_size,
        seed=5,
        rank=streaming.rank,
        num_ranks=streaming.num_ranks,
        position=position,
        config=config,
    ) as batches:
        for batch in batches:
            pixels = tuple(hashlib.sha256(image).hexdigest() for image in batch.images.numpy())
            ids = tuple(batch.sample_ids.tolist())
            yield Record(step=batch.step, sample_ids=ids, sha256=pixels), batches.position


def records_until(streaming: Streaming, stop_step: int, *, position: Position | None = None) -> list[Record]:
    """The batches before `stop_step`."""
    found = takewhile(lambda one: one[0].step < stop_step, records(streaming, position))
    return [record for record, _ in found]


def start(streaming: Streaming, position: Position | None, *, folder: Path) -> Started:
    """Starts the program in a new folder below `folder`; it runs until it is killed."""
    words = [json.dumps(asdict(streaming)), json.dumps(position)]
    return launch(["-X", "faulthandler", "-m", "tests.rigs.loader", *words], folder=folder)


def launch(words: list[str], *, folder: Path) -> Started:
    """Starts `python WORDS` with its own mark and folders."""
    mark = secrets.token_hex(8)
    own = folder / mark
    for name in ("tmp", "home", "work"):
        (own / name).mkdir(parents=True)
    lines, errors = folder / f"{mark}.lines", folder / f"{mark}.errors"
    environ = {**os.environ, _MARK: mark, "PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"}
    environ |= {"TMPDIR": str(own / "tmp"), "HOME": str(own / "home")}
    with lines.open("wb") as output, errors.open("wb") as error_output:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error_output,
            env=environ,
            cwd=own / "work",
            start_new_session=True,
        )
    return Started(process=process, mark=mark, lines=lines, errors=errors, own=own)


def wait_for_batch(started: Started) -> None:
    """Waits for the first batch's line. If none comes, the error has the stacks of all threads."""
    pause = threading.Event()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while b"\n" not in started.lines.read_bytes():
        if started.process.poll() is not None:
            code = started.process.returncode
            raise AssertionError(f"the stream ended with code {code}:\n{started.errors.read_text()}")
        if time.monotonic() > deadline:
            started.process.send_signal(signal.SIGABRT)  # faulthandler writes where every thread is
            started.process.wait()
            raise TimeoutError(f"no batch in {DEADLINE_SECONDS:.0f} s:\n{started.errors.read_text()}")
        pause.wait(_POLL_SECONDS)


def kill(started: Started) -> None:
    """SIGKILL to this one process, as from an operator or the kernel: its children get no signal."""
    assert started.process.poll() is None, f"it ended before it was killed:\n{started.errors.read_text()}"
    started.process.kill()
    assert started.process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    assert started.errors.read_text() == ""


def left_behind(started: Started) -> list[str]:
    """Living processes that inherited the dead one's mark, and files in its folders."""
    found = [f"process {pid}" for pid in _marked(started.mark)]
    return found + [f"file {path.relative_to(started.own)}" for path in started.own.rglob("*") if not path.is_dir()]


def names_in(*folders: Path) -> set[str]:
    """Every file below the folders."""
    return {str(path) for folder in folders for path in folder.rglob("*")}


def abandoned(names: set[str]) -> list[str]:
    """The names of the files that no living process maps or holds open; /dev/shm is shared with other programs.

    Files are compared by inode, since a semaphore is mapped before it gets its name: proc(5) still shows the old one.
    """
    names = {name for name in names if not Path(name).name.startswith("sem.loky-")}
    inodes = {}
    for name in names:
        with suppress(OSError):  # removed since it was listed
            inodes[name] = Path(name).stat().st_ino
    if not inodes:
        return []
    used = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has ended since, or belongs to another user
                used |= {int(line.split()[4]) for line in (folder / "maps").read_text().splitlines()}
                used |= {link.stat().st_ino for link in (folder / "fd").iterdir()}
    return sorted(Path(name).name for name, inode in inodes.items() if inode not in used and Path(name).exists())


def read_lines(path: Path) -> tuple[list[Record], Position | None]:
    """A process's whole lines: its batches, and the last position that it saved. A partial last line does not count."""
    found, position = [], None
    for line in path.read_text().split("\n")[:-1]:
        entry = json.loads(line)
        if "position" in entry:
            position = entry["position"]
        else:
            ids, sha256 = tuple(entry["sample_ids"]), tuple(entry["sha256"])
            found.append(Record(step=entry["step"], sample_ids=ids, sha256=sha256))
    return found, position


def _marked(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended since, or belongs to another user
            if folder.name.isdecimal() and f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def main() -> None:
    """Each line is written at once, so that everything written before a kill remains readable."""
    streaming, position = Streaming(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
    for number, (record, reached) in enumerate(records(streaming, position), start=1):
        for line in [asdict(record)] + ([{"position": reached}] if number % SAVE_EVERY == 0 else []):
            os.write(sys.stdout.fileno(), f"{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    main()
