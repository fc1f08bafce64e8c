"""Ranks that resume read a checkpoint once, in shares, under whatever layout it was saved, and pass on what others
need: counted for ViT-H/14 on up to 512 ranks, and tried on real ranks."""

import math
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale_resume import (
    H14,
    MOST_AMPLIFICATION,
    MOST_REQUESTS,
    SAVED,
    SHOWN_BYTES,
    Owned,
    checkpoint_of,
    owned,
    reads_of,
    state_bytes,
    wanted_of,
)
from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints import rank_file_out
from pipeline.checkpoints import shares as shares_file
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.commit import draft_manifest
from pipeline.checkpoints.manifest import CheckpointId, manifest_to_json
from pipeline.checkpoints.rank_file_out import FileRecord, PartDigests, file_name
from pipeline.checkpoints.shares import MOST_AGAIN, Shares
from pipeline.models import shapes_of
from pipeline.ranks.world import World
from pipeline.training.saving.save import saved_job
from shards.store import LocalStore
from tests.pipeline.checkpoints.test_checkpoint import manifest_of
from tests.pipeline.checkpoints.test_whole_tensors import Counting
from tests.rigs.checkpoints import checkpoints_of, saved_at_once
from tests.rigs.positions import position_at
from tests.rigs.processes import run_ranks
from tests.rigs.training import STEPS, FinishedRuns

SHAPES = shapes_of(H14)
SLOTS = ("master", "exp_avg", "exp_avg_sq")


@cache
def layout_of(stage: int, num_ranks: int) -> list[list[Owned]]:
    return list(owned(SHAPES, stage=stage, num_ranks=num_ranks))


@pytest.mark.parametrize(("stage", "num_ranks"), SAVED)
def test_vit_h14_is_read_once_by_any_number_of_ranks_under_any_stage(stage: int, num_ranks: int) -> None:
    """1.07 times at most, with the manifest on every rank. Ranks by themselves would read it 102 times, in 150,000
    requests, from ZeRO-1 to ZeRO-3 on 512 ranks; they do only if that is little."""
    manifest = checkpoint_of(SHAPES, stage=stage, num_ranks=num_ranks)
    size, total = len(manifest_to_json(manifest)), state_bytes(SHAPES)
    assert size < 1_200_000, "67 MB on 512 ranks under ZeRO-3"
    for resuming in sorted({ranks for _, ranks in SAVED}):
        reads = reads_of(manifest, num_ranks=resuming, manifest_bytes=size)
        assert total < sum(read.num_bytes for read in reads) <= (MOST_AMPLIFICATION - MOST_AGAIN) * total
        most = max(read.num_bytes for read in reads) - size
        assert most <= 1.1 * total / resuming + (2 << 20), "no rank reads for many"
        assert sum(read.num_requests for read in reads) <= 3 * (num_ranks + resuming) + total // (32 << 20)
        if resuming == 512:
            assert max(read.num_requests for read in reads) <= MOST_REQUESTS
        # Whatever the stage, all that a rank wants is in a share, its own or another's.
        shares = Shares(manifest.files, num_ranks=resuming)
        for to in (1, 3):
            layout = layout_of(to, resuming)
            for rank in {0, resuming // 3, resuming - 1}:
                cut = shares.cut(wanted_of(manifest, shares, layout[rank]), SHOWN_BYTES)
                begins = shares.bases[cut.pieces.files] + cut.pieces.begins
                ends = shares.bases[cut.pieces.files] + cut.pieces.ends
                assert int((ends - begins).sum()) == 12 * sum(length for _, _, length in layout[rank])
                assert bool((shares.bounds[cut.ranks] <= begins).all())
                assert bool((ends <= shares.bounds[cut.ranks + 1]).all())
                assert bool((begins == shares.bounds[cut.ranks] + cut.rounds * SHOWN_BYTES + cut.offsets).all())
                if (to, resuming) == (stage, num_ranks):
                    assert set(cut.ranks.tolist()) == {rank}, "unchanged, it needs its own file alone"


@pytest.mark.parametrize("stage", [1, 3])
def test_the_layout_that_is_counted_is_that_of_deepspeed(finished_runs: FinishedRuns, stage: int) -> None:
    manifest = manifest_of(finished_runs.get(2, "--engine.zero-stage", str(stage)), STEPS)
    shapes = {name: tensor.shape for name, tensor in manifest.tensors.items()}
    expected = checkpoint_of(shapes, stage=stage, num_ranks=2)
    assert manifest.tensors == expected.tensors
    assert {name: file.num_bytes for name, file in manifest.files.items()} == {
        name: file.num_bytes for name, file in expected.files.items()
    }


@given(sizes=st.lists(st.integers(8, 5000), min_size=1, max_size=12), num_ranks=st.integers(1, 40))
def test_shares_have_each_part_once(sizes: list[int], num_ranks: int) -> None:
    files = {
        file_name(rank): FileRecord(num_bytes=size, part_bytes=64, sha256=("0" * 64,) * -(-size // 64))
        for rank, size in enumerate(sizes)
    }
    shares = Shares(files, num_ranks=num_ranks)
    own = [
        [(name, part) for name, low, high in shares.of(rank) for part in range(low, high)] for rank in range(num_ranks)
    ]
    assert list(chain.from_iterable(own)) == [
        (name, part) for name, file in files.items() for part in range(len(file.sha256))
    ]
    assert shares.bounds[0] == 0
    assert shares.bounds[-1] == sum(sizes)
    for rank, parts in enumerate(own):
        held = sum(min(64, files[name].num_bytes - 64 * part) for name, part in parts)
        assert shares.bounds[rank + 1] - shares.bounds[rank] == held
    if num_ranks == len(sizes):
        assert all({name for name, _ in parts} == {file_name(rank)} for rank, parts in enumerate(own))


SMALL = {"a.weight": (37, 50), "a.bias": (50,), "b.weight": (3, 7, 11), "norm.weight": (2,), "c.bias": (1301,)}


def values(name: str, slot: str) -> torch.Tensor:
    """Elements that tell where they belong."""
    number, size = list(SMALL).index(name), math.prod(SMALL[name])
    return torch.arange(size, dtype=torch.float32) + 10_000 * (3 * number + SLOTS.index(slot))


def fragments_of(own: list[Owned], *, is_filled: bool) -> list[Fragment]:
    return [
        Fragment(
            name=name,
            start=start,
            length=length,
            slots={
                slot: values(name, slot)[start:][:length] if is_filled else torch.full((length,), torch.nan)
                for slot in SLOTS
            },
        )
        for name, start, length in own
    ]


def save(world: World, folder: Path, stage: int) -> None:
    rank_file_out.PartDigests = partial(PartDigests, 256)  # type: ignore[misc, assignment]  # in this process alone
    checkpoints = checkpoints_of(folder, world)
    assert checkpoints.newest() is None
    assert checkpoints.begin_attempt(None)
    draft = draft_manifest(
        CheckpointId(step=7, attempt=checkpoints.attempt.token),
        shapes=SMALL,
        position=position_at(7),
        num_updates=7,
        job=saved_job(digits_smoke()),
        record={},
    )
    own = list(owned(SMALL, stage=stage, num_ranks=world.num_ranks))[world.rank]
    saved_at_once(checkpoints, fragments_of(own, is_filled=True), draft)


def resume(world: World, folder: Path, stage: int, gathered_bytes: int) -> tuple[list[str], int]:
    """What this rank got wrong, and the bytes of files that it has read."""
    shares_file._GATHERED_BYTES = gathered_bytes  # of this process alone
    store = Counting(LocalStore(str(folder / "checkpoints")))
    checkpoints = checkpoints_of(folder, world, store=cast(Any, store))
    manifest = checkpoints.newest()
    assert manifest
    own = fragments_of(list(owned(SMALL, stage=stage, num_ranks=world.num_ranks))[world.rank], is_filled=False)
    checkpoints.load(manifest, [(fragment, slot) for fragment in own for slot in fragment.slots])
    wrong = [
        f"{slot} of {one.name}"
        for one in own
        for slot, found in one.slots.items()
        if not torch.equal(found, values(one.name, slot)[one.start :][: one.length])
    ]
    return wrong, sum(store.reads)


@pytest.mark.parametrize(
    ("saved", "resuming", "gathered_bytes", "most"),
    [
        pytest.param((3, 3), (3, 2), 64 << 20, 1.4, id="ZeRO-3, 3 to 2 ranks, by themselves"),
        pytest.param((3, 2), (1, 3), 1000, 1.0, id="ZeRO-3 to ZeRO-1, 2 to 3 ranks, in many rounds"),
        pytest.param((1, 1), (3, 3), 777, 1.0, id="ZeRO-1 to ZeRO-3, 1 to 3 ranks, in rounds that cut numbers"),
    ],
)
def test_real_ranks_read_little_and_get_what_is_theirs(
    tmp_path: Path, saved: tuple[int, int], resuming: tuple[int, int], gathered_bytes: int, most: float
) -> None:
    run_ranks(save, tmp_path, saved[0], num_ranks=saved[1])
    found = run_ranks(resume, tmp_path, resuming[0], gathered_bytes, num_ranks=resuming[1])
    assert [wrong for wrong, _ in found] == [[]] * resuming[1]
    total = sum(file.num_bytes for file in manifest_of(tmp_path, 7).files.values())
    assert total <= sum(num_bytes for _, num_bytes in found) <= most * total
