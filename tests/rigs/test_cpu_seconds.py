"""CPU-seconds of tests and, apart from them, of what they share, in two workers of pytest-xdist."""

import re
import subprocess
import sys
from pathlib import Path

from tests.rigs.cpu_seconds import folder_of

CHECKOUT = Path(__file__).resolve().parents[2]
INNER = """
import time
import pytest
from tests.rigs.cpu_seconds import METER

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture(scope="session")
def outer():
    burn(0.2)
    with METER.apart("made::inner", "run"):
        burn(0.4)

@pytest.fixture(scope="module")
def module():
    burn(0.3)

@pytest.fixture
def own():
    burn(0.1)

def test_first(outer, module, own):
    pass

def test_second(outer, module):
    pass
"""


def test_what_is_shared_counts_apart_from_the_test_that_starts_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(INNER)
    options = ["-p", "tests.rigs.ends", "-p", "tests.rigs.cpu_seconds", "-p", "no:cacheprovider", "--cpu-seconds", "9"]
    workers = ["-n", "2", "--dist", "loadfile", "--rootdir", str(tmp_path)]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-m", "pytest", *options, *workers, str(tmp_path)]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    found = {name: float(cost) for cost, name in re.findall(r"^ +(\d+\.\d+) +(\S.*)$", done.stdout, re.MULTILINE)}
    for name in ("a", "b"):
        assert 0.1 <= found[f"{name}/test_{name}.py::test_first"] < 0.25, done.stdout
        assert found[f"{name}/test_{name}.py::test_second"] < 0.1, done.stdout
        assert 0.3 <= found[f"1 x module    {name}/test_{name}.py::module"] < 0.5, done.stdout
        assert 0.2 <= found[f"1 x session   {name}/test_{name}.py::outer"] < 0.4, done.stdout
        assert 0.6 <= found[name] < 1.1, "the folder has its tests and its fixtures"
    assert 0.8 <= found["2 x run       made::inner"] < 1.2, "added up over the workers"


def test_folders() -> None:
    assert folder_of("tests/jobs/test_x.py::test_y[a/b.py]") == "tests/jobs"
    assert folder_of("tests::digits_url") == "tests"
    assert folder_of("test_x.py::test_y") == "."
