"""Words of a command that are not of its job: where it runs, or what it may do this once. No record repeats them."""

from dataclasses import dataclass

from jobs.flags import Flag
from shards.errors import UserError

_TRAINING = ("pretrain", "finetune")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A flag of `stages`, with the sentence that help has for it; `value` is empty for one that stands by itself."""

    flag: str
    says: str
    stages: tuple[str, ...]
    value: str = ""


WISHES = (
    Wish(
        flag="--processes",
        value="N",
        says="Processes (ranks) to start on this machine: one per GPU, or sharing the CPUs.",
        stages=(*_TRAINING, "evaluate"),
    ),
    Wish(
        flag="--extend",
        says="Continue a run with more --steps than it was started with; the learning rate follows the longer "
        "schedule from there on, and may jump: the command prints the change.",
        stages=_TRAINING,
    ),
    Wish(
        flag="--overwrite",
        says="Write to --out even though it has other content; only files of the same names are replaced.",
        stages=("import", "export"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a command wishes: so many processes, and the names of the switches that it has (`extend`)."""

    processes: int = 1
    switches: tuple[str, ...] = ()


def wishes_of(stage: str) -> tuple[Wish, ...]:
    """Those that a stage has."""
    return tuple(wish for wish in WISHES if stage in wish.stages)


def flags_of_wishes(stage: str) -> list[Flag]:
    """As help and completion show them."""
    return [
        Flag(name=wish.flag, takes=wish.value, sentence=wish.says, default=1 if wish.value else False)
        for wish in wishes_of(stage)
    ]


def take_wishes(stage: str, words: list[str]) -> tuple[list[str], Given]:
    """The words without those that are wishes, and what they wish. UserError where a value is wrong."""
    known = {wish.flag: wish for wish in wishes_of(stage)}
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
    return left, Given(processes=processes, switches=tuple(switches))


def _count(flag: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"{flag} is {value!r}; allowed are whole numbers from 1 on, for example {flag} 2")
    return int(value)
