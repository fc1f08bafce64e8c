"""Hugging Face's ViT: a folder with `config.json` and `model.safetensors`, as ViTForImageClassification reads it.

A model with a distillation token is a DeiTForImageClassificationWithTeacher there. Sources: transformers'
configuration_vit.py, modeling_vit.py and modeling_deit.py. The library's defaults are exact GELU and an epsilon of
1e-12, so the model's own GELU and epsilon are written into `config.json`. Tensors get the names in published files,
which transformers 5 still reads. Files with its newer names can be read, too.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline.models.build import shapes_of
from pipeline.models.config import Gelu, ModelConfig
from pipeline.models.conversion.config import Hints, Pair
from pipeline.models.conversion.image_processor import image_processor, transform_of
from pipeline.models.conversion.layout import (
    LAYER,
    TENSOR,
    OurView,
    Section,
    Table,
    chunks,
    layout_of,
    patch_convolution,
    their_shapes,
    write_layout,
)
from pipeline.models.conversion.sizes import Declared, Found, Usual, grid_of, pair_of, transformer_in, weights_of
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.timm_tensors import Made, with_made
from pipeline.models.weights.folder import Weights, write_folder
from pipeline.models.weights.safetensors import TensorByName
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage, texts_of, unique_labels
from shards.config_values import shown_value
from shards.errors import UserError

log = logging.getLogger(__name__)
_GELUS: dict[str, Gelu] = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "quick_gelu": "quick"}
_PATCH = "vit.embeddings.patch_embeddings.projection.weight"
_TOKEN, _POSITIONS = "vit.embeddings.distillation_token", "vit.embeddings.position_embeddings"
_REGISTER = "vit.embeddings.register"  # is in no file: see _with_unread_token_as_register
_MULTI_LABEL = "multi_label_classification"  # a problem_type whose probabilities are sigmoids, not softmax
VIT_TYPES = ("vit", "deit")
# The names of a DeiT -> those of a ViT.
_OF_DEIT = (("deit.", "vit."), ("cls_classifier.", "classifier."))
# transformers 5's own names -> the names in published files.
_NEWER = (
    (r"^vit\.layers\.", "vit.encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


def open_hugging_face(
    file: TensorFile, description: Mapping[str, Any], hints: Hints, *, processor: Mapping[str, Any] | None = None
) -> Weights:
    """Opens the weights of a ViTForImageClassification, a ViTModel or one of DeiT's classes of the same kinds.
    `processor`: the model's preprocessor_config.json, which says how images are prepared.

    Without a classifier, the pooler is the hidden tanh layer; with one, transformers does not use the pooler. Raises a
    UserError that says what does not fit, and why.
    """
    file = _without_idle_pooler(file.renamed({_published(name): name for name in file.shapes}))
    file = _with_unread_token_as_register(file)
    found, model_type = _model(file, description, hints), str(description.get("model_type"))
    transform, assumed = transform_of(processor or {}, found.config.image_size, model_type=model_type)
    return weights_of(
        file,
        table(found.config.size.patch),
        replace(found, assumed=(*found.assumed, *assumed)),
        advice=f"config.json and the tensors must be of one ViT. {hints.advice()}",
        labels=labels_of(description.get("id2label"), found.config.num_classes, file.where),
        usage=Usage(
            loss="sigmoid" if description.get("problem_type") == _MULTI_LABEL else "softmax",
            transform=transform,
        ),
    )


def save_hugging_face(
    folder: Path,
    *,
    config: ModelConfig,
    labels: tuple[str, ...],
    tensor: TensorByName,
    usage: Usage = DEFAULT_USAGE,
) -> None:
    """Writes the folder of a plain ViT with a class token. `preprocessor_config.json` says how `usage` prepares
    images."""
    shapes = shapes_of(config)
    layout = layout_of(table(config.size.patch), shapes)
    if config.distillation_token:
        layout = {ours: replace(each, names=tuple(map(_name_in_deit, each.names))) for ours, each in layout.items()}
    write_folder(
        folder,
        description=_description(config, labels, usage),
        shapes=their_shapes(layout, shapes),
        tensors=write_layout(layout, tensor),
        pixels=image_processor(config.image_size, usage.transform),
    )


def transformers_class(config: ModelConfig) -> str:
    """Returns the name of transformers' class for the model."""
    return "DeiTForImageClassificationWithTeacher" if config.distillation_token else "ViTForImageClassification"


def table(patch: int) -> Table:
    """Returns the table that maps our tensors to those in the folder, for patches of `patch` pixels."""
    embeddings, attention = "vit.embeddings.", "attention.attention."
    queries_keys_values = tuple(f"{attention}{name}." for name in ("query", "key", "value"))
    return (
        Section(
            rows=(
                ("embed.patch.weight", _PATCH, {"": ("", patch_convolution(patch))}),
                ("embed.patch.bias", f"{embeddings}patch_embeddings.projection.bias", TENSOR),
                ("embed.class_token", f"{embeddings}cls_token", TENSOR),
                ("embed.distillation_token", _TOKEN, TENSOR),
                ("embed.registers", _REGISTER, TENSOR),
                ("embed.position", _POSITIONS, TENSOR),
            )
        ),
        Section(
            ours="blocks.{}.",
            theirs="vit.encoder.layer.{}.",
            rows=(
                ("attention.qkv.", queries_keys_values, {kind: (kind, chunks(3)) for kind in ("weight", "bias")}),
                ("norm1.", "layernorm_before.", LAYER),
                ("attention.out.", "attention.output.dense.", LAYER),
                ("norm2.", "layernorm_after.", LAYER),
                ("mlp.dense1.", "intermediate.dense.", LAYER),
                ("mlp.dense2.", "output.dense.", LAYER),
            ),
        ),
        Section(
            rows=(
                ("norm.", "vit.layernorm.", LAYER),
                ("representation.", "vit.pooler.dense.", LAYER),
                ("head.", "classifier.", LAYER),
                ("head_dist.", "distillation_classifier.", LAYER),
            )
        ),
    )


def _published(name: str) -> str:
    """Returns the name of a tensor in published files of a ViT. Names of a ViTModel lack the prefix `vit.`, which is
    added."""
    for of_deit, of_vit in _OF_DEIT:
        if name.startswith(of_deit):
            name = of_vit + name.removeprefix(of_deit)
    if name.startswith(("embeddings.", "encoder.", "layers.", "layernorm.", "pooler.")):
        name = f"vit.{name}"
    for pattern, published in _NEWER:
        name = re.sub(pattern, published, name)
    return name


def _name_in_deit(name: str) -> str:
    """Returns the name in a DeiT of a tensor that is called `name` in a ViT."""
    return next((deit + name.removeprefix(vit) for deit, vit in _OF_DEIT if name.startswith(vit)), name)


def _without_idle_pooler(file: TensorFile) -> TensorFile:
    pooler = [name for name in file.shapes if name.startswith("vit.pooler.")]
    if not pooler or "classifier.weight" not in file.shapes:
        return file
    log.info("%s: %s left out: with a classifier, transformers does not use it", file.where, ", ".join(pooler))
    return file.renamed({name: name for name in file.shapes if name not in pooler})


def _with_unread_token_as_register(file: TensorFile) -> TensorFile:
    """Returns the file of a DeiTForImageClassification or a DeiTModel with its distillation token as a register, to
    which its position is added. Blocks attend to the token, and no head reads it."""
    heads = ("classifier.weight", "vit.pooler.dense.weight")
    has_one_head = any(name in file.shapes for name in heads) and "distillation_classifier.weight" not in file.shapes
    if not has_one_head or _TOKEN not in file.shapes:
        return file
    _, num_rows, width = file.shape(_POSITIONS, 3)

    def table() -> torch.Tensor:
        table_1ND = file.read(_POSITIONS)
        return torch.cat([table_1ND[:, :1], table_1ND[:, 2:]], dim=1)

    made = {
        _POSITIONS: Made(shape=(1, num_rows - 1, width), make=table),
        _REGISTER: Made(shape=(1, 1, width), make=lambda: file.read(_TOKEN) + file.read(_POSITIONS)[:, 1:2]),
    }
    return with_made(file, made, without=(_TOKEN,))


def labels_of(given: Any, num_classes: int, where: str) -> tuple[str, ...]:
    """Returns the names of the classes by id, from a table or a list; empty if there is neither."""
    names = dict(enumerate(given)) if isinstance(given, list) else given
    if not isinstance(names, dict) or not names:
        return ()
    ids, known = [str(number) for number in names], frozenset(map(str, range(num_classes)))
    if num_classes and (beyond := [number for number in ids if number not in known]):
        raise UserError(
            f"id2label in config.json beside {where!r} has the id {shown_value(beyond[0])}; the classifier has "
            f"{num_classes} classes, 0 to {num_classes - 1}: correct it"
        )
    found = [names.get(str(number), names.get(number, number)) for number in range(num_classes)]
    return unique_labels(texts_of(found, where=where), where=where)


def _model(file: TensorFile, description: Mapping[str, Any], hints: Hints) -> Found:
    act, epsilon = str(description.get("hidden_act", "gelu")), description.get("layer_norm_eps", 1e-12)
    if act not in _GELUS:
        raise UserError(f"hidden_act in {file.where!r} is {shown_value(act)}; allowed: {', '.join(_GELUS)}")
    if description.get("qkv_bias", True) is not True:
        raise UserError(f"qkv_bias in {file.where!r} is false; the paper's attention has biases: give other weights")
    counts = {key: description.get(key, 12) for key in ("num_hidden_layers", "num_attention_heads")}
    are_counts = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts.values())
    if not are_counts or isinstance(epsilon, bool) or not isinstance(epsilon, float | int) or not 0 < epsilon < 1:
        raise UserError(
            f"config.json beside {file.where!r} has {shown_value(counts)}, layer_norm_eps {shown_value(epsilon)}; "
            "allowed: numbers above 0, and an epsilon below 1"
        )
    width, _, patch, patch_width = file.shape(_PATCH, 4)
    view = OurView(file=file, table=table(patch))
    depth = len(view.numbers("blocks.{}."))
    if depth != counts["num_hidden_layers"]:
        raise UserError(
            f"config.json beside {file.where!r} says num_hidden_layers {counts['num_hidden_layers']}, the tensors are "
            f"of {depth} layers (vit.encoder.layer.{depth - 1} is the last); give both files of one model"
        )
    declared = Declared(
        width=width,
        patch=patch,
        num_heads=counts["num_attention_heads"],
        class_row=True,
        grid=_declared_grid(description, (patch, patch_width), file.where),
    )
    said = ("gelu", "layer_norm_epsilon", "num_heads", "position")
    usual = Usual(gelu=_GELUS[act], layer_norm_epsilon=float(epsilon), said=said)
    return transformer_in(view, declared, usual=usual, hints=hints)


def _declared_grid(description: Mapping[str, Any], patch: Pair, where: str) -> Pair | None:
    """Returns the numbers of patches down and across that config.json declares; None if it does not give the image
    size."""
    if "patch_size" in description:
        declared = pair_of(description["patch_size"], key="patch_size", where=where)
        if declared != patch:
            raise UserError(
                f"config.json beside {where!r} says patch_size {declared[0]} x {declared[1]}, the tensors ({_PATCH}) "
                f"are of {patch[0]} x {patch[1]}; give both files of one model"
            )
    if "image_size" not in description:
        return None
    return grid_of(pair_of(description["image_size"], key="image_size", where=where), patch)


def _description(config: ModelConfig, labels: tuple[str, ...], usage: Usage) -> dict[str, Any]:
    size = config.size
    are_named = len(labels) == config.num_classes
    names = labels if are_named else tuple(f"LABEL_{number}" for number in range(config.num_classes))
    return {
        "architectures": [transformers_class(config)],
        "model_type": "deit" if config.distillation_token else "vit",
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.num_heads,
        "intermediate_size": size.mlp_width,
        "hidden_act": {"exact": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}[config.gelu],
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
        **({"problem_type": _MULTI_LABEL} if usage.loss == "sigmoid" else {}),
    }
