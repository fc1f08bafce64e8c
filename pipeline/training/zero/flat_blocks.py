"""Keeps the parameters of each block in a few flat tensors, which are all that DeepSpeed sees of it.

DeepSpeed's work per step on the host (hooks, copies, norms) grows with the number of parameter tensors, not with their
size. ViT-H/14 has 394, of which all but 10 are in its 32 blocks. The parameters of a block that are updated alike (with
the same weight decay, rate factor and optimiser) share one flat tensor, as in FSDP's FlatParameter ("PyTorch FSDP",
Zhao et al., 2023, section 3.2.1). While a block runs, its layers use views of the flat tensors. Each view begins at a
multiple of ALIGNED elements; the elements between views are zero and stay zero, since their gradients are.

Outside of the engine, parameters keep their own names: checkpoints, weights and metrics know nothing of flat tensors.
"""

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

ALIGNED = 64  # elements: 128 bytes in bf16
_FLAT = "flat_"
_SavedView = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], int]  # flat tensor, shape, stride, first element
_BLOCK = re.compile(r"(.*\.)?(blocks\.\d+|stages\.\d+\.\d+)\.")


@dataclass(frozen=True, kw_only=True)
class ParameterPlace:
    """Where a parameter of the model lies in a tensor that DeepSpeed sees. `start`: its first element there."""

    name: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class HeldPart:
    """A rank's fragment of one of the model's parameters. `number`: the parameter's number among all that are trained.
    `first`: the fragment's first element in the parameter. `start`, `end`: the fragment's elements in the rank's flat
    partition of the parameter's group."""

    number: int
    first: int
    start: int
    end: int


Layout = Mapping[str, tuple[ParameterPlace, ...]]


def layout_of(
    shapes: Mapping[str, Sequence[int]], ways: Mapping[str, Hashable]
) -> dict[str, tuple[ParameterPlace, ...]]:
    """Returns the tensors that DeepSpeed sees, by name, each with the parameters in it.

    `shapes`: those of all the model's parameters. `ways`: how each of them is updated; parameters that are not in it
    are not trained. These, and parameters outside of blocks, remain tensors of their own.
    """
    layout: dict[str, tuple[ParameterPlace, ...]] = {}
    numbers: dict[str, dict[Hashable, int]] = {}
    for name, shape in shapes.items():
        block = _BLOCK.match(name)
        own, start = name, 0
        if block and name in ways:
            of_block = numbers.setdefault(block.group(), {})
            own = f"{block.group()}{_FLAT}{of_block.setdefault(ways[name], len(of_block))}"
            start = _padded(layout.get(own, ()))
        layout[own] = (*layout.get(own, ()), ParameterPlace(name=name, shape=tuple(shape), start=start))
    return layout


def sizes_of(layout: Layout) -> dict[str, int]:
    """Returns the number of elements of each tensor that DeepSpeed sees, with padding, by name."""
    return {name: _padded(places) if is_flat(name) else places[0].numel for name, places in layout.items()}


def largest_block(layout: Layout) -> int:
    """Returns the number of elements of the largest flat tensor; 0 if there is none."""
    return max((size for name, size in sizes_of(layout).items() if is_flat(name)), default=0)


def _padded(places: Sequence[ParameterPlace]) -> int:
    return sum(place.numel + -place.numel % ALIGNED for place in places)


def end_to_end(layout: Layout, names: Iterable[str]) -> Iterator[ParameterPlace]:
    """Yields the parameters of these tensors if the tensors are put end to end, each with its place in the whole."""
    sizes, base = sizes_of(layout), 0
    for name in names:
        for place in layout[name]:
            yield replace(place, start=base + place.start)
        base += sizes[name]


def views_of(tensor: torch.Tensor, places: Iterable[ParameterPlace]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters in a tensor that DeepSpeed sees, by name, as views in their own shapes."""
    for place in places:
        yield place.name, tensor.view(-1)[place.start : place.start + place.numel].view(place.shape)


def is_flat(name: str) -> bool:
    """Returns whether the name in a layout is that of a flat tensor."""
    return name.rpartition(".")[2].startswith(_FLAT)


def flatten_blocks(model: nn.Module, layout: Layout) -> list[nn.Module]:
    """Moves the parameters of a model's blocks into flat tensors, in place, and returns these blocks. The model may be
    on meta."""
    blocks = list[nn.Module]()
    is_recomputed = any(getattr(module, "checkpoint_blocks", False) for module in model.modules())
    for name, places in layout.items():
        if not is_flat(name):
            continue
        prefix, _, own = name.rpartition(".")
        block: Any = model.get_submodule(prefix)
        if not isinstance(block, _FlatBlock):
            block.__class__ = _flat_class(type(block))  # type: ignore[arg-type]  # a class is hashable
            block.flat_tensors, block.is_recomputed = [], is_recomputed
            blocks.append(block)
        first = model.get_parameter(places[0].name)
        flat = torch.zeros(_padded(places), dtype=first.dtype, device=first.device)
        lengths, slots = list[int](), []
        for place in places:
            layer, _, kind = place.name.rpartition(".")
            module = model.get_submodule(layer)
            if not flat.is_meta:
                flat[place.start : place.start + place.numel] = module.get_parameter(kind).detach().flatten()
            delattr(module, kind)
            setattr(module, kind, None)  # no parameter any more, but a view while the block runs
            slots.append((module, kind, place.shape, len(lengths)))
            lengths += [length for length in (place.numel, -place.numel % ALIGNED) if length]
        block.register_parameter(own, nn.Parameter(flat))
        block.flat_tensors.append((own, tuple(lengths), tuple(slots)))
    return blocks


class _FlatBlock(nn.Module):
    """A block whose layers use views of flat tensors while it runs. `flat_tensors`: for each of them, its name, the
    lengths of its pieces, and the layer, name, shape and piece of each parameter in it. Padding is a piece of its own,
    unless it is empty: autograd would make zeros for it. `is_recomputed`: whether the backward pass calls it again."""

    flat_tensors: list[tuple[str, tuple[int, ...], tuple[tuple[nn.Module, str, tuple[int, ...], int], ...]]]
    is_recomputed: bool

    def forward(self, *inputs: Any) -> Any:
        """Computes the block. Under stage 3, what autograd saves must not keep the gathered weights in memory until the
        backward pass; a recomputed block saves nothing until then."""
        if self.is_recomputed or not hasattr(getattr(self, self.flat_tensors[0][0]), "ds_id"):
            return self.computed(*inputs)
        tensors: list[torch.Tensor] = [getattr(self, own) for own, _, _ in self.flat_tensors]
        gathered = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        with saved_tensors_hooks(partial(_packed, gathered), _unpacked):
            return self.computed(*inputs)

    def computed(self, *inputs: Any) -> Any:
        """Computes the block, which is compiled from here on under stage 3 (`compile_blocks`). Autograd puts the
        gradients of the views together into those of the flat tensors."""
        for own, lengths, slots in self.flat_tensors:
            pieces = getattr(self, own).split_with_sizes(lengths)
            for module, kind, shape, number in slots:
                view = pieces[number] if len(shape) == 1 else pieces[number].view(shape)
                object.__setattr__(module, kind, view)  # without nn.Module's search for a parameter of this name
        try:
            return super().forward(*inputs)
        finally:
            for _, _, slots in self.flat_tensors:
                for module, kind, _, _ in slots:
                    object.__setattr__(module, kind, None)


def _packed(gathered: Mapping[int, torch.Tensor], saved: torch.Tensor) -> torch.Tensor | _SavedView:
    """Replaces a view that autograd would save, which would keep the gathered weights of stage 3 in memory until the
    backward pass. DeepSpeed gathers them again before that. `gathered`: flat tensors by the address of their memory."""
    flat = gathered.get(saved.untyped_storage().data_ptr())
    return saved if flat is None else (flat, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))


def _unpacked(saved: torch.Tensor | _SavedView) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    flat, shape, stride, offset = saved
    return flat.detach().as_strided(shape, stride, offset)


@cache
def _flat_class(kind: Any) -> type[_FlatBlock]:
    """Returns the class of a block with flat tensors, derived from the block's own class as in FSDP2."""
    return type(f"Flat{kind.__name__}", (_FlatBlock, kind), {})
