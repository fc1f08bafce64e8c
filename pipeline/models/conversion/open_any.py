"""Opens weights of any format: ours, timm's, Hugging Face's, .npz files, and bare files of tensors.

The format follows from the path, the config.json and the names of the tensors. If weights were trained on pixels of
another range than ours, the difference is folded into their patch embedding (pixel_range.py).
"""

import logging
import math
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.models.config import ModelConfig
from pipeline.models.conversion import timm
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.dino import has_dino_tokens
from pipeline.models.conversion.hugging_face import VIT_TYPES, open_hugging_face
from pipeline.models.conversion.layout import OurView
from pipeline.models.conversion.npz import open_npz
from pipeline.models.conversion.open_file import SUFFIXES, open_sharded, open_tensor_file, without_prefixes
from pipeline.models.conversion.pixel_range import (
    PIXELS,
    PixelRange,
    folded,
    foreign_name,
    name_by_words,
    of_processor,
    of_timm,
    processor_of,
)
from pipeline.models.conversion.sizes import Declared, Usual, bit_in, hybrid_resnet, transformer_in, weights_of
from pipeline.models.conversion.tensor_file import FlagNeededError, TensorFile, json_object
from pipeline.models.conversion.timm_config import architecture_by_file, of_script, usual_pixels
from pipeline.models.conversion.vision_towers import MODEL_TYPES, open_tower, pixels_of_tower
from pipeline.models.weights.folder import (
    CONFIG_FILE,
    TENSORS_FILE,
    Assumption,
    Weights,
    is_our_description,
    open_weights,
    refuse_hub_id,
    said_of,
)
from pipeline.models.weights.safetensors import refuse_not_finite
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage
from shards.config_values import shown_value
from shards.errors import UserError
from shards.output.quantities import plural

log = logging.getLogger(__name__)
_SATELLITE = "sat493m"  # in the names of DINOv3's files for satellite images
_INDEX_FILE = f"{TENSORS_FILE}.index.json"
_TENSOR_FILES = (TENSORS_FILE, _INDEX_FILE, "pytorch_model.bin")
OUR_MARKS = ("embed.patch.weight", "conv_root.weight")


def open_any(path: str, hints: Hints) -> Weights:
    """Opens the weights at `path`: an .npz file, a run, a folder of ours, timm's or Hugging Face's, or a bare file of
    tensors.

    The format follows from the file's name, its config.json and the names of its tensors. Raises UserError if none
    matches.
    """
    source = Path(path)
    try:
        is_folder = source.is_dir()
    except OSError as error:
        raise UserError(f"no weights at {path!r}: {error.strerror}", todo="give a file or folder of weights") from error
    if is_folder:
        return _open_folder(source, hints)
    if source.suffix == ".npz" and source.is_file():
        return open_npz(source, hints)
    if not source.name.endswith(SUFFIXES) or not source.is_file():
        refuse_hub_id(path)
        raise UserError(
            f"no weights at {path!r}; allowed: a file that ends in {', '.join(SUFFIXES)}, or a folder with "
            "config.json and model.safetensors"
        )
    return _open_bare(open_tensor_file(source, take=hints.take), source, hints)


def open_for_use(path: str, *, say: bool = False) -> Weights:
    """Opens the weights at `path`, without hints from the user. They may be a run, a weights folder, or what `open_any`
    reads.

    If the file does not name each class of the head, the classes are called 0, 1, ... `say`: whether to log what is
    assumed because the file does not say it. Raises UserError if there are no weights, or if the file leaves open what
    only flags of `patchline import` can say. Reading a tensor raises InvalidDataError if it is not finite.
    """
    if _is_ours(Path(path)):
        return open_weights(path)
    try:
        weights = open_any(path, Hints())
    except FlagNeededError as error:
        command = f"patchline import {shlex.quote(path)} --out FOLDER"
        raise FlagNeededError(f"{error} ({command} has these flags, and makes a weights folder)") from error
    if say and weights.assumed:
        flags = "; patchline import has flags for other values" if any(each.flag for each in weights.assumed) else ""
        log.warning("%s: %s%s", path, said_of(weights.assumed), flags)
    names = names_of_classes(weights, say=say)

    def tensor(name: str) -> torch.Tensor:
        return refuse_not_finite(weights.tensor(name).float(), f"{name} in the weights at {path!r}")

    return replace(weights, labels=names, tensor=tensor)


def names_of_classes(weights: Weights, *, say: bool) -> tuple[str, ...]:
    """Returns the names of the head's classes: the file's names if it has one for each class, else 0, 1, ... If a file
    has another number of names, it is unknown which classes they belong to. `say`: whether to log a warning in that
    case."""
    num_names, num_classes = len(weights.labels), weights.config.num_classes
    if num_names == num_classes:
        return weights.labels
    if say and num_names and num_classes:
        message = "%s names %d classes, its head has %d: they are called 0 to %d; patchline import takes their names"
        log.warning(f"{message} (--labels-file)", weights.where, num_names, num_classes, num_classes - 1)
    return tuple(str(number) for number in range(num_classes))


def usage_for(path: str) -> Usage:
    """Returns how the weights at `path`, of any format, are used. Returns the defaults if the weights cannot be read;
    opening them reports the reason."""
    try:
        return open_for_use(path).usage
    except UserError:
        return DEFAULT_USAGE


def _is_ours(path: Path) -> bool:
    """Returns whether the path is a run or a weights folder of ours, or does not exist. Otherwise, `open_any` reads
    it."""
    try:
        if not path.is_dir():
            return not path.is_file()
        if not (path / CONFIG_FILE).is_file():
            return True
        return is_our_description(json_object(path / CONFIG_FILE))
    except OSError:
        return True  # open_weights says why it cannot be read


def _open_tensors(path: Path, hints: Hints) -> TensorFile:
    if path.name == _INDEX_FILE:
        return without_prefixes(open_sharded(path))
    return open_tensor_file(path, take=hints.take)


def _declared_pixels(folder: Path, description: Mapping[str, Any]) -> PixelRange | None:
    """Returns the pixels that config.json or a processor's file in the folder declares; None if neither does."""
    published = description.get("pretrained_cfg", description)
    by_timm = of_timm(published, where=str(folder / CONFIG_FILE)) if isinstance(published, dict) else None
    return by_timm or of_processor(folder)


def _with_our_pixels(
    weights: Weights, declared: PixelRange | None, hints: Hints, *, usual: PixelRange = PIXELS["paper"]
) -> Weights:
    """Returns the weights changed so that they take our pixels. The pixels that they were trained on are declared by
    the file, given by the user, or else assumed to be the architecture's `usual` pixels."""
    given = PIXELS[hints.pixels] if hints.pixels else None
    if declared and given and given != declared:
        raise UserError(
            f"--pixels is {hints.pixels!r} ({given}), the files at {weights.where!r} say {declared}; leave out --pixels"
        )
    pixels = declared or given or usual
    said = () if declared or given else (Assumption(field="pixels", value=f"of {pixels}", flag="--pixels"),)
    tensor = folded(weights.tensor, weights.config, pixels, where=weights.where)
    if pixels != PIXELS["paper"]:
        log.info("%s: pixels of %s, folded into the patch embedding", weights.where, pixels)
    return replace(weights, tensor=tensor, assumed=(*weights.assumed, *said))


def _refuse_other_pixels(path: Path, *, trained: str, usual: PixelRange) -> None:
    """Raises UserError for a bare file if its name, its script's arguments or a config.json beside it indicate a model
    that takes other pixels than ours.

    `trained` is the model that the arguments name, empty if they name none, and `usual` are the pixels of that model.
    """
    if _SATELLITE in path.name:
        raise UserError(
            f"{str(path)!r} is named like DINOv3's weights for satellite images, which take pixels of their own, and "
            "the file does not say which; give timm's folder of this model, or Hugging Face's"
        )
    declared = None
    if (path.parent / CONFIG_FILE).is_file():
        declared = _declared_pixels(path.parent, json_object(path.parent / CONFIG_FILE))
    if declared and declared != PIXELS["paper"]:
        raise UserError(
            f"{CONFIG_FILE} beside {str(path)!r} says pixels of {declared}; give the folder, {str(path.parent)!r}, so "
            "that they are folded into the patch embedding"
        )
    by_script = (name_by_words(trained) or foreign_name(usual)) if trained else None
    if declared is None and by_script:
        raise FlagNeededError(
            f"{str(path)!r} is of the model {shown_value(trained)}, by its script's arguments, which usually takes "
            f"pixels of {PIXELS[by_script]}; give --pixels {by_script} to fold them into the patch embedding, or "
            "--pixels paper for mean and deviation 0.5"
        )
    known = architecture_by_file(str(path))
    name = name_by_words(path.name) or (foreign_name(known.pixels) if known else None)
    if declared is None and name:
        raise FlagNeededError(
            f"{str(path)!r} is named like a model that takes pixels of {PIXELS[name]}, which the file does not say; "
            f"give --pixels {name} to fold them into the patch embedding, or --pixels paper for mean and deviation 0.5"
        )


def _open_folder(folder: Path, hints: Hints) -> Weights:
    if not (folder / CONFIG_FILE).is_file():
        if (folder / "weights" / CONFIG_FILE).is_file() or (folder / "checkpoints").is_dir():  # a run
            return _open_ours(str(folder), hints)
        raise UserError(
            f"no {CONFIG_FILE} in {str(folder)!r}; give a finished run, a folder of ours, timm's or Hugging Face's, or "
            "a file"
        )
    description = json_object(folder / CONFIG_FILE)
    if is_our_description(description):
        return _open_ours(str(folder), hints)
    tensors = next((folder / name for name in _TENSOR_FILES if (folder / name).is_file()), None)
    if tensors is None:
        raise UserError(f"no tensors in {str(folder)!r}; allowed: {', '.join(_TENSOR_FILES)}")
    declared = _declared_pixels(folder, description)
    kind = description.get("model_type", "nothing")
    if kind in VIT_TYPES:
        file, processor = _open_tensors(tensors, hints), processor_of(folder)
        weights = open_hugging_face(file, description, hints, processor=processor)
        usual = PIXELS["imagenet" if kind == "deit" else "paper"]
        return _with_our_pixels(weights, declared, hints, usual=usual)
    if kind in MODEL_TYPES:
        file, processor = _open_tensors(tensors, hints), processor_of(folder)
        weights = open_tower(file, description, hints, processor=processor)
        return _with_our_pixels(weights, declared, hints, usual=pixels_of_tower(kind))
    if "architecture" in description:
        file = _open_tensors(tensors, hints)
        weights = timm.open_timm(file, description, hints)
        return _with_our_pixels(weights, declared, hints, usual=usual_pixels(file, description))
    allowed = ", ".join((*VIT_TYPES, *MODEL_TYPES))
    raise UserError(
        f"{CONFIG_FILE} in {str(folder)!r} has the model_type {kind!r}; allowed: {allowed}, timm's (with an "
        "architecture) or our own"
    )


def _open_ours(folder: str, hints: Hints) -> Weights:
    weights = open_weights(folder)
    if given := [field.name for field in fields(Hints) if field.name != "model" and getattr(hints, field.name)]:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{folder!r} is a weights folder of ours, whose config.json says all; leave out {flags}")
    if hints.model and weights.config.name != hints.model:
        raise UserError(f"--model is {hints.model!r}, the weights in {folder!r} are of {weights.config.name!r}")
    return weights


def _open_bare(file: TensorFile, path: Path, hints: Hints) -> Weights:
    if any(name in file.shapes for name in OUR_MARKS):
        return open_plain(file, hints)
    if any(name in file.shapes for name in timm.MARKS):
        declared = of_timm(file.arguments, where=str(path))
        usual = PIXELS["imagenet"] if has_dino_tokens(file) else usual_pixels(file, of_script(file.arguments))
        if hints.pixels is None and declared is None:
            trained = str(file.arguments.get("model") or file.arguments.get("arch") or "")
            _refuse_other_pixels(path, trained=trained, usual=usual)
        weights = timm.open_timm(file, {}, hints)
        if (path.parent / CONFIG_FILE).is_file():
            timm.refuse_other_description(weights, file, json_object(path.parent / CONFIG_FILE), hints)
        return _with_our_pixels(weights, declared, hints, usual=usual)
    if any("embeddings.patch_embedding" in name for name in file.shapes):  # CLIP's is singular
        raise UserError(
            f"{file.where!r} has Hugging Face's tensors; their config.json says the rest: give the folder of both"
        )
    some = ", ".join(sorted(file.shapes)[:5])
    raise UserError(
        f"the tensors in {file.where!r} are of no model known here ({some}, ...); allowed: ViT, hybrid and BiT in "
        "our names or timm's"
    )


def open_plain(file: TensorFile, hints: Hints) -> Weights:
    """Opens our own tensors in a bare file, without the config.json of a weights folder. Raises a UserError that names
    the tensor that does not fit and says why."""
    view = OurView(file=file, table=())  # names without a row are ours
    if view.has("conv_root.weight"):
        found = bit_in(view, usual=Usual(), hints=hints, is_basic=not view.has("stages.0.0.conv3.weight"))
    else:
        (width, num_inputs), resnet = file.shape("embed.patch.weight", 2), hybrid_resnet(view)
        patch = math.isqrt(num_inputs // (resnet.width if resnet else 3))
        declared = Declared(width=width, patch=patch, is_square=True, has_later_parts=True)
        found = transformer_in(view, declared, usual=Usual(), hints=hints)
        found = replace(found, assumed=(*found.assumed, *_without_tensors(found.config)))
    return weights_of(file, (), found, advice=hints.advice())


def _without_tensors(config: ModelConfig) -> tuple[Assumption, ...]:
    """Returns the settings that the tensors do not show, with the values assumed."""
    assumed = list[Assumption]()
    if config.position == "none":
        assumed.append(Assumption(field="position", value="none (sincos2d and rope2d leave no tensor either)"))
    if config.pooling == "average" and config.size.depth % 2 == 0:
        layers = plural(config.size.depth // 2, "layer")
        value = f"global (an axial model of {layers} has the same tensors)"
        assumed.append(Assumption(field="attention", value=value))
    return tuple(assumed)
