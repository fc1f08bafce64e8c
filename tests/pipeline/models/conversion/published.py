"""Small models of timm and transformers with noise in every tensor, and the folders that these libraries publish."""

import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

GRID = 3  # patches down and across: an odd number, at which no two forms of rotary positions agree
HEAD_WIDTH = 8
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}
SIZES |= {"image_size": GRID * 8, "intermediate_size": 48}
_OF_TEXTS: dict[str, Any] = SIZES | {"num_hidden_layers": 1, "vocab_size": 9}
DINOV2: dict[str, Any] = SIZES | {"mlp_ratio": 2}
DINOV3: dict[str, Any] = SIZES | {"num_register_tokens": 2}
GATED: dict[str, Any] = {"use_gated_mlp": True, "hidden_act": "silu"}
BOTH: dict[str, Any] = {"vision_config": SIZES, "text_config": _OF_TEXTS, "num_labels": 3}  # towers
FLEXIBLE: dict[str, Any] = SIZES | {"num_patches": GRID**2}
# The start of a class's name in transformers -> its model_type.
_MODEL_TYPES = {
    "Dinov2WithRegisters": "dinov2_with_registers",
    "Dinov2": "dinov2",
    "DINOv3": "dinov3_vit",
    "CLIP": "clip",
    "Siglip2": "siglip2",
    "Siglip": "siglip",
    "ViT": "vit",
    "DeiT": "deit",
}


def of_timm(timm: ModuleType, name: str, folder: Path, *, num_classes: int = 3) -> torch.nn.Module:
    """Writes timm's architecture with two narrow layers on few patches, and returns it. Raises what timm raises for an
    architecture that has no such sizes."""
    with torch.device("meta"):
        whole = timm.create_model(name, **{} if heads_of_keys(name) else {"depth": 1})
    num_heads = whole.blocks[0].attn.num_heads
    arguments: dict[str, Any] = {"embed_dim": HEAD_WIDTH * num_heads, "depth": 2}
    if heads_of_keys(name):
        arguments |= heads_of_keys(
            name, *(whole.blocks[number].attn.num_kv_heads for number in (0, len(whole.blocks) // 2))
        )
    if hasattr(whole, "embeds"):
        arguments["pos_embed_grid_size"] = (GRID, GRID)
    else:
        arguments["img_size"] = GRID * whole.patch_embed.feat_ratio()
    model: torch.nn.Module = timm.create_model(name, num_classes=num_classes, **arguments).eval()
    _add_noise(model, 0.3)
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architecture": f"{name}.tag", "model_args": arguments}))
    return model


def heads_of_keys(name: str, *numbers: int) -> dict[str, Any]:
    """The argument of Sapiens 2 that gives each block a number of heads of keys; none for other models of timm."""
    return {"num_kv_heads": numbers} if "sapiens2" in name else {}


def of_transformers(transformers: ModuleType, name: str, folder: Path, fields: dict[str, Any]) -> Any:
    """Writes transformers' model of the class `name` with these fields of its configuration, and returns it."""
    model_type = next(kind for start, kind in _MODEL_TYPES.items() if name.startswith(start))
    model_type += "_vision_model" if name.endswith("VisionModel") else ""
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, name)(config).eval()
    _add_noise(model, 0.2)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


def _add_noise(model: torch.nn.Module, deviation: float) -> None:
    """Adds noise to every parameter except convolutions, whose initial weights have none that are alike."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(deviation * torch.randn(parameter.shape, generator=generator) * (parameter.dim() != 4))
