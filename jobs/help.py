"""Makes the text of --help from the table of stages and the sentences of the fields. It is plain text, as wide as the
terminal."""

import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from jobs.arguments import run_flags_of, shown_run_flags
from jobs.flags import Flag, default_text, flags_of, groups_of
from jobs.mistakes import required_flags
from jobs.stages import COMMANDS, STAGES, TOOLS, WITH_SMOKE, commands_of
from pipeline.models.config import SMOKE

_PIPE_COLUMNS = 100
_LEAST_COLUMNS, _MOST_COLUMNS = 60, 140  # longer lines are hard to read
_FIRST_SENTENCE = re.compile(r"\.\s")
_MOST_LEFT = 34  # if a flag is longer, its sentence begins on the next line

Recipes = Mapping[str, Callable[[], Any]]
Row = tuple[str, str]


def columns() -> int:
    """Returns the terminal's width within limits, or 100 columns if there is no terminal."""
    wide = shutil.get_terminal_size((_PIPE_COLUMNS, 24)).columns
    return max(_LEAST_COLUMNS, min(wide, _MOST_COLUMNS))


def overview(width: int) -> str:
    """Returns the text of `patchline --help`: every stage with its summary."""
    blocks = [
        "usage: patchline STAGE RECIPE|FILE.yaml|URL|PATH [--any.flag VALUE ...]",
        _rows([(name, stage.summary) for name, stage in COMMANDS.items()], width),
        _rows(
            [
                ("patchline STAGE", "lists its recipes or shows its usage"),
                ("patchline STAGE RECIPE --help", "lists the usual flags, --help-all every flag"),
                ("patchline --version", "shows the version"),
            ],
            width,
        ),
        _examples(
            (
                "demo",
                "pack folder --source.root photos --out data/photos",
                "pretrain photos_smoke --data.url data/photos --run-dir runs/photos",
            ),
            width,
        ),
    ]
    return "\n\n".join(blocks) + "\n"


def second_words(name: str, recipes: Recipes, width: int) -> str:
    """Returns the text of `patchline STAGE`: what the second word can be."""
    stage = COMMANDS[name]
    flags = " [--any.flag VALUE ...]" if name in STAGES or TOOLS[name].is_about_jobs else ""
    usage = _filled(f"usage: patchline {name} {stage.usage}{flags}", width, indent=" " * len("usage: "))
    blocks = [usage, f"{_sentence(stage.summary)}"]
    if recipes:
        blocks += _groups(recipes, width)
        hints = [
            "(Table 5): the table of the paper that has the recipe's result",
            f"patchline {name} RECIPE{SMOKE} trains a tiny model, of 24 to 500 thousand parameters, with the recipe's "
            "other settings, in seconds on a CPU",
        ] * (name in WITH_SMOKE)
        hints.append(f"patchline {name} RECIPE --help lists the usual flags with their values, --help-all every flag")
        blocks.append("\n".join(_filled(hint, width) for hint in hints))
    blocks.append(_examples(stage.examples, width))
    return "\n\n".join(blocks) + "\n"


def of_job(name: str, word: str, job: Any, *, about: str, everything: bool, width: int) -> str:
    """Returns the text of `patchline STAGE RECIPE --help`: the flags of a job, with their defaults.

    `about` is the recipe's docstring. `everything` asks for all flags by group instead of only the usual ones.
    """
    stage, flags = STAGES[name], [*flags_of(job), *shown_run_flags(name)]
    required = required_flags(flags, stage.required)
    others = [flag for flag in flags if flag not in required]
    usual_names = (*stage.usual, *(flag.name for flag in run_flags_of(name) if flag.is_usual))
    usual = [flag for flag_name in usual_names for flag in others if flag.name == flag_name]
    groups = _by_group(others) if everything or not stage.usual else {"usual": usual}
    if required:
        groups = {"required": required, **groups}
    shown = [flag for group in groups.values() for flag in group]
    indent = _indent(flag.usage for flag in shown)
    text = [" ".join(one.split()).replace("`", "") for one in about.split("\n\n") if one.strip()]
    own = commands_of(name, word) if about else []
    own += [one for one in stage.examples if not own or word in one.split()]
    blocks = [
        _usage(name, word, required, width),
        *(_filled(one, width) for one in text or [_sentence(stage.summary)]),
    ]
    about_groups = groups_of(job)
    for title, group in groups.items():
        heading = _filled(f"{title}: {about_groups.get(title, '')}".rstrip(), width)
        blocks.append(f"{heading}\n{_flag_rows(group, width, indent)}")
    blocks += [f"--help-all lists all {len(flags)} flags"] * (len(shown) < len(flags))
    blocks.append(_examples(own, width))
    return "\n\n".join(blocks) + "\n"


def _usage(name: str, word: str, required: Sequence[Flag], width: int) -> str:
    # URL|FILE.yaml is not shown a second time as --url URL.
    flags = [flag.usage for flag in required if flag.name != f"--{STAGES[name].field}"]
    whole = [one.replace(" ", "\0") for one in (*flags, "[--flag VALUE ...]")]  # no line break inside a flag
    words = " ".join([f"usage: patchline {name} {word}".rstrip(), *whole])
    return _filled(words, width, indent=" " * len("usage: ")).replace("\0", " ")


def _by_group(flags: Sequence[Flag]) -> dict[str, list[Flag]]:
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        groups.setdefault(flag.group or "flags", []).append(flag)
    return groups


def _flag_rows(flags: Sequence[Flag], width: int, indent: int) -> str:
    return _rows([(flag.usage, _with_default(flag)) for flag in flags], width, indent=indent)


def _with_default(flag: Flag) -> str:
    value = default_text(flag)
    return f"{flag.sentence} [{value}]".strip() if value else flag.sentence


def _indent(lefts: Iterable[str]) -> int:
    """Returns the column at which the right side begins."""
    return 2 + max((len(left) for left in lefts if len(left) <= _MOST_LEFT), default=_MOST_LEFT) + 2


def _groups(recipes: Recipes, width: int) -> Iterator[str]:
    """Yields the recipes of each file below the first sentence of its docstring, which names the paper. If there are
    several files, each recipe has one line, which is cut off where the line ends."""
    by_file = [list(group) for _, group in groupby(recipes.items(), key=lambda item: item[1].__module__)]
    indent = _indent(name for name in recipes)
    for group in by_file:
        rows = [(name, _first_line(function)) for name, function in group]
        if len(by_file) == 1:
            yield _rows(rows, width)
            return
        heading = _FIRST_SENTENCE.split(_first_line(inspect.getmodule(group[0][1])))[0].rstrip(".")
        short = [(name, textwrap.shorten(about, width - indent, placeholder=" ...")) for name, about in rows]
        yield f"{_filled(f'{heading}:', width)}\n{_rows(short, width, indent=indent)}"


def _rows(rows: Sequence[Row], width: int, *, indent: int = 0) -> str:
    """Formats two columns. A left side that is too long gets a separate line."""
    indent = indent or _indent(left for left, _ in rows)
    lines = []
    for left, right in rows:
        text = textwrap.wrap(right, width - indent, break_long_words=False, break_on_hyphens=False) or [""]
        if len(left) > _MOST_LEFT:
            lines += [f"  {piece}" for piece in _filled(left, width - 2, indent="    ").splitlines()]
            lines += [" " * indent + line for line in text]
        else:
            lines.append(f"  {left:{indent - 2}}{text[0]}".rstrip())
            lines += [" " * indent + line for line in text[1:]]
    return "\n".join(lines)


def _examples(commands: Iterable[str], width: int) -> str:
    """Writes each command on one line, or on several lines that end in a backslash."""
    lines = [_wrapped(f"patchline {command}", width - 4) for command in dict.fromkeys(commands)]
    return "\n".join(["examples:", *("  " + " \\\n      ".join(words) for words in lines)])


def _wrapped(command: str, width: int) -> list[str]:
    """Cuts the command before flags, into pieces of at most `width` columns unless a single flag is longer."""
    first, *flags = re.split(r" (?=--)", command)
    pieces = [first]
    for flag in flags:
        if len(pieces[-1]) + 1 + len(flag) <= width - 4 * (len(pieces) > 1):
            pieces[-1] += f" {flag}"
        else:
            pieces.append(flag)
    return pieces


def _first_line(documented: object) -> str:
    return " ".join((documented.__doc__ or "").strip().split("\n\n")[0].split())


def _sentence(summary: str) -> str:
    return f"{summary[:1].upper()}{summary[1:]}."


def _filled(text: str, width: int, *, indent: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
