"""`patchline index`: WebDataset tars made by others become a dataset where they lie."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from jobs.record import write_record
from shards.adoption.adopt import Adoption, adopt
from shards.adoption.foreign_samples import SampleRules
from shards.adoption.foreign_tar import AdoptSpec
from shards.adoption.tar_lists import find_tars, split_pattern
from shards.errors import UserError
from shards.images.image_header import Limits
from shards.packing.about import About, describe
from shards.store import open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class IndexJob:
    """The tars at `url`: all *.tar below it, or those of a pattern such as `DIR/train-{0000..1023}.tar`, or those that
    `tars_file` names, one path below `url` a line.

    The index goes to `index_url` (empty: beside the tars). The image is the first member that has one of the
    suffixes `image_keys`; the label, an integer or a name, is the text of the member `label_key`, or, where
    `label_field` is given, that field of the member json (a list: several labels). `labels_file` has one class name a
    line, in the order of their ids. `description` and `licence` are texts for the manifest and the dataset's card; they
    may be given for a dataset that is indexed already, too. `max_quarantined` is the share of samples that may be
    refused. `run_dir`: where job.yaml goes (empty: nowhere).
    """

    url: str = ""
    index_url: str = ""
    tars_file: str = ""
    split: str = "train"
    image_keys: tuple[str, ...] = SampleRules.image_keys
    label_key: str = SampleRules.label_key
    label_field: str = ""
    labels_file: str = ""
    description: str = ""
    licence: str = ""
    samples_per_block: int = 64
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    max_quarantined: float = 0.01
    run_dir: str = ""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"--workers is {self.workers}; allowed are 1 and more")
        if not 0 <= self.max_quarantined <= 1:
            raise UserError(f"--max-quarantined is {self.max_quarantined:g}; allowed are 0 to 1")
        self.about()

    def about(self) -> About:
        """What the manifest says to people."""
        return About(description=self.description, licence=self.licence)

    def spec(self) -> AdoptSpec:
        """What decides what is adopted."""
        rules = SampleRules(image_keys=self.image_keys, label_key=self.label_key, label_field=self.label_field)
        return AdoptSpec(
            rules=rules,
            split=self.split,
            samples_per_block=self.samples_per_block,
            labels_file=self.labels_file,
            limits=self.limits,
        )


def run(job: IndexJob) -> int:
    """0 once the manifest is written; the tars stay as they are."""
    if not job.url:
        raise UserError("the URL of the tars is missing; give a folder or s3://bucket/prefix")
    spec = job.spec()
    tars_url, pattern = split_pattern(job.url)
    tars = find_tars(tars_url, pattern=pattern, tars_file=job.tars_file)
    if job.run_dir:
        write_record(Path(job.run_dir), stage="index", job=job)
    adoption = Adoption(tars_url=tars_url, index_url=job.index_url or tars_url, tars=tuple(tars), spec=spec)
    manifest = adopt(adoption, workers=job.workers, max_quarantined=job.max_quarantined)
    describe(open_store(adoption.index_url), manifest, job.about())
    counts = (manifest.num_samples, len(manifest.shards), manifest.num_classes, manifest.num_quarantined)
    log.info("%s: %d samples in %d tars, %d classes, %d in quarantine", adoption.index_url, *counts)
    return 0
