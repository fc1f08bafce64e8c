"""Weights folders: written whole or not at all, bit-exact round trips, their use, and messages for unusable folders."""

import json
import os
import weakref
from collections.abc import Callable, Iterator
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


@pytest.mark.parametrize("name", ["", "weights"])
def test_a_run_that_is_not_finished_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"the run in '.*/run' is not finished, and weights are written at its end"):
        open_weights(str(tmp_path / "run" / name))


def test_a_folder_of_another_library_is_to_be_imported_first(tmp_path: Path) -> None:
    saved(tmp_path, random_model())
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match=r"in the format of timm or Hugging Face; make a weights folder .* import"):
        open_weights(str(tmp_path))


def test_weights_of_a_bf16_model_are_written_as_fp32(tmp_path: Path) -> None:
    model = random_model().to(torch.bfloat16)
    weights = open_weights(saved(tmp_path, model))
    assert weights.tensor("norm.weight").dtype == torch.float32
    assert torch.equal(weights.tensor("norm.weight"), model.norm.weight.float())


def test_saving_again_replaces_both_files(tmp_path: Path) -> None:
    saved(tmp_path, random_model())
    other = random_model(num_classes=7)
    weights = open_weights(saved(tmp_path, other, labels=tuple("abcdefg")))
    assert weights.config.num_classes == 7
    assert len(weights.labels) == 7
    assert torch.equal(weights.tensor("head.weight"), other.head.weight)


def rewrite(folder: Path, **entries: object) -> None:
    """Changes entries of config.json; None removes an entry."""
    description = json.loads((folder / "config.json").read_text()) | entries
    kept = {key: value for key, value in description.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def cut(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            lambda f: (f / "config.json").unlink(),
            "no weights at .*: it has no config.json .*RUN/weights",
            id="no config.json",
        ),
        pytest.param(lambda f: (f / "model.safetensors").unlink(), "no weights at", id="no tensors"),
        pytest.param(lambda f: (f / "config.json").write_text('{"model": {'), "cannot be read", id="broken JSON"),
        pytest.param(lambda f: (f / "config.json").write_text("[1, 2]"), "cannot be read", id="a JSON list"),
        pytest.param(lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "cannot be read", id="not UTF-8"),
        pytest.param(lambda f: rewrite(f, model=None), "cannot be read .'model'", id="no model in it"),
        pytest.param(lambda f: rewrite(f, model=TINY | {"colour": 3}), "'colour'", id="a field of another version"),
        pytest.param(lambda f: rewrite(f, model=TINY | {"image_size": "16"}), "cannot be read", id="text for a number"),
        pytest.param(lambda f: rewrite(f, labels=3), "cannot be read", id="labels are a number"),
        pytest.param(lambda f: rewrite(f, labels=["a"]), "it has 1 labels, 1 different ones, for 3", id="too few"),
        pytest.param(lambda f: rewrite(f, labels=["a", "b", "a"]), "3 labels, 2 different ones", id="a name twice"),
        pytest.param(
            lambda f: rewrite(f, usage={"loss": "x", "transform": {}}), "usage.loss is 'x'", id="another loss"
        ),
        pytest.param(lambda f: rewrite(f, usage=[]), "cannot be read", id="usage is a list"),
        pytest.param(lambda f: rewrite(f, format=2), "its format is 2, allowed: 1", id="another format"),
        pytest.param(
            lambda f: rewrite(f, model=TINY | {"depth": 10**9}), "model.depth is 1000000000; .* to 1,000", id="deep"
        ),
        pytest.param(
            lambda f: rewrite(f, model=TINY | {"depth": 900}),
            "config.json says 900 layers, model.safetensors has 32 tensors",
            id="more layers than tensors",
        ),
        pytest.param(lambda f: rewrite(f, model=TINY | {"depth": 2.0}), "model.depth is 2.0; allowed", id="a float"),
        pytest.param(lambda f: rewrite(f, model=TINY | {"depth": True}), "model.depth is True; allowed", id="a bool"),
        pytest.param(lambda f: rewrite(f, model=TINY | {"width": -12}), "model.width is -12; allowed", id="negative"),
        pytest.param(lambda f: rewrite(f, model=[]), r"model is \[\]; allowed: an object", id="a list as the model"),
        pytest.param(lambda f: rewrite(f, labels=["a", "b", 3]), "labels is .*; allowed: a list of texts", id="number"),
        pytest.param(lambda f: rewrite(f, labels=["a", "b", ["c"]]), "allowed: a list of texts", id="a list in it"),
        pytest.param(lambda f: (f / "config.json").write_text("[" * 200_000), "more than 64 deep", id="nested"),
        pytest.param(lambda f: (f / "config.json").write_text('{"a": 1, "a": 2}'), "'a' is named twice", id="twice"),
        pytest.param(lambda f: (f / "config.json").write_text('{"a": NaN}'), "NaN is not a JSON number", id="NaN"),
        pytest.param(lambda f: os.truncate(f / "config.json", 1 << 40), "larger than 67,108,864 bytes", id="large"),
        pytest.param(lambda f: os.truncate(f / "model.safetensors", 1 << 40), "the file at 1,099,511", id="zeros"),
        pytest.param(lambda f: cut(f, 500), "cannot be read", id="tensors cut off in their header"),
        pytest.param(lambda f: cut(f, -100), "cannot be read", id="tensors cut off in their data"),
        pytest.param(lambda f: cut(f, 0), "cannot be read", id="an empty file"),
        pytest.param(
            lambda f: rewrite(f, model=TINY | {"width": 14}),
            r"embed.class_token is \[1, 1, 12\], the model needs \[1, 1, 14\]",
            id="two files that do not belong together",
        ),
    ],
)
def test_folders_that_can_not_be_used(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "weights"
    saved(folder, random_model())
    spoil(folder)
    with pytest.raises(UserError, match=message):
        open_weights(str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"no weights at .*: it has no config\.json with model\.safetensors; give .* a timm or "),
        ("nowhere", r"no weights at .*: there is no such file or folder; give .* a timm or Hugging Face folder"),
        ("file", r"holds config\.json and model\.safetensors; make one of it"),
    ],
)
def test_no_folder_at_all(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=message):
        open_weights(str(tmp_path / name))


def test_tensors_know_their_config(tmp_path: Path) -> None:
    """Files of two exports with the same shapes are not accepted as one folder; folders older than the hash are."""
    one, other = Path(saved(tmp_path / "one", random_model())), Path(saved(tmp_path / "o", random_model(gelu="exact")))
    (one / "config.json").write_bytes((other / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"config\.json at .* is not the one that model\.safetensors was written with"):
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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "dangling"])
def test_what_is_no_file_is_no_weights(tmp_path: Path, name: str, kind: str) -> None:
    path = Path(saved(tmp_path / "w", random_model())) / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "dangling": "gone"}[kind])
    with pytest.raises(UserError, match="no weights at"):
        open_weights(str(tmp_path / "w"))


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "loop"])
def test_names_that_the_system_refuses(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="no weights at"):
        open_weights(str(tmp_path / name))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_when_they_are_read(tmp_path: Path, bad: float) -> None:
    folder = Path(saved(tmp_path / "w", random_model()))
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][5] = bad
    save_file(tensors, folder / "model.safetensors")
    weights = open_weights(str(folder))
    with pytest.raises(InvalidDataError, match=r"norm.weight in the weights at .*w' has 1 values of 12 that are not"):
        filled_model(weights)


def test_half_precision_is_read_and_what_float32_cannot_hold_is_not(tmp_path: Path) -> None:
    folder = Path(saved(tmp_path / "w", random_model()))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value.half() for name, value in tensors.items()}, folder / "model.safetensors")
    assert filled_model(open_weights(str(folder))).norm.weight.dtype == torch.float32
    save_file({name: value.double() * 1e39 for name, value in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(InvalidDataError, match=r"not finite \(NaN or infinite, as float32\)"):
        filled_model(open_weights(str(folder)))


def test_whole_numbers_are_refused(tmp_path: Path) -> None:
    folder = Path(saved(tmp_path / "w", random_model()))
    tensors = {name: (value * 100).to(torch.int8) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"in the weights at .*w' is of type torch.int8; allowed: floating-point"):
        filled_model(open_weights(str(folder)))


def test_what_is_written_is_what_is_read() -> None:
    usage = Usage(loss="sigmoid", transform=EvaluationTransform(mode="central_crop", short_side=604))
    assert usage_of({"usage": asdict(usage)}) == usage


def test_folders_from_before_usage_are_softmax_and_a_plain_resize() -> None:
    assert usage_of({"format": 1}) == Usage(loss="softmax", transform=EvaluationTransform(mode="resize"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        pytest.param({"loss": "hinge", "transform": {}}, "usage.loss is 'hinge'", id="loss"),
        pytest.param({"transform": {"mode": "tiles"}}, "usage.transform.mode is 'tiles'", id="mode"),
        pytest.param({"transform": {"short_side": "604"}}, "usage.transform.short_side is '604'", id="text"),
        pytest.param({"transform": {}, "colour": 3}, "colour", id="a field of another version"),
    ],
)
def test_a_use_that_makes_no_sense_is_refused(said: dict[str, object], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        usage_of({"usage": said})


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
