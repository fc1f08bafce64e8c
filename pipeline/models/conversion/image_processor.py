"""How transformers prepares images: its image processors as EvaluationTransform, and the reverse.

Sources: image_processing_vit.py, image_processing_deit.py, image_processing_clip.py, image_processing_bit.py,
image_processing_siglip.py and image_processing_dinov3_vit.py of transformers 5.23.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.models.weights.folder import Assumption
from pipeline.models.weights.usage import DEFAULT_USAGE
from pipeline.shared_settings import EvaluationTransform, central_short_side
from shards.config_values import shown_value

_BILINEAR, _BICUBIC = 2, 3  # Pillow's numbers
_MOST_SIDE = 1 << 16
_FLEXIBLE = "max_num_patches"  # of SigLIP 2's processor, which keeps the proportions of each image
_DECLARATIONS = ("do_resize", "size", "resample", "do_center_crop", "crop_size", _FLEXIBLE)


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What a class of transformers does with images unless its file says otherwise. `is_shortest_edge`: whether a size
    of one number is that of the shortest edge, not of a square."""

    size: int = 224
    resample: int = _BICUBIC
    crops: bool = False
    crop_size: int = 224
    is_shortest_edge: bool = False

    def sides(self, size: Any) -> Any:
        """Returns a size as newer files have it. The oldest files have one number."""
        if type(size) is not int:
            return size
        return {"shortest_edge": size} if self.is_shortest_edge else _square(size)


_OF_CLIP = Processor(crops=True, is_shortest_edge=True)
# By the start of the class's name.
PROCESSORS: Mapping[str, Processor] = {
    "ViT": Processor(resample=_BILINEAR),
    "DeiT": Processor(size=256, crops=True),
    "CLIP": _OF_CLIP,
    "Bit": _OF_CLIP,
    "Siglip": Processor(is_shortest_edge=True),
    "DINOv3ViT": Processor(resample=_BILINEAR),
}
# The start of a model_type -> the class of its processor, for a file that does not name the class.
_OF_MODELS = {"vit": "ViT", "deit": "DeiT", "clip": "CLIP", "siglip": "Siglip", "dinov2": "Bit", "dinov3": "DINOv3ViT"}


def image_processor(image_size: int, transform: EvaluationTransform) -> dict[str, Any]:
    """Returns the settings with which an image processor of transformers prepares images as `transform` does, as far as
    it can.

    The filter `area` becomes bilinear, since torchvision, which transformers uses, has no such filter. Both backends of
    transformers always antialias. In version 4 of transformers, ViTImageProcessor does not crop; CLIP's processor crops
    in versions 4 and 5.
    """
    square = _square(image_size)
    if transform.mode == "resize":
        kind = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": square}
    else:
        short_side = central_short_side(transform, image_size)
        size = _square(short_side) if transform.mode == "fewshot" else {"shortest_edge": short_side}
        kind = {"image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": size}
        kind |= {"do_center_crop": True, "crop_size": square}
    return {
        **kind,
        "resample": _BICUBIC if transform.filter == "bicubic" else _BILINEAR,
        "do_convert_rgb": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def transform_of(
    processor: Mapping[str, Any], image_size: int, *, model_type: str
) -> tuple[EvaluationTransform, tuple[Assumption, ...]]:
    """Returns the transform that a processor describes, as the inverse of `image_processor`, and what is assumed about
    it; the default if it describes none. `model_type`: that of config.json, whose processor is taken if this one does
    not name its class.

    If the processor makes images of another size than the model's, the same proportions are taken at the model's size,
    which is an assumption. So is the default, which replaces a transform that EvaluationTransform cannot express.
    """
    declared = {key: processor[key] for key in _DECLARATIONS if processor.get(key) is not None}
    if not declared:
        return DEFAULT_USAGE.transform, ()
    usual = _usual_processor(processor, declared, model_type)
    if usual is None:
        return DEFAULT_USAGE.transform, (default_transform_for(declared),)
    crops, resample = bool(declared.get("do_center_crop", usual.crops)), declared.get("resample", usual.resample)
    size = usual.sides(declared.get("size", usual.size))
    side = _side_in(size, ({"height", "width"}, {"shortest_edge"}) if crops else ({"height", "width"},))
    crop = declared.get("crop_size", usual.crop_size)
    made = (crop if type(crop) is int else _side_in(crop, ({"height", "width"},))) if crops else side
    is_known = type(resample) is int and resample in (_BILINEAR, _BICUBIC) and declared.get("do_resize", True) is True
    if not is_known or _FLEXIBLE in declared or not side or not made or not 0 < made <= side <= _MOST_SIDE:
        return DEFAULT_USAGE.transform, (default_transform_for(declared),)
    same = Assumption(field="transform", value="of the same proportions", in_file=f"for images of {made} px")
    assumed = () if made == image_size else (same,)
    is_bicubic = resample == _BICUBIC
    found = EvaluationTransform(filter="bicubic" if is_bicubic else "bilinear", antialias=not is_bicubic)
    if not crops:
        return found, assumed
    mode: Literal["central_crop", "fewshot"] = "central_crop" if "shortest_edge" in size else "fewshot"
    return replace(found, mode=mode, short_side=round(side * image_size / made)), assumed


def default_transform_for(declared: Mapping[str, Any]) -> Assumption:
    """Returns the assumption of the default transform in the place of what a file declares."""
    return Assumption(field="transform", value="resize, bilinear and without a crop", in_file=shown_value(declared))


def _usual_processor(processor: Mapping[str, Any], declared: Mapping[str, Any], model_type: str) -> Processor | None:
    """Returns the defaults of the class that a processor names; without a name, of the class that goes with the model.
    Returns None if the class is unknown and would decide anything."""
    if named := processor.get("image_processor_type") or processor.get("feature_extractor_type"):
        kind = re.match(r"(\w+)(?:ImageProcessor|FeatureExtractor)", str(named))
        if kind and kind[1] in PROCESSORS:
            return PROCESSORS[kind[1]]
        is_whole = isinstance(declared.get("size"), dict) and {"resample", "do_center_crop"} <= declared.keys()
        is_whole &= "crop_size" in declared or not declared.get("do_center_crop")
        return Processor() if is_whole else None
    return next((PROCESSORS[name] for start, name in _OF_MODELS.items() if model_type.startswith(start)), Processor())


def _side_in(size: Any, forms: tuple[set[str], ...]) -> int | None:
    """Returns the pixels of the one side, or of both, in a size of one of the forms; None for any other size."""
    if not isinstance(size, dict) or set(size) not in forms:
        return None
    first, *others = size.values()
    return first if type(first) is int and all(type(each) is int and each == first for each in others) else None
