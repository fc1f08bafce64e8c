"""Which Vision Transformers of timm and transformers can be read: builds each of them, small and with random weights,
writes the folder that the library publishes, imports it, and compares the logits or, without a head, the features. Both
are computed in fp64, so that rounding decides nothing.

python -m tests.pipeline.models.conversion.zoo [NAME ...]    prints the rows of these models, or writes the page
                                                              docs/reference/timm_weights.md of all (minutes)

test_zoo.py checks one of each kind and, in the long part, all, with the page.
"""

import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pipeline.models import ViT
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_any import open_any
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.timm import open_timm
from pipeline.models.weights.folder import filled_model
from shards.errors import UserError
from tests.pipeline.models.conversion.published import (
    BOTH,
    DINOV2,
    DINOV3,
    FLEXIBLE,
    GATED,
    GRID,
    SIZES,
    of_timm,
    of_transformers,
)
from tests.pipeline.models.parity import imported, random_images

MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit", "naflexvit")
BOUND = 1e-5
PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "timm_weights.md"
_HEAD = """\
# Weights of timm and transformers

Which Vision Transformers of timm {timm} and of transformers {transformers} can be read. Each is built by its library,
small and with random weights in every tensor, written as the library publishes it, and read as
`patchline finetune --initial.weights FOLDER` reads it. Its logits for random images or, without a classifier, its
features, computed in fp64, must equal the library's: "equal to {bound:g}" is the bound on the largest difference, as a
share of the largest value. The others are refused, and the table shows the reason that the message gives.

`python -m tests.pipeline.models.conversion.zoo` writes this page; a long test compares it.

"""
_OF_TIMM = """\
## timm

{num_read} of {num_all} names can be read. A name stands for all published weights of its architecture.

| Model | Logits, or why it is refused |
|---|---|
"""
_OF_TRANSFORMERS = """
## transformers

The classes whose folders can be read, with the options that change their tensors. A folder of CLIP, SigLIP or SigLIP 2
may also hold the tower for texts, which is left out.

| Class | Logits or features, or why it is refused |
|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one model. `difference`: of the logits, as a share of the largest; None if it was refused, for the
    `reason`. `left_out`: which part of it is not read, and why."""

    name: str
    difference: float | None = None
    reason: str = ""
    left_out: str = ""

    @property
    def words(self) -> str:
        """The result in words that depend on no rounding and on no sizes of tensors."""
        if self.difference is not None:
            words = f"equal to {BOUND:g}" if self.difference <= BOUND else f"differs by {self.difference:.0e}"
            return f"{words}, {self.left_out}" if self.left_out else words
        return re.sub(r"'FOLDER[^']*'", "the file", re.sub(r" \[[\d, ]*\]", "", self.reason))


def names_in(timm: ModuleType) -> list[str]:
    """All names of today, without those of timm's own tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [name for module in MODULES for name in timm.list_models(module=module)]
    deprecated = timm.models._registry._deprecated_models
    return [name for name in found if not name.startswith("test_") and name not in deprecated]


def outcome(timm: ModuleType, name: str) -> Outcome:
    """Reads one model, or says why not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = of_timm(timm, name, Path(folder))
        except (AttributeError, AssertionError, TypeError):  # a block of another kind, or a depth that is fixed
            return Outcome(name=name, reason=refusal(timm, name))
        try:
            weights = open_any(folder, Hints())
        except UserError as error:
            return Outcome(name=name, reason=str(error).replace(repr(folder)[1:-1], "FOLDER"))
        side = weights.config.image_size
        images_BHW3 = random_images(side, side)
        cfg: Any = model.pretrained_cfg
        mean, deviation = torch.tensor(cfg["mean"]), torch.tensor(cfg["std"])
        with torch.no_grad():
            theirs_BK = model.double()(((images_BHW3.double() / 255 - mean) / deviation).permute(0, 3, 1, 2))
            ours_BK = filled_model(weights).double()(images_BHW3)
    return Outcome(name=name, difference=float((ours_BK - theirs_BK).abs().max() / theirs_BK.abs().max()))


def refusal(timm: ModuleType, name: str) -> str:
    """Why a model that cannot be made small is refused; "not refused" if it is not."""
    with torch.device("meta"):
        model = timm.create_model(name)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    file = TensorFile(where="FOLDER", shapes=shapes, read=lambda key: torch.zeros(shapes[key]))
    try:
        open_timm(file, {"architecture": name}, Hints())
    except UserError as error:
        return str(error)
    return "not refused"


def outcomes(timm: ModuleType, names: Iterable[str]) -> Iterator[Outcome]:
    """Reads each of timm's models, without what reading them logs."""
    for name in names:
        yield _quietly(partial(outcome, timm, name))


def _quietly(read: Callable[[], Outcome]) -> Outcome:
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read()
    finally:
        logging.disable(logging.NOTSET)


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A class of transformers with the fields of its configuration, and in words what they change. `left_out`: why the
    classifier of the class is not read."""

    name: str
    fields: dict[str, Any]
    what: str = ""
    left_out: str = ""

    @property
    def title(self) -> str:
        """The words in the table's first column."""
        return f"`{self.name}`" + (f", {self.what}" if self.what else "")


_CLASSES = {"num_labels": 3}
_OF_DINOV2 = "without its classifier, which reads the class token and the mean of the patches together"
_OF_CLIP = "without its classifier, which reads the mean of the patches before the last norm"
TOWERS = (
    Tower(name="ViTModel", fields=SIZES),
    Tower(name="ViTForImageClassification", fields=SIZES | _CLASSES),
    Tower(name="DeiTForImageClassificationWithTeacher", fields=SIZES | _CLASSES),
    Tower(name="DeiTModel", fields=SIZES),
    Tower(name="DeiTForImageClassification", fields=SIZES | _CLASSES),
    Tower(name="CLIPVisionModel", fields=SIZES),
    Tower(name="CLIPModel", fields=BOTH),
    Tower(name="CLIPForImageClassification", fields=BOTH, left_out=_OF_CLIP),
    Tower(name="Dinov2Model", fields=DINOV2),
    Tower(name="Dinov2Model", fields=DINOV2 | {"use_swiglu_ffn": True}, what="`use_swiglu_ffn`"),
    Tower(name="Dinov2ForImageClassification", fields=DINOV2 | _CLASSES, left_out=_OF_DINOV2),
    Tower(name="Dinov2WithRegistersModel", fields=DINOV2 | {"num_register_tokens": 2}),
    Tower(name="Dinov2WithRegistersForImageClassification", fields=DINOV2 | _CLASSES, left_out=_OF_DINOV2),
    Tower(name="DINOv3ViTModel", fields=DINOV3),
    Tower(name="DINOv3ViTModel", fields=DINOV3 | GATED, what="`use_gated_mlp`"),
    Tower(name="SiglipVisionModel", fields=SIZES),
    Tower(name="SiglipModel", fields=BOTH),
    Tower(name="SiglipForImageClassification", fields=BOTH),
    Tower(name="Siglip2VisionModel", fields=FLEXIBLE),
    Tower(name="Siglip2Model", fields=BOTH | {"vision_config": FLEXIBLE}),
    Tower(name="Siglip2ForImageClassification", fields=BOTH | {"vision_config": FLEXIBLE}),
)


# The start of a class's name -> the pixels of its published weights, by transformers' constants. Others take 0.5.
_PIXELS = {
    "CLIP": "OPENAI_CLIP",
    "DeiT": "IMAGENET_DEFAULT",
    "Dinov2": "IMAGENET_DEFAULT",
    "DINOv3": "IMAGENET_DEFAULT",
}


def outcome_of_tower(transformers: ModuleType, tower: Tower) -> Outcome:
    """Reads one model of transformers, or says why not."""
    with tempfile.TemporaryDirectory() as folder:
        model = of_transformers(transformers, tower.name, Path(folder), tower.fields).double()
        try:
            weights = open_any(folder, Hints())
        except UserError as error:
            return Outcome(name=tower.title, reason=str(error).replace(repr(folder)[1:-1], "FOLDER"))
        images_BHW3 = random_images(weights.config.image_size, weights.config.image_size)
        pixels_B3HW = _pixels(transformers, tower, images_BHW3)
        inputs = flattened(pixels_B3HW) if "Siglip2" in tower.name else {"pixel_values": pixels_B3HW}
        has_head = weights.config.num_classes > 0
        with torch.no_grad():
            if has_head:
                theirs_BX = model(**inputs).logits
            else:
                inner = [part for name, part in model.named_children() if name.startswith(("vision_model", "dinov2"))]
                theirs_BX = (*inner, model)[0](**inputs).pooler_output
            ours = filled_model(weights).double()
            ours_BX = ours(images_BHW3) if has_head or not isinstance(ours, ViT) else ours.features(images_BHW3)
    difference = float((ours_BX - theirs_BX).abs().max() / theirs_BX.abs().max())
    return Outcome(name=tower.title, difference=difference, left_out=tower.left_out)


def _pixels(transformers: ModuleType, tower: Tower, images_BHW3: torch.Tensor) -> torch.Tensor:
    """The images as the class's published weights take them, float64[B, 3, H, W]. The folder does not say how."""
    name = next((each for start, each in _PIXELS.items() if tower.name.startswith(start)), "IMAGENET_STANDARD")
    mean, deviation = (torch.tensor(getattr(transformers.image_utils, f"{name}_{end}")) for end in ("MEAN", "STD"))
    return ((images_BHW3.double() / 255 - mean) / deviation).permute(0, 3, 1, 2)


def flattened(pixels_B3HW: torch.Tensor) -> dict[str, torch.Tensor]:
    """What SigLIP 2 takes: patches, rows before columns before channels."""
    pixels, side = pixels_B3HW.permute(0, 2, 3, 1), pixels_B3HW.shape[2] // GRID
    patches = pixels.reshape(len(pixels), GRID, side, GRID, side, 3).transpose(2, 3).reshape(len(pixels), GRID**2, -1)
    shapes = torch.tensor([[GRID, GRID]]).expand(len(pixels), -1)
    return {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": torch.ones(patches.shape[:2])}


def outcomes_of_towers(transformers: ModuleType, towers: Iterable[Tower]) -> Iterator[Outcome]:
    """Reads each of transformers' models, without what the library and reading them log."""
    for tower in towers:
        yield _quietly(partial(outcome_of_tower, transformers, tower))


def row(found: Outcome) -> str:
    """The row of the page's table."""
    words = found.words.replace("|", r"\|")
    name = found.name if "`" in found.name else f"`{found.name}`"
    return f"| {name} | {words} |\n"


def page(of_timm: Sequence[Outcome], of_transformers: Sequence[Outcome], *, versions: Mapping[str, str]) -> str:
    """The whole page."""
    num_read = sum(each.difference is not None for each in of_timm)
    first = _HEAD.format(bound=BOUND, **versions) + _OF_TIMM.format(num_read=num_read, num_all=len(of_timm))
    return first + "".join(map(row, of_timm)) + _OF_TRANSFORMERS + "".join(map(row, of_transformers))


def main() -> None:
    """Prints the rows of the models on the command line, or writes the page of all of them."""
    timm, transformers = imported("timm"), imported("transformers")
    given = sys.argv[1:]
    towers = [tower for tower in TOWERS if not given or tower.name in given]
    names = [name for name in names_in(timm) if not given or name in given]
    found = list[list[Outcome]]()
    for parts in (outcomes(timm, names), outcomes_of_towers(transformers, towers)):
        found.append([])
        for each in parts:
            found[-1].append(each)
            sys.stdout.write(row(each))
            sys.stdout.flush()
    if not given:
        versions = {"timm": timm.__version__, "transformers": transformers.__version__}
        PAGE.write_text(page(*found, versions=versions))


if __name__ == "__main__":
    main()
