"""`patchline inspect`: draws what a model has learned: filters, positions, attention, and effects of shifts."""

import json
import logging
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import exit_codes
from jobs.models.predict import KINDS, images_below
from jobs.output import put, write_out
from jobs.settings.models import InspectJob
from pipeline.runs.facts import read_facts
from pipeline.shared_settings import METRICS_FILE
from shards.errors import UserError
from shards.output.quantities import plural
from shards.output.terminal import printable_name

if TYPE_CHECKING:
    from pipeline.evaluation.predictor import Predictor

log = logging.getLogger(__name__)
_FACTS, FOLDER = "inspect.json", "inspect"


def run(job: InspectJob) -> int:
    """Writes the figures and inspect.json, and prints their paths. Returns 0, or 1 if some images could not be used.
    Each image that could not be used is logged."""
    paths = image_files(job)
    from pipeline.evaluation.predictor import load_model  # help must not load torch  # noqa: PLC0415
    from pipeline.inspection.model_figures import (  # noqa: PLC0415
        draw_attention,
        draw_filters,
        draw_positions,
        draw_shifts,
    )
    from pipeline.models.vit import ViT  # noqa: PLC0415

    predictor = load_model(job.weights, device=job.device, classifies=False)
    model, found = predictor.model, []
    if not isinstance(model, ViT) and not paths:
        raise UserError(
            f"{job.weights!r} is a {predictor.config.name}, which has neither patches nor attention to show; give "
            "--images DIR for how much its output changes when images move, or a transformer"
        )
    given, paths = len(paths), _usable(predictor, paths)
    folder = _folder(job)
    if isinstance(model, ViT):
        found = [draw_filters(model, folder), draw_positions(model, folder, resample_to=job.resample_to)]
        found += [draw_attention(predictor, model, paths, folder)] if paths else []
    found += [draw_shifts(predictor, paths, folder)] if paths else []
    if not paths:
        log.info("no --images, so there are no figures of attention and of shifts")
    files = [name for one in found for name in one.pop("files", [])]
    facts = {key: value for one in found for key, value in one.items()}
    facts = {"weights": job.weights, "model": predictor.config.name, "files": files, **facts}
    data = json.dumps(facts, indent=1, allow_nan=False).encode() + b"\n"
    write_out(folder / _FACTS, data, todo="give another --out")
    if _is_of_run(folder):
        _show_in_tensorboard(folder, [name for name in files if name.endswith(".png")])
    put("".join(f"{printable_name(str(folder / name))}\n" for name in (*files, _FACTS)))
    return exit_codes.FAULTS_FOUND if len(paths) < given else exit_codes.DONE


def _usable(predictor: "Predictor", paths: list[Path]) -> list[Path]:
    """Returns the images that can be used, and logs the others. Raises UserError if there are none among them."""
    usable = []
    for path in paths:
        try:
            predictor.view(path)
        except UserError as error:
            log.error("%s", printable_name(str(error)))
        else:
            usable.append(path)
    if len(usable) < len(paths):
        log.warning("%d of %s could not be used", len(paths) - len(usable), plural(len(paths), "image"))
    if paths and not usable:
        raise UserError("none of the images can be used", todo="give --images a folder of other images")
    return usable


def _is_of_run(folder: Path) -> bool:
    """Whether the folder of the figures is RUN/inspect, and RUN has curves for TensorBoard."""
    return folder.name == FOLDER and (folder.parent / METRICS_FILE).is_file()


def _show_in_tensorboard(folder: Path, names: list[str]) -> None:
    """Adds the figures to TensorBoard at the run's last step, as a separate run RUN/inspect."""
    from pipeline.training.reporting.board import show_files  # noqa: PLC0415 - as above

    step = read_facts(folder.parent, num_steps=None, is_scored=False).step or 0
    show_files(folder, [folder / name for name in names], step=step)


def image_files(job: InspectJob) -> list[Path]:
    """Returns the folder's images in the order of their names, at most `max_images`. Returns an empty list without
    --images. Raises UserError if the folder has none."""
    if not job.images:
        return []
    try:
        found = list(islice(images_below(job.images), job.max_images))
    except OSError as error:
        raise UserError(f"--images is {job.images!r}: {error.strerror}", todo="give a folder of images") from error
    if not found:
        raise UserError(
            f"--images is {job.images!r}, which has no image; allowed: a folder of {', '.join(KINDS)} files, also in "
            "folders below it"
        )
    return found


def _folder(job: InspectJob) -> Path:
    """Returns the folder of the figures; makes it if it is missing. Raises UserError if it cannot be made."""
    given = Path(job.weights)
    folder = Path(job.out) if job.out else (given.parent if given.name == "weights" else given) / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out is {str(folder)!r}: {error.strerror}", todo="give a folder that can be written to"
        ) from error
    return folder
