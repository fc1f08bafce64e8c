"""Meta's own files of DINOv2 and DINOv3, which have other names than timm's: the features are those of timm, whose
filter of checkpoints reads the same tensors."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_any import open_any
from pipeline.models.vit import ViT
from pipeline.models.weights.folder import Weights, filled_model
from shards.errors import UserError
from tests.pipeline.models.conversion.random_weights import assumed_of
from tests.pipeline.models.parity import random_images

Tensors = dict[str, torch.Tensor]
WIDTH, NUM_HEADS, PATCH, GRID = 32, 2, 16, 14
SIZES: dict[str, Any] = {"embed_dim": WIDTH, "depth": 2, "num_heads": NUM_HEADS, "patch_size": PATCH}
SIZES |= {"img_size": PATCH * GRID, "num_classes": 0, "global_pool": "token"}


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def of_meta(*, registers: str = "", mlp: str = "fc", has_table: bool = True) -> Tensors:
    """The tensors of one of Meta's files. `registers`: their name; `mlp`: fc, w12 (SwiGLU of DINOv2) or w1 (of
    DINOv3)."""
    layers = {"fc": {"fc1": (48, 32), "fc2": (32, 48)}, "w12": {"w12": (96, 32), "w3": (32, 48)}}
    layers["w1"] = {"w1": (48, 32), "w2": (48, 32), "w3": (32, 48)}
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH),
        "mask_token": (1, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (WIDTH,),
        **({"pos_embed": (1, 1 + GRID**2, WIDTH)} if has_table else {}),
        **({registers: (1, 4, WIDTH)} if registers else {}),
    }
    for block in ("blocks.0.", "blocks.1."):
        dense = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
        dense |= {f"mlp.{name}": shape for name, shape in layers[mlp].items()}
        shapes |= {f"{block}{name}.weight": shape for name, shape in dense.items()}
        shapes |= {f"{block}{name}.bias": shape[:1] for name, shape in dense.items()}
        scales = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "ls1.gamma", "ls2.gamma")
        shapes |= {f"{block}{name}": (WIDTH,) for name in scales}
    return random_tensors(shapes | {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,)})


def of_dinov3(*, mlp: str = "fc") -> Tensors:
    """As of_meta, with the periods of rotary positions and a mask of the keys' biases, where Meta's files have NaN."""
    tensors = of_meta(registers="storage_tokens", mlp=mlp, has_table=False)
    num_periods = WIDTH // NUM_HEADS // 4
    tensors["rope_embed.periods"] = 100.0 ** (torch.arange(num_periods) / num_periods)
    for block in ("blocks.0.", "blocks.1."):
        mask = torch.ones(3, WIDTH)
        mask[1] = 0
        tensors[f"{block}attn.qkv.bias_mask"] = mask.flatten()
        tensors[f"{block}attn.qkv.bias"][WIDTH : 2 * WIDTH] = torch.nan
    tensors |= {f"local_cls_norm.{name}": torch.ones(WIDTH) for name in ("weight", "bias")}
    return tensors


def opened(folder: Path, tensors: Tensors, **hints: Any) -> Weights:
    torch.save(tensors, folder / "w.pth")
    return open_any(str(folder / "w.pth"), Hints(pixels="paper", **hints))


def difference(weights: Weights, other: torch.nn.Module) -> float:
    """The largest difference of the features, as a share of the largest."""
    images_BHW3, ours = random_images(PATCH * GRID, PATCH * GRID), filled_model(weights)
    assert isinstance(ours, ViT)
    with torch.no_grad():
        theirs_BD = other.eval()((images_BHW3 / 127.5 - 1).permute(0, 3, 1, 2))
        return float((ours.features(images_BHW3) - theirs_BD).abs().max() / theirs_BD.abs().max())


@pytest.mark.parametrize(
    ("name", "registers", "mlp"),
    [
        ("vit_small_patch14_dinov2", "", "fc"),
        ("vit_small_patch14_reg4_dinov2", "register_tokens", "fc"),
        ("vit_giant_patch14_reg4_dinov2", "register_tokens", "w12"),
    ],
)
def test_dinov2_has_timms_features(timm: ModuleType, tmp_path: Path, name: str, registers: str, mlp: str) -> None:
    tensors = of_meta(registers=registers, mlp=mlp)
    other = timm.create_model(name, **SIZES, mlp_ratio=3 if mlp == "w12" else 1.5)
    convert: Callable[..., Tensors] = timm.models.vision_transformer.checkpoint_filter_fn
    other.load_state_dict(convert(dict(tensors), other), strict=True)
    weights = opened(tmp_path, tensors, num_heads=NUM_HEADS)
    config = weights.config
    assert (config.layer_norm_epsilon, config.registers, config.pooling) == (1e-6, 4 if registers else 0, "token")
    assert difference(weights, other) < 1e-5


@pytest.mark.parametrize("mlp", ["fc", "w1"])
def test_dinov3_has_timms_features(timm: ModuleType, tmp_path: Path, mlp: str) -> None:
    """The periods say how wide a head is, and the masked biases of keys count as zeros."""
    name = "vit_small_patch16_dinov3_qkvb" if mlp == "fc" else "vit_huge_plus_patch16_dinov3_qkvb"
    tensors = of_dinov3(mlp=mlp)
    other = timm.create_model(name, **SIZES, mlp_ratio=1.5)
    other.load_state_dict(timm.models.eva.checkpoint_filter_fn(dict(tensors), other), strict=True)
    weights = opened(tmp_path, tensors)
    fields = (weights.config.layer_norm_epsilon, weights.config.registers, weights.config.size.num_heads)
    assert fields == (1e-5, 4, NUM_HEADS)
    assert assumed_of(weights) == ()
    assert difference(weights, other) < 1e-5


def test_the_pixels_of_dino_are_assumed(tmp_path: Path) -> None:
    """Also in a file of another name, by the tokens that only these files have."""
    torch.save(of_dinov3(), tmp_path / "w.pth")
    assert assumed_of(open_any(str(tmp_path / "w.pth"), Hints())) == (
        "pixels of mean 0.485 0.456 0.406 and deviation 0.229 0.224 0.225",
    )
    for name in ("dinov2_vits14_reg4_pretrain.pth", "dinov3_vits16_pretrain_lvd1689m-08c60483.pth"):
        (tmp_path / "w.pth").rename(tmp_path / name)
        with pytest.raises(UserError):
            open_any(str(tmp_path / name), Hints())
        (tmp_path / name).rename(tmp_path / "w.pth")


@pytest.mark.parametrize("periods", [torch.linspace(1, 2, 4), torch.ones(5), torch.full((4,), torch.nan), None])
def test_other_rotations_are_refused(tmp_path: Path, periods: torch.Tensor | None) -> None:
    tensors = of_dinov3()
    del tensors["rope_embed.periods"]
    with pytest.raises(UserError) as caught:
        opened(tmp_path, tensors | ({} if periods is None else {"rope_embed.periods": periods}))
    assert "rope_embed.periods" in str(caught.value)
