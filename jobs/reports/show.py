"""Shows and compares jobs as text. torch is not loaded.

`patchline show [STAGE] RECIPE|FILE|RUN [--any.field VALUE ...]`: prints the job with every field, as YAML that its
stage can read.

`patchline diff [STAGE] A B`: lists the fields in which two jobs differ, one per line. As with diff(1), the exit code is
0 if there is no difference and 1 if there is any.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jobs import exit_codes
from jobs.output import put
from jobs.record import record_text
from jobs.resolve import job_of, split_stage, stages_found
from jobs.stages import job_class
from shards.config_values import differences, shown
from shards.errors import UserError
from shards.output.terminal import printable_name

USAGES = {
    "show": "patchline show [STAGE] RECIPE|FILE.yaml|FILE.py:FUNCTION|RUN [--any.field VALUE ...]",
    "diff": "patchline diff [STAGE] A B, each a RECIPE, FILE.yaml, FILE.py:FUNCTION or RUN",
}
DIFFERENT = 1
_COLUMNS = 80
_GAP = "  "
# A job, flags, the two words before them -> the job with the flags' values.
Override = Callable[[Any, list[str], tuple[str, str]], Any]
Row = tuple[str, str, str]


def run(words: list[str], *, command: str, override: Override) -> int:
    """Prints the job, or the differences between two jobs, and returns the exit code. Raises UserError if the words
    name no job, or jobs of several stages."""
    stage, rest = split_stage(words)
    is_whole = len(rest) == 2 and not any(word.startswith("-") for word in rest)
    if not (is_whole if command == "diff" else rest and not rest[0].startswith("-")):
        is_requested = not {"-h", "--help"}.isdisjoint(rest)
        (sys.stdout if is_requested else sys.stderr).write(f"usage: {USAGES[command]}\n")
        return exit_codes.DONE if is_requested else exit_codes.USER_MISTAKE
    return _diff(stage, *rest) if command == "diff" else _show(stage, rest[0], rest[1:], override)


def _show(stage: str, word: str, flags: list[str], override: Override) -> int:
    stage = stage or _only_stage(word)
    job = override(job_of(word, stage), flags, ("show", f"{stage} {word}"))
    put(record_text(stage, job))
    return exit_codes.DONE


def _only_stage(word: str) -> str:
    stages = stages_found(word)
    if len(stages) > 1:
        commands = ", or: ".join(f"patchline show {stage} {word}" for stage in stages)
        raise UserError(f"{word!r} fits the stages {' and '.join(stages)}; run: {commands}")
    return stages[0]


def _diff(stage: str, first: str, second: str) -> int:
    jobs = (job_of(first, stage), job_of(second, stage)) if stage else _comparable(first, second)
    found = differences(*map(asdict, jobs))
    if not found:
        put(f"{printable_name(f'{first} and {second}')} do not differ\n")
        return exit_codes.DONE
    rows = [("", first, second), *((each.field, shown(each.before), shown(each.now)) for each in found)]
    put(table([(name, printable_name(before), printable_name(now)) for name, before, now in rows]))
    return DIFFERENT


def _comparable(first: str, second: str) -> tuple[Any, Any]:
    """Reads the two jobs. If a word can belong to several stages, both are read as the same stage or, if that is
    impossible, as stages whose jobs have the same fields."""
    pairs = [(a, b) for a in stages_found(first) for b in stages_found(second) if job_class(a) is job_class(b)]
    pairs = [(a, b) for a, b in pairs if a == b] or pairs
    kinds = dict.fromkeys(job_class(a) for a, _ in pairs)
    if not kinds:
        stages = [f"{word} is of {' or '.join(stages_found(word))}" for word in (first, second)]
        raise UserError(f"{', '.join(stages)}: these stages have different fields; give two jobs of one stage")
    if len(kinds) > 1:
        commands = ", or: ".join(f"patchline diff {a} {first} {second}" for a, _ in pairs)
        raise UserError(f"{first} and {second} are in several stages; run: {commands}")
    a, b = pairs[0]
    return job_of(first, a), job_of(second, b)


def table(rows: list[Row]) -> str:
    """Returns lines of three aligned columns. A row that is longer than 80 columns does not widen the others."""
    name = max(len(row[0]) for row in rows)
    fitting = [len(row[1]) for row in rows if name + len(row[1]) + len(row[2]) + 2 * len(_GAP) <= _COLUMNS]
    value = max(fitting, default=0)
    return "".join(f"{row[0]:{name}}{_GAP}{row[1]:{value}}{_GAP}{row[2]}".rstrip() + "\n" for row in rows)
