"""`patchline import`: converts published .npz, timm or Hugging Face weights into a weights folder."""

import logging
from pathlib import Path

from jobs import exit_codes
from jobs.output import write_to
from jobs.record import refuse_training_run, write_record
from jobs.settings.models import ImportJob
from pipeline.models.config import ModelConfig
from pipeline.models.conversion.convert import changed
from pipeline.models.conversion.open_any import names_of_classes, open_any
from pipeline.models.flops import num_parameters
from pipeline.models.weights.folder import (
    CONFIG_FILE,
    MOST_DESCRIPTION_BYTES,
    Weights,
    said_of,
    save_weights,
    usage_at,
)
from shards.class_names import class_name
from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_text

__all__ = ["ImportJob", "labels_in_file", "refuse_misplaced", "run"]

log = logging.getLogger(__name__)


def run(job: ImportJob, *, overwrite: bool = False) -> int:
    """Writes the weights folder, completely or not at all. The last line of the log lists what was assumed, if
    anything. `overwrite`: write even if --out has other content."""
    refuse_misplaced(job.path, job.out, wanted="the folder")
    if job.run_dir:
        refuse_training_run(Path(job.run_dir), stage="import")
    weights = open_any(job.path, job)
    config, tensor = changed(weights, job)
    labels = _labels(job, weights, config)

    def write(out: Path) -> None:
        save_weights(out, config=config, labels=labels, tensor=tensor, usage=usage_at(weights, config.image_size))

    write_to(Path(job.out), write, overwrite=overwrite)
    if job.run_dir:
        write_record(Path(job.run_dir), stage="import", job=job)
    counts = (config.image_size, num_parameters(config), config.num_classes)
    log.info("%s: %s at %d px, %d parameters, %d classes", job.out, config.name, *counts)
    if weights.assumed:
        flags = ", ".join(each.flag for each in weights.assumed if each.flag)
        override = f"; to override this: {flags}" if flags else ""
        log.info("%s: %s%s", job.out, said_of(weights.assumed), override)
    return exit_codes.DONE


def refuse_misplaced(path: str, out: str, *, wanted: str) -> None:
    """Raises UserError if `out` is missing or would replace what is read: if it is `path`, the weights folder of the
    run at `path`, or the folder of the file at `path`. Also raises it if either path cannot be followed."""
    if not out:
        raise UserError(f"--out is missing: give {wanted} for the weights")
    try:
        source, target = Path(path).resolve(), Path(out).resolve()
        is_of_run = target == source / "weights" and not (source / CONFIG_FILE).is_file()  # if `path` is a run's folder
        is_file, link = source.is_file(), Path(path).parent.resolve()
        target.exists()  # raises OSError if the name is too long or access is denied
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a zero byte
        reason = getattr(error, "strerror", None) or shown_value(str(error))
        what = f"the path {shown_value(path)} or --out {shown_value(out)} cannot be followed ({reason})"
        raise UserError(what, todo="give others") from error
    if target == source or is_of_run:
        raise UserError(f"--out is {out!r}, where the weights are read from; give another")
    if is_file and target in (source.parent, link):
        raise UserError(
            f"--out is {out!r}, the folder that {path!r} is read from, whose files it replaces; give another"
        )


def _labels(job: ImportJob, weights: Weights, config: ModelConfig) -> tuple[str, ...]:
    """Returns the class names in --labels-file. Without it, returns the weights' own names if the head is kept, and
    numbers for a new head."""
    if not job.labels_file:
        if job.new_head:
            return tuple(str(number) for number in range(config.num_classes))
        return names_of_classes(weights, say=True)
    return labels_in_file(job.labels_file, num_classes=config.num_classes)


def labels_in_file(path: str, *, num_classes: int) -> tuple[str, ...]:
    """Returns the names of a head's classes from a file with one name per line. Raises UserError if the file cannot be
    read, or does not have exactly one name for each class, without duplicates."""
    try:
        labels = tuple(map(class_name, read_local_text(path, most_bytes=MOST_DESCRIPTION_BYTES).splitlines()))
    except (OSError, InvalidDataError) as error:
        raise UserError(f"--labels-file {path!r} cannot be read ({error})", todo="give one name per line") from error
    if len(labels) != num_classes or len(set(labels)) != len(labels):
        raise UserError(
            f"--labels-file {path!r} has {len(labels)} names, {len(set(labels))} different ones; "
            f"the head has {num_classes} classes: give as many, each once"
        )
    return labels
