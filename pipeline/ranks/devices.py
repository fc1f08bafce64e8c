"""Which device a rank computes on: pure, from what torch sees and what the environment announces.

No rank takes the CPU by itself where a GPU was meant: a node whose driver is broken would join the others with gloo
while they use NCCL, or train a hundred times slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pipeline.config_values import Device
from shards.errors import UserError
from shards.schema.config_values import shown_value

_HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES: no GPU on purpose; the last is Slurm's
_ANNOUNCING = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS")


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs as this process finds them. `num_visible`: that torch can use. `names_one`: CUDA_VISIBLE_DEVICES has one
    entry. `announced`: what says that there is one, such as `/dev/nvidia0 is there`; empty if nothing does. `build`:
    torch's CUDA version, empty if it was built without CUDA."""

    num_visible: int
    names_one: bool = False
    announced: str = ""
    build: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A device, and why it was chosen."""

    device: torch.device
    reason: str


def gpus_from(environ: Mapping[str, str], device_files: Sequence[str], *, num_visible: int, build: str) -> Gpus:
    """GPUs as an environment announces them. `device_files`: such as `/dev/nvidia0`."""
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


def choose_device(wish: Device, local_rank: int, gpus: Gpus) -> Choice:
    """The device of a rank. UserError if it has no GPU and should have one."""
    if wish == "cpu":
        return Choice(device=torch.device("cpu"), reason="--device cpu")
    if wish == "auto" and not gpus.num_visible:
        if gpus.announced:
            raise UserError(
                f"torch sees no GPU, although {gpus.announced}: {_cause(gpus)}; repair that or leave this host out, or "
                "give --device cpu to compute on the CPU"
            )
        return Choice(device=torch.device("cpu"), reason="torch sees no GPU there, and nothing announces one")
    if local_rank < gpus.num_visible:
        return Choice(device=torch.device("cuda", local_rank), reason=f"{gpus.num_visible} GPUs are visible")
    if gpus.num_visible == 1 and gpus.names_one:  # srun --gpus-per-task=1: each task sees its own as the first
        return Choice(device=torch.device("cuda", 0), reason="CUDA_VISIBLE_DEVICES names one GPU")
    cause = f" ({_cause(gpus)})" if not gpus.num_visible else ""
    raise UserError(
        f"local rank {local_rank} has no GPU: this node has {gpus.num_visible}{cause}; start one rank per GPU, or "
        "--device cpu"
    )


def _cause(gpus: Gpus) -> str:
    if not gpus.build:
        return "this torch is built without CUDA"
    return f"torch.cuda.is_available() is False with CUDA {gpus.build}, so its driver does not work or is too old"
