"""Training batches for any PyTorch loop: the same order on any number of ranks, and a position to resume from."""

import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, Self
from weakref import finalize

from pipeline.data.batches import Batch, TrainBatches
from pipeline.data.config import DataConfig, Share, refuse_wrong_sizes
from pipeline.data.position import Skipped, StreamPosition, differences_of, position_from_json, said_differences
from pipeline.data.quarantine import Quarantine
from pipeline.data.training_data import TrainingData, check_memory, open_training_data, position_of
from pipeline.ranks.world import rank_and_size
from shards.config_values import as_lines
from shards.errors import UserError
from shards.host_copy import LocalRanks
from shards.order import SampleOrder

log = logging.getLogger(__name__)
_MOST_LANES = 64
_NEXT_STEP = "next_step"


@dataclass(frozen=True, kw_only=True)
class PlannedStream:
    """A checked stream: its datasets are open, its orders are computed, and its memory is within the limit. Nothing has
    been read ahead yet.

    `start`: the position before the first batch. `most_read_ahead_bytes`: the most bytes that all ranks on this host
    read ahead.
    """

    config: DataConfig
    data: TrainingData
    orders: tuple[SampleOrder, ...]
    share: Share
    start: StreamPosition
    most_read_ahead_bytes: int


def plan_stream(
    config: DataConfig,
    *,
    seed: int,
    image_size: int,
    share: Share,
    num_cores: int,
    num_local_ranks: int = 1,
    ranks: LocalRanks | None = None,
) -> PlannedStream:
    """Opens the data and plans a stream of it. Raises UserError if the data or the settings do not allow that.
    `num_cores`: the number of this rank's cores, and of its decoding threads unless the configuration sets that.
    `num_local_ranks`: the number of ranks on this host. `ranks`: the ranks on this host, if they open the same data at
    the same time."""
    config = replace(config, num_threads=config.num_threads or num_cores)
    data = open_training_data(config, ranks=ranks)
    orders = data.orders(config, seed=seed)
    most_read_ahead_bytes = check_memory(
        data,
        config,
        orders,
        global_batch=share.global_batch,
        num_ranks=share.num_ranks,
        num_local_ranks=num_local_ranks,
    )
    return PlannedStream(
        config=config,
        data=data,
        orders=orders,
        share=share,
        start=position_of(data, config, seed=seed, global_batch=share.global_batch, image_size=image_size),
        most_read_ahead_bytes=most_read_ahead_bytes,
    )


class BatchStream:
    """An endless stream of a rank's batches. If a loop over it is left, another loop continues with the next batch.
    `source` reads and decodes the batches."""

    def __init__(self, source: TrainBatches, position: StreamPosition) -> None:
        self.source, self._position = source, position
        self._batches = source(position.next_step, skipped=position.skipped)

    @property
    def typed_position(self) -> StreamPosition:
        """The position after the last batch taken: where the next batch begins, and everything that determines it."""
        return self._position

    @property
    def position(self) -> dict[str, Any]:
        """The position as plain values, which JSON and torch.save can store and `train_batches` accepts."""
        return self._position.to_json()

    @property
    def is_ready(self) -> bool:
        """Whether a request for the next batch would neither wait nor fail."""
        return self.source.is_ready

    def counts(self) -> dict[str, float]:
        """Returns what this stream has read, retried and replaced so far, by the names in
        pipeline.data.batches.COUNT_NAMES."""
        return self.source.counts()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches, None)
        if batch is None:  # the stream was closed or has failed: do not end the loop silently
            raise UserError(
                f"this stream of batches ended before step {self._position.next_step}: its `with` block was left, or "
                "reading failed; open another with train_batches(..., position=batches.position)"
            )
        self._position = self._position.at(batch.step + 1)
        return batch

    def end(self) -> None:
        """Refuses requests for further batches from now on."""
        self._batches = iter(())

    def close(self) -> None:
        """Ends the stream, its threads and its reads. Leaving a `with` block and garbage collection do the same."""
        self.end()
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_stream(
    planned: PlannedStream, *, next_step: int, quarantine: Path, skipped: Skipped = (), pin_memory: bool = False
) -> BatchStream:
    """Returns the batches of a planned stream from `next_step` on, without the skipped data steps. Close the stream, or
    use it in a `with` block."""
    config, start = planned.config, planned.start
    batches = TrainBatches(
        planned.data,
        config,
        orders=planned.orders,
        seed=start.seed,
        image_size=start.image_size,
        share=planned.share,
        quarantine=Quarantine(quarantine, max_share=config.max_quarantined),
        pin_memory=pin_memory,
    )
    return BatchStream(batches, start.at(next_step, skipped=skipped))


def train_batches(
    url: str = "",
    *,
    global_batch: int,
    image_size: int = 224,
    seed: int = 0,
    rank: int | None = None,
    num_ranks: int | None = None,
    position: Mapping[str, Any] | None = None,
    config: DataConfig | None = None,
    quarantine: str | Path = "quarantine.jsonl",
    pin_memory: bool = False,
) -> BatchStream:
    """Returns an endless stream of this rank's part of every batch of the dataset at `url`, a folder or
    s3://bucket/prefix.

        with patchline.train_batches("data/digits", global_batch=64, image_size=32) as batches:
            for batch in batches:
                batch.step, batch.images, batch.labels  # uint8[64, 32, 32, 3]; int64[64, labels], padded with -1

    The `with` block closes the stream when it is left. Without one, the stream is closed by garbage collection.

    global_batch    images in a batch, over all ranks; a multiple of `num_ranks`
    image_size      height and width of the images, in pixels
    seed            draws the order and the crops; equal seeds and settings give equal batches
    rank, num_ranks this process's rank and the number of processes; None: from torch.distributed if it is initialised,
                    else as torchrun, srun or mpirun set them in the environment, else 0 and 1
    position        another stream's `.position`, to continue after its last batch with any number of ranks
    config how to shuffle, read and augment; None: the defaults, with gcd(global_batch, 64) lanes. A num_threads of 0
    means all cores of this process, and memory_limit_bytes applies to this rank alone quarantine the file that lists
    replaced samples, created with the first of them pin_memory whether to pin the buffers, so that a GPU can copy from
    them asynchronously; the copy must end
                    before two more batches have been requested

    Raises UserError for arguments that are wrong or contradict each other, before anything is read ahead. The `url` may
    be in `config` instead.
    """
    refuse_wrong_sizes(
        global_batch=global_batch, image_size=image_size, num_ranks=1 if num_ranks is None else num_ranks
    )
    _refuse_unequal_shares(global_batch, num_ranks=max(1, num_ranks or 1))
    rank, num_ranks = rank_and_size(rank, num_ranks)
    _refuse_unequal_shares(global_batch, num_ranks=num_ranks)
    global_batch, image_size, seed = map(index, (global_batch, image_size, seed))  # accepts NumPy's integers, too
    config = _resolved(config, url=url, global_batch=global_batch)
    share = Share(global_batch=global_batch, rank=rank, num_ranks=num_ranks)
    cores = len(os.sched_getaffinity(0))
    planned = plan_stream(config, seed=seed, image_size=image_size, share=share, num_cores=cores)
    at = planned.start
    if position is not None:
        at = _continued(position, planned.start, allow_other_decoder=config.allow_other_decoder)
    stream = open_stream(
        planned, next_step=at.next_step, quarantine=Path(quarantine), skipped=at.skipped, pin_memory=pin_memory
    )
    finalize(stream, stream.source.close)  # `source` must not refer to the stream, or it would never be collected
    return stream


def _refuse_unequal_shares(global_batch: int, *, num_ranks: int) -> None:
    if global_batch % num_ranks:
        raise UserError(
            f"global_batch is {global_batch}, which {num_ranks} ranks cannot share equally; "
            f"allowed: multiples of num_ranks, for example {global_batch + -global_batch % num_ranks}"
        )


def _resolved(config: DataConfig | None, *, url: str, global_batch: int) -> DataConfig:
    """Returns the configuration with the URL and the lanes filled in. Raises UserError if it mixes images, or if the
    lanes do not divide the batch."""
    fitting = math.gcd(global_batch, _MOST_LANES)
    config = DataConfig(lanes=fitting) if config is None else config
    if config.mixup.is_on:
        raise UserError(
            f"config.mixup.alpha is {config.mixup.alpha} and cutmix_alpha {config.mixup.cutmix_alpha}, but batches are "
            "handed out unmixed: mix them on your device with mix_weights, mix_images and mix_targets of "
            "patchline (CutMix: draw_mix and the Mix that it returns), and leave both at 0 here"
        )
    if global_batch % config.lanes:
        raise UserError(
            f"global_batch is {global_batch} and config.lanes {config.lanes}, but a batch takes equally many samples "
            f"of each lane; allowed: lanes that divide global_batch, for example DataConfig(lanes={fitting})"
        )
    return replace(config, url=url or config.url)


def _continued(position: Mapping[str, Any], start: StreamPosition, *, allow_other_decoder: bool) -> StreamPosition:
    """Returns the stored position. Raises UserError if it is not a position, or belongs to other data or settings."""
    advice = "give a stream's whole `position`, or None to begin"
    step = position.get(_NEXT_STEP)
    if type(step) is not int or step < 0:
        raise UserError(f"the position's {_NEXT_STEP} is {step!r}; {advice}")
    found = differences_of(position, start, allow_other_decoder=allow_other_decoder)
    if found:
        decoder = "" if allow_other_decoder else ", DataConfig(allow_other_decoder=True) if only the decoder differs"
        raise UserError(
            f"the position is of other data or settings:\n{as_lines(found)}\n"
            f"give train_batches and its config what they were{decoder}, or position=None to begin again"
        )
    try:
        at = position_from_json(position)
    except ValueError as error:  # an equal value of another type, such as True for 1
        raise UserError(f"the position is not one that a stream returned ({error}); {advice}") from error
    for change in said_differences(position, start):
        log.warning("%s; the pixels are the same", change)
    return at
