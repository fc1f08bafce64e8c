"""Peers that decode in native threads and in one process: NVIDIA DALI on the CPU, FFCV and SPDL.

Each is used as in its own ImageNet example, and makes the crop of the other arms with its own decoder. They need not be
installed if they are not measured.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.loader_prepare import BETON, FOLDERS
from benchmarks.loader_settings import MIN_AREA, Settings
from benchmarks.packing_arms import labelled_files

Batches = Iterator[tuple[Any, Any]]
RATIOS = (3 / 4, 4 / 3)  # narrowest and widest crop: width / height


def dali(settings: Settings, *, antialias: bool = False) -> Callable[[], Batches]:
    """A DALI pipeline without a GPU. It decodes only the crop, as we do, and shuffles as far."""
    from nvidia.dali import fn, pipeline_def, types  # noqa: PLC0415
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy  # noqa: PLC0415

    @pipeline_def(batch_size=settings.batch, num_threads=settings.workers, device_id=None, seed=0)  # type: ignore[untyped-decorator]
    def views() -> tuple[Any, Any]:
        root = f"{settings.work}/{FOLDERS}"
        files, labels = fn.readers.file(file_root=root, random_shuffle=True, initial_fill=settings.reach, name="images")
        crops = fn.decoders.image_random_crop(
            files, output_type=types.RGB, random_area=[MIN_AREA, 1.0], random_aspect_ratio=list(RATIOS)
        )
        resized = fn.resize(crops, size=[settings.image_size] * 2, interp_type=types.INTERP_LINEAR, antialias=antialias)
        return fn.flip(resized, horizontal=fn.random.coin_flip()), labels

    def batches() -> Batches:
        pipeline = views()
        pipeline.build()
        found = DALIGenericIterator(
            pipeline, ["images", "labels"], reader_name="images", last_batch_policy=LastBatchPolicy.DROP
        )
        for (batch,) in found:
            yield batch["images"], batch["labels"]

    return batches


def ffcv(settings: Settings) -> Callable[[], Batches]:
    """FFCV's Loader, which shuffles all samples and decodes whole images. It compiles itself before the first batch."""
    from ffcv.fields import RGBImageField  # noqa: PLC0415
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder  # noqa: PLC0415
    from ffcv.loader import Loader, OrderOption  # noqa: PLC0415
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor  # noqa: PLC0415

    def batches() -> Batches:
        size = (settings.image_size, settings.image_size)
        crop = RandomResizedCropRGBImageDecoder(size, scale=(MIN_AREA, 1.0), ratio=RATIOS)
        yield from Loader(
            f"{settings.work}/{BETON}/images.beton",
            batch_size=settings.batch,
            num_workers=settings.workers,
            order=OrderOption.RANDOM,
            os_cache=True,
            custom_fields={"image": RGBImageField},  # as loader_prepare wrote it
            pipelines={
                "image": [crop, RandomHorizontalFlip(), ToTensor()],
                "label": [IntDecoder(), ToTensor(), Squeeze()],
            },
        )

    return batches


def spdl(settings: Settings) -> Callable[[], Batches]:
    """SPDL's DataLoader: threads that each decode a batch with FFmpeg, whose filters crop, resize and mirror."""
    import spdl.io  # noqa: PLC0415
    from spdl.dataloader import DataLoader  # noqa: PLC0415

    from benchmarks.loader_ours import augment_config  # noqa: PLC0415
    from pipeline.data.augment import draw_crop, draws_of  # noqa: PLC0415

    config, rng = augment_config(antialias=True), np.random.default_rng()
    num_draws = draws_of(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), seed=0).shape[1]

    def frame(path: str, draws: Any) -> Any:
        packets = spdl.io.demux_image(path)
        crop = draw_crop(packets.height, packets.width, draws, config=config)
        filters = (
            f"crop=w={crop.width}:h={crop.height}:x={crop.left}:y={crop.top}:exact=1",
            f"scale=w={settings.image_size}:h={settings.image_size}:flags=bilinear",
            *(["hflip"] if crop.flip else []),
            "format=pix_fmts=rgb24",
        )
        return spdl.io.decode_packets(packets, filter_desc=",".join(filters))

    def decode(items: list[tuple[str, int]]) -> tuple[Any, list[int]]:
        draws = rng.random((len(items), num_draws))
        frames = [frame(path, draw) for (path, _), draw in zip(items, draws, strict=True)]
        buffer = spdl.io.convert_frames(frames)
        return spdl.io.to_torch(buffer), [label for _, label in items]

    def batches() -> Batches:
        files = labelled_files(f"{settings.work}/{FOLDERS}")  # in random order
        yield from DataLoader(
            files, batch_size=settings.batch, drop_last=True, aggregator=decode, num_threads=settings.workers
        )

    return batches
