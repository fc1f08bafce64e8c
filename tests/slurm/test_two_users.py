"""Two users of one group look after a run on a real Slurm, and a third one may not: each a process with its own user
and groups, and with jobs of its own."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import exit_codes
from pipeline.shared_settings import METRICS_FILE
from tests.conftest import CHECKOUT
from tests.rigs.slurm import SlurmCluster, SlurmConfig

PYTHON = Path("/usr/bin/python3")
PACKAGES = Path(pytest.__file__).parents[1]
GROUP = 60  # games
OWNER, COLLEAGUE, STRANGER = (65534, GROUP), (1, GROUP), (2, 2)  # nobody, daemon, bin, and a group of each


def why_not() -> str:
    """Returns why other users cannot run Patchline here; empty if they can."""
    if os.getuid() != 0 or not shutil.which("setpriv"):
        return "needs root and setpriv"
    tried = [*as_user(STRANGER), str(PYTHON), "-m", "patchline", "--version"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    is_same = subprocess.run([PYTHON, "-c", f"import sys; sys.exit(sys.version[:4] != {version!r})"], check=False)
    if is_same.returncode or subprocess.run(tried, check=False, capture_output=True, cwd="/").returncode:
        return f"other users cannot run Patchline from {CHECKOUT} with the system's Python {version}"
    return ""


def as_user(user: tuple[int, int]) -> list[str]:
    """Returns the words before a command that runs as a user, with its own environment."""
    uid, group = user
    ids = ["setpriv", f"--reuid={uid}", f"--regid={group}", "--clear-groups", "--inh-caps=-all"]
    return [*ids, "env", f"PYTHONPATH={PACKAGES}:{CHECKOUT}", "HOME=/nonexistent", "PYTHONDONTWRITEBYTECODE=1"]


pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(SlurmConfig(num_nodes=1, cpus_per_node=1, first_job=50_000)) as cluster:
        cluster.folder.chmod(0o755)  # for slurm.conf and munge's socket
        yield cluster


@pytest.fixture
def place(digits_url: str) -> Iterator[Path]:
    """Makes a folder for the group, with a dataset and a cluster's settings that everybody can read."""
    folder = Path(tempfile.mkdtemp(prefix="group-"))
    try:
        shutil.copytree(digits_url, folder / "digits")
        command = ["env", f"PYTHONPATH={PACKAGES}:{CHECKOUT}", str(PYTHON), "-m", "patchline"]
        (folder / "cluster.yaml").write_text(f"command: {command}\n".replace("'", ""))
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        (folder / "runs").mkdir()
        os.chown(folder / "runs", 0, GROUP)
        (folder / "runs").chmod(0o2770)
        yield folder
    finally:
        shutil.rmtree(folder)


def test_a_run_of_a_group(cluster: SlurmCluster, place: Path) -> None:
    if why := why_not():
        pytest.skip(why)
    run_dir = place / "runs" / "one"

    def patchline(user: tuple[int, int], *words: str) -> tuple[int, str]:
        environ = {name: value for name, value in cluster.job_environment().items() if name in ("PATH", "SLURM_CONF")}
        words = (*as_user(user), str(PYTHON), "-m", "patchline", *words)
        done = subprocess.run(words, env=environ, cwd=place, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stdout + done.stderr

    submit = ["submit", "pretrain", "digits_smoke", "--cluster=cluster.yaml", f"--run-dir={run_dir}"]
    submit += [f"--data.url={place / 'digits'}", "--checkpoint.every-steps=50"]
    code, said = patchline(OWNER, *submit, "--shared")
    assert code == 0, said
    job = int(re.findall(r"\b5\d{4}\b", said)[-1])
    cluster.wait_for((run_dir / METRICS_FILE).exists, deadline_seconds=180)

    code, said = patchline(STRANGER, "status", str(run_dir))
    assert (code, "Traceback" in said) == (exit_codes.USER_MISTAKE, False), said
    assert "Permission denied" in said or "may not" in said
    code, said = patchline(COLLEAGUE, "status", str(run_dir))
    assert (code, str(job) in said) == (0, True), said
    code, said = patchline(COLLEAGUE, *submit, "--shared")
    assert (code, str(job) in said) == (0, True), "a colleague's second submission names the job that runs"
    assert "nothing" in said
    code, said = patchline(COLLEAGUE, "cancel", str(run_dir))
    assert code == exit_codes.USER_MISTAKE, said
    assert cluster.squeue_state(job) == "RUNNING"
    code, said = patchline(COLLEAGUE, "stop", str(run_dir))
    assert code == 0, said
    cluster.wait_for(lambda: cluster.squeue_state(job) not in ("RUNNING", "COMPLETING"), deadline_seconds=120)

    (run_dir / "STOP").unlink()
    code, said = patchline(COLLEAGUE, *submit, "--shared")
    assert code == 0, said
    second = int(re.findall(r"\b5\d{4}\b", said)[-1])
    assert second != job
    cluster.wait_for((run_dir / "DONE").exists, deadline_seconds=300)
    assert cluster.job(second)["UserId"].startswith("daemon(1)")
    code, said = patchline(OWNER, "status", str(run_dir))
    assert (code, "done" in said) == (0, True), said
    owners = {path.stat().st_uid for path in run_dir.rglob("*")}
    assert owners == {OWNER[0], COLLEAGUE[0]}
