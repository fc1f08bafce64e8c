"""Meta's own files of DINOv2 and DINOv3 (dinov2_vits14_pretrain.pth and others), with timm's names and shapes.

timm.py reads what this module returns. Sources: `_convert_dinov2` in vision_transformer.py and `checkpoint_filter_fn`
in eva.py of timm 1.0.31; facebookresearch/dinov3's rope_position_encoding.py for the periods.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.timm_architectures import ARGUMENTS
from pipeline.models.conversion.timm_tensors import Made, with_made
from shards.config_values import shown_value
from shards.errors import UserError

_MASK = "mask_token"  # of DINO's files, and of others that pre-training with masked patches leaves
_REGISTERS, _STORAGE = "register_tokens", "storage_tokens"  # of DINOv2, of DINOv3
_PERIODS = "rope_embed.periods"
_BIAS_MASK = ".bias_mask"
# Tensors that no image passes through. The second last norm is of small crops in training.
_IDLE = re.compile(rf"{_MASK}$|rope_embed\.|local_cls_norm\.|.*{re.escape(_BIAS_MASK)}$")
_NAMES = (
    (rf"^({_REGISTERS}|{_STORAGE})$", "reg_token"),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)
_ARCHITECTURE = "vit_small_patch16_dinov3"  # all sizes of DINOv3 have its norms, GELU, pixels and rotary positions
_TEMPERATURE: float = ARGUMENTS[_ARCHITECTURE]["rope_temperature"]
_MOST_DIFFERENCE = 0.02  # of periods in bfloat16


def has_dino_tokens(file: TensorFile) -> bool:
    """Returns whether the file is one of Meta's, by tokens whose names or shapes no other file has."""
    return bool({_REGISTERS, _STORAGE} & file.shapes.keys()) or len(file.shapes.get(_MASK, ())) == 2


def description_of_dino(file: TensorFile) -> Mapping[str, Any]:
    """Returns the config.json that timm would have for a file of DINOv3; empty for any other file. The number of heads
    follows from the periods. Raises UserError for periods that are missing or not DINOv3's."""
    if _STORAGE not in file.shapes:
        return {}
    (num_periods,), (width, *_) = file.shape(_PERIODS, 1), file.shape("patch_embed.proj.weight", 4)
    periods_F = file.read(_PERIODS).double()
    usual_F = _TEMPERATURE ** (torch.arange(num_periods, dtype=torch.float64) / num_periods)
    if width % (4 * num_periods) or not bool(((periods_F / usual_F - 1).abs() < _MOST_DIFFERENCE).all()):
        raise UserError(
            f"{_PERIODS} in {file.where!r} is {shown_value(periods_F.tolist())} in a model that is {width} wide; "
            f"allowed: powers of {_TEMPERATURE:g} from 1 up, one for each four channels of a head, as in DINOv3; give "
            "other weights"
        )
    heads_and_pooling = {"num_heads": width // (4 * num_periods), "global_pool": "token"}
    return {"architecture": _ARCHITECTURE, "model_args": heads_and_pooling}


def with_names_of_timm(file: TensorFile) -> TensorFile:
    """Returns a file of Meta's with timm's names, and without tensors that no image passes through; any other file as
    it is.

    In DINOv2, registers have no position, and so the class token's is added to it, as in timm. In DINOv3, biases that
    the file masks, those of keys, are zeros.
    """
    if not (has_dino_tokens(file) or _MASK in file.shapes):
        return file
    names = dict[str, str]()
    for name in (name for name in file.shapes if not _IDLE.match(name)):
        new = name
        for pattern, theirs in _NAMES:
            new = re.sub(pattern, theirs, new)
        names[new] = name
    made = {
        name: _masked(file, name)
        for name in (each.removesuffix("_mask") for each in file.shapes if each.endswith(_BIAS_MASK))
    }
    if {_REGISTERS, "pos_embed"} <= file.shapes.keys():
        (_, num_rows, width), token = file.shape("pos_embed", 3), file.shape("cls_token", 3)
        made["cls_token"] = Made(shape=token, make=lambda: file.read("cls_token") + file.read("pos_embed")[:, :1])
        made["pos_embed"] = Made(shape=(1, num_rows - 1, width), make=lambda: file.read("pos_embed")[:, 1:])
    return with_made(file.renamed(names), made)


def _masked(file: TensorFile, name: str) -> Made:
    def make() -> torch.Tensor:
        bias_O, mask_O = file.read(name), file.read(f"{name}_mask")
        return torch.where(mask_O == 0, torch.zeros_like(bias_O), bias_O * mask_O)  # a masked bias may be NaN

    return Made(shape=file.shape(name, 1), make=make)
