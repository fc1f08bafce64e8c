"""The command line: `patchline STAGE RECIPE|FILE.yaml [--any.field VALUE ...]`. Errors become exit codes here.

`_run` turns the words of a command into a job in these steps: 1. `_at_home` replaces `~` with the home
folder. 2. `take_run_flags` takes out the flags that are not fields of the job, such as --processes (jobs/arguments.py).
3. `second_word_first` finds the second word, even if it was given as a flag (jobs/arguments.py). 4. `default_job` makes
the job from this word, which names a recipe, a YAML file or a path (jobs/resolve.py). 5. `values_of` reads the other
flags by the types of the job's fields (jobs/arguments.py). 6. `fitted` adapts the job to the weights, dataset and run
that it names, and says what it chose (jobs/fitted.py). 7. `with_values` sets the values of the flags, which override
everything else. 8. `refuse_missing` and `refuse_secrets` check the whole job (jobs/mistakes.py).

The stage then runs the job, here or on the ranks that `run_ranks` starts, and writes it to RUN/job.yaml.
pipeline/training/run.py lists what a training run decides itself, such as its classes, precision and micro-batch.
"""

import gc
import importlib
import logging
import multiprocessing
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from jobs import exit_codes
from jobs.arguments import RunOptions, second_word_first, take_run_flags, values_of, with_flags, with_values
from jobs.completion import ASK, candidates
from jobs.environment import prepare_streams, use_utf8, wait_quietly
from jobs.exit_codes import Interrupts, end_of
from jobs.fitted import fitted
from jobs.flags import flags_of
from jobs.help import columns, of_job, overview, second_words
from jobs.mistakes import (
    HELP_WORDS,
    kept_sizes,
    refuse_bytes,
    refuse_lost_folder,
    refuse_missing,
    refuse_secrets,
    unknown_stage,
)
from jobs.output import put, work_in
from jobs.ranks import must_start, run_ranks, tell_torchrun
from jobs.resolve import default_job
from jobs.stages import COMMANDS, STAGES, TOOLS, WITH_SMOKE, recipes_of
from pipeline.models.config import SMOKE
from shards.errors import StorageError, UnreachableError
from shards.files.local_files import at_home
from shards.output.terminal import columns_of, command_output, message_text

log = logging.getLogger("patchline")
# Commands for runs that may belong to other users. A PermissionError is then the user's mistake.
_LOOKING = ("status", "watch", "logs", "doctor", "report", "show", "diff", "compare", "ls", "save", "stop", "cancel")
# Commands for slurm/stage.sbatch and the jobs of chains and of preflight, not for users.
HIDDEN = ("__done", "__gate", "__judge", "__probe")


def entry() -> None:
    """Runs the console script. It skips the interpreter's shutdown: the work is on disk by then, and a C++ library that
    aborts while its threads are torn down (seen with Arrow and torch) would turn success into failure."""
    use_utf8(os.environ)
    prepare_streams()
    wait_quietly(os.environ)  # before any stage loads torch
    os.environ["PYTHONSAFEPATH"] = "1"  # child processes take no module from the current folder
    code = main(sys.argv[1:])
    logging.shutdown()
    with suppress(OSError):  # only a library's output can be left; our own has been flushed
        sys.stdout.flush()
    os._exit(code)


def main(argv: list[str]) -> int:
    """Runs one command and returns its exit code; jobs/exit_codes.py decides how each error ends it."""
    if _has_s3_answered():
        from shards.store import trust_addresses  # noqa: PLC0415 - only Slurm jobs need it

        trust_addresses()
    with command_output(rank=_rank()):
        try:
            with Interrupts() as interrupts:
                return _run(argv, interrupts)
        except (Exception, KeyboardInterrupt) as error:
            # Python drops an interrupt that is raised in a finalizer. The error that follows is its consequence.
            return _ended(interrupts.interrupt or error, argv)


def _ended(error: BaseException, argv: list[str]) -> int:
    """Prints the message of an error that ends the command, with the command that works if the error knows it. Returns
    the exit code."""
    if isinstance(error, UnreachableError) and _has_s3_answered():
        error = StorageError(str(error))
    end = end_of(error, is_looking=argv[:1] != [] and argv[0] in _LOOKING)
    if end.has_traceback:
        log.error(end.message, exc_info=error)
    elif end.message:
        _say("\n".join([end.message, *_working_command(error, argv)]))
    return end.code


def _working_command(error: BaseException, argv: list[str]) -> list[str]:
    """Returns a line with the same command and the flags with which it works, if the error has them. Ranks on several
    nodes print none, since only the user knows how they were started."""
    flags = getattr(error, "flags", ())
    num_ranks, num_here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not flags or num_ranks != num_here or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return []
    ranks = ("--processes", num_ranks) if num_ranks != "1" else ()
    return [shlex.join(["patchline", *with_flags(argv, (*flags, *ranks))])]


def _has_s3_answered() -> bool:
    """Whether slurm/stage.sbatch has just reached S3, which shows that the address is right."""
    return bool(os.environ.get("PATCHLINE_S3_ANSWERED"))


def _run(argv: list[str], interrupts: Interrupts) -> int:
    refuse_bytes(argv)
    if not argv or argv[0] in HELP_WORDS:
        return _show(overview(columns()), requested=bool(argv))
    if argv[0] == "help":
        return _run([*argv[1:], "--help"], interrupts)
    if argv[0] == ASK:
        return _show("".join(f"{word}\n" for word in candidates(argv[1:])), requested=True)
    if argv[0] in HIDDEN:
        return _of_scripts(argv[0], argv[1:])
    if argv[0] == "--version":
        from importlib.metadata import version  # noqa: PLC0415 - loads 40 modules that help does not need

        return _show(f"patchline {version('patchline')}\n", requested=True)
    stage, words = argv[0], [_at_home(word) for word in argv[1:]]
    if stage in TOOLS:
        return _tool(stage, words, interrupts)
    if stage not in STAGES:
        raise unknown_stage(stage, list(COMMANDS))
    refuse_lost_folder()
    words, options = take_run_flags(stage, words)
    starts_ranks = must_start(options.processes, os.environ)
    if starts_ranks:
        logging.getLogger().setLevel(logging.WARNING)  # rank 0 logs about the job
    requested = [word for word in words if word in HELP_WORDS]
    words = second_word_first(stage, words, is_help=bool(requested))
    if not words or words[0].startswith("-"):
        return _no_second_word(stage, requested=bool(requested))
    default = default_job(stage, words[0])
    if requested:
        return _help(stage, words[0], default, everything="--help-all" in requested)
    job = _job(stage, default, words, extends="extend" in options.switches)
    if run_dir := getattr(job, "run_dir", ""):
        work_in(Path(run_dir), is_shared="shared" in options.switches)
    if starts_ranks:
        again = [stage, *words, *options.words()]
        return run_ranks(again, num_ranks=options.processes, environ=os.environ, run_dir=job.run_dir)
    return _start(stage, words, job, options, interrupts)


def _at_home(word: str) -> str:
    """Replaces `~` in a word with the home folder. Shells do not do this in `--flag=~/x` or in quotes."""
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{flag}{equals}{at_home(value)}"


def _of_scripts(name: str, words: list[str]) -> int:
    """Runs one of the commands that only batch scripts call."""
    if name == "__done":
        return int(importlib.import_module("jobs.chains.done").tell_done(words))
    if name == "__judge":
        return int(importlib.import_module("jobs.cluster.questions").answer(words, environ=dict(os.environ)))
    if name == "__probe":
        return int(importlib.import_module("jobs.cluster.preflight_nodes").probe_node(words, environ=dict(os.environ)))
    gate = importlib.import_module("jobs.chains.advance").gate
    return int(gate(words, override=_overridden, environ=dict(os.environ)))


def _tool(name: str, words: list[str], interrupts: Interrupts) -> int:
    """Runs a command that parses its own words."""
    requested = any(word in HELP_WORDS for word in words)
    if requested or not (words or name == "status"):
        return _show(second_words(name, {}, columns()), requested=requested)
    # Each run of a sweep is a separate command, which logs by itself how its job differs from the recipe.
    override = partial(_overridden, is_said=False) if name in ("sweep", "vtab") else _overridden
    known: dict[str, Any] = {"override": override, "environ": os.environ, "command": name}
    module = importlib.import_module(TOOLS[name].module)
    interrupts.works()
    return int(module.run(words, **{key: known[key] for key in TOOLS[name].given}))


def _help(stage: str, word: str, job: Any, *, everything: bool) -> int:
    recipes = _recipes(stage)
    base = word.removesuffix(SMOKE)
    about, shown = (recipes[word].__doc__ or "") if word in recipes else "", word or STAGES[stage].usage
    if word not in recipes and base in recipes:
        about = f"A tiny model with {base}'s other settings: it shows that the recipe runs, not how well it trains."
    return _show(of_job(stage, shown, job, about=about, everything=everything, width=columns()), requested=True)


def _start(stage: str, words: list[str], job: Any, options: RunOptions, interrupts: Interrupts) -> int:
    """Imports the stage's module, which may take seconds, and runs the job."""
    word = words[0]
    if _rank() == 0 and (note := kept_sizes(job, words)):
        log.warning(note)
    run_dir = getattr(job, "run_dir", "")  # some stages have no run directory
    if STAGES[stage].loads_torch and _rank() == 0:
        log.info("starting %s %s%s", stage, word, f" in {run_dir}" if run_dir else "")
    name = STAGES[stage].module
    multiprocessing.set_forkserver_preload(["jobs.cli", name])  # loaded once, not by every worker
    module = _imported(name)
    interrupts.works()
    if STAGES[stage].starts_programs:
        return int(module.run(job, environ=dict(os.environ)))
    code = int(module.run(job, **options.arguments(), **_origin(stage, word)))
    if code == exit_codes.CONTINUE and "TORCHELASTIC_ERROR_FILE" in os.environ:
        tell_torchrun(Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
    return code


def _imported(name: str) -> ModuleType:
    """Imports a module with the garbage collector off. Imports make no garbage, and a search for it takes a sixth of
    their time. Later collections skip the imported objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _origin(stage: str, word: str) -> dict[str, Any]:
    """Returns the stage and the job's origin, for the stages that record them."""
    if stage not in WITH_SMOKE:
        return {}
    from jobs.origin import origin_of  # noqa: PLC0415 - not needed for help

    return {"stage": stage, "origin": origin_of(stage, word)}


def _job(stage: str, default: Any, words: list[str], *, extends: bool) -> Any:
    """Returns the job with the flags after the second word applied. Raises UserError if one is wrong or missing."""
    job = _overridden(default, words[1:], (stage, words[0]), extends=extends)
    refuse_missing(list(flags_of(job)), STAGES[stage].required)
    refuse_secrets(list(flags_of(job)))
    return job


def _overridden(
    default: Any, words: list[str], command: tuple[str, str], *, extends: bool = False, is_said: bool = True
) -> Any:
    """Returns the job with the flags applied. `command` is the stage and its second word, which precede `words`.
    `is_said`: whether the choices of `fitted` are logged. Raises UserError if a flag is wrong."""
    values = values_of(words, list(flags_of(default)), command=command)
    default, chosen = fitted(*command, default, values, extends=extends)
    for message in chosen if is_said and _rank() == 0 else ():
        log.info("%s", message)
    return with_values(default, values) if values else default


def _no_second_word(stage: str, *, requested: bool) -> int:
    missing = "" if requested or not STAGES[stage].field else f"{STAGES[stage].field.upper()} is missing\n"
    return _show(missing + second_words(stage, _recipes(stage), columns()), requested=requested)


def _recipes(stage: str) -> Mapping[str, Callable[[], Any]]:
    return recipes_of(stage) if STAGES[stage].recipes else {}


def _show(text: str, *, requested: bool) -> int:
    """Writes requested help to standard output. Help that replaces an error message goes to standard error."""
    if requested:
        with suppress(BrokenPipeError):  # for example `patchline --help | head`
            put(text)
    else:
        sys.stderr.write(text)
    return exit_codes.DONE if requested else exit_codes.USER_MISTAKE


def _say(message: str) -> None:
    who = f"rank {_rank()}: " if _rank() else ""
    sys.stderr.write(message_text(who + message, columns=columns_of(sys.stderr)) + "\n")


def _rank() -> int:
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(rank) if rank.isdecimal() else 0


if __name__ == "__main__":
    entry()
