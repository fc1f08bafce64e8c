"""The marker of a finished run; whole runs are in test_run.py."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from pipeline.training.done import job_of, read_done
from pipeline.training.start import SavedJob

SAVED = SavedJob(step=8, model={}, loss="softmax", optimizer="adamw", data_state={}, job={"steps": 8, "clip_norm": 1.0})


def write_marker(run_dir: Path, saved: dict[str, object]) -> None:
    (run_dir / "weights").mkdir()
    (run_dir / "weights" / "model.safetensors").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    (run_dir / "DONE").write_text(json.dumps({"step": 8, "weights_sha256": digest, "job": saved}))


def test_a_marker_says_which_job_is_done(tmp_path: Path) -> None:
    write_marker(tmp_path, asdict(SAVED))
    marker = read_done(tmp_path)
    assert marker
    assert job_of(marker) == SAVED
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"others")
    assert read_done(tmp_path) is None


def test_one_of_an_older_version_knows_the_length_of_its_job(tmp_path: Path) -> None:
    write_marker(tmp_path, {name: value for name, value in asdict(SAVED).items() if name != "job"})
    marker = read_done(tmp_path)
    assert marker
    assert job_of(marker).job == {"steps": 8}
