"""The faults of the matrix (cluster.py): in processes, the disk of a run, its store, a node, and the controller."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.rigs.cutting_proxy import CuttingProxy
from tests.rigs.dead_mount import dead_mount
from tests.rigs.own_processes import read_process
from tests.rigs.slurm import SlurmCluster
from tests.rigs.small_disk import filled

DISK_MIB = 160
STRANGER = "nobody"
HELD_SECONDS = 12.0
"""How long a temporary fault lasts."""
_LOOKED_AT = ("", "STOP", "SAVE", "DONE", "checkpoints", "checkpoints/attempts", "weights")
_CGROUP = Path("/sys/fs/cgroup/memory")
_BYTES_LEFT = 4 << 20


class Disk:
    """An ext4 file system in a file, which can be made full, read-only, frozen or silent. Needs root."""

    def __init__(self, folder: Path) -> None:
        self.image, self.path = folder.with_suffix(".ext4"), folder
        with self.image.open("wb") as file:
            file.truncate(DISK_MIB << 20)
        folder.mkdir()
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self.image))
        _run("mount", "-o", "loop", str(self.image), str(folder))

    def close(self) -> None:
        """Unmounts the disk. Processes that have files open on it can still use them."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=False, capture_output=True)
        self.image.unlink()

    @contextmanager
    def full(self) -> Iterator[None]:
        """Leaves no byte free."""
        filler = filled(self.path)
        try:
            yield
        finally:
            filler.unlink()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Refuses to open files for writing. Files that are open already can still be written, as on a file server."""
        _run("mount", "--bind", str(self.path), str(self.path))
        _run("mount", "-o", "remount,ro,bind", str(self.path))
        try:
            yield
        finally:
            _run("umount", "--lazy", str(self.path))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Makes every writer wait."""
        _run("fsfreeze", "--freeze", str(self.path))
        try:
            yield
        finally:
            _run("fsfreeze", "--unfreeze", str(self.path))

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Lets every look at its files wait, as a file server that does not answer. Calls that still wait at the end
        fail with ECONNABORTED or ENOTCONN."""
        with dead_mount(self.path):
            yield


@contextmanager
def refused(proxy: CuttingProxy, status: int, code: str) -> Iterator[None]:
    """Makes the store refuse all requests."""
    proxy.refuses = status, code
    try:
        yield
    finally:
        proxy.refuses = None


@contextmanager
def halved(proxy: CuttingProxy) -> Iterator[None]:
    """Makes the store cut every response body in half."""
    proxy.halves = True
    try:
        yield
    finally:
        proxy.halves = False


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops the process with SIGSTOP, and lets it continue afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def stale(pid: int, run_dir: Path) -> Iterator[None]:
    """Answers each look of the process at the run's files with ESTALE, as a file server that restarts does."""
    paths = [word for name in _LOOKED_AT for word in ("-P", str(run_dir / name).rstrip("/"))]
    fault = ("-e", "trace=newfstatat,statx", "-e", "inject=newfstatat,statx:error=ESTALE")
    with subprocess.Popen(["strace", "-f", "-qq", "-o", os.devnull, *fault, *paths, "-p", str(pid)]) as tracer:
        try:
            yield
        finally:
            tracer.terminate()  # strace lets go of the process


@contextmanager
def without_controller(cluster: SlurmCluster) -> Iterator[None]:
    """Kills slurmctld, and starts it again afterwards."""
    cluster.kill_controller()
    try:
        yield
    finally:
        cluster.start_controller()


def reuse_numbers(cluster: SlurmCluster) -> int:
    """Makes the controller lose its state and count from its first number again. A stranger's jobs, which are held,
    take the numbers of our jobs. Returns the last of these numbers, or 0 if there were no such jobs."""
    last = max(map(int, cluster.command("squeue", "--noheader", "--me", "--format=%A").split()), default=0)
    if not last:
        return 0
    state, script = cluster.folder / "state", cluster.folder / "stranger.sbatch"
    cluster.kill_controller()
    shutil.rmtree(state)
    state.mkdir()
    cluster.start_controller()
    cluster.wait_for(lambda: _answers(cluster), deadline_seconds=60)
    script.write_text("#!/bin/sh\nsleep 600\n")
    options = ["--output=/dev/null", "--hold", f"--uid={STRANGER}"]
    while cluster.sbatch(script, options=options) < last:
        pass
    return last


def _answers(cluster: SlurmCluster) -> bool:
    try:
        return bool(cluster.command("sinfo", "--noheader"))
    except (RuntimeError, subprocess.TimeoutExpired):
        return False


def starve(pid: int, group: str) -> None:
    """Lets the kernel's out-of-memory killer end the process, in a control group (version 1) without memory."""
    folder = _CGROUP / group
    folder.mkdir(exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(str(_BYTES_LEFT))
    (folder / "cgroup.procs").write_text(str(pid))


def forget_group(group: str) -> None:
    """Removes the control group if it is empty."""
    with suppress(OSError):
        (_CGROUP / group).rmdir()


def has_memory_groups() -> bool:
    """Whether this machine limits memory by control groups of version 1."""
    return (_CGROUP / "memory.limit_in_bytes").exists()


def pids_of(cluster: SlurmCluster, place: str) -> list[int]:
    """Returns the processes of a place of the matrix, ordered by their ids."""
    return [pid for pid in sorted(cluster.processes()) if _IS[place](pid)]


def _words(pid: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def _python_with(*words: bytes) -> Callable[[int], bool]:
    def is_so(pid: int) -> bool:
        try:
            is_python = Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
        except OSError:
            return False
        found = _words(pid)
        # The batch script's judge gets the same words, but is none of the places.
        return is_python and b"__judge" not in found and any(word in found for word in words)

    return is_so


def _batch_script(pid: int) -> bool:
    words = _words(pid)
    return len(words) > 1 and words[1].endswith(b"slurm_script") and _parent_name(pid).startswith("slurmstepd")


def _parent_name(pid: int) -> str:
    process = read_process(pid)
    with suppress(OSError):
        return Path(f"/proc/{process.parent}/comm").read_text().strip() if process else ""
    return ""


_IS: dict[str, Callable[[int], bool]] = {
    "rank": _python_with(b"pretrain"),
    "writer": _python_with(b"pipeline.checkpoints.writer.process"),
    "launcher": lambda pid: (
        Path(_words(pid)[0].decode() if _words(pid) else "").name == "srun"
        and _parent_name(pid) in ("slurm_script", "bash")
    ),
    "batch script": _batch_script,
    "gate": _python_with(b"__gate"),
    "evaluation": _python_with(b"evaluate"),
    "packing task": _python_with(b"pack"),
}


def end(pids: list[int]) -> None:
    """Kills the processes that are left of a cell."""
    for pid in pids:
        for number in (signal.SIGKILL, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
