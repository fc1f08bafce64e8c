"""Folders that all workers of a run of pytest share. The first worker that needs one makes it; the others wait.

A record beside the folders, written last, says that a folder is whole and what is in it. If a making fails or its
worker is killed, there is no record, and whoever needs the folder next makes another one: processes that were left
behind may still write to the first. The lock is flock's, which ends with the process that holds it.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Files = dict[str, list[int]]


class MadeOnce:
    """Folders below `root`, by name. They stay where they were made, because runs contain absolute paths."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, name: str, make: Callable[[Path], None]) -> Path:
        """Returns the folder of this name. `make` gets a new folder and fills it, once per run of pytest."""
        record = self.root / f"{name}.json"
        with _locked(self.root / f"{name}.lock"):
            if not record.exists():
                folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.root))
                make(folder)
                part = record.with_suffix(".part")
                part.write_text(json.dumps({"folder": folder.name, "files": _files(folder)}))
                part.replace(record)
        return self.root / str(json.loads(record.read_text())["folder"])

    def changed(self) -> list[str]:
        """The files that were added, removed or written since their folder was made."""
        found = []
        for record in sorted(self.root.glob("*.json")):
            facts = json.loads(record.read_text())
            folder = self.root / str(facts["folder"])
            before: Files = facts["files"]
            now = _files(folder)
            names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            found += [str(folder / name) for name in names]
        return found


def _files(folder: Path) -> Files:
    """Each file below a folder: its size, and when it was written, in nanoseconds."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    facts = {path.relative_to(folder).as_posix(): path.lstat() for path in paths}
    return {name: [fact.st_size, fact.st_mtime_ns] for name, fact in facts.items()}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(number, fcntl.LOCK_UN)  # closing is not enough: forked children have the same open file
    finally:
        os.close(number)
