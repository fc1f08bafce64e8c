"""This process's place among the ranks, and the process group. Only this file and the command line read the
environment; pipeline/rank_environ.py says what it means."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.alone import join_alone
from pipeline.bf16 import Bf16, bf16_of_cpu, bf16_of_gpu, flags_of
from pipeline.config_values import Device
from pipeline.rank_environ import LOOPBACK, Place, place_from, refuse_for_deepspeed, threads_from
from pipeline.rendezvous import interface_towards, reach_store, serve_store
from shards.errors import TransientError, UserError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class World(Place):
    """The processes of one run and this one's place among them."""

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
    """The world that an environment describes (pure but for asking torch for GPUs). UserError if a value is wrong.

    A rank's threads are OMP_NUM_THREADS, else the cores that srun gave each task, else its share of this machine's.
    """
    refuse_for_deepspeed(environ)
    place = place_from(environ)
    return World(
        **vars(place),
        device=_device(device, place.local_rank),
        num_threads=threads_from(environ, num_local_ranks=place.num_local_ranks)
        or max(1, num_cpus // place.num_local_ranks),
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
    if world.num_ranks == 1:
        join_alone()
    else:
        _meet(world)


def _meet(world: World) -> None:
    """Joins the other ranks. Only the addresses that they share are listened on (pipeline/rendezvous.py)."""
    address, port = world.master_address, world.master_port
    os.environ.setdefault(_GLOO_INTERFACE, interface_towards(address))  # read for every group, DeepSpeed's too
    if address == LOOPBACK:  # across hosts, NCCL knows the fastest; it listens on one interface, never on all
        os.environ.setdefault(_NCCL_INTERFACE, "lo")
    # Under torchrun its agent serves the store: rank 0 is a client, too.
    serves = world.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # Rank and size are arguments: in the environment, processes started from here would take them for their own.
    dist.init_process_group(
        "nccl" if world.device.type == "cuda" else "gloo",
        store=(serve_store if serves else reach_store)(
            address, port, num_ranks=world.num_ranks, timeout=COLLECTIVE_TIMEOUT
        ),
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
    unset = [name for name in (_GLOO_INTERFACE, _NCCL_INTERFACE) if name not in os.environ]
    try:
        enter(world)
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
        for name in unset:  # a job submitted from here may run on other hosts
            os.environ.pop(name, None)


def _is_of_exchange(error: RuntimeError) -> bool:
    """Whether torch.distributed has raised it. With gloo it has no type of its own, but a place."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__") if trace else ""
    return isinstance(error, dist.DistError) or module == dist.distributed_c10d.__name__


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
