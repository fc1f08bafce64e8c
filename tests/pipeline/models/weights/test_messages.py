"""What weights folders and safetensors files say when they are refused, each message once."""

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pipeline.models import build_model
from pipeline.models.weights.fit import fit_weights
from pipeline.models.weights.folder import filled_model, open_weights, write_folder
from pipeline.models.weights.safetensors import (
    MOST_HEADER_BYTES,
    MOST_TENSORS,
    header_length,
    open_safetensors,
    refuse_absurd_tensors,
    refuse_not_finite,
)
from pipeline.models.weights.usage import texts_of, usage_of
from tests.pipeline.models.weights.test_fit import FAMILIES, HYBRID
from tests.pipeline.models.weights.test_folder import LABELS, TINY, config_of, initial_of, random_model, saved
from tests.pipeline.models.weights.test_safetensors import Spoil, rewritten
from tests.rigs.messages import Row, row, table


def rewrite(folder: Path, **entries: object) -> None:
    """Changes entries of config.json; None removes an entry."""
    description = json.loads((folder / "config.json").read_text()) | entries
    kept = {key: value for key, value in description.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def change(name: str, **entries: Any) -> Spoil:
    return lambda header: header[name].update(entries)


def cut(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])


def fitted(folder: Path, source: dict[str, Any], target: dict[str, Any]) -> None:
    weights, config = open_weights(saved(folder, random_model(**source))), config_of(**target)
    fit_weights(weights, config, initial=initial_of(config), new_head=True)


def fitted_to_another_family(folder: Path, was: str, now: str) -> None:
    weights, target = open_weights(saved(folder, build_model(FAMILIES[was]))), FAMILIES[now]
    fit_weights(weights, target, initial=initial_of(target), new_head=True)


def relative_positions_of_another_grid(folder: Path) -> None:
    weights = open_weights(saved(folder, random_model(position="relative")))
    config = config_of(position="relative", image_size=24)
    fit_weights(weights, config, initial=initial_of(config), new_head=True)


def relative_positions_of_resized_patches(folder: Path) -> None:
    weights = open_weights(saved(folder, random_model(position="relative")))
    config = config_of(position="relative", patch=8, image_size=24)
    fit_weights(weights, config, initial=initial_of(config), new_head=True, resize_patches=True)


def positions_at_the_layers(folder: Path) -> None:
    weights = open_weights(saved(folder, random_model(position_at="layers")))
    fit_weights(weights, config_of(), initial=initial_of(config_of()), new_head=True)


def positions(folder: Path, source: Any, target: Any) -> None:
    weights, config = open_weights(saved(folder, random_model(position=source))), config_of(position=target)
    fit_weights(weights, config, initial=initial_of(config), new_head=True)


def other_patches(folder: Path, patch: int) -> None:
    model, target = random_model(), config_of(patch=patch)
    weights, _state = open_weights(saved(folder, model)), model.state_dict()
    fit_weights(weights, target, initial=initial_of(target), new_head=True)


def patches_of_a_hybrid(folder: Path) -> None:
    source, target = config_of(**HYBRID), config_of(**HYBRID | {"patch": 2, "image_size": 32})
    weights = open_weights(saved(folder, build_model(source)))
    fit_weights(weights, target, initial=initial_of(target), new_head=True, resize_patches=True)


def run_not_finished(folder: Path, name: str) -> None:
    (folder / "run" / "checkpoints").mkdir(parents=True)
    open_weights(str(folder / "run" / name))


def folder_of_another_library(folder: Path) -> None:
    saved(folder, random_model())
    (folder / "config.json").write_text('{"model_type": "vit"}')
    open_weights(str(folder))


def spoilt(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    folder = tmp_path / "weights"
    saved(folder, random_model())
    spoil(folder)
    open_weights(str(folder))


def opened(folder: Path, name: str) -> None:
    (folder / "file").write_text("not a folder")
    open_weights(str(folder / name))


def config_of_another_export(folder: Path) -> None:
    one, other = Path(saved(folder / "one", random_model())), Path(saved(folder / "o", random_model(gelu="exact")))
    (one / "config.json").write_bytes((other / "config.json").read_bytes())
    open_weights(str(one))


def no_file(folder: Path, name: str, kind: str) -> None:
    path = Path(saved(folder / "w", random_model())) / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "dangling": "gone"}[kind])
    open_weights(str(folder / "w"))


def name_of_a_folder(folder: Path, name: str) -> None:
    (folder / "loop").symlink_to("loop")
    open_weights(str(folder / name))


def reading_a_value(tmp_path: Path, bad: float) -> None:
    folder = Path(saved(tmp_path / "w", random_model()))
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][5] = bad
    save_file(tensors, folder / "model.safetensors")
    weights = open_weights(str(folder))
    filled_model(weights)


def beyond_float32(tmp_path: Path) -> None:
    folder = Path(saved(tmp_path / "w", random_model()))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value.half() for name, value in tensors.items()}, folder / "model.safetensors")
    save_file({name: value.double() * 1e39 for name, value in tensors.items()}, folder / "model.safetensors")
    filled_model(open_weights(str(folder)))


def weights_of_whole_numbers(tmp_path: Path) -> None:
    folder = Path(saved(tmp_path / "w", random_model()))
    tensors = {name: (value * 100).to(torch.int8) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    filled_model(open_weights(str(folder)))


def usage(_: Path, said: dict[str, object]) -> None:
    usage_of({"usage": said})


def folder_below_a_file(folder: Path) -> None:
    (folder / "file").write_text("")
    saved(folder / "file" / "w", random_model())


def written(folder: Path, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """A folder that cannot be written whole is absent, or the one before it stays."""
    shapes: dict[str, tuple[int, ...]] = {"a": (2, 3), "b": (1,)}
    with suppress(ValueError):
        write_folder(folder / "new", description={}, shapes=shapes, tensors=tensors)
    assert not (folder / "new").exists()
    before = Path(saved(folder / "old", random_model()))
    try:
        write_folder(before, description={}, shapes=shapes, tensors=tensors)
    finally:
        assert sorted(path.name for path in before.iterdir()) == ["config.json", "model.safetensors"]
        assert open_weights(str(before)).labels == LABELS


def writing_a_value(folder: Path, value: float) -> None:
    model = random_model()
    with torch.no_grad():
        model.get_parameter("norm.weight")[3:5] = value
    saved(folder / "w", model)


def writing_nan_as_json(folder: Path) -> None:
    write_folder(folder, description={"x": float("nan")}, shapes={}, tensors=[])


def description_too_large(folder: Path) -> None:
    write_folder(folder, description={"labels": "x" * (64 << 20)}, shapes={}, tensors=[])


def folder_in_the_place_of(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    saved(folder, random_model())


def header(folder: Path, spoil: Spoil) -> None:
    path = rewritten(folder / "w.safetensors", spoil)
    open_safetensors(path)


def more_bytes(folder: Path) -> None:
    open_safetensors(rewritten(folder / "w", lambda _: None, behind=b"more"))


def header_of(_: Path, declared: int) -> None:
    header_length(struct.pack("<Q", declared), num_bytes=100)


def header_of_a_large_file(_: Path) -> None:
    header_length(struct.pack("<Q", MOST_HEADER_BYTES + 1), num_bytes=1 << 40)


def cut_off_after_it_was_opened(folder: Path) -> None:
    save_file({"a": torch.ones(100_000)}, folder / "w")
    file = open_safetensors(folder / "w")
    os.truncate(folder / "w", 4096)
    file.read("a")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "w")
    open_safetensors(folder / "w")


def one_value(_: Path, bad: float, at: int) -> None:
    value = torch.randn(10, 100)
    value.flatten()[at] = bad
    refuse_not_finite(value, "w")


def tensors_without_end(_: Path) -> None:
    refuse_absurd_tensors("w", dict.fromkeys(map(str, range(MOST_TENSORS + 1)), (1,)))


def name_of_a_class(_: Path, name: object) -> None:
    texts_of(["cat", name], where="w")


@table(
    # fit
    row("heads", fitted, {}, {"num_heads": 3}).says(
        "the weights at 'DIR' were made with model.num_heads 2 (the model here has 3); give --model.num-heads 2, "
        "or other weights"
    ),
    row("GELU", fitted, {"gelu": "exact"}, {}).says(
        "the weights at 'DIR' were made with model.gelu exact (the model here has tanh); give --model.gelu exact, "
        "or other weights"
    ),
    row(
        "rotary",
        fitted,
        {"position": "rope2d", "num_heads": 3},
        {"position": "none", "num_heads": 3},
    ).says(
        "the weights at 'DIR' were made with model.position rope2d (the model here has none); give "
        "--model.position rope2d, or other weights"
    ),
    row("sines, no positions", fitted, {"position": "sincos2d"}, {"position": "none"}).says(
        "the weights at 'DIR' were made with model.position sincos2d (the model here has none); give "
        "--model.position sincos2d, or other weights"
    ),
    row("positions at each layer", fitted, {"position_at": "layers_shared"}, {}).says(
        "the weights at 'DIR' were made with model.position_at layers_shared (the model here has input); give "
        "--model.position-at layers_shared, or other weights"
    ),
    row("as Hugging Face has it", fitted, {"layer_norm_epsilon": 1e-12, "gelu": "exact"}, {}).says(
        "the weights at 'DIR' were made with model.gelu exact (the model here has tanh), model.layer_norm_epsilon "
        "1e-12 (the model here has 1e-06); give --model.gelu exact --model.layer-norm-epsilon 1e-12, or other "
        "weights"
    ),
    row("ResNet", fitted, HYBRID | {"resnet_epsilons": "timm"}, HYBRID).says(
        "the weights at 'DIR' were made with model.resnet_epsilons timm (the model here has paper); give "
        "--model.resnet-epsilons timm, or other weights"
    ),
    row(
        "axial attention",
        fitted,
        {"pooling": "average", "attention": "axial", "depth": 1},
        {"pooling": "average", "depth": 2},
    ).says(
        "the weights at 'DIR' were made with model.attention axial (the model here has global); give "
        "--model.attention axial, or other weights"
    ),
    row("a distillation token that the model lacks", fitted, {"distillation_token": True}, {}).says(
        "the weights at 'DIR' do not fit the model: …embed.distillation_token [1, 1, 12] is not in the model. Give "
        "--model.distillation-token, or other weights"
    ),
    row("a distillation token that the weights lack", fitted, {}, {"distillation_token": True}).says(
        "the weights at 'DIR' do not fit the model: …embed.distillation_token …is not there…Give "
        "--model.no-distillation-token, or other weights"
    ),
    row("relative positions of another grid", relative_positions_of_another_grid).says(
        "the weights at 'DIR' have positions relative in a sequence of 4 x 4 patches, which mean nothing on 6 x "
        "6; give --model.image-size 16, or weights with learned positions"
    ),
    row(
        "relative positions of resized patches",
        relative_positions_of_resized_patches,
    ).says(
        "the weights at 'DIR' have positions relative in a sequence of 4 x 4 patches, which mean nothing on 3 x "
        "3; give --model.image-size 32, or weights with learned positions"
    ),
    row("positions at the layers", positions_at_the_layers).says(
        "the weights at 'DIR' do not fit the model: blocks.1.positions.position [1, 17, 12] is not in the model. "
        "Give --model.position-at layers, or other weights"
    ),
    row("positions of another kind: learned_1d none", positions, "learned_1d", "none").says(
        "the weights at 'DIR' do not fit the model: embed.position [1, 17, 12] is not in the model. Give "
        "--model.position learned_1d, or other weights"
    ),
    row("positions of another kind: none learned_1d", positions, "none", "learned_1d").says(
        "the weights at 'DIR' do not fit the model: embed.position [1, 17, 12] is not there. Give "
        "--model.position none, or other weights"
    ),
    row("positions of another kind: learned_2d learned_1d", positions, "learned_2d", "learned_1d").says(
        "the weights at 'DIR' do not fit the model: embed.position [1, 17, 12] is not there; embed.position_x [4, "
        "6] is not in the model; embed.position_y [4, 6] is not in the model. Give --model.position learned_2d, "
        "or other weights"
    ),
    *(
        row(
            f"another patch size, {patch}",
            other_patches,
            patch,
        ).says(
            "the weights at 'DIR' do not fit the model: embed.patch.weight is [12, 48], the model needs [12, 1…2]. "
            "Give --model.patch 4, or --initial.patch resize, or other weights"
        )
        for patch in (2, 8)
    ),
    row("patches of a hybrid, which are never resized", patches_of_a_hybrid).says(
        "the weights at 'DIR' do not fit the model: embed.patch.weight is [12, 512], the model needs [12, 2048]. "
        "Give --model.patch 1, or other weights"
    ),
    row(
        "advice is the flags that help: pooling: average ",
        fitted,
        {"pooling": "average"},
        {},
    ).says(
        "the weights at 'DIR' do not fit the model: embed.class_token [1, 1, 12] is not there. Give "
        "--model.pooling average, or other weights"
    ),
    row(
        "advice is the flags that help:  pooling: average",
        fitted,
        {},
        {"pooling": "average"},
    ).says(
        "the weights at 'DIR' do not fit the model: embed.class_token [1, 1, 12] is not in the model. Give "
        "--model.pooling token, or other weights"
    ),
    row("advice is the flags that help: qk_norm: True ", fitted, {"qk_norm": True}, {}).says(
        "the weights at 'DIR' do not fit the model: blocks.0.attention.q_norm.weight [6] is not in the model; "
        "blocks.0.attention.q_norm.bias [6] is not in the model; blocks.0.attention.k_norm.weight [6] is not in "
        "the model; blocks.0.attent… [6] is not in the model; blocks.1.attention.k_norm.bias [6] is not in the "
        "model. Give --model.qk-norm, or other weights"
    ),
    row("advice is the flags that help:  qk_norm: True", fitted, {}, {"qk_norm": True}).says(
        "the weights at 'DIR' do not fit the model: blocks.0.attention.q_norm.weight [6] is not there; "
        "blocks.0.attention.q_norm.bias [6] is not there; blocks.0.attention.k_norm.weight [6] is not there; "
        "blocks.0.attention.k_norm.bias [6] i…norm.weight [6] is not there; blocks.1.attention.k_norm.bias [6] is "
        "not there. Give --model.no-qk-norm, or other weights"
    ),
    row("advice is the flags that help: registers: 2 ", fitted, {"registers": 2}, {}).says(
        "the weights at 'DIR' do not fit the model: embed.registers [1, 2, 12] is not in the model. Give "
        "--model.registers 2, or other weights"
    ),
    row(
        "advice is the flags that help: layer_scale: 0.0001 ",
        fitted,
        {"layer_scale": 1e-4},
        {},
    ).says(
        "the weights at 'DIR' do not fit the model: blocks.0.scale1.gamma [12] is not in the model; "
        "blocks.0.scale2.gamma [12] is not in the model; blocks.1.scale1.gamma [12] is not in the model; "
        "blocks.1.scale2.gamma [12] is not in the model. Give --model.layer-scale 0.0001, or other weights"
    ),
    row(
        "advice is the flags that help:  layer_scale: 0.0001",
        fitted,
        {},
        {"layer_scale": 1e-4},
    ).says(
        "the weights at 'DIR' do not fit the model: blocks.0.scale1.gamma [12] is not there; "
        "blocks.0.scale2.gamma [12] is not there; blocks.1.scale1.gamma [12] is not there; blocks.1.scale2.gamma "
        "[12] is not there. Give --model.layer-scale 0.0, or other weights"
    ),
    row(
        "advice is the flags that help: position: learned_2d pooling: average",
        fitted,
        {"position": "learned_2d"},
        {"pooling": "average"},
    ).says(
        "the weights at 'DIR' do not fit the model: embed.position [1, 16, 12] is not there; embed.class_token "
        "[1, 1, 12] is not in the model; embed.position_x [4, 6] is not in the model; embed.position_y [4, 6] is "
        "not in the model. Give --model.pooling token --model.position learned_2d, or other weights"
    ),
    row(
        "advice is the flags that help: position: relative width: 16, depth: 1",
        fitted,
        {"position": "relative"},
        {"width": 16, "depth": 1},
    ).says(
        "the weights at 'DIR' do not fit the model: embed.class_token is [1, 1, 12], the model needs [1, 1, 16]; "
        "embed.patch.weight is [12, 48], the model needs [16, 48]; embed.patch.bias is [12], the model needs "
        "[16]; blocks.0.norm1.weigh…the model needs [16, 16]; and 23 more. Give --model.position relative "
        "--model.depth 2 --model.width 12, or other weights"
    ),
    *(
        row(f"{was}'s weights for {now}", fitted_to_another_family, was, now).says(
            f"the weights at 'DIR' are of {was} ('{FAMILIES[was].name}'), the model is {now} ('{FAMILIES[now].name}'); "
            f"give --model.name …, or weights of {now}"
        )
        for was, now in permutations(FAMILIES, 2)
    ),
    # folder
    *(
        row(f"a run that is not finished, {name}", run_not_finished, name).says(
            "no weights at 'DIR/run…': the run in 'DIR/run' is not finished, and weights are written at its end; run "
            "its command again to continue it, or take those of a checkpoint with patchline weights"
        )
        for name in ("", "weights")
    ),
    row("a folder of another library", folder_of_another_library).says(
        "the weights at 'DIR' are in the format of timm or Hugging Face; make a weights folder of them with "
        "patchline import"
    ),
    row("no config.json", spoilt, lambda f: (f / "config.json").unlink()).says(
        "no weights at 'DIR/weights': it has no config.json with model.safetensors; give a finished run (RUN or "
        "RUN/weights), or weights that patchline import reads: a timm or Hugging Face folder, or a .npz, "
        ".safetensors or .pth file"
    ),
    row("no tensors", spoilt, lambda f: (f / "model.safetensors").unlink()).says(
        "no weights at 'DIR/weights': it has no config.json with model.safetensors; give a finished run (RUN or "
        "RUN/weights), or weights that patchline import reads: a timm or Hugging Face folder, or a .npz, "
        ".safetensors or .pth file"
    ),
    row("broken JSON", spoilt, lambda f: (f / "config.json").write_text('{"model": {')).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (Expecting property name enclosed in "
        "double quotes: line 1 column 12 (char 11)); export them again"
    ),
    row("a JSON list", spoilt, lambda f: (f / "config.json").write_text("[1, 2]")).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (config.json is [1, 2]; allowed: an "
        "object); export them again"
    ),
    row("not UTF-8", spoilt, lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00")).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read ('utf-8' codec can't decode byte 0xff in "
        "position 0: invalid start byte); export them again"
    ),
    row("no model in it", spoilt, lambda f: rewrite(f, model=None)).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read ('model' is missing in config.json); "
        "export them again"
    ),
    row("a field of another version", spoilt, lambda f: rewrite(f, model=TINY | {"colour": 3})).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (model.'colour' is not a field; allowed: "
        "name, image_size, num_classes, patch, depth, width, mlp_width, num_heads, resnet_units, resnet_factor, "
        "pooling, representation,…first_norm, last_norm, rotary_temperature, rotary_places, rotary_grid); export them "
        "again"
    ),
    row("text for a number", spoilt, lambda f: rewrite(f, model=TINY | {"image_size": "16"})).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (model.image_size is '16'; allowed: a "
        "whole number); export them again"
    ),
    row("labels are a number", spoilt, lambda f: rewrite(f, labels=3)).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (labels is 3; allowed: a list of texts); "
        "export them again"
    ),
    row("too few", spoilt, lambda f: rewrite(f, labels=["a"])).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (it has 1 labels, 1 different ones, for 3 "
        "classes); export them again"
    ),
    row("a name twice", spoilt, lambda f: rewrite(f, labels=["a", "b", "a"])).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (it has 3 labels, 2 different ones, for 3 "
        "classes); export them again"
    ),
    row("another loss", spoilt, lambda f: rewrite(f, usage={"loss": "x", "transform": {}})).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (usage.loss is 'x'; allowed: softmax, "
        "sigmoid); export them again"
    ),
    row("usage is a list", spoilt, lambda f: rewrite(f, usage=[])).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (usage is []; allowed: an object); export "
        "them again"
    ),
    row("another format", spoilt, lambda f: rewrite(f, format=2)).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (its format is 2, allowed: 1: it is of "
        "another version); export them again"
    ),
    row("deep", spoilt, lambda f: rewrite(f, model=TINY | {"depth": 10**9})).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (model.depth is 1000000000; allowed: 1 to "
        "1,000, or none); export them again"
    ),
    row("more layers than tensors", spoilt, lambda f: rewrite(f, model=TINY | {"depth": 900})).says(
        "InvalidDataError: the weights at 'DIR/weights' do not fit together: config.json says 900 layers, "
        "model.safetensors has 32 tensors; export them again"
    ),
    row("a float", spoilt, lambda f: rewrite(f, model=TINY | {"depth": 2.0})).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (model.depth is 2.0; allowed: a whole "
        "number, or none); export them again"
    ),
    row("a bool", spoilt, lambda f: rewrite(f, model=TINY | {"depth": True})).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (model.depth is True; allowed: a whole "
        "number, or none); export them again"
    ),
    row("negative", spoilt, lambda f: rewrite(f, model=TINY | {"width": -12})).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (model.width is -12; allowed: 1 to 65,536, "
        "or none); export them again"
    ),
    row("a list as the model", spoilt, lambda f: rewrite(f, model=[])).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (model is []; allowed: an object); export "
        "them again"
    ),
    row("number", spoilt, lambda f: rewrite(f, labels=["a", "b", 3])).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (labels is ['a', 'b', 3]; allowed: a list "
        "of texts); export them again"
    ),
    row("a list in it", spoilt, lambda f: rewrite(f, labels=["a", "b", ["c"]])).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (labels is ['a', 'b', ['c']]; allowed: a "
        "list of texts); export them again"
    ),
    row("nested", spoilt, lambda f: (f / "config.json").write_text("[" * 200_000)).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (lists and objects are nested more than 64 "
        "deep); export them again"
    ),
    row("twice", spoilt, lambda f: (f / "config.json").write_text('{"a": 1, "a": 2}')).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read ('a' is named twice); export them again"
    ),
    row("NaN", spoilt, lambda f: (f / "config.json").write_text('{"a": NaN}')).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (NaN is not a JSON number); export them again"
    ),
    row("large", spoilt, lambda f: os.truncate(f / "config.json", 1 << 40)).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (DIR/weights/config.json is larger than "
        "67,108,864 bytes, the most that are read of such a file); export them again"
    ),
    row("zeros", spoilt, lambda f: os.truncate(f / "model.safetensors", 1 << 40)).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (its tensors end at byte 15,972, the file "
        "at 1,099,511,627,776); export them again"
    ),
    row("tensors cut off in their header", spoilt, lambda f: cut(f, 500)).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (its header declares 3,024 bytes; allowed "
        "in a file of 500: 1 to 492); export them again"
    ),
    row("tensors cut off in their data", spoilt, lambda f: cut(f, -100)).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (its tensors end at byte 15,972, the file "
        "at 15,872); export them again"
    ),
    row("an empty file", spoilt, lambda f: cut(f, 0)).says(
        "InvalidDataError: the weights at 'DIR/weights' cannot be read (its header declares 0 bytes; allowed in a "
        "file of 0: 1 to -8); export them again"
    ),
    row(
        "two files that do not belong together",
        spoilt,
        lambda f: rewrite(f, model=TINY | {"width": 14}),
    ).says(
        "the weights at 'DIR/weights' do not fit the model: embed.class_token is [1, 1, 12], the model needs [1, "
        "1, 14]; embed.position is [1, 17, 12], the model needs [1, 17, 14]; embed.patch.weight is [12, 48], the "
        "model needs [14, 48]; …el needs [42]; and 21 more. Give the model the sizes of the weights "
        "(--model.name, --model.width, ...), or other weights"
    ),
    row("no folder at all: ", opened, "").says(
        "no weights at 'DIR': it has no config.json with model.safetensors; give a finished run (RUN or "
        "RUN/weights), or weights that patchline import reads: a timm or Hugging Face folder, or a .npz, "
        ".safetensors or .pth file"
    ),
    row("no folder at all: nowhere", opened, "nowhere").says(
        "no weights at 'DIR/nowhere': there is no such file or folder; give a finished run (RUN or RUN/weights), "
        "or weights that patchline import reads: a timm or Hugging Face folder, or a .npz, .safetensors or .pth "
        "file"
    ),
    row("no folder at all: file", opened, "file").says(
        "no weights at 'DIR/file': it is a file, and a weights folder holds config.json and model.safetensors; "
        "make one of it with patchline import"
    ),
    row("the config.json of another export", config_of_another_export).says(
        "config.json at 'DIR/one' is not the one that model.safetensors was written with: it was changed, or the "
        "two are of different exports; export them again"
    ),
    *(
        row(f"no file, {name}, {kind}", no_file, name, kind).says(
            "no weights at 'DIR/w': it has no config.json with model.safetensors; give a finished run (RUN or "
            "RUN/weights), or weights that patchline import reads: a timm or Hugging Face folder, or a .npz, "
            ".safetensors or .pth file"
        )
        for name in ("config.json", "model.safetensors")
        for kind in ("pipe", "device", "folder", "loop", "dangling")
    ),
    row("a name with a NUL", name_of_a_folder, "a\0b").says(
        "no weights at 'DIR/a\\x00b': there is no such file or folder; give a finished run (RUN or RUN/weights), "
        "or weights that patchline import reads: a timm or Hugging Face folder, or a .npz, .safetensors or .pth "
        "file"
    ),
    row("a name that is too long", name_of_a_folder, "x" * 5000).says(
        "no weights at 'DIR/xxxxxxxxxx…': File name too long; give a folder that this user may read"
    ),
    row("a link to itself", name_of_a_folder, "loop").says(
        "no weights at 'DIR/loop': there is no such file or folder; give a finished run (RUN or RUN/weights), or "
        "weights that patchline import reads: a timm or Hugging Face folder, or a .npz, .safetensors or .pth file"
    ),
    *(
        row(
            f"reading a value, {bad}",
            reading_a_value,
            bad,
        ).says(
            "InvalidDataError: norm.weight in the weights at 'DIR/w' has 1 values of 12 that are not finite (NaN or "
            "infinite, as float32); the file is damaged or its training failed: give other weights"
        )
        for bad in (float("nan"), float("inf"))
    ),
    row(
        "values beyond float32",
        beyond_float32,
    ).says(
        "InvalidDataError: embed.class_token in the weights at 'DIR/w' has 10 values of 12 that are not finite "
        "(NaN or infinite, as float32); the file is damaged or its training failed: give other weights"
    ),
    row("whole numbers", weights_of_whole_numbers).says(
        "embed.class_token in the weights at 'DIR/w' is of type torch.int8; allowed: floating-point numbers: "
        "whole numbers are quantised weights, whose scale is not applied here; export them again"
    ),
    row("loss", usage, {"loss": "hinge", "transform": {}}).says(
        "ValueError: usage.loss is 'hinge'; allowed: softmax, sigmoid"
    ),
    row("mode", usage, {"transform": {"mode": "tiles"}}).says(
        "ValueError: usage.transform.mode is 'tiles'; allowed: resize, central_crop, fewshot"
    ),
    row("text", usage, {"transform": {"short_side": "604"}}).says(
        "ValueError: usage.transform.short_side is '604'; allowed: a whole number"
    ),
    row("a field of another version", usage, {"transform": {}, "colour": 3}).says(
        "ValueError: usage.'colour' is not a field; allowed: loss, transform"
    ),
    row("a folder that cannot be made", folder_below_a_file).says(
        "no folder can be made at 'DIR/file/w': Not a directory; give another one, which this user may write to"
    ),
    row("one is missing", written, [("a", torch.ones(2, 3))]).says(
        "ValueError: zip() argument 2 is shorter than argument 1"
    ),
    row("another name", written, [("a", torch.ones(2, 3)), ("c", torch.ones(1))]).says(
        "ValueError: c is torch.float32 [1], not b, float32 [1]"
    ),
    row("another shape", written, [("a", torch.ones(3, 2)), ("b", torch.ones(1))]).says(
        "ValueError: a is torch.float32 [3, 2], not a, float32 [2, 3]"
    ),
    row("another type", written, [("a", torch.ones(2, 3).half()), ("b", torch.ones(1))]).says(
        "ValueError: a is torch.float16 [2, 3], not a, float32 [2, 3]"
    ),
    *(
        row(
            f"writing a value, {value}",
            writing_a_value,
            value,
        ).says(
            "InvalidDataError: norm.weight for 'DIR/w' has 2 values of 12 that are not finite (NaN or infinite, as "
            "float32); the file is damaged or its training failed: give other weights"
        )
        for value in (float("nan"), float("inf"), float("-inf"))
    ),
    row("a description with NaN", writing_nan_as_json).says(
        "ValueError: Out of range float values are not JSON compliant: nan"
    ),
    row("a description that could not be read again", description_too_large).says(
        "config.json for 'DIR' has 67,108,882 bytes; allowed: 67,108,864, the most that are read again; give "
        "fewer or shorter names of classes"
    ),
    *(
        row(
            f"a folder in the place of, {name}",
            folder_in_the_place_of,
            name,
        ).says("… in 'DIR' is a folder, not a file; move it away, or give another folder")
        for name in ("model.safetensors", "config.json")
    ),
    # safetensors
    row("no tensors, but bytes", header, lambda h: h.clear()).says(
        "ValueError: its tensors end at byte 10, the file at 50"
    ),
    row("a list", header, lambda _: "[1]").says("ValueError: its header is [1]; allowed: an object"),
    row("no JSON", header, lambda _: "{" * 200).says(
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    ),
    row("deep", header, lambda _: "[" * 200_000).says("ValueError: lists and objects are nested more than 64 deep"),
    row("a name twice", header, lambda h: json.dumps(h)[:-1] + ', "a": 1}').says("ValueError: 'a' is named twice"),
    row("metadata", header, lambda h: h.update(__metadata__={"x": 1})).says(
        "ValueError: its metadata is {'x': 1}; allowed: texts by name"
    ),
    row("no object", header, lambda h: h.update(a=3)).says(
        "ValueError: 'a' is 3; allowed: dtype, shape and data_offsets"
    ),
    row("no type", header, lambda h: h["a"].__delitem__("dtype")).says(
        "ValueError: 'a' is {'shape': [2, 3], 'data_offsets': [0, 24]}; allowed: dtype, shape and data_offsets"
    ),
    row("another type", header, change("a", dtype="F31")).says(
        "ValueError: 'a' is of the type 'F31'; allowed: F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, "
        "U8, BOOL"
    ),
    row("a type that is a list", header, change("a", dtype=["F32"])).says(
        "ValueError: 'a' is of the type ['F32']; allowed: F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, "
        "I8, U8, BOOL"
    ),
    row("another shape", header, change("a", shape=[2, 4])).says(
        "ValueError: 'a' is [2, 4] of F32, 32 bytes, at the offsets [0, 24], where 24 are"
    ),
    row("negative", header, change("a", shape=[-2, -3])).says(
        "ValueError: 'a' has the shape [-2, -3] at [0, 24]; allowed: whole numbers of 0 or more, and two offsets"
    ),
    row("a float", header, change("a", shape=[2.0, 3])).says(
        "ValueError: 'a' has the shape [2.0, 3] at [0, 24]; allowed: whole numbers of 0 or more, and two offsets"
    ),
    row("a bool", header, change("a", shape=[True, 6])).says(
        "ValueError: 'a' has the shape [True, 6] at [0, 24]; allowed: whole numbers of 0 or more, and two offsets"
    ),
    row("more than can be counted", header, change("a", shape=[10**30, 1])).says(
        "ValueError: 'a' has the shape [1000000000000000000000000000000, 1] at [0, 24]; allowed: whole numbers of "
        "0 or more, and two offsets"
    ),
    row("a product without end", header, change("a", shape=[2**62, 2**62])).says(
        "ValueError: 'a' is [4611686018427387904, 4611686018427387904] of F32, "
        "85070591730234615865843651857942052864 bytes, at the offsets [0, 24], where 24 are"
    ),
    row("62 dimensions", header, change("a", shape=[1] * 60 + [2, 3])).says(
        "ValueError: 'a' has the shape [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, "
        "1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, "
        "1, 2, 3] at [0, 24]; allowed: whole numbers of 0 or more, and two offsets"
    ),
    row("nothing, declared large", header, change("c", shape=[0, 2**40])).says(
        "InvalidDataError: c in 'DIR/w.safetensors' declares the shape [0, 1099511627776]; allowed: up to 16 "
        "dimensions of 0 to 2,147,483,648; the file is damaged, or made to do damage: fetch it again"
    ),
    row("backwards", header, change("a", data_offsets=[24, 0])).says(
        "ValueError: 'a' is [2, 3] of F32, 24 bytes, at the offsets [24, 0], where -24 are"
    ),
    row("one offset", header, change("a", data_offsets=[0])).says(
        "ValueError: 'a' has the shape [2, 3] at [0]; allowed: whole numbers of 0 or more, and two offsets"
    ),
    row("overlap", header, change("b", data_offsets=[8, 24])).says(
        "ValueError: b begins at byte 240, the tensor before it ends at 256"
    ),
    row("behind the end", header, change("b", data_offsets=[1 << 40, (1 << 40) + 16])).says(
        "ValueError: c begins at byte 295, the tensor before it ends at 279"
    ),
    row("a gap", header, lambda h: h.pop("a")).says(
        "ValueError: b begins at byte 192, the tensor before it ends at 168"
    ),
    row("control characters", header, lambda h: h.update({"x\x1b[2J": h.pop("a")})).says(
        "InvalidDataError: 'DIR/w.safetensors' has a tensor called 'x\\x1b[2J'; allowed: 1 to 1,000 printable "
        "characters; fetch it again"
    ),
    row("a long name", header, lambda h: h.update({"x" * 2000: h.pop("a")})).says(
        "InvalidDataError: 'DIR/w.safetensors' has a tensor called "
        "'xxxxxxxxxx…...; allowed: 1 to 1,000 printable characters; fetch it again"
    ),
    row("no name", header, lambda h: h.update({"": h.pop("a")})).says(
        "InvalidDataError: 'DIR/w.safetensors' has a tensor called ''; allowed: 1 to 1,000 printable characters; "
        "fetch it again"
    ),
    row("bytes behind the last tensor", more_bytes).says("ValueError: its tensors end at byte 273, the file at 277"),
    *(
        row(f"a header's length, {declared}", header_of, declared).says(
            "ValueError: its header declares … bytes; allowed in a file of 100: 1 to 92"
        )
        for declared in (0, 100, 2**63, MOST_HEADER_BYTES + 1)
    ),
    row("a header's length in a large file", header_of_a_large_file).says(
        "ValueError: its header declares 16,777,217 bytes; allowed in a file of 1,099,511,627,776: 1 to 16,777,216"
    ),
    row("a file that becomes shorter", cut_off_after_it_was_opened).says(
        "EOFError: the file ends 395,976 bytes before the end of a"
    ),
    row("a pipe", pipe).says("InvalidDataError: DIR/w is not a regular file; give a file, not a pipe or a device"),
    *(
        row(f"one value is not finite, {bad}, {at}", one_value, bad, at).says(
            "InvalidDataError: w has 1 values of 1,000 that are not finite (NaN or infinite, as float32); the file is "
            "damaged or its training failed: give other weights"
        )
        for bad in (float("nan"), float("inf"), float("-inf"))
        for at in (0, 500, 999)
    ),
    row("more tensors than any model has", tensors_without_end).says(
        "InvalidDataError: 'w' has 100,001 tensors; allowed: 100,000; fetch it again"
    ),
    # usage
    *(
        row(f"name of a class, {name}", name_of_a_class, name).says(
            "InvalidDataError: the name of class 1 in config.json beside 'w' is …; allowed: a text"
        )
        for name in (0.5, True, None, ["cat"], {"name": "cat"})
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
