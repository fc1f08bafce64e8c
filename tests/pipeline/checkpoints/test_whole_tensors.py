"""The last stage of a run reads its checkpoint in few requests, in bounded memory, and uses no byte unverified."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints import rank_file_in
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.commit import draft_manifest, with_reports
from pipeline.checkpoints.manifest import CheckpointId, CheckpointManifest
from pipeline.checkpoints.rank_file_in import FilePieces, RankFiles, tensors_in_order
from pipeline.checkpoints.rank_file_out import PartDigests, RankReport
from pipeline.checkpoints.saves import lay_out
from pipeline.training.saving.save import saved_job
from shards.store import LocalStore
from tests.rigs.checkpoints import checkpoints_of
from tests.rigs.positions import position_at
from tests.rigs.processes import one_world

NUM_RANKS, NUM_TENSORS = 24, 30


def values_of(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(50 + 37 * number, generator=generator)


def saved(folder: Path) -> CheckpointManifest:
    """A ZeRO-3 checkpoint: every rank has a share of each tensor, the last ones a shorter one or none."""
    reports, sizes = [], [values_of(number).numel() for number in range(NUM_TENSORS)]
    for rank in range(NUM_RANKS):
        fragments = []
        for number in range(NUM_TENSORS):
            values = values_of(number)
            share = -(-values.numel() // NUM_RANKS)
            own = values[rank * share : (rank + 1) * share]
            if own.numel():
                slots = {"master": own, "exp_avg": -own, "exp_avg_sq": own * own}
                fragments.append(Fragment(name=f"t{number}", start=rank * share, length=own.numel(), slots=slots))
        name, laid_out, digests = f"rank-{rank:05d}.safetensors", lay_out(fragments), PartDigests(256)
        data = b"".join(laid_out.parts())
        digests.update(memoryview(data))
        file = folder / "step-00000007/attempt-0001-a" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        reports.append(RankReport(save=1, file=name, record=digests.record(), pieces=laid_out.pieces))
    draft = draft_manifest(
        CheckpointId(step=7, attempt="0001-a"),
        shapes={f"t{number}": (size,) for number, size in enumerate(sizes)},
        position=position_at(7),
        num_updates=7,
        job=saved_job(digits_smoke()),
        record={},
    )
    return with_reports(draft, reports)


@dataclass
class Counting:
    """A store that counts requests for ranges, and remembers the threads that made them."""

    store: LocalStore
    reads: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read_range(self, path: str, first: int, end: int) -> bytes:
        self.reads.append(end - first)
        self.threads.add(threading.current_thread().name)
        return self.store.read_range(path, first, end)


@pytest.mark.parametrize("slot", ["master", "exp_avg"])
@pytest.mark.parametrize(("group_bytes", "most_requests"), [(1 << 30, NUM_RANKS), (30_000, 4 * NUM_RANKS)])
def test_all_tensors_of_all_ranks_take_a_request_per_file_and_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot: str, group_bytes: int, most_requests: int
) -> None:
    monkeypatch.setattr(rank_file_in, "_GROUP_BYTES", group_bytes)
    manifest, store = saved(tmp_path), Counting(LocalStore(str(tmp_path)))
    tensor = tensors_in_order(RankFiles(store, manifest), manifest, slot=slot)  # type: ignore[arg-type]
    for number in range(NUM_TENSORS):
        found = tensor(f"t{number}")
        assert torch.equal(found, values_of(number) if slot == "master" else -values_of(number))
    assert NUM_RANKS <= len(store.reads) <= most_requests
    assert store.threads == {"checkpoint"}, "in threads, not one after the other"


def test_one_group_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file_in, "_GROUP_BYTES", 8_000)
    manifest, most, held = saved(tmp_path), 0, dict[str, int]()
    found = RankFiles.tensors

    def tensors(self: RankFiles, names: list[str], *, slot: str) -> dict[str, torch.Tensor]:
        nonlocal most
        group = found(self, names, slot=slot)
        held[names[0]] = sum(4 * one.numel() for one in group.values())
        most = max(most, held[names[0]])
        return group

    monkeypatch.setattr(RankFiles, "tensors", tensors)
    tensor = tensors_in_order(RankFiles(LocalStore(str(tmp_path)), manifest), manifest, slot="master")
    for name in manifest.tensors:
        tensor(name)
    assert len(held) > 5
    assert most <= 8_000
    assert sum(held.values()) == sum(4 * values_of(number).numel() for number in range(NUM_TENSORS)), "each once"


def test_any_order_gives_the_same_tensors(tmp_path: Path) -> None:
    manifest = saved(tmp_path)
    tensor = tensors_in_order(RankFiles(LocalStore(str(tmp_path)), manifest), manifest, slot="master")
    for number in (7, 3, 3, 29, 0):
        assert torch.equal(tensor(f"t{number}"), values_of(number))


def test_ranges_under_way_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes, however many ranges there are: each is freed once it is copied."""
    monkeypatch.setattr(rank_file_in, "RANGE_BYTES", 512)
    monkeypatch.setattr(rank_file_in, "_MOST_UNDER_WAY_BYTES", 2048)
    under_way, most, lock, found = 0, 0, threading.Lock(), rank_file_in.Targets.take
    manifest = saved(tmp_path)
    files = RankFiles(LocalStore(str(tmp_path)), manifest)
    read, asked = RankFiles.read, list[int]()

    def reading(self: RankFiles, name: str, begin: int, end: int, *, hold: bool = True) -> bytearray:
        nonlocal under_way, most
        with lock:
            under_way += end - begin
            most = max(most, under_way)
            asked.append(end - begin)
        return read(self, name, begin, end, hold=hold)

    def taking(self: rank_file_in.Targets, pieces: FilePieces, data: bytearray, *, begin: int) -> None:
        nonlocal under_way
        with lock:
            under_way -= 0 if id(data) in seen else len(data)
            seen[id(data)] = data
        found(self, pieces, data, begin=begin)

    seen = dict[int, bytearray]()  # keeps them, so that no two have one id
    monkeypatch.setattr(RankFiles, "read", reading)
    monkeypatch.setattr(rank_file_in.Targets, "take", taking)
    files.tensors(list(manifest.tensors), slot="master")
    assert len(asked) > 100
    assert max(asked) <= 512
    assert most <= 2048
    assert not files._held, "what is read once is not kept"


@pytest.mark.parametrize("num_ranks", [1, 5, 64])
def test_another_number_of_ranks_fills_all_of_its_slots_with_few_requests(tmp_path: Path, num_ranks: int) -> None:
    """Each rank reads each file that it needs once, for all tensors and slots together."""
    manifest, store = saved(tmp_path), Counting(LocalStore(str(tmp_path)))
    for rank in range(0, num_ranks, 7):
        checkpoints = checkpoints_of(tmp_path, one_world(), store=cast(Any, store))
        fragments = []
        for number in range(NUM_TENSORS):
            size = values_of(number).numel()
            share = -(-size // num_ranks)
            start, length = rank * share, max(0, min(share, size - rank * share))
            slots = {slot: torch.full((length,), torch.nan) for slot in ("master", "exp_avg", "exp_avg_sq")}
            fragments.append(Fragment(name=f"t{number}", start=start, length=length, slots=slots))
        store.reads.clear()
        checkpoints.load(manifest, [(fragment, slot) for fragment in fragments for slot in fragment.slots])
        assert len(store.reads) <= min(NUM_RANKS, NUM_RANKS // num_ranks + 8), "not one for each of 90 pieces"
        for number, fragment in enumerate(fragments):
            own = values_of(number)[fragment.start :][: fragment.length]
            assert torch.equal(fragment.slots["master"], own)
            assert torch.equal(fragment.slots["exp_avg_sq"], own * own)
