"""What the ranks add up in every step, by name: one float64 reduction carries everything that they agree on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.training.zero.gpu_streams import ReadBack, Streams, read_back, streams_of

LOSS, GRAD_NORM = "loss", "grad_norm"


@dataclass(frozen=True, kw_only=True)
class SumSource:
    """Values of this rank, asked for once a step. `read` returns one for each of `names`, which all ranks share."""

    names: tuple[str, ...]
    read: Callable[[], Mapping[str, float]]


class StepSums:
    """The sums of a step, in a fixed order: the loss, each source's values, and the gradient's norm, which is no sum:
    it is the same on every rank, and is read back together with them. `streams`: None for those of the device.

    A step may add up more values, which are on the device already: they are behind the others in the same reduction."""

    def __init__(self, sources: Sequence[SumSource], *, device: torch.device, streams: Streams | None = None) -> None:
        self.sources, self.device, self.streams = tuple(sources), device, streams or streams_of(device)
        self.names = (LOSS, *(name for source in sources for name in source.names), GRAD_NORM)
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"two sums have one name: {sorted(self.names)}")

    def reduced(self, loss: torch.Tensor, *, more: torch.Tensor | None = None) -> torch.Tensor:
        """float64[names + more] on the device: the sums over all ranks. `more`: other values of this rank, float64.
        Nothing waits for them here. Collective."""
        values = [0.0]
        for source in self.sources:
            found = source.read()
            values += [float(found[name]) for name in source.names]
        sums = self.streams.pinned(torch.tensor([*values, 0.0], dtype=torch.float64))
        sums = sums.to(self.device, non_blocking=True)
        sums[0] = loss
        if more is not None:
            sums = torch.cat([sums, more])
        dist.all_reduce(sums)
        return sums

    def read_back(self, sums: torch.Tensor, *, grad_norm: torch.Tensor | float) -> ReadBack:
        """Sends the sums to the host, and the gradient's norm with them. Nothing waits for them here."""
        sums[len(self.names) - 1] = grad_norm
        return read_back(sums, self.streams)

    def by_name(self, sums: ReadBack, *, more: Sequence[str] = ()) -> dict[str, float]:
        """The sums on the host, which waits for them. `more`: the names of the other values."""
        return dict(zip((*self.names, *more), sums.values(), strict=True))
