"""Parts and their digests do not depend on how a file is written."""

import hashlib

import pytest

from pipeline.checkpoints.part_digests import PartDigests


@pytest.mark.parametrize("pieces", [(1, 2, 3), (4, 4), (9,), (0, 4, 0), (), (100, 1)])
def test_each_part_has_its_digest_however_the_file_is_written(pieces: tuple[int, ...]) -> None:
    data = bytes(range(sum(pieces)))
    digests, begin = PartDigests(4), 0
    for size in pieces:
        digests.update(memoryview(data)[begin : begin + size])
        begin += size
    expected = [hashlib.sha256(data[first : first + 4]).hexdigest() for first in range(0, len(data), 4)]
    assert digests.record() == {"num_bytes": len(data), "part_bytes": 4, "sha256": expected}
