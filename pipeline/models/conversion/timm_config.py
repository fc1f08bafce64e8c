"""Collects what config.json, a script's arguments and timm's code say about a timm model.

A state dict does not say how its model is configured; `config.json` may. timm's defaults are exact GELU and its own
epsilons in ResNets. For each entry point of timm whose model can be represented here, timm_architectures.py has what
timm's code sets.

Sources: vision_transformer.py, vision_transformer_hybrid.py, resnetv2.py, deit.py and eva.py of timm 1.0.31.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.models.config import Gelu, LastNorm
from pipeline.models.conversion.config import Hints, Pair
from pipeline.models.conversion.pixel_range import PIXELS, PixelRange, name_by_words
from pipeline.models.conversion.sizes import USUAL_LAYER_SCALE, Usual, grid_of, pair_of, temperature_of
from pipeline.models.conversion.tensor_file import FlagNeededError, TensorFile
from pipeline.models.conversion.timm_architectures import ARCHITECTURES, ARGUMENTS, Architecture
from shards.config_values import shown_value
from shards.errors import UserError

_IMAGENET = PIXELS["imagenet"]
GELUS: dict[str, Gelu] = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}
EPSILON = 1e-6
CLIP_EPSILON = 1e-5
# Parts of timm's models that ours lack: how their tensors' names begin, and what the message says about them.
_FOREIGN = {
    r"pre_logits\.": "is a hidden layer before the head, which timm itself ignores; give the .npz file of these "
    "weights, whose hidden layer is kept",
    r"patch_embed\.backbone\.(\d|conv1|bn1|layer\d)": "belongs to convolutions with batch norm in front of the blocks; "
    "the ResNets in front of blocks here have group norm and standardised weights",
    r"blocks\.\d+\.(attns|ffns)\.": "belongs to a block with two attentions in parallel, then two MLPs in parallel; "
    "a block here has one attention, then one MLP",
    r"blocks\.\d+\.in_proj\.": "belongs to a block whose attention and MLP read the same tokens in parallel; in a "
    "block here, the MLP reads what attention returns",
    r"blocks\.\d+\.attn\.lambda_": "belongs to differential attention, which subtracts one attention map from another; "
    "attention here has one map",
    r"blocks\.\d+\.attn\.gate\.": "belongs to attention that multiplies its result by a learned gate; attention here "
    "has no gate",
    r"(blocks\.\d+\.attn\.relative_position_bias_table|rel_pos_bias\.)": "is BEiT's learned bias for each offset "
    "between two patches, which is added to the logits of attention; relative positions here are vectors that queries "
    "are multiplied by",
    r"rope\.freqs": "holds rotary frequencies that each head of each layer has learned (RoPE-Mixed); the rotary "
    "frequencies here are fixed",
}
_PROBE = "attn_pool.latent"
# The first convolution of a hybrid: with stages, and without.
ROOTS = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")


# facebookresearch/moco-v3's vits.py, whose ViT-S differs from timm's. Its files name the model and have no other
# arguments.
_MOCO_V3: Mapping[str, Architecture] = {
    "vit_small": Architecture(width=384, num_heads=12, pixels=_IMAGENET),
    "vit_base": Architecture(width=768, num_heads=12, pixels=_IMAGENET),
}


def bare_architecture(description: Mapping[str, Any]) -> str:
    """Returns the architecture that a config.json names, without the tag of its weights; empty if it names none."""
    return str(description.get("architecture") or "").split(".")[0]


def of_script(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments of a training script in the form of a config.json; empty unless they name a model of
    timm."""
    named = next((value for key in ("model", "arch") if isinstance(value := arguments.get(key), str)), "")
    if bare_architecture({"architecture": named}) not in ARCHITECTURES:
        return {}
    given, pooled = arguments.get("model_kwargs"), arguments.get("gp")
    model_args = {**({"global_pool": pooled} if pooled else {}), **(given if isinstance(given, dict) else {})}
    return {"architecture": named, "model_args": model_args}


def named_architecture(description: Mapping[str, Any], arguments: Mapping[str, Any]) -> Architecture | None:
    """Returns the model that a config.json or a script's arguments name; None if neither table has it."""
    if len(arguments) == 1 and (of_moco := _MOCO_V3.get(str(arguments.get("arch")))):
        return of_moco
    return ARCHITECTURES.get(bare_architecture(description))


def architecture_by_file(path: str) -> Architecture | None:
    """Returns the model that a file is named after, such as vit_base_patch16_gap_224.pth; None if its name says
    nothing."""
    name = Path(path).name
    found = [each for each in ARCHITECTURES if re.match(rf"{each}(?![a-zA-Z0-9])", name)]
    return ARCHITECTURES[max(found, key=len)] if found else None


def usual_pixels(file: TensorFile, description: Mapping[str, Any]) -> PixelRange:
    """Returns the pixels to assume for a model that does not declare them. They follow from the tag of its weights
    ("mae"), else from its architecture or, if nothing names it, from its tensors."""
    if by_tag := name_by_words(str(description.get("architecture") or "").partition(".")[2]):
        return PIXELS[by_tag]
    known = named_architecture(description, file.arguments)
    return known.pixels if known else PIXELS["clip" if is_like_clip(file) else "paper"]


def is_like_clip(file: TensorFile) -> bool:
    """Returns whether timm's tensors are of CLIP, which has a norm before its layers, or of AIMv2, which has RMSNorms.
    Both have an epsilon of 1e-5, and most of their weights take CLIP's pixels."""
    is_rms = "blocks.0.norm1.weight" in file.shapes and "blocks.0.norm1.bias" not in file.shapes
    return is_rms or "norm_pre.weight" in file.shapes


def arguments_of(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments of timm's model: what the code of the named architecture sets, and what config.json sets
    instead."""
    pooled = description.get("global_pool")
    own = {**({"global_pool": pooled} if pooled else {}), **entries(description, "model_args")}
    return {**ARGUMENTS.get(bare_architecture(description), {}), **own}


def pooling_of(file: TensorFile, description: Mapping[str, Any]) -> str:
    """Returns what timm's model pools. If nothing says it, this follows from the tensors: a class token is pooled,
    unless there is a norm after the pooling, which timm has only for the mean of patches."""
    said = arguments_of(description).get("global_pool")
    if _PROBE in file.shapes or said == "map":
        return "map"
    is_mean = "cls_token" not in file.shapes or any(name.startswith("fc_norm.") for name in file.shapes)
    return str(said or ("avg" if is_mean else "token"))


def last_norm_of(file: TensorFile, description: Mapping[str, Any]) -> LastNorm:
    """Returns what the last norm of timm's model is of. There is none only if config.json or the architecture says so,
    since its tensors may as well be missing from the file."""
    said = arguments_of(description)
    has_norm, has_fc_norm = (any(name.startswith(f"{norm}.") for name in file.shapes) for norm in ("norm", "fc_norm"))
    if has_fc_norm and not has_norm:
        return "tokens" if pooling_of(file, description) == "token" else "pooled"
    is_left_out = said.get("final_norm") is False or said.get("use_post_transformer_norm") is False
    return "none" if is_left_out and not has_norm else "tokens"


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The rotary positions of a timm model: the fields of ModelConfig that describe them, and the order of a head's
    channels. `rows_first`: whether the first half of its frequencies is of rows. `halves`: whether a pair of channels
    is one of the first half of all channels and one of the second, instead of two neighbours."""

    fields: Mapping[str, Any]
    rows_first: bool
    halves: bool


def turns_of(file: TensorFile, description: Mapping[str, Any]) -> Turns | None:
    """Returns the rotary positions that config.json describes; None for a model without them. Raises UserError for
    positions that the models here do not have."""
    arguments, architecture = arguments_of(description), bare_architecture(description)
    if not arguments.get("use_rot_pos_emb"):
        is_eva = any(f"blocks.0.attn.{name}" in file.shapes for name in ("q_bias", "q_proj.weight"))
        if "rope" in architecture or (
            is_eva and architecture not in ARCHITECTURES and "use_rot_pos_emb" not in arguments
        ):
            raise UserError(
                f"{file.where!r} is of a model of timm's eva.py, {architecture or 'which no config.json names'}, whose "
                "positions may be rotary: give the folder whose config.json names an architecture of timm's, or has "
                "use_rot_pos_emb and what else its code sets in its model_args"
            )
        return None
    kind, offset = arguments.get("rope_type") or "cat", arguments.get("rope_grid_offset") or 0
    grid = arguments.get("ref_feat_shape") or 0
    side = pair_of(grid, key="ref_feat_shape", where=file.where)[0] if grid else 0
    is_centred, has_table = kind == "dinov3", "pos_embed" in file.shapes
    wrong = {
        "rope_type": kind not in ("cat", "dinov3"),
        "rope_grid_offset": offset not in ((0,) if is_centred else (0, 1)),
        "rope_grid_indexing": arguments.get("rope_grid_indexing", "ij") not in ("ij", "xy"),
        "ref_feat_shape": isinstance(grid, list | tuple) and grid[0] != grid[-1],
        "use_abs_pos_emb": bool(arguments.get("use_abs_pos_emb", True)) != has_table,
    }
    if listed := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise UserError(
            f"config.json beside {file.where!r} says rotary positions with other {', '.join(listed)}; allowed: fixed "
            "frequencies (rope_type cat or dinov3), a grid_offset of 0 or 1, a square ref_feat_shape, and "
            "use_abs_pos_emb as the tensors have it"
        )
    said = arguments.get("rope_temperature", 10_000.0)
    temperature = temperature_of(said, key="rope_temperature", where=file.where)
    places = "centred" if is_centred else "from_one" if offset else "from_zero"
    fields = {
        "position": "learned_rope2d" if has_table else "rope2d",
        "rotary_temperature": temperature,
        "rotary_places": places,
    }
    return Turns(
        fields={**fields, "rotary_grid": 0 if is_centred else side},
        rows_first=arguments.get("rope_grid_indexing", "ij") == "ij",
        halves=bool(arguments.get("rope_rotate_half")),
    )


def entries(description: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the object `name` inside config.json; empty if there is none."""
    found = description.get(name)
    return found if isinstance(found, dict) else {}


def refuse_foreign(file: TensorFile) -> None:
    """Raises UserError for parts that the models here lack."""
    for start, reason in _FOREIGN.items():
        for name in file.shapes:
            if re.match(start, name):
                raise UserError(f"{name} {list(file.shapes[name])} in {file.where!r} {reason}")
    for name, shape in file.shapes.items():
        keys = name.replace(".q_proj.", ".k_proj.")
        has_heads = (
            name.replace(".q_proj.", ".q_norm.") in file.shapes
        )  # timm_tensors.py copies shared keys to each head
        if keys != name and name.endswith(".weight") and file.shapes.get(keys, shape) != shape and not has_heads:
            raise UserError(
                f"{keys} {list(file.shapes[keys])} in {file.where!r} has other sizes than {name} {list(shape)}: "
                "several heads share their keys (grouped-query attention), and no q_norm says how wide a head is"
            )


def usual_of(file: TensorFile, description: Mapping[str, Any]) -> Usual:
    """Returns what timm's code, config.json or a script's arguments say, and the usual values for the rest."""
    arguments, named = entries(description, "model_args"), named_architecture(description, file.arguments)
    known, activation = named or architecture_by_file(file.where), arguments.get("act_layer")
    num_heads = known.num_heads if known and _width(file) in (known.width, arguments.get("embed_dim")) else None
    declared = declared_heads(description)
    gelu = GELUS.get(str(activation)) if activation else known.gelu if known else "exact"
    if gelu is None:
        raise UserError(f"act_layer in {file.where!r} is {activation!r}; allowed: {', '.join(GELUS)}")
    epsilon = known.epsilon if known else CLIP_EPSILON if is_like_clip(file) else EPSILON
    said = {"gelu": activation or named, "layer_norm_epsilon": named, "num_heads": declared or (named and num_heads)}
    return Usual(
        gelu=gelu,
        layer_norm_epsilon=epsilon,
        resnet_epsilons="timm",
        num_heads=declared or num_heads,
        said=tuple(name for name, source in said.items() if source),
    )


def refuse_other_width(file: TensorFile, description: Mapping[str, Any], usual: Usual, hints: Hints) -> None:
    """Raises UserError if the named architecture has another width than the tensors, so that its number of heads says
    nothing about them. Some names meant another model in older versions of timm."""
    named = named_architecture(description, file.arguments)
    if named and not (usual.num_heads or "num_heads" in usual.said or hints.num_heads or hints.model):
        name = description.get("architecture") or file.arguments.get("arch")
        raise FlagNeededError(
            f"{file.where!r} is called {shown_value(name)}, which is {named.width} wide "
            f"with {named.num_heads} heads, and its tensors are {_width(file)} wide; give --num-heads"
        )


def _width(file: TensorFile) -> int:
    return file.shape("patch_embed.proj.weight", 4)[0] if "patch_embed.proj.weight" in file.shapes else 0


def declared_heads(description: Mapping[str, Any]) -> int | None:
    number = entries(description, "model_args").get("num_heads")
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None


def refuse_other_settings(file: TensorFile, description: Mapping[str, Any]) -> None:
    """Raises UserError if config.json says that timm computes something else with the same tensors."""
    arguments, pooled = arguments_of(description), pooling_of(file, description)
    is_vit, has_probe = "stem.conv.weight" not in file.shapes, _PROBE in file.shapes
    named = next((value for key in ("model", "arch") if isinstance(value := file.arguments.get(key), str)), "")
    architecture = str(description.get("architecture") or named)
    has_prefix = "reg_token" in file.shapes or (has_probe and "cls_token" in file.shapes)
    is_eva = bool(arguments.get("use_rot_pos_emb") or "blocks.0.attn.q_bias" in file.shapes)
    if is_vit and has_prefix and (arguments.get("pool_include_prefix") or (has_probe and is_eva)):
        raise UserError(
            f"the pooling of {file.where!r} reads the class token or registers beside the patches "
            "(pool_include_prefix, or attention pooling of timm's eva.py); pooling here reads the patches alone"
        )
    allowed = ["map"] if has_probe else ["token", "avg"] if "cls_token" in file.shapes else ["avg"]
    said = str(arguments.get("global_pool") or pooled)
    if is_vit and said not in allowed:
        raise UserError(
            f"config.json beside {file.where!r}, or its script, says global_pool {said!r}; with these tensors "
            f"allowed: {' or '.join(map(repr, allowed))}"
        )
    if has_probe and arguments.get("attn_pool_num_heads"):
        raise UserError(
            f"the attention pooling of {file.where!r} has {shown_value(arguments['attn_pool_num_heads'])} heads "
            "(attn_pool_num_heads), a number of its own; attention pooling here has as many heads as a layer"
        )
    if "naflex" in architecture and "radio" in architecture:
        raise UserError(
            f"{file.where!r} is of {shown_value(architecture)}, which cuts its positions out of an enlarged table, at "
            "a place that depends on the image's size; give the same weights for timm's model without naflex in its "
            "name"
        )
    if "_rpn_" in architecture or arguments.get("use_post_norm"):
        raise UserError(
            f"{file.where!r} is of {shown_value(architecture)}, which normalises what attention and MLP return; "
            "blocks here normalise what attention and MLP read"
        )


def layer_scale(description: Mapping[str, Any]) -> float:
    value = entries(description, "model_args").get("init_values")
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    return USUAL_LAYER_SCALE


def declared_grid(description: Mapping[str, Any], patch: Pair, where: str) -> Pair | None:
    """Returns the numbers of patches down and across that config.json declares. Its model_args take precedence over its
    entries for the published weights."""
    image, published = entries(description, "model_args").get("img_size"), entries(description, "pretrained_cfg")
    if image is not None:
        return grid_of(pair_of(image, key="img_size", where=where), patch)
    if not isinstance(published.get("input_size"), list):
        return None
    return grid_of(pair_of(published["input_size"][1:], key="input_size", where=where), patch)
