"""Threads that sleep while they wait: the environment, libgomp's reading of it, and the same weights either way."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.environment import wait_quietly
from tests.rigs.training import pretrain_words

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("environ", "added"),
    [
        pytest.param({}, {"OMP_WAIT_POLICY": "PASSIVE"}, id="nothing is set"),
        pytest.param({"OMP_WAIT_POLICY": ""}, {"OMP_WAIT_POLICY": "PASSIVE"}, id="set to nothing"),
        pytest.param({"OMP_WAIT_POLICY": "ACTIVE"}, {}, id="the user's policy"),
        pytest.param({"GOMP_SPINCOUNT": "1000"}, {}, id="the user's spinning"),
        pytest.param({"KMP_BLOCKTIME": "200"}, {}, id="the user's, for Intel's OpenMP"),
        pytest.param({"OMP_NUM_THREADS": "1"}, {"OMP_WAIT_POLICY": "PASSIVE"}, id="threads are another matter"),
    ],
)
def test_a_users_own_setting_stays(environ: dict[str, str], added: dict[str, str]) -> None:
    found = dict(environ)
    wait_quietly(found)
    assert found == environ | added


def trained(url: str, run_dir: Path, **environ: str) -> tuple[bytes, set[str]]:
    """The weights after two steps with two threads in a separate process, and the policies that libgomp read."""
    words = pretrain_words(url, run_dir, "--steps", "2", "--schedule.warmup-steps", "0", "--threads", "2")
    command = [sys.executable, "-m", "jobs.cli", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (manifest,) = run_dir.glob("checkpoints/step-00000002/*/MANIFEST.json")
    assert json.loads(manifest.read_text())["record"]["topology"]["num_threads"] == 2
    weights = (run_dir / "weights" / "model.safetensors").read_bytes()
    return weights, set(re.findall(r"OMP_WAIT_POLICY = '(\w+)'", done.stderr))


@pytest.mark.long
@pytest.mark.slow
def test_libgomp_hears_it_and_the_weights_are_the_same(digits_url: str, tmp_path: Path) -> None:
    outside = {name: value for name, value in os.environ.items() if name not in NAMES}
    shown = outside | {"OMP_DISPLAY_ENV": "TRUE"}  # libgomp prints its settings when it is loaded
    quiet, policies = trained(digits_url, tmp_path / "quiet", **shown)
    assert policies == {"PASSIVE"}
    own = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "1000"}  # without a limit, a busy machine makes no progress
    spinning, policies = trained(digits_url, tmp_path / "spinning", **shown, **own)
    assert policies == {"ACTIVE"}
    assert quiet == spinning
