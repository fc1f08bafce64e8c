"""`python -m patchline` in a folder with packages and modules that have the names of ours and of our libraries."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.images import class_folders

CHECKOUT = Path(__file__).resolve().parent.parent.parent
_LIBRARIES = ("torch", "yaml", "numpy", "pyarrow", "pydantic", "boto3", "rich", "moto", "deepspeed")
THEIRS = ("jobs/__init__.py", "pipeline/__init__.py", "shards/__init__.py", *(f"{name}.py" for name in _LIBRARIES))


def run(command: list[str], folder: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **environ}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def python_m(*words: str) -> list[str]:
    return [sys.executable, "-m", "patchline", *words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project in which every import fails, with a dataset that two workers packed in it."""
    folder = tmp_path_factory.mktemp("project")
    for name in THEIRS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"raise RuntimeError('this is their {name}')\n")
    class_folders(folder / "images", images_a_class=2)
    words = ("--source.root", "images", "--out", "data", "--samples-per-shard", "3", "--workers", "2")
    done = run(python_m("pack", "folder", *words), folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
def test_ranks_and_the_demos_server_find_ours(folder: Path) -> None:
    """Both are started as the demo starts them, from within the folder."""
    program = (
        "import os\n"
        "from pathlib import Path\n"
        "from jobs.train.demo import _s3_server\n"
        "from jobs.ranks import start_ranks\n"
        "with _s3_server(Path('.')) as endpoint:\n"
        "    print(endpoint)\n"
        "print(start_ranks(['verify', 'data'], num_ranks=2, environ=dict(os.environ), log_dir=Path('logs')).wait())\n"
    )
    done = run([sys.executable, "-P", "-c", program], folder, PYTHONPATH=str(CHECKOUT))
    assert done.returncode == 0, done.stderr
    endpoint, code = done.stdout.split()
    assert (endpoint.startswith("http://127.0.0.1:"), code) == (True, "0")
    assert "data: no fault found" in (folder / "logs" / "rank-1.log").read_text()


def test_a_path_that_hides_ours_is_put_behind(folder: Path, tmp_path: Path) -> None:
    """Also for workers. A user's jobs/ on PYTHONPATH is not meant for us; their numpy would be."""
    for name in ("jobs", "pipeline", "shards"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    done = run(python_m("verify", "data", "--workers", "2"), folder, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "data: no fault found" in done.stderr


@pytest.mark.parametrize("words", [["-m", "patchline"], ["-c", "from patchline.__main__ import entry; entry()"]])
@pytest.mark.parametrize("left", ["theirs = True\n", None])
def test_a_package_that_was_installed_over_ours_is_named(tmp_path: Path, words: list[str], left: str | None) -> None:
    """pip overwrites the files of another distribution, and removes them with the one that wrote them last."""
    for room in ("jobs", "patchline", "pipeline", "shards"):
        shutil.copytree(CHECKOUT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    init = tmp_path / "pipeline" / "__init__.py"
    init.unlink()
    if left is not None:
        init.write_text(left)
    done = run([sys.executable, *words, "--version"], tmp_path.parent, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"patchline: {init} is not Patchline's: another distribution with a package 'pipeline'"
    )
    assert "--force-reinstall --no-deps patchline" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_module_that_is_loaded_before_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import jobs\n")
    (tmp_path / "jobs.py").touch()
    done = run(python_m("--help"), tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    theirs = (
        f"the package 'jobs' that Python finds is not Patchline's: it is {tmp_path / 'jobs.py'}, and Patchline's is"
    )
    assert done.stderr.startswith(f"patchline: {theirs} {CHECKOUT / 'jobs'};")


def test_the_version_is_the_packages() -> None:
    done = run(python_m("--version"), CHECKOUT)
    assert done.stdout.split()[0] == "patchline"
