"""Measures a run's weights while it trains: norms by group of layers, and the similarity of position embeddings.

Norms of gradients and parameters are due every `every` steps. Each rank adds up the squares of what it holds: its part
of the reduced gradients before clipping, and of the fp32 master weights before the update. The sums over ranks are part
of the reduction that every step makes, and reach the host with the loss: a step in which norms are due sends a few more
numbers, and nothing waits for them.

The picture of the position embeddings is due at an interval of steps, and after the last step. Every rank copies its
part of the fp32 master weights into a table of zeros, and one sum over ranks completes the table, under any ZeRO stage.
Rank 0 compares the positions on its device and sends the result to the host, which reads it a step later, like the
loss.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from pipeline.checkpoints.manifest import MASTER
from pipeline.inspection.weight_pictures import levels, similarities
from pipeline.ranks.streams import ReadBack, Streams, read_back
from pipeline.ranks.world import World
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.optimizer import group_of
from pipeline.training.zero.state import sum_of_squares

POSITION = "embed.position"  # the table of learned 1-D position embeddings; other kinds have no picture
GRADIENT, PARAMETER = "grad_norm", "param_norm"


class PositionView:
    """Makes pictures of a model's position embeddings, after each step whose number is a multiple of the job's
    interval, and after the last step."""

    def __init__(self, job: TrainingJob, engine: Engine, world: World, streams: Streams) -> None:
        self.engine, self.world, self.streams = engine, world, streams
        self._every = job.similarity_every_steps if POSITION in engine.shapes else 0
        self._num_steps, self._model = job.steps, job.model

    def is_due(self, step: int) -> bool:
        """Returns whether step `step`, from 1 on, has a picture."""
        return self._every > 0 and (step % self._every == 0 or step == self._num_steps)

    def launched(self) -> ReadBack | None:
        """Launches a picture of the weights as they are now. Rank 0 gets the `levels` of the similarities, [T, U, H,
        W], on their way to the host; the other ranks get None. Does not wait for them. Collective."""
        shape = self.engine.shapes[POSITION]  # [1, N, D]
        table = torch.zeros(math.prod(shape), dtype=torch.float32, device=self.world.device)
        for fragment in self.engine.fragments():
            if fragment.name == POSITION:
                table[fragment.start : fragment.start + fragment.length] = fragment.slots[MASTER]
        dist.all_reduce(table)
        if not self.world.is_first:
            return None
        similar_TUHW = similarities(table.reshape(shape[1:]), grid=self._model.grid)
        return read_back(levels(similar_TUHW), self.streams)


class Norms:
    """Computes the norms of a model's gradients and parameters, in each step whose number is a multiple of `every` (0:
    in no step)."""

    def __init__(self, engine: Engine, *, every: int, device: torch.device) -> None:
        self.engine, self.every, self.device = engine, every, device
        self.groups = tuple(dict.fromkeys(map(group_of, engine.shapes)))
        self.names = tuple(f"{kind}/{group}" for kind in (GRADIENT, PARAMETER) for group in self.groups)
        self._trained = {f"{GRADIENT}/{group_of(name)}" for name in engine.trained_names}

    def is_due(self, step: int) -> bool:
        """Returns whether step `step`, from 1 on, has norms."""
        return self.every > 0 and step % self.every == 0

    def squares(self) -> torch.Tensor:
        """Returns this rank's sums of squares, float64[names], on the device, without waiting for them. Call it between
        the last backward pass and the update."""
        gradients = self.engine.gradients()
        masters = {fragment.name: fragment.slots[MASTER] for fragment in self.engine.fragments()}
        return torch.cat([_squares(held, self.groups, device=self.device) for held in (gradients, masters)])

    def values(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the norms, from the sums over ranks. Groups of weights that are not trained have no gradient norm."""
        shown = (name for name in self.names if name.startswith(PARAMETER) or name in self._trained)
        return {name: math.sqrt(sums[name]) if sums[name] < math.inf else sums[name] for name in shown}


def _squares(held: Mapping[str, torch.Tensor], groups: Sequence[str], *, device: torch.device) -> torch.Tensor:
    """Returns the sums of squares of each group, float64[groups]. `held`: tensors by the name of their parameter. A
    non-finite value affects only its group."""
    own: dict[str, list[torch.Tensor]] = {group: [torch.zeros(1, device=device)] for group in groups}
    for name, tensor in held.items():
        own[group_of(name)].append(tensor)
    return torch.stack([sum_of_squares(tensors) for tensors in own.values()])
