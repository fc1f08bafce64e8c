"""The pixel range that a Hugging Face folder declares for its weights. Ours is -1 to 1, as in the paper's code.

Source: transformers' image_processing_vit.py; a processor's file nests the entries of the image processor.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.models.conversion.tensor_file import readable
from pipeline.models.weights.folder import MOST_DESCRIPTION_BYTES, PIXELS_FILE
from shards.errors import UserError
from shards.files.typed_json import parse_json
from shards.local_file import read_local_file
from shards.schema.config_values import shown_value

_FILES = (PIXELS_FILE, "processor_config.json")


def refuse_other_pixels(folder: Path) -> None:
    """Raises UserError if a file in the folder says that pixels are not scaled, or are normalised differently."""
    for path in (folder / name for name in _FILES if (folder / name).is_file()):
        content = json_object(path)
        inner = content.get("image_processor")
        said = inner if isinstance(inner, dict) else content
        other = [key for key in ("do_rescale", "do_normalize") if said.get(key, True) is not True]
        other += [key for key in ("image_mean", "image_std") if said.get(key, [0.5]) not in (0.5, [0.5], [0.5] * 3)]
        factor = said.get("rescale_factor", 1 / 255)
        if not isinstance(factor, float | int) or abs(factor * 255 - 1) > 1e-3:
            other.append("rescale_factor")
        if other:
            found = ", ".join(f"{key} {shown_value(said[key])}" for key in other)
            raise UserError(
                f"{str(path)!r} says {found}; the models here take the "
                "paper's pixels, value / 255 with mean and deviation 0.5 each: give weights trained so"
            )


def description_of(image_size: int) -> dict[str, Any]:
    """The content of the file for a model of ours."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": image_size, "width": image_size},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def json_object(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file. Raises UserError if it cannot be read, or holds something else."""
    try:
        with readable(repr(str(path))):
            content = parse_json(read_local_file(path, most_bytes=MOST_DESCRIPTION_BYTES))
    except UserError as error:
        if isinstance(error.__cause__, ValueError):
            raise UserError(f"{str(path)!r} is no JSON ({error.__cause__}); fetch it again") from error
        raise
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} is no JSON object; fetch it again")
    return content
