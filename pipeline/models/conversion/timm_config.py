"""The model of a state dict from timm, found from its shapes, from the `config.json` beside it, and from timm's code.

Sources: timm's vision_transformer.py, vision_transformer_hybrid.py and resnetv2.py. timm's defaults are exact GELU and
its own epsilons in ResNets. A state dict does not say what it was trained with; `config.json` may.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.models.config import Gelu, ModelConfig
from pipeline.models.conversion.sizes import (
    USUAL_LAYER_SCALE,
    Hints,
    Pair,
    TransformerShapes,
    Usual,
    bit_config,
    count,
    grid_of,
    hybrid_of,
    pair_of,
    resnet_of,
    transformer_config,
    units_of,
)
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.timm_architectures import (
    architecture_by_file,
    bare_architecture,
    named_architecture,
)
from shards.errors import UserError
from shards.schema.config_values import shown_value

GELUS: dict[str, Gelu] = {"gelu": "exact", "gelu_tanh": "tanh"}
EPSILON = 1e-6
# Models of timm's eva.py with rotary positions as ours, RoPE-ViT's axial ones, and what their code sets.
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
# Parts of timm's models that ours lack, by the beginning of their names, and what to say of them.
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
_SCALE, _PROBE = "blocks.0.ls1.gamma", "attn_pool.latent"
# The first convolution of a hybrid: with stages, and without.
_ROOTS = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A model, whether its position table has a row for the class token, which fields config.json gives, and what is
    assumed about the table."""

    config: ModelConfig
    class_row: bool
    said: tuple[str, ...]
    assumed: tuple[str, ...] = ()


def model_in(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> Found:
    """The model of a state dict. Raises UserError for parts that ours lack, before anything else."""
    _refuse_foreign(file)
    usual = usual_of(file, description)
    _refuse_other_width(file, description, usual, hints)
    _refuse_other_settings(file, description)
    if "stem.conv.weight" in file.shapes:
        return Found(config=_bit_config(file, usual, hints), class_row=False, said=usual.said)
    return _vit(file, description, usual, hints)


def has_rotary_positions(description: Mapping[str, Any], *, where: str) -> bool:
    """Whether config.json is of a model with rotary positions. Raises UserError if they are not those of RoPE-ViT's
    axial models."""
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
    """The file with LayerScale under the names of timm's ViT (`ls1.gamma`), which DeiT-III's own files and timm's
    models with rotary positions call `gamma_1`.

    Raises UserError for a file of the latter alone, since nothing in it says how they turn.
    """
    if "blocks.0.gamma_1" in file.shapes and "pos_embed" not in file.shapes and not description.get("architecture"):
        raise UserError(
            f"{file.where!r} has no pos_embed, as models with rotary positions (rope), and no config.json says which: "
            "give the folder with both"
        )
    names = {name: re.sub(r"^(blocks\.\d+\.)gamma_(\d)$", r"\1ls\2.gamma", name) for name in file.shapes}
    return file.renamed({name if new in file.shapes else new: name for name, new in names.items()})


def without_register_rows(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> TensorFile:
    """The file with the rows that its position table has for registers added to the registers themselves.

    timm's table has rows for all tokens or, with `no_embed_class`, for patches alone. Without config.json, a number of
    rows that is a square is taken as that of patches.
    """
    if not {"reg_token", "pos_embed", "patch_embed.proj.weight"} <= file.shapes.keys():
        return file
    (_, num_registers, _), (_, num_rows, width) = file.shape("reg_token", 3), file.shape("pos_embed", 3)
    no_rows, first = entries(description, "model_args").get("no_embed_class"), int("cls_token" in file.shapes)
    patch = file.shape("patch_embed.proj.weight", 4)[2:]
    is_hybrid = any(root in file.shapes for root in _ROOTS)  # whose patch is of cells
    grid = (None if is_hybrid else _declared_grid(description, (patch[0], patch[1]), file.where)) or hints.grid
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
    """The object of that name inside config.json; empty if there is none."""
    found = description.get(name)
    return found if isinstance(found, dict) else {}


def _refuse_foreign(file: TensorFile) -> None:
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
    """What timm's code, config.json or a script's arguments say, and for what they leave open, the usual values."""
    arguments, named = entries(description, "model_args"), named_architecture(description, file.arguments)
    known, activation = named or architecture_by_file(file.where), arguments.get("act_layer")
    num_heads = known.num_heads if known and _width(file) in (known.width, arguments.get("embed_dim")) else None
    declared = _num_heads(description)
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


def _refuse_other_width(file: TensorFile, description: Mapping[str, Any], usual: Usual, hints: Hints) -> None:
    """UserError if the architecture that is named has another width, so that its number of heads says nothing: some
    names had another model behind them in older versions of timm."""
    named = named_architecture(description, file.arguments)
    if named and not (usual.num_heads or "num_heads" in usual.said or hints.num_heads or hints.model):
        name = description.get("architecture") or file.arguments.get("arch")
        raise UserError(
            f"{file.where!r} is called {shown_value(name)}, which is {named.width} wide "
            f"with {named.num_heads} heads, and its tensors are {_width(file)} wide; give --num-heads"
        )


def _width(file: TensorFile) -> int:
    return file.shape("patch_embed.proj.weight", 4)[0] if "patch_embed.proj.weight" in file.shapes else 0


def _num_heads(description: Mapping[str, Any]) -> int | None:
    number = entries(description, "model_args").get("num_heads")
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None


def _refuse_other_settings(file: TensorFile, description: Mapping[str, Any]) -> None:
    """UserError if config.json says that timm computes something else with the same tensors."""
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
            f"{file.where!r} is of {shown_value(architecture)}, which has its norms behind attention and MLP; allowed: "
            "norms in front of them"
        )


def _vit(file: TensorFile, description: Mapping[str, Any], usual: Usual, hints: Hints) -> Found:
    width, _, patch, patch_width = file.shape("patch_embed.proj.weight", 4)
    units = units_of(file.shapes, r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.", first=0)
    root = next((name for name in _ROOTS if name in file.shapes), "")
    resnet = hybrid_of(units, root_channels=file.shape(root, 4)[0]) if root else None
    stride = resnet.stride if resnet else 1
    class_token, no_row = "cls_token" in file.shapes, entries(description, "model_args").get("no_embed_class")
    shapes = TransformerShapes(
        patch=patch,
        depth=count(file.shapes, r"blocks\.(\d+)\."),
        width=width,
        mlp_width=file.shape("blocks.0.mlp.fc1.weight", 2)[0],
        num_heads=_num_heads(description),
        num_classes=file.shape("head.weight", 2)[0] if "head.weight" in file.shapes else 0,
        num_positions=file.shape("pos_embed", 3)[1] if "pos_embed" in file.shapes else None,
        class_token=class_token,
        resnet=resnet,
        class_row=not no_row if class_token and isinstance(no_row, bool) else None,
        declared=_declared_grid(description, (patch * stride, patch_width * stride), file.where) or hints.grid,
        layer_scale=_layer_scale(description) if _SCALE in file.shapes else 0.0,
        position="rope2d" if has_rotary_positions(description, where=file.where) else None,
        registers=file.shape("reg_token", 3)[1] if "reg_token" in file.shapes else 0,
        attention_pooling=_PROBE in file.shapes,
        qk_norm="blocks.0.attn.q_norm.weight" in file.shapes,
    )
    config = transformer_config(shapes, where=file.where, position_name="pos_embed", usual=usual, hints=hints)
    _, class_row = shapes.side(file.where, "pos_embed")
    grid = shapes.assumed_grid(file.where, "pos_embed")
    return Found(config=config, class_row=class_row, said=usual.said, assumed=grid)


def _layer_scale(description: Mapping[str, Any]) -> float:
    value = entries(description, "model_args").get("init_values")
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    return USUAL_LAYER_SCALE


def _declared_grid(description: Mapping[str, Any], patch: Pair, where: str) -> Pair | None:
    """Patches down and across by config.json; its model_args win over its entries for the published weights."""
    image, published = entries(description, "model_args").get("img_size"), entries(description, "pretrained_cfg")
    if image is not None:
        return grid_of(pair_of(image, key="img_size", where=where), patch)
    if not isinstance(published.get("input_size"), list):
        return None
    return grid_of(pair_of(published["input_size"][1:], key="input_size", where=where), patch)


def _bit_config(file: TensorFile, usual: Usual, hints: Hints) -> ModelConfig:
    if "stages.0.blocks.0.conv2.weight" in file.shapes and "stages.0.blocks.0.conv3.weight" not in file.shapes:
        raise UserError(
            f"{file.where!r} has basic units (resnetv2_18, resnetv2_34), which timm trains with batch norm and plain "
            "convolutions; the ResNets here have neither: give the file of a BiT ResNet (resnetv2_..._bit)"
        )
    units = units_of(file.shapes, r"stages\.(\d+)\.blocks\.(\d+)\.", first=0)
    resnet = resnet_of(units, root_channels=file.shape("stem.conv.weight", 4)[0])
    if resnet is None:
        raise UserError(
            f"{file.where!r} has no stages after its stem; give the file of a BiT ResNet (resnetv2_..._bit)"
        )
    num_classes = file.shape("head.fc.weight", 4)[0] if "head.fc.weight" in file.shapes else 0
    return bit_config(resnet, num_classes=num_classes, where=file.where, usual=usual, hints=hints)
