"""Safetensors in one file and in several; an index that points outside its folder is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from pipeline.models.conversion.convert import open_any
from pipeline.models.conversion.safetensors_file import open_safetensors_file, open_sharded
from pipeline.models.conversion.sizes import Hints
from pipeline.models.weights.folder import filled_model
from shards.errors import UserError
from tests.pipeline.models.parity import difference, random_images


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
