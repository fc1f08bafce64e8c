"""Who may read and write what a run leaves: the umask says, and a folder that is shared.

A folder is shared if its group may write to it and everything in it stays of that group (chmod g+ws). A command that
works in a shared folder opens what it writes to the group, whatever its own umask is, so that colleagues can watch,
stop and continue the run. `--shared` makes a run's folder so.
"""

import os
import shlex
import stat
from pathlib import Path

from shards.errors import UserError
from shards.output.terminal import printable_name

_OF_GROUP = stat.S_IRWXG
_SHARED = stat.S_ISGID | stat.S_IWGRP


def work_in(folder: Path, *, is_shared: bool = False) -> None:
    """Sets this process's umask for its work in a folder: opened to the group if the folder is shared, or is to become
    so. UserError if it is there, and is not shared."""
    is_there = folder.is_dir()
    is_already = is_there and folder.stat().st_mode & _SHARED == _SHARED
    if is_shared and is_there and not is_already:
        quoted = shlex.quote(str(folder))
        raise UserError(
            f"--shared makes folders, and {printable_name(str(folder))} is there and is not shared; to share it, do: "
            f"chmod -R g+rwX {quoted} && find {quoted} -type d -exec chmod g+s {{}} +"
        )
    if is_shared or is_already:
        os.umask(_umask() & ~_OF_GROUP)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, by the umask; if its group may write to it, what is in it stays the
    group's."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        folder.mkdir(exist_ok=True)  # an error if it is a file
        return
    if not _umask() & _OF_GROUP:
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_ISGID)


def private_mode() -> int:
    """The mode of a file for its owner alone, or for the group too in a shared folder."""
    return 0o600 if _umask() & _OF_GROUP else 0o660


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
