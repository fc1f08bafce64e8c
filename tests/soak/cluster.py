"""A matrix of faults on a real Slurm of three hosts: `python -m tests.soak.cluster --part 1/8`, or `make soak-cluster`.

Each cell is a fault, the process that it hits, and a moment. Each cell gets its own job, which must end by itself with
the same bits as without the fault. If it ends with an exit code and a message instead, it must reach the same bits when
it is submitted again. Cells that cannot happen, or that equal another cell, are listed with the reason. Needs root, for
its own file systems, control groups and host names. Writes the results to tests/soak/results/cluster.json.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from jobs.output import put
from tests.rigs.slurm import SlurmCluster, SlurmConfig
from tests.soak import cluster_faults as faults
from tests.soak.cluster_work import Shared, Work, kind_of, shared_by_all

RESULT = Path(__file__).parent / "results" / "cluster.json"
DISK, STORE = ("full", "read-only", "frozen", "hung mount"), ("503", "broken bodies", "expired credentials")
PASSING = (*DISK, *STORE, "crashed controller", "stale")
FAULTS = ("kill", "stop", *PASSING, "lost node", "wrong clock", "out of memory", "reused number")
PLACES = ("rank", "writer", "launcher", "batch script", "gate", "evaluation", "packing task")
MOMENTS = ("start", "mid-step", "mid-save", "evaluation", "end")
CELL_SECONDS, POLL_SECONDS = 300.0, 0.005
NUM_WORKERS = 2


@dataclass(frozen=True, order=True)
class Cell:
    """A fault, the process that it hits, and the moment."""

    fault: str
    place: str
    moment: str

    def __str__(self) -> str:
        return f"{self.fault}, {self.place}, {self.moment}"

    @property
    def why_not(self) -> str:
        """The reason why this cell is not built; empty if it is built."""
        return _NO_SUCH_MOMENT.get((self.place, self.moment), "") or _why_not(self)


_NOT_TRAINING = "it neither trains nor saves"
_NO_SUCH_MOMENT = {
    ("writer", "start"): "it starts with its rank and waits, as in mid-step",
    **{("gate", moment): "it neither saves nor evaluates" for moment in ("mid-save", "evaluation")},
    ("gate", "end"): "its last act is to submit the next step, in mid-step",
    **{("evaluation", moment): _NOT_TRAINING for moment in ("mid-step", "mid-save")},
    ("evaluation", "end"): "its scores are one small file, written by a rename",
    ("packing task", "mid-save"): "all of its work is writing shards: mid-step",
    ("packing task", "evaluation"): "it does not evaluate",
    ("packing task", "end"): "tests/shards/packing kill it at each write of its end",
}


def _why_not(cell: Cell) -> str:
    """Returns the reason why a cell is not built, if its place has this moment; empty if it is built."""
    fault, place, moment = cell.fault, cell.place, cell.moment
    rules = (
        (fault in DISK and place == "launcher", "it writes nothing but the log, on the batch script's disk"),
        (fault in DISK and place == "writer" and moment != "mid-save", "a writer that does not save writes nothing"),
        (fault in DISK and (place, moment) == ("rank", "mid-save"), "the writer saves"),
        (
            fault in DISK and place == "batch script" and moment in ("mid-save", "evaluation"),
            "it writes only at the start and at the end of a try",
        ),
        (
            fault in STORE and place in ("launcher", "batch script"),
            "it only asks the store whether it answers (tests/slurm/test_storage_away.py)",
        ),
        (fault == "broken bodies" and place in ("writer", "packing task", "gate"), "it reads no bodies"),
        (fault in STORE and place == "writer" and moment != "mid-save", "a writer that does not save asks nothing"),
        (fault in STORE and (place, moment) == ("rank", "mid-save"), "the writer saves"),
        (fault in STORE and (place, moment) == ("rank", "end"), "no more data is read"),
        (fault == "stale" and place == "launcher", "it looks at no file of the run"),
        (
            fault == "stale" and place == "batch script",
            "its judge looks as a rank does (shards/files/looks.py); to bash, a look that fails is a missing file",
        ),
        (
            fault == "stale" and place in ("gate", "evaluation", "packing task"),
            "it looks as a rank does (shards/files/looks.py): the cell of the rank",
        ),
        (
            fault == "stale" and place == "writer" and moment != "mid-save",
            "a writer that does not save looks at nothing",
        ),
        (fault == "stale" and (place, moment) == ("rank", "mid-save"), "the writer saves"),
        (fault == "lost node" and place == "writer", "lost with its node: the cell of the rank"),
        (fault == "lost node" and place == "launcher", "lost with its node: the cell of the batch script"),
        (
            fault == "wrong clock" and (place, moment) not in {("rank", "start"), ("batch script", "start")},
            "nodes are compared as a try starts; tests/faults/test_clocks.py turns the clock of a running rank",
        ),
        (
            fault == "crashed controller" and (place, moment) not in _ASK_THE_CONTROLLER,
            "nothing is asked of the controller then",
        ),
        (
            fault == "reused number" and place in ("evaluation", "packing task"),
            "no number of it is recorded: `cancel` and `status` find it by its name",
        ),
        (
            fault == "reused number" and (place, moment) not in _ASK_THE_CONTROLLER - {("launcher", "start")},
            "Slurm kills all that runs in a job that it does not know: the cell of the batch script in mid-step",
        ),
        (
            fault == "out of memory" and (place, moment) not in _NEED_MEMORY,
            "the kernel's killer sends the same signal: the cell of kill",
        ),
    )
    return next((why for is_so, why in rules if is_so), "")


_ASK_THE_CONTROLLER = {
    *(("batch script", moment) for moment in ("start", "mid-step", "end")),
    *(("gate", moment) for moment in ("start", "mid-step")),
    ("launcher", "start"),
}
_NEED_MEMORY = {
    *(("rank", "mid-step"), ("rank", "evaluation"), ("writer", "mid-save")),
    *(("evaluation", "evaluation"), ("packing task", "mid-step")),
}
CELLS = tuple(Cell(*words) for words in product(FAULTS, PLACES, MOMENTS))
BUILT = tuple(cell for cell in CELLS if not cell.why_not)


_AGAIN = "all ranks are restarted in the same allocation"
_KEPT = "the job continues once the disk takes files again, and writes the log lines and checkpoints that are missing"
_WAITS = "the work pauses, and continues when the fault is over"
WHAT_HAPPENS = {
    ("kill", "rank"): _AGAIN,
    ("kill", "writer"): "its rank starts another writer and saves the checkpoint again",
    ("kill", "launcher"): _AGAIN,
    ("kill", "batch script"): "Slurm ends the job as failed; repeating the `submit` continues the run",
    ("kill", "gate"): "the gate is restarted",
    ("kill", "evaluation"): "the evaluation is restarted in the same allocation",
    ("kill", "packing task"): "the task is restarted; finished shards are kept",
    ("stop", "rank"): "the others wait for `--hang.step-seconds` (20 here); then " + _AGAIN,
    ("stop", "writer"): "its rank waits for `--hang.other-seconds` (40 here); then " + _AGAIN,
    ("full", ""): _KEPT,
    ("read-only", ""): _KEPT,
    ("frozen", ""): _WAITS,
    ("hung mount", ""): _WAITS + "; if a file cannot be written as the mount is taken away, all ranks are restarted",
    ("503", ""): "requests are repeated until the store answers again",
    ("broken bodies", ""): "each read is resumed after the last byte that arrived",
    ("expired credentials", ""): "the credentials are read again until the store accepts them",
    ("stale", ""): "looks that fail are repeated, and training continues meanwhile",
    ("lost node", ""): "Slurm notices after SlurmdTimeout (30 s here), and requeues the job on other nodes",
    ("wrong clock", ""): "the job leaves out the node",
    ("crashed controller", ""): "the job keeps running, and asks Slurm again until the controller answers",
    ("out of memory", ""): "the same as after a kill",
    ("reused number", ""): (
        "Slurm has lost its state, and kills the job; repeating the `submit` continues the run or the chain, and the "
        "stranger's job that has got the number is left alone"
    ),
    ("stop", ""): _WAITS,
}
"""What happens, by fault and place. An empty place stands for all other places."""


def table(result: dict[str, Any]) -> str:
    """Returns the table of docs/slurm.md."""
    seconds: dict[tuple[str, str], list[float]] = {}
    places: dict[tuple[str, str], list[str]] = {}
    for row in result["cells"]:
        key = (row["fault"], row["place"] if (row["fault"], row["place"]) in WHAT_HAPPENS else "")
        seconds.setdefault(key, []).append(row["seconds"])
        if row["place"] not in places.setdefault(key, []):
            places[key].append(row["place"])
    lines = ["| Fault | Hits | What happens | Seconds lost: median, most | Cells |", "|---|---|---|---|---|"]
    for key, found in seconds.items():
        lost = f"{median(found):.0f}, {max(found):.0f}"
        lines.append(f"| {key[0]} | {', '.join(places[key])} | {WHAT_HAPPENS[key]} | {lost} | {len(found)} |")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a cell. `seconds`: how much longer the job took than an undisturbed one."""

    fault: str
    place: str
    moment: str
    end: str
    message: str
    seconds: float
    is_right: bool


class Lane:
    """A cluster that runs cells one after the other."""

    def __init__(self, cluster: SlurmCluster, shared: Shared, folder: Path) -> None:
        self.cluster, self.shared, self.folder = cluster, shared, folder
        self.number = 0
        self.taken = 0  # the number of the cell's job that a stranger's job has now

    def run(self, cell: Cell) -> Found:
        """Runs a cell of the matrix, and leaves the cluster as it was."""
        self.number += 1
        place = self.folder / f"{self.number:03}"
        with ExitStack() as stack:
            disk = faults.Disk(place)
            stack.callback(disk.close)
            stack.callback(self._tidy)
            kind = kind_of(cell.place, is_stored=cell.fault in STORE, is_recorded=cell.fault == "reused number")
            work = stack.enter_context(kind(self.cluster, self.shared, place))
            try:
                return self._found(cell, work, disk)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                put(f"{cell}: {error!r}\n{work.log()[-6000:]}\n")
                return Found(**asdict(cell), end=f"not tried: {error!r}", message="", seconds=0.0, is_right=False)

    def _found(self, cell: Cell, work: Work, disk: faults.Disk) -> Found:
        expected, self.taken = self.shared.expected(type(work)), 0
        began = time.monotonic()
        if cell.fault == "wrong clock":
            work.turn_clock("n2" if cell.place == "rank" else "n1")
        work.submit()
        has_struck = cell.fault == "wrong clock" or self._strike(cell, work, disk)
        end, message = self._await(work), ""
        is_right = work.digest() == expected.digest
        if not is_right:
            message = work.message()
            work.submit()
            again = self._await(work)
            is_right = work.digest() == expected.digest and bool(message)
            end += f", then {again}"
        seconds = time.monotonic() - began - expected.seconds
        if self.taken and self.cluster.squeue_state(self.taken) != "PENDING":
            end, is_right = f"{end}; the stranger's job was disturbed", False
        if not has_struck:
            end, is_right = f"{end}; the fault came too late", False
        if not is_right:
            put(f"{cell}: {end}\n{work.log()[-6000:]}\n{self.cluster.log_tail()[-3000:]}\n")
        return Found(
            **asdict(cell),
            end=end,
            message=message,
            seconds=round(max(0.0, seconds), 1),
            is_right=is_right,
        )

    def _strike(self, cell: Cell, work: Work, disk: faults.Disk) -> bool:
        """Waits for the moment and causes the fault. Returns False if the work was over before."""
        name = "rank" if cell.place == "batch script" and cell.moment == "end" and cell.fault in DISK else cell.place
        if not self._until(work, lambda: bool(self._pids(name))):
            return False
        if not self._until(work, partial(work.is_at, cell.moment, "early")):
            return False
        victims = self._pids(name)
        if not self._until(work, partial(work.is_at, cell.moment, "now")):
            return False
        # Some processes of a command live only for a moment.
        victims = [pid for pid in victims if Path(f"/proc/{pid}").exists()] or self._pids(name)
        pid = victims[-1] if victims else 0
        passing = self._passing(cell, work, disk, pid)
        if passing:
            with passing:
                if name != cell.place:
                    faults.end([pid])
                time.sleep(faults.HELD_SECONDS)
        elif cell.fault == "lost node":
            self._lose("n2" if cell.place == "rank" else work.batch_host(), work)
        elif cell.fault == "reused number":
            self.taken = faults.reuse_numbers(self.cluster)
            return self.taken > 0
        elif cell.fault == "out of memory":
            faults.starve(pid, f"patchline-soak-{os.getpid()}-{self.number}")
        else:
            with suppress(ProcessLookupError):  # it ends by itself at the end
                os.kill(pid, signal.SIGKILL if cell.fault == "kill" else signal.SIGSTOP)
        return True

    def _passing(self, cell: Cell, work: Work, disk: faults.Disk, pid: int) -> AbstractContextManager[None] | None:
        """Returns a context in which the fault lasts, or None if the fault is not temporary."""
        makers: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "full": disk.full,
            "read-only": disk.read_only,
            "frozen": disk.frozen,
            "hung mount": disk.hung,
            "503": partial(faults.refused, work.proxy, 503, "SlowDown"),
            "expired credentials": partial(faults.refused, work.proxy, 400, "ExpiredToken"),
            "broken bodies": partial(faults.halved, work.proxy),
            "crashed controller": partial(faults.without_controller, self.cluster),
            "stale": partial(faults.stale, pid, work.run_dir),
        }
        if cell.fault == "stop" and cell.place not in ("rank", "writer"):
            return faults.stopped(pid)
        return makers[cell.fault]() if cell.fault in makers else None

    def _lose(self, node: str, work: Work) -> None:
        """Kills a node, waits until Slurm has noticed, which takes half a minute, and starts the node again."""
        self.cluster.kill_node(node)
        self._until(work, lambda: "down" in self._states(node))
        self.cluster.start_node(node)

    def _states(self, node: str) -> str:
        return self.cluster.command("sinfo", "--noheader", f"--nodes={node}", "--format=%T")

    def _until(self, work: Work, is_so: Callable[[], bool]) -> bool:
        deadline, asked = time.monotonic() + CELL_SECONDS, time.monotonic()
        while not is_so():
            if time.monotonic() - asked > 1:
                if work.is_over() or time.monotonic() > deadline:
                    return False
                asked = time.monotonic()
            time.sleep(POLL_SECONDS)
        return True

    def _pids(self, place: str) -> list[int]:
        return faults.pids_of(self.cluster, place)

    def _await(self, work: Work) -> str:
        """Waits for the end of the work, and returns how it ended."""
        deadline = time.monotonic() + CELL_SECONDS
        while not work.is_over():
            if time.monotonic() > deadline:
                return "it has not ended"
            time.sleep(0.3)
        return work.end()

    def _tidy(self) -> None:
        """Cancels all jobs, ends their processes, and waits until all nodes are idle."""
        for user in (str(os.getuid()), faults.STRANGER):
            self.cluster.command("scancel", f"--user={user}")
        places = [place for place in PLACES if place != "gate"]
        time.sleep(1)
        faults.end([pid for place in places for pid in self._pids(place)])
        for name in self.cluster.node_names:
            if "down" in self._states(name) or "drain" in self._states(name):
                self.cluster.scontrol("update", f"NodeName={name}", "State=RESUME")
        self.cluster.wait_for(self.cluster.all_idle, deadline_seconds=CELL_SECONDS)
        faults.forget_group(f"patchline-soak-{os.getpid()}-{self.number}")


def campaign(
    cells: Sequence[Cell], *, keep: Callable[[Sequence[Found]], object], num_workers: int = NUM_WORKERS
) -> bool:
    """Runs the cells on several clusters at once, and hands each result to `keep`. Returns whether all are right."""
    queue, lock, are_right = list(cells), threading.Lock(), list[bool]()
    with tempfile.TemporaryDirectory(prefix="soak-") as name, shared_by_all(Path(name)) as shared:

        def work(number: int) -> None:
            folder = Path(name) / f"lane-{number}"
            folder.mkdir()
            config = SlurmConfig(num_nodes=3, cpus_per_node=1, first_job=20_000 + 1000 * number)
            with SlurmCluster(config) as cluster:
                lane = Lane(cluster, shared, folder)
                while True:
                    with lock:
                        if not queue:
                            return
                        cell = queue.pop(0)
                    result = lane.run(cell)
                    with lock:
                        are_right.append(result.is_right)
                        keep([result])
                        mark = "ok" if result.is_right else "FAULT"
                        put(
                            f"{len(are_right)}/{len(cells)} {mark}  {cell}: {result.end}, {result.seconds:.0f} s more\n"
                        )

        with ThreadPoolExecutor(num_workers) as pool:
            for future in [pool.submit(work, number) for number in range(num_workers)]:
                future.result()
    return all(are_right)


def write(found: Sequence[Found]) -> dict[str, Any]:
    """Replaces the older results of these cells in the file, and returns the whole result."""
    old = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else []
    cells = {Cell(row["fault"], row["place"], row["moment"]): row for row in old}
    cells |= {Cell(row.fault, row.place, row.moment): asdict(row) for row in found}
    result = {
        "command": "python -m tests.soak.cluster",
        "cells": [cells[cell] for cell in BUILT if cell in cells],
        "not_tried_yet": [asdict(cell) for cell in BUILT if cell not in cells],
        "not_built": [asdict(cell) | {"why": cell.why_not} for cell in CELLS if cell.why_not],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> int:
    """Returns 0 if all cells are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N parts of the cells")
    parser.add_argument("--only", default="", help="run only the cells whose name matches this regular expression")
    parser.add_argument("--table", action="store_true", help="print the result as the table of docs/slurm.md")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help="the number of clusters that run at once")
    options = parser.parse_args()
    if options.table:
        put(table(json.loads(RESULT.read_text())) + "\n")
        return 0
    part, num_parts = (int(word) for word in options.part.split("/"))
    cells = [cell for cell in BUILT if re.search(options.only, str(cell))][part - 1 :: num_parts]
    if os.getuid() or not faults.has_memory_groups() or not shutil.which("mkfs.ext4"):
        sys.stderr.write("needs root, mkfs.ext4, and control groups of version 1 that limit memory\n")
        return 2
    put(f"{len(cells)} of {len(BUILT)} cells; {len(CELLS) - len(BUILT)} others are not built\n")
    return 0 if campaign(cells, num_workers=options.workers, keep=write) else 1


if __name__ == "__main__":
    sys.exit(main())
