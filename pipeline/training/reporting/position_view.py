"""The picture of the position embeddings' similarity, every so many steps and after the last one.

Every rank puts its part of the fp32 master into a table of zeros, and one sum over ranks makes the table whole, under
any ZeRO stage. Rank 0 compares the positions on its device and sends the outcome to the host, which takes it a step
later, like the loss. Only steps that are due do any of this.
"""

import math

import torch
import torch.distributed as dist

from pipeline.checkpoints.slots import MASTER
from pipeline.models.position_similarity import levels, similarities
from pipeline.ranks.world import World
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.gpu_streams import ReadBack, Streams, read_back

POSITION = "embed.position"  # the table of learned 1-D position embeddings; no other kind has a picture


class PositionView:
    """Of an engine's model, after each step whose number is a multiple of the job's interval, and after its last."""

    def __init__(self, job: TrainingJob, engine: Engine, world: World, streams: Streams) -> None:
        self.engine, self.world, self.streams = engine, world, streams
        self._every = job.similarity_every_steps if POSITION in engine.shapes else 0
        self._num_steps, self._model = job.steps, job.model

    def is_due(self, step: int) -> bool:
        """Whether step `step`, from 1 on, has a picture."""
        return self._every > 0 and (step % self._every == 0 or step == self._num_steps)

    def launched(self) -> ReadBack | None:
        """Launches it for the weights as they are now. Rank 0 gets `levels` of [T, U, H, W] similarities, on their way
        to the host; others get None. Nothing waits for them here. Collective."""
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
