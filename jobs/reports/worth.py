"""Gathers what a report says about the cost and the quality of a run: its compute and device-days, its accuracy next to
the paper's Table 2, the figures of `patchline inspect`, and the results that `patchline evaluate` keeps in RUN/scores
(scores, confusions, and images that the model gets right or wrong).

The files may come from anyone, so they are checked. If a run's record or metrics, or a file of an evaluation, cannot be
used, the result's `reasons` say why. Other files that cannot be used are left out.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from jobs.record import Leaves, leaves_of, read_leaves
from jobs.reports.points import Point, point_of
from jobs.reports.run_scores import Count, ScoreLine, Share, evaluation_folders, others_weights
from jobs.settings.models import EvaluateJob
from jobs.train.sweep import is_repetition, read_sweep, sweep_of
from jobs.train.trials import METRICS
from pipeline.evaluation.config import EvaluationConfig
from pipeline.runs.curves import Curves
from pipeline.runs.starts import Start, read_starts
from pipeline.runs.summary_file import read_curves
from pipeline.shared_settings import METRICS_FILE, RECORD_FILE, SCORES_FILE, SCORES_FOLDER
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import Line, is_finite, read_local_file
from shards.files.looks import is_there
from shards.files.typed_json import parse_json, read_record, record_from
from shards.output.quantities import DAY_SECONDS
from shards.pages.page import data_uri, matrix, shown

_MOST_FIGURE_BYTES, _MOST_SWEEP_BYTES = 8 << 20, 16 << 20
_PNG = b"\x89PNG\r\n\x1a\n"
# The figures of `patchline inspect`: file name and title.
_FIGURES = (
    ("filters", "Principal components of the patch embedding's filters"),
    ("positions", "Similarity of position embeddings, as learned and resampled"),
    ("attention_distance", "Mean attention distance of each head"),
    ("shifts", "What stays the same when an image moves"),
    ("rollout", "Attention rollout over images"),
)
COLUMNS = (
    "ViT-H/14, JFT",
    "ViT-L/16, JFT",
    "ViT-L/16, ImageNet-21k",
    "BiT-L (R152x4)",
    "Noisy Student (EfficientNet-L2)",
)
# "An Image is Worth 16x16 Words", Table 2: accuracy in percent and its deviation over three fine-tuning runs.
TABLE_2 = {
    "ImageNet": ("88.55 ± 0.04", "87.76 ± 0.03", "85.30 ± 0.02", "87.54 ± 0.02", "88.4 / 88.5"),
    "ImageNet-ReaL": ("90.72 ± 0.05", "90.54 ± 0.03", "88.62 ± 0.05", "90.54", "90.55"),
    "CIFAR-10": ("99.50 ± 0.06", "99.42 ± 0.03", "99.15 ± 0.03", "99.37 ± 0.06", "–"),
    "CIFAR-100": ("94.55 ± 0.04", "93.90 ± 0.05", "93.25 ± 0.05", "93.51 ± 0.08", "–"),
    "Oxford-IIIT Pets": ("97.56 ± 0.03", "97.32 ± 0.11", "94.67 ± 0.15", "96.62 ± 0.23", "–"),
    "Oxford Flowers-102": ("99.68 ± 0.02", "99.74 ± 0.00", "99.61 ± 0.02", "99.63 ± 0.03", "–"),
    "VTAB (19 tasks)": ("77.63 ± 0.23", "76.28 ± 0.46", "72.72 ± 0.21", "76.29 ± 1.70", "–"),
}
CORE_DAYS = ("2.5k", "0.68k", "0.23k", "9.9k", "12.3k")  # TPUv3-core-days of pre-training
_NAMES = {  # the name of a dataset's folder, without its split -> its name in Table 2
    **dict.fromkeys(("imagenet", "imagenet1k", "ilsvrc2012"), "ImageNet"),
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    **dict.fromkeys(("pets", "oxfordpets", "oxfordiiitpet", "oxfordiiitpets"), "Oxford-IIIT Pets"),
    **dict.fromkeys(("flowers", "flowers102", "oxfordflowers102"), "Oxford Flowers-102"),
}
_VTAB = {"natural": "natural", "specialized": "specialised", "structured": "structured", "mean": "VTAB (19 tasks)"}
_SPLIT = re.compile(r"[-_.](test|val|validation|valid)$")
_MOST_BYTES, _MOST_IMAGE_BYTES = 256 << 20, 1 << 20
_MOST_LISTED, _MOST_EXAMPLES, _NAME_CHARACTERS = 10, 64, 18
_MOST_DRAWN = 30  # a confusion matrix with more classes is not drawn
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
# Settings that decide which images are scored, and which answers are right.
_PART, _RIGHT = ("subset.", "held_out."), ("class_map", "real", "label_weights")


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The runs of one recipe with several seeds: their number, and the mean and sample standard deviation of their
    scores. `metric` is the score that the sweep uses."""

    num_runs: int
    mean: float
    deviation: float
    metric: str = "accuracy"


@dataclass(frozen=True, kw_only=True)
class Worth:
    """The cost and the quality of a run. `device_days`: the sum over all ranks and all starts. `accuracy`: the accuracy
    on --evaluation.url. `dataset`: the name of that dataset in Table 2 (empty: it is not there). `is_held_out`: whether
    the accuracy of `point` is that on a held-out part of the training data. `repeats`: the result of all repetitions,
    if the run is one of the repetitions of a sweep. `vtab`: the means in RUN/vtab over groups of tasks and over all
    tasks, with deviations over seeds. `figures`: the title and the data URI of each figure. `reasons`: why something is
    not known."""

    point: Point | None
    device_days: float | None
    dataset: str
    accuracy: float | None
    is_held_out: bool
    repeats: Repeats | None
    vtab: tuple[tuple[str, float, float | None], ...]
    figures: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]


def worth_of(run_dir: Path, *, running_seconds: float, curves: Curves | None = None) -> Worth:
    """Returns the cost and the quality of the run, read from its files. If its record or metrics cannot be read, the
    result has the reason. `running_seconds`: the wall time without pauses. `curves`: what its metrics contain, if they
    have been read."""
    reasons: list[str] = []
    point, url, days = None, "", None
    try:
        curves = curves if curves and curves.lines else read_curves(run_dir / METRICS_FILE)
        point = point_of(run_dir, name=run_dir.resolve().name, curves=curves)
        reasons += point.reasons
        url = read_leaves(run_dir / RECORD_FILE).get("job.evaluation.url", "")
        days = device_days(read_starts(run_dir), running_seconds=running_seconds)
    except (OSError, ValueError, UserError, InvalidDataError) as error:
        reasons.append(f"its cost is not known: {error}")
    is_held_out = bool(point and point.scored_on and point.scored_on.part)
    accuracy = point.accuracy if point else None
    if is_held_out:
        accuracy = _accuracy_on(url, curves.lines if curves else ())
    return Worth(
        point=point,
        device_days=days,
        dataset=_dataset(url) if accuracy is not None else "",
        accuracy=accuracy,
        is_held_out=is_held_out,
        repeats=_repeats(run_dir.resolve()),
        vtab=_vtab(run_dir / "vtab" / "vtab.json"),
        figures=tuple(_figures(run_dir / "inspect")),
        reasons=tuple(reasons),
    )


def _accuracy_on(url: str, lines: Sequence[Line]) -> float | None:
    """Returns the last accuracy on --evaluation.url, for a run that is also scored on a held-out part. The accuracy of
    averaged weights is preferred."""
    names = EvaluationConfig(url=url).sets(has_held_out=True)
    keys = [f"eval/{name}/{kind}accuracy" for name in names for kind in ("ema_", "")]
    for line in reversed(lines):
        for key in keys:
            value = line.get(key)
            if is_finite(value) and 0 <= value <= 1:  # type: ignore[operator]
                return float(value)  # type: ignore[arg-type]
    return None


def device_days(starts: Sequence[Start], *, running_seconds: float) -> float | None:
    """Returns the device-days of a run: for each start, the days without pauses until the next start (or until
    `running_seconds`) times the number of ranks, summed over all starts. Returns None if no start is recorded."""
    if not starts:
        return None
    begins = [one.total_seconds - one.paused_seconds for one in starts]
    ends = [*begins[1:], running_seconds]
    spans = [max(0.0, end - begin) * one.num_ranks for one, begin, end in zip(starts, begins, ends, strict=True)]
    return sum(spans) / DAY_SECONDS


def _repeats(run_dir: Path) -> Repeats | None:
    """Returns the mean and the deviation in sweep.json, or None if the run is not a repetition of a sweep or the values
    are not usable."""
    sweep = sweep_of(run_dir)
    found = read_sweep(sweep) if sweep else None
    if found is None or not is_repetition(run_dir, found):
        return None
    numbers: list[Any] = [found.get(name) for name in ("mean", "deviation")]
    mean, deviation = numbers
    metric = str(found.get("score"))
    is_usable = is_finite(mean) and is_finite(deviation) and 0 <= mean <= 1 and 0 <= deviation <= 1
    is_usable = is_usable and metric in METRICS
    return Repeats(num_runs=len(found["seeds"]), mean=mean, deviation=deviation, metric=metric) if is_usable else None


def _vtab(path: Path) -> tuple[tuple[str, float, float | None], ...]:
    """Returns the means that `patchline vtab --run-dir RUN/vtab` wrote, with their deviations over seeds."""
    try:
        found = parse_json(read_local_file(path, most_bytes=_MOST_SWEEP_BYTES))
    except (OSError, ValueError, InvalidDataError):
        return ()
    facts: dict[str, Any] = found if isinstance(found, dict) else {}
    spread: dict[str, Any] = facts["deviations"] if isinstance(facts.get("deviations"), dict) else {}
    means: list[tuple[str, Any, Any]] = [(name, facts.get(key), spread.get(key)) for key, name in _VTAB.items()]
    return tuple(
        (name, float(mean), float(deviation) if is_finite(deviation) and 0 <= deviation <= 1 else None)
        for name, mean, deviation in means
        if is_finite(mean) and 0 <= mean <= 1
    )


def _dataset(url: str) -> str:
    """Returns the dataset of Table 2 that the last part of a URL names; empty for any other dataset."""
    name = _SPLIT.sub("", url.rstrip("/").rpartition("/")[2].lower())
    return _NAMES.get(re.sub(r"[^a-z0-9]", "", name), "")


def _figures(folder: Path) -> list[tuple[str, str]]:
    """Returns the figures that exist and are PNG files."""
    found = []
    for name, title in _FIGURES:
        try:
            data = read_local_file(folder / f"{name}.png", most_bytes=_MOST_FIGURE_BYTES)
        except (OSError, InvalidDataError):
            continue
        if data.startswith(_PNG):
            found.append((title, data_uri(data, "png")))
    return found


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The content of classes.json: the number of images of each label of the dataset, and how many of them were
    classified correctly. `confusion`: [label, class, number of images] for each pair that occurs; empty if it would be
    too large. `confusion_right`: the same for the answers that count as right. A class map, ImageNet-ReaL's lists or
    several labels per image can make an answer with another name right."""

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
        """Returns the number of right answers by label and class."""
        return {(row, column): count for row, column, count in self.confusion_right}

    def _is_own(self, row: int, column: int) -> bool:
        return self.labels[row] == self.classes[column]

    def confusions(self) -> list[tuple[str, str, int, float]]:
        """Returns the `_MOST_LISTED` most frequent confusions: label, answer, number of images, and share of the
        label's images. An answer equal to the label is never a confusion, even if ImageNet-ReaL's lists call it
        wrong."""
        right = self._right()
        wrong = [(row, column, count - right.get((row, column), 0)) for row, column, count in self.confusion]
        wrong = [cell for cell in wrong if cell[2] > 0 and not self._is_own(cell[0], cell[1])]
        wrong.sort(key=lambda cell: (-cell[2], cell[0], cell[1]))
        return [
            (self.labels[row], self.classes[column], count, count / max(1, self.images[row]))
            for row, column, count in wrong[:_MOST_LISTED]
        ]

    def hardest(self) -> list[tuple[str, int, float]]:
        """Returns the `_MOST_LISTED` labels with the lowest accuracy: name, number of images, accuracy."""
        found = [
            (name, count, right / count)
            for name, count, right in zip(self.labels, self.images, self.right, strict=True)
            if count
        ]
        return sorted(found, key=lambda one: one[2])[:_MOST_LISTED]

    def picture(self) -> Markup | None:
        """Draws the confusion matrix. Returns None if there are more than `_MOST_DRAWN` classes, or if no confusions
        are recorded. A cell counts as right if most of its images were classified correctly."""
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
    """An image in examples.json. `image` is a data URI."""

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
    """An evaluation of a run. `dataset`: the URL of the scored dataset. `weights`: the evaluated weights; empty for the
    run's own. `settings`: the flags that decide which images are scored and which answers are right. `is_part`: whether
    only a part of the dataset is scored. `is_real`: whether ImageNet-ReaL's lists decide which answers are right.
    `facts`: the name and the text of each score."""

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


def read_scores(run_dir: Path) -> ScoreSheet:
    """Reads the newest evaluation in RUN/scores. If there is none, reads the newest evaluation of this run's weights in
    a nearby folder (see `evaluation_folders`). The result is empty if there is none either."""
    try:
        folder = next(iter(evaluation_folders(run_dir)), None)
    except OSError as error:
        return ScoreSheet(reasons=(f"{SCORES_FOLDER} cannot be read: {error.strerror or error}",))
    if folder is None:
        return ScoreSheet()
    reasons: list[str] = []
    leaves = _of_file(folder / RECORD_FILE, reasons, read_leaves) or {}
    scores = _of_file(folder / SCORES_FILE, reasons, lambda path: read_record(ScoreLine, _data(path)))
    classes = _of_file(folder / "classes.json", reasons, lambda path: read_record(Classes, _data(path)))
    examples = _of_file(folder / "examples.json", reasons, _examples) if is_there(folder / "examples.json") else ()
    return ScoreSheet(
        dataset=leaves.get("job.data.url", ""),
        weights=others_weights(leaves.get("job.weights", ""), run_dir),
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


def _settings(leaves: Leaves, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the settings of the record that begin with one of `names` and are not the default, as flags."""
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
