"""Writes the file that --out names: whole or absent, with one message where it cannot be."""

import errno
from pathlib import Path

from shards.errors import UserError
from shards.files.json_lines import write_whole

PAGES = (".html", ".htm")
# The user's mistake; any other fault, such as a full disk, is one outside.
_NOT_HERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


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
