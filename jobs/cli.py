"""The command line: `patchline STAGE RECIPE|FILE.yaml [--any.field VALUE ...]`. Errors become exit codes here."""

import errno
import importlib
import logging
import multiprocessing
import os
import sys
from concurrent.futures import BrokenExecutor

import tyro
from rich.console import Console

from jobs import exit_codes
from jobs.recipes.smoke import SUFFIX
from jobs.resolve import default_job
from jobs.stages import PATH, RECIPE, STAGES, URL, WITH_SMOKE
from shards.errors import UserError, WillNotSucceedError
from shards.terminal import LogFormatter, columns_of, printable, wrapped

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
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(LogFormatter(sys.stderr, rank=_rank()))
    for noisy in ("botocore", "boto3", "urllib3", "s3transfer"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        return _run(argv)
    except UserError as error:
        if isinstance(error, ConnectionError):  # a storage that is there and does not work: no mistake of the user
            return _end(exit_codes.CRASH, f"error: {error}; the same command continues")
        return _end(exit_codes.USER_MISTAKE, f"error: {error}")
    except WillNotSucceedError as error:
        return _end(exit_codes.WILL_NOT_SUCCEED, f"error: {error}")
    except KeyboardInterrupt:
        return _end(130, "interrupted; the same command continues")
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


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        _usage()
        return exit_codes.DONE if argv else exit_codes.USER_MISTAKE
    stage, rest = argv[0], argv[1:]
    if stage not in STAGES:
        raise UserError(f"unknown stage {stage!r}; allowed are {', '.join(STAGES)}")
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
    )
    if stage == "demo":  # its stages are processes of their own, in this environment
        return int(module.run(job, environ=dict(os.environ)))
    return int(module.run(job))


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
    who = f"rank {_rank()}: " if _rank() else ""
    text, columns = who + printable(message), columns_of(sys.stderr)
    sys.stderr.write((wrapped(text, columns) if columns else text) + "\n")
    return code


def _rank() -> int:
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(rank) if rank.isdecimal() else 0


if __name__ == "__main__":
    entry()
