"""torchvision's Python half imports with any build of torch; without torchvision, nothing is declared."""

import sys

import pytest

from benchmarks.torchvision_operators import import_torchvision


def test_torchvision_imports_twice() -> None:
    module = import_torchvision()
    assert module is not None
    assert module.__name__ == "torchvision"
    assert import_torchvision() is module


def test_where_it_is_not_installed_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if it were not installed
    assert import_torchvision() is None
