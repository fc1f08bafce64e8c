"""A file server that answers every other look with ESTALE costs a run nothing: it ends as without any fault."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.forks import ONE_THREAD
from tests.rigs.training import FinishedRuns, losses, pretrain_words

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")]
LOOKED_AT = ("", "STOP", "SAVE", "DONE", "checkpoints", "checkpoints/attempts", "weights", "metrics.jsonl")


def test_looks_that_fail_do_not_end_a_run(digits_url: str, tmp_path: Path, finished_runs: FinishedRuns) -> None:
    run_dir, trace = tmp_path / "run", tmp_path / "trace"
    expected = losses(finished_runs.get(1))
    paths = [word for name in LOOKED_AT for word in ("-P", str(run_dir / name).rstrip("/"))]
    fault = "inject=newfstatat,statx:error=ESTALE:when=1+3"
    words = [sys.executable, "-m", "jobs.cli", *pretrain_words(digits_url, run_dir)]
    faulty = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(trace), "-e", "trace=newfstatat,statx", "-e", fault]
    environ = {**os.environ, **ONE_THREAD}
    command = [*faulty, *paths, *words]
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, check=False, timeout=600)
    failed = [line for line in trace.read_text().splitlines() if "INJECTED" in line]
    assert any("/STOP" in line for line in failed), done.stderr + trace.read_text()[:2000]
    assert done.returncode == 0, done.stderr
    assert losses(run_dir) == expected
