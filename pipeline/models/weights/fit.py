"""Fits weights to a model with another resolution, patch size or head, for fine-tuning.

Weights are refused if they have hardly a tensor in common with the model, or if the model would compute something else
from the same tensors.

The patch embedding is resized to another patch size by PI-resize (patches.py).
"""

import shlex
from dataclasses import fields
from typing import Any

import torch

from pipeline.models.build import shapes_of
from pipeline.models.config import ModelConfig, ModeOrNone, Size
from pipeline.models.patches import resized_patches
from pipeline.models.positions import resample_axis_embeddings, resample_position_embeddings
from pipeline.models.weights.folder import HEAD_BIASES, HEADS, Weights
from pipeline.models.weights.safetensors import TensorByName, refuse_misfits
from shards.config_values import shown_value
from shards.errors import UserError

_TABLE, _AXIS = ".position", (".position_x", ".position_y")  # tables of the input and of each layer
_PATCH = "embed.patch.weight"
_MASK = "head.mask.token"  # the [mask] embedding, dropped with the head
_REPRESENTATION = ("representation.weight", "representation.bias")
_ROTARY = ("rotary_temperature", "rotary_places", "rotary_grid")
_PARTS = (
    *("pooling", "position", "position_at", "registers", "distillation_token", "qk_norm", "attention", "mlp"),
    *("inner_norms", "norm", "patch_norm", "first_norm", "last_norm"),
)
_OF_HEAD = ("num_classes", "representation")
_OF_TRANSFORMERS = ("gelu", "layer_norm_epsilon", "position", "position_at", "attention", "last_norm", *_ROTARY)


def fit_weights(
    weights: Weights,
    target: ModelConfig,
    *,
    initial: TensorByName,
    new_head: bool,
    mode: ModeOrNone = "paper",
    resize_patches: bool = False,
) -> TensorByName:
    """Returns a function that reads a tensor of the model `target` from weights of another size (fine-tuning, section
    3.2 of the paper).

    Position embeddings are resampled to the target's grid by `mode`; with "none", embeddings of another grid get their
    `initial` values. With `resize_patches`, a ViT's patch embedding of another patch size is resized. With `new_head`,
    the head and the hidden pre-training layer are dropped and the target's head gets its `initial` values. A head that
    is kept computes the same logits: the difference of the two models' constants (`head_bias`) is added to its bias.

    Raises a UserError that lists the tensors that do not fit, or if the same tensors would compute something else
    (heads, GELU, epsilons).
    """
    _refuse_other_family(weights, target)
    wanted, found = shapes_of(target), weights.shapes
    replaced = (*HEADS, _MASK, *_REPRESENTATION) if new_head else ()
    _refuse_other_distances(weights, target)
    places = [name for name in wanted if name.endswith((_TABLE, *_AXIS)) and name in found]
    is_resized = resize_patches and has_other_patches(weights.config, target)
    skip = {
        *replaced,
        *((_PATCH,) if is_resized else ()),
        *(name for name in places if wanted[name][-1] == found[name][-1]),
    }
    refuse_misfits(
        weights.where,
        advice=_advice(weights.config, target, new_head=new_head),
        found={name: shape for name, shape in found.items() if name not in skip},
        wanted={name: shape for name, shape in wanted.items() if name not in skip},
    )
    _refuse_other_arithmetic(weights, target)

    def tensor(name: str) -> torch.Tensor:
        if name in replaced:
            return initial(name)
        if mode == "none" and name in places and wanted[name] != found[name]:
            return initial(name)
        value = weights.tensor(name)
        if name in HEAD_BIASES:
            return value + (weights.config.head_bias - target.head_bias)
        if is_resized and name == _PATCH:
            return resized_patches(value, from_side=weights.config.size.patch, to_side=target.size.patch)
        if mode != "none" and name.endswith(_TABLE):
            from_grid, num_prefix_tokens = weights.config.grid, target.num_class_tokens
            return resample_position_embeddings(
                value[0], from_grid=from_grid, to_grid=target.grid, mode=mode, num_prefix_tokens=num_prefix_tokens
            )[None]
        if mode != "none" and name.endswith(_AXIS):
            return resample_axis_embeddings(value, length=wanted[name][0], mode=mode)
        return value

    return tensor


def has_other_patches(source: ModelConfig, target: ModelConfig) -> bool:
    """Returns whether two ViTs differ in the size of their patches. The patches of hybrids are cells of a ResNet's
    map."""
    are_vits = not any(config.is_bit or config.resnet for config in (source, target))
    return are_vits and source.size.patch != target.size.patch


def _refuse_other_family(weights: Weights, target: ModelConfig) -> None:
    """Raises UserError if the two models are of different families (ViT, hybrid, BiT ResNet), which have hardly a
    tensor in common."""
    was, now = _family(weights.config), _family(target)
    if was != now:
        raise UserError(
            f"the weights at {weights.where!r} are of {was} ({shown_value(weights.config.name)}), the model is {now} "
            f"({shown_value(target.name)}); give --model.name {shlex.quote(weights.config.name)} with its sizes, or "
            f"weights of {now}"
        )


def _family(config: ModelConfig) -> str:
    if config.is_bit:
        return "a BiT ResNet"
    return "a hybrid" if config.resnet else "a ViT"


def _refuse_other_distances(weights: Weights, target: ModelConfig) -> None:
    """Raises UserError if the grid of a model with relative positions changes: a distance in the sequence would then
    mean another distance in the image."""
    source = weights.config
    if source.position == target.position == "relative" and source.grid != target.grid:
        size = source.grid[0] * target.stride
        raise UserError(
            f"the weights at {weights.where!r} have positions relative in a sequence of {source.grid[0]} x "
            f"{source.grid[1]} patches, which mean nothing on {target.grid[0]} x {target.grid[1]}; give "
            f"--model.image-size {size}, or weights with learned positions"
        )


def _advice(source: ModelConfig, target: ModelConfig, *, new_head: bool) -> str:
    """Returns the flags that give the model the settings and sizes of the weights, including those that change no
    shape; empty if both have the same."""
    names = (*_PARTS, *(() if new_head else _OF_HEAD))
    pairs = [(name, getattr(source, name), getattr(target, name)) for name in names]
    if bool(source.layer_scale) != bool(target.layer_scale):  # initial values may differ
        pairs.append(("layer_scale", source.layer_scale, target.layer_scale))
    if not target.is_bit:
        pairs += [
            (field.name, *(getattr(each.size, field.name) for each in (source, target))) for field in fields(Size)
        ]
    pairs += _arithmetic(source, target)
    flags = dict.fromkeys(_flag(name, was) for name, was, now in pairs if was != now)
    resize = ", or --initial.patch resize" if has_other_patches(source, target) else ""
    return f"Give {' '.join(flags)}{resize}, or other weights" if flags else ""


def _arithmetic(source: ModelConfig, target: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Returns the fields that change what the same tensors compute without changing a shape, with the values of
    both."""
    pairs: list[tuple[str, Any, Any]] = []
    if target.resnet is not None:
        pairs.append(("resnet_epsilons", source.resnet_epsilons, target.resnet_epsilons))
    if not target.is_bit:
        pairs += [(field, getattr(source, field), getattr(target, field)) for field in _OF_TRANSFORMERS]
        pairs.append(("num_heads", source.size.num_heads, target.size.num_heads))
    return pairs


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    return f"--model.{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--model.{flag} {value}"


def _refuse_other_arithmetic(weights: Weights, target: ModelConfig) -> None:
    """Raises UserError for differing fields that change what the same tensors compute without changing a shape."""
    differing = [pair for pair in _arithmetic(weights.config, target) if pair[1] != pair[2]]
    if differing:
        listed = ", ".join(f"model.{field} {was} (the model here has {now})" for field, was, now in differing)
        flags = " ".join(f"--model.{field.replace('_', '-')} {was}" for field, was, _ in differing)
        assumed = {each.field: each.flag for each in weights.assumed}
        if silent := [(assumed[field], now) for field, _, now in differing if field in assumed]:
            others = " ".join(f"{flag} {now}" for flag, now in silent if flag)
            todo = f"import them with {others} (patchline import) and give the folder that it writes"
            raise UserError(
                f"the weights at {weights.where!r} are taken as made with {listed}, since the file does not say it; "
                f"give {flags}, or {todo if others else 'other weights'}"
            )
        raise UserError(f"the weights at {weights.where!r} were made with {listed}; give {flags}, or other weights")
