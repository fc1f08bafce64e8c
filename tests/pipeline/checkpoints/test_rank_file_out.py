"""A rank's file, its parts' digests and its report: on disk and in a bucket, from shared memory or tensor by tensor."""

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import pytest

from pipeline.checkpoints.rank_file_out import (
    PART_BYTES,
    PartDigests,
    Piece,
    RankReport,
    read_report,
    report_to_json,
    write_rank_file,
)
from shards.files.typed_json import sealed, unsealed
from shards.store import Store, open_store

FOLDER = "step-00000004/attempt-0001-a"
DATA = bytes(range(251)) * 5000  # more than a part
PIECES: tuple[Piece, ...] = (("head.weight", "master", 8, 0, 14),)


class Bytes:
    """A rank file in memory, as a file, too, or not."""

    pieces = PIECES

    def __init__(self, *, is_file: bool) -> None:
        self._is_file = is_file

    def parts(self) -> Iterable[memoryview]:
        yield from (memoryview(DATA)[:8], memoryview(DATA)[8:100], memoryview(DATA)[100:])

    def file(self) -> BinaryIO | None:
        return io.BytesIO(DATA) if self._is_file else None


def written(store: Store, *, is_file: bool = True) -> tuple[RankReport, int]:
    calls: list[None] = []
    steps = write_rank_file(store, FOLDER, Bytes(is_file=is_file), rank=7, save=2, progress=lambda: calls.append(None))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, len(calls)


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_the_report_says_what_was_written(
    kind: str, is_file: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = open_store(str(tmp_path) if kind == "folder" else f"s3://{request.getfixturevalue('s3_bucket')}/run")
    report, num_calls = written(store, is_file=is_file)
    assert store.read(f"{FOLDER}/rank-00007.safetensors") == DATA
    digests = [
        hashlib.sha256(DATA[first : first + PART_BYTES]).hexdigest() for first in range(0, len(DATA), PART_BYTES)
    ]
    assert (report.record.num_bytes, list(report.record.sha256)) == (len(DATA), digests)
    assert read_report(store, FOLDER, rank=7, save=2) == report
    assert report.pieces == PIECES
    assert num_calls >= 3, "a writer that works is heard of"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param((b'"save": 2', b'"save": 1'), "is about 'rank-00007.safetensors' of save 1", id="an earlier try"),
        pytest.param((b"rank-00007.s", b"rank-00006.s"), "is about 'rank-00006.safetensors'", id="another rank"),
        pytest.param((b'"num_bytes": ', b'"num_bytes": -'), "record.num_bytes is -", id="a size below 0"),
        pytest.param((b"[8, 0, 14]", b"[]"), "", id="unchanged"),
        pytest.param((b", 14]", b', "14"]'), "pieces.0.4 is '14'", id="text for a number"),
    ],
)
def test_a_report_of_something_else_is_refused(tmp_path: Path, change: tuple[bytes, bytes], reason: str) -> None:
    store = open_store(str(tmp_path))
    report, _ = written(store)
    store.write(f"{FOLDER}/rank-00007.json", sealed(unsealed(report_to_json(report)).replace(*change)))
    if not reason:
        assert read_report(store, FOLDER, rank=7, save=2) == report
        return
    with pytest.raises(ValueError, match=f"rank-00007.json.*{reason}"):
        read_report(store, FOLDER, rank=7, save=2)


def test_a_changed_bit_is_found(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    written(store)
    path = tmp_path / FOLDER / "rank-00007.json"
    path.write_bytes(path.read_bytes().replace(b'"save": 2', b'"save": 3'))
    with pytest.raises(ValueError, match="its digest does not fit"):
        read_report(store, FOLDER, rank=7, save=3)


@pytest.mark.parametrize("pieces", [(1, 2, 3), (4, 4), (9,), (0, 4, 0), (), (100, 1)])
def test_each_part_has_its_digest_however_the_file_is_written(pieces: tuple[int, ...]) -> None:
    data = bytes(range(sum(pieces)))
    digests, begin = PartDigests(4), 0
    for size in pieces:
        digests.update(memoryview(data)[begin : begin + size])
        begin += size
    expected = [hashlib.sha256(data[first : first + 4]).hexdigest() for first in range(0, len(data), 4)]
    assert (digests.num_bytes, digests.part_bytes, digests.sha256()) == (len(data), 4, tuple(expected))
