"""Which model a timm state dict belongs to: its config.json, timm's table of architectures, and what is assumed."""

import argparse
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from patchline import load_model
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_any import open_any
from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.sizes import weights_of
from pipeline.models.conversion.tensor_file import FlagNeededError, TensorFile
from pipeline.models.conversion.timm import model_in, open_timm, save_timm
from pipeline.models.conversion.timm_architectures import ARCHITECTURES
from pipeline.models.conversion.timm_config import EPSILON
from pipeline.models.weights.folder import Weights, filled_model
from shards.errors import UserError
from tests.pipeline.models.conversion.published import heads_of_keys
from tests.pipeline.models.conversion.random_weights import VIT, assumed_of, random_model, tensors_of
from tests.pipeline.models.parity import random_images
from tests.rigs.faults import differs, every_fault

pytestmark = pytest.mark.filterwarnings("ignore:Mapping deprecated model name")  # timm's older names are in it, too
GAP = "vit_base_patch16_gap_224"  # whose 16 heads no other model of its width has
# Hybrids, whose ResNets cannot be shrunk, are in test_timm.py.
VITS = {name: each for name, each in ARCHITECTURES.items() if not re.search("_r26|_r50|_r_s16|_resnet", name)}
LONG = pytest.mark.long
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PAPER = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
KINDS = ("siglip", "gap", "map", "reg", "rope", "deit3", "dinov2")  # those of today are in test_zoo.py
ONE_OF_EACH = {
    (each, *(kind for kind in KINDS if kind in name)): name
    for name, each in VITS.items()
    if each.epsilon == EPSILON and not name.startswith(("naflex", "eva"))
}


def shrunk(timm: ModuleType, name: str, **more: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """timm's architecture with one narrow layer on four patches, noise in every tensor, and the arguments for it."""
    width, grid = 8 * ARCHITECTURES[name].num_heads, 2
    arguments = {"embed_dim": width, "depth": 1, **heads_of_keys(name, ARCHITECTURES[name].num_heads), **more}
    arguments |= (
        {"pos_embed_grid_size": (grid, grid)} if "naflex" in name else {"img_size": grid * patch_of(timm, name)}
    )
    model = timm.create_model(name, num_classes=3, **arguments).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model, arguments


def patch_of(timm: ModuleType, name: str) -> int:
    with torch.device("meta"):
        return int(timm.create_model(name, depth=0, **heads_of_keys(name)).patch_embed.patch_size[0])


def written(folder: Path, model: torch.nn.Module, description: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(description))
    return str(folder)


def difference(weights: Weights, model: torch.nn.Module, pixels: Any = PAPER) -> float:
    """The largest difference of the logits, for images that timm's model gets in its own pixels."""
    side = weights.config.image_size
    images_BHW3 = random_images(side, side)
    mean, deviation = (torch.tensor(values) for values in pixels)
    with torch.no_grad():
        theirs_BK = model(((images_BHW3 / 255 - mean) / deviation).permute(0, 3, 1, 2))
        return float((filled_model(weights)(images_BHW3) - theirs_BK).abs().max()) / float(theirs_BK.abs().max())


@every_fault
def test_the_table_is_what_timms_models_are(timm: ModuleType) -> Iterator[str]:
    for name, known in ARCHITECTURES.items():
        with torch.device("meta"):
            model = timm.create_model(name, depth=1, **heads_of_keys(name, known.num_heads))
        block, published = model.blocks[0], model.pretrained_cfg
        yield from differs(f"{name}: width", known.width, model.embed_dim)
        yield from differs(f"{name}: heads", known.num_heads, block.attn.num_heads)
        activation = repr(block.mlp.act).lower()
        gelu = "tanh" if "tanh" in activation else "quick" if "quick" in activation else "exact"
        yield from differs(f"{name}: GELU", known.gelu, gelu)
        yield from differs(f"{name}: epsilon", known.epsilon, block.norm1.eps)
        pixels = (tuple(published["mean"]), tuple(published["std"]))
        yield from differs(f"{name}: pixels", (known.pixels.mean, known.pixels.deviation), pixels)


@LONG  # the rows themselves are compared above
@every_fault
def test_no_model_of_timm_that_can_be_read_is_left_out(timm: ModuleType) -> Iterator[str]:
    modules = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit", "naflexvit")
    for name in [each for module in modules for each in timm.list_models(module=module)]:
        with torch.device("meta"):
            model = timm.create_model(name)
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        published = {"input_size": list(model.pretrained_cfg["input_size"])}
        description = {"architecture": name, "pretrained_cfg": published}
        try:
            file = TensorFile(where="w", shapes=shapes, read=lambda _: torch.zeros(1))
            file, table, found = model_in(file, description, Hints(num_heads=1))
            weights_of(file, table, found, advice="")
        except UserError:
            continue
        if name not in ARCHITECTURES and not name.startswith("test_"):
            yield f"{name} can be read and is not in the table"


@pytest.mark.parametrize(
    "names", [pytest.param(ONE_OF_EACH.values(), id="one of each kind"), pytest.param(VITS, id="all", marks=LONG)]
)
@every_fault
def test_a_folder_that_only_names_its_architecture_has_timms_logits(
    timm: ModuleType, tmp_path: Path, names: Iterable[str]
) -> Iterator[str]:
    """Without num_heads, act_layer, mean and std."""
    for name in names:
        known = ARCHITECTURES[name]
        model, arguments = shrunk(timm, name)
        path = written(tmp_path / name, model, {"architecture": f"{name}.tag", "model_args": arguments})
        weights = open_any(path, Hints())
        yield from differs(f"{name}: heads", weights.config.size.num_heads, known.num_heads)
        yield from differs(f"{name}: assumed", assumed_of(weights), (f"pixels of {known.pixels}",))
        if (found := difference(weights, model, (known.pixels.mean, known.pixels.deviation))) > 2e-5:
            yield f"{name}: logits differ by {found:g} of the largest"


@pytest.mark.parametrize(
    ("content", "num_heads"),
    [
        pytest.param({"args": argparse.Namespace(model=GAP)}, 16, id="timm's script"),
        pytest.param({"args": {"model": GAP, "model_kwargs": {"num_heads": 8}}}, 8, id="timm's script, other heads"),
        pytest.param({"hyper_parameters": {"arch": f"{GAP}.in1k"}}, 16, id="Lightning"),
        pytest.param({"arch": GAP}, 16, id="the model alone"),
        pytest.param({"args": {"model": "vit_base_patch16_224"}}, 12, id="the usual heads"),
    ],
)
def test_a_scripts_arguments_name_the_architecture(
    timm: ModuleType, tmp_path: Path, content: dict[str, Any], num_heads: int
) -> None:
    sizes = {"depth": 1, "img_size": 32, "class_token": False, "global_pool": "avg", "fc_norm": False}
    model = timm.create_model("vit_base_patch16_224", num_classes=3, num_heads=num_heads, **sizes).eval()
    torch.save({"state_dict": model.state_dict(), **content}, tmp_path / "w.pth")
    weights = open_any(str(tmp_path / "w.pth"), Hints(grid_side=2))
    assert assumed_of(weights) == (f"pixels of {ARCHITECTURES[GAP].pixels}",), "the script says the rest"
    assert weights.config.size.num_heads == num_heads
    assert difference(weights, model) < 2e-5
    other = open_any(str(tmp_path / "w.pth"), Hints(grid_side=2, num_heads=4)) if num_heads != 8 else None
    assert other is None or other.config.size.num_heads == 4, "the user may know better than a name"


@pytest.mark.parametrize(
    ("content", "num_heads"),
    [
        pytest.param({"arch": "vit_small"}, 12, id="MoCo v3"),
        pytest.param({"args": {"arch": "vit_small", "teacher_temp": 0.04}}, 6, id="DINO"),
        pytest.param({"arch": "vit_small_patch16_224"}, 6, id="timm"),
    ],
)
def test_moco_v3s_small_model_is_not_timms(
    timm: ModuleType, tmp_path: Path, content: dict[str, Any], num_heads: int
) -> None:
    model = timm.create_model("vit_small_patch16_224", num_classes=3, num_heads=num_heads, depth=1, img_size=32).eval()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, **content}, tmp_path / "w.pth.tar")
    weights = open_any(str(tmp_path / "w.pth.tar"), Hints(pixels="imagenet"))
    assert weights.config.size.num_heads == num_heads
    assert difference(weights, model, IMAGENET) < 2e-5


@pytest.mark.parametrize("name", [f"{GAP}.safetensors", f"{GAP}.in1k_ep300.safetensors", f"{GAP}_mine.safetensors"])
def test_a_file_that_is_named_after_its_architecture(timm: ModuleType, tmp_path: Path, name: str) -> None:
    """It is taken at its word, and the heads are said to be assumed."""
    model = timm.create_model(GAP, num_classes=3, depth=1, img_size=32).eval()
    save_file(model.state_dict(), tmp_path / name)
    weights = open_any(str(tmp_path / name), Hints())
    assert "num_heads 16" in assumed_of(weights)
    assert difference(weights, model) < 2e-5
    (tmp_path / "vit_base_patch16_gap_2240.safetensors").write_bytes((tmp_path / name).read_bytes())
    other = open_any(str(tmp_path / "vit_base_patch16_gap_2240.safetensors"), Hints())
    assert "num_heads 12" in assumed_of(other), "another name says nothing"


@pytest.mark.parametrize(
    ("name", "width", "hints"),
    [
        pytest.param("aimv2_large_patch14_224", 384, Hints(num_heads=8, grid_side=2), id="AIMv2: RMSNorms"),
        pytest.param("vit_base_patch16_clip_224", 768, Hints(), id="CLIP: a norm before the layers"),
    ],
)
def test_a_bare_file_of_aimv2_or_clip_gets_their_epsilon_and_pixels(
    timm: ModuleType, tmp_path: Path, name: str, width: int, hints: Hints
) -> None:
    model, _ = shrunk(timm, name, embed_dim=width)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    weights, pixels = open_any(str(tmp_path / "w.safetensors"), hints), ARCHITECTURES[name].pixels
    assert {"layer_norm_epsilon 1e-05", f"pixels of {pixels}"} <= {*assumed_of(weights)}
    assert difference(weights, model, (pixels.mean, pixels.deviation)) < 2e-5


def test_a_bare_file_with_rmsnorms_leaves_the_heads_open(timm: ModuleType, tmp_path: Path) -> None:
    """AIMv2 has other heads than other models of its width."""
    model, _ = shrunk(timm, "aimv2_large_patch14_224", embed_dim=384)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(FlagNeededError, match="AIMv2"):
        open_any(str(tmp_path / "w.safetensors"), Hints(grid_side=2))


def test_a_bare_file_beside_its_config_is_not_guessed(timm: ModuleType, tmp_path: Path) -> None:
    model = timm.create_model(GAP, num_classes=3, depth=1, img_size=32).eval()
    folder = written(tmp_path / "w", model, {"architecture": GAP, "model_args": {"img_size": 32}})
    file = str(tmp_path / "w" / "model.safetensors")
    with pytest.raises(UserError):
        open_any(file, Hints())
    assert open_any(folder, Hints()).config.size.num_heads == 16
    assert open_any(file, Hints(num_heads=12)).config.size.num_heads == 12
    (tmp_path / "w" / "config.json").write_text(json.dumps({"architecture": "vit_base_patch16_siglip_gap_224"}))
    assert open_any(file, Hints()).config.size.num_heads == 12, "it says what was taken"


def test_a_name_whose_model_had_another_width_leaves_the_heads_open(timm: ModuleType, tmp_path: Path) -> None:
    """vit_small_patch16_224 was 768 wide, with 8 layers and 8 heads, in timm before 0.4."""
    sizes = {"embed_dim": 768, "depth": 1, "num_heads": 8, "mlp_ratio": 3, "img_size": 32}
    model = timm.create_model("vit_small_patch16_224", num_classes=3, **sizes).eval()
    torch.save({"state_dict": model.state_dict(), "args": {"model": "vit_small_patch16_224"}}, tmp_path / "w.pth")
    with pytest.raises(UserError):
        open_any(str(tmp_path / "w.pth"), Hints())
    assert difference(open_any(str(tmp_path / "w.pth"), Hints(num_heads=8)), model) < 2e-5


def test_load_model_says_what_it_assumed_and_nothing_else(
    timm: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning, which Python prints even if a script sets up no log."""
    model = timm.create_model(GAP, num_classes=3, depth=1, img_size=32).eval()
    sizes = {"architecture": GAP, "model_args": {"img_size": 32}}
    pixels = {"mean": PAPER[0], "std": PAPER[1]}
    told = written(tmp_path / "told", model, {**sizes, "pretrained_cfg": pixels})
    untold = written(tmp_path / "untold", model, sizes)
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    said = "assumed, as the file does not say: "
    no_pixels = f"pixels of {ARCHITECTURES[GAP].pixels};"
    expected = {
        told: (),
        untold: (said + no_pixels,),
        str(tmp_path / "bare.safetensors"): (
            f"{said}gelu exact, layer_norm_epsilon 1e-06, num_heads 12, position embeddings of a square grid of 2 x 2 "
            f"patches, {no_pixels}",
        ),
    }
    for path, lines in expected.items():
        caplog.clear()
        load_model(path, device="cpu")
        records = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert len(records) == len(lines), path
        assert all(line in each.getMessage() for line, each in zip(lines, records, strict=True))


def saved(folder: Path) -> Path:
    save_timm(folder, config=VIT, labels=("a", "b", "c"), tensor=tensors_of(random_model(VIT)))
    return folder


def opened(folder: Path) -> Weights:
    description = json.loads((folder / "config.json").read_text())
    return open_timm(open_tensor_file(folder / "model.safetensors"), description, Hints(num_heads=2))


@pytest.mark.parametrize("tag", ["", ".webli"])
@pytest.mark.parametrize("architecture", [name for name, each in ARCHITECTURES.items() if each.gelu == "tanh"])
def test_architectures_whose_gelu_is_in_timms_code(tmp_path: Path, architecture: str, tag: str) -> None:
    description = json.loads((saved(tmp_path) / "config.json").read_text())
    description |= {"architecture": architecture + tag, "model_args": {"img_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(description))
    weights = opened(tmp_path)
    assert (weights.config.gelu, assumed_of(weights)) == ("tanh", ())


@pytest.mark.parametrize(
    ("description", "hints", "assumed"),
    [
        pytest.param(
            {}, Hints(num_heads=2, grid_side=4), ("gelu exact", "layer_norm_epsilon 1e-06"), id="a state dict"
        ),
        pytest.param({}, Hints(num_heads=2, gelu="tanh", layer_norm_epsilon=1e-5, grid_side=4), (), id="all given"),
        pytest.param(
            {"model_args": {"num_heads": 2, "act_layer": "gelu", "img_size": 16}},
            Hints(),
            ("layer_norm_epsilon 1e-06",),
            id="said",
        ),
    ],
)
def test_what_is_assumed_is_said(
    tmp_path: Path, description: dict[str, Any], hints: Hints, assumed: tuple[str, ...]
) -> None:
    file = open_tensor_file(saved(tmp_path) / "model.safetensors")
    assert assumed_of(open_timm(file, description, hints)) == assumed


def shapes_of_tiny(rows: int, *, class_token: bool = True, patch: int = 16) -> TensorFile:
    """The shapes in a state dict of one layer of Ti, whose position table has `rows` rows."""
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (192, 3, patch, patch),
        "pos_embed": (1, rows, 192),
        "blocks.0.mlp.fc1.weight": (768, 192),
        "head.weight": (5, 192),
    }
    shapes |= {"cls_token": (1, 1, 192)} if class_token else {}
    return TensorFile(where="w", shapes=shapes, read=lambda _: torch.zeros(1))


@pytest.mark.parametrize(
    ("rows", "side"),
    [
        pytest.param(17, 4, id="32 x 128 px, a row for the class token"),
        pytest.param(9, 3, id="32 x 64 px, which without such a row would be 3 x 3"),
        pytest.param(16, 4, id="48 x 80 px"),
        pytest.param(25, 5, id="64 x 96 px"),
        pytest.param(225, 15, id="224 x 256 px"),
        pytest.param(37, 6, id="64 x 144 px"),
    ],
)
def test_a_table_that_may_be_of_a_rectangle_needs_its_side(rows: int, side: int) -> None:
    with pytest.raises(UserError):
        model_in(shapes_of_tiny(rows), {}, Hints())
    _, _, found = model_in(shapes_of_tiny(rows), {}, Hints(grid_side=side))
    assert found.config.image_size == 16 * side


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (shapes_of_tiny(197), "14 x 14 patches"),
        (
            shapes_of_tiny(196),
            "14 x 14 patches without a row for the class token, not rotary",
        ),
        (shapes_of_tiny(196, class_token=False), "14 x 14 patches"),
        (shapes_of_tiny(65, patch=4), "8 x 8 patches"),
    ],
)
def test_a_square_of_a_usual_size_is_said(file: TensorFile, said: str) -> None:
    _, _, found = model_in(file, {}, Hints())
    assert str(found.assumed[-1]) == f"position embeddings of a square grid of {said}"


def flat(folder: Path, **changes: Any) -> Path:
    """config.json as timm wrote it before 2023: no pretrained_cfg, everything at the top level."""
    content = json.loads((saved(folder) / "config.json").read_text())
    content |= content.pop("pretrained_cfg")
    content["labels"] = content.pop("label_names")
    del content["model_args"]
    (folder / "config.json").write_text(json.dumps(content | changes))
    return folder


def test_timms_older_flat_config_is_read(tmp_path: Path) -> None:
    weights = opened(flat(tmp_path))
    assert (weights.config.image_size, weights.labels) == (16, ("a", "b", "c"))
