"""Rank files are read in few ranges of whole parts, and no byte is used before its checksum and place were compared."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints import rank_file_in
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.commit import draft_manifest, with_reports
from pipeline.checkpoints.manifest import CheckpointId, CheckpointManifest, FragmentLocation, LogicalTensor
from pipeline.checkpoints.rank_file_in import FilePieces, PartRange, RankFiles, Wanted, plan_ranges
from pipeline.checkpoints.rank_file_out import PartDigests, RankReport
from pipeline.checkpoints.saves import lay_out
from pipeline.models import ModelConfig, shapes_of
from pipeline.training.saving.save import saved_job
from shards.errors import StorageError
from shards.store import LocalStore
from tests.rigs.positions import position_at

NAMES = ("rank-00000.safetensors", "rank-00001.safetensors")
PART_BYTES = 64
SIZES = {"a": 8, "b": 64}
PART, MOST = 1 << 20, 16 << 20
H14 = ModelConfig(name="vit_h14", image_size=224, num_classes=18291)
STATES = 3  # a master and two moments


def fragment(name: str, start: int, length: int) -> Fragment:
    values = torch.arange(start, start + length, dtype=torch.float32)
    return Fragment(name=name, start=start, length=length, slots={"master": values, "exp_avg": -values})


def saved(folder: Path) -> CheckpointManifest:
    """A checkpoint of two ranks: "a" is cut between them, "b" is the second rank's."""
    reports = []
    for name, own in zip(NAMES, ([fragment("a", 0, 30)], [fragment("a", 30, 70), fragment("b", 0, 5)]), strict=True):
        laid_out, digests = lay_out(own), PartDigests(PART_BYTES)
        data = b"".join(laid_out.parts())
        digests.update(memoryview(data))
        file = folder / "step-00000007/attempt-0001-a" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        reports.append(RankReport(save=1, file=name, record=digests.record(), pieces=laid_out.pieces))
    draft = draft_manifest(
        CheckpointId(step=7, attempt="0001-a"),
        shapes={"a": (10, 10), "b": (5,)},
        position=position_at(7),
        num_updates=7,
        job=saved_job(digits_smoke()),
        record={},
    )
    return with_reports(draft, reports)


def file_of(folder: Path, name: str = NAMES[0]) -> Path:
    return folder / "step-00000007/attempt-0001-a" / name


def with_data(manifest: CheckpointManifest, folder: Path, data: bytes) -> CheckpointManifest:
    """The first file has other bytes, whose checksums the manifest knows."""
    file_of(folder).write_bytes(data)
    digests = PartDigests(PART_BYTES)
    digests.update(memoryview(data))
    return replace(manifest, files=manifest.files | {NAMES[0]: digests.record()})


@pytest.mark.parametrize("held", [1 << 30, 200, 0])
@pytest.mark.parametrize("at_once", [64 << 20, 100, 1])
def test_tensors_read_back(tmp_path: Path, held: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file_in, "_MOST_HELD_BYTES", max(held, PART_BYTES))
    monkeypatch.setattr(rank_file_in, "READ_BYTES", at_once)
    manifest, store = saved(tmp_path), LocalStore(str(tmp_path))
    files = RankFiles(store, manifest)
    for name in NAMES:
        files.verify(name)
    assert torch.equal(files.tensor("a", slot="master"), torch.arange(100.0).reshape(10, 10))
    assert torch.equal(files.tensor("b", slot="exp_avg"), -torch.arange(5.0))
    target = torch.zeros(9)
    files.fill([Wanted(location=manifest.tensors["a"].slots["exp_avg"][1], first=41, target=target)])
    assert torch.equal(target, -torch.arange(41.0, 50.0))
    assert files._held_bytes == sum(map(len, files._held.values())) <= max(held, PART_BYTES)


def test_what_was_verified_is_not_read_again(tmp_path: Path) -> None:
    manifest, store = saved(tmp_path), LocalStore(str(tmp_path))
    files = RankFiles(store, manifest)
    for name in NAMES:
        files.verify(name)
        file_of(tmp_path, name).unlink()
    assert torch.equal(files.tensor("a", slot="master").flatten(), torch.arange(100.0))


def test_what_is_read_again_is_compared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file_in, "_MOST_HELD_BYTES", PART_BYTES)
    manifest, store = saved(tmp_path), LocalStore(str(tmp_path))
    files = RankFiles(store, manifest)
    files.verify(NAMES[0])
    data = bytearray(file_of(tmp_path).read_bytes())
    data[-1] ^= 1
    file_of(tmp_path).write_bytes(data)
    with pytest.raises(StorageError, match=r"rank-00000\.safetensors does not have .*; it changed after"):
        files.tensor("a", slot="exp_avg")
    file_of(tmp_path).write_bytes(data[:-8])
    with pytest.raises(StorageError, match="it changed after it was verified"):
        files.tensor("a", slot="exp_avg")
    file_of(tmp_path).unlink()
    with pytest.raises(StorageError, match="it changed after it was verified"):
        files.tensor("a", slot="exp_avg")


def test_every_bit_of_a_file_counts(tmp_path: Path) -> None:
    manifest, store = saved(tmp_path), LocalStore(str(tmp_path))
    file = file_of(tmp_path, NAMES[1])
    data = file.read_bytes()
    for bit in range(0, 8 * len(data), 31):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(ValueError, match="does not have the bytes its manifest promises"):
            RankFiles(store, manifest).verify(NAMES[1])


def header(**tensors: Any) -> bytes:
    """A file with this header, and 240 bytes after it."""
    text = json.dumps({f"{slot}:a": value for slot, value in tensors.items()}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(240)


def tensor(begin: int, **values: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [30], "data_offsets": [begin, begin + 120], **values}


def manifest_of(folder: Path, data: bytes) -> CheckpointManifest:
    """Of a checkpoint with these bytes in its only file: two slots of 30 elements behind the header."""
    manifest = with_data(saved(folder), folder, data)
    begin = 8 + int.from_bytes(data[:8], "little") % (1 << 32)
    slots: dict[str, tuple[FragmentLocation, ...]] = {
        slot: (FragmentLocation(file=NAMES[0], offset=begin + offset, start=0, length=30, num_files=1),)
        for slot, offset in (("master", 0), ("exp_avg", 120))
    }
    tensors = {"a": LogicalTensor(shape=(30,), dtype="float32", slots=slots)}
    return replace(manifest, tensors=tensors, files={NAMES[0]: manifest.files[NAMES[0]]})


def test_a_header_of_this_kind_is_accepted(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, header(exp_avg=tensor(120), master=tensor(0)))
    RankFiles(LocalStore(str(tmp_path)), manifest).verify(NAMES[0])


def test_safetensors_writes_what_is_read() -> None:
    """The header that the library itself writes has the fields that are compared here."""
    data = save({"master:a": torch.zeros(30)})
    length = int.from_bytes(data[:8], "little")
    assert json.loads(data[8 : 8 + length]) == {"master:a": tensor(0)}


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """Bytes begin..end-1 of a file."""

    file: str
    begin: int
    end: int


def pieces_at(places: Sequence[ByteRange]) -> FilePieces:
    """These places as pieces, each with a target of its own."""
    names = sorted({place.file for place in places})
    numbers_of = {name: number for number, name in enumerate(names)}
    rows = [(numbers_of[place.file], place.begin, place.end) for place in places]
    files, begins, ends = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    numbers = np.arange(len(rows))
    return FilePieces(names=names, files=files, begins=begins, ends=ends, targets=numbers, ats=np.zeros_like(numbers))


def places() -> st.SearchStrategy[list[ByteRange]]:
    one = st.builds(
        lambda file, begin, length: ByteRange(file=file, begin=begin, end=begin + length),
        st.sampled_from(sorted(SIZES)),
        st.integers(0, 900),
        st.integers(0, 200),
    )
    return st.lists(one, max_size=30)


@given(places(), st.sampled_from([1, 64, 200, 10_000]), st.sampled_from([0, 8, 100, 10_000]))
def test_ranges_hold_all_pieces_and_no_part_twice(pieces: list[ByteRange], most_bytes: int, gap_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_file_in, "_GAP_BYTES", gap_bytes)
        found = list(plan_ranges(pieces_at(pieces), SIZES, most_bytes=most_bytes))
    held = [(each.file, part) for each in found for part in range(each.first, each.end)]
    assert len(held) == len(set(held))
    for number, piece in enumerate(pieces):
        size = SIZES[piece.file]
        needed = {(piece.file, byte // size) for byte in range(piece.begin, piece.end)}
        own = [each for each in found if number in each.pieces.tolist()]
        assert needed <= {(each.file, part) for each in own for part in range(each.first, each.end)}
        assert all(each.file == piece.file for each in own)
    for each in found:
        assert each.pieces.size, "a range that nobody wants"
        assert 0 < each.end - each.first <= max(1, most_bytes // SIZES[each.file])


def test_neighbours_are_one_request_and_distant_pieces_are_two() -> None:
    near = [ByteRange(file="a", begin=begin, end=begin + 4) for begin in (0, 2000, 40)]
    distant = ByteRange(file="a", begin=9 << 20, end=(9 << 20) + 4)
    found = list(plan_ranges(pieces_at([*near, distant]), SIZES, most_bytes=1 << 30))
    assert [(each.first, each.end, each.pieces.tolist()) for each in found] == [
        (0, 251, [0, 2, 1]),
        ((9 << 20) // 8, (9 << 20) // 8 + 1, [3]),
    ]


def zero3_places(num_ranks: int, *, sizes: list[int], slots: range, ranks: range) -> Iterator[tuple[int, ByteRange]]:
    """(tensor, place) of what these ranks have saved in these slots under ZeRO-3: a share of every tensor."""
    for rank in ranks:
        offset = 100_000
        for tensor, size in enumerate(sizes):
            share = -(-size // num_ranks)
            length = max(0, min(share, size - rank * share))
            for slot in range(STATES):
                if slot in slots and length:
                    yield tensor, ByteRange(file=f"rank-{rank:05d}", begin=offset, end=offset + 4 * length)
                offset += 4 * length


def requests(found: list[ByteRange]) -> list[PartRange]:
    return list(plan_ranges(pieces_at(found), {place.file: PART for place in found}, most_bytes=MOST))


def test_the_weights_of_vit_h14_on_512_ranks_take_at_most_2000_requests() -> None:
    """184,000 fragments; in groups of 1 GiB, as tensors_in_order reads them."""
    sizes = [math.prod(shape) for shape in shapes_of(H14).values()]
    found = list(zero3_places(512, sizes=sizes, slots=range(1), ranks=range(512)))
    assert 150_000 < len(found) < 210_000
    groups, total = [0], 0
    for number, size in enumerate(sizes):
        total += 4 * size
        if total > 1 << 30:
            groups.append(number)
            total = 4 * size
    groups.append(len(sizes))
    counts = [
        len(requests([place for tensor, place in found if low <= tensor < high])) for low, high in pairwise(groups)
    ]
    assert sum(counts) <= 2000, counts


@pytest.mark.parametrize(
    ("ranks", "slots", "most"),
    [
        pytest.param(range(64, 128), range(STATES), 128, id="ZeRO-3, 8 ranks: neighbours' files whole"),
        pytest.param(range(512), range(STATES), 1024, id="one rank: all files whole"),
    ],
)
def test_resuming_on_other_ranks_takes_few_requests(ranks: range, slots: range, most: int) -> None:
    sizes = [math.prod(shape) for shape in shapes_of(H14).values()]
    found = [place for _, place in zero3_places(512, sizes=sizes, slots=slots, ranks=ranks)]
    assert len(ranks) <= len(requests(found)) <= most
