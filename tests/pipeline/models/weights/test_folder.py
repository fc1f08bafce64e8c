"""Weights folders: written whole or not at all, bit-exact round trips, their use, and messages for unusable folders."""

import os
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipeline.models import Model, ModelConfig, build_model
from pipeline.models.weights.folder import filled_model, open_weights, save_weights, write_folder
from pipeline.models.weights.safetensors import TensorByName
from pipeline.models.weights.usage import Usage, usage_of
from pipeline.shared_settings import EvaluationTransform
from shards.errors import InvalidDataError, UserError

TINY: dict[str, Any] = {"name": "vit", "image_size": 16, "num_classes": 3, "patch": 4, "depth": 2, "width": 12}
TINY |= {"mlp_width": 20, "num_heads": 2}
LABELS = ("cat", "dog", "Füchsin")


def config_of(**fields: Any) -> ModelConfig:
    return ModelConfig(**(TINY | fields))


def random_model(**fields: Any) -> Model:
    model = build_model(config_of(**fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


def saved(folder: Path, model: Model, labels: tuple[str, ...] = LABELS) -> str:
    state = model.state_dict()
    save_weights(folder, config=model.config, labels=labels, tensor=lambda name: state[name])
    return str(folder)


def initial_of(target: ModelConfig) -> TensorByName:
    """The initial weights of a new model."""
    state = build_model(target, seed=9).state_dict()
    return lambda name: state[name]


@pytest.mark.parametrize("representation", [False, True])
def test_a_round_trip_changes_no_bit(tmp_path: Path, representation: bool) -> None:
    model = random_model(representation=representation)
    weights = open_weights(saved(tmp_path / "weights", model))
    assert (weights.config, weights.labels) == (model.config, LABELS)
    loaded = filled_model(weights)
    assert not loaded.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8)
    assert torch.equal(loaded(images), model(images))
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["config.json", "model.safetensors"]


def test_the_heads_constant_is_folded_into_its_bias(tmp_path: Path) -> None:
    model = random_model(head_bias=-10.0)
    weights = open_weights(saved(tmp_path, model))
    assert weights.config == config_of(head_bias=0.0)
    assert torch.equal(weights.tensor("head.bias"), model.head.bias - 10.0)
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8)
    torch.testing.assert_close(filled_model(weights)(images), model(images))


def test_a_folder_says_how_it_is_used(tmp_path: Path) -> None:
    model = random_model()
    state, transform = model.state_dict(), EvaluationTransform(mode="central_crop", short_side=20, antialias=True)
    usage = Usage(loss="sigmoid", transform=transform)
    save_weights(tmp_path, config=model.config, labels=LABELS, tensor=lambda name: state[name], usage=usage)
    assert open_weights(str(tmp_path)).usage == usage


def test_a_run_directory_stands_for_its_weights(tmp_path: Path) -> None:
    saved(tmp_path / "weights", random_model())
    assert open_weights(str(tmp_path)).labels == LABELS


def test_weights_of_a_bf16_model_are_written_as_fp32(tmp_path: Path) -> None:
    model = random_model().to(torch.bfloat16)
    weights = open_weights(saved(tmp_path, model))
    assert weights.tensor("norm.weight").dtype == torch.float32
    assert torch.equal(weights.tensor("norm.weight"), model.get_parameter("norm.weight").float())


def test_saving_again_replaces_both_files(tmp_path: Path) -> None:
    saved(tmp_path, random_model())
    other = random_model(num_classes=7)
    weights = open_weights(saved(tmp_path, other, labels=tuple("abcdefg")))
    assert weights.config.num_classes == 7
    assert len(weights.labels) == 7
    assert torch.equal(weights.tensor("head.weight"), other.head.weight)


def test_tensors_know_their_config(tmp_path: Path) -> None:
    """Files of two exports with the same shapes are not accepted as one folder; folders older than the hash are."""
    one, other = Path(saved(tmp_path / "one", random_model())), Path(saved(tmp_path / "o", random_model(gelu="exact")))
    (one / "config.json").write_bytes((other / "config.json").read_bytes())
    with pytest.raises(UserError):
        open_weights(str(one))
    save_file(load_file(one / "model.safetensors"), one / "model.safetensors", metadata={"format": "pt"})
    assert open_weights(str(one)).config.gelu == "exact"


@pytest.mark.parametrize(
    ("labels", "expected"), [(("a",), ("a", "unnamed 1", "unnamed 2")), (("a", "b", "a"), ("a", "b", "a (2)"))]
)
def test_what_is_saved_can_be_opened_whatever_the_names(
    tmp_path: Path, labels: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """A model may have more classes than its dataset has names."""
    assert open_weights(saved(tmp_path, random_model(), labels=labels)).labels == expected


def test_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    model = random_model()
    folders = [Path(saved(tmp_path / name, model)) for name in ("one", "other")]
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1
    with safe_open(folders[0] / "model.safetensors", framework="pt") as file:
        assert file.metadata().keys() == {"config_sha256", "format"}


def test_half_precision_is_read_and_what_float32_cannot_hold_is_not(tmp_path: Path) -> None:
    folder = Path(saved(tmp_path / "w", random_model()))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value.half() for name, value in tensors.items()}, folder / "model.safetensors")
    assert filled_model(open_weights(str(folder))).norm.weight.dtype == torch.float32


def test_what_is_written_is_what_is_read() -> None:
    usage = Usage(loss="sigmoid", transform=EvaluationTransform(mode="central_crop", short_side=604))
    assert usage_of({"usage": asdict(usage)}) == usage


def test_folders_from_before_usage_are_softmax_and_a_plain_resize() -> None:
    assert usage_of({"format": 1}) == Usage(loss="softmax", transform=EvaluationTransform(mode="resize"))


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_never_written(tmp_path: Path, value: float) -> None:
    model = random_model()
    with torch.no_grad():
        model.get_parameter("norm.weight")[3:5] = value
    with pytest.raises(InvalidDataError):
        saved(tmp_path / "w", model)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_in_the_place_of_a_file_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError):
        saved(tmp_path, random_model())
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"cannot be written to; give another one"):
        saved(tmp_path, random_model())
