"""Shows what a user sees: a pseudo-terminal, and the lines on its screen after everything written to it."""

import logging
import os
import select
import sys
import termios
from typing import TextIO

import pytest

_ROWS = 50
_QUIET_SECONDS = 0.05


class Screen:
    """A pseudo-terminal of `columns` columns. It knows text, carriage returns and new lines; `controls` collects all
    other control characters, which should not occur."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.controls = ""
        self.num_wrapped = 0  # lines that were too long
        self._column = 0
        self.outside, self.inside = os.openpty()
        termios.tcsetwinsize(self.inside, (_ROWS, columns))

    def open(self) -> TextIO:
        """The terminal as a program gets it."""
        return os.fdopen(os.dup(self.inside), "w", encoding="utf-8", buffering=1)

    def take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Redirects standard output, standard error and the log of this process to it for the rest of a test."""
        handler = logging.StreamHandler(self.open())
        handler.setFormatter(logging.Formatter("%(message)s"))
        monkeypatch.setattr(sys, "stdout", self.open())
        monkeypatch.setattr(sys, "stderr", handler.stream)
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])

    def type(self, text: str) -> None:
        """Types text as a user does."""
        os.write(self.outside, text.encode())

    def read(self, *, seconds: float = _QUIET_SECONDS) -> list[str]:
        """The lines on the screen once nothing has been written for a while, without trailing blanks."""
        data = b""
        while select.select([self.outside], [], [], seconds)[0]:
            data += os.read(self.outside, 65536)
        for character in data.decode():
            self._show(character)
        return [line.rstrip() for line in self.lines]

    def close(self) -> None:
        """Closes both ends."""
        os.close(self.outside)
        os.close(self.inside)

    def _show(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self.lines.append("")
        elif character < " ":
            self.controls += character
        else:
            if self._column == self.columns:
                self.lines.append("")
                self._column, self.num_wrapped = 0, self.num_wrapped + 1
            line = self.lines[-1].ljust(self._column)
            self.lines[-1] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1
