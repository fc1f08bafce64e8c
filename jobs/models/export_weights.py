"""`patchline export`: a run's weights for vision_transformer, big_vision, timm or Hugging Face."""

import logging
from pathlib import Path

from jobs import exit_codes
from jobs.models.import_weights import refuse_misplaced
from jobs.models.model_card import FILE_NAME, IN_FOLDERS, Exported, card_text, training_of
from jobs.output import write_to
from jobs.record import write_record
from jobs.settings.models import ExportJob
from pipeline.models.conversion.convert import changed, open_for_use, save_as, usage_at
from pipeline.models.flops import num_parameters
from shards.errors import UserError

__all__ = ["ExportJob", "run"]

log = logging.getLogger(__name__)


def run(job: ExportJob, *, overwrite: bool = False) -> int:
    """Writes a file or folder, whole or not at all, and MODEL_CARD.md in a folder. `overwrite`: even if --out has other
    content."""
    refuse_misplaced(job.path, job.out, wanted="the folder, or the .npz file,")
    weights = open_for_use(job.path)
    config, tensor = changed(weights, job)
    usage = usage_at(weights, config.image_size)
    labels = () if job.new_head else weights.labels

    exported = Exported(
        name=Path(job.out).resolve().name,
        written=job.format,
        config=config,
        labels=labels,
        usage=usage,
        num_parameters=num_parameters(config),
        is_changed=job.new_head or config != weights.config,
    )
    training = training_of(job.path)

    def write(out: Path) -> None:
        save_as(job.format, out, config=config, labels=labels, tensor=tensor, usage=usage)
        if job.format in IN_FOLDERS:
            _write_card(out / FILE_NAME, card_text(exported, training))

    write_to(Path(job.out), write, overwrite=overwrite)
    if job.run_dir:
        write_record(Path(job.run_dir), stage="export", job=job)
    log.info("%s: %s at %d px, format %s", job.out, config.name, config.image_size, job.format)
    transform = usage.transform
    is_plain, is_area = transform.filter == "bilinear" and not transform.antialias, transform.filter == "area"
    library = {"timm": "timm", "hugging_face": "transformers"}.get(job.format)
    if (library and is_plain) or (library == "transformers" and is_area):
        log.info(
            "%s resizes images with antialiasing, and this run's evaluation %s: some predictions will differ from "
            "those of patchline evaluate",
            library,
            "without" if is_plain else "by areas",
        )
    if library and transform.border:
        log.warning(
            "%s cuts off no border, and this run's evaluation cuts off %d pixels at each side: crop images before",
            library,
            transform.border,
        )
    return exit_codes.DONE


def _write_card(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}; give another --out") from error
