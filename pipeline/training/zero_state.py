"""DeepSpeed's flat ZeRO partitions seen as fragments of logical tensors, for every stage and number of ranks.

Stages 1 and 2 (and BF16_Optimizer, which DeepSpeed 0.19.8 takes for stage 1 with fp32 accumulation) put a group's
parameters end to end and give each rank one slice; `param._hp_mapping` says which fragment of each parameter this rank
holds. Stage 3 cuts every parameter into equal fragments; `optimizer.grad_position` says where they are. In all stages a
rank holds at most one contiguous fragment of a parameter.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

MASTER = "master"
AVERAGE = "average"


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Elements `start` .. `start + length - 1` of a logical tensor, flattened, as this rank holds them.

    `slots`: flat float32 views into the engine's own buffers, by name: `master`, the optimiser's moments, and
    `average` if the weights are averaged.
    """

    name: str
    start: int
    length: int
    slots: dict[str, torch.Tensor]


def local_fragments(
    zero: Any,
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    averages: Mapping[torch.Tensor, torch.Tensor],
) -> list[Fragment]:
    """What this rank owns. The views are live: copying into them changes the engine's state. `averages`: the running
    average of each flat partition, or nothing."""
    found = []
    for name, parameter in parameters:
        place = _place_stage3(zero, parameter) if hasattr(parameter, "ds_id") else _place_stage12(zero, parameter)
        if place is None:
            continue
        flat, offset, start, length = place
        views = {MASTER: flat.detach()[offset : offset + length]}
        for key, value in inner_optimizer(zero).state.get(flat, {}).items():
            if torch.is_tensor(value) and value.shape == flat.shape:
                views[key] = value[offset : offset + length]
        if flat in averages:
            views[AVERAGE] = averages[flat][offset : offset + length]
        found.append(Fragment(name=name, start=start, length=length, slots=views))
    return found


def inner_optimizer(zero: Any) -> torch.optim.Optimizer:
    """The torch optimiser inside DeepSpeed's ZeRO optimiser."""
    inner: torch.optim.Optimizer = zero.optimizer
    return inner


def create_moments(zero: Any, *, names: Iterable[str], num_updates: int) -> None:
    """Gives the optimiser zeroed moments `names` and its update count, so that saved ones can be copied in."""
    names = list(names)
    for flat in flat_partitions(zero):
        state: dict[str, torch.Tensor] = {name: torch.zeros_like(flat.detach()) for name in names}
        if "exp_avg" in names:
            state["step"] = torch.tensor(float(num_updates), device=_step_device(zero, flat))
        if state:
            inner_optimizer(zero).state[flat] = state


def publish_masters(zero: Any) -> None:
    """After the masters were overwritten: updates the model's own (low-precision) weights from them on all ranks."""
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.update_lp_params()
        return
    if zero.persistent_parameters:
        zero.persistent_parameters[0].partition(zero.persistent_parameters)
    for group, master in enumerate(zero.fp32_partitioned_groups_flat):
        zero.fp16_partitioned_groups_flat[group].data.copy_(master.data)
        zero._unflatten_partitioned_parameters(group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def flat_partitions(zero: Any) -> list[torch.Tensor]:
    """This rank's fp32 masters, one flat tensor per parameter group; the same objects for the whole run."""
    for name in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
    ):
        if hasattr(zero, name):
            return list(getattr(zero, name))
    raise TypeError(f"{type(zero).__name__} is no ZeRO optimiser of DeepSpeed 0.19 that this adapter knows")


def _place_stage12(zero: Any, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, int, int, int] | None:
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None  # another rank holds all of it
    flat = flat_partitions(zero)[mapping.param_group_index]
    inside, part = mapping.hp_fragment_address, mapping.lp_fragment_address
    return flat, int(inside.start), int(part.start), int(part.numel)


def _place_stage3(zero: Any, parameter: Any) -> tuple[torch.Tensor, int, int, int] | None:
    group, offset, part_size = zero.grad_position[zero.get_param_id(parameter)]
    start = dist.get_rank() * int(part_size)
    length = min(int(part_size), int(parameter.ds_numel) - start)  # the last ones are padded
    if length <= 0:
        return None
    return zero.fp32_partitioned_groups_flat[group], int(offset), start, length


def _step_device(zero: Any, flat: torch.Tensor) -> torch.device:
    fused = any(group.get("fused") or group.get("capturable") for group in inner_optimizer(zero).param_groups)
    return flat.device if fused else torch.device("cpu")
