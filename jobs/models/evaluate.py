"""`patchline evaluate`: scores the weights in a folder on every sample of a dataset, exactly once each.

Without --run-dir, the scores of a completed run's weights are kept in the run, in a folder of RUN/scores for each
dataset and each way to score it, where `patchline report` and `patchline compare` find them.

Functions here also log which weights of a run a command uses, and whether images are prepared as the weights say.
"""

import base64
import hashlib
import json
import logging
import math
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.exit_codes import answered_in_exchanges
from jobs.output import put, write_out
from jobs.record import refuse_training_run, write_record
from jobs.settings.models import EvaluateJob
from pipeline.evaluation.scores import Examples, Scores, evaluate, pictures
from pipeline.evaluation.targets import Targets, by_class_map, by_lists, by_name, read_class_map, read_lists
from pipeline.models.conversion.open_any import open_for_use
from pipeline.models.weights.folder import Weights, filled_model, refuse_no_head
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage
from pipeline.ranks.world import World, current_world, joined
from pipeline.shared_settings import SCORES_FILE, SCORES_FOLDER, EvaluationTransform
from pipeline.training.saving.finish import Done, done_from_json
from pipeline.training.summary import better_checkpoint
from shards.dataset import Dataset, open_dataset
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_text
from shards.output.terminal import printable_name
from shards.part import opened_parts
from shards.reading.samples import locate_row

log = logging.getLogger(__name__)
_MOST_BYTES = 16 << 20
__all__ = ["EvaluateJob", "run"]
_OTHER_RUN_DIR = "give another --run-dir"
_CLASSES, _EXAMPLES = "classes.json", "examples.json"
_KEY_DIGITS, _MOST_NAME = 8, 60


def run(job: EvaluateJob) -> int:
    """Evaluates the weights. Rank 0 prints the scores, and writes scores.json, classes.json and examples.json to
    --run-dir or, for the weights of a completed run, to a folder in the run. Raises InvalidDataError if the loss is not
    finite."""
    world = current_world(job.device, threads=job.threads)
    weights, dataset = open_for_use(job.weights, say=world.is_first), _opened(job)
    refuse_no_head(weights)
    labels = weights.labels[: weights.config.num_classes]
    if world.is_first:
        say_weights_used(job.weights, scored=dataset.fingerprint)
        say_other_transform(job.weights, weights.usage, job.data.transform)
    trained = _completed_run(job.weights)
    folder = job.run_dir or (str(_folder_in_run(trained[0], job, dataset)) if trained else "")
    targets, examples = _targets(job, dataset, labels), Examples(job.examples)
    if folder and world.is_first:
        # Written first, so that a folder without write access is refused now.
        folder = _prepared(folder, job)
    with answered_in_exchanges(), joined(world):
        model = filled_model(weights).to(world.device)
        scores, counts = evaluate(
            model,
            dataset,
            job.data,
            labels=labels,
            loss=job.loss,
            world=world,
            label_weights=job.label_weights,
            targets=targets,
            examples=examples,
        )
        examples.over_ranks(world.device)
    if not math.isfinite(scores.loss):
        raise InvalidDataError(
            f"the logits of {job.weights!r} are not finite (NaN or infinite) for images of {job.data.url!r}: the "
            "values of its weights are too large, or its training failed; give other weights"
        )
    if world.is_first:
        if folder:
            about = {"dataset": dataset.fingerprint, "step": trained[1].step if trained else None}
            _write(Path(folder), _CLASSES, counts.of_classes(dataset.label_names, labels))
            _write(Path(folder), _EXAMPLES, _shown(examples, dataset, weights, job, world))
            _write(Path(folder), SCORES_FILE, about | asdict(scores))
            if not job.run_dir:
                log.info("scores kept in %s, for patchline report and compare", printable_name(folder))
        put(score_text(job, scores, num_classes=len(labels)) + "\n")
    return exit_codes.DONE


def _shown(
    examples: Examples, dataset: Dataset, weights: Weights, job: EvaluateJob, world: World
) -> list[dict[str, Any]]:
    """Returns the content of examples.json: for each example the names of its labels and of the answer, and the image
    as the model sees it."""
    chosen = examples.chosen()
    files = pictures(
        dataset,
        [one.sample_id for one in chosen],
        image_size=weights.config.image_size,
        transform=job.data.transform,
        threads=world.num_threads,
    )
    return [
        {
            **asdict(one),
            "source": dataset.source_of(*locate_row(dataset, one.sample_id)),
            "labels": [dataset.label_names[number] for number in one.labels],
            "said": weights.labels[one.said],
            "image": f"data:{kind};base64,{base64.b64encode(data).decode()}",
        }
        for one, (kind, data) in zip(chosen, files, strict=True)
    ]


def _opened(job: EvaluateJob) -> Dataset:
    """Returns the part of the dataset that is scored; by default all of it."""
    part, held_out = opened_parts(open_dataset(job.data.url), job.subset, job.held_out)
    return held_out or part


def _targets(job: EvaluateJob, dataset: Dataset, labels: tuple[str, ...]) -> Targets:
    if job.class_map:
        return by_class_map(dataset, labels, read_class_map(job.class_map))
    return by_lists(dataset, labels, read_lists(job.real)) if job.real else by_name(dataset, labels)


def _folder_in_run(run_dir: Path, job: EvaluateJob, dataset: Dataset) -> Path:
    """Returns the folder of a run that keeps these scores. The same dataset, scored in the same way, has the same
    folder, so that newer scores replace older ones."""
    how = (job.subset, job.held_out, job.loss, job.label_weights, job.class_map, job.real, job.data.transform)
    key = hashlib.sha256(repr((dataset.fingerprint, how)).encode()).hexdigest()[:_KEY_DIGITS]
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", job.data.url.rstrip("/").rpartition("/")[2])[:_MOST_NAME].lstrip(".-")
    return run_dir / SCORES_FOLDER / "-".join(filter(None, (name, key)))


def _prepared(folder: str, job: EvaluateJob) -> str:
    """Writes the record to the folder, and removes the scores of an earlier evaluation from it: if this evaluation
    fails, old scores must not be next to its record. Returns the folder; empty if scores were to be kept in a run that
    cannot be written to. Raises UserError if --run-dir cannot be written to."""
    try:
        refuse_training_run(Path(folder), stage="evaluate")
        _remove_scores(Path(folder))
        write_record(Path(folder), stage="evaluate", job=job)
    except UserError as error:
        if job.run_dir:
            raise
        log.warning("the scores are only printed: %s; --run-dir keeps them elsewhere", printable_name(str(error)))
        return ""
    return folder


def _remove_scores(run_dir: Path) -> None:
    """Removes the scores of an earlier evaluation. Raises UserError if a file cannot be removed."""
    for name in (SCORES_FILE, _CLASSES, _EXAMPLES):
        try:
            (run_dir / name).unlink(missing_ok=True)
        except NotADirectoryError:
            return  # write_record raises the error
        except OSError as error:
            raise UserError(f"cannot write {str(run_dir / name)!r}: {error.strerror}", todo=_OTHER_RUN_DIR) from error


def _write(run_dir: Path, name: str, content: object) -> None:
    """Writes a JSON file, completely or not at all. Raises UserError if the path is wrong or not writable, and OSError
    for a fault of the storage."""
    write_out(run_dir / name, f"{json.dumps(content, allow_nan=False)}\n".encode(), todo=_OTHER_RUN_DIR)


def score_text(job: EvaluateJob, scores: Scores, *, num_classes: int) -> str:
    """Returns the scores, the weights and the dataset as three lines of text or, with --json, as one JSON object."""
    if job.json:
        return json.dumps({**asdict(scores), "weights": job.weights, "data_url": job.data.url}, allow_nan=False)
    where = printable_name(f"{job.weights} on {job.data.url}")
    without = f", {scores.num_unlabeled:,} others without a label that counts" if scores.num_unlabeled else ""
    in_five = f"top-5 {scores.top5:.4f}, " if num_classes > 5 else ""  # with five classes or fewer it is always 1
    return (
        f"{where}\n"
        f"accuracy {scores.accuracy:.4f} (chance {scores.chance:.4f}), loss {scores.loss:.4f}, "
        f"{scores.num_images:,} images{without}\n"
        f"{in_five}mean per class {scores.mean_per_class:.4f}, "
        f"calibration error {scores.calibration_error:.4f}"
    )


def say_weights_used(weights: str, *, scored: str = "") -> None:
    """Logs the step of a completed run's weights, and the kept checkpoint that scored better, if there is one. Logs a
    warning if the run was trained on the dataset whose fingerprint is `scored`.

    `weights` is a run directory or its weights folder. Nothing is logged for other folders, whose run is not known.
    """
    if (trained := _completed_run(weights)) is None:
        return
    run_dir, done = trained
    kind = "averaged weights" if done.job.ema_decay else "weights"
    lines = [f"{run_dir}: {kind} of step {done.step:,}, its last", *better_checkpoint(run_dir, step=done.step)]
    log.info("%s", "\n".join(printable_name(line) for line in lines))
    trained_on = done.position.dataset
    if scored and scored in ((trained_on,) if isinstance(trained_on, str) else trained_on):
        log.warning("the run was trained on this dataset, so its accuracy here says nothing about new images")


def _completed_run(weights: str) -> tuple[Path, Done] | None:
    """Returns the completed run whose final weights these are (RUN or RUN/weights), and its DONE marker. Returns None
    for other weights."""
    given = Path(weights)
    run_dir = given.parent if given.name == "weights" else given
    try:
        return run_dir, done_from_json(read_local_text(run_dir / "DONE", most_bytes=_MOST_BYTES))
    except (OSError, ValueError, InvalidDataError):
        return None


def say_other_transform(weights: str, usage: Usage, transform: EvaluationTransform) -> None:
    """Logs a note if the weights name a transform other than the default, and this evaluation prepares images with a
    third one. The EXIF setting (turning images upright) does not count as a difference: the papers' runs are evaluated
    without it, and their recipes say so."""
    own = replace(usage.transform, exif=transform.exif)
    if own not in (transform, replace(DEFAULT_USAGE.transform, exif=transform.exif)):
        log.info(
            "images are prepared otherwise than in the weights' own evaluation, which patchline evaluate %s repeats "
            "if no --data.transform flag is given",
            printable_name(shlex.quote(weights)),
        )
