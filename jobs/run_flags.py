"""Run flags: flags that are not fields of the job (where it runs, what it may do this once). Never recorded."""

from dataclasses import dataclass

from jobs.flags import Flag
from shards.config_values import shown_value, whole_number
from shards.errors import UserError

_TRAINING = ("pretrain", "finetune")


@dataclass(frozen=True, kw_only=True)
class RunFlag:
    """A flag of `stages` with its sentence for the help; `value` is empty for a switch."""

    name: str
    says: str
    stages: tuple[str, ...]
    value: str = ""


RUN_FLAGS = (
    RunFlag(
        name="--processes",
        value="N",
        says="Processes (ranks) to start on this machine: one per GPU, or sharing the CPUs.",
        stages=(*_TRAINING, "evaluate"),
    ),
    RunFlag(
        name="--extend",
        says="Continue a run with more --steps than it was started with; the learning rate follows the longer "
        "schedule from there on, and may jump: the command prints the change.",
        stages=_TRAINING,
    ),
    RunFlag(
        name="--overwrite",
        says="Write to --out even though it has other content; only files of the same names are replaced.",
        stages=("import", "export"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The values of a command's run flags: the number of processes, and the switches that are on (`extend`)."""

    processes: int = 1
    switches: tuple[str, ...] = ()


def run_flags_of(stage: str) -> tuple[RunFlag, ...]:
    """The run flags of a stage."""
    return tuple(flag for flag in RUN_FLAGS if stage in flag.stages)


def shown_run_flags(stage: str) -> list[Flag]:
    """As help and completion show them."""
    return [
        Flag(name=flag.name, takes=flag.value, sentence=flag.says, default=1 if flag.value else False)
        for flag in run_flags_of(stage)
    ]


def take_run_flags(stage: str, words: list[str]) -> tuple[list[str], RunOptions]:
    """The words without the run flags, and the values of these. UserError if a value is wrong."""
    known = {flag.name: flag for flag in run_flags_of(stage)}
    left: list[str] = []
    switches: list[str] = []
    processes = 1
    coming = iter(words)
    for word in coming:
        flag, equals, value = word.partition("=")
        if flag not in known:
            left.append(word)
        elif known[flag].value:
            processes = _count(flag, value if equals else next(coming, ""))
        elif equals:
            raise UserError(f"{flag} takes no value, and has {value!r}; leave out '={value}'")
        else:
            switches.append(flag.removeprefix("--"))
    return left, RunOptions(processes=processes, switches=tuple(switches))


def _count(flag: str, value: str) -> int:
    if not (number := whole_number(value)):
        raise UserError(f"{flag} is {shown_value(value)}; allowed: whole numbers from 1 on, for example {flag} 2")
    return number
