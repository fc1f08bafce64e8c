"""Converts weights between all file formats that are supported here, to another image size or with another head."""

import logging
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.models.build import shapes_of
from pipeline.models.config import ModelConfig, without_masked_patches
from pipeline.models.conversion import plain, timm
from pipeline.models.conversion.config import Change, Format
from pipeline.models.conversion.hugging_face import open_hugging_face, save_hugging_face
from pipeline.models.conversion.npz import open_npz, save_npz
from pipeline.models.conversion.open_file import SUFFIXES, open_sharded, open_tensor_file, without_prefixes
from pipeline.models.conversion.pixel_range import (
    PIXELS,
    PixelRange,
    folded,
    foreign_name,
    name_by_file,
    name_by_words,
    of_processor,
    of_timm,
    processor_of,
)
from pipeline.models.conversion.sizes import Hints, refuse_absurd
from pipeline.models.conversion.tensor_file import TensorFile, json_object
from pipeline.models.conversion.timm_architectures import architecture_by_file, of_script, usual_pixels
from pipeline.models.positions import from_axes, sines
from pipeline.models.weights.fit import fit_weights
from pipeline.models.weights.folder import (
    AXES,
    CONFIG_FILE,
    HEAD,
    POSITION,
    TENSORS_FILE,
    Weights,
    is_our_description,
    open_weights,
    refuse_no_classifier,
    save_weights,
)
from pipeline.models.weights.safetensors import TensorByName, refuse_not_finite
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage
from shards.errors import UserError
from shards.schema.config_values import shown_value

log = logging.getLogger(__name__)
_INDEX_FILE = f"{TENSORS_FILE}.index.json"
_TENSOR_FILES = (TENSORS_FILE, _INDEX_FILE, "pytorch_model.bin")


def open_any(path: str, hints: Hints) -> Weights:
    """The weights at `path`: an .npz file, a folder of ours, timm's or Hugging Face's, or a bare file of tensors.

    The format follows from its name, its config.json and the names of its tensors. Raises UserError if none matches.
    """
    source = Path(path)
    try:
        is_folder = source.is_dir()
    except OSError as error:
        raise UserError(f"no weights at {path!r}: {error.strerror}; give a file or folder of weights") from error
    if is_folder:
        return _open_folder(source, hints)
    if source.suffix == ".npz" and source.is_file():
        return open_npz(source, hints)
    if not source.name.endswith(SUFFIXES) or not source.is_file():
        raise UserError(
            f"no weights at {path!r}; allowed: a file that ends in {', '.join(SUFFIXES)}, or a folder with "
            "config.json and model.safetensors"
        )
    return _open_bare(open_tensor_file(source, take=hints.take), source, hints)


def open_for_use(path: str, *, say: bool = False) -> Weights:
    """The weights at `path`, of any format, as they are: a run, a weights folder, or what `open_any` reads.

    The classes of a head without a name for each are called 0, 1, ... `say`: warn of what was assumed because the file
    does not say it. Raises UserError if there are none, or the file leaves open what only flags of `patchline import`
    can say.
    Reading a tensor raises InvalidDataError if it is not finite.
    """
    if _is_ours(Path(path)):
        return open_weights(path)
    try:
        weights = open_any(path, Hints())
    except UserError as error:
        if "--" not in str(error):
            raise
        command = f"patchline import {shlex.quote(path)} --out FOLDER"
        raise type(error)(f"{error} ({command} has these flags, and makes a weights folder)") from error
    if say and weights.assumed:
        message = "%s: assumed, as the file does not say: %s; patchline import has flags for other values"
        log.warning(message, path, ", ".join(weights.assumed))
    names = names_of_classes(weights, say=say)

    def tensor(name: str) -> torch.Tensor:
        return refuse_not_finite(weights.tensor(name).float(), f"{name} in the weights at {path!r}")

    return replace(weights, labels=names, tensor=tensor)


def names_of_classes(weights: Weights, *, say: bool) -> tuple[str, ...]:
    """The names of the head's classes: those in the file if there is one for each, else 0, 1, ... Others say nothing
    of which classes they are; `say`: warn of them."""
    num_names, num_classes = len(weights.labels), weights.config.num_classes
    if num_names == num_classes:
        return weights.labels
    if say and num_names and num_classes:
        message = "%s names %d classes, its head has %d: they are called 0 to %d; patchline import takes their names"
        log.warning(f"{message} (--labels-file)", weights.where, num_names, num_classes, num_classes - 1)
    return tuple(str(number) for number in range(num_classes))


def usage_for(path: str) -> Usage:
    """How the weights at `path`, of any format, are used. The defaults if they cannot be read: whoever opens them says
    why."""
    try:
        return open_for_use(path).usage
    except UserError:
        return DEFAULT_USAGE


def usage_at(weights: Weights, image_size: int) -> Usage:
    """How the weights are used once their model has another image size: the part that is cut out of an image stays as
    large a part of it."""
    usage, own = weights.usage, weights.config.image_size
    if image_size == own or not usage.transform.short_side:
        return usage
    short_side = max(1, round(usage.transform.short_side * image_size / own))
    return replace(usage, transform=replace(usage.transform, short_side=short_side))


def refuse_no_head(weights: Weights) -> None:
    """UserError for weights that classify no images: without a head, or of masked patch prediction."""
    refuse_no_classifier(weights)
    if not weights.config.num_classes or any(name not in weights.shapes for name in HEAD):
        raise UserError(
            f"{weights.where!r} has no head ({HEAD[0]} is not there), so it classifies no images; fine-tune the "
            "weights first (patchline finetune), or measure them with patchline fewshot"
        )


def _is_ours(path: Path) -> bool:
    """Whether the path is no other library's: a run, a weights folder, or nothing at all."""
    try:
        if not path.is_dir():
            return not path.is_file()
        if not (path / CONFIG_FILE).is_file():
            return True
        return is_our_description(json_object(path / CONFIG_FILE))
    except OSError:
        return True  # open_weights says why it cannot be read


def changed(weights: Weights, change: Change) -> tuple[ModelConfig, TensorByName]:
    """The model after the change, and its tensors. Raises UserError with everything that does not fit."""
    config = weights.config
    _refuse_impossible(config, change)
    num_classes = config.num_classes if change.num_classes is None else change.num_classes
    if not num_classes:
        hidden = (
            " (its hidden layer, a pooler in Hugging Face's words, is dropped then)" if config.representation else ""
        )
        raise UserError(
            f"{weights.where!r} has no head ({HEAD[0]} is not there); give --new-head --num-classes K for one of zeros"
            f"{hidden}"
        )
    target = replace(
        without_masked_patches(config) if change.new_head else config,
        image_size=config.image_size if change.image_size is None else change.image_size,
        num_classes=num_classes,
        representation=config.representation and not change.new_head,
        head_bias=0.0 if change.new_head else config.head_bias,
    )
    refuse_absurd(target, where=weights.where)
    shapes = shapes_of(target)
    if not change.new_head and any(weights.shapes.get(name) != shapes[name] for name in HEAD):
        there = [f"{name} is {list(weights.shapes.get(name, ()))}, {list(shapes[name])} is asked for" for name in HEAD]
        raise UserError(
            f"the head in {weights.where!r} does not fit: {'; '.join(there)}; give --new-head to drop it for one of "
            "zeros, or leave out --num-classes"
        )
    tensor = fit_weights(
        weights,
        target,
        initial=lambda name: torch.zeros(shapes[name]),
        new_head=change.new_head,
        mode=change.resample,
    )
    return target, tensor


def save_as(
    written: Format,
    out: Path,
    *,
    config: ModelConfig,
    labels: tuple[str, ...],
    tensor: TensorByName,
    usage: Usage = DEFAULT_USAGE,
) -> None:
    """Writes a file (.npz) or a folder, whole or absent. The head's constant is folded into its bias.

    In formats other than ours, 2-D or missing position embeddings become a learned 1-D table with the same values.
    timm's format keeps the transform of `usage`; .npz files keep nothing of it.
    """
    if written == "patchline":
        named = labels or tuple(str(number) for number in range(config.num_classes))
        save_weights(out, config=config, labels=named, tensor=tensor, usage=usage)
        return
    if config.masked_patches:
        raise UserError(
            "the weights predict the colours of masked patches: other libraries have no such head; give --new-head "
            "--num-classes K for a classifier of zeros"
        )
    if config.attention == "axial":
        raise UserError(
            "the model has axial attention (model.attention), which no other format has; allowed: --format patchline"
        )
    if config.resnet and config.resnet.is_basic:
        raise UserError(
            f"the weights are of {config.name}, whose basic units no other format has with group norm and standardised "
            "weights (timm's resnetv2_18 and resnetv2_34 have batch norm); allowed: --format patchline"
        )
    _refuse_foreign_parts(config, written)
    config, tensor = _with_folded_bias(*_with_position_table(config, tensor))
    if written != "timm" and not config.is_bit and config.layer_scale:
        config, tensor = _with_folded_scales(config, tensor)
        log.info("%s: LayerScale is folded into the layers before it, as the format has none: the same logits", out)
    if written == "timm":
        timm.save_timm(out, config=config, labels=labels, tensor=tensor, transform=usage.transform)
    elif written == "hugging_face":
        save_hugging_face(out, config=config, labels=labels, tensor=tensor, usage=usage)
    else:
        if out.suffix != ".npz":
            raise UserError(f"--out is {str(out)!r}; the format {written} is a file that ends in .npz")
        save_npz(out, config=config, tensor=tensor, dialect=written)


def _refuse_foreign_parts(config: ModelConfig, written: Format) -> None:
    """UserError for parts that only some of the formats have."""
    parts: dict[str, tuple[bool, tuple[Format, ...]]] = {
        "registers": (config.registers > 0, ("timm",)),
        "norms of queries and keys (model.qk_norm)": (config.qk_norm, ("timm",)),
        "rotary positions (model.position)": (config.position == "rope2d", ("timm",)),
        "attention pooling (model.pooling)": (config.pooling == "attention", ("timm", "big_vision")),
    }
    for part, (is_there, formats) in parts.items():
        if is_there and written not in formats:
            raise UserError(
                f"the model has {part}, which the format {written} does not have: give --format "
                f"{' or '.join(formats)}, or --format patchline"
            )


def _refuse_impossible(config: ModelConfig, change: Change) -> None:
    """UserError for values that no model can have; the message names the flags."""
    size, stride = change.image_size, 1 if config.is_bit else config.stride
    if size is not None and size < stride:
        raise UserError(f"--image-size is {size}; allowed: multiples of {stride} (px), from {stride} on")
    if size is not None and size % stride:
        lower = size // stride * stride
        raise UserError(
            f"--image-size is {size}, not a multiple of the patch ({stride} px); take {lower} or {lower + stride}"
        )


def _open_tensors(path: Path, hints: Hints) -> TensorFile:
    if path.name == _INDEX_FILE:
        return without_prefixes(open_sharded(path))
    return open_tensor_file(path, take=hints.take)


def _declared_pixels(folder: Path, description: Mapping[str, Any]) -> PixelRange | None:
    """What config.json or a processor's file in the folder says of the pixels; None if nothing does."""
    published = description.get("pretrained_cfg", description)
    by_timm = of_timm(published, where=str(folder / CONFIG_FILE)) if isinstance(published, dict) else None
    return by_timm or of_processor(folder)


def _with_our_pixels(
    weights: Weights, declared: PixelRange | None, hints: Hints, *, usual: PixelRange = PIXELS["paper"]
) -> Weights:
    """The weights with the pixels that they were trained on folded in: declared, given, or else assumed to be the
    `usual` ones of their architecture."""
    given = PIXELS[hints.pixels] if hints.pixels else None
    if declared and given and given != declared:
        raise UserError(
            f"--pixels is {hints.pixels!r} ({given}), the files at {weights.where!r} say {declared}; leave out --pixels"
        )
    pixels = declared or given or usual
    said = () if declared or given else (f"pixels of {pixels}",)
    tensor = folded(weights.tensor, weights.config, pixels, where=weights.where)
    if pixels != PIXELS["paper"]:
        log.info("%s: pixels of %s, folded into the patch embedding", weights.where, pixels)
    return replace(weights, tensor=tensor, assumed=weights.assumed + said)


def _refuse_other_pixels(path: Path, *, trained: str, usual: PixelRange) -> None:
    """UserError for a bare file whose name, or whose config.json, is of a model that takes other pixels than ours.
    `trained`: the model that its script's arguments name, and `usual`: the pixels of that model."""
    declared = None
    if (path.parent / CONFIG_FILE).is_file():
        declared = _declared_pixels(path.parent, json_object(path.parent / CONFIG_FILE))
    if declared and declared != PIXELS["paper"]:
        raise UserError(
            f"{CONFIG_FILE} beside {str(path)!r} says pixels of {declared}; give the folder, {str(path.parent)!r}, so "
            "that they are folded into the patch embedding"
        )
    if declared is None and (by_script := name_by_words(trained) or foreign_name(usual)):
        raise UserError(
            f"{str(path)!r} is of the model {shown_value(trained)}, by its script's arguments, which usually takes "
            f"pixels of {PIXELS[by_script]}; give --pixels {by_script} to fold them into the patch embedding, or "
            "--pixels paper for mean and deviation 0.5"
        )
    known = architecture_by_file(str(path))
    name = name_by_file(path) or (foreign_name(known.pixels) if known else None)
    if declared is None and name:
        raise UserError(
            f"{str(path)!r} is named like a model that takes pixels of {PIXELS[name]}, which the file does not say; "
            f"give --pixels {name} to fold them into the patch embedding, or --pixels paper for mean and deviation 0.5"
        )


def _open_folder(folder: Path, hints: Hints) -> Weights:
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"no {CONFIG_FILE} in {str(folder)!r}; give a folder of ours, timm's or Hugging Face's, or a file"
        )
    description = json_object(folder / CONFIG_FILE)
    if is_our_description(description):
        return _open_ours(str(folder), hints)
    tensors = next((folder / name for name in _TENSOR_FILES if (folder / name).is_file()), None)
    if tensors is None:
        raise UserError(f"no tensors in {str(folder)!r}; allowed: {', '.join(_TENSOR_FILES)}")
    declared = _declared_pixels(folder, description)
    if description.get("model_type") == "vit":
        file, processor = _open_tensors(tensors, hints), processor_of(folder)
        return _with_our_pixels(open_hugging_face(file, description, hints, processor=processor), declared, hints)
    if "architecture" in description:
        weights = timm.open_timm(_open_tensors(tensors, hints), description, hints)
        return _with_our_pixels(weights, declared, hints, usual=usual_pixels(description, {}))
    kind = description.get("model_type", "nothing")
    raise UserError(
        f"{CONFIG_FILE} in {str(folder)!r} has the model_type {kind!r}; allowed: 'vit', timm's (with an "
        "architecture) or our own"
    )


def _open_ours(folder: str, hints: Hints) -> Weights:
    weights = open_weights(folder)
    if given := [field.name for field in fields(hints) if field.name != "model" and getattr(hints, field.name)]:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{folder!r} is a weights folder of ours, whose config.json says all; leave out {flags}")
    if hints.model and weights.config.name != hints.model:
        raise UserError(f"--model is {hints.model!r}, the weights in {folder!r} are of {weights.config.name!r}")
    return weights


def _open_bare(file: TensorFile, path: Path, hints: Hints) -> Weights:
    if any(name in file.shapes for name in plain.MARKS):
        return plain.open_plain(file, hints)
    if any(name in file.shapes for name in timm.MARKS):
        declared = of_timm(file.arguments, where=str(path))
        usual = usual_pixels(of_script(file.arguments), file.arguments)
        if hints.pixels is None and declared is None:
            trained = str(file.arguments.get("model") or file.arguments.get("arch") or "")
            _refuse_other_pixels(path, trained=trained, usual=usual)
        weights = timm.open_timm(file, {}, hints)
        if (path.parent / CONFIG_FILE).is_file():
            timm.refuse_other_description(weights, file, json_object(path.parent / CONFIG_FILE), hints)
        return _with_our_pixels(weights, declared, hints, usual=usual)
    if any("embeddings.patch_embeddings" in name for name in file.shapes):
        raise UserError(
            f"{file.where!r} has Hugging Face's tensors; their config.json says the rest: give the folder of both"
        )
    some = ", ".join(sorted(file.shapes)[:5])
    raise UserError(
        f"the tensors in {file.where!r} are of no model known here ({some}, ...); allowed: ViT, hybrid and BiT in "
        "our names or timm's"
    )


def _with_folded_bias(config: ModelConfig, tensor: TensorByName) -> tuple[ModelConfig, TensorByName]:
    constant = config.head_bias
    return replace(config, head_bias=0.0), lambda name: tensor(name) + constant if name == HEAD[1] else tensor(name)


def _with_folded_scales(config: ModelConfig, tensor: TensorByName) -> tuple[ModelConfig, TensorByName]:
    """The same model without LayerScale: g (W x + b) = (g W) x + g b."""
    branches = {"attention.out": "scale1", "mlp.dense2": "scale2"}

    def folded_in(name: str) -> torch.Tensor:
        value, block = tensor(name), name.split(".")[:2]
        for layer, scale in branches.items():
            if name.startswith("blocks.") and f".{layer}." in name:
                gamma_D = tensor(".".join((*block, scale, "gamma"))).float()
                return value * (gamma_D[:, None] if value.dim() == 2 else gamma_D)
        return value

    return replace(config, layer_scale=0.0), folded_in


def _with_position_table(config: ModelConfig, tensor: TensorByName) -> tuple[ModelConfig, TensorByName]:
    """The same model with learned 1-D position embeddings, the only kind of tables that the other formats have."""
    if not config.is_bit and (config.position == "relative" or config.position_at != "input"):
        how = "relative positions" if config.position == "relative" else "positions at every layer"
        raise UserError(f"the model has {how}, which no other format has; allowed: --format patchline")
    if config.is_bit or config.position in ("learned_1d", "rope2d"):
        return config, tensor
    (height, width), num_prefix, d = config.grid, config.num_class_tokens, config.size.width

    def table(name: str) -> torch.Tensor:
        if name != POSITION:
            return tensor(name)
        if config.position == "none":
            return torch.zeros(1, num_prefix + height * width, d)
        if config.position == "sincos2d":
            return from_axes(sines(width, d), sines(height, d), num_prefix_tokens=num_prefix)
        x_WD, y_HD = (tensor(axis) for axis in AXES)
        return from_axes(x_WD, y_HD, num_prefix_tokens=num_prefix)

    return replace(config, position="learned_1d"), table
