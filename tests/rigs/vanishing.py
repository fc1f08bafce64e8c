"""Folders that are removed while they are listed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def vanishes_when_listed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[], bool]:
    """Removes `folder` just before it is listed the next time, as another process may. Returns whether that has
    happened."""
    scandir, is_gone = os.scandir, list[Path]()

    def listed(path: Any = ".") -> Any:
        if not is_gone and not isinstance(path, int) and Path(os.fsdecode(path)) == folder:
            is_gone.append(folder)
            shutil.rmtree(folder)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    return lambda: bool(is_gone)
