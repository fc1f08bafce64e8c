"""`patchline inspect` of real weights: ours, and the same in timm's layout; and what it cannot use."""

import json
import shutil
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jobs.models.inspect import image_files
from jobs.settings.models import InspectJob
from pipeline.models import ModelConfig, build_model
from pipeline.models.masked import colour_names
from pipeline.models.weights.folder import open_weights, save_weights
from pipeline.models.weights.usage import Usage
from pipeline.shared_settings import EvaluationTransform
from tests.jobs.models.test_evaluate import TINY, weights_that_say
from tests.pipeline.inspection.test_model_figures import photographs
from tests.rigs.processes import Ended, patchline
from tests.rigs.training import FinishedRuns, losses

FILES = ["filters", "positions", "attention_distance", "rollout", "shifts"]


def inspected(weights: object, *words: object) -> Ended:
    return patchline("inspect", str(weights), *map(str, words), "--device=cpu")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    photographs(folder, 5)
    (folder / "notes.txt").write_text("not an image")
    return folder


def test_figures_and_numbers_of_a_run(finished_runs: FinishedRuns, images: Path, tmp_path: Path) -> None:
    run_dir, out = finished_runs.get(1), tmp_path / "out"
    ended = inspected(run_dir, "--images", images, "--out", out, "--max-images=3")
    assert ended.code == 0, ended.errors
    names = [f"{name}.{kind}" for name in FILES for kind in ("png", "svg")]
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "inspect.json"])
    assert ended.output.splitlines() == [str(out / name) for name in (*names, "inspect.json")]
    facts = json.loads((out / "inspect.json").read_text())
    assert facts["attention"]["num_images"] == 3
    distances = facts["attention"]["mean_distance_pixels"]
    assert (len(distances), len(distances[0])) == (2, 2)
    assert sum(facts["filters"]["shares_of_variance"]) == pytest.approx(1, abs=0.2)
    for name in names[::2]:
        with Image.open(out / name) as picture:
            assert min(picture.size) > 200


def test_an_image_that_cannot_be_used_is_left_out(tmp_path: Path, images: Path) -> None:
    weights = weights_that_say(tmp_path / "weights", 7)
    first = sorted(path for path in images.iterdir() if path.suffix != ".txt")[0]
    first.write_bytes(first.read_bytes()[:100])
    ended = inspected(weights, "--images", images, "--out", tmp_path / "out")
    assert ended.code == 1, ended.errors
    assert "Traceback" not in ended.errors
    assert first.name in ended.errors
    assert "1 of 5 images could not be used" in ended.errors
    assert json.loads((tmp_path / "out" / "inspect.json").read_text())["attention"]["num_images"] == 4
    for path in images.iterdir():
        path.write_bytes(b"no image")
    ended = inspected(weights, "--images", images, "--out", tmp_path / "none")
    assert (ended.code, "none of the images can be used; give --images a folder" in ended.errors) == (2, True)


@pytest.mark.long
def test_the_figures_are_in_the_runs_tensorboard(finished_runs: FinishedRuns, images: Path, tmp_path: Path) -> None:
    """In a folder of their own, and in place of those of an earlier look at the same step."""
    run_dir = shutil.copytree(finished_runs.get(1), tmp_path / "run")
    for number in (1, 3):
        ended = inspected(run_dir, "--images", images, f"--max-images={number}")
        assert ended.code == 0, ended.errors
    board = EventAccumulator(str(run_dir / "inspect")).Reload()
    assert sorted(board.Tags()["images"]) == sorted(f"weights/inspect/{name}" for name in FILES)
    for name in FILES:
        (shown,) = board.Images(f"weights/inspect/{name}")
        file = (run_dir / "inspect" / f"{name}.png").read_bytes()
        assert (shown.step, shown.encoded_image_string) == (max(losses(run_dir)), file)
        with Image.open(BytesIO(file)) as picture:
            assert (shown.width, shown.height) == picture.size
    own = EventAccumulator(str(run_dir)).Reload().Tags()["images"]
    assert not any("inspect/" in tag for tag in own)


@pytest.mark.long
def test_timms_layout_has_the_same_numbers(tmp_path: Path, images: Path) -> None:
    """Of images that are resized with antialiasing: timm knows no other way, and its folder says so."""
    found, weights = open_weights(weights_that_say(tmp_path / "plain", 3)), str(tmp_path / "ours")
    usage = Usage(transform=EvaluationTransform(antialias=True))
    save_weights(Path(weights), config=found.config, labels=found.labels, tensor=found.tensor, usage=usage)
    assert patchline("export", weights, "--out", str(tmp_path / "timm"), "--format=timm").code == 0
    ended = patchline("import", str(tmp_path / "timm"), "--out", str(tmp_path / "imported"), "--num-heads=2")
    assert ended.code == 0, ended.errors
    facts = []
    for folder in (tmp_path / "ours", tmp_path / "imported"):
        ended = inspected(folder, "--images", images)
        assert ended.code == 0, ended.errors
        facts.append(json.loads((folder / "inspect" / "inspect.json").read_text()))
    for part in ("filters", "positions", "attention", "shifts"):
        assert facts[0][part] == facts[1][part]


def test_a_model_of_masked_patches_has_filters_and_attention(tmp_path: Path, images: Path) -> None:
    """It classifies no images, and is no less worth looking into."""
    config = ModelConfig(**TINY | {"num_classes": 512, "masked_patches": True})
    state, weights = build_model(config).state_dict(), tmp_path / "weights"
    save_weights(weights, config=config, labels=colour_names(), tensor=lambda name: state[name])
    ended = inspected(weights, "--images", images)
    assert ended.code == 0, ended.errors
    assert len(ended.output.splitlines()) == 2 * len(FILES) + 1


@pytest.mark.long
def test_a_resnet_shows_what_a_shift_changes(tmp_path: Path, images: Path) -> None:
    config = ModelConfig(name="bit_r50x1", num_classes=5, resnet_units=(1, 1), image_size=32)
    state, weights = build_model(config).state_dict(), tmp_path / "weights"
    save_weights(weights, config=config, labels=tuple("abcde"), tensor=lambda name: state[name])
    ended = inspected(weights, "--images", images)
    assert ended.code == 0, ended.errors
    assert [Path(line).name for line in ended.output.splitlines()] == ["shifts.png", "shifts.svg", "inspect.json"]
    ended = inspected(weights)
    assert ended.code == 2
    assert "is a bit_r50x1, which has neither patches nor attention to show; give --images DIR" in " ".join(
        ended.errors.split()
    )


def test_images_are_found_in_folders_of_classes(tmp_path: Path) -> None:
    for name in ("b/0.png", "a/1.PNG", "a/0.jpg", "stray.webp", "a/notes.txt", "a/c/2.jpeg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = image_files(InspectJob(images=str(tmp_path), max_images=5))
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        *("stray.webp", "a/0.jpg", "a/1.PNG", "a/c/2.jpeg", "b/0.png")
    ]
    assert image_files(InspectJob(images=str(tmp_path), max_images=2)) == found[:2]


def test_without_images_it_draws_the_rest(tmp_path: Path) -> None:
    ended = inspected(weights_that_say(tmp_path / "weights", 3))
    assert ended.code == 0, ended.errors
    assert "no --images, so there are no figures of attention and of shifts" in ended.errors
    facts = json.loads((tmp_path / "inspect" / "inspect.json").read_text())
    assert facts["files"] == [f"{name}.{kind}" for name in FILES[:2] for kind in ("png", "svg")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--images", "nowhere"), "--images is 'nowhere': No such file or directory; give a folder of images"),
        (
            ("--images", "{empty}"),
            "which has no image; allowed: a folder of .jpg, .jpeg, .jpe, .jfif, .png,",
        ),
        (("--images", "{damaged}"), "broken.png"),
        (("--resample-to", "33"), "--resample-to is 33, not a multiple of the patch (16 px); take 32 or 48"),
        (("--resample-to", "5"), "take 16 or a multiple of it"),
        (("--max-images", "0"), "--max-images"),
        (("--out", "{damaged}/broken.png/x"), "Not a directory"),
    ],
)
def test_what_cannot_be_used_is_one_message(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    weights = weights_that_say(tmp_path / "weights", 3)
    folders = {name: tmp_path / name for name in ("empty", "damaged")}
    for folder in folders.values():
        folder.mkdir()
    (folders["damaged"] / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    ended = inspected(weights, *(word.format(**folders) for word in words))
    assert (ended.code, "Traceback" in ended.errors) == (2, False), ended.errors
    assert message in " ".join(ended.errors.split())


def test_weights_are_needed() -> None:
    ended = patchline("inspect", "--images", "photos")
    assert ended.code == 2
    assert "WEIGHTS" in ended.errors
