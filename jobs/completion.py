"""`patchline completion bash|zsh|fish`: prints a script for the shell, and answers the script's requests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from jobs import exit_codes
from jobs.arguments import run_flags_of
from jobs.flags import Flag, flags_of
from jobs.output import put
from jobs.resolve import SHOWN, WITH_RECIPES, default_job
from jobs.settings import CheckedJob
from jobs.stages import COMMANDS, STAGES, TOOLS, recipes_of
from shards.errors import UserError

ASK = "__complete"  # the first word of a request for completions
_BASH = f"""\
_patchline() {{
    local IFS=$'\\n'
    COMPREPLY=($(patchline {ASK} "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -F _patchline patchline
"""
_ZSH = f"""\
#compdef patchline
_patchline() {{
    local -a found
    found=("${{(@f)$(patchline {ASK} "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}")
    if [[ -n "${{found[1]}}" ]]; then compadd -- "${{found[@]}}"; else _files; fi
}}
compdef _patchline patchline
"""
_FISH = f"""\
function __patchline
    set -l before (commandline --tokenize --cut-at-cursor --current-process)
    patchline {ASK} $before[2..] (commandline --cut-at-cursor --current-token) 2>/dev/null
end
complete --command patchline --arguments '(__patchline)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


@dataclass(frozen=True, kw_only=True)
class CompletionJob(CheckedJob):
    """The shell that the script is for."""

    shell: Literal["bash", "zsh", "fish"] = "bash"
    """Shell to print the script for; eval the output in the shell's start-up file."""


def run(job: CompletionJob) -> int:
    """Prints the script."""
    put(_SCRIPTS[job.shell])
    return exit_codes.DONE


def candidates(words: Sequence[str]) -> list[str]:
    """Returns completions of the last of `words`, which are the words after `patchline`. The last word may be empty. If
    there are no completions, the shell completes file names."""
    *before, begun = words or ("",)
    return [word for word in _possible(before, begun) if word.startswith(begun)]


def _possible(before: Sequence[str], begun: str) -> Iterable[str]:
    if not before:
        return [*COMMANDS, "--help", "--version"]
    stage = before[0]
    if stage in TOOLS and begun.startswith("-"):
        return [*TOOLS[stage].flags, "--help"]
    if stage in TOOLS:
        return _shown_words(before[1:]) if TOOLS[stage].is_about_jobs else ()
    if stage not in STAGES:
        return ()
    if len(before) == 1 and not begun.startswith("-"):
        return _second_words(stage)
    flags = _flags(stage, before[1] if len(before) > 1 else "")
    if begun.startswith("-"):
        options = [flag.name for flag in run_flags_of(stage) if flags]
        return [*(name for flag in flags for name in flag.names), *options, "--help", "--help-all"]
    last = next((flag for flag in flags if flag.name == before[-1]), None)
    return last.choices if last else ()


def _shown_words(before: Sequence[str]) -> Iterable[str]:
    """Returns the words that `show` and `diff` accept: the recipes of a stage after its name, otherwise the recipes of
    all stages. The first word may also be a stage."""
    if before and before[0] in SHOWN:
        return _second_words(before[0])
    recipes = dict.fromkeys(name for stage in WITH_RECIPES for name in recipes_of(stage))
    return recipes if before else [*SHOWN, *recipes]


def _second_words(stage: str) -> Iterable[str]:
    if STAGES[stage].recipes:
        return recipes_of(stage)
    return _SCRIPTS if stage == "completion" else ()


def _flags(stage: str, word: str) -> list[Flag]:
    try:
        return list(flags_of(default_job(stage, word)))
    except UserError:  # an unknown recipe, or a file that cannot be read
        return []
