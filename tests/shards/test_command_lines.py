"""Commands are wrapped before their flags, and still work when they are copied."""

import shlex

import pytest

from shards.command_lines import command_lines


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        pytest.param(["a"], ["next: a"], id="one word"),
        pytest.param(["a", "--b", "c"], ["next: a --b c"], id="it fits"),
        pytest.param(["a", "--b", "c d"], ["next: a --b 'c d'"], id="quoted"),
        pytest.param(
            ["a", "--b", "c" * 8, "--d", "e", "--f", "g"],
            ["next: a --b cccccccc \\", "    --d e --f g"],
            id="as much on a line as fits",
        ),
        pytest.param(
            ["a", "--b", "c" * 40, "--d", "e"], ["next: a \\", f"    --b {'c' * 40} \\", "    --d e"], id="a long word"
        ),
    ],
)
def test_commands_can_be_copied(words: list[str], lines: list[str]) -> None:
    found = command_lines("next: ", words, columns=24)
    assert found == lines
    assert shlex.split("\n".join(found).removeprefix("next: ").replace("\\\n", "")) == words


def test_a_command_cannot_move_the_cursor() -> None:
    assert command_lines("$ ", ["a", "b\x1b[2J"], columns=80) == ["$ a 'b\\x1b[2J'"]
