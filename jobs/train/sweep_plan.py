"""Parses a sweep's arguments into the runs that it makes: a try for each point of the grid, then the best with several
seeds. Pure."""

import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs.arguments import shown_run_flags, value_in
from jobs.flags import Flag, flags_of
from jobs.mistakes import unknown_flag
from jobs.train.trials import METRICS, Metric, Trial
from shards.config_values import shown_value, whole_number, without_range
from shards.errors import UserError

MOST_TRIES = 1000
_OPTIONS = {
    "--seeds": "1 to 1000",
    "--select-on": "a dataset",
    "--score": ", ".join(METRICS),
    "--phase": "tries, seeds",
    "--part": "I/N",
}
_HELD_OUT = "--data.held-out."  # for the tries only; the repetitions are trained on all data
_DRY = "--dry-run"
_ALSO = "--evaluation.also"  # for the repetitions only; the tries are compared on one dataset
_NOT_SWEPT = {"--run-dir": "the sweep has one folder", "--seed": "the best is repeated with --seeds N"}


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The arguments of a sweep, parsed. `grid`: the values of each swept flag; an empty grid means that there are only
    repetitions. The tries are scored on the dataset `select_on`, or on the part of the training data that the flags
    `held_out` hold out. All runs are compared by `metric`. A task of an array takes every `parts`-th run of `phase`,
    starting at number `part`."""

    stage: str
    recipe: str
    folder: Path
    fixed: tuple[str, ...]
    grid: tuple[tuple[str, tuple[str, ...]], ...]
    seeds: int = 3
    first_seed: int = 0
    select_on: str = ""
    metric: Metric = "accuracy"
    held_out: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    phase: str = ""
    part: int = 0
    parts: int = 1
    is_dry: bool = False

    def tries(self) -> list[Trial]:
        """Returns a run for each point of the grid, scored on `select_on` or on held-out training data. Without a grid
        there are none."""
        if not self.grid:
            return []
        flags = [flag for flag, _ in self.grid]
        points = itertools.product(*(values for _, values in self.grid))
        found = [self._trial("tries", tuple(zip(flags, point, strict=True))) for point in points]
        return [replace(one, words=(*one.words, f"--evaluation.url={self.select_on}", *self.held_out)) for one in found]

    def repetitions(self, best: tuple[tuple[str, str], ...]) -> list[Trial]:
        """Returns the runs with the best values, one for each seed from `first_seed` on, scored as the command says."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        found = [self._trial("seeds", best, name=str(seed)) for seed in seeds]
        return [
            replace(one, seed=seed, words=(*one.words, *self.also, f"--seed={seed}"))
            for one, seed in zip(found, seeds, strict=True)
        ]

    def first_values(self) -> tuple[tuple[str, str], ...]:
        """Returns the first value of each swept flag, which stands in for the best one until that is known."""
        return tuple((flag, values[0]) for flag, values in self.grid)

    def own(self, trials: Sequence[Trial]) -> list[Trial]:
        """Returns the trials that this task of an array runs."""
        return list(trials[self.part :: self.parts])

    def _trial(self, kind: str, values: tuple[tuple[str, str], ...], *, name: str = "") -> Trial:
        folder = self.folder / kind / (name or _folder_name(values))
        given = [f"{flag}={value}" for flag, value in values]
        words = (self.stage, self.recipe, *self.fixed, *given, f"--run-dir={folder}")
        return Trial(folder=folder, values=values, words=words, metric=self.metric)


def plan_of(words: Sequence[str], default: Any) -> SweepPlan:
    """Returns the sweep that `STAGE RECIPE ...` asks for. `default`: the recipe's job. Raises UserError if the
    arguments are not allowed in a sweep."""
    flags = [*flags_of(default), *shown_run_flags(words[0])]
    found = _sorted(words[2:], flags, command=f"patchline {words[0]} {words[1]}")
    options, given = found.options, whole_number(value_in(found.fixed, "--seed"))
    phase, (part, parts) = options.get("--phase", ""), _part(options.get("--part", ""))
    plan = SweepPlan(
        stage=words[0],
        recipe=words[1],
        folder=Path(options.get("--run-dir", "")),
        fixed=tuple(found.fixed),
        grid=tuple(found.grid.items()),
        seeds=seeds_of(options.get("--seeds", "3")),
        first_seed=default.seed if given is None else given,
        select_on=options.get("--select-on", ""),
        metric=_metric(options.get("--score", "accuracy")),
        held_out=tuple(found.held_out),
        also=tuple(found.also),
        phase=phase,
        part=part,
        parts=parts,
        is_dry=_DRY in options,
    )
    _refuse_wrong(plan, options)
    return plan


@dataclass(frozen=True, kw_only=True)
class _Sorted:
    """The arguments of a sweep, grouped by purpose."""

    options: dict[str, str] = field(default_factory=dict)
    grid: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    also: list[str] = field(default_factory=list)


def _sorted(words: Sequence[str], flags: Sequence[Flag], *, command: str) -> _Sorted:
    """Sorts the arguments. Raises UserError for a flag that neither a sweep nor its runs have."""
    found, known = _Sorted(), {name: flag for flag in flags for name in flag.names}
    for flag, values in _groups(words):
        name = flag.replace("_", "-")
        if name == _DRY and not values:
            found.options[name] = ""
        elif name in _OPTIONS or name == "--run-dir":
            found.options[name] = _only(name, values)
        elif name.startswith(_HELD_OUT):
            found.held_out.extend((flag, *values))
        elif name == _ALSO:
            found.also.extend((flag, *values))
        elif name not in known:
            raise unknown_flag(flag, [*(one.name for one in flags), *_OPTIONS], command=command)
        elif known[name].takes and not known[name].is_many and len(values) > 1:
            found.grid[name] = _different(known[name], values)
        else:
            found.fixed.extend((flag, *values))
    return found


def _groups(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns each flag with its values. Raises UserError if a value has no flag before it."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            groups.append((name, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise UserError(f"unexpected word {shown_value(word)}; a value follows its flag, as in --flag VALUE")
    return groups


def _only(name: str, values: list[str]) -> str:
    if len(values) != 1 or not values[0]:
        why = f"; {_NOT_SWEPT[name]}" if name in _NOT_SWEPT else f"; allowed: {_OPTIONS[name]}"
        raise UserError(f"{name} takes one value, and {len(values)} were given{why}")
    return values[0]


def _different(flag: Flag, values: list[str]) -> tuple[str, ...]:
    name = flag.name
    if name in _NOT_SWEPT:
        raise UserError(f"{name} cannot be swept: {_NOT_SWEPT[name]}")
    # Two values must not be equal in either of these ways. `shared` maps each way to what is compared for each value.
    shared = {"are the same number": [_number(flag, value) for value in values]}
    shared |= {"would share a folder": [_in_folder(value) for value in values]}
    for why, found in shared.items():
        for place, one in enumerate(found):
            if (first := found.index(one)) < place:
                both = f"{shown_value(values[first])} and {shown_value(values[place])}"
                raise UserError(f"{name} has {both}, which {why}; leave one out")
    return tuple(values)


def _number(flag: Flag, value: str) -> float | str:
    """Returns the value of a numeric flag as a number, and any other value as it is."""
    with suppress(ValueError):
        return float(value) if without_range(flag.kind) in (int, float) else value
    return value


def seeds_of(text: str) -> int:
    """Returns the number of seeds that --seeds gives. Raises UserError if it is wrong."""
    number = whole_number(text)
    if number is None or not 1 <= number <= 1000:
        raise UserError(f"--seeds is {shown_value(text)}; allowed: {_OPTIONS['--seeds']}")
    return number


def _metric(text: str) -> Metric:
    for metric in METRICS:
        if text == metric:
            return metric
    raise UserError(f"--score is {shown_value(text)}; allowed: {_OPTIONS['--score']}")


def _part(text: str) -> tuple[int, int]:
    if not text:
        return 0, 1
    part, parts = (whole_number(one) for one in (text.partition("/")[0], text.partition("/")[2]))
    if part is None or parts is None or not part < parts <= MOST_TRIES:
        raise UserError(f"--part is {shown_value(text)}; allowed: I/N with I from 0 to N-1, for example 0/8")
    return part, parts


def _refuse_wrong(plan: SweepPlan, options: Mapping[str, str]) -> None:
    if "--run-dir" not in options:
        raise UserError("--run-dir is missing: the folder of the sweep, in which each run has its own")
    count = 1
    for _, values in plan.grid:
        count *= len(values)
    if count > MOST_TRIES:
        raise UserError(f"the grid has {count:,} points; allowed: at most {MOST_TRIES:,}")
    if plan.grid and bool(plan.select_on) == bool(plan.held_out):
        raise UserError(
            "the tries need one thing to be compared on: --data.held-out.share .02, a part of the training set, or "
            "--select-on URL, a dataset of its own. Do not choose on the test set"
        )
    if (plan.select_on or plan.held_out) and not plan.grid:
        name = "--select-on" if plan.select_on else _HELD_OUT.rstrip(".")
        raise UserError(f"{name} says nothing without a grid; give a flag several values, as in --flag A B C")
    if plan.phase not in ("", "tries", "seeds"):
        raise UserError(f"--phase is {shown_value(plan.phase)}; allowed: tries, seeds")
    if plan.parts > 1 and not plan.phase:
        raise UserError("--part says nothing without --phase: the repetitions need the scores of all tries")


def _folder_name(values: Sequence[tuple[str, str]]) -> str:
    """Returns a name such as `learning-rate=0.03,steps=500`. Flags that end in the same part are named in full."""
    short = [flag.removeprefix("--").rpartition(".")[2] for flag, _ in values]
    names = [
        one if short.count(one) == 1 else flag.removeprefix("--") for one, (flag, _) in zip(short, values, strict=True)
    ]
    return ",".join(f"{name}={_in_folder(value)}" for name, (_, value) in zip(names, values, strict=True))


def _in_folder(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]", "_", value)[-60:]
