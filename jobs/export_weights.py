"""`patchline export`: a run's weights for vision_transformer, big_vision, timm or Hugging Face."""

import logging
from dataclasses import dataclass
from pathlib import Path

from jobs import exit_codes
from jobs.record import write_record
from pipeline.models.exchange.convert import Change, Format, changed, save_as
from pipeline.models.pos_embed import Mode
from pipeline.models.weights import open_weights
from shards.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExportJob:
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
    image_size: int | None = None
    resample: Mode = "paper"
    new_head: bool = False
    num_classes: int | None = None
    run_dir: str = ""

    def change(self) -> Change:
        """What becomes different."""
        return Change(
            image_size=self.image_size,
            num_classes=self.num_classes,
            new_head=self.new_head,
            resample=self.resample,
        )


def run(job: ExportJob) -> int:
    """0 once file or folder is whole."""
    if not job.out:
        raise UserError("--out is missing: give the folder, or the .npz file, that the weights go to")
    weights = open_weights(job.path)
    config, tensor = changed(weights, job.change())
    labels = () if job.new_head else weights.labels
    if Path(job.out).resolve() == Path(job.path).resolve():
        raise UserError(f"--out is {job.out!r}, where the weights are read from; give another")
    if job.run_dir:
        write_record(Path(job.run_dir), stage="export", job=job)
    save_as(job.format, Path(job.out), config=config, labels=labels, tensor=tensor)
    log.info("%s: %s at %d px, format %s", job.out, config.name, config.image_size, job.format)
    return exit_codes.DONE
