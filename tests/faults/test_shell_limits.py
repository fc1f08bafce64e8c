"""A shell's limits, or a host without a loopback interface, end a command with 2 and one message with its remedy."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.forks import ONE_THREAD
from tests.rigs.training import pretrain_words

RAISE_ADDRESSES = "of addresses (ulimit -v); raise that limit (ulimit -v unlimited), and run the same command again"
RAISE_FILES = "may write files of at most 100.0 kB (ulimit -f); raise that limit (ulimit -f unlimited)"


def ended(prefix: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-P", "-m", "jobs.cli", *words]
    environ = {**os.environ, **ONE_THREAD}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
@pytest.mark.parametrize(
    ("limit", "said"),
    [("--as=500000000", f"this process may have 0.5 GB {RAISE_ADDRESSES}"), ("--fsize=100000", RAISE_FILES)],
)
def test_a_limit_of_the_shell_is_named(digits_url: str, tmp_path: Path, limit: str, said: str) -> None:
    done = ended(("prlimit", limit), *pretrain_words(digits_url, tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert last.endswith(said)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_ranks_without_a_loopback_interface_are_not_started(digits_url: str, tmp_path: Path) -> None:
    done = ended(("unshare", "--net"), *pretrain_words(digits_url, tmp_path / "run", "--processes", "2"))
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "error: the ranks cannot meet at 127.0.0.1: Network is unreachable; bring the loopback interface up "
        "(ip link set lo up), or leave out --processes\n"
    )
    assert not (tmp_path / "run").exists()
