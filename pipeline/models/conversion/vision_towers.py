"""Vision towers of transformers other than its ViT: CLIP, DINOv2, DINOv3, SigLIP and SigLIP 2.

Each is the same model as one of timm's, so their tensors get timm's names, and their config.json becomes timm's
arguments (timm.py reads both). The newer names are those of transformers 5, the others those of published files.
Sources: modeling_clip.py, modeling_dinov2.py, modeling_dinov2_with_registers.py, modeling_dinov3_vit.py,
modeling_siglip.py and modeling_siglip2.py of transformers 5.23, and their configurations.

DINOv2's classifier reads the class token and the mean of the patches together, and CLIP's the mean of the patches
before the last norm, although its features are the class token after it. The models here pool one of the two, so both
classifiers are left out. SigLIP's classifier reads the mean of the patches, and its towers pool by attention. Shape
letters: N tokens, D width.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.models.conversion.config import Hints, PixelName
from pipeline.models.conversion.hugging_face import labels_of
from pipeline.models.conversion.image_processor import transform_of
from pipeline.models.conversion.pixel_range import PIXELS, PixelRange
from pipeline.models.conversion.sizes import pair_of, temperature_of
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.timm import open_timm
from pipeline.models.conversion.timm_tensors import Made, with_made
from pipeline.models.weights.folder import Weights
from pipeline.models.weights.usage import Usage
from shards.config_values import shown_value
from shards.errors import UserError

log = logging.getLogger(__name__)
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"}
_POOL = "attn_pool."
_PROJECTION = "visual_projection.weight"
_IN_PROJECTION = f"{_POOL}in_proj_"


@dataclass(frozen=True, kw_only=True)
class _Tower:
    """One kind of model: its tensors as pairs of a pattern and timm's name, from first to last, the values of its
    config.json that transformers leaves out where they are usual, and timm's arguments. `pixels`: those of its
    published weights. `classifier_reads`: what a classifier reads that is left out for it."""

    names: tuple[tuple[str, str], ...]
    usual: Mapping[str, Any]
    arguments: Mapping[str, Any]
    pixels: PixelName = "paper"
    classifier_reads: str = ""


_DINO_NAMES = (
    (r"^(dinov2|dinov2_with_registers|model)\.", ""),
    (r"^embeddings\.(cls_token|mask_token)$", r"\1"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.(projection\.)?", "patch_embed.proj."),
    (r"^(encoder\.)?layer\.(\d+)\.", r"blocks.\2."),
    (r"\.attention\.attention\.([qkv])\w+\.", r".attn.\1_proj."),
    (r"\.attention\.([qkv])_proj\.", r".attn.\1_proj."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.(weights_in|fc1)\.", ".mlp.fc1."),
    (r"\.mlp\.(weights_out|down_proj|fc2)\.", ".mlp.fc2."),
    (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
    (r"^layernorm\.", "norm."),
)
_CLIP_NAMES = (
    (r"^vision_model\.", ""),
    (r"^embeddings\.class_embedding$", "cls_token"),
    (r"^embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"^embeddings\.position_embedding\.weight$", "pos_embed"),
    (r"^encoder\.layers\.(\d+)\.", r"blocks.\1."),
    (r"\.self_attn\.out_proj\.", ".attn.proj."),
    (r"\.self_attn\.", ".attn."),
    (r"\.layer_norm(\d)\.", r".norm\1."),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^post_layernorm\.", "norm."),
)
_SIGLIP_NAMES = (
    *_CLIP_NAMES,
    (r"^head\.probe$", f"{_POOL}latent"),
    (r"^head\.attention\.out_proj\.", f"{_POOL}proj."),
    (r"^head\.attention\.in_proj_", _IN_PROJECTION),
    (r"^head\.layernorm\.", f"{_POOL}norm."),
    (r"^head\.mlp\.", f"{_POOL}mlp."),
    (r"^classifier\.", "head."),
)
_DINO = {"num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "image_size": 224, "patch_size": 14}
_SIGLIP = {**_DINO, "hidden_act": "gelu_pytorch_tanh", "patch_size": 16}
_CLIP = {**_DINO, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "patch_size": 32}
_OF_TOKEN: Mapping[str, Any] = {"global_pool": "token", "use_rot_pos_emb": False}
_DINOV2 = _Tower(
    names=_DINO_NAMES,
    usual=_DINO,
    arguments={**_OF_TOKEN, "no_embed_class": False},
    pixels="imagenet",
    classifier_reads="the class token and the mean of all patches",
)
_TOWERS: Mapping[str, _Tower] = {
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2,
    "dinov3_vit": _Tower(
        names=_DINO_NAMES,
        usual={**_DINO, "num_attention_heads": 6, "layer_norm_eps": 1e-5, "patch_size": 16, "rope_theta": 100.0},
        arguments={
            **_OF_TOKEN,
            "use_rot_pos_emb": True,
            "use_abs_pos_emb": False,
            "rope_type": "dinov3",
            "rope_rotate_half": True,
        },
        pixels="imagenet",
        classifier_reads="the class token and the mean of all patches",
    ),
    "clip_vision_model": _Tower(
        names=_CLIP_NAMES,
        usual=_CLIP,
        arguments={**_OF_TOKEN, "no_embed_class": False},
        pixels="clip",
        classifier_reads="the mean of all patches before the last norm",
    ),
    "siglip_vision_model": _Tower(names=_SIGLIP_NAMES, usual=_SIGLIP, arguments={"use_rot_pos_emb": False}),
    "siglip2_vision_model": _Tower(
        names=_SIGLIP_NAMES, usual={**_SIGLIP, "num_patches": 256}, arguments={"use_rot_pos_emb": False}
    ),
}
# Models with a tower for texts, which is left out.
_WHOLE = {each: f"{each}_vision_model" for each in ("clip", "siglip", "siglip2")}
MODEL_TYPES = (*_TOWERS, *_WHOLE)


def pixels_of_tower(kind: str) -> PixelRange:
    """Returns the pixels to assume for a tower of this model_type if no preprocessor_config.json declares them."""
    return PIXELS[_TOWERS[_WHOLE.get(kind, kind)].pixels]


def open_tower(
    file: TensorFile, description: Mapping[str, Any], hints: Hints, *, processor: Mapping[str, Any]
) -> Weights:
    """Opens the weights of a tower whose config.json is `description`. `processor`: the model's
    preprocessor_config.json, which says how images are prepared. Raises a UserError that says what does not fit."""
    kind = str(description.get("model_type"))
    inner = description.get("vision_config")
    said = inner if kind in _WHOLE and isinstance(inner, dict) else description
    tower = _TOWERS[_WHOLE.get(kind, kind)]
    known = {**tower.usual, **{key: value for key, value in said.items() if value is not None}}
    activation, epsilon = str(known["hidden_act"]), known["layer_norm_eps"]
    # DINOv3's gate has the activation that config.json says; DINOv2's is always the SiLU.
    is_gated = kind == "dinov3_vit" and any(".mlp.gate_proj." in name for name in file.shapes)
    allowed = ("silu",) if is_gated else tuple(_ACTIVATIONS)
    if activation not in allowed:
        raise UserError(f"hidden_act in {file.where!r} is {shown_value(activation)}; allowed: {', '.join(allowed)}")
    if type(epsilon) not in (float, int) or not 0 < epsilon < 1:
        raise UserError(
            f"layer_norm_eps beside {file.where!r} is {shown_value(epsilon)}; allowed: a number from above 0 to 1"
        )
    image_size, num_patches = known["image_size"], known.get("num_patches")
    if num_patches is not None:
        if type(num_patches) is not int or num_patches < 1:
            raise UserError(
                f"config.json beside {file.where!r} says num_patches {shown_value(num_patches)}; allowed: a whole "
                "number of 1 or more, the rows of its position table; correct it"
            )
        patch, _ = pair_of(known["patch_size"], key="patch_size", where=file.where)
        image_size = math.isqrt(num_patches) * patch
    arguments = {
        **tower.arguments,
        "num_heads": known["num_attention_heads"],
        "act_layer": _ACTIVATIONS.get(activation, "gelu"),
    }
    arguments |= {"img_size": image_size} if image_size else {}
    if "rope_theta" in known:
        arguments["rope_temperature"] = temperature_of(known["rope_theta"], key="rope_theta", where=file.where)
    hints = replace(hints, layer_norm_epsilon=hints.layer_norm_epsilon or float(epsilon))
    weights = open_timm(_with_timms_names(file, tower), {"model_args": arguments}, hints)
    transform, assumed = transform_of(processor, weights.config.image_size, model_type=kind)
    return replace(
        weights,
        labels=labels_of(description.get("id2label"), weights.config.num_classes, file.where),
        assumed=(*weights.assumed, *assumed),
        usage=Usage(transform=transform),
    )


def _with_timms_names(file: TensorFile, tower: _Tower) -> TensorFile:
    """Returns the file with timm's names, without the tensors of texts and those that no image passes through, and
    without CLIP's projection of images to the space of texts."""
    names = dict[str, str]()
    if _PROJECTION in file.shapes:
        log.warning("%s: its projection to the space of texts (%s) is left out", file.where, _PROJECTION)
    for name in file.shapes:
        if name.startswith(("text_", _PROJECTION, "logit_")) or name.endswith(".position_ids"):
            continue
        new = name
        for pattern, theirs in tower.names:
            new = re.sub(pattern, theirs, new)
        names[new] = name
    # With a gate, up_proj is what it multiplies; without one, it is the whole first layer.
    up = "fc1_x" if "blocks.0.mlp.fc1_g.weight" in names else "fc1"
    names = {name.replace(".mlp.up_proj.", f".mlp.{up}."): old for name, old in names.items() if name != "mask_token"}
    has_idle_pool = "head.weight" in names and f"{_POOL}latent" in names
    if is_left_out := tower.classifier_reads and "classifier.weight" in names:
        log.warning("%s: its classifier is left out: it reads %s", file.where, tower.classifier_reads)
    gone = ("classifier.",) if is_left_out else (_POOL,) if has_idle_pool else ()
    return _with_usual_shapes(file.renamed({name: old for name, old in names.items() if not name.startswith(gone)}))


def _with_usual_shapes(file: TensorFile) -> TensorFile:
    """Returns the file with position embeddings, patches and the pooling's layers in timm's shapes."""
    made, gone = dict[str, Made](), list[str]()
    if len(token := file.shapes.get("cls_token", ())) == 1:
        made["cls_token"] = Made(shape=(1, 1, *token), make=lambda: file.read("cls_token")[None, None])
    if len(file.shapes.get("pos_embed", ())) == 2:
        made["pos_embed"] = Made(shape=(1, *file.shapes["pos_embed"]), make=lambda: file.read("pos_embed")[None])
    if len(patches := file.shapes.get("patch_embed.proj.weight", ())) == 2:  # rows before columns before channels
        side = math.isqrt(patches[1] // 3)
        shape = (patches[0], 3, side, side)

        def convolution() -> torch.Tensor:
            return file.read("patch_embed.proj.weight").reshape(shape[0], side, side, 3).permute(0, 3, 1, 2)

        made["patch_embed.proj.weight"] = Made(shape=shape, make=convolution)
    for kind in ("weight", "bias"):
        if (name := f"{_IN_PROJECTION}{kind}") in file.shapes:
            width = file.shape(name, 2 if kind == "weight" else 1)[0]
            made[f"{_POOL}q.{kind}"] = _rows(file, name, slice(0, width // 3))
            made[f"{_POOL}kv.{kind}"] = _rows(file, name, slice(width // 3, width))
            gone.append(name)
    return with_made(file, made, without=gone)


def _rows(file: TensorFile, name: str, rows: slice) -> Made:
    return Made(shape=(rows.stop - rows.start, *file.shapes[name][1:]), make=lambda: file.read(name)[rows])
