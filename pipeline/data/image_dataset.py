"""A packed dataset as a sequence of images, for people and for PyTorch's own DataLoader.

    photos = patchline.open_dataset("data/photos")
    photos[0].image.show(), photos[0].label, len(photos), photos.classes

Each image is read with a separate request. That suits browsing, small evaluations and other libraries' loops. For
training, use `train_batches`: it reads blocks and makes a chunk of a batch in one call, for about half the CPU time.
"""

import logging
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from PIL import Image

from pipeline.data.decode import DecodeError, decode_upright
from pipeline.data.transform import evaluation_view
from pipeline.shared_settings import EvaluationTransform
from shards.class_names import listed
from shards.dataset import Dataset
from shards.dataset import open_dataset as open_packed
from shards.errors import InvalidDataError, UserError, one_traceback
from shards.reading.samples import RawSample, locate_row, read_sample

if TYPE_CHECKING:
    import torch

    from pipeline.data.batches import Batch

log = logging.getLogger(__name__)
_UPRIGHT = EvaluationTransform()
Transform = Callable[[Image.Image], Any]


@dataclass(frozen=True, kw_only=True)
class LabelledImage:
    """One image: its bytes as they were packed, and the ids and names of its classes."""

    data: bytes
    labels: tuple[int, ...]
    names: tuple[str, ...]
    find_source: Callable[[], str]
    pixels: np.ndarray[Any, np.dtype[np.uint8]]
    """uint8[height, width, 3] RGB, upright."""

    @property
    def source(self) -> str:
        """The image's name in the collection that was packed. It is read from the dataset on each access."""
        return self.find_source()

    @property
    def image(self) -> Image.Image:
        """The image, RGB and upright."""
        return Image.fromarray(self.pixels)

    @property
    def label(self) -> int | None:
        """The id of the image's first class; None if it has no class."""
        return self.labels[0] if self.labels else None

    def __repr__(self) -> str:
        height, width = self.pixels.shape[:2]
        return f"LabelledImage({height} x {width} px, {listed(self.names) or 'no class'})"


class ImageDataset(Sequence[LabelledImage]):
    """The images of a packed dataset by number, 0 to len - 1, in the random order in which they were packed. The object
    can be sent to other processes, which open the dataset again."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.url, self.num_samples, self.num_classes = dataset.url, dataset.num_samples, dataset.num_classes

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their ids."""
        return self.dataset.label_names

    def __len__(self) -> int:
        return self.num_samples

    @overload
    def __getitem__(self, place: int) -> LabelledImage: ...

    @overload
    def __getitem__(self, place: slice) -> list[LabelledImage]: ...

    def __getitem__(self, place: int | slice) -> LabelledImage | list[LabelledImage]:
        """Returns an image, or a list of images for a slice. Raises IndexError for a number that is out of range, and
        InvalidDataError for a damaged image."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        sample = self.sample(place)
        try:
            pixels = decode_upright(
                sample.data or b"",
                height=sample.height,
                width=sample.width,
                orientation=sample.orientation,
                limits=self.dataset.manifest.limits,
            )
        except DecodeError as error:
            raise self.damaged(sample, str(error)) from error
        names = tuple(self.classes[label] for label in sample.labels)
        data = bytes(sample.data or b"")
        source = partial(self.dataset.source_of, *locate_row(self.dataset, sample.sample_id))
        return LabelledImage(data=data, labels=sample.labels, names=names, find_source=source, pixels=pixels)

    def __repr__(self) -> str:
        return f"ImageDataset({self.url!r}, {len(self):,} images of {self.num_classes} classes: {listed(self.classes)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return open_dataset, (self.url,)

    def sample(self, place: int) -> RawSample:
        """Returns the bytes and labels of an image. The bytes are checked by their CRC-32. Raises the same errors as
        indexing."""
        number = index(place)
        if not -len(self) <= number < len(self):
            raise IndexError(f"image {number} of {len(self):,} in {self.url}")
        sample = read_sample(self.dataset, number % len(self))
        if sample.data is None:
            raise self.damaged(sample, sample.fault)
        return sample

    def to_torch(
        self,
        *,
        transform: Transform | None = None,
        image_size: int | None = None,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> "TorchImages":
        """Returns a map-style dataset of (image, label) for `torch.utils.data.DataLoader`.

        The label is the id of the first class, or -1 if the image has none. With `transform`, the image is what it
        returns for a Pillow image. With `image_size`, it is uint8[3, image_size, image_size], resized as in `patchline
        evaluate`. With neither, it is uint8[3, height, width]. Raises UserError if both are given. `rank` and
        `num_ranks` select every `num_ranks`-th image, from number `rank` on. If there are several ranks, both must be
        given, or UserError is raised: a plain DataLoader needs a share of the images, but one whose sampler divides
        them needs all.
        """
        from pipeline.ranks.world import known_numbers, rank_and_size  # noqa: PLC0415 - looking at images needs no torch

        if transform and image_size:
            raise UserError("to_torch got transform and image_size; give one of them: a transform resizes by itself")
        if rank is None and num_ranks is None and (known := known_numbers())[1] > 1:
            raise UserError(
                f"to_torch: this is rank {known[0]} of {known[1]} (torch.distributed or the launcher says so), whose "
                "DataLoader may need all images or a share; give rank=0, num_ranks=1 for all of them, if a sampler "
                "divides them (DistributedSampler, accelerator.prepare) or only this rank reads, or "
                f"rank={known[0]}, num_ranks={known[1]} for this rank's share"
            )
        rank, num_ranks = rank_and_size(rank, num_ranks)
        return TorchImages(self, range(rank, len(self), num_ranks), transform=transform, image_size=image_size)

    def evaluation_batches(
        self,
        *,
        batch_size: int,
        image_size: int,
        rank: int | None = None,
        num_ranks: int | None = None,
        transform: EvaluationTransform = _UPRIGHT,
    ) -> "Generator[tuple[Batch, torch.Tensor], None, None]":
        """Returns an iterator over pairs (batch, mask) that hold every image once over all ranks, resized as in
        `patchline evaluate`. Each rank gets the same number of batches of `batch_size` images. `rank` and `num_ranks`
        are as in `train_batches`: by default, several ranks share the images, so sum your counts over the ranks; with
        rank=0, num_ranks=1, this rank gets all images. `mask`, bool[batch_size], is False for the entries of the last
        batches that hold no image. A damaged image ends the evaluation with an error. Raises UserError if a size is
        below 1.
        """
        from pipeline.data.config import Share, refuse_wrong_sizes  # noqa: PLC0415 - as above
        from pipeline.data.evaluation import evaluation_batches  # noqa: PLC0415
        from pipeline.ranks.world import rank_and_size  # noqa: PLC0415

        refuse_wrong_sizes(batch_size=batch_size, image_size=image_size)
        is_told = rank is not None or num_ranks is not None
        rank, num_ranks = rank_and_size(rank, num_ranks)
        if num_ranks > 1 and rank == 0 and not is_told:  # a script that scores on rank 0 alone counts too few
            log.warning(
                "evaluation_batches: the images are shared by %d ranks, so sum what you count over them; "
                "rank=0, num_ranks=1 gives one rank all of them, rank= and num_ranks= also end this message",
                num_ranks,
            )
        return evaluation_batches(
            self.dataset,
            batch_size=batch_size,
            image_size=image_size,
            transform=transform,
            share=Share(global_batch=batch_size * num_ranks, rank=rank, num_ranks=num_ranks),
            threads=len(os.sched_getaffinity(0)),
        )

    def damaged(self, sample: RawSample, why: str) -> InvalidDataError:
        return InvalidDataError(f"image {sample.sample_id} of {self.url} cannot be used: {why}")


class TorchImages:
    """Pairs of (image, label) by number, for all or some images of a dataset; see ImageDataset.to_torch."""

    def __init__(
        self, images: ImageDataset, numbers: range, *, transform: Transform | None, image_size: int | None
    ) -> None:
        self.images, self.numbers, self.transform, self.image_size = images, numbers, transform, image_size
        self.classes = images.classes

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        import torch  # noqa: PLC0415 - looking at images needs no torch

        number = index(place)
        if not -len(self) <= number < len(self):
            raise IndexError(f"image {number} of {len(self):,} in {self.images.url}")
        number = self.numbers[number]
        if self.image_size:
            sample = self.images.sample(number)
            view = np.empty((self.image_size, self.image_size, 3), np.uint8)
            try:
                evaluation_view(sample, _UPRIGHT, out=view, limits=self.images.dataset.manifest.limits)
            except DecodeError as error:
                raise self.images.damaged(sample, str(error)) from error
            return torch.from_numpy(view).permute(2, 0, 1).contiguous(), _label(sample.labels)
        found = self.images[number]
        image = self.transform(found.image) if self.transform else torch.from_numpy(found.pixels).permute(2, 0, 1)
        return image, _label(found.labels)


def _label(labels: tuple[int, ...]) -> int:
    return labels[0] if labels else -1


@one_traceback()
def open_dataset(url: str) -> ImageDataset:
    """Returns the images of the packed dataset at `url`, a folder or s3://bucket/prefix, by number.

        digits = patchline.open_dataset("data/digits")
        len(digits), digits.classes                     # print(digits) shows both
        digits[0].image, digits[0].label                # a Pillow image, and the number of its class
        loader = DataLoader(digits.to_torch(image_size=32), batch_size=64, shuffle=True)
        for batch, mask in digits.evaluation_batches(batch_size=64, image_size=32): ...

    An image is read and checked on access, in any order. There is nothing to close, and processes may share the object.
    For training, `train_batches` takes about half the CPU time. Raises UserError if there is no dataset.
    """
    return ImageDataset(open_packed(url))
