"""The weights of a run that are not trained: no gradient, no moments, but in fp32 and in every checkpoint.

DeepSpeed knows only what its optimiser updates. Each rank holds an equal part of every other tensor, cut as ZeRO-3
cuts it: the parts are saved and filled as the masters of trained weights are, and the model's own copies follow.
"""

import torch
import torch.distributed as dist
from torch import nn

from pipeline.checkpoints.fragments import Fragment
from pipeline.checkpoints.manifest import MASTER


class FrozenWeights:
    """This rank's parts of the parameters that need no gradient, float32, with arbitrary values at first."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._parts: dict[str, Fragment] = {}
        self._sizes: dict[str, int] = {}
        for name, parameter in self._parameters.items():
            numel = int(getattr(parameter, "ds_numel", parameter.numel()))
            size = -(-numel // num_ranks)
            start = min(rank * size, numel)
            held = torch.empty(min(size, numel - start), dtype=torch.float32, device=parameter.device)
            self._parts[name] = Fragment(name=name, start=start, length=held.numel(), slots={MASTER: held})
            self._sizes[name] = size

    def fragments(self) -> list[Fragment]:
        """What this rank holds, as live views."""
        return [part for part in self._parts.values() if part.length]

    @torch.no_grad()
    def publish(self) -> None:
        """Updates the model's own weights from all ranks' parts. Collective, one tensor at a time."""
        for name, parameter in self._parameters.items():
            part = self._parts[name]
            own = part.slots[MASTER].to(parameter.dtype)
            if hasattr(parameter, "ds_tensor"):  # stage 3: the rank's own share is all it has
                parameter.ds_tensor.data.flatten()[: part.length].copy_(own)
                continue
            padded = own.new_zeros(self._sizes[name])
            padded[: part.length] = own
            gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, padded)
            parameter.copy_(torch.cat(gathered)[: parameter.numel()].reshape(parameter.shape))

    def free(self) -> None:
        """Gives the memory back."""
        for part in self._parts.values():
            part.slots[MASTER].untyped_storage().resize_(0)
