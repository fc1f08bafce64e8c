"""`patchline verify`: reads a dataset back and says what is wrong with it, and where."""

import logging
from dataclasses import dataclass
from pathlib import Path

from jobs.record import write_record
from shards.errors import UserError
from shards.verify import verify_dataset

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VerifyJob:
    """The dataset at `url`. `deep` decodes every image as well. `run_dir`: where job.yaml goes (empty: nowhere)."""

    url: str = ""
    deep: bool = False
    run_dir: str = ""


def run(job: VerifyJob) -> int:
    """0 where nothing is wrong, 1 with the faults listed."""
    if not job.url:
        raise UserError("the dataset's URL is missing; give a folder or s3://bucket/prefix")
    if job.run_dir:
        write_record(Path(job.run_dir), stage="verify", job=job)
    faults = verify_dataset(job.url, deep=job.deep)
    for fault in faults:
        log.error("%s: %s", fault.where, fault.what)
    if faults:
        log.error("%s: %d faults", job.url, len(faults))
        return 1
    log.info("%s: no fault found%s", job.url, ", every image decodes" if job.deep else "")
    return 0
