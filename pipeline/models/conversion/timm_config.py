"""Collects what config.json, a script's arguments and timm's code say about a timm model.

A state dict does not say how its model is configured; `config.json` may. timm's defaults are exact GELU and its own
epsilons in ResNets. For each entry point of timm whose model can be represented here, the table below has what timm's
code sets: the attention heads, the GELU, and the pixels of its published weights. A test compares the table and the
logits of each model with the installed timm.

Sources: vision_transformer.py, vision_transformer_hybrid.py, resnetv2.py, deit.py and eva.py of timm 1.0.31.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.models.config import Gelu
from pipeline.models.conversion.config import Hints, Pair
from pipeline.models.conversion.pixel_range import PIXELS, PixelRange, name_by_words
from pipeline.models.conversion.sizes import USUAL_LAYER_SCALE, Usual, grid_of, pair_of
from pipeline.models.conversion.tensor_file import FlagNeededError, TensorFile
from shards.config_values import shown_value
from shards.errors import UserError

_PAPER, _IMAGENET = PIXELS["paper"], PIXELS["imagenet"]
_UNIT = PixelRange(mean=(0.0, 0.0, 0.0), deviation=(1.0, 1.0, 1.0))  # [0, 1]
GELUS: dict[str, Gelu] = {"gelu": "exact", "gelu_tanh": "tanh"}
EPSILON = 1e-6
# Models of timm's eva.py whose rotary positions are like ours (RoPE-ViT's axial ones), and what their code sets.
_AXIAL = frozenset({"vit_small_patch16_rope_224", "vit_base_patch16_rope_224", "vit_large_patch16_rope_224"})
AXIAL_ARGUMENTS: dict[str, Any] = {
    "attn_type": "rope",
    "use_abs_pos_emb": False,
    "use_rot_pos_emb": True,
    "rope_grid_indexing": "xy",
    "rope_temperature": 100.0,
}
_OTHER_ROTATIONS = ("rope_type", "rope_grid_offset", "rope_rotate_half", "ref_feat_shape")
_NO_FIELD = "no field of a model here stands for it, so weights of this architecture cannot be brought in"
# Parts of timm's models that ours lack: how their tensors' names begin, and what the message says about them.
_FOREIGN = {
    r"pre_logits\.": "is a hidden layer before the head, which timm itself leaves out; take the weights' .npz file, "
    "whose hidden layer is kept",
    r"fc_norm\.": "is a norm after the mean over tokens; the models here have theirs before it, as the paper's code: "
    "give weights with global_pool 'avg' and fc_norm False, or with a class token",
    r"dist_token|head_dist\.": f"is of a distillation token: {_NO_FIELD}",
    r"patch_embed\.backbone\.(conv1|bn1|layer\d)": "is of a ResNet with batch norm before the blocks; those of hybrids "
    f"here have group norm and standardised weights: {_NO_FIELD}",
    r"norm_pre\.": f"is a norm before the blocks: {_NO_FIELD}",
}
_QKV = "blocks.0.attn.qkv."
_PROBE = "attn_pool.latent"
# The first convolution of a hybrid: with stages, and without.
ROOTS = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A timm model. The epsilon of its norms is always 1e-6. `pixels` belong to its default weights; other weights of
    the same architecture may have been trained on other pixels."""

    width: int
    num_heads: int
    gelu: Gelu = "exact"
    pixels: PixelRange = _PAPER


# The names of each architecture, without the tags of their weights.
_NAMES: dict[Architecture, str] = {
    Architecture(width=192, num_heads=3, pixels=_IMAGENET): """
        deit_tiny_patch16_224
    """,
    Architecture(width=192, num_heads=3): """
        vit_tiny_patch16_224 vit_tiny_patch16_224_in21k vit_tiny_patch16_384 vit_tiny_r_s16_p8_224
        vit_tiny_r_s16_p8_224_in21k vit_tiny_r_s16_p8_384
    """,
    Architecture(width=384, num_heads=6, pixels=_IMAGENET): """
        deit3_small_patch16_224 deit3_small_patch16_224_in21ft1k deit3_small_patch16_384
        deit3_small_patch16_384_in21ft1k deit_small_patch16_224 vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2
        vit_small_patch16_224_dino vit_small_patch16_rope_224 vit_small_patch8_224 vit_small_patch8_224_dino
    """,
    Architecture(width=384, num_heads=6): """
        flexivit_small vit_small_patch16_224 vit_small_patch16_224_in21k vit_small_patch16_36x1_224
        vit_small_patch16_384 vit_small_patch32_224 vit_small_patch32_224_in21k vit_small_patch32_384
        vit_small_r26_s32_224 vit_small_r26_s32_224_in21k vit_small_r26_s32_384
    """,
    Architecture(width=512, num_heads=8, pixels=_IMAGENET): """
        deit3_medium_patch16_224 deit3_medium_patch16_224_in21ft1k
    """,
    Architecture(width=768, num_heads=12, pixels=_UNIT): """
        vit_base_patch14_reg1_tipsv2
    """,
    Architecture(width=768, num_heads=12, pixels=_IMAGENET): """
        deit3_base_patch16_224 deit3_base_patch16_224_in21ft1k deit3_base_patch16_384 deit3_base_patch16_384_in21ft1k
        deit_base_patch16_224 deit_base_patch16_384 vit_base_patch14_dinov2 vit_base_patch14_reg4_dinov2
        vit_base_patch16_224_dino vit_base_patch16_rope_224 vit_base_patch8_224_dino
    """,
    Architecture(width=768, num_heads=12): """
        flexivit_base vit_base_patch16_224 vit_base_patch16_224_in21k vit_base_patch16_384 vit_base_patch16_siglip_224
        vit_base_patch16_siglip_256 vit_base_patch16_siglip_384 vit_base_patch16_siglip_512
        vit_base_patch16_siglip_gap_224 vit_base_patch16_siglip_gap_256 vit_base_patch16_siglip_gap_384
        vit_base_patch16_siglip_gap_512 vit_base_patch32_224 vit_base_patch32_224_in21k vit_base_patch32_384
        vit_base_patch8_224 vit_base_patch8_224_in21k vit_base_r26_s32_224 vit_base_r50_s16_224
        vit_base_r50_s16_224_in21k vit_base_r50_s16_384 vit_base_resnet50_224_in21k vit_base_resnet50_384
    """,
    Architecture(width=768, num_heads=12, gelu="tanh"): """
        vit_base_patch32_siglip_256 vit_base_patch32_siglip_gap_256
    """,
    Architecture(width=768, num_heads=16): """
        vit_base_patch16_gap_224
    """,
    Architecture(width=896, num_heads=14): """
        vit_base_patch16_plus_240 vit_base_patch32_plus_256 vit_so150m_patch16_reg4_gap_256
        vit_so150m_patch16_reg4_gap_384 vit_so150m_patch16_reg4_map_256
    """,
    Architecture(width=1024, num_heads=16, pixels=_UNIT): """
        vit_large_patch14_reg1_tipsv2
    """,
    Architecture(width=1024, num_heads=16, pixels=_IMAGENET): """
        deit3_large_patch16_224 deit3_large_patch16_224_in21ft1k deit3_large_patch16_384
        deit3_large_patch16_384_in21ft1k vit_large_patch14_dinov2 vit_large_patch14_reg4_dinov2
        vit_large_patch16_rope_224
    """,
    Architecture(width=1024, num_heads=16): """
        flexivit_large vit_large_patch14_224 vit_large_patch16_224 vit_large_patch16_224_in21k vit_large_patch16_384
        vit_large_patch16_siglip_256 vit_large_patch16_siglip_384 vit_large_patch16_siglip_gap_256
        vit_large_patch16_siglip_gap_384 vit_large_patch32_224 vit_large_patch32_224_in21k vit_large_patch32_384
        vit_large_r50_s32_224 vit_large_r50_s32_224_in21k vit_large_r50_s32_384
    """,
    Architecture(width=1024, num_heads=16, gelu="tanh"): """
        vit_large_patch16_siglip_512 vit_large_patch16_siglip_gap_512
    """,
    Architecture(width=1152, num_heads=16, pixels=_UNIT): """
        vit_so400m_patch14_reg1_tipsv2
    """,
    Architecture(width=1152, num_heads=16): """
        vit_so400m_patch14_siglip_224 vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384
        vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378 vit_so400m_patch14_siglip_gap_384
        vit_so400m_patch14_siglip_gap_448 vit_so400m_patch14_siglip_gap_896
    """,
    Architecture(width=1152, num_heads=16, gelu="tanh"): """
        vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384 vit_so400m_patch16_siglip_512
        vit_so400m_patch16_siglip_gap_256 vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512
    """,
    Architecture(width=1280, num_heads=16, pixels=_IMAGENET): """
        deit3_huge_patch14_224 deit3_huge_patch14_224_in21ft1k vit_huge_patch14_gap_224 vit_huge_patch16_gap_448
    """,
    Architecture(width=1280, num_heads=16): """
        vit_huge_patch14_224 vit_huge_patch14_224_in21k
    """,
    Architecture(width=1408, num_heads=16, pixels=_IMAGENET): """
        vit_giant_patch16_gap_224
    """,
    Architecture(width=1408, num_heads=16): """
        vit_giant_patch14_224
    """,
    Architecture(width=1536, num_heads=16, gelu="tanh"): """
        vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384 vit_giantopt_patch16_siglip_gap_256
        vit_giantopt_patch16_siglip_gap_384
    """,
    Architecture(width=1664, num_heads=16): """
        vit_gigantic_patch14_224
    """,
}

ARCHITECTURES: Mapping[str, Architecture] = {name: each for each, names in _NAMES.items() for name in names.split()}

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


def usual_pixels(description: Mapping[str, Any], arguments: Mapping[str, Any]) -> PixelRange:
    """Returns the pixels to assume for a model that does not declare them. They follow from the tag of its weights
    ("mae"), else from its architecture."""
    if by_tag := name_by_words(str(description.get("architecture") or "").partition(".")[2]):
        return PIXELS[by_tag]
    known = named_architecture(description, arguments)
    return known.pixels if known else PIXELS["paper"]


def has_rotary_positions(description: Mapping[str, Any], *, where: str) -> bool:
    """Returns whether config.json describes a model with rotary positions. Raises UserError if the positions differ
    from those in RoPE-ViT's axial models."""
    architecture = bare_architecture(description)
    arguments = {**(AXIAL_ARGUMENTS if architecture in _AXIAL else {}), **entries(description, "model_args")}
    is_rotary = bool(arguments.get("use_rot_pos_emb"))
    differing = [name for name, value in AXIAL_ARGUMENTS.items() if arguments.get(name) != value]
    differing += [name for name in _OTHER_ROTATIONS if arguments.get(name) not in (None, "cat", 0, False)]
    if (is_rotary and differing) or (not is_rotary and "rope" in architecture):
        said = f"with other {', '.join(differing)}" if is_rotary else f"of {architecture}"
        raise UserError(
            f"config.json beside {where!r} says rotary positions {said}; allowed: those of timm's "
            f"{', '.join(sorted(_AXIAL))}"
        )
    return is_rotary


def with_names_of_today(file: TensorFile, description: Mapping[str, Any]) -> TensorFile:
    """Returns the file with LayerScale under the names of timm's ViT (`ls1.gamma`). In DeiT-III's own files and in
    timm's models with rotary positions, it is called `gamma_1`.

    Raises UserError for a file with rotary positions but without config.json, since nothing in it says how they rotate.
    """
    if "blocks.0.gamma_1" in file.shapes and "pos_embed" not in file.shapes and not description.get("architecture"):
        raise UserError(
            f"{file.where!r} has no pos_embed, as models with rotary positions (rope), and no config.json says which: "
            "give the folder with both"
        )
    names = {name: re.sub(r"^(blocks\.\d+\.)gamma_(\d)$", r"\1ls\2.gamma", name) for name in file.shapes}
    return file.renamed({name if new in file.shapes else new: name for name, new in names.items()})


def without_register_rows(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> TensorFile:
    """Returns the file with the position table's rows for registers added to the registers themselves.

    timm's table has rows for all tokens or, with `no_embed_class`, only for patches. Without config.json, a square
    number of rows is taken to mean that only patches have rows.
    """
    if not {"reg_token", "pos_embed", "patch_embed.proj.weight"} <= file.shapes.keys():
        return file
    (_, num_registers, _), (_, num_rows, width) = file.shape("reg_token", 3), file.shape("pos_embed", 3)
    no_rows, first = entries(description, "model_args").get("no_embed_class"), int("cls_token" in file.shapes)
    patch = file.shape("patch_embed.proj.weight", 4)[2:]
    is_hybrid = any(root in file.shapes for root in ROOTS)  # its patch is measured in cells
    grid = (None if is_hybrid else declared_grid(description, (patch[0], patch[1]), file.where)) or hints.grid
    is_of_patches = num_rows == grid[0] * grid[1] if grid else math.isqrt(num_rows) ** 2 == num_rows
    if (no_rows if isinstance(no_rows, bool) else is_of_patches) or num_rows <= first + num_registers:
        return file

    def read(name: str) -> torch.Tensor:
        if name not in ("reg_token", "pos_embed"):
            return file.read(name)
        table_1ND = file.read("pos_embed")
        if name == "pos_embed":
            return torch.cat([table_1ND[:, :first], table_1ND[:, first + num_registers :]], dim=1)
        rows_1RD = table_1ND[:, first : first + num_registers]
        registers_1RD = file.read("reg_token")
        return registers_1RD + rows_1RD if rows_1RD.any() else registers_1RD  # adding zero would change -0.0 to 0.0

    shapes = {**file.shapes, "pos_embed": (1, num_rows - num_registers, width)}
    return replace(file, shapes=shapes, read=read)


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
    first, second = (file.shapes.get(f"blocks.0.mlp.fc{number}.weight", ()) for number in (1, 2))
    if len(first) == len(second) == 2 and first[0] == 2 * second[1]:
        raise UserError(
            f"blocks.0.mlp.fc1.weight {list(first)} in {file.where!r} is of a gated MLP (SwiGLU), of which fc2 takes "
            f"half: {_NO_FIELD}"
        )
    if {_PROBE, "cls_token"} <= file.shapes.keys():
        raise UserError(
            f"{file.where!r} has a class token (cls_token) and attention pooling (attn_pool); models here have one of "
            "them: give other weights"
        )
    if (name := "blocks.0.attn.q_bias") in file.shapes:
        what = f"{name} {list(file.shapes[name])} in {file.where!r} is of"
        if "pos_embed" not in file.shapes and not any("relative_position" in each for each in file.shapes):
            raise UserError(
                f"{what} DINOv3, EUPE or another model of timm's eva.py, whose positions are rotary and turn by places "
                f"in [-1, 1], not by patches: {_NO_FIELD}"
            )
        raise UserError(
            f"{what} EVA or BEiT, which have biases of queries and values alone, in tensors of their own; they are not "
            "read here: give weights of another model"
        )
    if f"{_QKV}weight" in file.shapes and f"{_QKV}bias" not in file.shapes:
        raise UserError(f"{_QKV}bias is not in {file.where!r}, its attention has no biases: {_NO_FIELD}")


def usual_of(file: TensorFile, description: Mapping[str, Any]) -> Usual:
    """Returns what timm's code, config.json or a script's arguments say, and the usual values for the rest."""
    arguments, named = entries(description, "model_args"), named_architecture(description, file.arguments)
    known, activation = named or architecture_by_file(file.where), arguments.get("act_layer")
    num_heads = known.num_heads if known and _width(file) in (known.width, arguments.get("embed_dim")) else None
    declared = declared_heads(description)
    gelu = GELUS.get(str(activation)) if activation else known.gelu if known else "exact"
    if gelu is None:
        raise UserError(f"act_layer in {file.where!r} is {activation!r}; allowed: {', '.join(GELUS)}")
    said = {"gelu": activation or named, "layer_norm_epsilon": named, "num_heads": declared or (named and num_heads)}
    return Usual(
        gelu=gelu,
        layer_norm_epsilon=EPSILON,
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
    arguments = entries(description, "model_args")
    pooled = arguments.get("global_pool") or description.get("global_pool")
    is_vit = "stem.conv.weight" not in file.shapes
    expected = "token" if "cls_token" in file.shapes else "map" if _PROBE in file.shapes else "avg"
    if is_vit and arguments.get("pool_include_prefix") and "reg_token" in file.shapes:
        raise UserError(
            f"config.json beside {file.where!r} says pool_include_prefix: the pooling takes registers, too; allowed: "
            "weights whose pooling takes patches alone"
        )
    if is_vit and pooled and pooled != expected:
        raise UserError(
            f"config.json beside {file.where!r}, or its script, says global_pool {pooled!r}; with these tensors "
            f"allowed: {expected!r}"
        )
    named = next((value for key in ("model", "arch") if isinstance(value := file.arguments.get(key), str)), "")
    architecture = str(description.get("architecture") or named)
    if "quickgelu" in architecture:
        raise UserError(f"{architecture!r} has QuickGELU; allowed: GELU exact and tanh")
    if "_rpn_" in architecture:
        raise UserError(
            f"{file.where!r} is of {shown_value(architecture)}, which has its norms after attention and MLP; allowed: "
            "norms in front of them"
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
