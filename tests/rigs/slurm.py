"""A real Slurm on this one machine: munged, slurmctld and a few slurmd on loopback, for tests.

Needs the programs (Debian: slurm-wlm, munge), but no systemd, no cgroups and no containers. Nodes have fictitious host
names and share the loopback address, each with its own port. The names do not resolve, so jobs use a node's NodeAddr as
the master address, which also tells gloo its interface.

Everything is in one new folder and is stopped by process id: the daemons that we started and their children
(slurmstepd, batch shells, ranks), which are recognised by the SLURM_CONF in their environment.
"""

import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
POLL_SECONDS = 0.2
LOG_TAIL_LINES = 40

# cred_expire=5: a requeued job waits for its credential to expire, 2 minutes by default. ReturnToService=2:
# a node that comes back is used again. KillWait=5: seconds from TERM to KILL when a job is cut off.
CONF = """\
ClusterName=rig
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
RequeueExit=75
SlurmdTimeout=30
KillWait=5
MinJobAge=600
SchedulerParameters=sched_interval=5,bf_interval=5,batch_sched_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """The programs of PROGRAMS that are not installed here (the daemons may be outside a user's PATH)."""
    return [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Size and timeouts of the cluster."""

    num_nodes: int = 2
    cpus_per_node: int = 2
    start_seconds: float = 60.0
    stop_seconds: float = 15.0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.cpus_per_node < 1:
            raise ValueError(f"a cluster has at least 1 node of 1 CPU, got {self.num_nodes} x {self.cpus_per_node}")


class SlurmCluster:
    """A cluster that runs from `with SlurmCluster(config) as cluster:` to the end of the block."""

    def __init__(self, config: SlurmConfig) -> None:
        self.config = config
        # Short, because a socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-")).resolve()
        self.conf_path = self.folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._write_files()
            self._start("munged", "--foreground", "--force", *self._munge_options())
            self.wait_for((self.folder / "munge.socket").exists, deadline_seconds=self.config.start_seconds)
            self._start("slurmctld", "-D", "-f", str(self.conf_path))
            for name in self.node_names:
                self._start("slurmd", "-D", "-f", str(self.conf_path), "-N", name)
            self.wait_for(self._all_idle, deadline_seconds=self.config.start_seconds)
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
        return [f"n{i + 1}" for i in range(self.config.num_nodes)]

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
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if dead:
                raise RuntimeError(f"daemon ended by itself: {dead}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so within {deadline_seconds:g} s\n{self.log_tail()}")
            pause.wait(POLL_SECONDS)

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
            "PATH": _search_path(),
        }

    def processes(self) -> list[int]:
        """Ids of all processes with this cluster's SLURM_CONF in their environment: daemons, steps, ranks."""
        mark = f"SLURM_CONF={self.conf_path}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # it has ended since, or we may not read it
                continue
        return found

    def kill_node(self, name: str) -> None:
        """The node vanishes: its slurmd, the slurmstepds below it and what they started are killed at once."""
        (daemon,) = [one for one in self._daemons if isinstance(one.args, list) and one.args[-2:] == ["-N", name]]
        self._daemons.remove(daemon)
        mark = f"SLURMD_NODENAME={name}".encode()
        tasks = [pid for pid in self.processes() if mark in _environ_of(pid)]
        steps = {_parent_of(pid) for pid in tasks} - set(tasks)  # slurmstepd has the environment of its slurmd
        daemon.kill()
        daemon.wait()
        for pid in [*steps - {1, os.getpid()}, *tasks]:
            _kill(pid)

    def stop(self) -> None:
        """Cancels the jobs, then ends the daemons in the order of their dependencies, then the orphans."""
        if len(self._daemons) > 1:
            me = f"--user={os.getuid()}"
            subprocess.run(["scancel", me], env=self.job_environment(), capture_output=True, timeout=60, check=False)
        for daemon in reversed(self._daemons):
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

    def _write_files(self) -> None:
        (self.folder / "state").mkdir()
        for name in self.node_names:
            (self.folder / f"spool-{name}").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        controller_port, *node_ports = _free_ports(1 + self.config.num_nodes)
        nodes = "\n".join(
            f"NodeName={name} NodeHostName=rig-{name} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={self.config.cpus_per_node} RealMemory=4000 State=UNKNOWN"
            for name, port in zip(self.node_names, node_ports, strict=True)
        )
        self.conf_path.write_text(
            CONF.format(
                host=socket.gethostname().split(".")[0],
                controller_port=controller_port,
                user=_user_name(),
                folder=self.folder,
                nodes=nodes,
            )
        )

    def _munge_options(self) -> list[str]:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in files.items()]
        return [*options, f"--log-file={self.folder}/munged.log"]

    def _start(self, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=_search_path())
        if path is None:
            raise FileNotFoundError(f"{program} is not installed; the rig needs {', '.join(PROGRAMS)}")
        number = len(self._daemons)
        with (self.folder / f"start-{number}-{program}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [path, *arguments],
                    env=self.job_environment(),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _all_idle(self) -> bool:
        try:
            states = self.command("sinfo", "--noheader", "--Node", "--format=%T").split()
        except (RuntimeError, subprocess.TimeoutExpired):  # the controller does not answer yet
            return False
        return len(states) == self.config.num_nodes and set(states) == {"idle"}


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _user_name() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago. All are held until the last is known, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [int(held.getsockname()[1]) for held in sockets]
    finally:
        for held in sockets:
            held.close()


def _environ_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended since
        return []


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
