"""Runs a whole command inside another one, before the n-th operation of its stores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shards.storage.local import LocalStore
from shards.storage.s3 import S3Store

_OPERATIONS = ("read", "read_range", "open_read", "size", "exists", "list", "write", "delete", "discard_unfinished")


class Interleaving:
    """Counts the operations of all stores. Before number `at`, `other` runs to its end; its own are not counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._at, self._is_inside = -1, False
        self._other: Callable[[], object] = int
        self.count, self.name = 0, ""
        for kind in (LocalStore, S3Store):
            for name in _OPERATIONS:
                monkeypatch.setattr(kind, name, self._counted(name, getattr(kind, name)))
            monkeypatch.setattr(kind, "create", self._counted_create(kind.create))

    def run(self, command: Callable[[], int], *, other: Callable[[], object], at: int) -> int:
        """The exit code of the command; its errors are raised."""
        self.count, self.name, self._at, self._other = 0, "", at, other
        try:
            return command()
        finally:
            self._at = -1

    def _counted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(store: Any, *arguments: Any, **options: Any) -> Any:
            self._before(name, arguments)
            return operation(store, *arguments, **options)

        return counted

    def _counted_create(self, create: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def counted(store: Any, path: str) -> Iterator[Any]:
            self._before("create", (path,))
            with create(store, path) as file:
                yield file
                self._before("the end of create", (path,))

        return counted

    def _before(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self._is_inside:
            return
        self.count += 1
        if self.count == self._at:
            self.name = f"{name} {arguments[:1]}"
            self._is_inside = True
            try:
                self._other()
            finally:
                self._is_inside = False
