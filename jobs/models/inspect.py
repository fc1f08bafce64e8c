"""`patchline inspect`: what a model has learned, as pictures: filters, positions, and where attention looks."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jobs import exit_codes
from jobs.out_file import write_out
from jobs.output import put
from pipeline.config_values import Device
from pipeline.runs.facts import read_facts
from shards.errors import UserError
from shards.output.terminal import printable_name
from shards.schema.config_values import Range, refuse_wrong_values

log = logging.getLogger(__name__)
_KINDS = (".jpg", ".jpeg", ".png", ".webp")
_FACTS, FOLDER, _CURVES = "inspect.json", "inspect", "tensorboard"


@dataclass(frozen=True, kw_only=True)
class InspectJob:
    """Which weights to look into, and on which images."""

    weights: str = ""
    """Weights folder (RUN/weights), or the run directory."""
    images: str = ""
    """Folder of JPEG, PNG or WebP files to show attention on; empty: only figures that need no image."""
    out: str = ""
    """Folder for the figures and inspect.json; empty: inspect/ in the run directory or weights folder."""
    max_images: Annotated[int, Range(1, 4096)] = 128
    """Images to average attention distances over, the first of the folder by name; the paper has 128."""
    resample_to: Annotated[int, Range(0, 16_384, zero="384/224 of the model's size")] = 0
    """Image size in pixels to show resampled position embeddings for; 0: 384/224 of the model's size."""
    device: Device = "auto"
    """Where to compute; auto: the GPU if there is one, else the CPU."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")


def run(job: InspectJob) -> int:
    """Writes the figures and inspect.json, and prints their names."""
    if not job.weights:
        raise UserError("WEIGHTS is missing: patchline inspect RUN --images DIR")
    paths = _image_files(job)
    from pipeline.evaluation.predictor import load_model  # torch takes seconds to load, help must not  # noqa: PLC0415
    from pipeline.inspection.model_figures import (  # noqa: PLC0415
        draw_attention,
        draw_filters,
        draw_positions,
        vit_of,
    )

    predictor = load_model(job.weights, device=job.device, classifies=False)
    model, folder = vit_of(predictor, job.weights), _folder(job)
    found = [draw_filters(model, folder), draw_positions(model, folder, resample_to=job.resample_to)]
    if paths:
        found.append(draw_attention(predictor, model, paths, folder))
    else:
        log.info("no --images, so there are no figures of attention")
    files = [name for one in found for name in one.pop("files", [])]
    facts = {key: value for one in found for key, value in one.items()}
    facts = {"weights": job.weights, "model": predictor.config.name, "files": files, **facts}
    data = json.dumps(facts, indent=1, allow_nan=False).encode() + b"\n"
    write_out(folder / _FACTS, data, todo="give another --out")
    if _is_of_run(folder):
        _show_in_tensorboard(folder, [name for name in files if name.endswith(".png")])
    put("".join(f"{printable_name(str(folder / name))}\n" for name in (*files, _FACTS)))
    return exit_codes.DONE


def _is_of_run(folder: Path) -> bool:
    """Whether the figures are in a run directory, which has its curves beside them."""
    return folder.name == FOLDER and (folder.parent / _CURVES).is_dir()


def _show_in_tensorboard(folder: Path, names: list[str]) -> None:
    """The figures at the run's last step, beside its curves."""
    from pipeline.training.reporting.metrics import show_files  # noqa: PLC0415 - as above

    step = read_facts(folder.parent, num_steps=None, is_scored=False).step or 0
    show_files(folder.parent / _CURVES / FOLDER, [folder / name for name in names], step=step)


def _image_files(job: InspectJob) -> list[Path]:
    """The folder's images by name, at most as many as asked for. UserError if it has none."""
    if not job.images:
        return []
    folder = Path(job.images)
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _KINDS)
    except OSError as error:
        raise UserError(f"--images is {job.images!r}: {error.strerror}; give a folder of images") from error
    if not found:
        raise UserError(
            f"--images is {job.images!r}, which has no image; allowed: a folder of {', '.join(_KINDS)} files"
        )
    return found[: job.max_images]


def _folder(job: InspectJob) -> Path:
    """The folder of the figures, which is made if it is missing. UserError if it cannot be made."""
    given = Path(job.weights)
    folder = Path(job.out) if job.out else (given.parent if given.name == "weights" else given) / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out is {str(folder)!r}: {error.strerror}; give a folder that can be written to") from error
    return folder
