"""Kills the checkpoint writer of a running rank at each step of one save.

A step is a system call, at which strace(1) kills it, or a request to an S3 server.

One run goes on all the time: a trainer outlives its writer. Each kill is between two whole saves, which RUN/SAVE asks
for. strace counts the calls of each thread and of each name by itself, so it is attached to one thread at a time: the
one that writes the rank's file, and the one that commits. Threads that the commit starts only read.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from jobs.ranks import Ranks
from pipeline.checkpoints.attempts import list_committed
from pipeline.checkpoints.manifest import MANIFEST_NAME, is_checkpoint_file, manifest_from_json
from pipeline.checkpoints.rank_file_in import RankFiles
from shards.store import Store, open_store
from tests.rigs.cutting_proxy import CuttingProxy
from tests.rigs.training import pretrain_words, start
from tests.rigs.writers import writers_of

# Calls that touch files or descriptors: those that wait for other threads differ in number from save to save.
KINDS = "%file,%desc"
Call = tuple[int, str, int]  # the thread's place, the call's name, its number among those of this name
KEPT = 1  # so that each save deletes one
_DEADLINE_SECONDS = 60.0
_STEPS = 1_000_000  # it ends when it is told to


def words_of(url: str, run_dir: Path, saved: str = "") -> list[str]:
    """A run that saves when it is asked to, into `saved` or into the run directory."""
    more: tuple[str, ...] = (
        "--steps",
        str(_STEPS),
        "--checkpoint.every-steps",
        str(_STEPS),
        "--checkpoint.asynchronous",
        "on",
    )
    more += ("--checkpoint.url", saved, "--checkpoint.keep-newest", str(KEPT))
    return pretrain_words(url, run_dir, *more, "--checkpoint.max-failed", "1000", "--engine.precision", "fp32")


def until(what: Callable[[], bool], *, why: str) -> None:
    """Waits; AssertionError with `why` after a minute."""
    deadline, pause = time.monotonic() + _DEADLINE_SECONDS, threading.Event()
    while not what():
        assert time.monotonic() < deadline, why
        pause.wait(0.02)


@dataclass(kw_only=True)
class SavingRun:
    """A run of one rank. `killed`: the calls at which its writers were killed. `faults`: what was wrong."""

    run_dir: Path
    ranks: Ranks
    store: Store
    killed: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def save(self) -> None:
        """One whole save."""
        before = self.newest()
        (self.run_dir / "SAVE").touch()
        until(lambda: self.newest() > before, why="no checkpoint was committed")
        until(lambda: not (self.run_dir / "SAVE").exists(), why="the request to save was not fulfilled")

    def newest(self) -> int:
        """Step of the newest committed checkpoint."""
        return max((each.step for each in list_committed(self.store)), default=0)

    def threads(self) -> list[int]:
        """The writer's threads in the order of their start: commands, the rank's file, commits."""
        (writer,) = self._writers()
        return sorted(int(entry.name) for entry in os.scandir(f"/proc/{writer}/task"))[:3]

    def calls(self, place: int, log: Path) -> list[Call]:
        """All calls of one thread, by its place in `threads`, in one save."""
        with traced(self.threads()[place], log, f"trace={KINDS}"):
            self.save()
        names = Counter(re.findall(r"^(\w+)\(", log.read_text(), re.MULTILINE))
        return [(place, name, number) for name in sorted(names) for number in range(1, names[name] + 1)]

    def kill_at(self, call: Call, log: Path) -> bool:
        """Kills the writer at this call of a save; False if the save did not make it. What is committed must be whole,
        and the next save must succeed."""
        place, name, number = call
        (writer,), before = self._writers(), self.newest()
        with traced(self.threads()[place], log, f"inject={name}:signal=KILL:when={number}"):
            (self.run_dir / "SAVE").touch()
            until(lambda: writer not in self._writers() or self._is_idle(before), why="neither killed nor committed")
        is_killed = writer not in self._writers()
        self._recover(call)
        return is_killed

    def requests(self, proxy: CuttingProxy) -> int:
        """Requests of one save, up to the last deletion."""
        proxy.stop_at_request(0, is_stored=False)
        self.save()
        until(self._is_retired, why="old checkpoints were not deleted")
        return proxy.num_requests

    def kill_at_request(self, proxy: CuttingProxy, number: int, *, is_stored: bool) -> bool:
        """As `kill_at`, while this request of a save waits for its answer. `is_stored`: the server has it."""
        before = self.newest()
        until(self._is_retired, why="old checkpoints were not deleted")
        proxy.stop_at_request(number, is_stored=is_stored)
        (self.run_dir / "SAVE").touch()
        until(lambda: proxy.stopped.is_set() or (self._is_idle(before) and self._is_retired()), why="no request")
        is_killed = proxy.stopped.is_set()
        for writer in self._writers() if is_killed else ():
            os.kill(writer, signal.SIGKILL)
        proxy.stop_at = 0
        proxy.goes_on.set()
        self._recover((0, "stored" if is_stored else "lost", number))
        return is_killed

    def _recover(self, call: Call) -> None:
        """After a kill: what is committed is whole, and the next save succeeds."""
        self.killed.append(call)
        self._verify()
        (self.run_dir / "SAVE").unlink(missing_ok=True)
        self.save()

    def _is_retired(self) -> bool:
        """Whether no file is left of a checkpoint that is not kept: its manifest is the first to be deleted."""
        return len({path.rpartition("/")[0] for path in self.store.list() if is_checkpoint_file(path)}) <= KEPT

    def _writers(self) -> list[int]:
        return writers_of(self.ranks.processes[0].pid)

    def _is_idle(self, before: int) -> bool:
        return self.newest() > before and not (self.run_dir / "SAVE").exists()

    def _verify(self) -> None:
        """The newest committed checkpoint has all its bytes."""
        for newest in sorted(list_committed(self.store), key=lambda each: each.step)[-1:]:
            manifest = manifest_from_json(self.store.read(f"{newest.folder}/{MANIFEST_NAME}"))
            files = RankFiles(self.store, manifest)
            for name in manifest.files:
                try:
                    files.verify(name)
                except (ValueError, EOFError) as error:
                    self.faults.append(f"{newest.folder}/{name} after {self.killed[-1:]}: {error}")


@contextmanager
def saving_run(
    url: str, run_dir: Path, saved: str = "", *, environ: Mapping[str, str] | None = None
) -> Iterator[SavingRun]:
    """A run of one rank that has saved once; killed at the end. `saved`: as in `words_of`. `environ`: variables of the
    run alone, such as another endpoint than this process has."""
    with mock.patch.dict(os.environ, environ or {}):
        ranks = start(words_of(url, run_dir, saved), num_ranks=1, log_dir=run_dir.parent)
    try:
        run = SavingRun(run_dir=run_dir, ranks=ranks, store=open_store(saved or str(run_dir / "checkpoints")))
        until((run_dir / "metrics.jsonl").exists, why="the run did not start")
        run.save()
        yield run
    finally:
        ranks.kill()


@contextmanager
def traced(thread: int, log: Path, *expressions: str) -> Iterator[None]:
    """strace is attached to one thread inside."""
    words = [word for each in expressions for word in ("-e", each)]
    tracer = subprocess.Popen(
        ["strace", "-qqq", "-o", str(log), *words, "-p", str(thread)], stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: tracer.poll() is not None or _tracer_of(thread) == tracer.pid, why="strace did not attach")
        assert tracer.poll() is None, f"strace ended: {tracer.communicate()[1]}"
        yield
    finally:
        tracer.terminate()
        tracer.wait()


def _tracer_of(thread: int) -> int:
    try:
        status = Path(f"/proc/{thread}/status").read_text()
    except OSError:
        return 0
    return int(status.partition("TracerPid:")[2].split()[0])


def losses_after(run_dir: Path, step: int) -> dict[int, str]:
    """The loss of each step after this one, as it is written."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return {line["step"]: repr(line["loss"]) for line in lines if line["step"] > step}
