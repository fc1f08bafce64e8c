"""The peers, used as in their documentation, each with its usual decoder (Pillow and torchvision's transforms) or with
our view of an image, so that only the loaders are compared.

All of them shuffle, use two workers by default, and return uint8 batches. They need not be installed if they are not
measured.
"""

import io
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.loader_ours import v2_view, view_of
from benchmarks.loader_prepare import ENERGON, FOLDERS, LITDATA, MOSAICML, PARQUET, WEBDATASET, parquet_files
from benchmarks.loader_settings import MIN_AREA, Settings
from benchmarks.torchvision_operators import import_torchvision

Batches = Iterator[tuple[Any, Any]]
Transform = Callable[[bytes], Any]  # an image's bytes -> uint8 tensor


def webdataset(settings: Settings, *, ours: bool = False) -> Callable[[], Batches]:
    """WebDataset over tars, with batches made in the workers."""
    import webdataset as wds  # noqa: PLC0415

    transform = _transform(settings, ours=ours)
    tars = sorted(str(path) for path in Path(settings.work, WEBDATASET).glob("*.tar"))

    def batches() -> Batches:
        dataset = (
            wds.WebDataset(tars, shardshuffle=len(tars))
            .shuffle(settings.reach)
            .to_tuple("jpg", "cls")
            .map_tuple(transform, int)
            .batched(settings.batch)
        )
        yield from wds.WebLoader(dataset, batch_size=None, num_workers=settings.workers)

    return batches


def energon(settings: Settings, *, ours: bool = False) -> Callable[[], Batches]:
    """Megatron Energon over indexed tars, with the loader whose state can be saved and restored exactly.

    `restore_seeds` seeds the transform of each sample, so that a restored run draws the same crops.
    """
    transform = _transform(settings, ours=ours)
    from megatron import energon as lib  # noqa: PLC0415

    class Encoder(lib.DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None  # samples are handed over as bytes

        @lib.stateless(restore_seeds=True)  # type: ignore[untyped-decorator]
        def encode_sample(self, sample: Any) -> Any:
            image, label = transform(sample.image), int(sample.label)
            return lib.ImageClassificationSample.derive_from(sample, image=image, label=label)

    def batches() -> Batches:
        dataset = lib.get_train_dataset(
            f"{settings.work}/{ENERGON}",
            batch_size=settings.batch,
            shuffle_buffer_size=settings.reach,
            max_samples_per_sequence=100,  # as in its quick start
            repeat=False,
            task_encoder=Encoder(),
            worker_config=lib.WorkerConfig(rank=0, world_size=1, num_workers=settings.workers),
        )
        for batch in lib.get_savable_loader(dataset):
            yield batch.image, batch.label

    return batches


def huggingface(settings: Settings, *, streaming: bool = False, ours: bool = False) -> Callable[[], Batches]:
    """Hugging Face's datasets over Parquet with embedded images.

    It maps its Arrow copy of the files into memory, which preparation made, and shuffles all images. `streaming`: it
    reads the Parquet files instead, and shuffles a buffer of images.
    """
    transform = _transform(settings, ours=ours)
    import datasets  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    def collate(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
        images = torch.stack([transform(row["image"]["bytes"]) for row in rows])
        return images, torch.tensor([row["label"] for row in rows])

    def batches() -> Batches:
        images = parquet_files(f"{settings.work}/{PARQUET}", streaming=streaming)
        images = images.cast_column("image", datasets.Image(decode=False))
        if streaming:
            images = images.shuffle(seed=0, buffer_size=settings.reach)
        yield from DataLoader(
            images,
            batch_size=settings.batch,
            shuffle=None if streaming else True,
            num_workers=settings.workers,
            collate_fn=collate,
        )

    return batches


def mosaicml(settings: Settings, *, ours: bool = False) -> Callable[[], Batches]:
    """StreamingDataset from a local folder, with its own shuffle."""
    transform = _transform(settings, ours=ours)
    from streaming import StreamingDataset  # noqa: PLC0415
    from streaming.base.util import clean_stale_shared_memory  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    clean_stale_shared_memory()  # left by a run that was killed

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> tuple[Any, int]:
            sample = super().__getitem__(at)
            return transform(sample["image"]), sample["label"]

    def batches() -> Batches:
        dataset = Images(local=f"{settings.work}/{MOSAICML}", shuffle=True, batch_size=settings.batch)
        yield from DataLoader(dataset, batch_size=settings.batch, num_workers=settings.workers)

    return batches


def litdata(settings: Settings, *, ours: bool = False) -> Callable[[], Batches]:
    """StreamingDataset from a local folder."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    transform = _transform(settings, ours=ours)
    import litdata as lit  # noqa: PLC0415

    class Images(lit.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Any, int]:
            sample = super().__getitem__(index)
            return transform(sample["image"]), sample["label"]

    def batches() -> Batches:
        dataset = Images(f"{settings.work}/{LITDATA}", shuffle=True)
        yield from lit.StreamingDataLoader(dataset, batch_size=settings.batch, num_workers=settings.workers)

    return batches


def imagefolder(
    settings: Settings, *, ours: bool = False, v2: Literal["", "Pillow", "simplejpeg"] = ""
) -> Callable[[], Batches]:
    """torchvision's ImageFolder with a DataLoader that shuffles. `v2`: with the transform that the arms of our hook
    have, after this decoder."""
    transform = _v2_transform(settings, decoder=v2) if v2 else _transform(settings, ours=ours)
    from torch.utils.data import DataLoader  # noqa: PLC0415

    folders = import_module("torchvision.datasets")

    def batches() -> Batches:
        dataset = folders.ImageFolder(f"{settings.work}/{FOLDERS}", loader=_read, transform=transform)
        yield from DataLoader(dataset, batch_size=settings.batch, shuffle=True, num_workers=settings.workers)

    return batches


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - the fastest way
        return file.read()


def _transform(settings: Settings, *, ours: bool) -> Transform:
    declared = import_torchvision()  # before anything imports torchvision
    return _our_view(settings, declared) if ours else _pillow_view(settings, declared)


def _pillow_view(settings: Settings, declared: object) -> Transform:
    from PIL import Image  # noqa: PLC0415

    transforms = import_module("torchvision.transforms")
    steps = transforms.Compose(
        [
            transforms.RandomResizedCrop(settings.image_size, scale=(MIN_AREA, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )

    def transform(data: bytes, _: object = declared) -> Any:
        with Image.open(io.BytesIO(data)) as image:
            return steps(image.convert("RGB"))

    return transform


def _v2_transform(settings: Settings, *, decoder: Literal["Pillow", "simplejpeg"]) -> Transform:
    import simplejpeg  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    view = v2_view(settings)

    def transform(data: bytes) -> Any:
        if decoder == "simplejpeg":
            return view(simplejpeg.decode_jpeg(data, colorspace="RGB"))
        with Image.open(io.BytesIO(data)) as image:
            return view(image.convert("RGB"))

    return transform


def _our_view(settings: Settings, declared: object) -> Transform:
    import torch  # noqa: PLC0415

    from pipeline.data.augment import draws_of  # noqa: PLC0415

    view, size = view_of(antialias=False), settings.image_size
    num_draws = draws_of(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), seed=0).shape[1]
    drawn: dict[int, Any] = {}  # a generator for each worker: they are forks of one process

    def transform(data: bytes, _: object = declared) -> Any:
        random = drawn.setdefault(os.getpid(), np.random.default_rng(os.getpid()))
        out = np.empty((size, size, 3), dtype=np.uint8)
        view(data, random.random(num_draws), out)
        return torch.from_numpy(out)

    return transform
