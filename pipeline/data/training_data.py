"""The data of a run: one dataset, or several mixed in exact proportions, with its order, position and memory."""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from pipeline.data.augment import AUGMENT_VERSION
from pipeline.data.config import DataConfig
from pipeline.data.decode import DECODER_VERSION
from pipeline.data.mixup import MIXUP_VERSION
from pipeline.data.position import StreamPosition
from pipeline.data.randaugment import RANDAUGMENT_VERSION
from pipeline.data.transform import crop_decoder
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError
from shards.hashing import DATASETS
from shards.host_copy import LocalRanks
from shards.order import MIXING_VERSION, ORDER_VERSION, Mixture, SampleOrder, quotas
from shards.part import opened_parts, settings_of
from shards.reading.windows import window_bound_bytes

_DECODERS = ("simplejpeg", "opencv-python-headless", "pillow")


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The datasets of a run. `quotas`: how many of every sum(quotas) samples come from each dataset. `held_out`: the
    part that is not trained on."""

    datasets: tuple[Dataset, ...]
    quotas: tuple[int, ...]
    held_out: Dataset | None = None

    @property
    def url(self) -> str:
        """The name of the data in messages: the URLs of its datasets."""
        return " + ".join(dataset.url for dataset in self.datasets)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprint of each whole dataset as packed, even if only a part of it is used."""
        return tuple(dataset.packed_fingerprint for dataset in self.datasets)

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The names of all classes: the first dataset's names, then the names that the others add."""
        return tuple(dict.fromkeys(name for dataset in self.datasets for name in dataset.label_names))

    @property
    def num_classes(self) -> int:
        """The number of classes of all datasets together."""
        return len(self.label_names)

    @cached_property
    def label_maps(self) -> tuple[NDArray[np.int64], ...]:
        """For each dataset, int64[number of its classes]: the number of each of its labels among `label_names`."""
        numbers = {name: number for number, name in enumerate(self.label_names)}
        return tuple(
            np.array([numbers[name] for name in dataset.label_names], dtype=np.int64) for dataset in self.datasets
        )

    @cached_property
    def class_shares(self) -> NDArray[np.float64]:
        """float64[num_classes]: the share of each class among the labels of the mixed datasets. A part of a dataset is
        assumed to have the shares of the whole."""
        shares = np.zeros(self.num_classes)
        for dataset, labels, quota in zip(self.datasets, self.label_maps, self.quotas, strict=True):
            counts = np.array(dataset.label_table.column("num_samples").to_pylist(), dtype=np.float64)
            np.add.at(shares, labels, quota / sum(self.quotas) * counts / max(1.0, counts.sum()))
        return shares

    @property
    def labels_per_image(self) -> float:
        """The mean number of labels of an image of the mixed datasets. A part of a dataset is assumed to have the mean
        of the whole."""
        mean = 0.0
        for dataset, quota in zip(self.datasets, self.quotas, strict=True):
            num_labels = sum(dataset.label_table.column("num_samples").to_pylist())
            mean += quota / sum(self.quotas) * num_labels / max(1, dataset.manifest.num_samples)
        return mean

    @property
    def part_text(self) -> str:
        """A text that says which part of the datasets is trained on; empty if the whole is."""
        packed = sum(dataset.manifest.num_samples for dataset in self.datasets)
        used = sum(dataset.num_samples for dataset in self.datasets)
        held_out = f"; {self.held_out.num_samples:,} are held out" if self.held_out else ""
        return f"training on {used:,} of the {packed:,} samples of {self.url}{held_out}" if used < packed else ""

    def seed_of(self, dataset: int, seed: int) -> int:
        """Returns the seed that shuffles and augments a dataset: the run's own seed for the first dataset, and a
        different one for each of the others."""
        return seed if dataset == 0 else DATASETS.key(seed, dataset)

    def orders(self, config: DataConfig, *, seed: int) -> tuple[SampleOrder, ...]:
        """Returns the order of each dataset. Raises UserError if a dataset is too small for the lanes."""
        found = []
        for number, dataset in enumerate(self.datasets):
            own = self.seed_of(number, seed)
            try:
                order = SampleOrder(
                    dataset.block_sizes,
                    seed=own,
                    lanes=config.lanes,
                    window_blocks=config.window_blocks,
                    of_host=dataset.of_host,
                )
            except ValueError as error:
                raise UserError(f"{dataset.url}: {error}; change --data.lanes or --data.window-blocks") from error
            found.append(order)
        return tuple(found)

    def mixture(self, config: DataConfig, *, seed: int) -> Mixture:
        """Returns the mixture, which says from which dataset each position of the mixed order takes its sample."""
        return Mixture(self.quotas, seed=seed, lanes=config.lanes)


def open_training_data(config: DataConfig, *, ranks: LocalRanks | None = None) -> TrainingData:
    """Opens the datasets that a configuration names, or parts of them. Raises UserError if a dataset is incomplete, if
    a part is empty, or if the weights have no exact quotas. `ranks`: the ranks of this host that open the same data."""
    urls = [url for url, _ in config.mix] or [config.url]
    parts = [opened_parts(open_dataset(url, ranks=ranks), config.subset, config.held_out) for url in urls]
    return TrainingData(
        datasets=tuple(trained for trained, _ in parts),
        quotas=quotas([weight for _, weight in config.mix]) if config.mix else (1,),
        held_out=parts[0][1],
    )


def position_of(
    data: TrainingData, config: DataConfig, *, seed: int, global_batch: int, image_size: int
) -> StreamPosition:
    """Returns the position of a stream of this data before its first batch."""
    fingerprints, subset, held_out = data.fingerprints, config.subset, config.held_out
    is_mix, ops = len(fingerprints) > 1, config.randaugment
    return StreamPosition(
        next_step=0,
        order_version=ORDER_VERSION,
        seed=seed,
        global_batch=global_batch,
        lanes=config.lanes,
        window_blocks=config.window_blocks,
        augment=asdict(config.augment) | {"version": AUGMENT_VERSION},
        decoder=_decoder(config),
        dataset=fingerprints if is_mix else fingerprints[0],
        subset=None if subset.is_whole else settings_of(subset),
        held_out=None if held_out.is_none else settings_of(held_out),
        randaugment=asdict(ops) | {"version": RANDAUGMENT_VERSION} if ops.num_ops else None,
        mixup=asdict(config.mixup) | {"version": MIXUP_VERSION} if config.mixup.is_on else None,
        mix={"version": MIXING_VERSION, "quotas": data.quotas} if is_mix else None,
        label_weights=config.label_weights,
        image_size=image_size,
        data_step=0,
        skipped=(),
    )


def _decoder(config: DataConfig) -> dict[str, int | str]:
    decoder = crop_decoder()
    return {
        "version": DECODER_VERSION,
        **{name: version(name) for name in _DECODERS},
        "libjpeg": decoder.name if decoder else "",
        "huffman": ("libjpeg-turbo" if decoder.leaves_huffman else config.huffman_decoder) if decoder else "",
    }


def check_memory(
    data: TrainingData,
    config: DataConfig,
    orders: tuple[SampleOrder, ...],
    *,
    global_batch: int,
    num_ranks: int,
    num_local_ranks: int,
    with_members: bool = False,
) -> int:
    """Returns the most bytes of samples that the ranks of this host can hold or be reading at a time. Raises UserError
    if that exceeds the limit."""
    a_rank = sum(
        window_bound_bytes(
            replace(dataset.blocks, read_bytes=None) if with_members else dataset.blocks,
            order,
            batch_size=global_batch,
            num_ranks=num_ranks,
            batches_in_use=config.steps_ahead,
        )
        for dataset, order in zip(data.datasets, orders, strict=True)
    )
    bound = a_rank * num_local_ranks
    if bound > config.memory_limit_bytes:
        raise UserError(
            f"reading ahead may hold {bound / 1e9:.1f} GB on this host ({num_local_ranks} ranks here x two windows of "
            f"{config.window_blocks} blocks for each of a rank's lanes, of {config.lanes} in all), above "
            f"--data.memory-limit-bytes = {config.memory_limit_bytes / 1e9:.1f} GB; "
            "lower --data.window-blocks or --data.lanes, or raise the limit"
        )
    return bound
