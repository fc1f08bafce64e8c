"""Files of every format hold the same tensors; an index of safetensors that points outside its folder is refused."""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.models.conversion.convert import open_any
from pipeline.models.conversion.open_file import open_safetensors_file, open_sharded, open_tensor_file
from pipeline.models.conversion.sizes import Hints
from pipeline.models.conversion.zip_file import write_npz
from pipeline.models.weights.folder import filled_model
from shards.errors import InvalidDataError, UserError
from tests.pipeline.models.parity import difference, random_images

VALUES = {"a/b": torch.randn(2, 3), "c": torch.randn(4)}


def write_numpys(path: Path) -> None:
    arrays: dict[str, Any] = {name: value.numpy() for name, value in VALUES.items()}
    np.savez(path, **arrays)


def write_wrapped(path: Path) -> None:
    torch.save({"state_dict": VALUES, "step": 3}, path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        pytest.param("w.npz", lambda path: write_npz(path, VALUES.items()), id="npz"),
        pytest.param("n.npz", write_numpys, id="numpy's"),
        pytest.param("w.safetensors", lambda path: save_file(VALUES, path), id="safetensors"),
        pytest.param("w.pth", write_wrapped, id="torch, in a dict"),
        pytest.param("w.bin", lambda path: torch.save(VALUES, path), id="torch"),
    ],
)
def test_shapes_and_values(tmp_path: Path, name: str, write: Callable[[Path], object]) -> None:
    write(tmp_path / name)
    file = open_tensor_file(tmp_path / name)
    assert dict(file.shapes) == {"a/b": (2, 3), "c": (4,)}
    for key, value in VALUES.items():
        assert torch.equal(file.read(key), value)


def test_all_values_come_as_float32(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.float64)}, tmp_path / "w.safetensors"
    )
    file = open_tensor_file(tmp_path / "w.safetensors")
    assert {file.read(name).dtype for name in "ab"} == {torch.float32}


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write_npz(tmp_path / name, VALUES.items())
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    def broken() -> object:
        yield "a", torch.ones(3)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_npz(tmp_path / "w.npz", broken())  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=r"b for .*w.npz' has 1 values of 2 that are not finite"):
        write_npz(tmp_path / "w.npz", [("a", torch.ones(3)), ("b", torch.tensor([1.0, float("nan")]))])
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "w.npz").mkdir()
    with pytest.raises(UserError, match=r"w.npz', a folder; give the .npz file to write"):
        write_npz(tmp_path / "w.npz", VALUES.items())


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/w\.npz' cannot be written: .*give another --out"):
        write_npz(tmp_path / "file" / "w.npz", VALUES.items())


class Trap:
    """An object that shows whether it was unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (Path.touch, (str(Path("trapped")),))


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        pytest.param(
            "w.npz",
            lambda path: np.savez(path, fine=np.ones(2), trap=np.array([Trap()], dtype=object)),
            "trap in .* is a pickled object, not numbers: reading it would run code",
            id="an object in an npz",
        ),
        pytest.param(
            "w.npz", lambda path: path.write_bytes(pickle.dumps(Trap())), "is no .npz file", id="pickle as npz"
        ),
        pytest.param("w.npz", lambda path: path.write_bytes(b""), "is no .npz file, or is cut off", id="empty npz"),
        pytest.param(
            "w.pth",
            lambda path: path.write_bytes(pickle.dumps({"a": Trap()})),
            "cannot be read as tensors alone",
            id="pth",
        ),
        pytest.param("w.pt", lambda path: torch.save({"a": Trap()}, path), "cannot be read as tensors alone", id="pt"),
        pytest.param("w.pt", lambda path: torch.save([1, 2], path), "holds a list; allowed: a state dict", id="a list"),
        pytest.param(
            "w.safetensors", lambda path: path.write_bytes(b"abc"), "is no safetensors file", id="safetensors"
        ),
        pytest.param("w.onnx", lambda path: path.write_bytes(b"abc"), "allowed: files that end in .npz", id="suffix"),
        pytest.param("gone.npz", lambda _: None, "no weights at", id="nothing there"),
    ],
)
def test_files_that_can_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name)
    with pytest.raises(UserError, match=message):
        open_tensor_file(tmp_path / name)
    assert not (tmp_path / "trapped").exists()


def test_values_that_are_cut_off_are_named(tmp_path: Path) -> None:
    """The header is read first; a broken member is found when its tensor is read."""
    write_npz(tmp_path / "w.npz", [("a", torch.zeros(1000))])
    data = bytearray((tmp_path / "w.npz").read_bytes())
    data[2000] ^= 1
    (tmp_path / "w.npz").write_bytes(bytes(data))
    file = open_tensor_file(tmp_path / "w.npz")
    with pytest.raises(UserError, match=r"a in .* cannot be read .*CRC"):
        file.read("a")


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_the_prefix_of_parallel_training_is_taken_off(tmp_path: Path, suffix: str) -> None:
    values = {f"module.{name}": value for name, value in VALUES.items()}
    path = tmp_path / f"w.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(values, path)
    file = open_tensor_file(path)
    assert dict(file.shapes) == {"a/b": (2, 3), "c": (4,)}
    assert torch.equal(file.read("c"), VALUES["c"])


def sharded(folder: Path, where: Mapping[str, object] | None = None) -> Path:
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "one.safetensors")
    save_file({"c": torch.ones(4)}, folder / "two.safetensors")
    named = where or {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    return folder / "model.safetensors.index.json"


def test_the_pieces_are_one_file(tmp_path: Path) -> None:
    file = open_sharded(sharded(tmp_path))
    assert dict(file.shapes) == {"a": (2,), "b": (3,), "c": (4,)}
    assert torch.equal(file.read("c"), torch.ones(4))


def test_what_transformers_saves_in_pieces_comes_in(transformers: ModuleType, tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, image_size=16, patch_size=4
    )
    other = transformers.ViTForImageClassification(config).eval()
    torch.nn.init.normal_(other.classifier.weight)
    other.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = filled_model(open_any(str(tmp_path), Hints()))
    assert difference(ours, lambda x: other(x).logits, random_images(16, 16)) < 2e-5


@pytest.mark.parametrize(
    ("where", "message"),
    [
        pytest.param({"a": "../one.safetensors"}, r"'\.\./one\.safetensors'; allowed: names of files", id="above"),
        pytest.param({"a": "/etc/x.safetensors"}, "'/etc/x.safetensors'; allowed: names of files", id="anywhere"),
        pytest.param({"a": ".."}, "'..'; allowed: names of files", id="the folder above"),
        pytest.param({"a": 3}, "3; allowed: names of files", id="a number"),
        pytest.param({"a": "three.safetensors"}, "no weights at .*three.safetensors", id="a piece that is not there"),
        pytest.param({"z": "one.safetensors"}, "z is in no piece: .*one.safetensors' has it not", id="no such tensor"),
    ],
)
def test_an_index_that_can_not_be(tmp_path: Path, where: Mapping[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_sharded(sharded(tmp_path, where))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', "{}"])
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "i.json").write_text(content)
    with pytest.raises(UserError, match=r"i\.json' .*[Ff]etch (it|the file) again"):
        open_sharded(tmp_path / "i.json")


def test_a_file_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    save_file({"a": torch.ones(200)}, tmp_path / "w.safetensors")
    file = open_safetensors_file(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"a in .* cannot be read"):
        file.read("a")
