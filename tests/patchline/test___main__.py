"""`python -m patchline` in a folder that has packages and modules of the names of ours and of our libraries."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent.parent
_LIBRARIES = ("torch", "yaml", "numpy", "pyarrow", "tyro", "pydantic", "boto3", "rich", "moto", "deepspeed")
THEIRS = ("jobs/__init__.py", "pipeline/__init__.py", "shards/__init__.py", *(f"{name}.py" for name in _LIBRARIES))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Somebody's project: whatever of it is imported fails."""
    for name in THEIRS:
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"raise RuntimeError('this is their {name}')\n")
    return tmp_path / "project"


def run(command: list[str], folder: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **environ}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def python_m(*words: str) -> list[str]:
    return [sys.executable, "-m", "patchline", *words]


def test_the_command_and_its_worker_processes_find_ours(folder: Path) -> None:
    for words in (["pack", "digits", "--out", "data", "--workers", "2"], ["verify", "data", "--workers", "2"]):
        done = run(python_m(*words), folder)
        assert done.returncode == 0, done.stderr


def test_ranks_and_the_demos_server_find_ours(folder: Path) -> None:
    """Started as the demo starts them, from within the folder: two ranks, which end with the message for no data."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from patchline.__main__ import _find_ours_first\n"
        "_find_ours_first()\n"
        "import os\n"
        "from jobs.demo import _s3_server\n"
        "from jobs.launch import start_ranks\n"
        "with _s3_server(Path('.')) as endpoint:\n"
        "    print(endpoint)\n"
        "words = ['pretrain', 'digits_smoke', '--data.url', 'nowhere', '--run-dir', 'run', '--device', 'cpu']\n"
        "print(start_ranks(words, num_ranks=2, environ=dict(os.environ), log_dir=Path('logs')).wait())\n"
    )
    done = run([sys.executable, "-P", "-c", program], folder)
    assert done.returncode == 0, done.stderr
    endpoint, code = done.stdout.split()
    assert (endpoint.startswith("http://127.0.0.1:"), code) == (True, "2")
    assert "nowhere has no manifest.json" in done.stderr


def test_a_path_that_hides_ours_is_put_behind(folder: Path) -> None:
    for theirs in folder.glob("*.py"):  # their torch on PYTHONPATH is meant, their jobs/ is not
        theirs.unlink()
    first = run(python_m("pack", "digits", "--out", "data", "--workers", "2"), folder, PYTHONPATH=".")
    assert first.returncode == 0, first.stderr


def test_the_version_is_the_packages() -> None:
    done = run(python_m("--version"), CHECKOUT)
    assert done.stdout.split()[0] == "patchline"
