"""Loaders beside a busy step: how many images they deliver, and how much they slow the step.

The arms of `benchmarks.loader`, with one and with two workers (threads of ours, DALI, FFCV and SPDL), each beside a
thread of the same process that multiplies matrices without end, as a training step does on a machine of few cores. The
step's own rate is measured for a moment before the loader starts. Loaders run as fast as they can or, with
`--most-rate`, as fast as a training loop would take their images. Command (about 30 minutes on 2 cores):

    python -m benchmarks.loader_busy --images DIR --work DIR --out benchmarks/results/loader_busy.json
"""

import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks.loader import OURS, RATE, one_arm, parser_of, ready
from benchmarks.measure import machine
from benchmarks.rounds import Aim, Report, Round, aims_table, cell, in_turn, ratios, spread, values, write

WORKERS = (1, 2)
PEERS = ("DALI", "FFCV", "SPDL", "LitData", "ImageFolder")
KEPT = "step_kept"  # the step's rate beside the loader, divided by its rate alone


def main() -> None:
    """Measures all arms with each number of workers, prints and keeps the tables."""
    parser = parser_of(__doc__, arms=[OURS, *PEERS])
    parser.add_argument("--step-threads", type=int, default=1, help="threads of the busy step")
    parser.add_argument("--most-rate", type=int, default=0, help="images taken per second; 0: as fast as they come")
    arguments = parser.parse_args()
    ready(parser, arguments)

    def result(rounds: list[Round]) -> dict[str, Any]:
        return {
            "command": "python -m benchmarks.loader_busy --images DIR --work DIR "
            f"--repeat-to {arguments.repeat_to} --rounds {arguments.rounds} --lanes {arguments.lanes} "
            f"--step-threads {arguments.step_threads} --most-rate {arguments.most_rate} "
            f"--arms {shlex.join(arguments.arms)} "
            f"--out benchmarks/results/{(arguments.out or Path('loader_busy.json')).name}",
            "machine": machine(),
            "step_threads": arguments.step_threads,
            "most_rate": arguments.most_rate,
            "arms": {name: {figure: spread(values(rounds, name, figure)) for figure in (RATE, KEPT)} for name in names},
            "aims": [aim.row() for aim in aims(rounds, arguments.arms)],
            "rounds": rounds,
        }

    def arm(name: str) -> Report:
        loader, _, workers = name.rpartition(" x ")
        step = ("--step-threads", str(arguments.step_threads), "--most-rate", str(arguments.most_rate))
        said = one_arm(loader, arguments, "--workers", workers, *step)
        if "failed" in said:
            return said
        kept = said["step_per_second"] / said["step_alone_per_second"]
        return {RATE: said[RATE], "step_alone_per_second": said["step_alone_per_second"], KEPT: kept}

    names = [arm_name(loader, workers) for workers in WORKERS for loader in arguments.arms]
    rounds = in_turn(names, arm, rounds=arguments.rounds, keep=lambda done: write(arguments.out, result(done)))
    found = result(rounds)
    sys.stdout.write(f"\n{table(found['arms'], arguments.arms)}\n{aims_table(found['aims'])}")


def arm_name(loader: str, workers: int) -> str:
    """The name of an arm with this number of workers."""
    return f"{loader} x {workers}"


def aims(rounds: list[Round], loaders: list[str]) -> list[Aim]:
    """Ours beside the best peer of each figure: at most 5 % lower."""
    found = []
    for workers in WORKERS:
        ours = arm_name(OURS, workers)
        for figure, what in ((RATE, "images/s"), (KEPT, "the step's rate")):
            peers = [arm_name(loader, workers) for loader in loaders if loader != OURS]
            measured = {peer: spread(values(rounds, peer, figure))[1] for peer in peers if values(rounds, peer, figure)}
            if measured:
                best = max(measured, key=lambda peer: measured[peer])
                row = Aim(
                    what=f"{what}, {workers} workers: ours / best peer ({best.rpartition(' x ')[0]})",
                    limit=0.95,
                    at_least=True,
                    found=ratios(rounds, ours, best, figure),
                )
                found.append(row)
    return found


def table(arms: dict[str, Report], loaders: list[str]) -> str:
    """The loaders as Markdown."""
    heads = [f"images/s, {workers} workers | step's rate, %" for workers in WORKERS]
    lines = [f"| | {' | '.join(heads)} |", f"|---{'|---' * 2 * len(WORKERS)}|"]
    for loader in loaders:
        cells = []
        for workers in WORKERS:
            arm = arms[arm_name(loader, workers)]
            cells += [cell(arm[RATE]), cell([100 * value for value in arm[KEPT]])]
        lines.append(f"| {loader} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
