"""The same weights give the same logits as timm's and Hugging Face's models: less than 2e-5 apart in fp32.

The weights are copied by the mappings below, written down once more apart from the import of real files.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.models import Model, ModelConfig, build_model
from pipeline.models.pos_embed import resample_position_embeddings

MOST = 2e-5
State = dict[str, torch.Tensor]


def random_model(config: ModelConfig) -> Model:
    """Initial weights with noise on every tensor, so that no bias is 0, no scale 1 and no head zero."""
    model = build_model(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() != 4:  # convolutions are standardised: their initial weights are as good as any
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("norm_out.weight"):
                parameter.add_(0.2)  # zero at first, where the unit's own path would prove nothing
    return model.eval()


def random_images(height: int, width: int) -> torch.Tensor:
    """uint8[2, H, W, 3]."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8, generator=generator)


def theirs_of(images_BHW3: torch.Tensor) -> torch.Tensor:
    """What timm and transformers take: float[B, 3, H, W] in [-1, 1]."""
    return ((images_BHW3.float() - 127.5) / 127.5).permute(0, 3, 1, 2)


def difference(model: Model, other: Callable[[torch.Tensor], torch.Tensor], images_BHW3: torch.Tensor) -> float:
    """The largest difference of two models' logits, which themselves differ enough to say something."""
    with torch.no_grad():
        ours_BK, theirs_BK = model(images_BHW3), other(theirs_of(images_BHW3))
    assert float(ours_BK.std()) > 0.1
    return float((ours_BK - theirs_BK).abs().max())


RESNET_TO_TIMM = [
    ("conv_root.", "stem.conv."),
    ("norm_root.", "stem.norm."),
    ("conv_proj.", "downsample.conv."),
    ("norm_proj.", "downsample.norm."),
    ("norm_out.", "norm3."),
]


def resnet_name_in_timm(name: str) -> str:
    """stages.STAGE.UNIT.LAYER -> stages.STAGE.blocks.UNIT.LAYER, and the layers' own names."""
    parts = name.split(".")
    if parts[0] == "stages":
        parts.insert(2, "blocks")
    name = ".".join(parts)
    for ours, theirs in RESNET_TO_TIMM:
        name = name.replace(ours, theirs)
    return name


def patch_as_convolution(weight: torch.Tensor, patch: int) -> torch.Tensor:
    """(D, P * P * C) -> (D, C, P, P)."""
    return weight.reshape(weight.shape[0], patch, patch, -1).permute(0, 3, 1, 2)


def vit_as_timm(model: Model) -> State:
    """A Vision Transformer's or a hybrid's tensors under timm's names."""
    size, state = model.config.size, {}
    for name, value in model.state_dict().items():
        if name.startswith("embed.resnet."):
            state["patch_embed.backbone." + resnet_name_in_timm(name.removeprefix("embed.resnet."))] = value
            continue
        found = name.replace("attention.", "attn.").replace("attn.out.", "attn.proj.")
        found = found.replace("mlp.dense", "mlp.fc").replace("embed.patch.", "patch_embed.proj.")
        found = found.replace("embed.class_token", "cls_token").replace("embed.position", "pos_embed")
        state[found] = patch_as_convolution(value, size.patch) if name == "embed.patch.weight" else value
    return state


def bit_as_timm(model: Model) -> State:
    """A BiT ResNet's tensors under timm's names; the head is a 1x1 convolution there."""
    state = {resnet_name_in_timm(name): value for name, value in model.state_dict().items() if "head" not in name}
    return state | {"head.fc.weight": model.head.weight[:, :, None, None], "head.fc.bias": model.head.bias}


def vit_as_hugging_face(model: Model) -> State:
    """A Vision Transformer's tensors under transformers' names; q, k and v apart."""
    layers = {"attention.out.": "attention.o_proj.", "norm1.": "layernorm_before.", "norm2.": "layernorm_after."}
    layers |= {"mlp.dense1.": "mlp.fc1.", "mlp.dense2.": "mlp.fc2."}
    outer = {"head.": "classifier.", "norm.": "vit.layernorm.", "embed.class_token": "vit.embeddings.cls_token"}
    outer |= {"embed.position": "vit.embeddings.position_embeddings"}
    outer |= {"embed.patch.": "vit.embeddings.patch_embeddings.projection."}
    state: State = {}
    for name, value in model.state_dict().items():
        if ".qkv." in name:
            before, kind = name.replace("blocks.", "vit.layers.").split("qkv.")
            state |= {f"{before}{part}_proj.{kind}": third for part, third in zip("qkv", value.chunk(3), strict=True)}
            continue
        found = name.replace("blocks.", "vit.layers.") if name.startswith("blocks.") else name
        for ours, theirs in (layers if name.startswith("blocks.") else outer).items():
            found = found.replace(ours, theirs)
        is_patch = name == "embed.patch.weight"
        state[found] = patch_as_convolution(value, model.config.size.patch) if is_patch else value
    return state


def timm_vit(timm: ModuleType, name: str, model: Model, **arguments: Any) -> Any:
    """timm's model with our weights, all of them and no other."""
    arguments |= {"num_classes": model.config.num_classes, "depth": model.config.size.depth}
    other = timm.create_model(name, **arguments)
    other.load_state_dict(vit_as_timm(model), strict=True)
    return other.eval()


def resized(model: Model, image_size: int, *, mode: Any) -> Model:
    """The model for another image size, with its position embeddings resampled."""
    old = model.config
    new = build_model(ModelConfig(**{**vars(old), "image_size": image_size}))
    state = model.state_dict()
    state["embed.position"] = resample_position_embeddings(
        state["embed.position"][0], from_grid=old.grid, to_grid=new.config.grid, mode=mode
    )[None]
    new.load_state_dict(state)
    return new.eval()


@pytest.mark.parametrize(
    ("name", "timm_name", "depth", "gelu", "act_layer"),
    [
        pytest.param("vit_b16", "vit_base_patch16_224", 12, "exact", "gelu", id="B/16"),
        pytest.param(
            "vit_b16", "vit_base_patch16_224", 3, "tanh", "gelu_tanh", id="B/16, three layers, the paper's GELU"
        ),
        pytest.param("vit_h14", "vit_huge_patch14_224", 2, "exact", "gelu", id="H/14, two layers of it"),
        pytest.param("vit_h14", "vit_huge_patch14_224", 32, "exact", "gelu", id="H/14", marks=pytest.mark.slow),
        pytest.param("vit_l32", "vit_large_patch32_224", 2, "exact", "gelu", id="L/32, two layers of it"),
        pytest.param("vit_s16", "vit_small_patch16_224", 2, "exact", "gelu", id="S/16, two layers of it"),
        pytest.param("vit_ti16", "vit_tiny_patch16_224", 2, "tanh", "gelu_tanh", id="Ti/16, two layers of it"),
    ],
)
def test_timms_vision_transformers(
    timm: ModuleType, name: str, timm_name: str, depth: int, gelu: Any, act_layer: str
) -> None:
    model = random_model(ModelConfig(name=name, depth=depth, num_classes=50, gelu=gelu))
    other = timm_vit(timm, timm_name, model, act_layer=act_layer)
    assert difference(model, other, random_images(224, 224)) < MOST


def test_timms_average_pooling_without_a_class_token(timm: ModuleType) -> None:
    model = random_model(ModelConfig(name="vit_s16", depth=2, num_classes=50, gelu="exact", pooling="average"))
    arguments = {"global_pool": "avg", "class_token": False, "fc_norm": False}
    other = timm_vit(timm, "vit_small_patch16_224", model, **arguments)
    assert difference(model, other, random_images(224, 224)) < MOST


@pytest.mark.parametrize("image_size", [pytest.param(384, id="24 x 24"), pytest.param(112, id="7 x 7")])
def test_timm_at_a_resampled_size(timm: ModuleType, image_size: int) -> None:
    model = random_model(ModelConfig(name="vit_b16", depth=2, num_classes=50, gelu="exact"))
    other: nn.Module = timm.create_model("vit_base_patch16_224", num_classes=50, depth=2, img_size=image_size)
    # timm's own way with a checkpoint of another size
    state = timm.models.vision_transformer.checkpoint_filter_fn(vit_as_timm(model), other)
    other.load_state_dict(state, strict=True)
    assert difference(resized(model, image_size, mode="timm"), other.eval(), random_images(*2 * (image_size,))) < MOST


@pytest.mark.parametrize(
    ("name", "timm_name", "image_size"),
    [
        pytest.param("r50_vit_b16", "vit_base_r50_s16_224", 224, id="R50+B/16"),
        pytest.param("r50_vit_b16", "vit_base_r50_s16_224", 160, id="R50+B/16 at 160"),
        pytest.param("r50_vit_l32", "vit_large_r50_s32_224", 224, id="R50+L/32"),
    ],
)
def test_timms_hybrids(timm: ModuleType, name: str, timm_name: str, image_size: int) -> None:
    model = random_model(ModelConfig(name=name, depth=2, num_classes=50, gelu="exact", resnet_epsilons="timm"))
    if image_size != 224:
        model = resized(model, image_size, mode="timm")
    other = timm_vit(timm, timm_name, model, img_size=image_size)
    assert difference(model, other, random_images(image_size, image_size)) < MOST


@pytest.mark.parametrize(
    ("height", "width"), [pytest.param(224, 224, id="224"), pytest.param(129, 96, id="neither square nor even")]
)
def test_timms_bit(timm: ModuleType, height: int, width: int) -> None:
    model = random_model(ModelConfig(name="bit_r50x1", num_classes=50, resnet_epsilons="timm"))
    other: nn.Module = timm.create_model("resnetv2_50x1_bit", num_classes=50)
    other.load_state_dict(bit_as_timm(model), strict=True)
    assert difference(model, other.eval(), random_images(height, width)) < MOST


@pytest.mark.parametrize("epsilons", ["timm", "paper"])
def test_in_fp64_the_resnets_differ_by_their_epsilons_alone(timm: ModuleType, epsilons: Any) -> None:
    """What is left in fp32 is rounding; and the paper's epsilons are not timm's, hence the field."""
    images = random_images(48, 80)
    transformer: dict[str, Any] = {"patch": 2, "depth": 1, "width": 32, "mlp_width": 32, "num_heads": 2}
    fields: dict[str, Any] = {"image_size": 48, "resnet_units": (2, 2), "resnet_epsilons": epsilons}
    hybrid = random_model(ModelConfig(name="r50_vit_b16", **transformer, **fields)).double()
    bit = random_model(ModelConfig(name="bit_r50x1", **fields)).double()
    build, layers = timm.models.resnetv2.ResNetV2, timm.layers
    headless = {"layers": (2, 2), "num_classes": 0}
    same, even = (partial(kind, eps=1e-8) for kind in (layers.StdConv2dSame, layers.StdConv2d))
    their_hybrid = build(**headless, global_pool="", preact=False, stem_type="same", conv_layer=same).double()
    their_hybrid.load_state_dict(
        {
            name.removeprefix("patch_embed.backbone."): value
            for name, value in vit_as_timm(hybrid).items()
            if "backbone" in name
        }
    )
    their_bit = build(**headless, stem_type="fixed", conv_layer=even).double()
    their_bit.load_state_dict({name: value for name, value in bit_as_timm(bit).items() if "head" not in name})
    x_BCHW = theirs_of(images).double()
    with torch.no_grad():
        map_BHWC = hybrid.get_submodule("embed.resnet")(x_BCHW.permute(0, 2, 3, 1))
        pairs = [(map_BHWC.permute(0, 3, 1, 2), their_hybrid(x_BCHW)), (bit.features(images), their_bit(x_BCHW))]
    for ours, expected in pairs:
        assert ours.shape == expected.shape
        assert (float((ours - expected).abs().max()) < 1e-11) == (epsilons == "timm")


def hugging_face_vit(transformers: ModuleType, model: Model) -> Any:
    """ViTForImageClassification with our weights, all of them and no other."""
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
    other = transformers.ViTForImageClassification(theirs)
    other.load_state_dict(vit_as_hugging_face(model), strict=True)
    return other.eval()


@pytest.mark.parametrize(
    ("gelu", "epsilon"),
    [
        pytest.param("exact", 1e-12, id="as Hugging Face has it"),
        pytest.param("tanh", 1e-6, id="as the paper's code has it"),
    ],
)
@pytest.mark.parametrize("image_size", [pytest.param(224, id="224"), pytest.param(384, id="resampled to 384")])
def test_hugging_faces_vision_transformer(transformers: ModuleType, gelu: Any, epsilon: float, image_size: int) -> None:
    depth = 12 if (image_size, gelu) == (224, "exact") else 2
    model = random_model(
        ModelConfig(name="vit_b16", depth=depth, num_classes=50, gelu=gelu, layer_norm_epsilon=epsilon)
    )
    other = hugging_face_vit(transformers, model)
    ours = model if image_size == 224 else resized(model, image_size, mode="bicubic")
    images = random_images(image_size, image_size)
    assert difference(ours, lambda x: other(x, interpolate_pos_encoding=image_size != 224).logits, images) < MOST
