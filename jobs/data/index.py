"""`patchline index`: indexes existing WebDataset tars in place."""

import logging
from dataclasses import fields
from pathlib import Path

from jobs import exit_codes
from jobs.record import write_record
from jobs.settings.data import IndexJob
from shards.adoption.adopt import LABEL_FLAGS, Adoption, adopt
from shards.adoption.foreign_samples import SampleRules, Unlabeled
from shards.adoption.foreign_tar import AdoptSpec
from shards.adoption.tar_lists import find_tars, split_pattern
from shards.errors import UserError
from shards.index import read_labels
from shards.manifest import LABELS_PATH
from shards.output.quantities import plural
from shards.packing.config import DatasetSettings
from shards.packing.merge import class_warnings, class_words, describe, empty_words
from shards.store import open_store

__all__ = ["IndexJob", "index_tars", "run"]

log = logging.getLogger(__name__)


def index_tars(
    url: str,
    *,
    index_url: str = "",
    label_key: str = SampleRules.label_key,
    label_field: str = "",
    unlabeled: Unlabeled = SampleRules.unlabeled,
    split: str = "train",
    workers: int = 1,
) -> None:
    """Makes a dataset from existing WebDataset tars: writes an index beside them or at `index_url`, and leaves the tars
    as they are. `patchline index` does the same and has more settings.

    `url`: a folder or s3://bucket/prefix. The class of an image is the text of its `label_key` member or, if
    `label_field` is given, that field of its json member. Images without one are quarantined, or indexed if `unlabeled`
    is "keep". The function can be called again on the same tars. Raises UserError if there are no tars, or if no images
    or labels in them can be read.
    """
    run(
        IndexJob(
            url=url,
            index_url=index_url,
            label_key=label_key,
            label_field=label_field,
            unlabeled=unlabeled,
            split=split,
            workers=workers,
        )
    )


def run(job: IndexJob) -> int:
    """Indexes the tars, and leaves them as they are. Returns 0 once the manifest is written."""
    if not job.url:
        raise UserError("the URL of the tars is missing; give a folder or s3://bucket/prefix")
    spec = spec_of(job)
    tars_url, pattern = split_pattern(job.url)
    tars = find_tars(tars_url, pattern=pattern, tars_file=job.tars_file)
    if job.run_dir:
        write_record(Path(job.run_dir), stage="index", job=job)
    adoption = Adoption(tars_url=tars_url, index_url=job.index_url or tars_url, tars=tuple(tars), spec=spec)
    manifest = adopt(adoption, workers=job.workers, max_quarantined=job.max_quarantined)
    store = open_store(adoption.index_url)
    describe(store, manifest, job.about())
    names = read_labels(store.read(LABELS_PATH))["name"].to_pylist()
    log.info("%s", class_words(names) if names else "no labels; patchline.train_batches reads such images")
    for warning in [*class_warnings(names, todo=LABEL_FLAGS), *empty_words(store, manifest)]:
        log.warning("%s", warning)
    counts = ((manifest.num_samples, "sample"), (len(manifest.shards), "tar"), (manifest.num_classes, "class"))
    words = (plural(number, noun) for number, noun in counts)
    log.info("%s: %s in %s, %s, %d in quarantine", adoption.index_url, *words, manifest.num_quarantined)
    return exit_codes.DONE


def spec_of(job: IndexJob) -> AdoptSpec:
    """Returns all settings that decide what the index contains."""
    rules = SampleRules(
        image_keys=job.image_keys, label_key=job.label_key, label_field=job.label_field, unlabeled=job.unlabeled
    )
    shared = {field.name: getattr(job, field.name) for field in fields(DatasetSettings)}
    return AdoptSpec(rules=rules, **shared)
