"""Our loader, and our view of an image for other loaders."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

from benchmarks.loader_prepare import PATCHLINE
from benchmarks.loader_settings import BLOCK, MIN_AREA, Settings
from benchmarks.torchvision_operators import import_torchvision


def ours(
    settings: Settings,
    *,
    antialias: bool = False,
    library: bool = True,
    own_huffman: bool = True,
    shuffles_all: bool = False,
) -> Callable[[], Iterator[tuple[Any, Any]]]:
    """`train_batches` as a user calls it, for exactly one epoch. `library`: uses the crop decoder. `own_huffman`:
    with its own decoder of Huffman codes. `shuffles_all`: the shuffle covers the whole dataset."""
    from pipeline.data import transform  # noqa: PLC0415
    from pipeline.data.config import DataConfig  # noqa: PLC0415
    from pipeline.data.stream import train_batches  # noqa: PLC0415

    config = DataConfig(
        lanes=settings.lanes,
        window_blocks=-(-settings.images // (settings.lanes * BLOCK)) if shuffles_all else settings.window_blocks,
        num_threads=settings.workers,
        huffman_decoder="patchline" if own_huffman else "libjpeg-turbo",
        augment=augment_config(antialias=antialias),
    )

    def batches() -> Iterator[tuple[Any, Any]]:
        url, num_batches = f"{settings.work}/{PATCHLINE}", settings.images // settings.batch
        decoder = transform.crop_decoder if library else lambda: None
        with (
            mock.patch.object(transform, "crop_decoder", decoder),
            train_batches(url, global_batch=settings.batch, image_size=settings.image_size, config=config) as found,
        ):
            for batch in itertools.islice(found, num_batches):
                yield batch.images, batch.labels[:, 0]

    return batches


def hooked(
    settings: Settings, *, uses_crop: bool = False, in_processes: bool = False
) -> Callable[[], Iterator[tuple[Any, Any]]]:
    """`train_batches` with a transform of torchvision v2. `uses_crop`: it changes the colours of our crop instead of
    cropping the whole image itself. `in_processes`: `train_samples` with the worker processes of a DataLoader."""
    augment = v2_view(settings, is_cropped=uses_crop)
    from torch.utils.data import DataLoader  # noqa: PLC0415

    from pipeline.data.config import DataConfig  # noqa: PLC0415
    from pipeline.data.stream import train_batches, train_samples  # noqa: PLC0415

    config = DataConfig(
        lanes=settings.lanes,
        window_blocks=settings.window_blocks,
        num_threads=settings.workers,
        augment=augment_config(antialias=True),  # as torchvision's crop always is
    )

    def transform(sample: Any) -> Any:
        return augment(sample.crop if uses_crop else sample.pixels)

    def transform_with_label(sample: Any) -> Any:
        return transform(sample), sample.label

    url, num_batches, size = f"{settings.work}/{PATCHLINE}", settings.images // settings.batch, settings.image_size

    def from_processes() -> Iterator[tuple[Any, Any]]:
        samples = train_samples(
            url,
            global_batch=settings.batch,
            image_size=size,
            num_steps=num_batches,
            config=config,
            transform=transform_with_label,
        )
        yield from DataLoader(samples, batch_sampler=samples.batch_sampler(), num_workers=settings.workers)

    def batches() -> Iterator[tuple[Any, Any]]:
        with train_batches(
            url, global_batch=settings.batch, image_size=size, config=config, transform=transform
        ) as found:
            for batch in itertools.islice(found, num_batches):
                yield batch.images, batch.labels[:, 0]

    return from_processes if in_processes else batches


def v2_view(settings: Settings, *, is_cropped: bool = False) -> Callable[[Any], Any]:
    """Crop, flip and colour jitter by torchvision v2, from an image of Pillow or an array. `is_cropped`: the jitter
    alone."""
    import_torchvision()
    v2 = import_module("torchvision.transforms.v2")
    cuts = [v2.RandomResizedCrop(settings.image_size, scale=(MIN_AREA, 1.0)), v2.RandomHorizontalFlip()]
    steps = [v2.ToImage(), *([] if is_cropped else cuts), v2.ColorJitter(0.4, 0.4, 0.4), v2.ToPureTensor()]
    view: Callable[[Any], Any] = v2.Compose(steps)
    return view


def augment_config(*, antialias: bool) -> Any:
    """The crop that every arm makes, including flips."""
    from pipeline.data.config import AugmentConfig  # noqa: PLC0415  (an arm loads its own library only)

    return AugmentConfig(crop="random_resized", min_area=MIN_AREA, antialias=antialias)  # as the peers draw it


@dataclass(kw_only=True)
class Image:
    """An encoded image as our view needs it."""

    data: bytes
    height: int
    width: int
    orientation: int = 1


def view_of(*, antialias: bool) -> Callable[[bytes, Any, Any], None]:
    """Fills uint8[size, size, 3] with our view of an image, from its bytes and the draws of its crop.

    Loaders without an index read height and width from the image's header.
    """
    import simplejpeg  # noqa: PLC0415

    from pipeline.data.transform import crop_decoder, train_view, training_plan  # noqa: PLC0415

    config, decoder = augment_config(antialias=antialias), crop_decoder()

    def view(data: bytes, draws: Any, out: Any) -> None:
        height, width = simplejpeg.decode_jpeg_header(data)[:2]
        image = Image(data=data, height=height, width=width)
        plan = training_plan(image, draws, config=config, size=out.shape[0])
        if decoder is None or not decoder.fill(data, plan, out=out):
            train_view(image, draws, config=config, out=out)

    return view
