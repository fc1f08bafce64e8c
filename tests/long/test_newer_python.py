"""The tests of shards/ on a newer Python, in an environment of their own without torch."""

import os
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LAST_LINES = 40


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tests_of_shards_pass_on_a_newer_python() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAKE"))}
    command = ["make", "--no-print-directory", "test-shards"]
    done = subprocess.run(command, cwd=CHECKOUT, env=environ, capture_output=True, text=True, check=False)
    if "make test-shards: skipped" in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    last = (done.stdout + done.stderr).splitlines()[-LAST_LINES:]
    assert done.returncode == 0, "\n".join(last)
