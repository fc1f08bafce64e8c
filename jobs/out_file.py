"""Writes what --out names: a file that is whole or absent, or weights.

There is one message where a file cannot be written. Weights replace other content only on request, and nothing is ever
deleted.
"""

import errno
import filecmp
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from shards.errors import UserError
from shards.files.local_files import write_whole

PAGES = (".html", ".htm")
# The user's mistake; any other fault, such as a full disk, is one outside.
_NOT_HERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
_MOST_NAMES = 3
_PART = ".part"  # of an interrupted write


def write_to(out: Path, write: Callable[[Path], None], *, overwrite: bool) -> None:
    """`write(out)`, a file or a folder. UserError if `out` has content that this command would not have written; with
    `overwrite`, files of the same names are replaced."""
    if overwrite or not _has_content(out):
        write(out)
        return
    path = out.absolute()  # `.` has neither a name nor a parent
    parent = path.parent if os.access(path.parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{path.name}-") as folder:
        again = Path(folder) / path.name
        write(again)
        others = list(_others(out, again))
        if not others and _files(again) == _files(out):
            return
    if others:
        more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
        raise UserError(
            f"--out is {str(out)!r}, which has other content: {', '.join(others[:_MOST_NAMES])}{more}; give another "
            "--out, or --overwrite, which replaces files of the same names and leaves the others as they are"
        )
    write(out)


def _has_content(out: Path) -> bool:
    return any(out.iterdir()) if out.is_dir() else out.exists()


def _others(out: Path, again: Path) -> Iterator[str]:
    """Files in `out` that the command would not have written, or with other content."""
    if not (out.is_dir() and again.is_dir()):
        if out.is_dir() or again.is_dir() or not filecmp.cmp(out, again, shallow=False):
            yield f"{out.name} ({'a folder' if out.is_dir() else 'a file'})"
        return
    for name in sorted(_files(out)):
        if not name.endswith(_PART):
            same = (again / name).is_file() and filecmp.cmp(out / name, again / name, shallow=False)
            if not same:
                yield name


def _files(folder: Path) -> set[str]:
    if not folder.is_dir():
        return {folder.name}
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def write_out(path: Path, data: bytes, *, todo: str) -> None:
    """UserError with `todo` if the file cannot be there; OSError for a fault of the storage."""
    try:
        write_whole(path, data)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}; {todo}") from error


def write_page(path: Path, page: bytes) -> None:
    """An HTML page, as `write_out`."""
    write_out(path, page, todo="give --out FILE.html in a folder that this user may write to")


def refuse_no_page(out: Path, *, name: str) -> None:
    """UserError if a page cannot have this path, or would replace something else. `name`: that of a page, for the
    message."""
    if out.is_dir():
        raise UserError(f"--out is the folder {str(out)!r}; give the name of a file, such as {str(out / name)!r}")
    if not out.parent.is_dir():
        raise UserError(f"--out is {str(out)!r}, and there is no folder {str(out.parent)!r}; make it first")
    if out.exists() and not (out.is_file() and out.suffix.lower() in PAGES):
        raise UserError(f"--out is {str(out)!r}, which is there and is no .html file; give another name")
