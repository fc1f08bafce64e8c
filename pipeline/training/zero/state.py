"""DeepSpeed's flat ZeRO partitions seen as fragments of logical tensors, for every stage and number of ranks.

Stages 1 and 2 put a group's parameters end to end and give each rank one slice; `param._hp_mapping` says which fragment
of each parameter this rank holds. Stage 3 cuts every parameter into equal fragments; `optimizer.grad_position` says
where they are. In all stages, a rank holds at most one contiguous fragment of a parameter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.manifest import AVERAGE, MASTER
from pipeline.training.zero.flat_blocks import HeldPart, ParameterPlace
from pipeline.training.zero.optimizer import MOMENTS

_ROW = 1 << 10  # elements whose squares are summed in fp32 at once; with 2^24, a CPU's sum is off in the 4th digit
_PIECE = 1 << 24  # the most elements that are copied at once


def local_fragments(
    zero: Any,
    tensors: Iterable[tuple[torch.nn.Parameter, Sequence[ParameterPlace]]],
    *,
    averages: Mapping[torch.Tensor, torch.Tensor],
) -> list[Fragment]:
    """Returns the fragments that this rank owns. Their views are live: copying into them changes the engine's state.
    `tensors`: those that DeepSpeed sees, each with the model's parameters in it. `averages`: the running average of
    each flat partition; empty without averaging."""
    found = []
    for flat, parts in _held(zero, tensors):
        state = inner_optimizer(zero).state.get(flat, {})
        held = {MASTER: flat.detach()}
        held |= {key: value for key, value in state.items() if torch.is_tensor(value) and value.shape == flat.shape}
        if flat in averages:
            held[AVERAGE] = averages[flat]
        for name, start, at, length in parts:
            views = {key: value[at : at + length] for key, value in held.items()}
            found.append(Fragment(name=name, start=start, length=length, slots=views))
    return found


def parts_in_partitions(
    zero: Any, tensors: Sequence[tuple[torch.nn.Parameter, Sequence[ParameterPlace]]]
) -> dict[torch.Tensor, list[HeldPart]]:
    """Returns the fragments of the model's parameters in each of this rank's flat partitions, with the numbers that the
    parameters have in the order of `tensors`, as `local_fragments` takes them. All ranks give them the same numbers."""
    names = (place.name for _, places in tensors for place in places)
    numbers = {name: number for number, name in enumerate(names)}
    found: dict[torch.Tensor, list[HeldPart]] = {}
    for flat, parts in _held(zero, tensors):
        own = [
            HeldPart(number=numbers[name], first=first, start=at, end=at + length) for name, first, at, length in parts
        ]
        found.setdefault(flat, []).extend(own)
    return found


def _held(
    zero: Any, tensors: Iterable[tuple[torch.nn.Parameter, Sequence[ParameterPlace]]]
) -> Iterator[tuple[torch.Tensor, list[tuple[str, int, int, int]]]]:
    """Yields, for each tensor of which this rank holds a part, the flat partition with this part, and the fragments of
    the model's parameters in it: the name, the fragment's first element in the parameter and in the partition, and the
    number of its elements."""
    for tensor, places in tensors:
        own = _place_stage3(zero, tensor) if hasattr(tensor, "ds_id") else _place_stage12(zero, tensor)
        if own is None:
            continue
        flat, offset, start, length = own
        parts = _parts(places, start, start + length)
        yield (
            flat,
            [(place.name, first - place.start, offset + first - start, end - first) for place, first, end in parts],
        )


def _parts(places: Sequence[ParameterPlace], start: int, end: int) -> Iterator[tuple[ParameterPlace, int, int]]:
    """Yields the parameters of which some elements lie in [start, end) of their tensor, each with the first and one
    past the last of these elements there."""
    for place in places:
        first, last = max(start, place.start), min(end, place.start + place.numel)
        if first < last:
            yield place, first, last


def give_memory(model: torch.nn.Module, settings: Mapping[str, Any]) -> None:
    """Moves a model from the meta device to this rank's device, where it gets memory with arbitrary values, in its own
    precision. Under stage 3, a rank keeps its share of each tensor, and never has more than one whole layer.
    Collective."""
    # Not imported at the top, as in `_quiet_deepspeed` (engine.py).
    from deepspeed import zero  # noqa: PLC0415
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415

    device = torch.device(get_accelerator().current_device_name())
    if settings["zero_optimization"]["stage"] < 3:
        # Not `to_empty`: its empty_like of a tensor on meta loads SymPy, which takes half a second.
        model._apply(partial(_given_memory, device=device))  # type: ignore[no-untyped-call]
    else:
        dtype = next(model.parameters()).dtype
        zero.Init(module=_OneByOne(model, device), config_dict_or_path=dict(settings), dtype=dtype)


def _given_memory(tensor: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


class _OneByOne(torch.nn.Module):
    """A model on meta whose layers get memory when their parameters are iterated over. DeepSpeed's Init replaces each
    parameter of a module by its share before it takes the next one."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__()
        # In a tuple, layers are not registered as submodules.
        self._layers, self._device = tuple(model.modules()), device

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:  # noqa: ARG002 - as nn.Module has it
        """Yields the parameters layer by layer, and gives each layer memory first."""
        for layer in self._layers:
            layer.to_empty(device=self._device, recurse=False)
            yield from layer.parameters(recurse=False)


def inner_optimizer(zero: Any) -> torch.optim.Optimizer:
    """Returns the torch optimiser inside DeepSpeed's ZeRO optimiser."""
    inner: torch.optim.Optimizer = zero.optimizer
    return inner


def create_moments(zero: Any, *, names: Iterable[str], num_updates: int) -> None:
    """Gives the optimiser zeroed moments and its update count, so that saved moments can be copied in. A group gets
    only the moments in `names` that the optimiser keeps for its parameters."""
    names = list(names)
    # Under stage 3, groups may temporarily have no parameters; then all their partitions get all names.
    kept = {id(flat): group[MOMENTS] for group in inner_optimizer(zero).param_groups for flat in group["params"]}
    for flat in flat_partitions(zero):
        own = [name for name in names if name in kept.get(id(flat), names)]
        state: dict[str, torch.Tensor] = {name: torch.zeros_like(flat.detach()) for name in own}
        if "exp_avg" in state:
            state["step"] = torch.tensor(float(num_updates), device=_step_device(zero, flat))
        if state:
            inner_optimizer(zero).state[flat] = state
        else:  # the moments of earlier updates no longer count
            inner_optimizer(zero).state.pop(flat, None)


def narrow_first_moments(zero: Any) -> None:
    """Rounds the first moments of AdamW and Adafactor to bf16. Saved moments are already bf16 values, stored in fp32's
    4 bytes."""
    for state in inner_optimizer(zero).state.values():
        if "exp_avg" in state:
            state["exp_avg"] = state["exp_avg"].bfloat16()


def local_gradients(
    zero: Any, tensors: Iterable[tuple[torch.nn.Parameter, Sequence[ParameterPlace]]]
) -> dict[str, torch.Tensor]:
    """Returns live views of this rank's part of the reduced gradients, by name, before clipping. They are flat, and
    have the elements of the rank's fragments. They are valid only between an update's last backward pass and the
    update. `tensors`: those that DeepSpeed sees, each with the model's parameters in it."""
    is_stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
    held = dict[int, torch.Tensor]()
    for number, group in enumerate(zero.fp16_groups if is_stage_3 else zero.params_in_partition):
        own = (each for each in zero.averaged_gradients[number] if not getattr(each, "_zero_padding", False))
        # Stage 3 pads at the end.
        held |= {id(tensor): gradient for tensor, gradient in zip(group, own, strict=False)}
    found = {}
    for tensor, places in tensors:
        at = _place_stage3(zero, tensor) if is_stage_3 else _place_stage12(zero, tensor)
        if not at:
            continue
        _, _, start, length = at
        gradient = held[id(tensor)].view(-1)
        for place, first, end in _parts(places, start, start + length):
            found[place.name] = gradient[first - start : end - start]
    return found


def spoil_gradients(zero: Any, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sets this rank's part of the reduced gradients to NaN, so that stage 3 drops all gradients at its next step.
    Returns the norm that they had, on the device. Padding is not changed: stage 3 never writes to it, so a NaN there
    would stay for all later steps. Collective."""
    squares = sum_of_squares([flat_partitions(zero)[0].new_zeros(1), *gradients])
    for gradient in gradients:
        gradient.fill_(torch.nan)
    dist.all_reduce(squares)
    return squares.sqrt()


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of the squares of all elements, float64[], on their device, without waiting for it."""
    norms = []
    for tensor in tensors:
        flat = tensor.detach().flatten()
        whole = flat.numel() // _ROW * _ROW
        parts = (flat[:whole].view(-1, _ROW), flat[whole:].view(1, -1))
        norms += [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts if part.numel()]
    return torch.cat(norms).double().square().sum()


def publish_masters(zero: Any, *, also: Callable[[], None]) -> None:
    """Updates the model's own (low-precision) weights on all ranks after the masters were overwritten. `also`: does the
    same for weights that the optimiser does not know."""
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.update_lp_params()
        also()
        return
    zero._partition_all_parameters()  # frees what an evaluation has left gathered
    for group, master in enumerate(zero.fp32_partitioned_groups_flat):
        zero.fp16_partitioned_groups_flat[group].data.copy_(master.data)
        zero._unflatten_partitioned_parameters(group)
    also()
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges the values of two flat tensors in place, a piece at a time."""
    for first in range(0, a.numel(), _PIECE):
        one, other = a[first : first + _PIECE], b[first : first + _PIECE]
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def flat_partitions(zero: Any) -> list[torch.Tensor]:
    """Returns this rank's fp32 masters, one flat tensor per parameter group. They are the same objects during the whole
    run."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(zero, name):
            return list(getattr(zero, name))
    raise TypeError(f"{type(zero).__name__} is no ZeRO optimiser of DeepSpeed 0.19 that this adapter knows")


def _place_stage12(zero: Any, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, int, int, int] | None:
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None  # other ranks hold this parameter
    flat = flat_partitions(zero)[mapping.param_group_index]
    inside, part = mapping.hp_fragment_address, mapping.lp_fragment_address
    return flat, int(inside.start), int(part.start), int(part.numel)


def _place_stage3(zero: Any, parameter: Any) -> tuple[torch.Tensor, int, int, int] | None:
    group, offset, part_size = zero.grad_position[zero.get_param_id(parameter)]
    start = dist.get_rank() * int(part_size)
    length = min(int(part_size), int(parameter.ds_numel) - start)  # the last parts are padded
    if length <= 0:
        return None
    return zero.fp32_partitioned_groups_flat[group], int(offset), start, length


def _step_device(zero: Any, flat: torch.Tensor) -> torch.device:
    fused = any(group.get("fused") or group.get("capturable") for group in inner_optimizer(zero).param_groups)
    return flat.device if fused else torch.device("cpu")


def free_tensors(
    zero: Any, parameters: Iterable[torch.nn.Parameter], *, averages: Mapping[torch.Tensor, torch.Tensor]
) -> None:
    """Frees the memory of an optimiser and its model that are no longer used, even if something still refers to them,
    as DeepSpeed's hooks do under stage 3."""
    parameters = list(parameters)
    held = [vars(zero), inner_optimizer(zero).state, *map(vars, parameters), parameters, averages]
    for tensor in _tensors_in(held):
        tensor.untyped_storage().resize_(0)


def _tensors_in(value: Any, *, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested lists, tuples and dicts, and their gradients."""
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif depth and isinstance(value, list | tuple | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(part, depth=depth - 1)
