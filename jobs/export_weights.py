"""`patchline export`: a run's weights for vision_transformer, big_vision, timm or Hugging Face."""

import logging
from pathlib import Path

from jobs import exit_codes
from jobs.import_weights import refuse_misplaced
from jobs.model_jobs import ExportJob
from jobs.placing import write_to
from jobs.record import write_record
from pipeline.models.conversion.convert import changed, save_as
from pipeline.models.weights import open_weights

__all__ = ["ExportJob", "run"]

log = logging.getLogger(__name__)


def run(job: ExportJob, *, overwrite: bool = False) -> int:
    """Writes a file or folder, whole or not at all. `overwrite`: even if --out has other content."""
    refuse_misplaced(job.path, job.out, wanted="the folder, or the .npz file,")
    weights = open_weights(job.path)
    config, tensor = changed(weights, job)
    labels = () if job.new_head else weights.labels

    def write(out: Path) -> None:
        save_as(job.format, out, config=config, labels=labels, tensor=tensor, usage=weights.usage)

    write_to(Path(job.out), write, overwrite=overwrite)
    if job.run_dir:
        write_record(Path(job.run_dir), stage="export", job=job)
    log.info("%s: %s at %d px, format %s", job.out, config.name, config.image_size, job.format)
    return exit_codes.DONE
