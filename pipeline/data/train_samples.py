"""The samples of a stream by number, for a DataLoader whose workers are processes.

A transform that spends its time in Python holds the interpreter lock, so the threads of `train_batches` would run it
one after another. Here, torch's own DataLoader runs it in processes; the order, the crops and the seeds are the
stream's.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.config import DataConfig
from pipeline.data.decode import DecodeError
from pipeline.data.position import StreamPosition
from pipeline.data.quarantine import Quarantine
from pipeline.data.samples import Draws, Hook, Sample, refuse_unrepeatable, sample_draws, seeded, transform_seed, usable
from pipeline.data.training_data import TrainingData
from pipeline.ranks.world import rank_and_size
from shards.dataset import Dataset
from shards.errors import UserError, one_traceback
from shards.order import SampleOrder, repeated, seed_of_repeat
from shards.reading.samples import RawSample, read_sample

_TOGETHER = 64  # entries of a batch whose places in the order are found at once
_TRIED = 4  # samples that a transform is tried with before a stream begins


class TrainSamples(torch.utils.data.Dataset[Any]):
    """The samples of a stream by number; see train_samples in stream.py. `start`: the stream's position before its
    first batch. `opened_by`: what makes the same object in another process."""

    def __init__(
        self,
        data: TrainingData,
        config: DataConfig,
        orders: tuple[SampleOrder, ...],
        *,
        start: StreamPosition,
        num_steps: int,
        hook: Hook,
        quarantine: str | Path = "quarantine.jsonl",
        opened_by: Callable[[], "TrainSamples"] | None = None,
    ) -> None:
        self.config, self.num_steps, self.global_batch = config, num_steps, start.global_batch
        self.classes = data.label_names
        self._data, self._orders, self._start, self._hook = data, orders, start, hook
        self._quarantine = Quarantine(Path(quarantine), max_share=config.max_quarantined)
        self._opened_by = opened_by
        self._mixture = data.mixture(config, seed=start.seed)
        self._last: _Entries | None = None

    def __len__(self) -> int:
        return self.num_steps * self.global_batch

    def __repr__(self) -> str:
        urls = ", ".join(repr(dataset.url) for dataset in self._data.datasets)
        return (
            f"TrainSamples({urls}, {self.num_steps} steps of {self.global_batch} images of {self._start.image_size} px)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker that is not forked opens the data again."""
        if self._opened_by is None:
            raise UserError("only what train_samples returned can be sent to another process")
        return self._opened_by, ()

    @one_traceback()
    def __getitem__(self, place: int) -> Any:
        number = index(place)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self):,}")
        step, entry = divmod(number % len(self), self.global_batch)
        first = entry - entry % _TOGETHER
        known = self._last  # a worker makes the samples of a batch in turn
        if known is None or (known.step, known.first) != (step, first):
            known = self._last = self._entries(step, first)
        at = entry - first
        dataset, draw = int(known.datasets[at]), (int(known.epochs[at]), int(known.repeats[at]))
        sample_id, draws = int(known.sample_ids[at]), known.draws[at]
        source = self._data.datasets[dataset]
        make = partial(self._made, dataset, draws, draw)
        self._quarantine.count(1)
        raw = read_sample(source, sample_id)
        _, item = usable(source, raw, make, seed=self._start.seed, quarantine=self._quarantine)
        return item

    def batch_sampler(
        self, *, first_step: int = 0, rank: int | None = None, num_ranks: int | None = None
    ) -> "BatchNumbers":
        """Returns the numbers of this rank's samples in every batch from `first_step` on, for DataLoader(batch_sampler=
        ...). `rank` and `num_ranks` are as in `train_batches`."""
        rank, num_ranks = rank_and_size(rank, num_ranks)
        if self.global_batch % num_ranks:
            raise UserError(f"global_batch is {self.global_batch}, which {num_ranks} ranks cannot share equally")
        if not 0 <= first_step <= self.num_steps:
            raise UserError(f"first_step is {first_step}; allowed: 0 to {self.num_steps}, the samples' num_steps")
        share = self.global_batch // num_ranks
        steps = range(first_step, self.num_steps)
        return BatchNumbers(steps=steps, global_batch=self.global_batch, first=rank * share, end=(rank + 1) * share)

    def try_hook(self, *, in_processes: bool = False) -> None:
        """Refuses a transform whose results cannot be repeated, in threads or `in_processes`. Calls it for a few
        samples in this thread, so its own errors are raised here. Samples that cannot be used are passed over: the
        stream replaces them."""
        dataset = self._data.datasets[0]
        for number in range(min(_TRIED, dataset.num_samples) if self._hook.transform else 0):
            raw = read_sample(dataset, number)
            if raw.data is not None:
                with suppress(DecodeError):
                    ids = np.array([number], dtype=np.int64)
                    [draws] = sample_draws(ids, np.zeros_like(ids), seed=self._seed(0, 0), config=self.config)
                    if in_processes:
                        make = partial(self._made, 0, draws, (0, 0), dataset, raw)
                        refuse_unrepeatable(make, is_seeded=True)
                        continue
                    fields = self._hook.read_from(dataset, number)
                    sample = partial(self._sample, 0, draws, (0, 0), raw, fields)  # anew each time, with its generator
                    refuse_unrepeatable(lambda: self._hook.made(sample()))  # noqa: B023

    def _entries(self, step: int, first: int) -> "_Entries":
        """Returns what the entries of a step's batch are from `first` on, _TOGETHER of them at most."""
        order = self._orders[0]
        taken = repeated(
            order.positions(step, self.global_batch, 0, 1)[first : first + _TOGETHER],
            step=step,
            batch_size=self.global_batch,
            lanes=order.lanes,
            repeats=self.config.augment.repeats,
        )
        datasets, own = self._mixture.split(taken.positions)
        sample_ids, epochs = np.empty_like(own), np.empty_like(own)
        draws = dict[int, Draws]()
        for number, each in enumerate(self._orders):
            chosen = datasets == number
            sample_ids[chosen], epochs[chosen] = each.at(own[chosen]), own[chosen] // each.num_samples
        for number, repeat in set(zip(datasets.tolist(), taken.numbers.tolist(), strict=True)):
            entries = np.flatnonzero((datasets == number) & (taken.numbers == repeat))
            seed = self._seed(number, repeat)
            found = sample_draws(sample_ids[entries], epochs[entries], seed=seed, config=self.config)
            draws |= zip(entries.tolist(), found, strict=True)
        return _Entries(
            step=step,
            first=first,
            datasets=datasets,
            sample_ids=sample_ids,
            epochs=epochs,
            repeats=taken.numbers,
            draws=draws,
        )

    def _seed(self, dataset: int, repeat: int) -> int:
        """Returns the seed of a dataset's samples in this repeat of theirs."""
        return seed_of_repeat(self._data.seed_of(dataset, self._start.seed), repeat)

    def _made(self, number: int, draws: Draws, draw: tuple[int, int], dataset: Dataset, raw: RawSample) -> Any:
        """Makes an item with the global generators seeded, as only the sole user of a process may."""
        sample = self._sample(number, draws, draw, raw, self._hook.read_from(dataset, raw.sample_id))
        with seeded(sample.seed):
            if self._hook.transform:
                return self._hook.made(sample, is_seeded=True)
            return torch.from_numpy(sample.crop).permute(2, 0, 1).contiguous(), sample.label

    def _sample(
        self, number: int, draws: Draws, draw: tuple[int, int], raw: RawSample, fields: dict[str, Any]
    ) -> Sample:
        """Returns a sample of dataset `number`, which may be a substitute. `draws`: those of the order's sample.
        `draw`: its epoch, and which of its repeats it is."""
        dataset, (epoch, repeat) = self._data.datasets[number], draw
        return Sample(
            raw,
            labels=tuple(self._data.label_maps[number][list(raw.labels)].tolist()),
            fields=fields,
            draws=draws,
            seed=transform_seed(raw.sample_id, epoch, seed=self._seed(number, repeat)),
            image_size=self._start.image_size,
            config=self.config,
            limits=dataset.manifest.limits,
        )


@dataclass(frozen=True, kw_only=True)
class _Entries:
    """Consecutive entries of a step's global batch, from `first` on. `datasets`, `sample_ids`, `epochs`, `repeats`,
    int64[n]: each entry's dataset, its sample there, the epoch, and which of the sample's repeats it is. `draws`: those
    of each entry."""

    step: int
    first: int
    datasets: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    epochs: NDArray[np.int64]
    repeats: NDArray[np.int64]
    draws: dict[int, Draws]


@dataclass(frozen=True, kw_only=True)
class BatchNumbers:
    """The numbers of a rank's samples in each step: entries first..end-1 of every global batch."""

    steps: range
    global_batch: int
    first: int
    end: int

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            begin = step * self.global_batch
            yield list(range(begin + self.first, begin + self.end))
