"""timm's models: a folder with `config.json` and `model.safetensors` (timm.create_model("local-dir:FOLDER")), or a
state dict alone.

Sources: timm's vision_transformer.py, vision_transformer_hybrid.py, deit.py, resnetv2.py, eva.py and _hub.py.
timm_config.py reads what config.json says. Shape letters: D width, O channels out, I channels in.
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
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.dino import description_of_dino, with_names_of_timm
from pipeline.models.conversion.image_processor import default_transform_for
from pipeline.models.conversion.layout import (
    AS_IS,
    LAYER,
    TENSOR,
    LayerTensors,
    OurView,
    Section,
    Table,
    Transform,
    layout_of,
    one_to_one,
    patch_convolution,
    positions,
    their_shapes,
    write_layout,
)
from pipeline.models.conversion.sizes import (
    Declared,
    Found,
    bit_in,
    hybrid_resnet,
    transformer_in,
    weights_of,
)
from pipeline.models.conversion.tensor_file import FlagNeededError, TensorFile
from pipeline.models.conversion.timm_architectures import AXIAL_ARGUMENTS
from pipeline.models.conversion.timm_config import (
    GELUS,
    ROOTS,
    Turns,
    arguments_of,
    declared_grid,
    declared_heads,
    entries,
    last_norm_of,
    layer_scale,
    of_script,
    refuse_foreign,
    refuse_other_settings,
    refuse_other_width,
    turns_of,
    usual_of,
)
from pipeline.models.conversion.timm_tensors import naflex_grid, usual_tensors
from pipeline.models.weights.folder import Assumption, Weights, write_folder
from pipeline.models.weights.safetensors import TensorByName
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage, texts_of, unique_labels
from pipeline.shared_settings import EvaluationTransform, ResizeFilter, central_short_side
from shards.config_values import shown_value
from shards.errors import UserError

log = logging.getLogger(__name__)
MARKS = ("patch_embed.proj.weight", "stem.conv.weight")
# timm's interpolations by Pillow: our filter, and whether to antialias.
_FILTERS: dict[str, tuple[ResizeFilter, bool]] = {
    "bilinear": ("bilinear", True),
    "bicubic": ("bicubic", False),
    "box": ("area", False),
}
_CROP_MODES = ("center", "squash")
_LEAST_CROP = 0.1
# What timm's evaluation does unless a config.json says otherwise (resolve_data_config in timm's data/config.py).
_USUAL_EVALUATION: dict[str, Any] = {"crop_pct": 0.875, "interpolation": "bicubic", "crop_mode": "center"}
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
    """Opens the weights in timm's state dict. Raises a UserError that names the tensor that does not fit and says
    why."""
    description = _with_published(description or of_script(file.arguments) or description_of_dino(file))
    file = with_names_of_timm(file)
    file, table, found = model_in(file, description, hints)
    names = description.get("label_names") or entries(description, "pretrained_cfg").get("label_names")
    labels = texts_of(names, where=file.where) if isinstance(names, list) else ()
    transform, assumed = _transform(description, found.config.image_size, where=file.where)
    return weights_of(
        file,
        table,
        replace(found, assumed=(*found.assumed, *assumed)),
        advice=hints.advice(),
        labels=unique_labels(labels, where=file.where),
        usage=Usage(transform=transform),
    )


def model_in(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> tuple[TensorFile, Table, Found]:
    """Finds the model of a state dict. Returns the file in the form of `usual_tensors`, the table of its tensors, and
    the model. Before anything else, raises UserError for parts that our models lack."""
    refuse_foreign(file)
    refuse_other_settings(file, description)
    grid = naflex_grid(file)
    last_norm, turns = last_norm_of(file, description), turns_of(file, description)
    file = usual_tensors(file, description, hints)
    usual = usual_of(file, description)
    refuse_other_width(file, description, usual, hints)
    if "stem.conv.weight" in file.shapes:
        if "stages.0.blocks.0.conv2.weight" in file.shapes and "stages.0.blocks.0.conv3.weight" not in file.shapes:
            raise UserError(
                f"{file.where!r} has basic units (resnetv2_18, resnetv2_34), which timm trains with batch norm and "
                "plain convolutions; the ResNets here have neither: give the file of a BiT ResNet (resnetv2_..._bit)"
            )
        return file, _bit_table(), bit_in(OurView(file=file, table=_bit_table()), usual=usual, hints=hints)
    width, _, patch, patch_width = file.shape("patch_embed.proj.weight", 4)
    view = OurView(file=file, table=_vit_table(patch, stem="stem." if ROOTS[0] in file.shapes else ""))
    resnet = hybrid_resnet(view)
    stride = resnet.stride if resnet else 1  # px per cell: the patch of a hybrid is measured in cells
    no_row = arguments_of(description).get("no_embed_class")
    declared = Declared(
        width=width,
        patch=patch,
        num_heads=declared_heads(description),
        class_row=_class_row(file, no_row),
        grid=grid or declared_grid(description, (patch * stride, patch_width * stride), file.where),
        layer_scale=layer_scale(description),
        has_later_parts=True,
        settings={**(turns.fields if turns else {}), "last_norm": last_norm},
    )
    found = transformer_in(view, declared, usual=usual, hints=hints)
    return file, table_of(found.config, class_row=found.class_row, turns=turns), found


def _class_row(file: TensorFile, no_row: Any) -> bool | None:
    """Returns whether the position table has rows for the class token and the distillation token; None if nothing says
    it. `no_row`: what config.json says of it. With a distillation token, timm's table always has them."""
    if "dist_token" in file.shapes:
        return True
    return not no_row if "cls_token" in file.shapes and isinstance(no_row, bool) else None


def table_of(
    config: ModelConfig, *, class_row: bool = True, is_written: bool = False, turns: Turns | None = None
) -> Table:
    """Returns the table of our tensors in the state dict of timm's model. `class_row`: whether its position table has a
    row for the class token.

    `turns`: the rotary positions of a file, if it has them. `is_written`: the table is used for writing. The position
    table then also gets rows of zeros for registers, which timm's table has whenever it has a row for the class token,
    and models with rotary positions get the names of eva.py.
    """
    if config.is_bit:
        return _bit_table()
    has_token = config.num_class_tokens > 0
    position = positions(class_row=class_row, class_token=has_token)
    if is_written and config.registers and has_token:
        position = one_to_one(
            lambda t: torch.cat([t[:, :1], t.new_zeros(1, config.registers, t.shape[2]), t[:, 1:]], dim=1),
            lambda t: torch.cat([t[:, :1], t[:, 1 + config.registers :]], dim=1),
        )
    return _vit_table(
        config.size.patch,
        position=position,
        stem="stem." if config.resnet and config.resnet.units else "",  # without stages, the stem is the whole backbone
        scale="gamma_{}" if is_written and config.is_rotary else "ls{}.gamma",
        channels=_channels(config, turns) if turns else None,
        last_norm="fc_norm." if is_written and _is_pooled_first(config) else "norm.",
    )


def _is_pooled_first(config: ModelConfig) -> bool:
    """Returns whether timm calls the last norm `fc_norm`: the norm of a mean."""
    return config.pooling == "average" and config.last_norm == "pooled"


def _channels(config: ModelConfig, turns: Turns) -> torch.Tensor:
    """Returns which channel of a head in the file each of our channels is, int64[d]. Here neighbours are a pair, and
    the first half of the pairs is of columns."""
    width = config.size.width // config.size.num_heads
    pairs_F2 = torch.arange(width).reshape(2, -1).T if turns.halves else torch.arange(width).reshape(-1, 2)
    return (pairs_F2.roll(len(pairs_F2) // 2, 0) if turns.rows_first else pairs_F2).flatten()


def _reordered(channels: torch.Tensor | None, *, num_parts: int = 1) -> Transform:
    """Returns the transform of a tensor whose first dimension has the channels of one head after another, in the order
    of a file. `num_parts`: 3 for q, k and v, of which v keeps its order."""
    if channels is None:
        return AS_IS

    def ordered(t: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        heads = t.reshape(num_parts, -1, len(order), *t.shape[1:])
        turned = heads[:2, :, order.to(t.device)]
        return torch.cat([turned, heads[2:]]).reshape(t.shape)

    inverse = torch.argsort(channels)
    return one_to_one(lambda t: ordered(t, inverse), lambda t: ordered(t, channels))


def _vit_table(
    patch: int,
    *,
    position: Transform = AS_IS,
    stem: str,
    scale: str = "ls{}.gamma",
    channels: torch.Tensor | None = None,
    last_norm: str = "norm.",
) -> Table:
    backbone = "patch_embed.backbone."
    product: LayerTensors = {kind: (kind, _reordered(channels, num_parts=3)) for kind in ("weight", "bias")}
    of_head: LayerTensors = {kind: (kind, _reordered(channels)) for kind in ("weight", "bias")}
    return (
        *_resnet_sections("embed.resnet.", backbone, f"{backbone}{stem}"),
        Section(
            rows=(
                ("embed.patch.weight", "patch_embed.proj.weight", {"": ("", patch_convolution(patch))}),
                ("embed.patch.bias", "patch_embed.proj.bias", TENSOR),
                ("embed.patch_norm.", "patch_embed.norm.", LAYER),
                ("embed.class_token", "cls_token", TENSOR),
                ("embed.distillation_token", "dist_token", TENSOR),
                ("embed.registers", "reg_token", TENSOR),
                ("embed.position", "pos_embed", {"": ("", position)}),
                ("embed.norm.", "norm_pre.", LAYER),
            )
        ),
        Section(
            ours="blocks.{}.",
            theirs="blocks.{}.",
            rows=(
                ("norm1.", "norm1.", LAYER),
                ("attention.qkv.", "attn.qkv.", product),
                ("attention.norm.", "attn.norm.", LAYER),
                ("attention.out.", "attn.proj.", LAYER),
                ("norm2.", "norm2.", LAYER),
                ("mlp.dense1.", "mlp.fc1.", LAYER),
                ("mlp.dense2.", "mlp.fc2.", LAYER),
                ("mlp.norm.", "mlp.norm.", LAYER),
                ("attention.q_norm.", "attn.q_norm.", of_head),
                ("attention.k_norm.", "attn.k_norm.", of_head),
                ("scale1.gamma", scale.format(1), TENSOR),
                ("scale2.gamma", scale.format(2), TENSOR),
            ),
        ),
        Section(
            rows=(
                ("norm.", last_norm, LAYER),
                ("pool.probe", "attn_pool.latent", TENSOR),
                ("pool.query.", "attn_pool.q.", LAYER),
                ("pool.key_value.", "attn_pool.kv.", LAYER),
                ("pool.out.", "attn_pool.proj.", LAYER),
                ("pool.norm.", "attn_pool.norm.", LAYER),
                ("pool.mlp.dense1.", "attn_pool.mlp.fc1.", LAYER),
                ("pool.mlp.dense2.", "attn_pool.mlp.fc2.", LAYER),
                ("head.", "head.", LAYER),
                ("head_dist.", "head_dist.", LAYER),
            )
        ),
    )


def _bit_table() -> Table:
    convolution_1x1 = one_to_one(lambda t: t[:, :, None, None], lambda t: t[:, :, 0, 0])
    head = {"weight": ("weight", convolution_1x1), "bias": ("bias", AS_IS)}
    return (*_resnet_sections("", "", "stem."), Section(rows=(("norm.", "norm.", LAYER), ("head.", "head.fc.", head))))


def _resnet_sections(ours: str, theirs: str, stem: str) -> Table:
    """Returns the sections of a ResNet. Only the ResNets of hybrids have the norms of the root and of the projection. A
    hybrid's unit ends with our norm_out, which timm calls norm3."""
    return (
        Section(
            ours=ours, theirs=stem, rows=(("conv_root.weight", "conv.weight", TENSOR), ("norm_root.", "norm.", LAYER))
        ),
        Section(
            ours=f"{ours}stages.{{}}.{{}}.",
            theirs=f"{theirs}stages.{{}}.blocks.{{}}.",
            rows=(
                ("conv1.weight", "conv1.weight", TENSOR),
                ("norm1.", "norm1.", LAYER),
                ("conv2.weight", "conv2.weight", TENSOR),
                ("norm2.", "norm2.", LAYER),
                ("conv3.weight", "conv3.weight", TENSOR),
                ("norm3.", "norm3.", LAYER),
                ("norm_out.", "norm3.", LAYER),
                ("conv_proj.weight", "downsample.conv.weight", TENSOR),
                ("norm_proj.", "downsample.norm.", LAYER),
            ),
        ),
    )


def refuse_other_description(weights: Weights, file: TensorFile, description: Mapping[str, Any], hints: Hints) -> None:
    """Raises UserError if the config.json beside a bare file gives its model another number of heads or another GELU
    than was assumed."""
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
        raise FlagNeededError(
            f"config.json beside {file.where!r} says {listed}; give the folder, {str(folder)!r}, or {flags} if it is "
            "of another model"
        )


def _with_published(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns timm's older config.json in its present form. The older form is flat: the entries of `pretrained_cfg` are
    at the top, and `label_names` is called `labels`.

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
    """Writes a folder in timm's format. Raises UserError for parts that timm's models lack, and logs a warning if
    timm's arithmetic differs."""
    _refuse_foreign_rotation(config)
    _refuse_foreign_distillation(config)
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
            "classifier": _classifier(config),
        },
    }
    if len(labels) == config.num_classes:
        description["label_names"] = list(labels)
    shapes = shapes_of(config)
    layout = layout_of(table_of(config, is_written=True), shapes)
    write_folder(
        folder, description=description, shapes=their_shapes(layout, shapes), tensors=write_layout(layout, tensor)
    )


def _refuse_foreign_rotation(config: ModelConfig) -> None:
    """Raises UserError for parts that timm's models with rotary positions (eva.py) lack."""
    if config.is_bit or not config.is_rotary:
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


def _refuse_foreign_distillation(config: ModelConfig) -> None:
    """Raises UserError for parts that timm's model with a distillation token (deit.py) lacks."""
    if not config.distillation_token:
        return
    faults = {
        "registers": config.registers > 0,
        f"position {config.position!r}": config.is_rotary,
        "a ResNet": config.resnet is not None,
    }
    if wrong := [part for part, is_there in faults.items() if is_there]:
        raise UserError(
            "model.distillation_token is on, and timm's models with a distillation token cannot have "
            f"{' or '.join(wrong)}; give --format patchline"
        )


def _classifier(config: ModelConfig) -> str | list[str]:
    """Returns timm's names of the layers that have an output for each class."""
    if config.is_bit:
        return "head.fc"
    return ["head", "head_dist"] if config.distillation_token else "head"


def _evaluation_settings(transform: EvaluationTransform, image_size: int) -> dict[str, Any]:
    """Returns the settings with which timm's own evaluation (timm.data.create_transform) prepares images as ours does.
    Pillow, which timm uses, always antialiases."""
    interpolation = "box" if transform.filter == "area" else transform.filter
    if transform.mode == "resize":
        return {"interpolation": interpolation, "crop_pct": 1.0, "crop_mode": "squash"}
    short_side = central_short_side(transform, image_size)
    crop_share = image_size / short_side
    if math.floor(image_size / crop_share) < short_side:  # timm rounds the quotient down
        crop_share = math.nextafter(crop_share, 0.0)
    crop_mode = "squash" if transform.mode == "fewshot" else "center"
    return {"interpolation": interpolation, "crop_pct": crop_share, "crop_mode": crop_mode}


def _transform(
    description: Mapping[str, Any], image_size: int, *, where: str
) -> tuple[EvaluationTransform, tuple[Assumption, ...]]:
    """Returns how timm's own evaluation prepares images, the inverse of `_evaluation_settings`, and what is assumed
    about it. What the file leaves out is as in timm's resolve_data_config.

    Returns the default if the file describes no transform, or one that ours cannot do, which is then an assumption.
    Raises UserError if `crop_pct` is not from 0.1 to 1, or a setting is of another type.
    """
    said = entries(description, "pretrained_cfg")
    declared = {key: said[key] for key in _USUAL_EVALUATION if said.get(key) is not None}
    if not declared:
        return DEFAULT_USAGE.transform, ()
    crop_share, interpolation, crop_mode = (declared.get(key, usual) for key, usual in _USUAL_EVALUATION.items())
    if type(crop_share) not in (int, float) or not _LEAST_CROP <= crop_share <= 1:
        raise UserError(
            f"{where!r} says crop_pct {shown_value(crop_share)}; allowed: {_LEAST_CROP:g} to 1, the share of the "
            "resized image that its centre is"
        )
    for key, value, known in (("interpolation", interpolation, _FILTERS), ("crop_mode", crop_mode, _CROP_MODES)):
        if type(value) is not str:
            raise UserError(
                f"config.json beside {where!r} says {key} {shown_value(value)}; allowed: {', '.join(known)}, or "
                "another name of timm's, for which images are resized without a crop; correct it"
            )
    if interpolation not in _FILTERS or crop_mode not in _CROP_MODES:
        return DEFAULT_USAGE.transform, (default_transform_for(declared),)
    resize_filter, antialias = _FILTERS[interpolation]
    found = EvaluationTransform(filter=resize_filter, antialias=antialias)
    if crop_mode == "squash" and crop_share == 1:
        return found, ()
    mode: Literal["central_crop", "fewshot"] = "fewshot" if crop_mode == "squash" else "central_crop"
    return replace(found, mode=mode, short_side=math.floor(image_size / crop_share)), ()


def _architecture(config: ModelConfig) -> str:
    """Returns the name of the timm model that becomes ours with the arguments of `_arguments`."""
    if not config.is_bit and config.is_rotary:
        # A model without LayerScale needs a timm model of the same class that has none, since timm ignores arguments
        # that are None.
        return "vit_base_patch16_rope_224" if config.layer_scale else "eva_giant_patch14_224"
    if not config.resnet:
        return "deit_base_distilled_patch16_224" if config.distillation_token else "vit_base_patch16_224"
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
    is_eva = config.is_rotary
    is_of_mean, has_norm = _is_pooled_first(config), config.last_norm != "none"
    if is_eva:
        arguments |= AXIAL_ARGUMENTS | {"use_fc_norm": is_of_mean, "global_pool": "token"}
        arguments |= {"use_abs_pos_emb": config.has_table, "rope_temperature": config.rotary_temperature}
        arguments |= {} if has_norm else {"use_post_transformer_norm": False}
        arguments |= {"rope_type": "dinov3"} if config.rotary_places == "centred" else {}
        arguments |= {"rope_grid_offset": 1.0} if config.rotary_places == "from_one" else {}
        arguments |= {"ref_feat_shape": [config.rotary_grid] * 2} if config.rotary_grid else {}
    else:
        arguments |= {} if has_norm else {"final_norm": False}
        arguments["act_layer"] = {known: name for name, known in GELUS.items()}[config.gelu]
    if not config.resnet or size.patch != 1:
        arguments["patch_size"] = size.patch
    if config.layer_scale:
        arguments["init_values"] = config.layer_scale
    if config.qk_norm:
        arguments["qk_norm"] = True
    if config.registers:
        arguments |= {"num_reg_tokens" if is_eva else "reg_tokens": config.registers}
        arguments["no_embed_class"] = not config.num_class_tokens
    if config.pooling == "attention":
        arguments |= {"global_pool": "map", "class_token": False}
    if config.pooling == "average":
        arguments |= {"global_pool": "avg", "class_token": False, "use_fc_norm" if is_eva else "fc_norm": is_of_mean}
    return arguments
