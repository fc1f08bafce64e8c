"""Checkpoints on disk: complete, addressed by byte, committed by their manifest, deleted in order."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.training import checkpoint
from pipeline.training.checkpoint import Checkpoints, list_committed, read_attempts, read_tensor
from pipeline.training.config import CheckpointConfig
from pipeline.training.manifest import Manifest, manifest_from_json, standing_checkpoints
from pipeline.training.zero_state import Fragment
from shards.errors import UserError
from shards.store import open_store
from tests.rigs.processes import one_world
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, resumed_steps, run

pytestmark = pytest.mark.slow


def manifest_of(run_dir: Path, step: int) -> Manifest:
    path = next((run_dir / "checkpoints").glob(f"step-{step:08d}/*/MANIFEST.json"))
    return manifest_from_json(path.read_bytes())


@pytest.mark.parametrize(("stage", "num_ranks"), [(1, 2), (3, 2)])
def test_the_fragments_are_the_whole_model(finished_runs: FinishedRuns, stage: int, num_ranks: int) -> None:
    run_dir = finished_runs.get(num_ranks, "--engine.zero-stage", str(stage))
    manifest = manifest_of(run_dir, STEPS)
    store = open_store(str(run_dir / "checkpoints"))
    weights = load_file(run_dir / "weights" / "model.safetensors")

    assert set(manifest.tensors) == set(weights)
    assert manifest.moments == ("exp_avg", "exp_avg_sq")
    assert (manifest.num_updates, manifest.num_samples) == (STEPS, STEPS * 32)
    for name, tensor in manifest.tensors.items():
        for slot in ("master", *manifest.moments):
            covered = [i for place in tensor.slots[slot] for i in range(place.start, place.start + place.length)]
            assert covered == list(range(weights[name].numel())), f"{name} {slot}: every element, exactly once"
        assert torch.equal(read_tensor(store, manifest, name), weights[name])
    # One file per rank, each with fragments of many tensors.
    assert len(manifest.files) == num_ranks


def test_a_file_too_large_to_keep_is_verified_in_parts_and_read_again(
    finished_runs: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(2, "--engine.zero-stage", "1"), run_dir)
    manifest = manifest_of(run_dir, STEPS)
    monkeypatch.setattr(checkpoint, "_MOST_READ_AHEAD_BYTES", 0)
    monkeypatch.setattr(checkpoint, "_PART_BYTES", 1000)
    store = open_store(str(run_dir / "checkpoints"))
    reader = Checkpoints(store, one_world(), run_dir=run_dir)
    assert reader._verify_share(manifest) == ""
    assert reader._read_ahead == {}
    name = "blocks.0.mlp.dense1.weight"
    expected = read_tensor(store, manifest, name).flatten()
    fragment = Fragment(name=name, start=5, length=900, slots={"master": torch.zeros(900)})
    reader.load(manifest, fragment, "master")
    assert torch.equal(fragment.slots["master"], expected[5:905])

    file = run_dir / "checkpoints" / manifest.id.folder / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # in the last part
    file.write_bytes(data)
    assert "rank-00001.safetensors does not have the bytes" in reader._verify_share(manifest)
    file.write_bytes(data[:-1])
    assert "rank-00001.safetensors does not have the bytes" in reader._verify_share(manifest)


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


def test_a_zombies_checkpoint_is_ignored(digits_url: str, tmp_path: Path) -> None:
    """An old process that wakes up and saves after the run continued elsewhere does not provide the newest
    checkpoint."""
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir)
    assert run([*words, "--steps", "8"], num_ranks=1, log_dir=tmp_path) == 0
    assert run([*words, "--extend"], num_ranks=1, log_dir=tmp_path) == 0  # the second attempt resumes from step 8
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


@pytest.mark.parametrize("values", [{"every_steps": 0}, {"keep_newest": 0}, {"keep_every": -1}])
def test_bad_settings_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.\w+ is -?\d; allowed:"):
        CheckpointConfig(**values)  # type: ignore[arg-type]  # a table of one field each
