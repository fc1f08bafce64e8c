"""One training step: the next batch, the forward and backward passes, the sums over ranks, and the update.

A step is launched first and its outcome is read later, so that the host launches the next step without waiting for the
loss. One reduction in float64 carries everything that the ranks agree on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
import torch.distributed as dist

from pipeline.data.batches import COUNT_NAMES, Batch
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.streams import ReadBack, Streams, read_back, streams_of
from pipeline.training.controls import Controls
from pipeline.training.gradients import Gradients
from pipeline.training.reporting.norms import Norms, PositionView
from pipeline.training.reporting.utilisation import OWN_STEP, RankTimes
from pipeline.training.settings.schedule import average_decay, learning_rate
from pipeline.training.watchdog.stopping import StopRequest, WaitGivenUpError
from pipeline.training.zero.device_batches import Batches
from pipeline.training.zero.engine import is_skipped
from shards.errors import InvalidDataError, TransientError, WillNotSucceedError

LOSS, GRAD_NORM, WITHOUT_DATA = "loss", "grad_norm", "data/failed"


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that all ranks have launched. `step`: its number, from 1 on. `rate`: its learning rate. `was_discarded`:
    whether its gradients were discarded. `sums`, and rank 0's `similarity` if it is due, are on their way to the
    host."""

    step: int
    rate: float
    was_discarded: bool
    sums: ReadBack
    similarity: ReadBack | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of a step, the same on every rank except for `similarity`.

    `loss` is the mean over the global batch, `grad_norm` the gradient's norm before clipping, `rate` the learning rate,
    `request` the highest stop request of any rank. `counts`: what all ranks have read, under COUNT_NAMES. `sums`: all
    sums over ranks, by name. `num_without_data`: the number of ranks whose data has failed; unless it is 0, no rank
    made the update. The following fields are empty in steps in which they are not due. `norms`: the norms of gradients
    and parameters by group. `ranks`: the ranks' times as metrics show them. `own_seconds`: each rank's own seconds per
    step. `similarity`: a picture of how similar the position embeddings are after the update, on rank 0 only.
    """

    step: int
    loss: float
    grad_norm: float
    was_skipped: bool
    rate: float
    request: StopRequest
    counts: dict[str, float]
    sums: dict[str, float]
    num_without_data: int = 0
    norms: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, float] = field(default_factory=dict)
    own_seconds: Sequence[float] = ()
    similarity: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class SumSource:
    """Values of this rank that are summed over the ranks in every step. `read` returns one value for each of `names`.
    All ranks have the same names."""

    names: tuple[str, ...]
    read: Callable[[], Mapping[str, float]]


class StepSums:
    """The sums of a step, in a fixed order: the loss, each source's values, and the gradient's norm. The norm is not a
    sum: it is the same on every rank, and is only read back together with the sums. `streams`: the streams to copy on;
    None takes the device's own.

    A step may sum more values, which come last in the same reduction."""

    def __init__(self, sources: Sequence[SumSource], *, device: torch.device, streams: Streams | None = None) -> None:
        self.sources, self.device, self.streams = tuple(sources), device, streams or streams_of(device)
        self.names = (LOSS, *(name for source in sources for name in source.names), GRAD_NORM)
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"two sums have one name: {sorted(self.names)}")

    def reduced(
        self, loss: torch.Tensor, *, row: Sequence[float] = (), more: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the sums over all ranks, float64[names + row + more], on the device. `row`, `more`: further float64
        values of this rank, on the host and on the device. Does not wait for the sums. Collective."""
        values = [0.0]
        for source in self.sources:
            found = source.read()
            values += [float(found[name]) for name in source.names]
        sums = self.streams.pinned(torch.tensor([*values, 0.0, *row], dtype=torch.float64))
        sums = sums.to(self.device, non_blocking=True)
        sums[0] = loss
        if more is not None:
            sums = torch.cat([sums, more])
        dist.all_reduce(sums)
        return sums

    def read_back(self, sums: torch.Tensor, *, grad_norm: torch.Tensor | float) -> ReadBack:
        """Sends the sums and the gradient's norm to the host, without waiting for them."""
        sums[len(self.names) - 1] = grad_norm
        return read_back(sums, self.streams)

    def by_name(self, sums: ReadBack, *, more: Sequence[str] = ()) -> dict[str, float]:
        """Waits for the sums, and returns them by name. `more`: the names of the further values."""
        return dict(zip((*self.names, *more), sums.values(), strict=True))


class TrainStep:
    """Takes batches from a stream and updates the engine with them. `sources`: further values that the ranks sum.
    `discard`: returns whether to leave out the update of a loss; if it is given, the host waits for each loss before
    the update. `norms`, `view`, `rank_times`: what is measured in some steps only. `fault`: why this rank's data has
    failed; None if it has not."""

    def __init__(
        self,
        gradients: Gradients,
        stream: Batches,
        controls: Controls,
        *,
        sources: Sequence[SumSource] = (),
        discard: Callable[[float], bool] | None = None,
        norms: Norms | None = None,
        view: PositionView | None = None,
        rank_times: RankTimes | None = None,
    ) -> None:
        self.gradients, self.stream, self.controls, self.discard = gradients, stream, controls, discard
        self.norms, self.view, self.rank_times = norms, view, rank_times
        self.fault: Exception | None = None
        self._batch: Batch | None = None
        own = (
            SumSource(names=tuple(map(_name_of, StopRequest)), read=self._request),
            SumSource(names=COUNT_NAMES, read=stream.counts),
            SumSource(names=(WITHOUT_DATA,), read=lambda: {WITHOUT_DATA: float(self.fault is not None)}),
        )
        self.step_sums = StepSums((*own, *sources), device=gradients.world.device, streams=stream.streams)

    def next_batch(self) -> Batch:
        """Returns the batch of the next step. Raises WaitGivenUpError if this rank runs alone and is asked to stop
        while it waits.

        Once this rank's data has failed, the previous batch is returned again. The other ranks may have begun the step
        by then, so this rank takes part in it with a loss that is not finite: no rank makes the update, and all learn
        from the sums that data has failed. If there is no previous batch, the fault is raised.
        """
        if self.fault is None:
            self.controls.step_begins(self.stream.typed_position.next_step + 1)
            try:
                with self.controls.waiting("data_wait", "waiting for data"):
                    self._batch = next(self.stream)
                return self._batch
            except WaitGivenUpError:
                raise
            except Exception as error:
                self.fault = error
        if self._batch is None:
            raise self.fault
        self._batch = replace(self._batch, step=self._batch.step + 1)
        return self._batch

    def end_without_data(self) -> NoReturn:
        """Raises the fault of this rank's data. If this rank's data is fine, raises an error of the same family as the
        fault of the first rank whose data failed. Collective."""
        fault = self.fault
        is_final = isinstance(fault, (InvalidDataError, WillNotSucceedError))
        told = {"what": str(fault) or type(fault).__name__, "is_final": is_final} if fault else None
        faults = gather_json(told, device=self.gradients.world.device)
        if fault:
            raise fault
        rank = next(rank for rank, one in enumerate(faults) if one)
        family = WillNotSucceedError if faults[rank]["is_final"] else TransientError
        raise family(f"the data of rank {rank} failed: {faults[rank]['what']}")

    def first_images(self, batch: Batch, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns up to `most` images of a batch as the model gets them, augmented and mixed, and their labels."""
        chosen = slice(0, min(most, self.gradients.plan.micro_batch))
        return self.gradients.inputs(batch, chosen)[0], batch.labels[chosen]

    def launch(self, batch: Batch) -> Launched:
        """Launches one optimiser step on all ranks. Collective."""
        gradients, job = self.gradients, self.gradients.job
        rate = learning_rate(batch.step, config=job.schedule, num_steps=job.steps)
        decay = average_decay(batch.step, ema_decay=job.ema_decay, ema_warmup=job.ema_warmup)
        with self.controls.ledger.time("compute"):
            loss = gradients.accumulate(batch, is_void=self.fault is not None)
            norms, rank_times = self._due_norms(batch.step + 1), self._due_rank_times(batch.step + 1)
            row, more = rank_times.row() if rank_times else (), norms.squares() if norms else None
            with self.controls.times.exchanging():
                sums = self.step_sums.reduced(loss, row=row, more=more)
            is_bad = self.discard is not None and self.discard(float(sums[0]) / gradients.world.num_ranks)
            if self.fault is None:
                self.stream.launched()  # before the update, in which stage 3 makes the host wait
            with self.controls.times.part("optimizer"):
                update = gradients.engine.update(learning_rate=rate, ema_decay=decay, discard=is_bad)
            own = self.step_sums.read_back(sums, grad_norm=update.grad_norm)
            similarity = self.view.launched() if self.view and self.view.is_due(batch.step + 1) else None
        return Launched(
            step=batch.step + 1, rate=rate, was_discarded=update.was_discarded, sums=own, similarity=similarity
        )

    def read(self, launched: Launched) -> StepResult:
        """Waits for the outcome of a launched step, and returns it."""
        with self.controls.ledger.time("compute"):
            norms, rank_times = self._due_norms(launched.step), self._due_rank_times(launched.step)
            more = (*(rank_times.names if rank_times else ()), *(norms.names if norms else ()))
            sums = self.step_sums.by_name(launched.sums, more=more)
        return StepResult(
            step=launched.step,
            loss=self._loss(sums),
            grad_norm=sums[GRAD_NORM],
            was_skipped=is_skipped(sums[GRAD_NORM], was_discarded=launched.was_discarded),
            rate=launched.rate,
            request=max(request for request in StopRequest if sums[_name_of(request)] > 0),
            counts={name: sums[name] for name in COUNT_NAMES},
            sums=sums,
            num_without_data=int(sums[WITHOUT_DATA]),
            norms=norms.values(sums) if norms else {},
            ranks=rank_times.values(sums) if rank_times else {},
            own_seconds=rank_times.of(OWN_STEP, sums) if rank_times else (),
            similarity=launched.similarity.arrived() if launched.similarity else None,
        )

    def _due_norms(self, step: int) -> Norms | None:
        return self.norms if self.norms and self.norms.is_due(step) else None

    def _due_rank_times(self, step: int) -> RankTimes | None:
        return self.rank_times if self.rank_times and self.rank_times.is_due(step) else None

    def _loss(self, sums: Mapping[str, float]) -> float:
        return sums[LOSS] / self.gradients.world.num_ranks

    def _request(self) -> dict[str, float]:
        own = self.controls.request()
        return {_name_of(request): float(own == request) for request in StopRequest}


def _name_of(request: StopRequest) -> str:
    return f"request/{request.name.lower()}"
