"""Real processes for tests, started quickly: forked from a server that has imported the project (and torch) once.

Ranks are in a real gloo group. Commands have their own environment, standard output and standard error.
"""

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jobs.cli import main
from pipeline.ranks.world import World, enter, leave
from tests.rigs.forks import ONE_THREAD, forks
from tests.rigs.s3 import free_port

ANSWER_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The exit code and output of a command."""

    code: int
    output: str
    errors: str


def one_world(rank: int = 0, num_ranks: int = 1, *, port: int = 0) -> World:
    """A rank on this machine, on the CPU with one thread."""
    return World(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=rank,
        num_local_ranks=num_ranks,
        master_address="127.0.0.1",
        master_port=port,
        device=torch.device("cpu"),
        num_threads=1,
    )


def run_ranks(function: Callable[..., Any], *arguments: object, num_ranks: int) -> list[Any]:
    """Runs `function(world, *arguments)` in a process group of `num_ranks` processes; their results in rank order."""
    port = free_port()
    with ProcessPoolExecutor(num_ranks, mp_context=forks()) as pool:
        worlds = [one_world(rank, num_ranks, port=port) for rank in range(num_ranks)]
        futures = [pool.submit(_as_rank, function, world, arguments) for world in worlds]
        return [future.result(ANSWER_SECONDS) for future in futures]


def patchline(*words: str, environ: Mapping[str, str] | None = None, umask: int = 0o022) -> Ended:
    """Runs `patchline WORDS` in its own process, in this environment plus `environ`."""
    return _ended(partial(_main, umask), list(words), {**ONE_THREAD, **os.environ, **(environ or {})})


def _main(umask: int, words: list[str]) -> int:
    os.umask(umask)
    return main(words)


def patchline_in_turn(*commands: Sequence[str]) -> Ended:
    """Runs these commands in one process, one after another, until one fails, whose exit code is returned. Modules that
    only some commands need are then imported once."""
    seconds = ANSWER_SECONDS + 10 * len(commands)
    return _ended(_main_in_turn, list(commands), {**ONE_THREAD, **os.environ}, seconds=seconds)


def _main_in_turn(commands: Sequence[Sequence[str]]) -> int:
    for words in commands:
        if code := main(list(words)):
            sys.stderr.write(f"{' '.join(words)} ended with {code}\n")
            return code
    return 0


def patchline_of_a_colleague(*words: str, environ: Mapping[str, str] | None = None) -> Ended:
    """The same for a root that has given up its powers: to files of another user it is a user like any other."""
    return _ended(_powerless_main, list(words), {**ONE_THREAD, **os.environ, **(environ or {})})


def _powerless_main(words: list[str]) -> int:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise RuntimeError("capset failed: this user has no powers to give up")
    return main(words)


def program(text: str, *words: str) -> Ended:
    """Runs `python -c TEXT WORDS` in the same way."""
    return _ended(partial(_run_program, text), list(words), {**ONE_THREAD, **os.environ})


def program_on_ranks(text: str, *words: str, num_ranks: int) -> list[Ended]:
    """Runs `python -c TEXT WORDS` as each of these ranks at once."""
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def ended(rank: int) -> Ended:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return _ended(partial(_run_program, text), list(words), {**ONE_THREAD, **os.environ, **world, **own})

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(ended, range(num_ranks)))


def _ended(
    command: Callable[[Any], int], words: list[Any], environ: dict[str, str], *, seconds: float = ANSWER_SECONDS
) -> Ended:
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        process = forks().Process(target=_as_command, args=(command, words, environ, output, errors))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{words} runs for {seconds:.0f} s: {errors.read_text()}")
        return Ended(code=process.exitcode, output=output.read_bytes().decode(), errors=errors.read_bytes().decode())


def _run_program(text: str, words: list[str]) -> int:
    sys.argv[1:] = words
    exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102  # it stands in the test
    return 0


def _as_rank(function: Callable[..., Any], world: World, arguments: tuple[object, ...]) -> Any:
    enter(world)
    try:
        return function(world, *arguments)
    finally:
        leave()


def _as_command(
    command: Callable[[Any], int], words: list[Any], environ: dict[str, str], output: Path, errors: Path
) -> None:
    for path, number in ((output, 1), (errors, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environ)
    sys.exit(command(words))
