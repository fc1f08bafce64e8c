"""`patchline export`: a run's weights for vision_transformer, big_vision, timm or Hugging Face."""

import logging
from dataclasses import dataclass
from pathlib import Path

from jobs import exit_codes
from jobs.import_weights import refuse_misplaced
from jobs.placing import write_to
from jobs.record import write_record
from pipeline.models.exchange.convert import Change, Format, changed, save_as
from pipeline.models.weights import open_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExportJob(Change):
    """The weights folder at `path` (RUN/weights), written to `out` in a `format`.

    `vision_transformer` and `big_vision` are .npz files, the others folders with config.json and model.safetensors:
    `timm` for timm.create_model("local-dir:OUT"), `hugging_face` for ViTForImageClassification.from_pretrained(OUT),
    `patchline` for our own. `image_size`: position embeddings are resampled for it, as `resample` says. `new_head`:
    the head, and the hidden layer before it, are dropped and one of zeros for `num_classes` takes their place.
    `run_dir`: where job.yaml goes (empty: nowhere).
    """

    path: str = ""
    out: str = ""
    format: Format = "hugging_face"
    run_dir: str = ""


def run(job: ExportJob, *, overwrite: bool = False) -> int:
    """0 once file or folder is whole. `overwrite`: whatever else is there."""
    refuse_misplaced(job.path, job.out, wanted="the folder, or the .npz file,")
    weights = open_weights(job.path)
    config, tensor = changed(weights, job)
    labels = () if job.new_head else weights.labels

    def write(out: Path) -> None:
        save_as(job.format, out, config=config, labels=labels, tensor=tensor)

    write_to(Path(job.out), write, overwrite=overwrite)
    if job.run_dir:
        write_record(Path(job.run_dir), stage="export", job=job)
    log.info("%s: %s at %d px, format %s", job.out, config.name, config.image_size, job.format)
    return exit_codes.DONE
