"""Samples that could not be used: listed with source and reason, counted, and too many stop the run."""

import json
import threading
from pathlib import Path

from shards.errors import WillNotSucceedError
from shards.read import RawSample


class Quarantine:
    """A rank's list of replaced samples: appended to RUN/quarantine.jsonl, one object a line.

    Above `max_share` of the samples read (and above ten) it raises WillNotSucceedError with the list's path.
    """

    _ALWAYS_ALLOWED = 10

    def __init__(self, path: Path, *, max_share: float) -> None:
        self.path, self.max_share = path, max_share
        self.num_read = self.num_replaced = 0
        self._lock = threading.Lock()

    def count(self, num_samples: int) -> None:
        """Counts samples that were read."""
        with self._lock:
            self.num_read += num_samples

    def replace(self, sample: RawSample, *, reason: str, substitute: int) -> None:
        """Records that `substitute` takes the place of `sample`."""
        line = {
            "sample_id": sample.sample_id,
            "source": sample.source,
            "reason": reason,
            "substitute": substitute,
        }
        with self._lock:
            self.num_replaced += 1
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            limit = max(self._ALWAYS_ALLOWED, self.max_share * self.num_read)
            if self.num_replaced > limit:
                raise WillNotSucceedError(
                    f"{self.num_replaced} of {self.num_read} samples could not be used, more than the allowed "
                    f"{self.max_share:.2%}; they are listed in {self.path}; mend or repack the dataset"
                )
