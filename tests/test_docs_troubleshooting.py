"""docs/troubleshooting.md quotes messages exactly as in the code, and lists every exit code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jobs import exit_codes
from tests.rigs.faults import every_fault

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = (CHECKOUT / "docs" / "troubleshooting.md").read_text()
OTHERS = {"CUDA out of memory", "Address already in use"}  # messages of PyTorch and of the system
QUOTED = [" ".join(text.split()) for text in re.findall(r"^\*\*`(.*?)`\*\*", PAGE, re.MULTILINE | re.DOTALL)]
_FIELD = re.compile(r"%[sdr]|%\.\d+f")


@cache
def said() -> str:
    """Every text in the code, one per line, with … in place of values."""
    texts = []
    for room in ("shards", "pipeline", "jobs"):
        for path in sorted((CHECKOUT / room).rglob("*.py")):
            texts += [_text(node) for node in ast.walk(ast.parse(path.read_text()))]
    return "\n".join(_FIELD.sub("…", text) for text in texts)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@every_fault
def test_every_message_is_said_somewhere() -> Iterator[str]:
    """Compares piece by piece: a piece between two values may come from another text in the code."""
    for message in QUOTED:
        for piece in (piece.strip(" ;:") for piece in message.split("…") if message not in OTHERS):
            if piece not in said():
                yield f"nothing says {piece!r}, of the message {message!r}"


def test_there_are_twenty_messages_and_every_exit_code() -> None:
    assert len(QUOTED) >= 20
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert codes <= {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
