"""What `patchline evaluate --run-dir RUN/scores` left, for the report of RUN: scores, confusions, and images that the
model gets right or wrong. Files of others are checked before they are believed; what cannot be used is a reason."""

import base64
import binascii
import glob
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from markupsafe import Markup

from jobs.record import Leaves, leaves_of, read_leaves
from jobs.settings.models import EvaluateJob
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file
from shards.files.typed_json import parse_json, read_record, record_from
from shards.pages.page import matrix, shown
from shards.schema.config_values import Range

FOLDER, _SCORES = "scores", "scores.json"
_MOST_SEARCHED = 1000  # folders that may have an evaluation
_MOST_BYTES, _MOST_IMAGE_BYTES = 256 << 20, 1 << 20
_MOST_LISTED, _MOST_EXAMPLES, _NAME_CHARACTERS = 10, 64, 18
_MOST_DRAWN = 30  # classes of a confusion matrix
_KINDS = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}
_WORDS = {
    "num_images": "images",
    "num_unlabeled": "images without a label that counts",
    "accuracy": "accuracy (top-1)",
    "top5": "top-5",
    "mean_per_class": "mean per class",
    "calibration_error": "calibration error",
    "chance": "chance (share of the most frequent label)",
    "loss": "loss",
}
# Settings that decide which images are scored, and what is right.
_PART, _RIGHT = ("subset.", "held_out."), ("class_map", "real", "label_weights")
Share = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(0)]


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """scores.json: the fields of pipeline.evaluation.scores.Scores."""

    num_images: Count
    num_unlabeled: Count
    accuracy: Share
    top5: Share
    mean_per_class: Share
    calibration_error: Share
    loss: float
    chance: Share


@dataclass(frozen=True, kw_only=True)
class Classes:
    """classes.json: for each label of the dataset its images and the right ones among them; `confusion`: [label, class,
    images] for what is not 0, none if it would be too large; `confusion_right`: of these the right answers, which a
    class map, lists of labels or an image with several labels allow under other names, too."""

    labels: tuple[str, ...]
    images: tuple[Count, ...]
    right: tuple[Count, ...]
    classes: tuple[str, ...]
    confusion: tuple[tuple[Count, ...], ...]
    confusion_right: tuple[tuple[Count, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.labels) == len(self.images) == len(self.right):
            raise ValueError("labels, images and right are not equally long")
        for cell in (*self.confusion, *self.confusion_right):
            if len(cell) != 3 or cell[0] >= len(self.labels) or cell[1] >= len(self.classes):
                raise ValueError(f"confusion has {list(cell[:4])}; allowed: [label, class, images], numbers in range")

    def _right(self) -> dict[tuple[int, int], int]:
        """Right answers by label and class."""
        return {(row, column): count for row, column, count in self.confusion_right}

    def _is_own(self, row: int, column: int) -> bool:
        return self.labels[row] == self.classes[column]

    def confusions(self) -> list[tuple[str, str, int, float]]:
        """The most frequent ones: label, answer, images, and their share of the label's. No label is confused with
        itself, even where ImageNet-ReaL's lists do not have it."""
        right = self._right()
        wrong = [(row, column, count - right.get((row, column), 0)) for row, column, count in self.confusion]
        wrong = [cell for cell in wrong if cell[2] > 0 and not self._is_own(cell[0], cell[1])]
        wrong.sort(key=lambda cell: (-cell[2], cell[0], cell[1]))
        return [
            (self.labels[row], self.classes[column], count, count / max(1, self.images[row]))
            for row, column, count in wrong[:_MOST_LISTED]
        ]

    def hardest(self) -> list[tuple[str, int, float]]:
        """The labels with the lowest accuracy: name, images, accuracy."""
        found = [
            (name, count, right / count)
            for name, count, right in zip(self.labels, self.images, self.right, strict=True)
            if count
        ]
        return sorted(found, key=lambda one: one[2])[:_MOST_LISTED]

    def picture(self) -> Markup | None:
        """The matrix, of not too many classes; a cell counts as right if most of its images are."""
        rows = [row for row, count in enumerate(self.images) if count]
        if not self.confusion or max(len(rows), len(self.classes)) > _MOST_DRAWN:
            return None
        shares, right = [[0.0] * len(self.classes) for _ in self.labels], self._right()
        is_right = [[False] * len(self.classes) for _ in self.labels]
        for row, column, count in self.confusion:
            shares[row][column] = min(1.0, count / max(1, self.images[row]))
            is_right[row][column] = 2 * right.get((row, column), 0) > count
        names, answers = ([shown(one, _NAME_CHARACTERS) for one in each] for each in (self.labels, self.classes))
        about = f"Confusion matrix of {len(rows)} labels and {len(answers)} classes, in percent of each label's images."
        return matrix(
            [shares[row] for row in rows],
            [names[row] for row in rows],
            answers,
            style=lambda place, column: "part-1" if is_right[rows[place]][column] else "cell",
            about=about,
        )


@dataclass(frozen=True, kw_only=True)
class ExampleImage:
    """An image of examples.json; `image`: a data URI."""

    sample_id: Count
    source: str
    labels: tuple[str, ...]
    said: str
    confidence: Share
    is_right: bool
    image: str

    def __post_init__(self) -> None:
        kind, _, data = self.image.removeprefix("data:").partition(";base64,")
        try:
            start = base64.b64decode(data[:16], validate=True)
            is_whole = len(data) <= _MOST_IMAGE_BYTES and bool(base64.b64decode(data, validate=True))
        except binascii.Error:
            is_whole, start = False, b""
        if not is_whole or kind not in _KINDS or not start.startswith(_KINDS[kind]):
            raise ValueError(f"image of sample {self.sample_id} is no small PNG or JPEG as a data URI")


@dataclass(frozen=True, kw_only=True)
class ScoreSheet:
    """`dataset`: its address; `weights`: those of another folder than the run's own, else empty; `settings`: flags that
    decide which images are scored and what is right; `is_part`: of the dataset; `is_real`: by ImageNet-ReaL's lists.
    `facts`: name and text of each score."""

    dataset: str = ""
    weights: str = ""
    settings: tuple[str, ...] = ()
    is_part: bool = False
    is_real: bool = False
    scores: ScoreLine | None = None
    facts: tuple[tuple[str, str], ...] = ()
    classes: Classes | None = None
    right: tuple[ExampleImage, ...] = ()
    wrong: tuple[ExampleImage, ...] = ()
    reasons: tuple[str, ...] = ()


NO_SCORES = ScoreSheet()


def read_scores(run_dir: Path) -> ScoreSheet:
    """Reads RUN/scores, or, if it is missing, the newest evaluation of this run's weights in a folder of the run or
    beside it; empty if there is none."""
    folder = run_dir / FOLDER
    if not (folder / _SCORES).is_file():
        found = _newest_evaluation(run_dir)
        if found is None:
            return NO_SCORES
        folder = found
    reasons: list[str] = []
    leaves = _of_file(folder / "job.yaml", reasons, read_leaves) or {}
    scores = _of_file(folder / _SCORES, reasons, lambda path: read_record(ScoreLine, _data(path)))
    classes = _of_file(folder / "classes.json", reasons, lambda path: read_record(Classes, _data(path)))
    examples = _of_file(folder / "examples.json", reasons, _examples) if (folder / "examples.json").exists() else ()
    return ScoreSheet(
        dataset=leaves.get("job.data.url", ""),
        weights=_others_weights(leaves.get("job.weights", ""), run_dir),
        settings=_settings(leaves, (*_PART, *_RIGHT)),
        is_part=bool(_settings(leaves, _PART)),
        is_real=bool(leaves.get("job.real")),
        scores=scores,
        facts=_facts(scores) if scores else (),
        classes=classes,
        right=tuple(one for one in examples or () if one.is_right),
        wrong=tuple(one for one in examples or () if not one.is_right),
        reasons=tuple(reasons),
    )


def _newest_evaluation(run_dir: Path) -> Path | None:
    """The folder of the newest evaluation of this run's own weights: in the run, beside it, or, of a chain with several
    runs, in the folder of the same number of another step."""
    own = run_dir.resolve()
    places = ((own, "*"), (own.parent, "*"), (own.parent.parent, f"*/{glob.escape(own.name)}"))
    there = (path for parent, pattern in places for path in parent.glob(f"{pattern}/{_SCORES}"))
    found: list[tuple[float, Path]] = []
    for path in islice(there, _MOST_SEARCHED):
        with suppress(OSError, UserError, InvalidDataError):
            leaves = read_leaves(path.parent / "job.yaml")
            weights = leaves.get("job.weights", "")
            if leaves["stage"] == "evaluate" and weights and not _others_weights(weights, own):
                found.append((path.stat().st_mtime, path.parent))
    return max(found)[1] if found else None


def _others_weights(weights: str, run_dir: Path) -> str:
    """Empty for the run's own, also if its folder was moved since under its name."""
    own, said = run_dir.resolve(), Path(weights).resolve()
    was = said.parent if said.name == "weights" else said
    is_own = was == own or (was.name == own.name and not was.exists())
    return "" if not weights or is_own else weights


def _settings(leaves: Leaves, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the record that are not the default, as flags."""
    usual = leaves_of(EvaluateJob())
    given = {name: leaves.get(f"job.{name}", value) for name, value in usual.items() if name.startswith(names)}
    flags = {f"--{name}".replace("_", "-"): value for name, value in given.items() if value != usual[name]}
    return tuple(flag if value == "true" else f"{flag} {value}" for flag, value in flags.items())


def _of_file(path: Path, reasons: list[str], read: Any) -> Any:
    try:
        return read(path)
    except OSError as error:
        reasons.append(f"{path.parent.name}/{path.name} cannot be read: {error.strerror or error}")
    except (ValueError, UserError, InvalidDataError) as error:
        reasons.append(f"{path.parent.name}/{path.name} is damaged: {error}")
    return None


def _data(path: Path) -> bytes:
    return read_local_file(path, most_bytes=_MOST_BYTES)


def _examples(path: Path) -> tuple[ExampleImage, ...]:
    found = parse_json(_data(path))
    if not isinstance(found, list):
        raise ValueError("allowed: a list of images")
    return tuple(record_from(ExampleImage, one, where=f"{at}.") for at, one in enumerate(found[:_MOST_EXAMPLES]))


def _facts(scores: ScoreLine) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for name, words in _WORDS.items():
        value = getattr(scores, name)
        if isinstance(value, int):
            found += [(words, f"{value:,}")] if value or name == "num_images" else []
        elif value is not None:
            found.append((words, f"{value:.4f}"))
    return tuple(found)
