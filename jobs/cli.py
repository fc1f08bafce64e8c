"""The command line: `patchline STAGE RECIPE|FILE.yaml [--any.field VALUE ...]`. Errors become exit codes here."""

import errno
import importlib
import logging
import multiprocessing
import os
import sys
from concurrent.futures import BrokenExecutor
from pathlib import Path

import tyro
from rich.console import Console

from jobs import exit_codes
from jobs.interrupts import Interrupts, exit_code_of
from jobs.processes import must_start, run_ranks, tell_torchrun
from jobs.recipes.smoke import SUFFIX
from jobs.resolve import default_job
from jobs.stages import PATH, RECIPE, STAGES, URL, WITH_SMOKE
from jobs.wishes import take_wishes, wishes_of
from shards.errors import UserError, WillNotSucceedError

log = logging.getLogger("patchline")


def entry() -> None:
    """Console script. Ends without the interpreter's own ending: the work is done and on disk by then, and a C++
    library that aborts while its threads are taken down (seen with Arrow and torch) would make a failure of it."""
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: list[str]) -> int:
    """Runs one stage and returns its exit code; a user's mistake is a message, not a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for noisy in ("botocore", "boto3", "urllib3", "s3transfer"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        with Interrupts() as interrupts:
            return _run(argv, interrupts)
    except UserError as error:
        if isinstance(error, ConnectionError):  # a storage that is there and does not work: no mistake of the user
            return _end(exit_codes.CRASH, f"error: {error}; the same command continues")
        return _end(exit_codes.USER_MISTAKE, f"error: {error}")
    except WillNotSucceedError as error:
        return _end(exit_codes.WILL_NOT_SUCCEED, f"error: {error}")
    except KeyboardInterrupt as interrupt:
        return _end(exit_code_of(interrupt), "interrupted; the same command starts again")
    except (AssertionError, TypeError, AttributeError, LookupError):
        log.exception("this is a bug in patchline; please report it with the lines below")
        return exit_codes.OUR_BUG
    except BrokenExecutor as error:
        message = f"a worker process was killed ({error}); was memory short?"
        return _end(exit_codes.CRASH, f"error: {message} The same command continues; take fewer --workers")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM):
            log.exception("the system refused; the same command continues")
            return exit_codes.CRASH
        where = f" at {error.filename}" if error.filename else ""
        return _end(exit_codes.CRASH, f"error: {error.strerror}{where}; make room, and the same command continues")
    except Exception:
        log.exception("ended by an unexpected error; the same command continues")
        return exit_codes.CRASH


def _run(argv: list[str], interrupts: Interrupts) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        _usage()
        return exit_codes.DONE if argv else exit_codes.USER_MISTAKE
    stage, rest = argv[0], argv[1:]
    if stage not in STAGES:
        raise UserError(f"unknown stage {stage!r}; allowed are {', '.join(STAGES)}")
    rest, wishes = take_wishes(stage, rest)
    second = STAGES[stage].second
    asks = bool(rest) and rest[0].startswith("-") and not {"-h", "--help"}.isdisjoint(rest)
    if second in (URL, PATH):
        rest = [second, "--help"] if asks else _place_first(rest, flag=f"--{second.split('|')[0].lower()}")
    if second and (not rest or rest[0].startswith("-")):
        return _second_word_help(stage, asked=asks)
    name = f"jobs.{STAGES[stage].module or stage}"
    multiprocessing.set_forkserver_preload(["jobs.cli", name])  # workers need not load them one by one
    module = importlib.import_module(name)
    default = default_job(stage, module, rest[0]) if second else module.DemoJob()
    job = tyro.cli(
        type(default),
        default=default,
        args=rest[1:] if second else rest,
        prog=f"patchline {stage} {rest[0] if second else ''}".rstrip(),
        config=(tyro.conf.AvoidSubcommands,),
        description="  ".join(f"{wish.flag} {wish.value}".strip() + f": {wish.says}" for wish in wishes_of(stage))
        or None,
    )
    if must_start(wishes.processes, os.environ):
        again = [stage, *rest, *(f"--{switch}" for switch in wishes.switches)]
        return run_ranks(again, num_ranks=wishes.processes, environ=os.environ, run_dir=job.run_dir)
    interrupts.works()
    if stage == "demo":  # its stages are processes of their own, in this environment
        return int(module.run(job, environ=dict(os.environ)))
    code = int(module.run(job, **dict.fromkeys(wishes.switches, True)))
    if code == exit_codes.CONTINUE and "TORCHELASTIC_ERROR_FILE" in os.environ:
        tell_torchrun(Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
    return code


def _place_first(words: list[str], *, flag: str) -> list[str]:
    """The words with the value of --path (or --url) as the first, where it was given as a flag."""
    if not words or not words[0].startswith("-"):
        return words
    for at, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return [word.removeprefix(f"{flag}="), *words[:at], *words[at + 1 :]]
        if word == flag and at + 1 < len(words):
            return [words[at + 1], *words[:at], *words[at + 2 :]]
    return words


def _second_word_help(stage: str, *, asked: bool) -> int:
    console = Console(stderr=not asked)
    if not asked and STAGES[stage].second in (URL, PATH):
        console.print(f"{STAGES[stage].second.split('|')[0]} is missing, the second word", highlight=False)
    console.print(f"usage: patchline {stage} {STAGES[stage].second} \\[--any.field VALUE ...]")
    if STAGES[stage].second == RECIPE:
        recipes = importlib.import_module(f"jobs.recipes.{stage}").RECIPES
        for name, recipe in recipes.items():
            console.print(f"  {name:20s} {(recipe.__doc__ or '').strip().splitlines()[0]}", highlight=False)
        if stage in WITH_SMOKE:
            console.print(f"RECIPE{SUFFIX} is any of them at a size that runs in seconds on a CPU")
        console.print(f"patchline {stage} RECIPE --help lists every field with its value")
    return exit_codes.DONE if asked else exit_codes.USER_MISTAKE


def _usage() -> None:
    console = Console(stderr=True)
    console.print("usage: patchline STAGE RECIPE|FILE.yaml|URL|PATH \\[--any.field VALUE ...]")
    for name, stage in STAGES.items():
        console.print(f"  {name:10s} {stage.summary}", highlight=False)


def _end(code: int, message: str) -> int:
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    sys.stderr.write(message + "\n" if rank == "0" else f"rank {rank}: {message}\n")
    return code


if __name__ == "__main__":
    entry()
