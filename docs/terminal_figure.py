"""A terminal's screen, with its colours, as an SVG that loads no other files."""

import io
import re

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
BLACK_TO_WHITE = ["1e293b", "f87171", "4ade80", "facc15", "60a5fa", "e879f9", "22d3ee", "e2e8f0"]
BRIGHT = ["64748b", "fca5a5", "86efac", "fde047", "93c5fd", "f0abfc", "67e8f9", "ffffff"]


def draw(screen: str, *, title: str, columns: int) -> str:
    """The SVG of a screen's text with ANSI colours."""
    theme = TerminalTheme(_rgb("101820"), _rgb("e2e8f0"), [*map(_rgb, BLACK_TO_WHITE)], [*map(_rgb, BRIGHT)])
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for line in screen.rstrip().splitlines():
        console.print(Text.from_ansi(line), no_wrap=True, overflow="crop", highlight=False)
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    code_format = without_fonts.replace("Fira Code, monospace", FONTS).replace("arial", "sans-serif")
    return console.export_svg(title=title, theme=theme, code_format=code_format, unique_id="terminal")


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour)
    return red, green, blue
