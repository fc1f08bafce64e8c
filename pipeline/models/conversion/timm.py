"""timm's models: a folder with `config.json` and `model.safetensors` (timm.create_model("local-dir:FOLDER")), or a
state dict alone.

Sources: timm's vision_transformer.py, vision_transformer_hybrid.py, resnetv2.py and _hub.py. timm_config.py finds the
model of a file. Shape letters: D width, O channels out, I channels in.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline.models.build import shapes_of
from pipeline.models.config import ModelConfig, ResNetSize
from pipeline.models.conversion.layout import (
    Layout,
    TensorMapping,
    as_is,
    changed,
    patch_convolution,
    positions,
    read_layout,
    same,
    their_shapes,
    write_layout,
)
from pipeline.models.conversion.sizes import Hints, assumed, shapes_in_file
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.timm_architectures import of_script
from pipeline.models.conversion.timm_config import (
    AXIAL_ARGUMENTS,
    EPSILON,
    GELUS,
    entries,
    model_in,
    usual_of,
    with_names_of_today,
    without_register_rows,
)
from pipeline.models.weights.folder import Weights, write_folder
from pipeline.models.weights.safetensors import TensorByName
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage, texts_of, unique_labels
from pipeline.shared_settings import EvaluationTransform, ResizeFilter, central_short_side
from shards.errors import UserError
from shards.schema.config_values import shown_value

log = logging.getLogger(__name__)
MARKS = ("patch_embed.proj.weight", "stem.conv.weight")
_POOL = {"query": "q", "key_value": "kv", "out": "proj", "norm": "norm", "mlp.dense1": "mlp.fc1"}
_POOL |= {"mlp.dense2": "mlp.fc2"}
# timm's interpolations by Pillow, as our filters and whether to antialias.
_FILTERS: dict[Any, tuple[ResizeFilter, bool]] = {
    "bilinear": ("bilinear", True),
    "bicubic": ("bicubic", False),
    "box": ("area", False),
}
_LEAST_CROP = 0.1
_RESNETS = {
    ResNetSize(units=(3, 4, 9)): "vit_base_r50_s16_224",
    ResNetSize(units=(3, 4, 6, 3)): "vit_large_r50_s32_224",
    ResNetSize(units=(2, 2, 2, 2)): "vit_small_r26_s32_224",
    ResNetSize(units=()): "vit_tiny_r_s16_p8_224",
}
_BITS = {
    ResNetSize(units=units, factor=factor): f"resnetv2_{depth}x{factor}_bit"
    for depth, units, factors in (
        (50, (3, 4, 6, 3), (1, 3)),
        (101, (3, 4, 23, 3), (1, 3)),
        (152, (3, 8, 36, 3), (2, 4)),
    )
    for factor in factors
}


def open_timm(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> Weights:
    """The weights in timm's state dict. Raises UserError with the tensor that does not fit, and why."""
    description = _with_published(description or of_script(file.arguments))
    file = without_register_rows(with_names_of_today(file, description), description, hints)
    found = model_in(file, description, hints)
    shapes = shapes_in_file(found.config)
    mappings = layout(found.config, class_row=found.class_row)
    tensor = read_layout(file, mappings, shapes, advice=hints.advice())
    said = assumed(found.config, said=found.said, hints=hints) + found.assumed
    names = description.get("label_names") or entries(description, "pretrained_cfg").get("label_names")
    labels = texts_of(names, where=file.where) if isinstance(names, list) else ()
    labels = unique_labels(labels, where=file.where)
    usage = Usage(transform=_transform(description, found.config.image_size, where=file.where))
    return Weights(
        where=file.where,
        config=found.config,
        labels=labels,
        shapes=shapes,
        tensor=tensor,
        assumed=said,
        usage=usage,
    )


def refuse_other_description(weights: Weights, file: TensorFile, description: Mapping[str, Any], hints: Hints) -> None:
    """UserError if the config.json beside a bare file says that its model has other heads or another GELU than were
    taken without it."""
    config, said = weights.config, usual_of(file, description)
    if config.is_bit:
        return
    taken: dict[str, Any] = {"num_heads": config.size.num_heads, "gelu": config.gelu}
    told = {"num_heads": said.num_heads, "gelu": said.gelu}
    differing = [name for name in said.said if name in told and told[name] != taken[name] and not getattr(hints, name)]
    if differing:
        listed = " and ".join(f"{name} {told[name]}" for name in differing)
        flags = " ".join(f"--{name.replace('_', '-')} {taken[name]}" for name in differing)
        folder = Path(file.where).parent
        raise UserError(
            f"config.json beside {file.where!r} says {listed}; give the folder, {str(folder)!r}, or {flags} if it is "
            "of another model"
        )


def _with_published(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """timm's older config.json is flat: the entries of `pretrained_cfg` are at the top, and `label_names` is `labels`.

    Source: `load_model_config_from_hf` in timm's _hub.py.
    """
    if "pretrained_cfg" in description:
        return description
    return {**description, "pretrained_cfg": {"label_names": description.get("labels"), **description}}


def save_timm(
    folder: Path,
    *,
    config: ModelConfig,
    labels: tuple[str, ...],
    tensor: TensorByName,
    transform: EvaluationTransform = DEFAULT_USAGE.transform,
) -> None:
    """Writes the folder. UserError for parts that timm's models lack; logs a warning if the arithmetic differs."""
    if config.representation:
        raise UserError(
            "timm's models have no hidden layer before the head (representation); it is never dropped silently: "
            "give --new-head for a model without it, or export as vision_transformer or big_vision"
        )
    if not config.is_bit and config.layer_norm_epsilon != EPSILON:
        raise UserError(
            f"model.layer_norm_epsilon is {config.layer_norm_epsilon}; timm's models have {EPSILON}; "
            "export as hugging_face, whose config.json says it"
        )
    _refuse_foreign_rotation(config)
    architecture = _architecture(config)
    if config.resnet and config.resnet_epsilons != "timm":
        log.warning(
            "timm's ResNets have other epsilons than the paper's code (model.resnet_epsilons): logits differ a little"
        )
    description = {
        "architecture": architecture,
        "num_classes": config.num_classes,
        "model_args": _arguments(config),
        "pretrained_cfg": {
            "num_classes": config.num_classes,
            "input_size": [3, config.image_size, config.image_size],
            "fixed_input_size": not config.is_bit,
            **_evaluation_settings(transform, config.image_size),
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "first_conv": "stem.conv" if config.is_bit else "patch_embed.proj",
            "classifier": "head.fc" if config.is_bit else "head",
        },
    }
    if len(labels) == config.num_classes:
        description["label_names"] = list(labels)
    has_rows = not config.is_bit and config.registers > 0 and config.num_class_tokens > 0
    mappings = layout(config, class_row=True, register_rows=has_rows, is_eva=config.position == "rope2d")
    shapes = their_shapes(mappings, shapes_of(config))
    write_folder(folder, description=description, shapes=shapes, tensors=write_layout(mappings, tensor))


def _refuse_foreign_rotation(config: ModelConfig) -> None:
    """UserError for what timm's models with rotary positions (eva.py) lack."""
    if config.is_bit or config.position != "rope2d":
        return
    faults = {
        "the tanh GELU (model.gelu)": config.gelu != "exact",
        "a ResNet": config.resnet is not None,
        "registers that attention pooling leaves out": config.pooling == "attention" and config.registers > 0,
    }
    if wrong := [part for part, is_there in faults.items() if is_there]:
        raise UserError(
            f"model.position is 'rope2d', and timm's models with rotary positions cannot have {' or '.join(wrong)}; "
            "give --format patchline"
        )


def _evaluation_settings(transform: EvaluationTransform, image_size: int) -> dict[str, Any]:
    """What makes timm's own evaluation (timm.data.create_transform) prepare images as ours does. Pillow, which timm
    uses, always antialiases."""
    interpolation = "box" if transform.filter == "area" else transform.filter
    if transform.mode == "resize":
        return {"interpolation": interpolation, "crop_pct": 1.0, "crop_mode": "squash"}
    short_side = central_short_side(transform, image_size)
    crop_share = image_size / short_side
    if math.floor(image_size / crop_share) < short_side:  # timm rounds the quotient down
        crop_share = math.nextafter(crop_share, 0.0)
    crop_mode = "squash" if transform.mode == "fewshot" else "center"
    return {"interpolation": interpolation, "crop_pct": crop_share, "crop_mode": crop_mode}


def _transform(description: Mapping[str, Any], image_size: int, *, where: str) -> EvaluationTransform:
    """The inverse of `_evaluation_settings`: how timm's own evaluation prepares images, or the default if the file does
    not say, or says what ours cannot do. UserError for a `crop_pct` that is no share."""
    said = entries(description, "pretrained_cfg")
    crop_share, interpolation, crop_mode = (said.get(key) for key in ("crop_pct", "interpolation", "crop_mode"))
    if crop_share is None or interpolation not in _FILTERS or crop_mode not in (None, "center", "squash"):
        return DEFAULT_USAGE.transform
    if type(crop_share) not in (int, float) or not _LEAST_CROP <= crop_share <= 1:
        raise UserError(
            f"{where!r} says crop_pct {shown_value(crop_share)}; allowed: {_LEAST_CROP:g} to 1, the share of the "
            "resized image that its centre is"
        )
    resize_filter, antialias = _FILTERS[interpolation]
    found = EvaluationTransform(filter=resize_filter, antialias=antialias)
    if crop_mode == "squash" and crop_share == 1:
        return found
    mode: Literal["central_crop", "fewshot"] = "fewshot" if crop_mode == "squash" else "central_crop"
    return replace(found, mode=mode, short_side=math.floor(image_size / crop_share))


def layout(config: ModelConfig, *, class_row: bool, register_rows: bool = False, is_eva: bool = False) -> Layout:
    """Our tensors in timm's state dict. `register_rows`: its position table has rows of zeros for registers, as timm's
    has if there is one for the class token. `is_eva`: the names of eva.py, which has the rotary positions."""
    if config.is_bit:
        return _bit_layout(config)
    has_token = config.num_class_tokens > 0
    mappings: dict[str, TensorMapping] = {}
    if config.resnet:
        mappings |= _stages("embed.resnet.", "patch_embed.backbone.", config.resnet, is_bit=False)
    mappings["embed.patch.weight"] = patch_convolution("patch_embed.proj.weight", config.size.patch)
    mappings["embed.patch.bias"] = as_is("patch_embed.proj.bias")
    if has_token:
        mappings["embed.class_token"] = as_is("cls_token")
    if config.registers:
        mappings["embed.registers"] = as_is("reg_token")
    if config.position == "learned_1d" and register_rows:  # after that of the class token
        mappings["embed.position"] = changed(
            "pos_embed",
            lambda t: torch.cat([t[:, :1], t.new_zeros(1, config.registers, t.shape[2]), t[:, 1:]], dim=1),
            lambda t: torch.cat([t[:, :1], t[:, 1 + config.registers :]], dim=1),
        )
    elif config.position == "learned_1d":
        mappings["embed.position"] = positions("pos_embed", class_row=class_row, class_token=has_token)
    pairs = {"norm1": "norm1", "attention.qkv": "attn.qkv", "attention.out": "attn.proj", "norm2": "norm2"}
    pairs |= {"mlp.dense1": "mlp.fc1", "mlp.dense2": "mlp.fc2"}
    pairs |= {f"attention.{norm}": f"attn.{norm}" for norm in ("q_norm", "k_norm") if config.qk_norm}
    for number in range(config.size.depth):
        for ours, theirs in pairs.items():
            mappings |= same(f"blocks.{number}.{ours}.", f"blocks.{number}.{theirs}.")
        for branch in (1, 2) if config.layer_scale else ():
            name = f"gamma_{branch}" if is_eva else f"ls{branch}.gamma"
            mappings[f"blocks.{number}.scale{branch}.gamma"] = as_is(f"blocks.{number}.{name}")
    mappings |= same("norm.", "norm.")
    if config.pooling == "attention":
        mappings["pool.probe"] = as_is("attn_pool.latent")
        for ours, theirs in _POOL.items():
            mappings |= same(f"pool.{ours}.", f"attn_pool.{theirs}.")
    return mappings | (same("head.", "head.") if config.num_classes else {})


def _bit_layout(config: ModelConfig) -> Layout:
    """The layout of a BiT model, whose head is a 1x1 convolution in timm."""
    mappings = _stages("", "", config.resnet, is_bit=True) if config.resnet else {}
    mappings |= same("norm.", "norm.")
    if config.num_classes:
        mappings["head.weight"] = changed("head.fc.weight", lambda t: t[:, :, None, None], lambda t: t[:, :, 0, 0])
        mappings["head.bias"] = as_is("head.fc.bias")
    return mappings


def _stages(ours: str, theirs: str, resnet: ResNetSize, *, is_bit: bool) -> dict[str, TensorMapping]:
    stem = f"{theirs}stem." if resnet.units else theirs  # without stages, the stem is the whole backbone
    mappings = {f"{ours}conv_root.weight": as_is(f"{stem}conv.weight")}
    if not is_bit:
        mappings |= same(f"{ours}norm_root.", f"{stem}norm.")
    norms = ("norm1", "norm2", "norm3" if is_bit else "norm_out")
    for stage, num_units in enumerate(resnet.units):
        for unit in range(num_units):
            here, there = f"{ours}stages.{stage}.{unit}.", f"{theirs}stages.{stage}.blocks.{unit}."
            for number, norm in enumerate(norms, 1):
                mappings[f"{here}conv{number}.weight"] = as_is(f"{there}conv{number}.weight")
                mappings |= same(f"{here}{norm}.", f"{there}norm{number}.")
            if unit == 0:
                mappings[f"{here}conv_proj.weight"] = as_is(f"{there}downsample.conv.weight")
                mappings |= {} if is_bit else same(f"{here}norm_proj.", f"{there}downsample.norm.")
    return mappings


def _architecture(config: ModelConfig) -> str:
    """The model of timm that becomes ours with the arguments below."""
    if not config.is_bit and config.position == "rope2d":
        # Without LayerScale, a model of the same class whose code has none: timm ignores an argument of None.
        return "vit_base_patch16_rope_224" if config.layer_scale else "eva_giant_patch14_224"
    if not config.resnet:
        return "vit_base_patch16_224"
    known = _BITS if config.is_bit else _RESNETS
    if config.resnet not in known:
        raise UserError(
            f"timm has no model with a ResNet of {config.resnet.units} units and factor {config.resnet.factor}; "
            f"allowed: {', '.join(f'{r.units} and {r.factor}' for r in known)}; or export as vision_transformer"
        )
    return known[config.resnet]


def _arguments(config: ModelConfig) -> dict[str, Any]:
    if config.is_bit:
        return {}
    size = config.size
    ratio = size.mlp_width / size.width
    if int(size.width * ratio) != size.mlp_width:  # timm rounds the product down
        ratio = math.nextafter(ratio, math.inf)
    arguments: dict[str, Any] = {"img_size": config.image_size, "embed_dim": size.width, "depth": size.depth}
    arguments |= {"num_heads": size.num_heads, "mlp_ratio": ratio}
    is_eva = config.position == "rope2d"
    if is_eva:
        arguments |= AXIAL_ARGUMENTS | {"use_fc_norm": False, "global_pool": "token"}
    else:
        arguments["act_layer"] = {known: name for name, known in GELUS.items()}[config.gelu]
    if not config.resnet or size.patch != 1:
        arguments["patch_size"] = size.patch
    if config.layer_scale:
        arguments["init_values"] = config.layer_scale
    if config.qk_norm:
        arguments["qk_norm"] = True
    if config.registers:
        arguments |= {"num_reg_tokens" if is_eva else "reg_tokens": config.registers}
        arguments |= {} if is_eva else {"no_embed_class": not config.num_class_tokens}
    if config.pooling == "attention":
        arguments |= {"global_pool": "map", "class_token": False}
    if config.pooling == "average":
        arguments |= {"global_pool": "avg", "class_token": False, "use_fc_norm" if is_eva else "fc_norm": False}
    return arguments
