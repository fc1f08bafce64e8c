"""Training batches for any PyTorch loop: the same order on any number of ranks, and a position to resume from."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, NoReturn, Self, cast
from weakref import finalize

from torch.utils.data import IterableDataset, get_worker_info

from pipeline.data.batches import Batch, TrainBatches
from pipeline.data.config import DataConfig, Share, refuse_wrong_sizes
from pipeline.data.position import Sizes, Skipped, StreamPosition, differences_of, position_from_json, said_differences
from pipeline.data.quarantine import Quarantine
from pipeline.data.samples import Collate, Hook, Transform
from pipeline.data.train_samples import TrainSamples
from pipeline.data.training_data import TrainingData, check_memory, open_training_data, position_of
from pipeline.ranks.world import rank_and_size
from shards.config_values import as_lines, shown_value
from shards.errors import UserError, one_traceback
from shards.host_copy import LocalRanks
from shards.order import SampleOrder
from shards.reading.members import refuse_no_fields

log = logging.getLogger(__name__)
_NEXT_STEP = "next_step"


@dataclass(frozen=True, kw_only=True)
class PlannedStream:
    """A checked stream: its datasets are open, its orders are computed, and its memory is within the limit. Nothing has
    been read ahead yet.

    `start`: the position before the first batch. `most_read_ahead_bytes`: the most bytes that all ranks on this host
    read ahead. `sizes`: the image sizes of the first steps, if they differ from the position's.
    """

    config: DataConfig
    data: TrainingData
    orders: tuple[SampleOrder, ...]
    share: Share
    start: StreamPosition
    most_read_ahead_bytes: int
    sizes: Sizes = ()


def plan_stream(
    config: DataConfig,
    *,
    seed: int,
    image_size: int,
    share: Share,
    num_cores: int,
    num_local_ranks: int = 1,
    ranks: LocalRanks | None = None,
    with_members: bool = False,
) -> PlannedStream:
    """Opens the data and plans a stream of it. Raises UserError if the data or the settings do not allow that.
    `num_cores`: the number of this rank's cores, and of its decoding threads unless the configuration sets that.
    `num_local_ranks`: the number of ranks on this host. `ranks`: the ranks on this host, if they open the same data at
    the same time. `with_members`: whether the other members of the samples are read, too."""
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
        with_members=with_members,
    )
    return PlannedStream(
        config=config,
        data=data,
        orders=orders,
        share=share,
        start=position_of(data, config, seed=seed, global_batch=share.global_batch, image_size=image_size),
        most_read_ahead_bytes=most_read_ahead_bytes,
    )


class BatchStream(IterableDataset[Batch]):
    """An endless stream of a rank's batches. If a loop over it is left, another loop continues with the next batch.

    `state_dict` and `load_state_dict` are what torchdata's StatefulDataLoader and Accelerate call. A DataLoader takes
    the stream with batch_size=None and without workers, since it has threads of its own.
    `start`: the position of the first batch. `is_collected`: whether garbage collection closes the stream.
    """

    def __init__(
        self,
        planned: PlannedStream,
        start: StreamPosition,
        *,
        quarantine: Path,
        pin_memory: bool = False,
        hook: Hook | None = None,
        is_collected: bool = False,
    ) -> None:
        self._planned, self._position, self._is_collected = planned, start, is_collected
        self._hook = hook or Hook()
        self._quarantine = Quarantine(quarantine, max_share=planned.config.max_quarantined)
        self._pin_memory = pin_memory
        self._open()

    def _open(self) -> None:
        """Makes the source of the batches, which reads nothing before the first is requested."""
        planned = self._planned
        self._source = TrainBatches(
            planned.data,
            planned.config,
            orders=planned.orders,
            seed=planned.start.seed,
            image_size=planned.start.image_size,
            sizes=planned.sizes,
            share=planned.share,
            quarantine=self._quarantine,
            pin_memory=self._pin_memory,
            hook=self._hook,
        )
        self._batches = self._source(self._position.next_step, skipped=self._position.skipped)
        self._closes = finalize(self, self._source.close) if self._is_collected else self._source.close

    @property
    def typed_position(self) -> StreamPosition:
        """The position after the last batch taken: where the next batch begins, and everything that determines it."""
        return self._position

    @property
    def position(self) -> dict[str, Any]:
        """The position as plain values, which JSON and torch.save can store and `train_batches` accepts."""
        return self._position.to_json()

    def state_dict(self) -> dict[str, Any]:
        """Returns `position`."""
        return self.position

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues after the last batch of the stream that returned this state. Raises UserError if that was a stream
        of other data or settings."""
        allow = self._planned.config.allow_other_decoder
        position = _continued(state_dict, self._planned.start, allow_other_decoder=allow)
        self._closes()  # a finalizer that was called is forgotten, and with it the old source
        self._position = position
        self._open()

    def __repr__(self) -> str:
        share, start = self._planned.share, self._planned.start
        urls = ", ".join(repr(dataset.url) for dataset in self._planned.data.datasets)
        of_ranks = f", rank {share.rank} of {share.num_ranks}" if share.num_ranks > 1 else ""
        images = f"{share.global_batch} images of {start.image_size} px"
        return f"BatchStream({urls}, next step {self._position.next_step}, {images}{of_ranks})"

    @property
    def is_ready(self) -> bool:
        """Whether a request for the next batch would neither wait nor fail."""
        return self._source.is_ready

    def counts(self) -> dict[str, float]:
        """Returns what this stream has read, retried and replaced so far, by the names in
        pipeline.data.batches.COUNT_NAMES."""
        return self._source.counts()

    def __iter__(self) -> Self:
        if get_worker_info() is not None:
            raise _of_workers()
        return self

    def __next__(self) -> Batch:
        """Returns the next batch, or what `collate` made of it. Raises a single error if the batch cannot be read."""
        with one_traceback():
            batch = next(self._batches, None)
        if batch is None:  # the stream was closed or has failed: do not end the loop silently
            raise UserError(
                f"this stream of batches ended before step {self._position.next_step}: its `with` block was left, or "
                "reading failed; open another with train_batches(..., position=batches.position)"
            )
        self._position = self._position.at(batch.step + 1)
        return cast("Batch", batch.images) if self._hook.collate else batch

    def __reduce__(self) -> NoReturn:
        raise _of_workers()

    def end(self) -> None:
        """Refuses requests for further batches from now on."""
        self._batches = iter(())

    def close(self) -> None:
        """Ends the stream, its threads and its reads. Leaving a `with` block and garbage collection do the same."""
        self.end()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_workers() -> UserError:
    return UserError(
        "a stream of train_batches cannot be sent to another process, because it reads ahead in threads of its own; "
        "give the DataLoader num_workers=0, or take train_samples(...), which is made for workers"
    )


def open_stream(
    planned: PlannedStream, *, next_step: int, quarantine: Path, skipped: Skipped = (), pin_memory: bool = False
) -> BatchStream:
    """Returns the batches of a planned stream from `next_step` on, without the skipped data steps. Close the stream, or
    use it in a `with` block."""
    start = planned.start.at(next_step, skipped=skipped)
    return BatchStream(planned, start, quarantine=quarantine, pin_memory=pin_memory)


@one_traceback()
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
    fields: Sequence[str] | Mapping[str, Any] = (),
    transform: Transform | None = None,
    collate: Collate | None = None,
) -> BatchStream:
    """Returns an endless stream of this rank's part of every batch of the dataset at `url`, a folder or
    s3://bucket/prefix.

        with patchline.train_batches("data/digits", global_batch=64, image_size=32) as batches:
            for batch in batches:
                batch.step, batch.images, batch.labels  # uint8[64, 32, 32, 3]; int64[64, labels], padded with -1

    The `with` block closes the stream when it is left. Without one, the stream is closed by garbage collection.

    global_batch    images in a batch, over all ranks; a multiple of `num_ranks`
    image_size      height and width of the images, in pixels; with `transform`, those of Sample.crop
    seed            draws the order and the crops; equal seeds and settings give equal batches
    rank, num_ranks this process's rank and the number of processes; None: from torch.distributed if it is initialised,
                    else as torchrun, srun or mpirun set them in the environment, else 0 and 1
    position        another stream's `.position`, to continue after its last batch with any number of ranks
    config          how to shuffle, read and augment; None: the defaults. 64 lanes, the default, mean gcd(global_batch,
                    64); a num_threads of 0 means all cores of this process; memory_limit_bytes applies to this rank
                    alone
    quarantine      the file that lists replaced samples, created with the first of them
    pin_memory      whether to pin the buffers, so that a GPU can copy from them asynchronously; the copy must end
                    before two more batches have been requested
    fields          other members of the samples, by suffix, such as ("txt", "json", "npy"); batch.fields["txt"] is a
                    list of texts. A mapping gives values for samples without the member: {"txt": ""}
    transform       called with each Sample in a decoding thread, instead of making the view; batch.images is what
                    torch's default_collate makes of the results. It must draw only from sample.rng, or from torch on
                    the CPU; it is tried with a few samples when the stream is opened
    collate         called with the list of a batch's results; the stream then yields what it returns

    Raises UserError for arguments that are wrong or contradict each other, before anything is read ahead. The `url` may
    be in `config` instead. Decoding threads share the interpreter lock: a transform that spends its time in Python is
    faster in worker processes (`train_samples`).
    """
    refuse_wrong_sizes(
        global_batch=global_batch, image_size=image_size, num_ranks=1 if num_ranks is None else num_ranks
    )
    _refuse_unequal_shares(global_batch, num_ranks=max(1, num_ranks or 1))
    rank, num_ranks = rank_and_size(rank, num_ranks)
    _refuse_unequal_shares(global_batch, num_ranks=num_ranks)
    global_batch, image_size, seed = map(index, (global_batch, image_size, seed))  # accepts NumPy's integers, too
    hook = Hook(fields=fields, transform=transform, collate=collate)
    if transform and pin_memory:
        raise UserError("pin_memory pins the buffers of views, which a transform replaces; pin what collate returns")
    config = _loop_config(config, url=url, global_batch=global_batch)
    share = Share(global_batch=global_batch, rank=rank, num_ranks=num_ranks)
    if num_ranks > config.lanes and rank == 0:
        log.warning(
            "%d ranks share %d lanes, so several ranks read the same bytes; DataConfig(lanes=%d) prevents that, from "
            "the first batch on",
            *(num_ranks, config.lanes, num_ranks),
        )
    cores = len(os.sched_getaffinity(0))
    planned = plan_stream(
        config, seed=seed, image_size=image_size, share=share, num_cores=cores, with_members=bool(hook.fields)
    )
    at = planned.start
    if position is not None:
        at = _continued(position, planned.start, allow_other_decoder=config.allow_other_decoder)
    for dataset in planned.data.datasets:
        refuse_no_fields(dataset, hook.fields)
    TrainSamples(
        planned.data, planned.config, planned.orders, start=planned.start, num_steps=1, hook=hook, quarantine=quarantine
    ).try_hook()
    return BatchStream(planned, at, quarantine=Path(quarantine), pin_memory=pin_memory, hook=hook, is_collected=True)


@one_traceback()
def train_samples(
    url: str = "",
    *,
    global_batch: int,
    num_steps: int,
    image_size: int = 224,
    seed: int = 0,
    config: DataConfig | None = None,
    quarantine: str | Path = "quarantine.jsonl",
    fields: Sequence[str] | Mapping[str, Any] = (),
    transform: Transform | None = None,
) -> TrainSamples:
    """Returns the samples of `num_steps` batches of `train_batches`, by number, for a DataLoader with workers.

        samples = patchline.train_samples("data/digits", global_batch=64, num_steps=1000, transform=transform)
        loader = DataLoader(samples, batch_sampler=samples.batch_sampler(first_step=0), num_workers=8)

    Number i is entry i % global_batch of step i // global_batch, so the loader gives the batches of the stream with the
    same arguments, in its order, and `first_step` is all that is needed to resume. An item is what `transform` returns
    for a Sample; without one, it is (uint8[3, image_size, image_size], label), with label -1 for none. While it runs,
    the global generators of Python, NumPy and torch are seeded with sample.seed, and so an item depends only on its
    number and the arguments. The arguments are those of `train_batches`; UserError is raised as there.

    Each sample is read with a separate request, or two with `fields`. From S3, that needs more workers than
    `train_batches` needs threads. Each worker counts the samples that it replaces by itself.
    """
    refuse_wrong_sizes(global_batch=global_batch, num_steps=num_steps, image_size=image_size)
    global_batch, num_steps, image_size, seed = map(index, (global_batch, num_steps, image_size, seed))
    config = _loop_config(config, url=url, global_batch=global_batch)
    data = open_training_data(config)
    start = position_of(data, config, seed=seed, global_batch=global_batch, image_size=image_size)
    hook = Hook(fields=fields, transform=transform)
    if fields and not transform:
        raise UserError(
            "fields is given without transform, which takes them from sample.fields; give one, or leave fields out"
        )
    for dataset in data.datasets:
        refuse_no_fields(dataset, hook.fields)
    again = partial(
        train_samples,
        global_batch=global_batch,
        num_steps=num_steps,
        image_size=image_size,
        seed=seed,
        config=config,
        quarantine=quarantine,
        fields=fields,
        transform=transform,
    )
    samples = TrainSamples(
        data,
        config,
        data.orders(config, seed=seed),
        start=start,
        num_steps=num_steps,
        hook=hook,
        quarantine=quarantine,
        opened_by=again,
    )
    samples.try_hook(in_processes=True)
    return samples


def _refuse_unequal_shares(global_batch: int, *, num_ranks: int) -> None:
    if global_batch % num_ranks:
        raise UserError(
            f"global_batch is {global_batch}, which {num_ranks} ranks cannot share equally; "
            f"allowed: multiples of num_ranks, for example {global_batch + -global_batch % num_ranks}"
        )


def _loop_config(config: DataConfig | None, *, url: str, global_batch: int) -> DataConfig:
    """Returns the configuration with the URL and the lanes filled in. Raises UserError if it mixes images, or if the
    lanes do not divide the batch."""
    config = config or DataConfig()
    if config.mixup.is_on:
        raise UserError(
            f"config.mixup.alpha is {config.mixup.alpha} and cutmix_alpha {config.mixup.cutmix_alpha}, but batches are "
            "handed out unmixed: mix them on your device with mix_weights, mix_images and mix_targets of "
            "patchline (CutMix: draw_mix and the Mix that it returns), and leave both at 0 here"
        )
    fitting = math.gcd(global_batch, DataConfig.lanes)
    lanes = fitting if config.lanes == DataConfig.lanes else config.lanes  # the default is taken as unset
    if global_batch % lanes:
        raise UserError(
            f"global_batch is {global_batch} and config.lanes {lanes}, but a batch takes equally many samples "
            f"of each lane; allowed: lanes that divide global_batch, for example DataConfig(lanes={fitting})"
        )
    return replace(config, url=url or config.url, lanes=lanes)


def _continued(position: Mapping[str, Any], start: StreamPosition, *, allow_other_decoder: bool) -> StreamPosition:
    """Returns the stored position. Raises UserError if it is not a position, or belongs to other data or settings."""
    advice = "give a stream's whole `position`, or None to begin"
    if not isinstance(position, Mapping):
        raise UserError(f"the position is {shown_value(position)}, which is no mapping; {advice}")
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
