"""node_local.sh: several processes of a node share one copy of an environment, unpacked once."""

import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT

SCRIPT = CHECKOUT / "slurm" / "node_local.sh"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes an environment that finds patchline and its dependencies where this one does."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "own", with_pip=False)
    (site,) = (folder / "own").glob("lib/python*/site-packages")
    (site / "here.pth").write_text("\n".join([str(CHECKOUT), *(path for path in sys.path if "site-packages" in path)]))
    with tarfile.open(folder / "own.tar", "w") as tar:
        tar.add(folder / "own", arcname=".")
    return folder / "own.tar"


def started(archive: Path, local: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [str(SCRIPT), str(archive), *words],
        env={"PATH": "/usr/bin:/bin", "PATCHLINE_LOCAL": str(local)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_of_a_node_unpack_once(archive: Path, tmp_path: Path) -> None:
    processes = [started(archive, tmp_path, "--version") for _ in range(4)]
    ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, ended
    assert all(out.startswith("patchline ") for out, _ in ended)
    (copy,) = tmp_path.iterdir()
    assert copy.stat().st_mode & 0o777 == 0o700
    unpacked = (copy / "ready").stat().st_mtime_ns
    assert started(archive, tmp_path, "--version").wait(60) == 0
    assert (copy / "ready").stat().st_mtime_ns == unpacked


def test_the_code_of_the_command_is_passed_on(archive: Path, tmp_path: Path) -> None:
    assert started(archive, tmp_path, "nonsense").wait(60) == 2


def test_a_link_in_the_place_of_the_copy_is_refused(archive: Path, tmp_path: Path) -> None:
    assert started(archive, tmp_path, "--version").wait(60) == 0
    (copy,) = tmp_path.iterdir()
    (tmp_path / "theirs").mkdir()
    copy.rename(tmp_path / "moved")
    copy.symlink_to(tmp_path / "theirs")
    process = started(archive, tmp_path, "--version")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "is not a folder of yours; set PATCHLINE_LOCAL" in errors
    assert list((tmp_path / "theirs").iterdir()) == []


def test_what_cannot_be_unpacked_leaves_the_disk_as_it_was(archive: Path, tmp_path: Path) -> None:
    """tar ends in the same way for a full disk and for an archive that was cut off."""
    cut = tmp_path / "it's cut: $HOME.tar"
    cut.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    (tmp_path / "local").mkdir()
    process = started(cut, tmp_path / "local", "--version")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 74
    assert f"{cut} cannot be unpacked to {tmp_path}/local/patchline-" in errors
    assert "make room, or set PATCHLINE_LOCAL" in errors
    assert [path.name for path in (tmp_path / "local").glob("*/*")] == ["lock"]


@pytest.mark.parametrize("archive", ["", "/nowhere/patchline.tar"])
def test_an_archive_that_is_not_there_is_named(archive: str, tmp_path: Path) -> None:
    done = subprocess.run([str(SCRIPT), *([archive] if archive else [])], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert archive in done.stderr
    assert "node_local.sh: give the archive of an environment first" in done.stderr
