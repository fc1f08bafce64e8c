"""What timm's models compute that neither their tensors nor, often, their config.json show.

For each entry point that a model here can represent, the table has the attention heads, the GELU, and the pixels of its
published weights. A test compares the table, and the logits of each, with the timm that is installed. Sources:
vision_transformer.py, vision_transformer_hybrid.py, deit.py and eva.py of timm 1.0.31.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.models.config import Gelu
from pipeline.models.conversion.pixel_range import PIXELS, PixelRange, name_by_words

_PAPER, _IMAGENET = PIXELS["paper"], PIXELS["imagenet"]
_UNIT = PixelRange(mean=(0.0, 0.0, 0.0), deviation=(1.0, 1.0, 1.0))  # [0, 1]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model of timm. The epsilon of its norms is always 1e-6. `pixels` are those of its default weights; other
    weights of the same architecture may have been trained on other pixels."""

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
# facebookresearch/moco-v3's vits.py, whose ViT-S is not timm's. Its files name the model and have no other arguments.
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
    """Returns the model that a config.json or a script's arguments name, if it is in the table."""
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
    """Returns the pixels of a model for which nothing declares them: those of its tag ("mae"), else of its
    architecture."""
    if by_tag := name_by_words(str(description.get("architecture") or "").partition(".")[2]):
        return PIXELS[by_tag]
    known = named_architecture(description, arguments)
    return known.pixels if known else PIXELS["paper"]
