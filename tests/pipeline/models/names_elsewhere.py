"""The tensors of our models under timm's and transformers' names.

These mappings are independent of pipeline/models/conversion/, which imports and exports files, so that a mistake in one
cannot hide in the other.
"""

import torch

from pipeline.models import Model

State = dict[str, torch.Tensor]

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
            found = resnet_name_in_timm(name.removeprefix("embed.resnet."))
            is_stem_alone = model.config.resnet is not None and not model.config.resnet.units
            state["patch_embed.backbone." + (found.removeprefix("stem.") if is_stem_alone else found)] = value
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
    """A Vision Transformer's tensors under transformers' names; q, k and v are separate."""
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
