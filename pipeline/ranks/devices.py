"""Chooses the device that a rank computes on, and makes its results repeatable to the bit.

The choice is a pure function of what torch sees and what the environment announces. A rank never falls back to the CPU
if a GPU was meant: a node with a broken driver would use gloo while the others use NCCL, or train a hundred times
slower. All ranks compute on the same kind of device, and each on its own GPU. They agree on the kind at the store where
they meet, because the backend of the process group depends on it. At the store, rank 0 also sees which ranks have not
arrived.

By default, several GPU kernels may give different bits each time: attention's backward pass and cuDNN's convolutions
add in the order in which their blocks happen to finish. Sources: PyTorch's notes on reproducibility, and NVIDIA's notes
on cuBLAS ("Results reproducibility").
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated

import torch
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]  # its stub does not export it

from pipeline.ranks.rendezvous import missing_message
from pipeline.shared_settings import Device
from shards.config_values import Range, shown_value
from shards.errors import TransientError, UserError, WillNotSucceedError
from shards.files.typed_json import read_record

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # with other values, cuBLAS may add in another order if several streams use it
_VERDICT, _READ = "device/verdict", "device/read"
_FAREWELL = timedelta(seconds=10)
_POLL_SECONDS = 0.02
_MOST_NAMED = 3
# Returns the hosts of all ranks, given the hosts of the ranks that have arrived.
Hosts = Callable[[Mapping[int, str]], Sequence[str]]
_HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs on purpose; the last is Slurm's
_ANNOUNCING = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS")


def use_deterministic_kernels(environ: MutableMapping[str, str]) -> None:
    """Makes PyTorch use only deterministic kernels, and raise an error if an operator has none. Raises UserError if the
    environment sets another workspace for cuBLAS. Call this before the first matrix product on a GPU, when cuBLAS reads
    the environment."""
    found = environ.setdefault(WORKSPACE, WORKSPACES[0])
    if found not in WORKSPACES:
        raise UserError(
            f"{WORKSPACE} is {shown_value(found)} with engine.deterministic",
            allowed=" or ".join(WORKSPACES),
            todo="unset it, or give --engine.no-deterministic",
        )
    # This covers the backward passes of flash and memory-efficient attention, too.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time; not needed
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention has no deterministic backward pass
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it would choose kernels by timing them


def refuse_missing_kernel(error: RuntimeError) -> None:
    """Raises WillNotSucceedError if PyTorch has raised this error for an operator without a deterministic kernel."""
    operator, _, rest = str(error).partition(" ")
    if "does not have a deterministic implementation" in rest:
        raise WillNotSucceedError(
            f"engine.deterministic is on, but PyTorch has no deterministic kernel for {operator} on this GPU; give "
            "--engine.no-deterministic: the run then continues, equal to rounding"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A rank's device: its `kind` (`cpu` or `cuda`), the `reason` for the choice, and the GPU's unique id, empty on a
    CPU."""

    rank: Annotated[int, Range(0)]
    host: str
    kind: str
    reason: str
    gpu: str = ""


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """The verdict of rank 0. `fault`: what is wrong; empty if nothing is. `num_ranks`: the number of ranks that have
    arrived. `is_complete`: whether all have."""

    fault: str
    num_ranks: Annotated[int, Range(0)]
    is_complete: bool


def agree_on_device(store: Store, claim: Claim, *, num_ranks: int, limit: timedelta, hosts: Hosts) -> None:
    """Checks that the devices of all ranks fit together, with the same result on every rank. Raises UserError if they
    do not, and TransientError if a rank has not arrived within `limit` after rank 0. `hosts` says where all ranks
    should be."""
    store.set(_key(claim.rank), json.dumps(asdict(claim)))
    if claim.rank == 0:
        store.set(_VERDICT, json.dumps(asdict(_verdict(store, num_ranks, limit=limit, hosts=hosts))))
    elif not _wait(store, _VERDICT, limit + _FAREWELL):
        where = hosts({claim.rank: claim.host})
        raise TransientError(missing_message([0], where, seconds=limit.total_seconds()))
    verdict = read_record(_Verdict, store.get(_VERDICT))
    if not verdict.fault:
        return
    if store.add(_READ, 1) == verdict.num_ranks:
        store.set(f"{_READ}/all", "1")
    if claim.rank == 0:  # rank 0 may serve the store, from which the others still read
        _wait(store, f"{_READ}/all", _FAREWELL)
    raise (UserError if verdict.is_complete else TransientError)(verdict.fault)


def _verdict(store: Store, num_ranks: int, *, limit: timedelta, hosts: Hosts) -> _Verdict:
    """Returns what rank 0 finds at the store once all ranks have arrived or the time is over."""
    keys, deadline, pause = [_key(rank) for rank in range(num_ranks)], time.monotonic() + limit.total_seconds(), 0.0
    while not store.check(keys) and time.monotonic() < deadline:
        pause = min(pause + _POLL_SECONDS / 10, _POLL_SECONDS)
        threading.Event().wait(pause)
    there = [rank for rank, key in enumerate(keys) if store.check([key])]
    claims = [read_record(Claim, store.get(keys[rank])) for rank in there]
    if len(there) == num_ranks:
        return _Verdict(fault=disagreement(claims), num_ranks=num_ranks, is_complete=True)
    missing = sorted(set(range(num_ranks)) - set(there))
    where = hosts({claim.rank: claim.host for claim in claims})
    fault = missing_message(missing, where, seconds=limit.total_seconds())
    return _Verdict(fault=fault, num_ranks=len(there), is_complete=False)


def disagreement(claims: Sequence[Claim]) -> str:
    """Returns what is wrong with the devices of all ranks; empty if nothing is. `claims` are in rank order. Pure."""
    kinds = sorted({claim.kind for claim in claims})
    if len(kinds) > 1:
        odd = [claim for claim in claims if claim.kind == "cpu"]
        named = "; ".join(f"rank {one.rank} on host {one.host} ({one.reason})" for one in odd[:_MOST_NAMED])
        more = f"; {len(odd) - _MOST_NAMED} more" if len(odd) > _MOST_NAMED else ""
        return (
            f"{len(odd)} of {len(claims)} ranks would compute on the CPU, the others on GPUs: {named}{more}; repair "
            "the GPU driver there or leave the host out, or give --device cpu to all ranks"
        )
    owners: dict[str, Claim] = {}
    for claim in claims:
        if claim.gpu and claim.gpu in owners:
            return (
                f"ranks {owners[claim.gpu].rank} and {claim.rank} on host {claim.host} have the same GPU, {claim.gpu}; "
                "start one rank per GPU, or give every task a GPU of its own (srun --gpus-per-task=1)"
            )
        owners[claim.gpu] = claim
    return ""


def _wait(store: Store, key: str, limit: timedelta) -> bool:
    """Waits until the key is in the store. Returns False if that takes too long, for example because a rank has
    ended."""
    try:
        store.wait([key], limit)
    except DistStoreError:
        return False
    return True


def _key(rank: int) -> str:
    return f"device/{rank}"


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs that this process finds. `num_visible`: the number that torch can use. `names_one`: whether
    CUDA_VISIBLE_DEVICES has one entry. `announced`: the sign that there is a GPU, such as `/dev/nvidia0 is there`;
    empty if there is none. `build`: torch's CUDA version; empty if torch was built without CUDA."""

    num_visible: int
    names_one: bool = False
    announced: str = ""
    build: str = ""


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """A device, and why it was chosen."""

    device: torch.device
    reason: str


def gpus_from(environ: Mapping[str, str], device_files: Sequence[str], *, num_visible: int, build: str) -> Gpus:
    """Returns the GPUs as the environment announces them. `device_files`: the GPUs' device files, such as
    `/dev/nvidia0`."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    announced = ""
    if visible is not None and visible.strip() not in _HIDDEN:
        announced = f"CUDA_VISIBLE_DEVICES is {shown_value(visible)}"
    elif visible is None:
        said = [name for name in _ANNOUNCING if environ.get(name, "0") not in ("", "0")]
        announced = f"{said[0]} is {shown_value(environ[said[0]])}" if said else ""
        announced = announced or (f"{device_files[0]} is there" if device_files else "")
    names_one = bool(visible and visible.strip() not in _HIDDEN and "," not in visible)
    return Gpus(num_visible=num_visible, names_one=names_one, announced=announced, build=build)


def choose_device(wish: Device, local_rank: int, gpus: Gpus, *, num_local_ranks: int = 1) -> DeviceChoice:
    """Returns the device of a rank. Raises UserError if it has no GPU and should have one, or if `wish` is one GPU for
    several ranks."""
    if wish == "cpu":
        return DeviceChoice(device=torch.device("cpu"), reason="--device cpu")
    if wish != "auto" and not gpus.num_visible:
        what = f"--device is {wish}, and torch sees no GPU on this machine: {_cause(gpus)}"
        raise UserError(what, todo="repair that, or give --device cpu")
    kind, colon, number = wish.partition(":")
    if colon:
        if num_local_ranks > 1:
            what = f"--device is {wish}, which is one GPU for the {num_local_ranks} ranks of this machine"
            raise UserError(what, todo="give --device cuda, which gives each rank its own, or start one rank")
        if int(number) < gpus.num_visible:
            return DeviceChoice(device=torch.device(kind, int(number)), reason=f"--device {wish}")
        last = gpus.num_visible - 1
        raise UserError(f"--device is {wish}", allowed=f"cuda:0 to cuda:{last}" if last else "cuda:0")
    if wish == "auto" and not gpus.num_visible:
        if gpus.announced:
            raise UserError(
                f"torch sees no GPU, although {gpus.announced}: {_cause(gpus)}",
                todo="repair that or leave this host out, or give --device cpu to compute on the CPU",
            )
        return DeviceChoice(device=torch.device("cpu"), reason="torch sees no GPU there, and nothing announces one")
    if local_rank < gpus.num_visible:
        return DeviceChoice(device=torch.device("cuda", local_rank), reason=f"{gpus.num_visible} GPUs are visible")
    if gpus.num_visible == 1 and gpus.names_one:  # srun --gpus-per-task=1: each task sees its own GPU as the first
        return DeviceChoice(device=torch.device("cuda", 0), reason="CUDA_VISIBLE_DEVICES names one GPU")
    raise UserError(
        f"local rank {local_rank} has no GPU: this node has {gpus.num_visible}",
        todo="start one rank per GPU, or --device cpu",
    )


def _cause(gpus: Gpus) -> str:
    if not gpus.build:
        return "this torch is built without CUDA"
    return f"torch.cuda.is_available() is False with CUDA {gpus.build}, so its driver does not work or is too old"
