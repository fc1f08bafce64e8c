"""Finds this process's place among the ranks, and joins and leaves the process group. Only this file and the command
line read the environment; pipeline/ranks/environment.py interprets it."""

import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # its stub does not export it

from pipeline.ranks.devices import Claim, agree_on_device, choose_device, gpus_from, use_deterministic_kernels
from pipeline.ranks.environment import (
    LOOPBACK,
    RankPlace,
    TimeLimits,
    contradictions,
    launch_from,
    numbers_from,
    place_from,
    refuse_for_deepspeed,
    threads_from,
)
from pipeline.ranks.host import Bf16, bf16_of_cpu, bf16_of_gpu, flags_of
from pipeline.ranks.rendezvous import hosts_of, interface_towards, join_alone, reach_store, serve_store
from pipeline.shared_settings import Device
from shards.errors import TransientError, UserError

log = logging.getLogger(__name__)
_LIMITS = TimeLimits()
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_GLOO_PLACE = re.compile(r"^\[\S*gloo\S*:\d+\] ")  # the file and line in gloo's source
_CPUINFO = Path("/proc/cpuinfo")
QUIET_PROFILER = {"KINETO_LOG_LEVEL": "6"}
"""The environment variables that keep the profiler's library from writing into the live line. The library reads them
when a profiler is first started."""
_GPU_FILES = Path("/dev"), "nvidia[0-9]*"


@dataclass(frozen=True, kw_only=True)
class World(RankPlace):
    """The processes of one run and this one's place among them. `device_reason`: why this rank has its device.
    `launch`: an identifier that tells this start of the run from others on the same host."""

    device: torch.device
    num_threads: int
    device_reason: str = ""
    launch: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise UserError(f"rank {self.rank} of {self.num_ranks} ranks", allowed=f"0 to {self.num_ranks - 1}")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs, and writes what only one rank may write."""
        return self.rank == 0


def current_world(device: Device = "auto", *, threads: int = 0) -> World:
    """Returns this process's world, from the environment of torchrun, srun or mpirun; a world of one rank if none of
    them started it.

    `threads`: the number of threads of each rank; 0: as in `world_from`. Makes this rank's GPU the current one. Call
    this before any use of CUDA, which would take memory on the first GPU.
    """
    world = world_from(os.environ, device=device, num_cpus=len(os.sched_getaffinity(0)))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    return replace(world, num_threads=threads or world.num_threads)


def world_from(environ: Mapping[str, str], *, device: Device, num_cpus: int) -> World:
    """Returns the world that an environment describes. It is pure except that it asks torch for GPUs and looks for
    their device files. Raises UserError if a value is wrong.

    The number of a rank's threads is OMP_NUM_THREADS, else the number of cores that srun gave each task, else its share
    of this machine's cores.
    """
    refuse_for_deepspeed(environ)
    place = place_from(environ)
    folder, pattern = _GPU_FILES
    choice = choose_device(
        device,
        place.local_rank,
        gpus_from(
            environ,
            sorted(str(path) for path in folder.glob(pattern)),
            num_visible=torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0,
            build=torch.version.cuda or "",
        ),
        num_local_ranks=place.num_local_ranks,
    )
    return World(
        **vars(place),
        device=choice.device,
        device_reason=choice.reason,
        num_threads=threads_from(environ, num_local_ranks=place.num_local_ranks)
        or max(1, num_cpus // place.num_local_ranks),
        launch=launch_from(environ),
    )


def rank_and_size(rank: int | None = None, num_ranks: int | None = None) -> tuple[int, int]:
    """Returns (rank, number of ranks) of this process, for a user's own loop. They come from the arguments, else from
    torch.distributed if it is initialised, else from the environment that torchrun, srun or mpirun sets, else they are
    (0, 1).

    Raises UserError for numbers that are out of range, if torch.distributed and the environment contradict each other,
    or if only `num_ranks` is given and it is neither 1 nor the number found.
    """
    if num_ranks is not None and num_ranks < 1:
        raise UserError(f"num_ranks is {num_ranks}; allowed: 1 or more")
    if rank is None and num_ranks == 1:
        rank = 0
    if rank is None or num_ranks is None:
        found_rank, found_ranks = known_numbers()
        if num_ranks not in (None, found_ranks):
            known = f"this is rank {found_rank} of {found_ranks}" if found_ranks > 1 else "nothing says which this is"
            raise UserError(f"num_ranks is {num_ranks}, but {known}; give rank=, from 0 to {num_ranks - 1}, too")
        rank, num_ranks = found_rank if rank is None else rank, found_ranks
    if not 0 <= rank < num_ranks:
        raise UserError(f"rank is {rank}; allowed: 0 to {num_ranks - 1}, since num_ranks is {num_ranks}")
    return rank, num_ranks


def known_numbers() -> tuple[int, int]:
    """Returns the rank and the number of ranks from torch.distributed if it is initialised, else from the environment,
    else (0, 1). Raises UserError if the two contradict each other."""
    advice = "give rank= and num_ranks="
    if not dist.is_available() or not dist.is_initialized():
        try:
            return numbers_from(os.environ)
        except UserError as error:
            raise UserError(f"{error}, or {advice}") from error
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if said := contradictions(os.environ, rank=rank, num_ranks=num_ranks):
        raise UserError(
            f"torch.distributed says that this process is rank {rank} of {num_ranks}, but {' and '.join(said)} in the "
            f"environment; {advice} the numbers of this process, or unset what is not true"
        )
    return rank, num_ranks


def bf16_of(device: torch.device) -> Bf16:
    """Returns whether this device computes bf16 natively, and the environment allows that."""
    if device.type == "cuda":
        return bf16_of_gpu(torch.cuda.get_device_name(device), capability=torch.cuda.get_device_capability(device))
    return bf16_of_cpu(flags_of(_CPUINFO.read_text() if _CPUINFO.exists() else ""), os.environ)


def set_defaults(values: Mapping[str, str]) -> None:
    """Sets environment variables that a library is about to read, unless the user has set them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def fix_kernels(world: World) -> None:
    """Makes this process use only deterministic GPU kernels from now on. CPU kernels always are deterministic."""
    if world.device.type == "cuda":
        use_deterministic_kernels(os.environ)


def enter(world: World, *, limits: TimeLimits = _LIMITS, has_backend: bool = False) -> None:
    """Joins the process group and sets the number of threads, which torchrun and srun would set differently.

    `has_backend`: whether a single rank uses NCCL or gloo, too. Raises UserError if the devices of the ranks do not fit
    together, and TransientError if a rank is missing.
    """
    torch.set_num_threads(world.num_threads)
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed would use a GPU that it sees
    else:
        torch.cuda.set_device(world.device)
    # DeepSpeed requires LOCAL_RANK and uses it as the number of the GPU.
    os.environ["LOCAL_RANK"] = str(world.local_rank if world.device.index is None else world.device.index)
    if world.num_ranks == 1 and not has_backend:
        join_alone()
    else:
        _meet(world, limits)


def _meet(world: World, limits: TimeLimits) -> None:
    """Joins the other ranks. Listens only at the addresses that the ranks share (pipeline/ranks/rendezvous.py)."""
    address, port = world.master_address, world.master_port
    join, exchange = timedelta(seconds=limits.join_seconds), timedelta(seconds=limits.exchange_seconds)
    choose_interface(world)
    # Under torchrun, the agent serves the store, and rank 0 is a client like the others.
    serves = world.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    open_store = serve_store if serves else reach_store
    store = PrefixStore(  # torchrun's store survives a restart of the ranks
        f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        open_store(address, port, num_ranks=world.num_ranks, timeout=join),
    )
    agree_on_device(
        store,
        _claim(world),
        num_ranks=world.num_ranks,
        limit=join,
        hosts=lambda arrived: hosts_of(os.environ, world, arrived),
    )
    # Rank and size are passed as arguments: processes started from here would inherit them from the environment.
    dist.init_process_group(
        "nccl" if world.device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.num_ranks,
        timeout=join,  # the time to connect the ranks; later exchanges may take longer
        device_id=world.device if world.device.type == "cuda" else None,
    )
    dist.distributed_c10d._set_pg_timeout(exchange)
    store.set_timeout(exchange)  # later groups meet at this store, too


def choose_interface(world: World) -> None:
    """Makes gloo and NCCL use the network interface that leads to the address at which the ranks meet, unless the user
    has set another one. NCCL finds InfiniBand by itself."""
    found = interface_towards(world.master_address)
    name, value = (_NCCL_INTERFACE, f"={found}") if world.device.type == "cuda" else (_GLOO_INTERFACE, found)
    how = "set by the user" if os.environ.get(name) else "the one towards that address"
    os.environ.setdefault(_GLOO_INTERFACE, found)  # gloo reads it for every group, also DeepSpeed's
    if found:
        os.environ.setdefault(_NCCL_INTERFACE, f"={found}")  # "=": exactly this name, not a prefix
    if world.is_first and world.master_address != LOOPBACK:
        used = os.environ.get(name, value).removeprefix("=") or "that each host chooses"
        log.info("the ranks meet at %s, over the network interface %s (%s: %s)", world.master_address, used, name, how)


def _claim(world: World) -> Claim:
    gpu = str(torch.cuda.get_device_properties(world.device).uuid) if world.device.type == "cuda" else ""
    return Claim(
        rank=world.rank, host=socket.gethostname(), kind=world.device.type, reason=world.device_reason, gpu=gpu
    )


def leave() -> None:
    """Leaves the process group if it was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def joined(world: World, *, limits: TimeLimits = _LIMITS) -> Iterator[None]:
    """Joins the process group inside the `with` block. Raises TransientError if an exchange with the other ranks fails.
    If there are several ranks, the group is not left after an error: NCCL's teardown could wait forever for the others,
    which wait for this rank. The group ends with the process."""
    unset = [name for name in (_GLOO_INTERFACE, _NCCL_INTERFACE) if name not in os.environ]
    is_whole = world.num_ranks == 1
    try:
        enter(world, limits=limits)
        yield
        is_whole = True
    except RuntimeError as error:
        if not _is_of_exchange(error):
            raise
        raise TransientError(
            f"the exchange with the other ranks failed ({_fault_of(error)}); if one of them has ended, its own "
            "message says why"
        ) from error
    finally:
        if is_whole:
            leave()
        for name in unset:  # a job that is submitted from here may run on other hosts
            os.environ.pop(name, None)


def _fault_of(error: RuntimeError) -> str:
    """Returns the first line of an error, without the place in gloo's source and gloo's advice."""
    line = str(error).partition("\n")[0].partition(" This is typically caused by")[0]
    return _GLOO_PLACE.sub("", line).rstrip(".")


def _is_of_exchange(error: RuntimeError) -> bool:
    """Returns whether torch.distributed has raised the error. Gloo's errors are plain RuntimeErrors, so they are
    recognised by the module that raised them."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__") if trace else ""
    return isinstance(error, dist.DistError) or module == dist.distributed_c10d.__name__
