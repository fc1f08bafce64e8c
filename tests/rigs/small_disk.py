"""A file system of a few kilobytes, to fill up: a tmpfs, which only root may mount."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *, num_bytes: int) -> Iterator[Path]:
    """`folder` with room for so many bytes; skips the test where mounting is not allowed."""
    folder.mkdir()
    size = f"size={num_bytes},mode=0700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"a full disk needs a mount, and mounting is not allowed: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def filled(folder: Path) -> Path:
    """Fills the disk of a folder to its last byte. Returns the file that takes the room."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    return filler


def in_tmpdir() -> None:
    """For a forked command, before it starts: forgets the folder for temporary files that its server had looked up."""
    tempfile.tempdir = None
