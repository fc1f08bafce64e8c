"""The log of a run is found wherever the job writes it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.cluster.slurm import parsed
from jobs.monitor.logs import asked_log, newest_log
from tests.jobs.chains.test_state import chain  # noqa: F401 - a fixture
from tests.jobs.cluster.test_slurm import RUNNING, UNKNOWN, programs
from tests.jobs.reports.test_ls import make
from tests.rigs.processes import patchline

NO_SLURM = {"PATH": "/nowhere"}


def written(path: Path, text: str = "0: a line\n", *, at: float = 1e9) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that plain sbatch has started as job 2."""
    folder = make(tmp_path / "run")
    (folder / "submit" / "exits-2-0-0").mkdir(parents=True)
    return folder


def test_the_one_that_was_written_last(run_dir: Path, tmp_path: Path) -> None:
    assert newest_log(tmp_path) is None
    job = parsed(RUNNING)
    assert job
    old = written(run_dir / "submit" / "x-1.out")
    assert newest_log(run_dir, [replace(job, log=""), replace(job, log="relative")]) == old
    elsewhere = written(tmp_path / "logs" / "my job.txt", at=2e9)
    assert newest_log(run_dir, [replace(job, log=str(elsewhere))]) == elsewhere
    os.mkfifo(run_dir / "submit" / "x-2.out")
    assert newest_log(run_dir) == old


def test_a_chain_knows_the_logs_of_its_runs(chain: Path) -> None:  # noqa: F811
    path = written(chain / "chain" / "jobs" / "tune-12_1.out")
    run_dir = make(chain / "tune" / "1")
    assert newest_log(run_dir) == path
    assert newest_log(make(chain / "tune" / "0")) is None
    assert patchline("logs", str(run_dir), environ=NO_SLURM).output == "0: a line\n"
    told = " ".join(patchline("logs", str(chain), environ=NO_SLURM).errors.split())
    assert "is a chain: name one of its runs, as `patchline status '" in told


@pytest.mark.parametrize(
    ("text", "is_used"),
    [
        ("{path}\n", True),
        ("{path}", True),
        ("run/submit\n", False),
        ("{path}\x1b[2J\n", False),
        ("{path}\n/etc/passwd\n", False),
        ("/dev/null\n", False),
        ("/" + "x" * 5000, False),
        ("\udcff", False),
    ],
)
def test_the_pointer_of_the_batch_script(run_dir: Path, tmp_path: Path, text: str, is_used: bool) -> None:
    path = written(tmp_path / "logs" / "job of 2.txt")
    pointer = run_dir / "submit" / "exits-2-0-0" / "log"
    pointer.write_bytes(text.replace("{path}", str(path)).encode(errors="surrogateescape"))
    assert newest_log(run_dir) == (path if is_used else None)


def test_slurm_is_asked_if_the_files_do_not_tell(run_dir: Path, tmp_path: Path) -> None:
    old = written(run_dir / "submit" / "x-1.out")
    path = written(tmp_path / "logs" / "log", at=2e9)
    told = RUNNING.replace("/runs/my run/submit/x-2.out", str(path))
    environ = programs(tmp_path, scontrol=f"[ $4 = 2 ] && echo '{told}' || {UNKNOWN}")
    assert asked_log(run_dir, environ) == path
    assert patchline("logs", str(run_dir), environ=environ).output == "0: a line\n"
    assert asked_log(run_dir, NO_SLURM) == old
    assert asked_log(run_dir, programs(tmp_path, scontrol="exit 1")) == old
    named = written(run_dir / "submit" / "x-2.out", at=3e9)
    assert asked_log(run_dir, programs(tmp_path, scontrol="exec sleep 600")) == named


def test_messages_that_have_a_file_of_their_own() -> None:
    job = parsed(RUNNING.replace("StdOut=", "StdErr=/runs/my run/errors StdIn=/dev/null StdOut="))
    assert job
    assert job.log == "/runs/my run/errors"
