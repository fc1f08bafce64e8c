"""The time that commands take to answer, compared with the interpreter's own start.

Wall time and CPU-seconds of every command in its own process, one after another, in an order that rotates from round to
round. The first round, which loads the files from disk, is not counted. For training, the time until it says that it
starts. Command (half a minute):

    python -m benchmarks.startup --out benchmarks/results/startup.json
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.rounds import Aim, Report, Round, aims_table, in_turn, summary, values, write

BARE, IMPORT = "python -c pass", "python -c 'import patchline'"
COMMANDS: tuple[tuple[str, ...], ...] = (
    (),
    ("--help",),
    ("--version",),
    ("pretrain",),
    ("pack",),
    ("pretrain", "digits_smoke", "--help"),
    ("pretrain", "vit_h14_jft", "--help-all"),
    ("finetune", "imagenet_384", "--help"),
    ("evaluate", "--help"),
    ("plan", "vit_h14_jft", "--help"),
    ("pack", "folder", "--help"),
    ("index", "--help"),
    ("verify", "--help"),
    ("card", "--help"),
    ("import", "--help"),
    ("export", "--help"),
    ("fewshot", "--help"),
    ("inspect", "--help"),
    ("compare", "--help"),
    ("sweep", "--help"),
    ("vtab", "--help"),
    ("demo", "--help"),
    ("predict", "--help"),
    ("weights", "--help"),
    ("ls", "--help"),
    ("doctor", "--help"),
    ("preflight", "--help"),
    ("verify-resume", "--help"),
    ("report", "--help"),
    ("show", "pretrain", "digits_smoke"),
    ("diff", "digits_smoke", "digits_48"),
    ("example", "cluster.yaml"),
    ("completion", "bash"),
    ("pretain",),
    ("pretrain", "digit"),
    ("pretrain", "digits_smoke", "--lr", "0.1"),
    ("pretrain", "digits_smoke", "--steps", "ten"),
)
STARTING: tuple[str, ...] = ("pretrain", "digits_smoke", "--data.url", "nowhere", "--run-dir", "nowhere")
FIGURES = ("wall_seconds", "cpu_seconds")
_ENTRY = "from patchline.__main__ import entry; entry()"
_BARE_ARMS = {BARE: "pass", IMPORT: "import patchline"}


def main() -> None:
    """Measures all commands; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    def keep(rounds: list[Round]) -> None:
        write(arguments.out, results(rounds, arguments.rounds))

    result = results(in_turn(arms(), measured, rounds=arguments.rounds, keep=keep), arguments.rounds)
    sys.stdout.write(f"\n{table(result['arms'])}\n{aims_table(result['aims'])}")


def arms() -> list[str]:
    """The names of all arms: the commands as a user types them."""
    return [BARE, IMPORT, *(" ".join(("patchline", *words)) for words in (*COMMANDS, STARTING))]


def measured(name: str) -> Report:
    """Runs one command to its end, or, for training, until it says that it starts."""
    words = name.split()[1:]
    program = [_BARE_ARMS[name]] if name in _BARE_ARMS else [_ENTRY, *words]
    return _until_starting(program) if tuple(words) == STARTING else _to_its_end(program)


def _to_its_end(program: Sequence[str]) -> Report:
    began, before = time.monotonic(), os.times()
    subprocess.run([sys.executable, "-c", *program], capture_output=True, check=False)
    wall, after = time.monotonic() - began, os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return {"wall_seconds": wall, "cpu_seconds": cpu}


def _until_starting(program: Sequence[str]) -> Report:
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", *program], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        wall = time.monotonic() - began
        process.kill()
    return {"wall_seconds": wall} if b"starting" in line else {"failed": "it does not say that it starts"}


def results(rounds: list[Round], num_rounds: int) -> dict[str, Any]:
    """The results as they are kept."""
    return {
        "command": f"python -m benchmarks.startup --rounds {num_rounds} --out benchmarks/results/startup.json",
        "machine": machine(),
        "arms": summary(rounds, FIGURES),
        "aims": [aim.row() for aim in aims(rounds)],
        "rounds": rounds,
    }


def aims(rounds: list[Round]) -> list[Aim]:
    """The aims of starting, on top of the interpreter's own start."""
    answers = [name for name in arms() if name not in (BARE, IMPORT, " ".join(("patchline", *STARTING)))]
    slowest = [max(beyond) for beyond in zip(*(_beyond(rounds, name) for name in answers), strict=True)]
    return [
        Aim(what="seconds beyond python's start, the slowest answer", limit=0.5, found=slowest),
        Aim(what="seconds beyond python's start, import patchline", limit=0.2, found=_beyond(rounds, IMPORT)),
        Aim(what="seconds until training says that it starts", limit=1.0, found=_wall(rounds, STARTING)),
    ]


def _wall(rounds: list[Round], words: Sequence[str]) -> list[float]:
    return values(rounds, " ".join(("patchline", *words)), "wall_seconds")


def _beyond(rounds: list[Round], name: str) -> list[float]:
    both = zip(values(rounds, name, "wall_seconds"), values(rounds, BARE, "wall_seconds"), strict=True)
    return [command - bare for command, bare in both]


def table(summaries: dict[str, Report]) -> str:
    """The commands as Markdown, with medians."""
    rows = ["| | s | CPU-s |", "|---|---|---|"]
    for name, arm in summaries.items():
        shown = [f"{arm[figure][1]:.2f}" if arm[figure] else "" for figure in FIGURES]
        rows.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
