"""Our loader, and our view of an image for other loaders."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks.loader_prepare import PATCHLINE
from benchmarks.loader_settings import BLOCK, MIN_AREA, Settings


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
