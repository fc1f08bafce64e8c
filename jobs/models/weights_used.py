"""Which weights of a run a command uses, and whether as the run did: said once, since a run keeps others too."""

import logging
import shlex
from dataclasses import replace
from pathlib import Path

from pipeline.models.weights.usage import DEFAULT_USAGE, Usage
from pipeline.shared_settings import EvaluationTransform
from pipeline.training.saving.finish import done_from_json
from pipeline.training.summary import better_checkpoint
from shards.errors import InvalidDataError
from shards.local_file import read_local_text
from shards.output.terminal import printable_name

log = logging.getLogger(__name__)
_MOST_BYTES = 16 << 20


def say_weights_used(weights: str, *, scored: str = "") -> None:
    """Logs the step of a finished run's weights, and the kept checkpoint that scored better, if there is one. Warns if
    `scored`, the fingerprint of a dataset, is of one that the run was trained on.

    `weights` is a run directory or its weights folder. Nothing is said of other folders, which do not know their run.
    """
    given = Path(weights)
    run_dir = given.parent if given.name == "weights" else given
    try:
        done = done_from_json(read_local_text(run_dir / "DONE", most_bytes=_MOST_BYTES))
    except (OSError, ValueError, InvalidDataError):
        return
    kind = "averaged weights" if done.job.ema_decay else "weights"
    lines = [f"{run_dir}: {kind} of step {done.step:,}, its last", *better_checkpoint(run_dir, step=done.step)]
    log.info("%s", "\n".join(printable_name(line) for line in lines))
    trained_on = done.position.dataset
    if scored and scored in ((trained_on,) if isinstance(trained_on, str) else trained_on):
        log.warning("the run was trained on this dataset, so its accuracy here says nothing about new images")


def say_other_transform(weights: str, usage: Usage, transform: EvaluationTransform) -> None:
    """Says so if this evaluation prepares images otherwise than the weights' own. Being upright is no difference: the
    papers' runs are evaluated without, and their recipes say so."""
    own = replace(usage.transform, exif=transform.exif)
    if own not in (transform, replace(DEFAULT_USAGE.transform, exif=transform.exif)):
        log.info(
            "images are prepared otherwise than in the weights' own evaluation, which patchline evaluate %s repeats "
            "if no --data.transform flag is given",
            printable_name(shlex.quote(weights)),
        )
