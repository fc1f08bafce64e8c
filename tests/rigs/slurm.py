"""A real Slurm on this one machine: munged, slurmctld and a few slurmd on loopback, for tests.

Needs the programs (Debian: slurm-wlm, munge), but no systemd, no cgroups and no containers. Nodes have fictitious host
names and share the loopback address, each with its own port. The names do not resolve, so jobs use a node's NodeAddr as
the master address, which also tells gloo its interface.

Everything is in one new folder and is stopped by process id: the daemons that we started and their children
(slurmstepd, batch shells, ranks), which are recognised by the SLURM_CONF in their environment.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.rigs.slurm_files import SlurmConfig, search_path, write_files

__all__ = ["PROGRAMS", "SlurmCluster", "SlurmConfig", "missing_programs"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
POLL_SECONDS = 0.2
LOG_TAIL_LINES = 40


def missing_programs() -> list[str]:
    """The programs of PROGRAMS that are not installed here (the daemons may be outside a user's PATH)."""
    return [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]


class SlurmCluster:
    """A cluster that runs from `with SlurmCluster(config) as cluster:` to the end of the block."""

    def __init__(self, config: SlurmConfig) -> None:
        self.config = config
        # Short, because a socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-")).resolve()
        self.conf_path = self.folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}  # by node, or by program

    def __enter__(self) -> Self:
        try:
            write_files(self.folder, self.config)
            self._start("munged", "munged", "--foreground", "--force", *self._munge_options())
            self.wait_for((self.folder / "munge.socket").exists, deadline_seconds=self.config.start_seconds)
            self.start_controller()
            for name in self.node_names:
                self.start_node(name)
            self.wait_for(self.all_idle, deadline_seconds=self.config.start_seconds)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def node_names(self) -> list[str]:
        return self.config.node_names

    # For tests.

    def sbatch(
        self,
        script: Path,
        *arguments: str,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Submits a batch script with its arguments; `options` are sbatch's own. Returns the job id."""
        answer = self.command(
            "sbatch", "--parsable", f"--chdir={self.folder}", *options, str(script), *arguments, env=env
        )
        return int(answer.split(";")[0])

    def scontrol(self, *arguments: str) -> str:
        return self.command("scontrol", *arguments)

    def squeue_state(self, job_id: int) -> str:
        """The state in Slurm's spelling (PENDING, RUNNING, COMPLETED, ...), also of finished jobs."""
        return self.command("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T").strip()

    def job(self, job_id: int) -> dict[str, str]:
        """The fields of `scontrol show job`, for example JobState, Restarts, ExitCode."""
        text = self.scontrol("--oneliner", "show", "job", str(job_id))
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def command(self, program: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Runs one Slurm command on this cluster and returns its output. If it fails, the error shows its output."""
        done = subprocess.run(
            [program, *arguments],
            env={**self.job_environment(), **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def wait_for(self, predicate: Callable[[], bool], *, deadline_seconds: float) -> None:
        """Returns once the predicate is true. Fails with the logs after the deadline, or if a daemon has ended."""
        deadline = time.monotonic() + deadline_seconds
        pause = threading.Event()
        while not predicate():
            dead = [daemon.args for daemon in self._daemons.values() if daemon.poll() is not None]
            if dead:
                raise RuntimeError(f"daemon ended by itself: {dead}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so within {deadline_seconds:g} s\n{self.log_tail()}")
            pause.wait(POLL_SECONDS)

    # Faults. After each, `wait_for` goes on without the daemons that were killed.

    def kill_node(self, name: str, *, spares_jobs: bool = False) -> None:
        """The node vanishes: SIGKILL for its slurmd, and unless `spares_jobs` for all that runs on it."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        if not spares_jobs:
            self.kill_jobs_of(name)

    @contextmanager
    def stopped_node(self, name: str) -> Iterator[None]:
        """The node does not answer within the block: its slurmd is stopped. What already runs on it goes on."""
        daemon = self._daemons[name]
        daemon.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            daemon.send_signal(signal.SIGCONT)

    def kill_jobs_of(self, name: str) -> None:
        """SIGKILL for all that runs on a node beside its slurmd; returns once nothing of it is left."""
        killed = self.processes(node=name)
        for pid in killed:
            _kill(pid)
        self.wait_for(lambda: not set(killed) & set(self.processes(node=name)), deadline_seconds=60)

    def start_node(self, name: str) -> None:
        """The node comes, or comes back."""
        self._start(name, "slurmd", "-D", "-f", str(self.conf_path), "-N", name)

    def kill_controller(self) -> None:
        """SIGKILL for slurmctld."""
        daemon = self._daemons.pop("slurmctld")
        daemon.kill()
        daemon.wait()

    def start_controller(self) -> None:
        """Starts slurmctld, with the state that it left."""
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.conf_path))

    def log_tail(self) -> str:
        """The last lines of every log and job output in the cluster's folder, and the queue."""
        parts = []
        for path in sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out")):
            lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)

    def job_environment(self) -> dict[str, str]:
        """This process's environment without the variables of an outer Slurm, set up for this cluster."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        return kept | {
            "SLURM_CONF": str(self.conf_path),
            "PATH": search_path(),
        }

    def processes(self, *, node: str = "") -> list[int]:
        """Ids of all processes with this cluster's SLURM_CONF in their environment: daemons, steps, ranks. With `node`,
        those of a node: tasks have Slurm's variable, what slurmd starts for itself has ours."""
        mark = f"SLURM_CONF={self.conf_path}".encode()
        nodes = {f"SLURMD_NODENAME={node}".encode(), f"RIG_NODE={node}".encode()}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = set(path.read_bytes().split(b"\0"))
                if mark in variables and (not node or nodes & variables):
                    found.append(int(path.parent.name))
            except OSError:  # it has ended since, or we may not read it
                continue
        return found

    def stop(self) -> None:
        """Cancels the jobs, then ends the daemons in the order of their dependencies, then the orphans."""
        if len(self._daemons) > 1:
            me = f"--user={os.getuid()}"
            subprocess.run(["scancel", me], env=self.job_environment(), capture_output=True, timeout=60, check=False)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(self.config.stop_seconds)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        pause = threading.Event()
        deadline = time.monotonic() + self.config.stop_seconds
        while (orphans := self.processes()) and time.monotonic() < deadline:
            for pid in orphans:
                _kill(pid)
            pause.wait(POLL_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    # Starting.

    def _munge_options(self) -> list[str]:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in files.items()]
        return [*options, f"--log-file={self.folder}/munged.log"]

    def _start(self, name: str, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=search_path())
        if path is None:
            raise FileNotFoundError(f"{program} is not installed; the rig needs {', '.join(PROGRAMS)}")
        with (self.folder / f"start-{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [path, *arguments],
                env=self.job_environment() | {"RIG_NODE": name},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def all_idle(self) -> bool:
        """Whether all nodes are up, and have nothing to do."""
        try:
            states = self.command("sinfo", "--noheader", "--Node", "--format=%T").split()
        except (RuntimeError, subprocess.TimeoutExpired):  # the controller does not answer yet
            return False
        return len(states) == self.config.num_nodes and set(states) == {"idle"}


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
