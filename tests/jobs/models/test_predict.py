"""`patchline predict` on real digits and on files that are not images: output, messages and exit code."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from jobs.models.predict import image_names
from pipeline.checkpoints.stored import Best, write_best
from pipeline.evaluation.predictor import load_model
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.reading.samples import read_sample
from tests.rigs.images import png_promising
from tests.rigs.processes import patchline
from tests.rigs.training import FinishedRuns

NUM_DIGITS = 18  # more than one batch


@pytest.fixture(scope="module")
def digit_files(digits_url: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, dataset = tmp_path_factory.mktemp("digits"), open_dataset(digits_url)
    for number in range(NUM_DIGITS):
        (folder / f"{number:02d}.png").write_bytes(bytes(read_sample(dataset, number).data or b""))
    return [str(path) for path in sorted(folder.iterdir())]


def said_of(run_dir: Path) -> str:
    """What is said, after the time, of the weights that are used."""
    step = json.loads((run_dir / "DONE").read_text())["step"]
    return f"{run_dir}: weights of step {step:,}, its last\n"


def test_better_weights_than_the_last_are_named(
    finished_runs: FinishedRuns, digit_files: list[str], tmp_path: Path
) -> None:
    run_dir = shutil.copytree(finished_runs.get(1), tmp_path / "run")
    scores = [{"step": step, "test_accuracy": accuracy, "test_loss": 1.0} for step, accuracy in ((1, 0.5), (3, 0.25))]
    scores[1]["step"] = json.loads((run_dir / "DONE").read_text())["step"]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    checkpoint = "step-00000001/attempt-0001-0123abcd"
    write_best(run_dir, Best(step=1, checkpoint=checkpoint, accuracy=0.5, loss=1.0, images=9, dataset=""))
    ended = patchline("predict", str(run_dir), digit_files[0], "--device", "cpu")
    first, second, *command = ended.errors.splitlines(keepends=True)
    assert first[9:] == said_of(run_dir)
    assert "better: step 1, accuracy 0.500 against 0.250; its weights:" in second
    words = shlex.split("".join(command).replace("\\\n", " "))
    assert words == ["patchline", "weights", str(run_dir), "--best", "--out", f"{run_dir}/best"]


def test_every_image_has_its_classes(finished_runs: FinishedRuns, digit_files: list[str]) -> None:
    run_dir = finished_runs.get(1)
    ended = patchline("predict", str(run_dir), *digit_files, "--top", "3", "--device", "cpu")
    assert (ended.code, ended.errors[9:]) == (0, said_of(run_dir))
    by_folder = patchline("predict", str(run_dir), str(Path(digit_files[0]).parent), "--top", "3", "--device", "cpu")
    assert by_folder.output == ended.output
    expected = load_model(run_dir / "weights", device="cpu").predict(digit_files, top=3)
    lines = ended.output.splitlines()
    assert len(lines) == 4 * NUM_DIGITS
    for number, prediction in enumerate(expected):
        name, *classes = lines[4 * number : 4 * number + 4]
        assert len(name) <= 80
        assert name.endswith(f"{number:02d}.png")
        assert classes == [f"  {probability:.4f}  {label}" for label, probability in prediction]


def test_one_object_a_line(finished_runs: FinishedRuns, digit_files: list[str]) -> None:
    weights = finished_runs.get(1) / "weights"
    ended = patchline("predict", str(weights), "--json", *digit_files[:2], "--device=cpu", digit_files[2])
    assert (ended.code, ended.errors[9:]) == (0, said_of(weights.parent))
    objects = [json.loads(line) for line in ended.output.splitlines()]
    assert [entry["image"] for entry in objects] == digit_files[:3]
    expected = load_model(weights, device="cpu").predict(digit_files[:3])
    for entry, prediction in zip(objects, expected, strict=True):
        assert [one["label"] for one in entry["classes"]] == [label for label, _ in prediction]
        probabilities = [one["probability"] for one in entry["classes"]]
        assert probabilities == pytest.approx([probability for _, probability in prediction], rel=1e-4)


def test_what_is_no_image_has_a_message_and_others_go_on(
    finished_runs: FinishedRuns, digit_files: list[str], tmp_path: Path
) -> None:
    cut, bomb, evil = tmp_path / "cut.png", tmp_path / "bomb.png", tmp_path / "\x1b[31mred\n.jpg"
    cut.write_bytes(Path(digit_files[0]).read_bytes()[:60])
    bomb.write_bytes(png_promising(60_000, 60_000))
    evil.write_bytes(b"no image")
    images = [str(cut), digit_files[0], str(bomb), str(evil), str(tmp_path / "gone.jpg"), digit_files[1]]
    words = ("predict", str(finished_runs.get(1)), *images, "--top", "1", "--device", "cpu")
    ended = patchline(*words)
    assert ended.code == 1
    assert len(ended.output.splitlines()) == 4
    _, *messages, last = ended.errors.splitlines()  # the first line names the weights
    assert len(messages) == 4
    said = ("cut.png: truncated", "bomb.png: too large: 60000x60000", r"\x1b[31mred\n.jpg: not a", "gone.jpg: it can")
    for message, expected in zip(messages, said, strict=True):
        assert expected in message
    assert "4 of 6 images could not be used" in last
    in_json = [json.loads(line) for line in patchline(*words, "--json").output.splitlines()]
    assert [entry["image"] for entry in in_json] == images
    assert ["error" in entry for entry in in_json] == [True, False, True, True, True, False]


def test_an_image_that_is_stored_turned_is_seen_upright(
    finished_runs: FinishedRuns, digit_files: list[str], tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    with Image.open(digit_files[0]) as image:
        image.transpose(Image.Transpose.ROTATE_180).save(tmp_path / "turned.png", exif=exif)
    words = ("predict", str(finished_runs.get(1)), digit_files[0], str(tmp_path / "turned.png"), "--device", "cpu")
    _, *upright = patchline(*words).output.splitlines()
    assert upright[:5] == upright[6:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param((), "usage: patchline predict WEIGHTS IMAGE...", id="nothing"),
        pytest.param(("run",), "no image is given: patchline predict run IMAGE|FOLDER...", id="no image"),
        pytest.param(("/nowhere", "a.png"), "no weights at '/nowhere'", id="no weights"),
        pytest.param(("run", "a.png", "--top", "0"), "--top is 0; allowed: 1 or more", id="top"),
    ],
)
def test_mistakes_in_the_words(words: tuple[str, ...], message: str) -> None:
    ended = patchline("predict", *words)
    assert ended.code == 2
    assert "Traceback" not in ended.errors
    assert message in ended.errors


def test_a_folder_stands_for_the_images_below_it(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "b/1.jpg", "b/notes.txt", "a.webp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    given = [str(tmp_path), "x.png"]
    assert list(image_names(given)) == [*(str(tmp_path / name) for name in ("a.webp", "b/1.jpg", "b/2.PNG")), "x.png"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no image; allowed: a folder of \.jpg"):
        list(image_names([str(tmp_path / "empty")]))
