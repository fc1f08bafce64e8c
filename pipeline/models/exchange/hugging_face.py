"""Hugging Face's ViT: a folder with `config.json` and `model.safetensors`, as ViTForImageClassification reads it.

Sources: transformers' configuration_vit.py and modeling_vit.py. Its own defaults are exact GELU and an epsilon of
1e-12; `config.json` says the paper's (gelu_pytorch_tanh, 1e-6). Names are those of all published files, which
transformers 5 still reads; its own newer ones are read here too. Shape letters: D width.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.models.config import Gelu, ModelConfig
from pipeline.models.exchange.layout import (
    Layout,
    Place,
    as_is,
    patch_convolution,
    positions,
    read_layout,
    write_layout,
)
from pipeline.models.exchange.sizes import (
    Hints,
    TransformerShapes,
    Usual,
    count,
    shapes_in_file,
    side_of,
    transformer_config,
)
from pipeline.models.exchange.tensor_file import TensorFile
from pipeline.models.weights import TensorByName, Weights, write_folder
from shards.errors import UserError

_GELUS: dict[str, Gelu] = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}
PIXELS_FILE = "preprocessor_config.json"
_POSITION = "vit.embeddings.position_embeddings"
_LAYER = {
    "norm1": "layernorm_before",
    "attention.out": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.dense1": "intermediate.dense",
    "mlp.dense2": "output.dense",
}
# transformers 5's own names -> those of the published files.
_NEWER = (
    (r"^vit\.layers\.", "vit.encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


def open_hugging_face(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> Weights:
    """The weights of a ViTForImageClassification or ViTModel. UserError naming what does not fit, and why."""
    file = file.renamed({_published(name): name for name in file.shapes})
    config = _config(file, description, hints)
    class_row = side_of(file.shape(_POSITION, 3)[1], class_token=True, where=file.where, name=_POSITION)[1]
    shapes = shapes_in_file(config)
    tensor = read_layout(
        file,
        layout(config, class_row=class_row),
        shapes,
        advice="config.json and the tensors must be of one ViT; give the folder of another model, or another --model",
    )
    given = description.get("id2label")
    names = given if isinstance(given, dict) else {}
    labels = tuple(str(names.get(str(number), number)) for number in range(config.num_classes)) if names else ()
    return Weights(where=file.where, config=config, labels=labels, shapes=shapes, tensor=tensor)


def save_hugging_face(folder: Path, *, config: ModelConfig, labels: tuple[str, ...], tensor: TensorByName) -> None:
    """Writes the folder, with `preprocessor_config.json`. UserError for what ViTForImageClassification has not."""
    if config.resnet:
        raise UserError(
            f"model.name is {config.name!r}, which has a ResNet; Hugging Face's ViT has none: export as timm or "
            "vision_transformer"
        )
    if config.representation:
        raise UserError(
            "Hugging Face's ViTForImageClassification has no hidden layer before the head (representation); it is "
            "never dropped silently: give --new-head for a model without it, or export as vision_transformer"
        )
    if config.pooling != "token":
        raise UserError(
            f"model.pooling is {config.pooling!r}; Hugging Face's ViT classifies from its class token: export as timm"
        )
    tensors = dict(write_layout(layout(config, class_row=True), tensor))
    write_folder(folder, description=_description(config, labels), tensors=tensors)
    pixels = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": config.image_size, "width": config.image_size},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / PIXELS_FILE).write_text(json.dumps(pixels, indent=1) + "\n")


def layout(config: ModelConfig, *, class_row: bool) -> Layout:
    """Where each tensor of ours is."""
    places = {
        "embed.patch.weight": patch_convolution("vit.embeddings.patch_embeddings.projection.weight", config.size.patch),
        "embed.patch.bias": as_is("vit.embeddings.patch_embeddings.projection.bias"),
        "embed.class_token": as_is("vit.embeddings.cls_token"),
        "embed.position": positions(_POSITION, class_row=class_row, class_token=True),
    }
    for number in range(config.size.depth):
        ours, theirs = f"blocks.{number}.", f"vit.encoder.layer.{number}."
        for kind in ("weight", "bias"):
            parts = tuple(f"{theirs}attention.attention.{part}.{kind}" for part in ("query", "key", "value"))
            # (3 * D, ...) -> three of (D, ...)
            places[f"{ours}attention.qkv.{kind}"] = Place(
                names=parts, split=lambda t: tuple(t.chunk(3)), join=torch.cat
            )
        for here, there in _LAYER.items():
            places |= _same(f"{ours}{here}.", f"{theirs}{there}.")
    places |= _same("norm.", "vit.layernorm.")
    if config.representation:
        places |= _same("representation.", "vit.pooler.dense.")
    return places | (_same("head.", "classifier.") if config.num_classes else {})


def _same(ours: str, theirs: str) -> dict[str, Place]:
    return {f"{ours}{kind}": as_is(f"{theirs}{kind}") for kind in ("weight", "bias")}


def _published(name: str) -> str:
    """The name in published files; a ViTModel's have no `vit.` in front."""
    if name.startswith(("embeddings.", "encoder.", "layers.", "layernorm.", "pooler.")):
        name = f"vit.{name}"
    for pattern, published in _NEWER:
        name = re.sub(pattern, published, name)
    return name


def _config(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> ModelConfig:
    act, epsilon = str(description.get("hidden_act", "gelu")), description.get("layer_norm_eps", 1e-12)
    if act not in _GELUS:
        raise UserError(f"hidden_act in {file.where!r} is {act!r}; allowed are {', '.join(_GELUS)}")
    if description.get("qkv_bias", True) is not True:
        raise UserError(f"qkv_bias in {file.where!r} is false; the paper's attention has biases: give other weights")
    counts = {key: description.get(key, 12) for key in ("num_hidden_layers", "num_attention_heads")}
    if not all(isinstance(number, int) for number in counts.values()) or not isinstance(epsilon, float | int):
        raise UserError(
            f"config.json beside {file.where!r} has {counts}, layer_norm_eps {epsilon!r}; allowed are numbers"
        )
    depth = count(file.shapes, r"vit\.encoder\.layer\.(\d+)\.")
    if depth != counts["num_hidden_layers"]:
        raise UserError(
            f"config.json beside {file.where!r} says num_hidden_layers {counts['num_hidden_layers']}, the tensors are "
            f"of {depth} layers (vit.encoder.layer.{depth - 1} is the last); give both files of one model"
        )
    width, _, patch, _ = file.shape("vit.embeddings.patch_embeddings.projection.weight", 4)
    shapes = TransformerShapes(
        patch=patch,
        depth=depth,
        width=width,
        mlp_width=file.shape("vit.encoder.layer.0.intermediate.dense.weight", 2)[0],
        num_heads=counts["num_attention_heads"],
        num_classes=file.shape("classifier.weight", 2)[0] if "classifier.weight" in file.shapes else 0,
        num_positions=file.shape(_POSITION, 3)[1],
        class_token=True,
        representation="vit.pooler.dense.weight" in file.shapes,
    )
    usual = Usual(gelu=_GELUS[act], layer_norm_epsilon=float(epsilon), resnet_epsilons="paper")
    return transformer_config(shapes, where=file.where, position_name=_POSITION, usual=usual, hints=hints)


def _description(config: ModelConfig, labels: tuple[str, ...]) -> dict[str, Any]:
    size = config.size
    are_named = len(labels) == config.num_classes
    names = labels if are_named else tuple(f"LABEL_{number}" for number in range(config.num_classes))
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.num_heads,
        "intermediate_size": size.mlp_width,
        "hidden_act": {"exact": "gelu", "tanh": "gelu_pytorch_tanh"}[config.gelu],
        "layer_norm_eps": config.layer_norm_epsilon,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "image_size": config.image_size,
        "patch_size": size.patch,
        "num_channels": 3,
        "qkv_bias": True,
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "torch_dtype": "float32",
    }
