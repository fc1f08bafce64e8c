"""JSON files beside weights: reads any, and writes the preprocessor's of a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.models.conversion.tensor_file import readable
from pipeline.models.weights.folder import MOST_DESCRIPTION_BYTES
from shards.errors import UserError
from shards.files.typed_json import parse_json
from shards.local_file import read_local_file


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
