"""The page of the site with every command and flag, made from the tables and dataclasses that the help is made from.

python -m docs.flags_page    prints it
"""

import sys
from collections.abc import Iterable, Iterator
from typing import get_args

from docs.models_tables import markdown
from docs.recipes_page import cell
from jobs.arguments import shown_run_flags
from jobs.flags import Flag, default_text, flags_of, groups_of
from jobs.resolve import OF_TRAINING, default_job
from jobs.stages import COMMANDS, STAGES, job_class, recipes_of, usage_of
from shards.config_values import Range

_HEAD = """\
# Commands and flags

This page is made from the code: it has every flag that `patchline STAGE RECIPE --help-all` shows. The defaults are
those without a recipe; `patchline show RECIPE` prints the values of a recipe, and `patchline STAGE` lists the recipes.
A switch, such as `--deep`, takes no value; `--no-deep` turns it off.
"""
_TRAINING = "pretrain"
_SOURCE = "source"


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(part for name in COMMANDS for part in _command(name))])


def _command(name: str) -> Iterator[str]:
    """The section of a command: what it does, how it is called, examples, and the flags of a stage."""
    command = COMMANDS[name]
    yield f"## patchline {name}\n"
    yield f"{command.summary[:1].upper()}{command.summary[1:]}.\n"
    is_about_jobs = name in STAGES or command.is_about_jobs
    lines = [f"{usage_of(name).rstrip()}{' [--flag VALUE ...]' * is_about_jobs}", ""]
    yield "\n".join(["```text", *lines, *(f"patchline {example}" for example in command.examples), "```\n"])
    if name in STAGES:
        yield from _flags(name)


def _flags(name: str) -> Iterator[str]:
    """The flags of a stage, group by group. Those that it shares with training are on the page once."""
    job = job_class(name)()
    flags = list(flags_of(job))
    if name in (*OF_TRAINING, "finetune"):
        training = {(flag.name, flag.sentence) for flag in flags_of(job_class(_TRAINING)())}
        prefix = "training." * (name == "plan")
        flags = [flag for flag in flags if (flag.name.replace(f"--{prefix}", "--"), flag.sentence) not in training]
        how = f" as `--{prefix}FLAG`" * bool(prefix)
        yield f"It takes all flags of [patchline {_TRAINING}](#patchline-{_TRAINING}){how}.\n"
    flags += shown_run_flags(name)
    sentences = groups_of(job)
    for group in dict.fromkeys(flag.group for flag in flags):
        if group:
            yield f"### {name}: {group}\n\n{sentences[group]}\n"
        if (name, group) != ("pack", _SOURCE):
            yield _table(flag for flag in flags if flag.group == group)
            continue
        for recipe in recipes_of(name):  # each reads another kind of source
            yield f"Recipe `{recipe}`:\n"
            yield _table(flag for flag in flags_of(default_job(name, recipe)) if flag.group == group)


def _table(flags: Iterable[Flag]) -> str:
    return markdown(("Flag", "Takes", "Default", "What it sets"), map(_row, flags))


def _row(flag: Flag) -> tuple[str, ...]:
    value = default_text(flag)
    words = [f"`{word}`" for word in flag.choices or filter(None, (flag.takes,))]
    ranges = [str(each) for each in get_args(flag.kind) if isinstance(each, Range)]
    return f"`{flag.name}`", ", ".join([*words, *ranges]), f"`{value}`" if value else "", cell(flag.sentence)


if __name__ == "__main__":
    sys.stdout.write(page())
