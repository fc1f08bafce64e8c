"""Run flags: flags that are not fields of the job (where it runs, what it may do this once). Never recorded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jobs.flags import Flag
from shards.errors import UserError
from shards.schema.config_values import shown_value, whole_number

_MOST_PROFILED = 100  # a trace of ViT-B takes about 2 MB per step, and Perfetto keeps all of it in memory
_TRAINING = ("pretrain", "finetune")


@dataclass(frozen=True, kw_only=True)
class RunFlag:
    """A flag of `stages` with its sentence for the help; `value` is empty for a switch, which has no `default`."""

    name: str
    says: str
    stages: tuple[str, ...]
    value: str = ""
    default: int | str = 1


RUN_FLAGS = (
    RunFlag(
        name="--processes",
        value="N",
        says="Processes (ranks) to start on this machine: one per GPU, or sharing the CPUs.",
        stages=(*_TRAINING, "evaluate", "fewshot"),
    ),
    RunFlag(
        name="--extend",
        says="Continue a run with more --steps than it was started with; the learning rate follows the longer "
        "schedule from there on, and may jump: the command prints the change.",
        stages=_TRAINING,
    ),
    RunFlag(
        name="--profile",
        value="FIRST:LAST",
        says="Trace these steps with PyTorch's profiler, on rank 0: RUN/profile/steps-FIRST-LAST.json.gz, for "
        "https://ui.perfetto.dev.",
        stages=_TRAINING,
        default="",
    ),
    RunFlag(
        name="--overwrite",
        says="Write to --out even though it has other content; only files of the same names are replaced.",
        stages=("weights", "import", "export"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The values of a command's run flags: the number of processes, the switches that are on (`extend`), and the steps
    to trace."""

    processes: int = 1
    switches: tuple[str, ...] = ()
    profile: range | None = None

    def words(self) -> list[str]:
        """As each rank gets them."""
        steps = self.profile
        return [*(f"--{switch}" for switch in self.switches), *([f"--profile={steps[0]}:{steps[-1]}"] if steps else [])]

    def arguments(self) -> dict[str, Any]:
        """As a stage's `run` takes them beside its job."""
        switches: dict[str, Any] = dict.fromkeys(self.switches, True)
        return switches | ({"profile": self.profile} if self.profile else {})


def run_flags_of(stage: str) -> tuple[RunFlag, ...]:
    """The run flags of a stage."""
    return tuple(flag for flag in RUN_FLAGS if stage in flag.stages)


def shown_run_flags(stage: str) -> list[Flag]:
    """As help and completion show them."""
    return [
        Flag(name=flag.name, takes=flag.value, sentence=flag.says, default=flag.default if flag.value else False)
        for flag in run_flags_of(stage)
    ]


def take_run_flags(stage: str, words: list[str]) -> tuple[list[str], RunOptions]:
    """The words without the run flags, and the values of these. UserError if a value is wrong."""
    known = {flag.name: flag for flag in run_flags_of(stage)}
    left: list[str] = []
    switches: list[str] = []
    values: dict[str, Any] = {}
    coming = iter(words)
    for word in coming:
        flag, equals, value = word.partition("=")
        if flag not in known:
            left.append(word)
        elif known[flag].value:
            given = value if equals else next(coming, "")
            values[flag.removeprefix("--")] = _READ[flag](flag, given)
        elif equals:
            raise UserError(f"{flag} takes no value, and has {value!r}; leave out '={value}'")
        else:
            switches.append(flag.removeprefix("--"))
    return left, RunOptions(switches=tuple(switches), **values)


def _count(flag: str, value: str) -> int:
    if not (number := whole_number(value)):
        raise UserError(f"{flag} is {shown_value(value)}; allowed: whole numbers from 1 on, for example {flag} 2")
    return number


def _steps(flag: str, value: str) -> range:
    first, _, last = value.partition(":")
    found = whole_number(first), whole_number(last or first)
    steps = range(found[0], found[1] + 1) if found[0] and found[1] else range(0)
    if not 0 < len(steps) <= _MOST_PROFILED:
        raise UserError(
            f"{flag} is {shown_value(value)}; allowed: the first and the last step to trace, at most {_MOST_PROFILED} "
            f"of them, for example {flag} 10:12"
        )
    return steps


_READ: Mapping[str, Callable[[str, str], Any]] = {"--processes": _count, "--profile": _steps}
