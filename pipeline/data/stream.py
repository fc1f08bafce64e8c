"""Training batches for anybody's PyTorch loop: exact order on any number of ranks, and a position that is a dict."""

import copy
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.data.batches import Batch, TrainBatches
from pipeline.data.config import DataConfig, Share
from pipeline.data.quarantine import Quarantine
from pipeline.data.training_data import changes, check_memory, data_state, open_training_data
from shards.differences import as_lines
from shards.errors import UserError

_MOST_LANES = 64
_NEXT_STEP = "next_step"


class BatchStream:
    """A rank's batches, for ever. Leave the loop and begin another one on it: that goes on with the next batch."""

    def __init__(self, source: TrainBatches, *, state: dict[str, Any], next_step: int) -> None:
        self._source, self._state, self._next_step = source, state, next_step
        self._batches = source(next_step)

    @property
    def position(self) -> dict[str, Any]:
        """Where the batch after the last one taken begins, and all that fixes which batch that is: plain values."""
        return {_NEXT_STEP: self._next_step, **copy.deepcopy(self._state)}

    def counts(self) -> dict[str, float]:
        """What this stream read, retried and replaced so far, by name of pipeline.data.batches.COUNT_NAMES."""
        return self._source.counts()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches, None)
        if batch is None:  # it is endless, so it was closed or has failed: ending the loop in silence would be wrong
            raise UserError(
                f"this stream of batches ended before step {self._next_step}: its `with` block was left, or reading "
                "failed; open another with train_batches(..., position=batches.position)"
            )
        self._next_step = batch.step + 1
        return batch

    def end(self) -> None:
        """No batch follows: asking for one is refused."""
        self._batches = iter(())


@contextmanager
def train_batches(
    url: str = "",
    *,
    global_batch: int,
    image_size: int = 224,
    seed: int = 0,
    rank: int = 0,
    num_ranks: int = 1,
    position: Mapping[str, Any] | None = None,
    config: DataConfig | None = None,
    quarantine: str | Path = "quarantine.jsonl",
    pin_memory: bool = False,
) -> Iterator[BatchStream]:
    """This rank's part of every global batch of the dataset at `url`, a folder or s3://bucket/prefix ("": config's).

    `position`: another stream's `position`, to go on after the last batch that it gave, on any number of ranks and
    threads; None: from the start. `config`: how to shuffle, read and augment; None: the defaults, with as many lanes
    (at most 64) as divide the global batch. Its num_threads 0 means all cores that this process may use, and its
    memory_limit_bytes holds for this rank. `quarantine`: the file that lists samples which had to be replaced, made
    when the first one is. `pin_memory`: buffers from which a GPU copies by itself; such a copy must be over
    before the next batch but one is asked for. Raises UserError for what does not fit, before anything is read ahead.
    """
    _check_sizes(global_batch=global_batch, image_size=image_size, rank=rank, num_ranks=num_ranks)
    config = _resolved(config, url=url, global_batch=global_batch)
    data = open_training_data(config)
    state = data_state(data, config, seed=seed, global_batch=global_batch) | {"image_size": image_size}
    next_step = 0 if position is None else _step_of(position, state, allow_other_decoder=config.allow_other_decoder)
    orders = data.orders(config, seed=seed)
    check_memory(data, config, orders, global_batch=global_batch, num_ranks=num_ranks, num_local_ranks=1)
    batches = TrainBatches(
        data,
        config,
        seed=seed,
        image_size=image_size,
        share=Share(global_batch=global_batch, rank=rank, num_ranks=num_ranks),
        quarantine=Quarantine(Path(quarantine), max_share=config.max_quarantined),
        pin_memory=pin_memory,
    )
    stream = BatchStream(batches, state=state, next_step=next_step)
    try:
        yield stream
    finally:
        stream.end()
        batches.close()


def _check_sizes(*, global_batch: int, image_size: int, rank: int, num_ranks: int) -> None:
    for name, value in (("global_batch", global_batch), ("image_size", image_size), ("num_ranks", num_ranks)):
        if value < 1:
            raise UserError(f"{name} is {value}; allowed is 1 or more")
    if not 0 <= rank < num_ranks:
        raise UserError(f"rank is {rank}; allowed is 0 to {num_ranks - 1}, since num_ranks is {num_ranks}")
    if global_batch % num_ranks:
        raise UserError(
            f"global_batch is {global_batch}, of which {num_ranks} ranks cannot take equal parts; "
            f"allowed are multiples of num_ranks, for example {global_batch + -global_batch % num_ranks}"
        )


def _resolved(config: DataConfig | None, *, url: str, global_batch: int) -> DataConfig:
    """The configuration with nothing left to be chosen."""
    fitting = math.gcd(global_batch, _MOST_LANES)
    config = DataConfig(lanes=fitting) if config is None else config
    if config.mixup.alpha:
        raise UserError(
            f"config.mixup.alpha is {config.mixup.alpha}, but batches are handed out unmixed: mix them on your device "
            "with mix_weights, mix_images and mix_targets of pipeline.data, and leave alpha at 0 here"
        )
    if global_batch % config.lanes:
        raise UserError(
            f"global_batch is {global_batch} and config.lanes {config.lanes}, but a batch takes equally many samples "
            f"of each lane; allowed are lanes that divide global_batch, for example DataConfig(lanes={fitting})"
        )
    return replace(config, url=url or config.url, num_threads=config.num_threads or len(os.sched_getaffinity(0)))


def _step_of(position: Mapping[str, Any], state: dict[str, Any], *, allow_other_decoder: bool) -> int:
    """The step that a position stands at. UserError where it is none, or is of other data or settings."""
    step = position.get(_NEXT_STEP)
    if type(step) is not int or step < 0:
        raise UserError(f"the position's {_NEXT_STEP} is {step!r}; give a stream's whole `position`, or None to begin")
    saved = {name: value for name, value in position.items() if name != _NEXT_STEP}
    found = changes(saved, state, allow_other_decoder=allow_other_decoder)
    if found:
        decoder = "" if allow_other_decoder else ", DataConfig(allow_other_decoder=True) where only the decoder differs"
        raise UserError(
            f"the position is of other data or settings:\n{as_lines(found)}\n"
            f"give train_batches and its config what they were{decoder}, or position=None to begin anew"
        )
    return step
