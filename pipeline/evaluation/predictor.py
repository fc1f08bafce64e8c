"""Predicts the classes of images: loads weights with their transform, and returns the probabilities of their classes.

    model = load_model("runs/digits/weights")
    model.predict("photo.jpg")  # [("7", 0.98), ("1", 0.01), ...]

Shape letters: B images, H W pixels, K classes.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from pipeline.data.decode import DecodeError, Pixels, image_faults
from pipeline.data.transform import evaluation_view, evaluation_view_of_pixels
from pipeline.evaluation.config import NUM_CLASSES_SHOWN
from pipeline.models.build import Model
from pipeline.models.config import ModelConfig
from pipeline.models.conversion.open_any import open_for_use
from pipeline.models.weights.folder import filled_model, refuse_no_head
from pipeline.models.weights.usage import Usage
from pipeline.ranks.world import current_world
from pipeline.shared_settings import Device
from shards.errors import ImageRefusedError, UserError
from shards.images.config import WIDEST_LIMITS
from shards.images.image_header import read_image_file
from shards.images.resize import flattened
from shards.pool import Pool

BATCH = 16  # images that are decoded and predicted together
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")  # 8 bits per channel
_OTHER_ORIENTATIONS = ("xmp", "XML:com.adobe.xmp", "Raw profile type exif")

ImageLike = str | os.PathLike[str] | Image.Image | NDArray[np.uint8]
Item = TypeVar("Item")
Prediction = list[tuple[str, float]]  # (name of a class, its probability), the most probable first


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A trained model with everything that is needed to use it on images.

    `model`: maps uint8[B, image_size, image_size, 3] to logits, float32[B, K]; `config`: its sizes; `labels`: the K
    names of its classes; `usage`: its loss and the transform of its images, as in `patchline evaluate`; `num_threads`:
    the number of threads that decode the images of a list.
    """

    model: Model
    config: ModelConfig
    labels: tuple[str, ...]
    usage: Usage
    device: torch.device
    num_threads: int = 1

    @overload
    def predict(self, images: ImageLike, *, top: int = NUM_CLASSES_SHOWN) -> Prediction: ...

    @overload
    def predict(self, images: list[Any] | tuple[Any, ...], *, top: int = NUM_CLASSES_SHOWN) -> list[Prediction]: ...

    def predict(
        self, images: ImageLike | list[Any] | tuple[Any, ...], *, top: int = NUM_CLASSES_SHOWN
    ) -> Prediction | list[Prediction]:
        """Returns the `top` classes of an image, or of each in a list: [(label, probability), ...], the most probable
        first.

        An image is the path of a JPEG, PNG or WebP file, a Pillow image, or pixels, uint8[height, width, 3] in RGB. It
        may have any size. Its EXIF orientation is applied. Probabilities are 0 to 1. With a softmax they add up to 1
        over all classes; with sigmoids each class has its own. Raises UserError if an image cannot be used (naming its
        file) or if `top` is below 1.
        """
        if top < 1:
            raise UserError(f"top is {top}; allowed: 1 or more: how many classes are given for an image")
        if isinstance(images, str | os.PathLike | Image.Image | np.ndarray):
            return self.ranked(self.logits([self.view(images)]), top=top)[0]
        return [_usable(found) for batch in batched(images) for found in self.outcomes(batch, top=top)]

    def outcomes(self, images: Sequence[ImageLike], *, top: int) -> list[Prediction | UserError]:
        """Returns the `top` classes of each image of a batch, or the error for an image that cannot be predicted."""
        views = self.views(images)
        good = [view for view in views if not isinstance(view, UserError)]
        rows = iter(self.logits(good) if good else ())
        return [
            view if isinstance(view, UserError) else self._outcome(image, next(rows), top=top)
            for image, view in zip(images, views, strict=True)
        ]

    def view(self, image: ImageLike, *, margin: int = 0) -> Pixels:
        """Returns what the model sees of an image: uint8[image_size, image_size, 3], each side longer by `margin`.
        Raises UserError if it cannot be used."""
        side = self.config.image_size + margin
        out = np.zeros((side, side, 3), dtype=np.uint8)
        if isinstance(image, str | os.PathLike):
            try:
                upright = replace(self.usage.transform, exif=True)  # even if the run's evaluation does not do so
                evaluation_view(read_image_file(Path(image)), upright, out=out, limits=WIDEST_LIMITS)
            except (ImageRefusedError, DecodeError) as error:
                raise UserError(f"{os.fspath(image)}: {error}") from error
        else:
            pixels = _pixels(image) if isinstance(image, Image.Image) else image
            _refuse_other_array(pixels)
            try:
                evaluation_view_of_pixels(pixels, self.usage.transform, out=out)
            except DecodeError as error:
                raise UserError(f"an image of {pixels.shape[0]} x {pixels.shape[1]} pixels: {error}") from error
        return out

    def views(self, images: Sequence[ImageLike]) -> list[Pixels | UserError]:
        """Returns the `view` of each image, decoded in threads, or the error for an image that cannot be used."""

        def one(image: ImageLike) -> Pixels | UserError:
            try:
                return self.view(image)
            except UserError as error:
                return error

        with closing(Pool(max(1, self.num_threads), name="decode")) as pool:
            coming = [pool.submit(partial(one, image)) for image in images]
            return [view.result() for view in coming]

    def logits(self, views: Sequence[Pixels]) -> torch.Tensor:
        """Returns the logits of B views, float32[B, K], on the CPU."""
        with torch.no_grad():
            logits_BK: torch.Tensor = self.model(torch.from_numpy(np.stack(views)).to(self.device))
        return logits_BK.float().cpu()

    def ranked(self, logits_BK: torch.Tensor, *, top: int) -> list[Prediction]:
        """Returns the `top` classes (or all, if there are fewer) of each row. Raises UserError if a logit is not
        finite."""
        if not logits_BK.isfinite().all():
            raise UserError("the model's logits are not finite: its weights are damaged; export them again")
        likely_BK = logits_BK.softmax(dim=1) if self.usage.loss == "softmax" else logits_BK.sigmoid()
        _, order_BK = logits_BK.sort(dim=1, descending=True, stable=True)
        order = order_BK[:, :top].tolist()
        return [[(self.labels[k], float(row_K[k])) for k in ks] for ks, row_K in zip(order, likely_BK, strict=True)]

    def _outcome(self, image: ImageLike, logits_K: torch.Tensor, *, top: int) -> Prediction | UserError:
        try:
            return self.ranked(logits_K[None], top=top)[0]
        except UserError as error:
            return UserError(f"{os.fspath(image)}: {error}") if isinstance(image, str | os.PathLike) else error


def load_model(path: str | os.PathLike[str], *, device: Device = "auto", classifies: bool = True) -> Predictor:
    """Loads the model of a run (RUN or RUN/weights), of a timm or Hugging Face folder, or of a .npz, .safetensors or
    .pth file, in float32, ready to predict.

    `device`: auto takes the GPU if there is one. `classifies`: whether to refuse weights that classify no images.
    Raises UserError if there are no weights, or their file leaves open what only flags of `patchline import` can say.
    """
    weights, world = open_for_use(os.fspath(path), say=True), current_world(device)
    if classifies:
        refuse_no_head(weights)
    return Predictor(
        model=filled_model(weights).to(world.device),
        config=weights.config,
        labels=weights.labels,
        usage=weights.usage,
        device=world.device,
        num_threads=world.num_threads,
    )


def batched(images: Iterable[Item]) -> Iterator[list[Item]]:
    """Yields the images in lists of BATCH, the last one shorter."""
    left = iter(images)
    while batch := list(islice(left, BATCH)):
        yield batch


def _usable(found: Prediction | UserError) -> Prediction:
    if isinstance(found, UserError):
        raise found
    return found


def _pixels(image: Image.Image) -> Pixels:
    """Returns the pixels of an image, uint8[height, width, 3], upright. Transparent parts become white, as in files."""
    if image.mode not in _MODES:
        raise UserError(f"a Pillow image has the mode {image.mode!r}; allowed: {', '.join(_MODES)}: convert it")
    try:
        with image_faults():
            flat = flattened(image)
            # Pillow would also apply an orientation in other tags, which neither packing nor the prediction of files
            # does.
            others = {name: flat.info.pop(name) for name in _OTHER_ORIENTATIONS if name in flat.info}
            try:
                upright = ImageOps.exif_transpose(flat)
            finally:
                flat.info.update(others)
            return np.asarray(upright.convert("RGB"), dtype=np.uint8)
    except DecodeError as error:
        raise UserError(f"a Pillow image cannot be decoded: {error}") from error


def _refuse_other_array(pixels: Pixels) -> None:
    what = f"{getattr(pixels, 'dtype', type(pixels).__name__)}{list(getattr(pixels, 'shape', ()))}"
    is_image = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.ndim == 3
    if not is_image or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise UserError(
            f"an image is {what}; allowed: the path of a file, a Pillow image, or pixels as a numpy array, "
            "uint8[height, width, 3]; several go into a list"
        )
