"""Batches of uint8 images in the planned order, decoded and augmented in threads a few steps ahead."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.augment import AUGMENT_VERSION, AugmentConfig, apply_crop, draw_crop, draws_of
from pipeline.data.decode import DECODER_VERSION, DecodeError, Pixels, decode_rgb
from pipeline.data.quarantine import Quarantine
from shards.dataset import Dataset
from shards.errors import UserError, WillNotSucceedError
from shards.hashing import derive_key
from shards.order import ORDER_VERSION, SampleOrder
from shards.read import RawBatch, RawSample, SampleReader, checked_sample, read_sample

_SUBSTITUTES = 4  # purpose of a key
_MAX_SUBSTITUTES = 20
_DECODERS = ("simplejpeg", "opencv-python-headless", "pillow")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the samples come from and how they are shuffled and read.

    The shuffle reaches over lanes x window_blocks blocks. `num_threads` 0: the rank's share of the machine's cores.
    `max_quarantined`: the share of samples that may be replaced before the run stops. `allow_other_decoder`: continue a
    run although the decoding libraries' versions, and so the pixels, may differ.
    """

    url: str = ""
    lanes: int = 64
    window_blocks: int = 4
    augment: AugmentConfig = AugmentConfig()
    num_threads: int = 0
    steps_ahead: int = 3
    memory_limit_bytes: int = 4_000_000_000
    max_quarantined: float = 0.001
    allow_other_decoder: bool = False

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.window_blocks < 1 or self.steps_ahead < 1 or self.num_threads < 0:
            raise UserError(f"lanes, window_blocks and steps_ahead must be 1 or more, num_threads 0 or more: {self}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's step: images uint8[n, size, size, 3], labels int64[n, most labels] padded with -1, ids int64[n]."""

    step: int
    images: torch.Tensor
    labels: torch.Tensor
    sample_ids: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of each global batch this rank takes."""

    global_batch: int
    rank: int
    num_ranks: int


def sample_order(dataset: Dataset, config: DataConfig, *, seed: int) -> SampleOrder:
    """The order of a dataset under a configuration. UserError where the dataset is too small for the lanes."""
    try:
        return SampleOrder(dataset.block_sizes, seed=seed, lanes=config.lanes, window_blocks=config.window_blocks)
    except ValueError as error:
        raise UserError(f"{dataset.url}: {error}; change --data.lanes or --data.window-blocks") from error


def data_state(dataset: Dataset, config: DataConfig, *, seed: int, global_batch: int) -> dict[str, Any]:
    """Everything that fixes which pixels step n sees; two equal states give equal batches."""
    return {
        "order_version": ORDER_VERSION,
        "seed": seed,
        "global_batch": global_batch,
        "lanes": config.lanes,
        "window_blocks": config.window_blocks,
        "augment": asdict(config.augment) | {"version": AUGMENT_VERSION},
        "decoder": {"version": DECODER_VERSION} | {name: version(name) for name in _DECODERS},
        "dataset": dataset.fingerprint,
    }


def check_memory(
    dataset: Dataset, config: DataConfig, *, global_batch: int, num_ranks: int, num_local_ranks: int
) -> None:
    """Refuses a start whose read-ahead would exceed its budget, with the number."""
    blocks = dataset.blocks
    mean_bytes = float(np.mean(blocks.end_byte - blocks.first_byte))
    lanes_here = min(config.lanes, -(-config.lanes * num_local_ranks // num_ranks) + num_local_ranks - 1)
    window_samples = config.window_blocks * float(np.mean(blocks.num_samples))
    # The window in use and the next one; more in use where a batch takes more than one window of a lane.
    windows = 2 + int((global_batch / config.lanes - 1) // window_samples)
    num_blocks = min(windows * config.window_blocks * lanes_here, 2 * blocks.shard.size)
    if num_blocks * mean_bytes > config.memory_limit_bytes:
        raise UserError(
            f"reading ahead would hold {num_blocks * mean_bytes / 1e9:.1f} GB on this host ({windows} windows x "
            f"{config.window_blocks} blocks x {mean_bytes / 1e6:.1f} MB x {lanes_here} lanes), above "
            f"--data.memory-limit-bytes = {config.memory_limit_bytes / 1e9:.1f} GB; lower --data.window-blocks"
        )


class TrainBatches:
    """Iterates over a rank's batches from `start_step` on, for ever. Close it when done."""

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        *,
        seed: int,
        image_size: int,
        share: Share,
        quarantine: Quarantine,
    ) -> None:
        self.dataset, self.config, self.seed, self.image_size = dataset, config, seed, image_size
        self.quarantine = quarantine
        self.order = sample_order(dataset, config, seed=seed)
        threads = max(1, config.num_threads)
        self._reader = SampleReader(
            dataset,
            self.order,
            batch_size=share.global_batch,
            rank=share.rank,
            num_ranks=share.num_ranks,
            num_threads=max(2, threads),
        )
        self._decoders = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan")  # one: steps are read in rising order

    def __call__(self, start_step: int) -> Iterator[Batch]:
        """Batches of steps start_step, start_step + 1, ..."""
        waiting: deque[Future[Batch]] = deque()
        step = start_step
        while True:
            while len(waiting) < self.config.steps_ahead:
                waiting.append(self._planner.submit(self._make, step))
                step += 1
            yield waiting.popleft().result()

    def close(self) -> None:
        """Stops the threads."""
        self._planner.shutdown(wait=True, cancel_futures=True)
        self._decoders.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def _make(self, step: int) -> Batch:
        raw = self._reader.read(step)
        num = len(raw.samples)
        images = np.empty((num, self.image_size, self.image_size, 3), dtype=np.uint8)
        ids = np.array([sample.sample_id for sample in raw.samples], dtype=np.int64)
        draws = draws_of(ids, raw.epochs, seed=self.seed)
        self.quarantine.count(num)

        def fill(entry: int) -> RawSample:
            sample, pixels = self._decode(raw, entry)
            crop = draw_crop(pixels.shape[0], pixels.shape[1], draws[entry], config=self.config.augment)
            apply_crop(pixels, crop, out=images[entry])
            return sample

        used = list(self._decoders.map(fill, range(num)))
        return Batch(step=step, images=torch.from_numpy(images), labels=label_matrix(used), sample_ids=ids)

    def _decode(self, raw: RawBatch, entry: int) -> tuple[RawSample, Pixels]:
        """The sample's pixels, or those of its substitute: a function of the sample's id alone."""
        sample = raw.samples[entry]
        for attempt in range(_MAX_SUBSTITUTES):
            try:
                if sample.data is not None:
                    return sample, decode_rgb(sample.data, orientation=sample.orientation)
                reason = sample.fault
            except DecodeError as error:
                reason = f"decode: {error}"
            original = raw.samples[entry].sample_id
            substitute = derive_key(self.seed, original, attempt, _SUBSTITUTES) % self.dataset.num_samples
            self.quarantine.replace(sample, reason=reason, substitute=substitute)
            sample = checked_sample(self.dataset, substitute, read_sample(self.dataset, substitute))
        url = self.dataset.url
        raise WillNotSucceedError(
            f"{_MAX_SUBSTITUTES} substitutes in a row could not be used in {url}; run: patchline verify {url} --deep"
        )


def most_labels(samples: list[RawSample]) -> int:
    """The largest number of labels of one sample, at least 1."""
    return max([len(sample.labels) for sample in samples], default=1) or 1


def label_matrix(samples: list[RawSample]) -> torch.Tensor:
    """int64[n, most labels], padded with -1."""
    labels = torch.full((len(samples), most_labels(samples)), -1, dtype=torch.int64)
    for entry, sample in enumerate(samples):
        labels[entry, : len(sample.labels)] = torch.tensor(sample.labels, dtype=torch.int64)
    return labels
