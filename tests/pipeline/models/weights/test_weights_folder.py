"""Folders of weights are written whole or not at all."""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.models.weights.folder import open_weights, write_folder
from shards.errors import InvalidDataError, UserError
from tests.pipeline.models.weights.test_folder import LABELS, random_model, saved


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"no folder can be made at .*file/w"):
        saved(tmp_path / "file" / "w", random_model())


def test_a_folder_left_in_between_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwritten and killed between any two renames: it has the old weights, the new ones or none, never a mixture."""
    folder, rename = tmp_path / "w", Path.replace
    for num_renames in range(2):
        saved(folder, random_model())
        left = [num_renames]

        def replace_some(self: Path, target: Path, left: list[int] = left) -> Path:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return rename(self, target)

        monkeypatch.setattr(Path, "replace", replace_some)
        with pytest.raises(KeyboardInterrupt):
            saved(folder, random_model(gelu="exact"))
        monkeypatch.setattr(Path, "replace", rename)
        with pytest.raises(UserError, match="no weights at"):
            open_weights(str(folder))
    saved(folder, random_model(gelu="exact"))
    assert open_weights(str(folder)).config.gelu == "exact"


def test_tensors_are_written_one_after_the_other(tmp_path: Path) -> None:
    """The model is never copied in memory: each tensor is freed before the one after the next is made."""
    shapes = {f"t{number}": (number + 1, 3) for number in range(9)}
    made: list[weakref.ref[torch.Tensor]] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, shape) in enumerate(shapes.items()):
            assert sum(tensor() is not None for tensor in made) <= 1
            value = torch.full(shape, float(number))
            made.append(weakref.ref(value))
            yield name, value
            del value

    write_folder(tmp_path, description={"format": 1}, shapes=shapes, tensors=tensors())
    loaded = load_file(tmp_path / "model.safetensors")
    assert len(made) == len(loaded) == 9
    for number, (name, shape) in enumerate(shapes.items()):
        assert torch.equal(loaded[name], torch.full(shape, float(number)))


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        pytest.param([("a", torch.ones(2, 3))], "zip", id="one is missing"),
        pytest.param([("a", torch.ones(2, 3)), ("c", torch.ones(1))], "c is torch.float32", id="another name"),
        pytest.param([("a", torch.ones(3, 2)), ("b", torch.ones(1))], "a is .* not a, float32", id="another shape"),
        pytest.param([("a", torch.ones(2, 3).half()), ("b", torch.ones(1))], "a is torch.float16", id="another type"),
    ],
)
def test_what_cannot_be_written_whole_is_absent(
    tmp_path: Path, tensors: list[tuple[str, torch.Tensor]], error: str
) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (2, 3), "b": (1,)}
    with pytest.raises(ValueError, match=error):
        write_folder(tmp_path / "new", description={}, shapes=shapes, tensors=tensors)
    assert not (tmp_path / "new").exists()
    before = saved(tmp_path / "old", random_model())
    with pytest.raises(ValueError, match=error):
        write_folder(Path(before), description={}, shapes=shapes, tensors=tensors)
    assert sorted(path.name for path in Path(before).iterdir()) == ["config.json", "model.safetensors"]
    assert open_weights(before).labels == LABELS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_never_written(tmp_path: Path, value: float) -> None:
    model = random_model()
    with torch.no_grad():
        model.norm.weight[3:5] = value
    with pytest.raises(InvalidDataError, match=r"norm.weight for .*w' has 2 values of 12 that are not finite"):
        saved(tmp_path / "w", model)
    assert not (tmp_path / "w").exists()


def test_a_description_without_numbers_is_never_written(tmp_path: Path) -> None:
    """NaN is no JSON; whoever writes one has a bug."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_folder(tmp_path, description={"x": float("nan")}, shapes={}, tensors=[])


def test_a_description_that_could_not_be_read_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json for .* bytes; allowed: 67,108,864"):
        write_folder(tmp_path, description={"labels": "x" * (64 << 20)}, shapes={}, tensors=[])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_in_the_place_of_a_file_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{name} in .* is a folder, not a file; move it away"):
        saved(tmp_path, random_model())
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"cannot be written to; give another one"):
        saved(tmp_path, random_model())
