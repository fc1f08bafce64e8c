"""Lists samples that could not be used, with source and reason, and stops the run if there are too many."""

import logging
import threading
from functools import partial
from pathlib import Path

from shards.errors import WillNotSucceedError
from shards.files.local_files import KeptWrites, append_line
from shards.output.terminal import printable_name
from shards.reading.samples import RawSample

log = logging.getLogger(__name__)

_FOLDER = "quarantine"


def quarantine_path(run_dir: Path, *, rank: int) -> Path:
    """Returns the path of a rank's own list in a run directory. Not every file system lets several hosts append to one
    file."""
    return run_dir / _FOLDER / f"rank-{rank:05d}.jsonl"


class Quarantine:
    """A rank's list of replaced samples, in a JSON Lines file that no other rank writes.

    A sample that is replaced again in a later epoch is counted again, but this process does not list it again; a
    continued run may list it once more. `replace` raises WillNotSucceedError if more than ten samples were replaced,
    and they are more than `max_share` of the samples that this rank has read since it started. Samples of other ranks,
    of earlier attempts and of lost shards do not count: `lost_shards.py` checks the share of lost shards.
    """

    _ALWAYS_ALLOWED = 10

    def __init__(self, path: Path, *, max_share: float) -> None:
        self.path, self.max_share = path, max_share
        self.num_read = self.num_replaced = self._num_lost = 0
        self._writes = KeptWrites(path)
        self._listed: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def count(self, num_samples: int) -> None:
        """Counts samples that were read."""
        with self._lock:
            self.num_read += num_samples

    def replace(self, sample: RawSample, *, url: str, substitute: int, is_first: bool, is_lost: bool = False) -> None:
        """Records that `substitute` replaces `sample`, which has a `fault`, in the dataset at `url`.

        `is_first`: whether `sample` comes from the sample order and is not itself a substitute. An unusable substitute
        is listed but not counted. `is_lost`: whether the sample's shard is lost.
        """
        line = {
            "url": url,
            "sample_id": sample.sample_id,
            "source": sample.source,
            "reason": sample.fault,
            "substitute": substitute,
        }
        source, place = printable_name(sample.source), printable_name(url)
        with self._lock:
            self.num_replaced += is_first
            self._num_lost += is_first and is_lost
            if (url, sample.sample_id) not in self._listed:
                self._writes.do(partial(_append, self.path, line))
                self._listed.add((url, sample.sample_id))
            if self.num_replaced == 1 and is_first:
                log.warning(
                    "sample %d (%s) of %s cannot be used and is replaced: %s; this one and those to come are listed "
                    "in %s",
                    sample.sample_id,
                    source,
                    place,
                    sample.fault,
                    self.path,
                )
            limit = max(self._ALWAYS_ALLOWED, self.max_share * self.num_read)
            if self.num_replaced - self._num_lost > limit:
                raise WillNotSucceedError(
                    f"{self.num_replaced} of {self.num_read} samples could not be used, more than the allowed "
                    f"{self.max_share:.2%}, the last of them sample {sample.sample_id} ({source}) of {place}: "
                    f"{sample.fault}; they are listed in {self.path}; mend or repack the dataset, or allow more by "
                    "--data.max-quarantined (in Python, DataConfig(max_quarantined=...))"
                )


def _append(path: Path, line: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)  # the parent is not created: this fails if the run directory was deleted
    append_line(path, line)
