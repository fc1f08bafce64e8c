"""Finds the range of pixels that weights were trained on, and makes weights from elsewhere take pixels in our range.

Ours are 2 x / 255 - 1, as in the paper's code: mean and deviation 0.5. Many models of timm, DeiT, MAE and DINO take
ImageNet's mean and deviation; CLIP's models take CLIP's. The patch embedding of a ViT is linear, so it absorbs the
difference exactly: W ((x / 255 - m) / s) + b = W / (2 s) (2 x / 255 - 1) + b + W (0.5 - m) / s.

Sources: timm's data/constants.py; transformers' image_processing_vit.py. processor_config.json may nest the entries of
the image processor. Shape letters: D width, P patch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from pipeline.models.config import ModelConfig
from pipeline.models.conversion.config import PixelName
from pipeline.models.conversion.tensor_file import json_object
from pipeline.models.weights.folder import PIXELS_FILE
from pipeline.models.weights.safetensors import TensorByName
from shards.config_values import shown_value
from shards.errors import UserError

_PROCESSOR_FILES = (PIXELS_FILE, "processor_config.json")
_PATCH = "embed.patch"
_BEIT_CHOICE = "imagenet_default_mean_and_std"  # an argument of BEiT's scripts, and of scripts based on them
# Words in the names of published files, by the pixels of their models. In timm, models of AugReg, SAM and BEiT take
# mean and deviation 0.5.
_WORDS: dict[str, PixelName] = {
    **dict.fromkeys(
        ("deit", "deit3", "dino", "dinov2", "dinov3", "mae", "moco", "mocov3", "msn", "ibot", "swag"), "imagenet"
    ),
    **dict.fromkeys(("clip", "openai", "laion", "laion2b", "datacomp", "eva", "eva02"), "clip"),
}


@dataclass(frozen=True, kw_only=True)
class PixelRange:
    """Mean and deviation of red, green and blue, as shares of 255."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def __str__(self) -> str:
        mean, deviation = (" ".join(f"{share:g}" for share in shares) for shares in (self.mean, self.deviation))
        return f"mean {mean} and deviation {deviation}"


PIXELS: dict[PixelName, PixelRange] = {
    "paper": PixelRange(mean=(0.5, 0.5, 0.5), deviation=(0.5, 0.5, 0.5)),
    "imagenet": PixelRange(mean=(0.485, 0.456, 0.406), deviation=(0.229, 0.224, 0.225)),
    "clip": PixelRange(mean=(0.48145466, 0.4578275, 0.40821073), deviation=(0.26862954, 0.26130258, 0.27577711)),
}


def of_processor(folder: Path) -> PixelRange | None:
    """Returns the pixels that a processor's file in a Hugging Face folder declares; None without such a file, or if it
    has neither mean nor deviation. Raises UserError for pixels that are not scaled by 255 and normalised."""
    found = None
    for path, said in _processors(folder):
        other = [key for key in ("do_rescale", "do_normalize") if said.get(key, True) is not True]
        other += [key for key in ("do_flip_channel_order",) if said.get(key)]
        factor = said.get("rescale_factor", 1 / 255)
        if not isinstance(factor, float | int) or abs(factor * 255 - 1) > 1e-3:
            other.append("rescale_factor")
        if other:
            shown = ", ".join(f"{key} {shown_value(said[key])}" for key in other)
            raise UserError(
                f"{str(path)!r} says {shown}; the models here take value / 255, normalised by a mean and a deviation: "
                "give weights trained so"
            )
        if "image_mean" in said or "image_std" in said:
            found = _range(said.get("image_mean", 0.5), said.get("image_std", 0.5), where=str(path))
    return found


def processor_of(folder: Path) -> Mapping[str, Any]:
    """Returns what the last processor file in a Hugging Face folder says about images; empty if there is none."""
    found: Mapping[str, Any] = {}
    for _, said in _processors(folder):
        found = said
    return found


def _processors(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for path in (folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()):
        content = json_object(path)
        inner = content.get("image_processor")
        yield path, inner if isinstance(inner, dict) else content


def of_timm(description: Mapping[str, Any], *, where: str) -> PixelRange | None:
    """Returns the pixels that timm's `pretrained_cfg`, or the arguments of a script, declare; None if they declare
    none. Arguments may be on the scale of 255, such as 123.675."""
    mean, deviation = description.get("mean"), description.get("std")
    if mean is None and deviation is None:
        choice = description.get(_BEIT_CHOICE)
        return PIXELS["imagenet" if choice else "paper"] if isinstance(choice, bool) else None
    if _is_of_255(mean, above=1) and _is_of_255(deviation, above=0.99):
        mean, deviation = ([value / 255 for value in values] for values in (mean, deviation))
    return _range([0.5] * 3 if mean is None else mean, [0.5] * 3 if deviation is None else deviation, where=where)


def _is_of_255(given: Any, *, above: float) -> TypeGuard[Sequence[float]]:
    return isinstance(given, list | tuple) and all(type(v) in (int, float) and above < v <= 255 for v in given)


def name_by_words(text: str) -> PixelName | None:
    """Returns the name of the pixels of the model that a file or an architecture is named after; None if no word
    tells."""
    words = re.split(r"[^a-z0-9]+", text.lower())
    return next((_WORDS[word] for word in words if word in _WORDS), None)


def foreign_name(pixels: PixelRange) -> PixelName | None:
    """Returns the name of a range of pixels, for --pixels; None for our range, and for a range without a name."""
    return next((name for name, each in PIXELS.items() if each == pixels and name != "paper"), None)


def folded(tensor: TensorByName, config: ModelConfig, pixels: PixelRange, *, where: str) -> TensorByName:
    """Returns the tensors of a model that takes our pixels and computes the same. Raises UserError if its first layer
    pads the pixels."""
    if pixels == PIXELS["paper"]:
        return tensor
    if config.resnet:
        raise UserError(
            f"{where!r} takes pixels of {pixels}; the first convolution of a ResNet pads its input, so they cannot be "
            "folded into it, and the models here take mean and deviation 0.5: give weights trained so"
        )
    mean_3, deviation_3 = (torch.tensor(values, dtype=torch.float64) for values in (pixels.mean, pixels.deviation))

    def ours(name: str) -> torch.Tensor:
        value: torch.Tensor = tensor(name)
        if name not in (f"{_PATCH}.weight", f"{_PATCH}.bias"):
            return value
        # (D, P * P * 3) -> (D, P * P, 3)
        weight_DX = tensor(f"{_PATCH}.weight").double()
        weight_DP3 = weight_DX.reshape(len(weight_DX), -1, 3) / deviation_3
        is_weight = name == f"{_PATCH}.weight"
        wide = (weight_DP3 / 2).flatten(1) if is_weight else value.double() + (weight_DP3 * (0.5 - mean_3)).sum((1, 2))
        return wide.to(value.dtype)

    return ours


def _range(mean: Any, deviation: Any, *, where: str) -> PixelRange:
    """Checks what a file declares: one number for all channels, or three."""
    return PixelRange(
        mean=_three(mean, f"{where!r} says pixels of mean", least=0.0),
        deviation=_three(deviation, f"{where!r} says pixels of deviation", least=1e-3),
    )


def _three(given: Any, what: str, *, least: float) -> tuple[float, float, float]:
    values = list(given) if isinstance(given, list | tuple) else [given]
    values = values * 3 if len(values) == 1 else values
    if len(values) != 3 or not all(type(value) in (int, float) and least <= value <= 1 for value in values):
        raise UserError(f"{what} {shown_value(given)}; allowed: a number from {least:g} to 1, or three")
    return float(values[0]), float(values[1]), float(values[2])
