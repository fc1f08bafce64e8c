"""Finds a rank's place from its environment. All functions are pure, and every value is checked before it is used.

There are four ways to start, with one result: a single process, `torchrun` (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_*), `srun` (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; the batch script exports
MASTER_ADDR and MASTER_PORT), or `mpirun` (Open MPI's and MPICH's names; the user sets MASTER_ADDR and MASTER_PORT).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from shards.config_values import Range, shown_value
from shards.errors import UserError
from shards.output.quantities import DAY_SECONDS

LOOPBACK = "127.0.0.1"
MOST_RANKS = 1 << 20
MOST_SECONDS = 7 * DAY_SECONDS  # the longest time limit of the ranks
_MOST_THREADS = 1 << 12
_OF_LAUNCH = (
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
_ADVICE = "torchrun, srun and --processes set it: start with one of them, or unset it"


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """How long ranks wait for each other. A training run takes both limits from its HangConfig."""

    join_seconds: Annotated[float, Range(1, MOST_SECONDS)] = 300.0
    """Most seconds until all ranks have arrived where they meet; NCCL or gloo then has the same time to connect
    them."""
    exchange_seconds: float = 1800.0
    """The time after which an exchange fails: the last resort if no heartbeat ends a run that hangs."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Which rank this is, and where it meets the others. The port of a single rank is 0."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    master_address: str
    master_port: int

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the run, if all nodes except the last have as many ranks as this one."""
        return -(-self.num_ranks // self.num_local_ranks)


def place_from(environ: Mapping[str, str]) -> RankPlace:
    """Returns the place that an environment describes. Raises UserError if a value is missing or wrong.

    If all ranks are known to be on this host, they meet at its loopback address, whatever MASTER_ADDR says.
    """
    launcher = _launcher(environ)
    if launcher is None:
        _refuse_half(environ)
        return _alone()
    rank, num_ranks = _numbers(environ, launcher)
    if launcher is _SRUN:
        known, most = _tasks_on_this_node(environ, num_ranks), num_ranks - 1
    else:
        known = _number(environ, launcher.num_local_ranks, 0, least=1, most=num_ranks)
        most = (known or num_ranks) - 1
    return RankPlace(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=_number(environ, launcher.local_rank, rank, least=0, most=most),
        num_local_ranks=known or num_ranks,
        master_address=_address(environ, num_ranks, is_one_host=known == num_ranks),
        master_port=_number(environ, "MASTER_PORT", 0, least=1, most=65535) if num_ranks > 1 else 0,
    )


def numbers_from(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the rank and the number of ranks that a launcher gives; no address to meet at is needed. Returns (0, 1)
    if no launcher has started this process. Raises UserError if a value is missing or wrong."""
    launcher = _launcher(environ)
    if launcher:
        return _numbers(environ, launcher)
    _refuse_half(environ)
    if environ.get("RANK", "") not in ("", "0"):  # another process would also be rank 0
        shown = shown_value(environ["RANK"])
        raise UserError(f"the environment variable RANK is {shown}, and WORLD_SIZE is not set", todo=_ADVICE)
    return 0, 1


def contradictions(environ: Mapping[str, str], *, rank: int, num_ranks: int) -> list[str]:
    """Returns texts about the variables that contradict these numbers, such as `RANK is '1'`."""
    launcher = _launcher(environ) or _TORCHRUN
    known = {launcher.rank: str(rank), launcher.num_ranks: str(num_ranks)}
    return [
        f"{name} is {shown_value(environ[name])}"
        for name, value in known.items()
        if environ.get(name, "") not in ("", value)
    ]


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    """The names of the variables in which a launcher numbers its processes."""

    rank: str
    num_ranks: str
    local_rank: str
    num_local_ranks: str


_TORCHRUN = _Launcher(rank="RANK", num_ranks="WORLD_SIZE", local_rank="LOCAL_RANK", num_local_ranks="LOCAL_WORLD_SIZE")

_OPEN_MPI = _Launcher(
    rank="OMPI_COMM_WORLD_RANK",
    num_ranks="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    num_local_ranks="OMPI_COMM_WORLD_LOCAL_SIZE",
)

_MPICH = _Launcher(
    rank="PMI_RANK", num_ranks="PMI_SIZE", local_rank="MPI_LOCALRANKID", num_local_ranks="MPI_LOCALNRANKS"
)

_SRUN = _Launcher(
    rank="SLURM_PROCID",
    num_ranks="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    num_local_ranks="SLURM_STEP_TASKS_PER_NODE",
)


def _launcher(environ: Mapping[str, str]) -> _Launcher | None:
    """Returns the launcher that has started this process, or None. If there are several, the innermost counts: mpirun
    inside a Slurm job starts one task per node through srun."""
    for launcher in (_TORCHRUN, _OPEN_MPI, _SRUN, _MPICH):
        if environ.get(launcher.rank) and environ.get(launcher.num_ranks):  # an empty value counts as unset
            return launcher
    return None


def _refuse_half(environ: Mapping[str, str]) -> None:
    if environ.get("WORLD_SIZE", "") not in ("", "1"):  # each process would train alone, all in the same run directory
        shown = shown_value(environ["WORLD_SIZE"])
        raise UserError(f"the environment variable WORLD_SIZE is {shown}, and RANK is not set", todo=_ADVICE)


def _numbers(environ: Mapping[str, str], launcher: _Launcher) -> tuple[int, int]:
    num_ranks = _number(environ, launcher.num_ranks, 1, least=1, most=MOST_RANKS)
    return _number(environ, launcher.rank, 0, least=0, most=num_ranks - 1), num_ranks


def launch_from(environ: Mapping[str, str]) -> str:
    """Returns an identifier of this start of the run. It is the same on all ranks of the start. Starts with several
    ranks that run on the host at the same time have different ones."""
    return "|".join(environ.get(name, "") for name in _OF_LAUNCH)


def threads_from(environ: Mapping[str, str], *, num_local_ranks: int) -> int:
    """Returns the number of threads per rank that the environment asks for: OMP_NUM_THREADS, else srun's cores per
    task, else 0.

    With several ranks per node, torchrun sets OMP_NUM_THREADS to 1 if it is unset (and warns). A 1 that the user has
    set looks the same, so a 1 is ignored in that case; --threads 1 is not.
    """
    name = "OMP_NUM_THREADS"
    text = environ.get(name, "").partition(",")[0].strip()  # later numbers are for nested regions
    is_torchruns_own = text == "1" and num_local_ranks > 1 and "TORCHELASTIC_RUN_ID" in environ
    if text and not is_torchruns_own:
        todo = "set it to the number of threads of each rank, or unset it"
        return _number({name: text}, name, 0, least=1, most=_MOST_THREADS, todo=todo)
    if "RANK" in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return 0
    return _number(environ, "SLURM_CPUS_PER_TASK", 0, least=1, most=_MOST_THREADS)


def refuse_for_deepspeed(environ: Mapping[str, str]) -> None:
    """Raises UserError for a value with which DeepSpeed cannot be imported."""
    todo = "unset it: Patchline sets its own time limits"
    _number(environ, "DEEPSPEED_TIMEOUT", 0, least=1, most=1 << 20, todo=todo)


def _alone() -> RankPlace:
    return RankPlace(rank=0, num_ranks=1, local_rank=0, num_local_ranks=1, master_address=LOOPBACK, master_port=0)


def _address(environ: Mapping[str, str], num_ranks: int, *, is_one_host: bool) -> str:
    if num_ranks == 1:
        return LOOPBACK
    todo = (
        "start with torchrun, or export MASTER_ADDR and MASTER_PORT in the batch script before srun "
        "(slurm/stage.sbatch does)"
    )
    if not environ.get("MASTER_ADDR"):
        raise UserError(f"MASTER_ADDR is not set for {num_ranks} ranks", todo=todo)
    if not environ.get("MASTER_PORT"):
        raise UserError(f"MASTER_PORT is not set for {num_ranks} ranks", todo=todo)
    address = environ["MASTER_ADDR"]
    if not re.fullmatch(r"[\w.:%-]{1,253}", address, re.ASCII):
        raise UserError(
            f"the environment variable MASTER_ADDR is {shown_value(address)}",
            allowed="a host name or an IP address, without a port",
            todo="set it to the address of rank 0's host",
        )
    return LOOPBACK if is_one_host else address


def _tasks_on_this_node(environ: Mapping[str, str], num_ranks: int) -> int:
    """Returns the number of tasks on this node; 0 if Slurm does not say. Slurm writes `4(x2),3` for four tasks on each
    of two nodes and three on the third. Raises UserError if the variable is wrong."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environ.get(name, "")
    counts: list[int] = []
    for entry in text.split(",") if text else ():
        found = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", entry)
        repeats = int(found[2] or 1) if found else 0
        if not found or not 1 <= int(found[1]) <= num_ranks or not 1 <= repeats <= num_ranks - len(counts):
            raise UserError(
                f"the environment variable {name} is {shown_value(text)}",
                allowed=f"numbers of tasks such as 4(x2),3, of {num_ranks} tasks in all",
                todo=_ADVICE,
            )
        counts += [int(found[1])] * repeats
    node = _number(environ, "SLURM_NODEID", 0, least=0, most=MOST_RANKS)
    return counts[node] if node < len(counts) else 0


def _number(environ: Mapping[str, str], name: str, default: int, *, least: int, most: int, todo: str = _ADVICE) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"[0-9]{1,18}", text) or not least <= int(text) <= most:
        raise UserError(
            f"the environment variable {name} is {shown_value(text)}",
            allowed=f"a whole number from {least} to {most}",
            todo=todo,
        )
    return int(text)
