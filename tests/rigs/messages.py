"""A room's messages, each written once, in a table. Other tests check only the type of an error.

A row has a reason, a function that gets an empty folder and the row's arguments, and what it says when it is called:

@table(
    row("no pixels", sized, image_size=0).says("image_size is 0; allowed: 1 to 16,384"),
    row("a pipe", a_pipe).says("InvalidDataError: 'DIR/w.npz' is not a regular file"),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, ParamSpec

import pytest

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A call that is refused, and the message."""

    reason: str
    call: Callable[[Path], object]
    message: str = ""

    def says(self, message: str) -> "Row":
        """Returns the row with its whole message, after the type of its error unless that is UserError.

        DIR stands for the folder, and an ellipsis (…) for what differs from run to run or is too long to show.
        """
        return replace(self, message=message)

    def check(self, folder: Path) -> None:
        """Fails unless the call is refused with this message and an error of exactly this type."""
        with pytest.raises((Exception, SystemExit)) as caught:
            self.call(folder)
        said = said_by(caught.value, folder)
        pattern = ".*".join(map(re.escape, self.message.split("…")))
        if not re.fullmatch(pattern, said, re.DOTALL):
            assert said == self.message


def said_by(error: BaseException, folder: Path) -> str:
    """The message of an error as a row has it."""
    kind = type(error).__name__
    return ("" if kind == "UserError" else f"{kind}: ") + str(error).replace(str(folder), "DIR")


def row(reason: str, call: Callable[Concatenate[Path, P], object], *args: P.args, **kwargs: P.kwargs) -> Row:
    """A row whose call gets these arguments after the folder."""
    return Row(reason=reason, call=lambda folder: call(folder, *args, **kwargs))


def table(*rows: Row) -> pytest.MarkDecorator:
    """Makes a test of each row, named by its reason."""
    return pytest.mark.parametrize("refusal", [pytest.param(each, id=each.reason) for each in rows])
