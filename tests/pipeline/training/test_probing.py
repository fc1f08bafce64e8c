"""Probes that hang or crash are faults of their own, after the checks that they have made."""

import socket
from pathlib import Path

import pytest

from pipeline.training.probing import Probe, run_probes


def test_a_probe_that_hangs_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        probes = [
            Probe(name="S3", words=("s3", "s3://bucket/x"), todo="start it"),
            Probe(name="disk", words=("disk", str(tmp_path)), todo="mount it"),
        ]
        s3, disk = run_probes(probes, seconds=12)
    assert (s3.name, s3.status, s3.found, s3.todo) == ("S3", "fault", "no answer within 12 s", "start it")
    assert disk.name == "disk"
    assert disk.status != "fault"


def test_a_probe_that_crashes_says_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = run_probes([Probe(name="torch", words=("torch",), todo="import it by hand")], seconds=60)
    assert (check.name, check.status, check.todo) == ("torch", "fault", "import it by hand")
    assert check.found.startswith("the check ended with exit code 1: ImportError: libcudart.so.13")


def test_a_probe_that_a_signal_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nos.write(1, b'hello\\n{}\\n')\nos.kill(os.getpid(), 11)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = run_probes([Probe(name="torch", words=("torch",), todo="-")], seconds=60)
    assert check.found == "the check ended with signal 11"
