"""This process's place among the ranks. Only this file and the command line read the environment.

Three ways to start, one result: a single process, `torchrun` (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*) or `srun`
(SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID; the batch script exports MASTER_ADDR and MASTER_PORT).
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.bf16 import Bf16, bf16_of_cpu, bf16_of_gpu, flags_of
from pipeline.config_values import Device
from pipeline.free_port import free_port
from shards.errors import TransientError, UserError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of one run and this one's place among them."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    master_address: str
    master_port: int
    device: torch.device
    num_threads: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise UserError(f"rank {self.rank} of {self.num_ranks} ranks; allowed: 0 to {self.num_ranks - 1}")

    @property
    def is_first(self) -> bool:
        """Rank 0: the one that logs and writes what only one may write."""
        return self.rank == 0


def current_world(device: Device = "auto", *, threads: int = 0) -> World:
    """This process's world, from the environment of torchrun or srun; alone if neither started it.

    `threads`: of each rank; 0: as `world_from` says.
    """
    world = world_from(os.environ, device=device, num_cpus=len(os.sched_getaffinity(0)))
    return replace(world, num_threads=threads or world.num_threads)


def world_from(environ: Mapping[str, str], *, device: Device, num_cpus: int) -> World:
    """The world that an environment describes (pure but for asking torch for GPUs).

    A rank's threads are OMP_NUM_THREADS, else the cores that srun gave each task, else its share of this machine's.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
    else:
        names = ("", "", "", "")
    rank = _number(environ, names[0], 0)
    num_ranks = _number(environ, names[1], 1)
    local_rank = _number(environ, names[2], rank)
    num_local_ranks = _tasks_on_this_node(environ) if names[0].startswith("SLURM") else 0
    num_local_ranks = num_local_ranks or _number(environ, names[3], num_ranks)
    if num_ranks > 1 and "MASTER_ADDR" not in environ:
        raise UserError(
            f"MASTER_ADDR is not set for {num_ranks} ranks; start with torchrun, or export MASTER_ADDR and MASTER_PORT "
            "in the batch script before srun (slurm/pretrain.sbatch does)"
        )
    num_threads = _demanded_threads(environ, num_local_ranks=num_local_ranks)
    if not num_threads and names[0].startswith("SLURM"):
        num_threads = _number(environ, "SLURM_CPUS_PER_TASK", 0)
    return World(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        num_local_ranks=num_local_ranks,
        master_address=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT", 0),
        device=_device(device, local_rank),
        num_threads=num_threads or max(1, num_cpus // num_local_ranks),
    )


def bf16_of(device: torch.device) -> Bf16:
    """Whether this device computes bf16 natively, as the environment lets it."""
    if device.type == "cuda":
        return bf16_of_gpu(torch.cuda.get_device_name(device), capability=torch.cuda.get_device_capability(device))
    return bf16_of_cpu(flags_of(_CPUINFO.read_text() if _CPUINFO.exists() else ""), os.environ)


def enter(world: World) -> None:
    """Joins the process group and sets the number of threads, which torchrun and srun would set differently."""
    torch.set_num_threads(world.num_threads)
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed would pick a GPU it sees, whatever the model's device is
    else:
        torch.cuda.set_device(world.device)
    os.environ["LOCAL_RANK"] = str(world.local_rank)  # DeepSpeed insists on it
    # Rank and size are arguments: in the environment, processes started from here would take them for their own.
    dist.init_process_group(
        "nccl" if world.device.type == "cuda" else "gloo",
        init_method=f"tcp://{world.master_address}:{world.master_port or free_port()}",
        rank=world.rank,
        world_size=world.num_ranks,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=world.device if world.device.type == "cuda" else None,
    )


def leave() -> None:
    """Leaves the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def joined(world: World) -> Iterator[None]:
    """A member of the process group inside. TransientError if an exchange with the other ranks fails."""
    enter(world)
    try:
        yield
    except RuntimeError as error:
        if not _is_of_exchange(error):
            raise
        fault = str(error).partition("\n")[0]
        raise TransientError(
            f"the exchange with the other ranks failed ({fault}); if one of them has ended, its own message says why"
        ) from error
    finally:
        leave()


def _is_of_exchange(error: RuntimeError) -> bool:
    """Whether torch.distributed has raised it. With gloo it has no type of its own, but a place."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__") if trace else ""
    return isinstance(error, dist.DistError) or module == dist.distributed_c10d.__name__


def _tasks_on_this_node(environ: Mapping[str, str]) -> int:
    """Slurm writes `4(x2),3`: four tasks on each of two nodes, three on the third. 0 if it is not set."""
    counts: list[int] = []
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if found:
            counts += [int(found[1])] * int(found[2] or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else 0


def _demanded_threads(environ: Mapping[str, str], *, num_local_ranks: int) -> int:
    """OMP_NUM_THREADS; 0 if the user has not set it.

    With several ranks per node, torchrun sets it to 1 if it is unset (and warns). A user's own 1 looks the same, so
    it is ignored there; --threads 1 is not.
    """
    text = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # the others are of nested regions
    is_torchruns_own = text == "1" and num_local_ranks > 1 and "TORCHELASTIC_RUN_ID" in environ
    return 0 if is_torchruns_own or not text else _number({"OMP_NUM_THREADS": text}, "OMP_NUM_THREADS", 0)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise UserError(f"the environment variable {name} is {environ[name]!r}; allowed: a whole number")
    return int(text)


def _device(device: Device, local_rank: int) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise UserError(
                f"local rank {local_rank} has no GPU: this node has {num_gpus}; start one rank per GPU, or --device cpu"
            )
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
