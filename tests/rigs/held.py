"""Holds a command at a function of the project until a signal ends it, for tests that interrupt it there."""

import importlib
import os
import threading
import time
from pathlib import Path
from typing import Any

_AT, _MARK, _COUNT = "PATCHLINE_TESTS_HELD_AT", "PATCHLINE_TESTS_HELD_MARK", "PATCHLINE_TESTS_HELD_COUNT"
MOST_SECONDS, _PAUSE_SECONDS = 120.0, 0.05


def held_at(function: str, mark: Path, *, count: int = 1) -> dict[str, str]:
    """The environment of a command that `hold` prepares: it is held at the `count`-th call of module:function, and
    writes the file `mark` then."""
    return {_AT: function, _MARK: str(mark), _COUNT: str(count)}


def hold() -> None:
    """For a forked command, before it starts."""
    module_name, _, name = os.environ.pop(_AT).partition(":")
    mark, left = Path(os.environ.pop(_MARK)), [int(os.environ.pop(_COUNT))]
    module = importlib.import_module(module_name)
    function = getattr(module, name)

    def held(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            mark.touch()
            # In short waits: a signal that comes just before one is answered only when it ends.
            pause, end = threading.Event(), time.monotonic() + MOST_SECONDS
            while time.monotonic() < end:
                pause.wait(_PAUSE_SECONDS)
        return function(*arguments, **options)

    setattr(module, name, held)
