"""The checksums of a rank file, made while it is written."""

import hashlib
from typing import Any

PART_BYTES = 1 << 20  # of a file, with a checksum of its own


class PartDigests:
    """The sha256 of each part of a file, which is written in pieces of any size."""

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self.part_bytes, self.num_bytes = part_bytes, 0
        self._done: list[str] = []
        self._digest = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        """More bytes of the file."""
        begin = 0
        while begin < len(data):
            end = min(len(data), begin + self.part_bytes - self.num_bytes % self.part_bytes)
            self._digest.update(data[begin:end])
            self.num_bytes += end - begin
            begin = end
            if self.num_bytes % self.part_bytes == 0:
                self._done.append(self._digest.hexdigest())
                self._digest = hashlib.sha256()

    def record(self) -> dict[str, Any]:
        """The fields of the file's FileRecord."""
        last = [self._digest.hexdigest()] if self.num_bytes % self.part_bytes else []
        return {"num_bytes": self.num_bytes, "part_bytes": self.part_bytes, "sha256": [*self._done, *last]}
