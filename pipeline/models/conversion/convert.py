"""Changes weights (another image size, patch size or head) and writes them in any supported format."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from pipeline.models.build import shapes_of
from pipeline.models.config import ModelConfig, fixed_patches, without_masked_patches
from pipeline.models.conversion import timm
from pipeline.models.conversion.config import Change, Format
from pipeline.models.conversion.hugging_face import save_hugging_face
from pipeline.models.conversion.npz import save_npz
from pipeline.models.conversion.sizes import refuse_absurd
from pipeline.models.conversion.timm_config import EPSILON
from pipeline.models.positions import from_axes, sines
from pipeline.models.weights.fit import fit_weights
from pipeline.models.weights.folder import (
    AXES,
    HEAD,
    HEAD_BIASES,
    HEADS,
    POSITION,
    Weights,
    save_weights,
)
from pipeline.models.weights.safetensors import TensorByName
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage
from shards.errors import UserError

log = logging.getLogger(__name__)


def changed(weights: Weights, change: Change) -> tuple[ModelConfig, TensorByName]:
    """Returns the model after the change, and its tensors. Raises UserError if the change does not fit the weights."""
    config = weights.config
    num_classes = config.num_classes if change.num_classes is None else change.num_classes
    if not num_classes:
        hidden = (
            " (its hidden layer, a pooler in Hugging Face's words, is dropped then)" if config.representation else ""
        )
        raise UserError(
            f"{weights.where!r} has no head ({HEAD[0]} is not there); give --new-head --num-classes K for one of zeros"
            f"{hidden}"
        )
    classifier = without_masked_patches(config) if change.new_head else config
    _refuse_impossible(weights, classifier, change)
    keeps_patches = change.patch is None or change.patch == config.size.patch
    target = replace(
        classifier,
        image_size=config.image_size if change.image_size is None else change.image_size,
        patch=config.patch if keeps_patches else change.patch,
        num_classes=num_classes,
        representation=config.representation and not change.new_head,
        head_bias=0.0 if change.new_head else config.head_bias,
    )
    refuse_absurd(target, where=weights.where)
    shapes = shapes_of(target)
    heads = [name for name in HEADS if name in shapes]
    if not change.new_head and any(weights.shapes.get(name) != shapes[name] for name in heads):
        there = [f"{name} is {list(weights.shapes.get(name, ()))}, {list(shapes[name])} is asked for" for name in heads]
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
        resize_patches=not keeps_patches,
    )
    if not keeps_patches:
        log.info("patches of %d px: the kernel is resized, from %d px", target.size.patch, config.size.patch)
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
    """Writes a file (.npz) or a folder, completely or not at all. The head's constant is folded into its bias.

    In formats other than ours, 2-D, sine-cosine or missing position embeddings become a learned 1-D table with the same
    values. Raises UserError if the model has parts that the format does not have. timm's format keeps only the
    transform of `usage`, and .npz files keep none of it.
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
    """Raises UserError for parts of the model that the format does not have. The message names the formats that have
    all of the model's parts."""
    npz: tuple[Format, ...] = ("vision_transformer", "big_vision")
    is_vit, resnet = not config.is_bit, config.resnet
    parts: dict[str, tuple[bool, tuple[Format, ...]]] = {
        "axial attention (model.attention)": (config.attention == "axial", ()),
        "relative positions": (config.position == "relative", ()),
        "positions at every layer": (config.position_at != "input", ()),
        "basic units with group norm and standardised weights (timm's resnetv2_18 and resnetv2_34 have batch norm)": (
            resnet is not None and resnet.is_basic,
            (),
        ),
        "SwiGLU (model.mlp)": (is_vit and config.mlp != "plain", ()),
        "norms inside of attention or MLPs (model.inner_norms)": (is_vit and config.inner_norms != "none", ()),
        "RMSNorms (model.norm)": (is_vit and config.norm != "layernorm", ()),
        "a norm of its patches (model.patch_norm)": (is_vit and config.patch_norm, ()),
        # In timm and transformers, patches in front of such a norm have no bias, into which pixels of another range are
        # folded.
        "a norm before its layers (model.first_norm) and a bias of its patches": (is_vit and config.first_norm, ()),
        "a last norm of the mean, or none (model.last_norm)": (is_vit and config.last_norm != "tokens", ("timm",)),
        "registers": (config.registers > 0, ("timm",)),
        "a distillation token (model.distillation_token)": (
            config.distillation_token,
            ("timm", "hugging_face"),
        ),
        "norms of queries and keys (model.qk_norm)": (config.qk_norm, ("timm",)),
        f"norms with an epsilon of {config.layer_norm_epsilon:g} (model.layer_norm_epsilon)": (
            is_vit and config.layer_norm_epsilon != EPSILON,
            (*npz, "hugging_face"),
        ),
        "rotary positions (model.position)": (config.is_rotary, ("timm",)),
        "attention pooling (model.pooling)": (config.pooling == "attention", ("timm", "big_vision")),
        "a hidden layer before the head (model.representation, which --new-head drops)": (config.representation, npz),
        "no class token (model.pooling)": (is_vit and config.pooling != "token", (*npz, "timm")),
        "a ResNet before its layers": (is_vit and resnet is not None, ("vision_transformer", "timm")),
        "no transformer": (config.is_bit, (*npz, "timm")),
    }
    there = {part: formats for part, (is_there, formats) in parts.items() if is_there}
    for part, formats in there.items():
        if not formats:
            raise UserError(f"the model has {part}, which no other format has; allowed: --format patchline")
        if written not in formats:
            of_all = [each for each in formats if all(each in others for others in there.values())]
            advice = (
                f": give --format {' or '.join(of_all)}, or"
                if of_all
                else ", and no other format has all of the model's parts: give"
            )
            raise UserError(
                f"the model has {part}, which the format {written} does not have{advice} --format patchline"
            )


def _refuse_impossible(weights: Weights, config: ModelConfig, change: Change) -> None:
    """Raises UserError for values that the model `config`, which the weights become, cannot have. The message names the
    flags."""
    if change.patch is not None and (wrong := fixed_patches(config)):
        raise UserError(
            f"--patch is {change.patch}, but {weights.where!r} has {'; '.join(wrong)}; allowed: Transformers without a "
            "ResNet that take grids of any size; leave out --patch"
        )
    size, stride = change.image_size, change.patch or (1 if config.is_bit else config.stride)
    if size is None and change.patch and config.image_size % change.patch:
        lower = config.image_size // stride * stride
        sizes = " or ".join(str(fitting) for fitting in (lower, lower + stride) if fitting)
        raise UserError(
            f"--patch is {change.patch}, which does not divide images of {config.image_size} px; take a size that "
            f"does, or give --image-size {sizes}, too"
        )
    if size is not None and size < stride:
        raise UserError(f"--image-size is {size}; allowed: multiples of {stride} (px), from {stride} on")
    if size is not None and size % stride:
        lower = size // stride * stride
        raise UserError(
            f"--image-size is {size}, not a multiple of the patch ({stride} px); take {lower} or {lower + stride}"
        )


def _with_folded_bias(config: ModelConfig, tensor: TensorByName) -> tuple[ModelConfig, TensorByName]:
    constant, folded = config.head_bias, HEAD_BIASES
    return replace(config, head_bias=0.0), lambda name: tensor(name) + constant if name in folded else tensor(name)


def _with_folded_scales(config: ModelConfig, tensor: TensorByName) -> tuple[ModelConfig, TensorByName]:
    """Returns the same model without LayerScale: g (W x + b) = (g W) x + g b."""
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
    """Returns the same model with learned 1-D position embeddings, the only kind of table that the other formats
    have."""
    if config.is_bit or config.has_table or config.is_rotary:
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
