"""Compares the logits of our models with timm's or Hugging Face's, in fp32, with the same random weights.

python -m tests.pipeline.models.parity    prints the table that docs/benchmarks.md shows (minutes on two cores, 3 GB)

test_parity.py checks that every row is within the bound. The weights are copied by the mappings in names_elsewhere.py.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import Any, Literal

import torch

from benchmarks.torchvision_operators import import_torchvision
from pipeline.models import Model, ModelConfig, build_model, unfilled_model
from pipeline.models.config import Mode
from pipeline.models.positions import resample_position_embeddings
from tests.pipeline.models.names_elsewhere import bit_as_timm, vit_as_hugging_face, vit_as_timm

BOUND = 2e-5
NUM_CLASSES = 50
Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model in both libraries. `fields`: of ModelConfig; `arguments`: of timm.create_model. `image`: (height,
    width) in pixels. With a `mode`, the position embeddings of 224 px are resampled to it; the other library uses its
    own code."""

    title: str
    name: str
    library: Literal["timm", "transformers"] = "timm"
    theirs: str
    image: tuple[int, int] = (224, 224)
    mode: Mode | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    is_long: bool = False

    @property
    def config(self) -> ModelConfig:
        """The configuration of the weights."""
        return ModelConfig(name=self.name, num_classes=NUM_CLASSES, **self.fields)


EXACT: dict[str, Any] = {"gelu": "exact"}
TIMM_RESNET: dict[str, Any] = {"resnet_epsilons": "timm"}
AVERAGE: dict[str, Any] = {"global_pool": "avg", "class_token": False, "fc_norm": False}
PAPER_GELU: dict[str, Any] = {"act_layer": "gelu_tanh"}
HYBRID, B16 = EXACT | TIMM_RESNET, "vit_base_patch16_224"
HUGGING_FACE: dict[str, Any] = {"name": "vit_b16", "library": "transformers", "theirs": "ViTForImageClassification"}
USUAL = EXACT | {"layer_norm_epsilon": 1e-12}
ROWS = (
    Row(title="H/14", name="vit_h14", theirs="vit_huge_patch14_224", fields=EXACT, is_long=True),
    Row(title="L/16", name="vit_l16", theirs="vit_large_patch16_224", fields=EXACT, is_long=True),
    Row(title="L/32", name="vit_l32", theirs="vit_large_patch32_224", fields=EXACT, is_long=True),
    Row(title="B/16", name="vit_b16", theirs=B16, fields=EXACT),
    Row(title="B/16, the paper's GELU", name="vit_b16", theirs=B16, arguments=PAPER_GELU),
    Row(title="S/16", name="vit_s16", theirs="vit_small_patch16_224", fields=EXACT, is_long=True),
    Row(
        title="S/16, mean of tokens",
        name="vit_s16",
        theirs="vit_small_patch16_224",
        fields=EXACT | {"pooling": "average"},
        arguments=AVERAGE,
    ),
    Row(title="Ti/16", name="vit_ti16", theirs="vit_tiny_patch16_224", arguments=PAPER_GELU),
    Row(title="B/16 to 24 x 24", name="vit_b16", theirs=B16, image=(384, 384), mode="timm", fields=EXACT, is_long=True),
    Row(title="B/16 to 7 x 7", name="vit_b16", theirs=B16, image=(112, 112), mode="timm", fields=EXACT),
    Row(title="S/32", name="vit_s32", theirs="vit_small_patch32_224", fields=EXACT, is_long=True),
    Row(title="R+Ti/16", name="r_vit_ti16", theirs="vit_tiny_r_s16_p8_224", fields=HYBRID),
    Row(title="R26+S/32", name="r26_vit_s32", theirs="vit_small_r26_s32_224", fields=HYBRID, is_long=True),
    Row(title="R50+B/16", name="r50_vit_b16", theirs="vit_base_r50_s16_224", fields=HYBRID, is_long=True),
    Row(
        title="R50+B/16 to 10 x 10",
        name="r50_vit_b16",
        theirs="vit_base_r50_s16_224",
        image=(160, 160),
        mode="timm",
        fields=HYBRID,
        is_long=True,
    ),
    Row(title="R50+L/32", name="r50_vit_l32", theirs="vit_large_r50_s32_224", fields=HYBRID, is_long=True),
    Row(title="BiT R50x1", name="bit_r50x1", theirs="resnetv2_50x1_bit", fields=TIMM_RESNET),
    Row(
        title="BiT R50x1, odd",
        name="bit_r50x1",
        theirs="resnetv2_50x1_bit",
        image=(129, 96),
        fields=TIMM_RESNET,
        is_long=True,
    ),
    Row(title="R18, BiT's layers", name="bit_r18x1", theirs="resnetv2_18", fields=TIMM_RESNET),
    Row(title="R34, BiT's layers", name="bit_r34x1", theirs="resnetv2_34", fields=TIMM_RESNET, is_long=True),
    Row(title="B/16, Hugging Face's", fields=USUAL, **HUGGING_FACE),
    Row(
        title="B/16, Hugging Face's, 24 x 24",
        image=(384, 384),
        mode="bicubic",
        fields=USUAL,
        is_long=True,
        **HUGGING_FACE,
    ),
    Row(title="B/16, as the paper's code", **HUGGING_FACE),
    Row(title="B/16, as the paper's code, 24 x 24", image=(384, 384), mode="bicubic", is_long=True, **HUGGING_FACE),
)


def imported(library: str) -> ModuleType:
    """timm or transformers, which need no compiled operator of torchvision. ImportError if it is not installed."""
    import_torchvision()
    return importlib.import_module(library)


def difference_of(row: Row) -> float:
    """The largest difference between the logits of the row's two models."""
    library, model = imported(row.library), random_model(row.config)
    ours = model if row.mode is None else resized(model, row.image[0], mode=row.mode)
    other = (hugging_face_logits if row.library == "transformers" else timm_logits)(library, model, row)
    return difference(ours, other, random_images(*row.image))


def random_model(config: ModelConfig) -> Model:
    """Initial weights with noise on every tensor, so that no bias is 0, no scale 1 and no head zero."""
    model = build_model(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() != 4:  # convolutions are standardised: their initial weights will do
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("norm_out.weight"):
                parameter.add_(0.2)  # zero at first, which would leave the unit's own path untested
    return model.eval()


def random_images(height: int, width: int) -> torch.Tensor:
    """uint8[2, H, W, 3]."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8, generator=generator)


def theirs_of(images_BHW3: torch.Tensor) -> torch.Tensor:
    """The input of timm and transformers: float[B, 3, H, W] in [-1, 1]."""
    return ((images_BHW3.float() - 127.5) / 127.5).permute(0, 3, 1, 2)


def difference(model: Model, other: Logits, images_BHW3: torch.Tensor) -> float:
    """The largest difference of two models' logits, which vary enough for the comparison to mean something."""
    with torch.no_grad():
        ours_BK, theirs_BK = model(images_BHW3), other(theirs_of(images_BHW3))
    assert float(ours_BK.std()) > 0.1
    return float((ours_BK - theirs_BK).abs().max())


def resized(model: Model, image_size: int, *, mode: Mode) -> Model:
    """The model for another image size, with its position embeddings resampled."""
    old = model.config
    new = unfilled_model(ModelConfig(**{**vars(old), "image_size": image_size}))
    state = model.state_dict()
    state["embed.position"] = resample_position_embeddings(
        state["embed.position"][0], from_grid=old.grid, to_grid=new.config.grid, mode=mode
    )[None]
    new.load_state_dict(state)
    return new.eval()


def timm_logits(timm: ModuleType, model: Model, row: Row) -> Logits:
    """timm's model with exactly our weights."""
    arguments = row.arguments | ({"img_size": row.image[0]} if row.mode else {})
    if model.config.resnet is not None and model.config.resnet.is_basic:
        arguments |= bit_layers(timm)
    with torch.device("meta"):  # its own initial weights would take time and are not needed
        other: torch.nn.Module = timm.create_model(row.theirs, num_classes=NUM_CLASSES, **arguments)
    state = bit_as_timm(model) if model.config.is_bit else vit_as_timm(model)
    if row.mode:  # timm's own resampling of a checkpoint of another size
        state = timm.models.vision_transformer.checkpoint_filter_fn(state, other)
    other.load_state_dict(state, strict=True, assign=True)
    return other.eval()


def bit_layers(timm: ModuleType) -> dict[str, Any]:
    """The arguments with which timm builds R18 and R34, which have batch norm there, from BiT's layers."""
    norm = partial(timm.layers.GroupNormAct, num_groups=32)
    convolution = partial(timm.layers.StdConv2d, eps=1e-8)
    return {"stem_type": "fixed", "norm_layer": norm, "conv_layer": convolution}


def hugging_face_logits(transformers: ModuleType, model: Model, row: Row) -> Logits:
    """ViTForImageClassification with exactly our weights."""
    size, config = model.config.size, model.config
    theirs = transformers.ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.depth,
        num_attention_heads=size.num_heads,
        intermediate_size=size.mlp_width,
        hidden_act={"exact": "gelu", "tanh": "gelu_pytorch_tanh"}[config.gelu],
        layer_norm_eps=config.layer_norm_epsilon,
        image_size=config.image_size,
        patch_size=size.patch,
        num_labels=config.num_classes,
    )
    with torch.device("meta"):
        other = getattr(transformers, row.theirs)(theirs)
    other.load_state_dict(vit_as_hugging_face(model), strict=True, assign=True)
    other.eval()
    return lambda x_B3HW: other(x_B3HW, interpolate_pos_encoding=row.mode is not None).logits


HEADER = ("model", "library's model", "image", "GELU", "epsilon", "resampled as", "largest difference")


def words_of(row: Row) -> tuple[str, ...]:
    """The cells of a row before it is measured, in the order of HEADER."""
    config = row.config
    settings = ("-", "-") if config.is_bit else (config.gelu, f"{config.layer_norm_epsilon:g}")
    there = f"{row.library} `{row.theirs}`"
    return row.title, there, f"{row.image[0]} x {row.image[1]}", *settings, row.mode or "-"


def main() -> None:
    """Prints the table, each row as soon as it is measured, and the versions of the libraries."""
    logging.disable()  # transformers logs what it initialises before the weights are copied
    say = sys.stdout.write
    for cells in (HEADER, ["---"] * len(HEADER)):
        say("| " + " | ".join(cells) + " |\n")
    for row in ROWS:
        say("| " + " | ".join((*words_of(row), f"{difference_of(row):.1e}")) + " |\n")
        sys.stdout.flush()
    say(
        f"\nBound: {BOUND:g}. " + ", ".join(f"{one} {version(one)}" for one in ("torch", "timm", "transformers")) + "\n"
    )


if __name__ == "__main__":
    main()
