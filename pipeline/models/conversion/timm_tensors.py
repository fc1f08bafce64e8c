"""Gives the tensors of timm's models the form that most of them have, so that one table maps them to ours.

timm has several forms of the same layer: q, k and v in one product or in three, with biases of all, of queries and
values alone, or of none; the two halves of SwiGLU in one tensor or in two; NaFlexViT's embedding of flattened patches.
Here a file is described as if it had the first of these forms. Tensors are made when they are read; biases that a model
does not have are zeros, and scales that it does not have are ones, which change no logit.

A class token that the pooling leaves out is a register, and becomes one. Sources: vision_transformer.py, eva.py and
naflexvit.py of timm 1.0.31. Shape letters: D width, P patch, R registers, N tokens.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.models.conversion.config import Hints, Pair
from pipeline.models.conversion.layout import numbers_in
from pipeline.models.conversion.tensor_file import TensorFile, readable
from pipeline.models.conversion.timm_config import ROOTS, arguments_of, declared_grid, pooling_of
from pipeline.models.weights.safetensors import Shapes
from shards.errors import UserError

_BLOCKS = "blocks.{}."
_PATCH = "patch_embed.proj."
_NAFLEX = "embeds."


@dataclass(frozen=True, kw_only=True)
class Made:
    """A tensor that is made of others: its shape, and a function that makes it."""

    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


def usual_tensors(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> TensorFile:
    """Returns the file in the form that `timm.table_of` maps. Raises UserError if parts of a layer do not fit."""
    file = with_names_of_today(_of_naflex(file), description)
    file = _with_packed_layers(_with_keys_of_each_head(file))
    file = without_register_rows(file, description, hints)
    return _with_one_norm(_with_class_token_as_register(file, description, hints))


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
    if not {"reg_token", "pos_embed", f"{_PATCH}weight"} <= file.shapes.keys():
        return file
    (_, num_registers, _), (_, num_rows, width) = file.shape("reg_token", 3), file.shape("pos_embed", 3)
    first = int("cls_token" in file.shapes)
    grid = _declared_grid(file, description, hints)
    is_of_others = grid is not None and num_rows == first + grid[0] * grid[1]  # of all tokens but registers
    if is_of_others or _is_of_patches(file, description, hints) or num_rows <= first + num_registers:
        return file

    def table() -> torch.Tensor:
        table_1ND = file.read("pos_embed")
        return torch.cat([table_1ND[:, :first], table_1ND[:, first + num_registers :]], dim=1)

    def registers() -> torch.Tensor:
        return _with_row(file.read("reg_token"), file.read("pos_embed")[:, first : first + num_registers])

    made = {
        "pos_embed": Made(shape=(1, num_rows - num_registers, width), make=table),
        "reg_token": Made(shape=file.shapes["reg_token"], make=registers),
    }
    return with_made(file, made)


def _is_of_patches(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> bool:
    """Returns whether the position table has rows for patches alone."""
    no_rows = arguments_of(description).get("no_embed_class")
    if isinstance(no_rows, bool):
        return no_rows
    num_rows, grid = file.shape("pos_embed", 3)[1], _declared_grid(file, description, hints)
    return num_rows == grid[0] * grid[1] if grid else math.isqrt(num_rows) ** 2 == num_rows


def _declared_grid(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> Pair | None:
    patch = file.shape(f"{_PATCH}weight", 4)[2:]
    is_hybrid = any(root in file.shapes for root in ROOTS)  # its patch is measured in cells
    return (None if is_hybrid else declared_grid(description, (patch[0], patch[1]), file.where)) or hints.grid


def _with_row(token_1RD: torch.Tensor, rows_1RD: torch.Tensor) -> torch.Tensor:
    return token_1RD + rows_1RD if rows_1RD.any() else token_1RD  # adding zero would change -0.0 to 0.0


def _with_class_token_as_register(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> TensorFile:
    """Returns the file without its class token if the pooling takes patches alone; the token is then the first
    register."""
    if "cls_token" not in file.shapes or pooling_of(file, description) == "token":
        return file
    registers = ("reg_token",) if "reg_token" in file.shapes else ()
    (_, num_registers, _), width = (
        (file.shape(registers[0], 3) if registers else (1, 0, 0)),
        file.shape("cls_token", 3)[2],
    )
    made = dict[str, Made]()
    has_row = "pos_embed" in file.shapes and not _is_of_patches(file, description, hints)
    if has_row:
        _, num_rows, _ = file.shape("pos_embed", 3)
        made["pos_embed"] = Made(shape=(1, num_rows - 1, width), make=lambda: file.read("pos_embed")[:, 1:])

    def tokens() -> torch.Tensor:
        token_11D = file.read("cls_token")
        token_11D = _with_row(token_11D, file.read("pos_embed")[:, :1]) if has_row else token_11D
        return torch.cat([token_11D, *(file.read(name) for name in registers)], dim=1)

    made["reg_token"] = Made(shape=(1, 1 + num_registers, width), make=tokens)
    return with_made(file, made, without=("cls_token",))


def _with_one_norm(file: TensorFile) -> TensorFile:
    """Returns the file with the norm after the pooling, `fc_norm`, called `norm`, if there is no other."""
    if any(name.startswith("norm.") for name in file.shapes):
        return file
    return file.renamed({re.sub(r"^fc_norm\.", "norm.", name): name for name in file.shapes})


def _with_keys_of_each_head(file: TensorFile) -> TensorFile:
    """Returns the file with keys and values for each head, where several heads share them (grouped-query attention):
    each of these heads gets a copy, which changes no logit. The norm of a head's queries says how wide a head is."""
    made = dict[str, Made]()
    for (number,) in numbers_in(file.shapes, _BLOCKS):
        attention = f"blocks.{number}.attn."
        if not {f"{attention}q_proj.weight", f"{attention}q_norm.weight"} <= file.shapes.keys():
            continue
        (width, _), (of_head,) = file.shape(f"{attention}q_proj.weight", 2), file.shape(f"{attention}q_norm.weight", 1)
        for kind, num_dims in (("weight", 2), ("bias", 1)):
            for name in (f"{attention}{each}_proj.{kind}" for each in "kv"):
                num_rows = file.shape(name, num_dims)[0] if name in file.shapes else width
                if num_rows < width and num_rows % of_head == 0 and width % num_rows == 0:
                    made[name] = _copied(file, name, of_head=of_head, width=width)
    return with_made(file, made)


def _copied(file: TensorFile, name: str, *, of_head: int, width: int) -> Made:
    shape = (width, *file.shapes[name][1:])

    def make() -> torch.Tensor:
        # (h d, ...) -> (h, d, ...), each head several times -> (D, ...)
        heads = file.read(name).reshape(-1, of_head, *shape[1:])
        return heads.repeat_interleave(width // file.shapes[name][0], dim=0).reshape(shape)

    return Made(shape=shape, make=make)


def _with_packed_layers(file: TensorFile) -> TensorFile:
    """Returns the file with one product for q, k and v and one for both parts of SwiGLU in each block, with all biases
    of dense layers and patches, and with LayerScale for both branches or none.

    A bias or scale is made only if no block has it. One that is missing in some blocks is an error, as any tensor is.
    """
    made, gone = dict[str, Made](), list[str]()
    ends = {name.split(".", 2)[2] for name in file.shapes if re.match(r"blocks\.\d+\.", name)}

    def join(name: str, parts: tuple[str, ...], lengths: Iterable[int] = ()) -> None:
        made[name] = _joined(file, parts, tuple(lengths))
        gone.extend(part for part in parts if part in file.shapes)

    def bias(block: str, name: str, parts: Sequence[str], lengths: Sequence[int]) -> None:
        found = [part for part in parts if part in ends]
        if name not in ends or found:
            for part in found:
                file.shape(f"{block}{part}", 1)  # raises UserError if this block lacks it
            join(f"{block}{name}", tuple(f"{block}{part}" for part in parts), lengths)

    for (number,) in numbers_in(file.shapes, _BLOCKS):
        block = f"blocks.{number}."
        attention, mlp = f"{block}attn.", f"{block}mlp."
        is_apart = f"{attention}q_proj.weight" in file.shapes
        if is_apart:
            parts = tuple(f"{attention}{each}_proj.weight" for each in "qkv")
            lengths = [file.shape(part, 2)[0] for part in parts]
            join(f"{attention}qkv.weight", parts)
        elif f"{attention}qkv.weight" in file.shapes:
            lengths = [file.shape(f"{attention}qkv.weight", 2)[0] // 3] * 3
        else:
            continue
        bias(block, "attn.qkv.bias", [f"attn.{each}{'_proj.bias' if is_apart else '_bias'}" for each in "qkv"], lengths)
        if f"{mlp}fc1_g.weight" in file.shapes:
            join(f"{mlp}fc1.weight", (f"{mlp}fc1_g.weight", f"{mlp}fc1_x.weight"))
            lengths = [file.shape(f"{mlp}fc1_g.weight", 2)[0]] * 2
            bias(block, "mlp.fc1.bias", ("mlp.fc1_g.bias", "mlp.fc1_x.bias"), lengths)
        for layer in ("attn.proj.", "mlp.fc2."):
            if f"{layer}bias" not in ends and f"{block}{layer}weight" in file.shapes:
                join(f"{block}{layer}bias", (f"{block}{layer}bias",), file.shape(f"{block}{layer}weight", 2)[:1])
        if "blocks.0.ls1.gamma" in file.shapes and "ls2.gamma" not in ends:  # Sapiens 2 scales attention alone
            made[f"{block}ls2.gamma"] = _ones(file.shape(f"{block}ls1.gamma", 1))
    if f"{_PATCH}weight" in file.shapes and f"{_PATCH}bias" not in file.shapes:
        join(f"{_PATCH}bias", (f"{_PATCH}bias",), (file.shape(f"{_PATCH}weight", 4)[0],))
    return with_made(file, made, without=gone)


def _ones(shape: tuple[int, ...]) -> Made:
    return Made(shape=shape, make=lambda: torch.ones(shape))


def _joined(file: TensorFile, parts: tuple[str, ...], lengths: tuple[int, ...]) -> Made:
    """Returns the tensor that has the parts one after another. A part that is not in the file is zeros, of the length
    that is given; without lengths, it is required."""
    if lengths:
        shapes = [file.shapes.get(part, (length,)) for part, length in zip(parts, lengths, strict=True)]
    else:
        shapes = [file.shape(part, 1 if part.endswith("bias") else 2) for part in parts]
    if len({shape[1:] for shape in shapes}) != 1:
        shown = ", ".join(f"{part} {list(shape)}" for part, shape in zip(parts, shapes, strict=True))
        raise UserError(f"{file.where!r} has {shown}, which are of no one layer; give the file of another model")

    def make() -> torch.Tensor:
        found = zip(parts, shapes, strict=True)
        return torch.cat([file.read(part) if part in file.shapes else torch.zeros(shape) for part, shape in found])

    return Made(shape=(sum(shape[0] for shape in shapes), *shapes[0][1:]), make=make)


def naflex_grid(file: TensorFile) -> Pair | None:
    """Returns the rows and columns of the position table of a NaFlexViT; None for other models."""
    table, y, x = (f"{_NAFLEX}pos_embed{end}" for end in ("", "_y", "_x"))
    if table in file.shapes:
        _, height, width, _ = file.shape(table, 4)
        return height, width
    return (file.shape(y, 3)[1], file.shape(x, 3)[1]) if {y, x} <= file.shapes.keys() else None


def _of_naflex(file: TensorFile) -> TensorFile:
    """Returns the file of a NaFlexViT with the names and shapes of a ViT: patches are flattened rows before columns
    before channels, and the position table keeps its rows and columns. Images then have the size of the table."""
    weight = f"{_NAFLEX}proj.weight"
    if weight not in file.shapes:
        return file
    names = {name: re.sub(rf"^{_NAFLEX}proj\.", _PATCH, name).removeprefix(_NAFLEX) for name in file.shapes}
    renamed = file.renamed({new: name for name, new in names.items()})
    width, num_inputs = file.shape(weight, 2)
    side = math.isqrt(num_inputs // 3)

    def patches() -> torch.Tensor:
        return file.read(weight).reshape(width, side, side, 3).permute(0, 3, 1, 2)

    def table() -> torch.Tensor:
        if f"{_NAFLEX}pos_embed" in file.shapes:
            return file.read(f"{_NAFLEX}pos_embed").flatten(1, 2)
        y_1HD, x_1WD = (file.read(f"{_NAFLEX}pos_embed_{axis}") for axis in "yx")
        return (y_1HD[:, :, None] + x_1WD[:, None]).flatten(1, 2)

    made = {f"{_PATCH}weight": Made(shape=(width, 3, side, side), make=patches)}
    if grid := naflex_grid(file):
        made["pos_embed"] = Made(shape=(1, grid[0] * grid[1], width), make=table)
    return with_made(renamed, made, without=("pos_embed_y", "pos_embed_x"))


def with_made(file: TensorFile, made: Mapping[str, Made], *, without: Iterable[str] = ()) -> TensorFile:
    """Returns the file with tensors that are made, and without some of its own."""
    gone = frozenset(without)
    shapes: Shapes = {name: shape for name, shape in file.shapes.items() if name not in gone}

    def read(name: str) -> torch.Tensor:
        if name not in made:
            return file.read(name)
        with readable(f"{name} in {file.where!r}", size=str(list(made[name].shape))):
            value = made[name].make()
            if tuple(value.shape) != made[name].shape:
                raise ValueError(f"its parts make {list(value.shape)}, not {list(made[name].shape)}")
        return value

    return replace(file, shapes={**shapes, **{name: each.shape for name, each in made.items()}}, read=read)
