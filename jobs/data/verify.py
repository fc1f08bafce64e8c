"""`patchline verify`: reads a dataset back and lists every fault and where it is."""

import logging
from pathlib import Path

from jobs import exit_codes
from jobs.record import write_record
from jobs.settings.data import VerifyJob
from shards.verifying.verify import verify_dataset

__all__ = ["VerifyJob", "run"]

log = logging.getLogger(__name__)


def run(job: VerifyJob) -> int:
    """Checks the dataset. Returns 0 if nothing is wrong; otherwise lists the faults and returns 1."""
    if job.run_dir:
        write_record(Path(job.run_dir), stage="verify", job=job)
    faults = verify_dataset(job.url, deep=job.deep, workers=job.workers)
    for fault in faults:
        log.error("%s: %s", fault.where, fault.what)
    if faults:
        log.error("%s: %d faults", job.url, len(faults))
        return exit_codes.FAULTS_FOUND
    log.info("%s: no fault found%s", job.url, ", every image decodes" if job.deep else "")
    return exit_codes.DONE
