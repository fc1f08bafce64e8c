"""Checkpoints on disk: complete, addressed by byte, committed by their manifest, deleted in order."""

import errno
import io
import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.checkpoints.attempts import list_committed, read_attempts, standing_checkpoints
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.manifest import CheckpointManifest, manifest_from_json
from pipeline.checkpoints.rank_file_in import RankFiles
from pipeline.ranks.world import World
from shards.errors import StorageError, WillNotSucceedError
from shards.files.typed_json import sealed, unsealed
from shards.storage.local import LocalStore
from shards.storage.retries import RetryConfig
from shards.store import open_store
from tests.pipeline.training.test_run import continue_from
from tests.rigs.checkpoints import checkpoints_of
from tests.rigs.forks import ONE_THREAD
from tests.rigs.processes import one_world, run_ranks
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, resumed_steps, run

pytestmark = pytest.mark.slow


def manifest_of(run_dir: Path, step: int) -> CheckpointManifest:
    path = next((run_dir / "checkpoints").glob(f"step-{step:08d}/*/MANIFEST.json"))
    return manifest_from_json(path.read_bytes())


@pytest.mark.parametrize(("stage", "num_ranks"), [pytest.param(1, 2, marks=pytest.mark.long), (3, 2)])
def test_the_fragments_are_the_whole_model(finished_runs: FinishedRuns, stage: int, num_ranks: int) -> None:
    run_dir = finished_runs.get(num_ranks, "--engine.zero-stage", str(stage))
    manifest = manifest_of(run_dir, STEPS)
    store = open_store(str(run_dir / "checkpoints"))
    files = RankFiles(store, manifest)
    weights = load_file(run_dir / "weights" / "model.safetensors")

    assert set(manifest.tensors) == set(weights)
    assert manifest.moments == ("exp_avg", "exp_avg_sq")
    assert (manifest.num_updates, manifest.num_samples) == (STEPS, STEPS * 32)
    for name, tensor in manifest.tensors.items():
        for slot in ("master", *manifest.moments):
            covered = [i for place in tensor.slots[slot] for i in range(place.start, place.start + place.num_elements)]
            assert covered == list(range(weights[name].numel())), f"{name} {slot}: every element, exactly once"
        assert torch.equal(files.tensor(name, slot="master"), weights[name])
    # One file per rank, each with fragments of many tensors.
    assert len(manifest.files) == num_ranks


def test_a_fragment_is_filled_from_the_files_that_hold_it(finished_runs: FinishedRuns) -> None:
    run_dir = finished_runs.get(2, "--engine.zero-stage", "1")
    manifest = manifest_of(run_dir, STEPS)
    store = open_store(str(run_dir / "checkpoints"))
    reader = checkpoints_of(run_dir, one_world(), store=store)
    name = "blocks.0.mlp.dense1.weight"
    expected = RankFiles(store, manifest).tensor(name, slot="master").flatten()
    fragment = Fragment(name=name, start=5, length=900, slots={"master": torch.zeros(900)})
    reader.load(manifest, [(fragment, "master")])
    assert torch.equal(fragment.slots["master"], expected[5:905])


def newest_after(world: World, run_dir: Path, damages: list[tuple[str, int]]) -> list[tuple[int, int]]:
    """Flips one bit of a file of the newest checkpoint at a time; (bit, newest usable step) where it is the newest."""
    store, wrong = open_store(str(run_dir / "checkpoints")), []
    for name, bit in damages:
        (path,) = (run_dir / "checkpoints" / f"step-{STEPS:08d}").glob(f"*/{name}")
        data = path.read_bytes()
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found = checkpoints_of(run_dir, world, store=store).newest()
        if found is None or found.id.step != STEPS - 4:
            wrong.append((bit, found.id.step if found else -1))
        path.write_bytes(data)
    return wrong


@pytest.mark.parametrize("name", ["MANIFEST.json", "rank-00000.safetensors", "rank-00001.safetensors"])
def test_a_checkpoint_with_one_bit_changed_is_passed_over(
    finished_runs: FinishedRuns, tmp_path: Path, name: str
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2), run_dir)
    (path,) = (run_dir / "checkpoints" / f"step-{STEPS:08d}").glob(f"*/{name}")
    data = path.read_bytes()
    bits = random.Random(0).sample(range(8 * len(data)), 100)
    for word in (b'"format":', b'"digest": "'):  # the digit after the first is one bit from that of older formats
        place = 8 * (data.find(word) + len(word))
        bits += range(place, place + 8) if word in data else []
    found = run_ranks(newest_after, run_dir, [(name, bit) for bit in bits], num_ranks=1)
    assert found == [[]]


def resealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest, with the digest that fits."""
    values = json.loads(unsealed(path.read_bytes()))
    change(values)
    path.write_bytes(sealed(json.dumps(values).encode()))


def first_place(values: dict[str, Any]) -> dict[str, Any]:
    place: dict[str, Any] = values["tensors"]["blocks.0.mlp.dense1.weight"]["slots"]["master"][0]
    return place


def put_a_pipe(manifest: Path) -> None:
    rank_file(manifest).unlink()
    os.mkfifo(rank_file(manifest))


def rank_file(manifest: Path, rank: int = 0) -> Path:
    return manifest.with_name(f"rank-{rank:05d}.safetensors")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "updates without a digest": (
        lambda path: path.write_bytes(path.read_bytes().replace(b'"num_updates":16', b'"num_updates":15')),
        "its digest does not fit",
    ),
    "an offset": (
        lambda path: resealed(path, lambda m: first_place(m).update(offset=first_place(m)["offset"] + 4)),
        "'master:blocks.0.mlp.dense1.weight' is [1184] of torch.float32 at bytes",
    ),
    "zeros": (
        lambda path: rank_file(path).write_bytes(bytes(20_000) + rank_file(path).read_bytes()[20_000:]),
        "rank-00000.safetensors does not have the bytes its manifest promises",
    ),
    "swapped files": (
        lambda path: (
            rank_file(path).rename(path.with_name("x")),
            rank_file(path, 1).rename(rank_file(path)),
            path.with_name("x").rename(rank_file(path, 1)),
        ),
        "does not have the bytes its manifest promises",
    ),
    "another one's manifest": (
        lambda path: path.write_bytes(next(path.parents[2].glob("step-00000012/*/MANIFEST.json")).read_bytes()),
        "its manifest is that of step-00000012/",
    ),
    "a pipe": (put_a_pipe, "no object"),
}


def newest_and_log(world: World, run_dir: Path) -> tuple[int, str]:
    """The step of the newest usable checkpoint, and what the log says."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("pipeline").addHandler(handler)
    found = checkpoints_of(run_dir, world).newest()
    logging.getLogger("pipeline").removeHandler(handler)
    return found.id.step if found else 0, said.getvalue()


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(
    finished_runs: FinishedRuns, tmp_path: Path, kind: str
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2), run_dir)
    damage, reason = DAMAGES[kind]
    damage(next((run_dir / "checkpoints").glob(f"step-{STEPS:08d}/*/MANIFEST.json")))
    (first, said), (second, nothing) = run_ranks(newest_and_log, run_dir, num_ranks=2)
    assert (first, second, nothing) == (STEPS - 4, STEPS - 4, "")
    assert said.startswith(f"skipping checkpoint step-{STEPS:08d}/")
    assert reason in said
    assert said.count("\n") == 1


def test_a_manifest_that_is_gone_is_said(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2), run_dir)
    next((run_dir / "checkpoints").glob(f"step-{STEPS:08d}/*/MANIFEST.json")).unlink()
    (first, said), (second, nothing) = run_ranks(newest_and_log, run_dir, num_ranks=2)
    assert (first, second, nothing) == (STEPS - 4, STEPS - 4, "")
    assert said.startswith(f"checkpoint step-{STEPS:08d}/")
    assert said.endswith(f"its manifest is not in {run_dir}/checkpoints; looking for an earlier one\n")


def test_a_run_without_the_record_of_its_attempt_continues(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(1), run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "attempts")
    ((step, said, token),) = run_ranks(attempt_after, run_dir, num_ranks=1)
    assert (step, token[:5]) == (STEPS, "0002-")
    assert "cannot be read, so it is unknown which checkpoint" in said


def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(
    finished_runs: FinishedRuns, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends bit for bit like the unbroken run."""
    unbroken, run_dir = finished_runs.get(2), tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    (run_dir / "DONE").unlink()
    DAMAGES["an offset"][0](next((run_dir / "checkpoints").glob(f"step-{STEPS:08d}/*/MANIFEST.json")))
    assert run(pretrain_words(finished_runs.url, run_dir), num_ranks=2, log_dir=tmp_path) == 0
    assert f"skipping checkpoint step-{STEPS:08d}/" in capfd.readouterr().err
    assert resumed_steps(run_dir) == [0, STEPS - 4]
    assert losses(run_dir) == losses(unbroken)
    assert (run_dir / "weights/model.safetensors").read_bytes() == (unbroken / "weights/model.safetensors").read_bytes()


def newest_where_reads_fail(world: World, run_dir: Path, fault: int, steps: list[int]) -> tuple[object, str]:
    """The step of the newest usable checkpoint or the error, and what the log says, where these steps' first rank files
    cannot be read."""
    pread = os.pread

    def failing(descriptor: int, count: int, offset: int) -> bytes:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if any(f"step-{step:08d}" in name for step in steps) and name.endswith("rank-00000.safetensors"):
            raise OSError(fault, os.strerror(fault))
        return pread(descriptor, count, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", failing)
        patch.setattr("shards.storage.local.RETRIES", RetryConfig(deadline_seconds=0.5))
        try:
            return newest_and_log(world, run_dir)
        except StorageError as error:
            return error, ""


@pytest.mark.parametrize("fault", [errno.EIO, errno.ESTALE])
def test_a_checkpoint_that_stays_unreadable_is_passed_over_by_all_ranks(
    finished_runs: FinishedRuns, tmp_path: Path, fault: int
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2), run_dir)
    (first, said), (second, nothing) = run_ranks(newest_where_reads_fail, run_dir, fault, [STEPS], num_ranks=2)
    assert (first, second, nothing) == (STEPS - 4, STEPS - 4, "")
    assert said.startswith(f"checkpoint step-{STEPS:08d}/")
    assert f"cannot be read for now: {os.strerror(fault)} at {run_dir}/checkpoints/step-{STEPS:08d}/" in said


def test_a_store_without_a_readable_checkpoint_is_no_start_from_scratch(
    finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2), run_dir)
    steps = list(range(4, STEPS + 1, 4))
    for error, _ in run_ranks(newest_where_reads_fail, run_dir, errno.EIO, steps, num_ranks=2):
        assert isinstance(error, StorageError)
        assert str(error).startswith(f"none of the 4 checkpoints in {run_dir}/checkpoints can be used for now")
        assert f"step-{STEPS:08d}/" in str(error)
        assert "rank-00000.safetensors" in str(error)


def newest_after_an_outage(world: World, run_dir: Path) -> tuple[int, str]:
    """The step of the newest usable checkpoint, and what the log says, where all reads fail until the store is listed
    after a failure."""
    pread, listing, state = os.pread, LocalStore.list, {"has_failed": False, "is_over": False}

    def failing(descriptor: int, count: int, offset: int) -> bytes:
        if not state["is_over"] and "/step-" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            state["has_failed"] = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, count, offset)

    def listed(store: LocalStore, prefix: str = "") -> Iterator[str]:
        state["is_over"] = state["has_failed"]
        return listing(store, prefix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", failing)
        patch.setattr(LocalStore, "list", listed)
        patch.setattr("shards.storage.local.RETRIES", RetryConfig(deadline_seconds=0.5))
        return newest_and_log(world, run_dir)


def test_an_outage_of_the_whole_store_does_not_give_up_the_newest(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2), run_dir)
    assert run_ranks(newest_after_an_outage, run_dir, num_ranks=2) == [(STEPS, ""), (STEPS, "")]


OTHER_VERSIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda m: m.update(format=5), "its manifest has format 5, this version reads 4"),
    "a new field": (lambda m: m.update(later=1), "later: Unexpected keyword argument"),
    "a new field of the model": (lambda m: m["job"]["model"].update(rope_theta=1), "the unknown field 'rope_theta'"),
    "no field of the position": (lambda m: m["position"].pop("seed"), "position.seed: Field required"),
    "a value out of range": (lambda m: m.update(num_updates=17), "num_updates is 17; allowed: 0 to"),
    "files elsewhere": (lambda m: m.update(files={}), "is not among the checkpoint's files"),
}


def newest_or_refusals(world: World, run_dir: Path, manifest: Path, contents: list[bytes], blind: int) -> list[str]:
    """The newest usable checkpoint or the refusal, for each content of a manifest, which one rank cannot read."""
    found, pread = [], os.pread

    def failing(descriptor: int, count: int, offset: int) -> bytes:
        if world.rank == blind and Path(f"/proc/self/fd/{descriptor}").readlink() == manifest:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, count, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", failing)
        patch.setattr("shards.storage.local.RETRIES", RetryConfig(deadline_seconds=0.1))
        for data in contents:
            dist.barrier()
            if world.is_first:
                manifest.write_bytes(data)
            dist.barrier()
            try:
                found.append(str(newest_and_log(world, run_dir)))
            except WillNotSucceedError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("blind", [-1, 1])
def test_a_checkpoint_of_another_version_is_not_given_up_for_an_older_one(
    finished_runs: FinishedRuns, tmp_path: Path, blind: int
) -> None:
    """Even if only one rank can read its manifest. Unless it is damaged: then what it says may be the damage."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2), run_dir)
    (path,) = (run_dir / "checkpoints").glob(f"step-{STEPS:08d}/*/MANIFEST.json")
    written, contents = path.read_bytes(), list[bytes]()
    for change, _ in OTHER_VERSIONS.values():
        path.write_bytes(written)
        resealed(path, change)
        contents.append(path.read_bytes())
    contents.append(contents[0].replace(b'"seed"', b'"sead"'))
    first, second = run_ranks(newest_or_refusals, run_dir, path, contents, blind, num_ranks=2)
    assert first[:-1] == second[:-1]
    folder = path.parent.relative_to(run_dir / "checkpoints")
    for said, (_, reason) in zip(first[:-1], OTHER_VERSIONS.values(), strict=True):
        assert said.startswith(f"checkpoint {folder} in {run_dir}/checkpoints: its manifest ")
        assert reason in said
        assert said.endswith("; use the version of Patchline that wrote it, or another --run-dir")
    assert first[-1].startswith(f"({STEPS - 4}, ")
    assert blind == 1 or "its manifest has format 5, this version reads 4" in first[-1]


@pytest.mark.long
def test_a_run_continues_before_a_checkpoint_with_a_bad_sector(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    """strace answers every read of the newest rank file with EIO. The run ends with the same bits, and keeps what it
    could not read."""
    unbroken, run_dir = finished_runs.get(1), tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    (run_dir / "DONE").unlink()
    bad = next((run_dir / "checkpoints").glob(f"step-{STEPS:08d}/*/rank-00000.safetensors"))
    words = [*pretrain_words(finished_runs.url, run_dir), "--checkpoint.keep-newest", "1"]
    reads = "pread64,preadv,read,readv"
    command = ["strace", "-f", "-o", "/dev/null", "-e", f"inject={reads}:error=EIO", "-P", str(bad)]
    command += [sys.executable, "-m", "patchline", *words]
    environ = {**os.environ, **ONE_THREAD}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=500)
    assert ended.returncode == 0, ended.stderr
    assert f"cannot be read for now: Input/output error at {bad}" in ended.stderr
    assert resumed_steps(run_dir) == [0, STEPS - 4]
    assert losses(run_dir) == losses(unbroken)
    kept = sorted((run_dir / "checkpoints").glob("step-*/*/MANIFEST.json"))
    assert [path.parent for path in kept if path.parent == bad.parent] == [bad.parent]
    assert len(kept) == 2


def put_strays(checkpoints: Path) -> list[Path]:
    """Files that anybody could leave in a checkpoint store; returns them."""
    newest = next(checkpoints.glob(f"step-{STEPS:08d}/*/MANIFEST.json"))
    strays = {
        "attempts/.nfs000001": b"",
        "attempts/empty": b"",
        "attempts/notes.txt": b"\xff",
        "attempts/0001-x.json": b"{}",
        "attempts/\u00b2\u00b2\u00b2\u00b2-00000000.json": b"{}",
        "attempts/9999-aaaaaaaa.json~": b"{}",
        "step-\u00b2/attempt-0001-aa/MANIFEST.json": newest.read_bytes(),
        "step-00000099/MANIFEST.json": newest.read_bytes(),
        "step-00000099/attempt-x/MANIFEST.json": newest.read_bytes(),
        "step-00000099/attempt-0001-aaaaaaaa/.nfs000001": b"",
        "MANIFEST.json": b"",
        f"{newest.parent.relative_to(checkpoints)}/.nfs000001": b"",
    }
    for name, data in strays.items():
        (checkpoints / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoints / name).write_bytes(data)
    os.mkfifo(checkpoints / "attempts" / "9999-bbbbbbbb.json")
    return [checkpoints / name for name in strays]


def test_files_of_others_are_left_alone(
    finished_runs: FinishedRuns, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run continues beside them, and retention does not delete them."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(1), run_dir)
    strays = put_strays(run_dir / "checkpoints")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        with (run_dir / name).open("ab") as file:
            file.write(b"\xff\n[1]\nNaN\n" + b"[" * 200_000 + b'\n{"step": 99, "lo')
    words = [*pretrain_words(finished_runs.url, run_dir), "--steps", str(STEPS + 4), "--extend"]
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    said = capfd.readouterr().err
    assert f"{run_dir}/metrics.jsonl: dropped 5 lines" in said
    assert f"{run_dir}/ledger.jsonl: skipped 5 lines" in said
    assert "skipping checkpoint" not in said
    assert [path for path in strays if not path.exists()] == []
    assert resumed_steps_by_name(run_dir) == [0, STEPS]
    assert set(losses(run_dir)) == set(range(1, STEPS + 5))


def resumed_steps_by_name(run_dir: Path) -> list[int]:
    attempts = read_attempts(open_store(str(run_dir / "checkpoints")))
    return [each.resumed_from.step if each.resumed_from else 0 for each in attempts]


BROKEN = (
    b"",
    b"{",
    b"\xff",
    b"[1]",
    b"[" * 60_000,
    b"x" * (1 << 17),
    b'{"token": "0007-bbbbbbbb", "resumed_from": null, "skipped": []}',
    sealed(b'{"token": "0001-aaaaaaaa", "resumed_from": null, "skipped": []}'),
)


def attempt_after(world: World, run_dir: Path) -> tuple[int, str, str]:
    step, said = newest_and_log(world, run_dir)
    checkpoints = checkpoints_of(run_dir, world)
    found = checkpoints.newest()
    assert checkpoints.begin_attempt(found)
    checkpoints.refuse_if_overtaken()
    return step, said, checkpoints.attempt.token


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_the_number_of_a_damaged_attempt_counts(finished_runs: FinishedRuns, tmp_path: Path, data: bytes) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(1), run_dir)
    record = run_dir / "checkpoints" / "attempts" / "0007-bbbbbbbb.json"
    record.write_bytes(data)
    ((step, said, token),) = run_ranks(attempt_after, run_dir, num_ranks=1)
    assert step == STEPS, "nothing was saved by it: the attempt before it counts"
    assert token.startswith("0008-")
    assert said.count(f"{record} cannot be read") == 1
    assert record.read_bytes() == data


def test_retention_keeps_the_newest_and_every_kth(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--checkpoint.every-steps", "2", "--checkpoint.keep-every", "6")
    words += ["--checkpoint.keep-newest", "2"]
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    folders = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert folders == ["step-00000006", "step-00000012", "step-00000014", "step-00000016"]


def test_a_save_that_fails_costs_no_run(digits_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-00000004").write_text("a file where a folder must be")

    assert run(pretrain_words(digits_url, run_dir), num_ranks=2, log_dir=tmp_path) == 0

    assert "checkpoint of step 4 was not committed" in capfd.readouterr().err
    assert set(losses(run_dir)) == set(range(1, STEPS + 1))


def test_checkpoints_on_s3(digits_url: str, tmp_path: Path, s3_bucket: str) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--checkpoint.url", f"s3://{s3_bucket}/run/checkpoints")
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    store = open_store(f"s3://{s3_bucket}/run/checkpoints")
    assert sorted(place.step for place in list_committed(store)) == [4, 8, 12, STEPS]
    assert [attempt.resumed_from for attempt in read_attempts(store)] == [None]
    assert not (run_dir / "checkpoints").exists()

    assert run([*words, "--steps", str(STEPS + 4), "--extend"], num_ranks=2, log_dir=tmp_path) == 0
    assert set(losses(run_dir)) == set(range(1, STEPS + 5))
    assert len(read_attempts(store)) == 2


def test_a_zombies_checkpoint_is_ignored(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    """An old process that wakes up and saves after the run continued elsewhere does not provide the newest
    checkpoint."""
    run_dir = tmp_path / "run"
    words = pretrain_words(finished_runs.url, run_dir)
    continue_from(finished_runs.get(1), run_dir, step=8)
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0  # the second attempt resumes from step 8
    store = open_store(str(run_dir / "checkpoints"))
    first, second = read_attempts(store)
    source = next((run_dir / "checkpoints").glob(f"step-{STEPS:08d}/attempt-{second.token}"))
    zombie = run_dir / "checkpoints" / f"step-{STEPS + 4:08d}" / f"attempt-{first.token}"
    shutil.copytree(source, zombie)

    standing = standing_checkpoints(list_committed(store), read_attempts(store))

    assert [(place.step, place.attempt) for place in standing][:1] == [(STEPS, second.token)]
    (run_dir / "DONE").unlink()
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    assert resumed_steps(run_dir) == [0, 8, STEPS]
