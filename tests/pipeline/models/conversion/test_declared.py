"""What a folder declares beside its weights: sizes in config.json, and the range of pixels for a Hugging Face model."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.models.conversion.declared import grid_of, pair_of
from pipeline.models.conversion.preprocessor import description_of, refuse_other_pixels
from pipeline.models.weights.folder import PIXELS_FILE
from shards.errors import UserError

OURS = description_of(224)


@pytest.mark.parametrize("content", [OURS, {}, {"image_mean": [0.5], "image_std": [0.5] * 3}])
def test_the_papers_pixels_pass(tmp_path: Path, content: dict[str, Any]) -> None:
    refuse_other_pixels(tmp_path)
    (tmp_path / PIXELS_FILE).write_text(json.dumps(content))
    refuse_other_pixels(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": content}))
    refuse_other_pixels(tmp_path)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", [PIXELS_FILE, "processor_config.json"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_normalize": False}, "do_normalize False"),
        ({"do_rescale": False}, "do_rescale False"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor 0.0078"),
        ({"image_mean": [0.485, 0.456, 0.406]}, "image_mean .0.485"),
        ({"image_std": None}, "image_std None"),
    ],
)
def test_other_pixels_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str, name: str, wrapped: bool
) -> None:
    content = OURS | change
    (tmp_path / name).write_text(json.dumps({"image_processor": content} if wrapped else content))
    with pytest.raises(UserError, match=rf"{name}' says {message}.*; the models here take the paper's"):
        refuse_other_pixels(tmp_path)


@pytest.mark.parametrize(("value", "expected"), [(48, (48, 48)), ([48, 64], (48, 64)), ((8, 8), (8, 8))])
def test_one_number_or_two(value: Any, expected: tuple[int, int]) -> None:
    assert pair_of(value, key="image_size", where="w") == expected


@pytest.mark.parametrize("value", [True, "48", 0, -3, [48], [48, True], [1, 2, 3], 48.0, {}, [0, 4]])
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"config.json beside 'w' says image_size .*; allowed:"):
        pair_of(value, key="image_size", where="w")


@pytest.mark.parametrize(
    ("image", "patch", "expected"),
    [((48, 64), (8, 8), (6, 8)), ((50, 50), (8, 8), (6, 6)), ((16, 16), (16, 8), (1, 2))],
)
def test_the_grid(image: tuple[int, int], patch: tuple[int, int], expected: tuple[int, int]) -> None:
    assert grid_of(image, patch) == expected
