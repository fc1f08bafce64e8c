"""`patchline predict`: prints the most probable classes of each image in the given files and folders."""

import json
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import exit_codes
from jobs.output import WIDTH, fitted, put
from jobs.settings.models import PredictJob
from shards.errors import UserError
from shards.output.quantities import plural
from shards.output.terminal import printable_name
from shards.sources.entry import IMAGE_SUFFIXES

if TYPE_CHECKING:
    from pipeline.evaluation.predictor import Prediction, Predictor

log = logging.getLogger(__name__)
KINDS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp")


def run(job: PredictJob) -> int:
    """Predicts the classes of all images. Returns 0 if every image was predicted, or 1 if some could not be used. Each
    image that could not be used is logged."""
    if Path(job.weights).suffix.lower() in IMAGE_SUFFIXES:
        image = printable_name(shlex.quote(job.weights))
        raise UserError(f"the weights come first, and {image} is an image: patchline predict RUN {image}")
    if not job.images:
        raise UserError(f"no image is given: patchline predict {job.weights} IMAGE|FOLDER...")
    # These load torch, which help must not.
    from jobs.models.evaluate import say_weights_used  # noqa: PLC0415
    from pipeline.evaluation.predictor import batched, load_model  # noqa: PLC0415

    predictor = load_model(job.weights, device=job.device)
    say_weights_used(job.weights)
    num_images = num_failed = 0
    for batch in batched(image_names(job.images)):
        num_images += len(batch)
        num_failed += _predict(predictor, batch, job)
    if num_failed:
        log.warning("%d of %s could not be used", num_failed, plural(num_images, "image"))
    return exit_codes.FAULTS_FOUND if num_failed else exit_codes.DONE


def _predict(predictor: "Predictor", images: "Sequence[str]", job: PredictJob) -> int:
    """Writes the predictions of a batch, in order. Returns the number of images that could not be used."""
    found = predictor.outcomes(images, top=job.top)
    for image, outcome in zip(images, found, strict=True):
        if isinstance(outcome, UserError):
            log.error("%s", printable_name(str(outcome)))
            if job.json:
                _write(json.dumps({"image": image, "error": str(outcome)}))
        else:
            _write(_as_json(image, outcome) if job.json else _as_text(image, outcome))
    return sum(isinstance(outcome, UserError) for outcome in found)


def _as_json(image: str, prediction: "Prediction") -> str:
    classes = [{"label": label, "probability": float(f"{likely:.6g}")} for label, likely in prediction]
    return json.dumps({"image": image, "classes": classes}, allow_nan=False)


def _as_text(image: str, prediction: "Prediction") -> str:
    lines = [f"  {likely:.4f}  {fitted(label, WIDTH - 10)}" for label, likely in prediction]
    return "\n".join([fitted(image), *lines])


def _write(line: str) -> None:
    put(f"{line}\n")


def images_below(folder: str) -> Iterator[Path]:
    """Yields the images in a folder in the order of their names, then those in its subfolders, also of kinds that
    cannot be read here, such as HEIC. Raises OSError if a folder cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        yield from (Path(place) / name for name in sorted(names) if Path(name).suffix.lower() in IMAGE_SUFFIXES)


def image_names(given: Sequence[str]) -> Iterator[str]:
    """Yields each given file. For a folder, yields the images in it and in its subfolders. Raises UserError for a
    folder without images, or one that cannot be listed."""
    for name in given:
        if not Path(name).is_dir():
            yield name
            continue
        is_empty = True
        try:
            for path in images_below(name):
                is_empty = False
                yield str(path)
        except OSError as error:
            raise UserError(
                f"{error.filename or name}: {error.strerror}", todo="give a folder that can be read"
            ) from error
        if is_empty:
            raise UserError(f"{name} has no image; allowed: a folder of {', '.join(KINDS)} files")
