"""What an engine costs the host in a step: ours, plain DeepSpeed, DDP and FSDP2, on a CPU, for 1 to 512 ranks.

    git worktree add ../before bb69e4ac       # ours without flat tensors of blocks, and with DeepSpeed's own step
    python -m benchmarks.engine --rounds 3 --before ../before --out benchmarks/results/engine.json
    python -m benchmarks.engine --table      # the tables of the committed result
    python -m benchmarks.scale --update      # then: what `patchline plan` assumes, and the tables of docs/scale.md

The model has as many parameters as ViT-H/14 has tensors (392), but narrow ones, in bf16, so that computing takes little
time. Each arm trains it in a process of its own, under a process group of this many ranks that exchanges nothing. Its
time is the CPU time of a step, the median of its steps. On a GPU, the host launches the same operations and computes
none of them. What is counted besides (launches, bytes, waits) is described in benchmarks/engine_arms.py. The arms:

- `model`: the forward and backward pass alone, which all arms contain.
- `ours`: the engine, ZeRO stage 1 or 3, with the parameters of each block in two flat tensors.
- `before`: the engine of another checkout (`--before`).
- `deepspeed`: deepspeed.initialize with the plain model and torch's AdamW, at the same stage.
- `ddp`: DistributedDataParallel, gradients as views of its buckets; weights and moments in bf16. Nothing costs the host
  less, so the aims refer to it; but updates below the precision of bf16 are lost.
- `ddp autocast`: DistributedDataParallel as one would train ViT-H/14 with it: fp32 parameters, passes under autocast.
- `fsdp2`: fully_shard for each block and the model, fp32 parameters, passes in bf16, sums in fp32.
  `reshard_after_forward` is False beside stage 1, and True beside stage 3.

All arms clip to a norm of 1 and have AdamW's fused kernel. DeepSpeed and ours add up gradients during the backward
pass, as they do on GPUs. Each has as many buckets as it would have with ViT-H/14. Rounds run the arms in turn.

Losses: each arm but `model` and `before` trains on two real gloo ranks for 50 steps, from the same weights, and its
losses are compared with those of ours under stage 1.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.rounds import Aim, Report, Round, aims_table, cell, in_turn, reported, say, spread, values, write

RESULT = Path("benchmarks/results/engine.json")
_RANKS = (1, 8, 64, 512)
_ARMS = (
    *(("model", 1), ("ours", 1), ("before", 1), ("deepspeed", 1), ("ddp", 1), ("ddp autocast", 1), ("fsdp2", 1)),
    *(("ours", 3), ("before", 3), ("deepspeed", 3), ("fsdp2", 3)),
)
_WITHOUT_STAGES = ("model", "ddp", "ddp autocast")
_OF_BEFORE, _OF_DDP, _OF_FSDP2, _WAITS = 0.25, 1.3, 1.25, 0
_COUNTS = ("launches", "operations", "collectives", "sent_bytes", "waits")
_SECONDS = 600.0  # the longest that an arm may take under all numbers of ranks
_LOSS_STEPS = 50
_WHY = {
    "ours, stage 3": "the norm by which gradients are clipped is a sum in another order",
    "deepspeed, stage 3": "its linear layers round the product to bf16 before they add the bias",
    "ddp": "weights and moments are bf16, so small updates are lost, and gradients are added up in bf16",
    "ddp autocast": "the passes keep norms and softmax in fp32, and gradients are never rounded to bf16",
    "deepspeed, stage 1": "the norm by which gradients are clipped is a sum in another order",
    "fsdp2, stage 1": "the sum of the gradients is not rounded to bf16",
    "fsdp2, stage 3": "the sum of the gradients is not rounded to bf16",
}


def name_of(arm: str, stage: int, num_ranks: int = 0) -> str:
    """Returns an arm's name in the result."""
    name = arm if arm in _WITHOUT_STAGES else f"{arm}, stage {stage}"
    return f"{name}, {num_ranks} rank{'s' * (num_ranks > 1)}" if num_ranks else name


def measured(arm: str, stage: int, *, before: Path | None, folder: Path) -> Report:
    """Runs one arm in processes of its own, and returns its report for each number of ranks."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "benchmarks.engine_arms", arm, str(stage), *map(str, _RANKS)]
    if arm == "before":
        command += ["--code", str(before)]
    environment = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    found = reported([*command, "--report", str(report)], report, seconds=_SECONDS, environment=environment)
    for num_ranks, one in found.items():
        if num_ranks != "failed":
            say(f"{name_of(arm, stage, int(num_ranks)):36s} {one['milliseconds']:.1f} ms")
    return found


def beyond(rounds: Sequence[Round], arm: str, stage: int, num_ranks: int) -> list[float]:
    """Returns the milliseconds of an arm above those of the model's passes alone, round by round."""
    return [one - model for one, model in _pairs(rounds, (arm, stage, num_ranks), ("model", 1, num_ranks))]


def _pairs(
    rounds: Sequence[Round], one: tuple[str, int, int], other: tuple[str, int, int]
) -> Iterator[tuple[float, float]]:
    """Yields the milliseconds of two arms, for each round in which neither failed."""
    for each in rounds:
        first, second = (each.get(name_of(*place), {}).get("milliseconds") for place in (one, other))
        if first is not None and second is not None:
            yield first, second


def aims(rounds: Sequence[Round]) -> Iterator[Aim]:
    """The aims of the engine. What the passes of the model cost is in all arms, so that the comparison with the code of
    before leaves it out."""
    for stage in (1, 3):
        for num_ranks in _RANKS:
            ours, before = (beyond(rounds, arm, stage, num_ranks) for arm in ("ours", "before"))
            what = f"{name_of('ours', stage, num_ranks)}: ms beyond the model's passes, ours / before"
            ratios = [one / other for one, other in zip(ours, before, strict=False)]
            yield Aim(what=what, limit=_OF_BEFORE, found=ratios)
    for peer, stage, limit in (("ddp", 1, _OF_DDP), ("fsdp2", 1, _OF_FSDP2), ("fsdp2", 3, _OF_FSDP2)):
        for num_ranks in _RANKS:
            what = f"{name_of('ours', stage, num_ranks)}: ms, ours / {peer}"
            pairs = _pairs(rounds, ("ours", stage, num_ranks), (peer, stage, num_ranks))
            yield Aim(what=what, limit=limit, found=[ours / theirs for ours, theirs in pairs])
    for num_ranks in _RANKS:
        counts = (each.get(name_of("ours", 1, num_ranks), {}).get("waits") for each in rounds)
        found = [float(sum(each.values())) for each in counts if each is not None]
        yield Aim(what=f"{name_of('ours', 1, num_ranks)}: waits for the device", limit=_WAITS, found=found)


def figures_of(rounds: Sequence[Round], num_parameters: int) -> Iterator[Report]:
    """Yields the figures of each arm. `milliseconds`: the median of the rounds. `quartiles`, `beyond_model`: lower
    quartile, median and upper quartile of these, and of those above the model's passes. What was counted in a step is
    the same in every round."""
    for num_ranks in _RANKS:
        for arm, stage in _ARMS:
            name = name_of(arm, stage, num_ranks)
            done = [each[name] for each in rounds if "milliseconds" in each.get(name, {})]
            if done:
                times = spread(values(rounds, name, "milliseconds"))
                yield {
                    "arm": arm,
                    "stage": stage,
                    "ranks": num_ranks,
                    "milliseconds": times[1],
                    "quartiles": times,
                    "beyond_model": spread(beyond(rounds, arm, stage, num_ranks)),
                    **{count: done[-1][count] for count in _COUNTS},
                    "sent_bytes_per_parameter": round(done[-1]["sent_bytes"] / num_parameters, 3),
                }


def losses_of(world: Any, arm: str, stage: int) -> list[float]:
    """Returns the losses of a rank over 50 steps of four images, which differ between ranks."""
    import torch  # noqa: PLC0415 - only the processes that train need it

    from benchmarks.engine_arms import NUM_CLASSES, SIDE, made  # noqa: PLC0415

    torch.manual_seed(0)
    step = made(arm, stage, world.num_ranks)
    generator = torch.Generator().manual_seed(world.rank)
    images = torch.randint(0, 256, (4, SIDE, SIDE, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (4,), generator=generator)
    return [float(step(images, labels)) for _ in range(_LOSS_STEPS)]


def losses() -> dict[str, Report]:
    """Trains each arm on two ranks, and compares its losses with those of ours under stage 1."""
    from tests.rigs.processes import run_ranks  # noqa: PLC0415

    found = {}
    for arm, stage in _ARMS:
        if arm not in ("model", "before"):
            of_ranks = run_ranks(losses_of, arm, stage, num_ranks=2)
            found[name_of(arm, stage)] = [sum(each) / 2 for each in zip(*of_ranks, strict=True)]
            say(f"losses of {name_of(arm, stage)}: {found[name_of(arm, stage)][-1]:.6f} at the end")
    return compared(found)


def compared(found: Mapping[str, Sequence[float]]) -> dict[str, Report]:
    """Compares the losses of each arm with those of ours under stage 1. `equal_steps`: how many steps at the beginning
    have equal losses, to the bit. `why`: why the others differ."""
    ours = found[name_of("ours", 1)]
    rows = {}
    for name, those in found.items():
        differences = [abs(one - other) / abs(other) for one, other in zip(those, ours, strict=True)]
        is_equal = not any(differences)
        row: Report = {"first": those[0], "last": those[-1], "largest_relative_difference": max(differences)}
        row["equal_steps"] = next((step for step, each in enumerate(differences) if each), len(those))
        rows[name] = row if is_equal else {**row, "why": _WHY.get(name, "not known")}
    return rows


def tables(result: Mapping[str, Any]) -> str:
    """Returns the tables of a result as Markdown."""
    head = ("", "ms", "beyond the model", "launches", "collectives", "bytes sent / parameter", "waits")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in result["figures"]:
        name = name_of(row["arm"], row["stage"], row["ranks"])
        figures = [cell(row["quartiles"]), cell(row["beyond_model"])]
        figures += [row["launches"], row["collectives"], f"{row['sent_bytes_per_parameter']:.2f}"]
        lines.append(f"| {name} | {' | '.join(map(str, figures))} | {sum(row['waits'].values())} |")
    lines += ["", "| | first loss | last | equal steps | largest difference | why |", "|---|---|---|---|---|---|"]
    for name, row in result["losses"].items():
        figures = [f"{row['first']:.6f}", f"{row['last']:.6f}", row["equal_steps"]]
        figures += [f"{row['largest_relative_difference']:.1g}", row.get("why", "")]
        lines.append(f"| {name} | {' | '.join(map(str, figures))} |")
    return "\n".join([*lines, "", aims_table(result["aims"])])


def main() -> None:
    """Measures all arms in turn, compares their losses, and writes and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file for the result")
    parser.add_argument("--rounds", type=int, default=3, help="how often each arm is measured, after a first round")
    parser.add_argument("--before", type=Path, help="a checkout of other code to compare with")
    parser.add_argument("--only-losses", action="store_true", help="compare the losses alone, and write nothing")
    parser.add_argument("--table", action="store_true", help="print the tables of the committed result")
    options = parser.parse_args()
    if options.table:
        sys.stdout.write(tables(json.loads(RESULT.read_text())))
        return
    if options.only_losses:
        sys.stdout.write(json.dumps(losses(), indent=1) + "\n")
        return
    from benchmarks.engine_arms import num_parameters  # noqa: PLC0415 - it loads torch

    places = {name_of(*place): place for place in _ARMS if options.before or place[0] != "before"}
    result: dict[str, Any] = {"command": f"python -m benchmarks.engine --rounds {options.rounds} --before DIR"}
    result |= {"machine": machine(), "losses": losses()}

    def keep(done: list[Round]) -> None:
        rounds = [
            {
                name_of(*places[name], num_ranks): each[name].get(str(num_ranks), {})
                for name in each
                for num_ranks in _RANKS
            }
            for each in done
        ]
        result["figures"] = [*figures_of(rounds, num_parameters())]
        result["aims"] = [aim.row() for aim in aims(rounds)]
        write(options.out, result)

    with tempfile.TemporaryDirectory() as folder:

        def arm(name: str) -> Report:
            return measured(*places[name], before=options.before, folder=Path(folder))

        in_turn(list(places), arm, rounds=options.rounds, keep=keep)
    sys.stdout.write(tables(result))


if __name__ == "__main__":
    main()
