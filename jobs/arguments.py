"""Parses the arguments of a command.

Run flags are not fields of a job. They say where this command runs and what it may do, and they are never recorded. A
tool has no job, so it declares its flags as the fields of a dataclass.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin

from jobs.flags import Flag, flags_of
from jobs.mistakes import unexpected_word, unknown_flag
from jobs.stages import STAGES, job_class
from pipeline.training.settings.job import TrainingJob
from shards.config_values import (
    allowed_instead,
    shown_text,
    shown_value,
    whole_number,
    without_none,
    without_range,
)
from shards.errors import UserError

Own = TypeVar("Own")
_MOST_PROFILED = 100  # a trace of ViT-B takes about 2 MB per step, and Perfetto keeps all of it in memory
_TRAINING = ("pretrain", "finetune")
SHARED = "--shared"
_FLAG = re.compile(r"(?<![\w-])--([\w.-]*\w)")  # a flag in a sentence, without the stop that may follow it
_KINDS = {"INT": "a whole number", "FLOAT": "a number", "TEXT": "a text", "URL": "a folder or s3://bucket/prefix"}


@dataclass(frozen=True, kw_only=True)
class RunFlag:
    """A run flag of `stages`, with its sentence for the help. `value` is the placeholder in the help, and empty for a
    switch, whose `default` is ignored.
    `is_usual`: whether the short help shows the flag."""

    name: str
    says: str
    stages: tuple[str, ...]
    value: str = ""
    default: int | str = 1
    is_usual: bool = True


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
        name=SHARED,
        says="Make the run's folder a shared one: its group can read and write everything in it. A folder that is "
        "shared already needs no flag.",
        stages=(*_TRAINING, "evaluate", "fewshot"),
        is_usual=False,
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
    """The values of a command's run flags: the number of processes, the switches that are on (such as `extend`), and
    the steps to trace."""

    processes: int = 1
    switches: tuple[str, ...] = ()
    profile: range | None = None

    def words(self) -> list[str]:
        """Returns the run flags that each rank gets on its command line."""
        steps = self.profile
        return [*(f"--{switch}" for switch in self.switches), *([f"--profile={steps[0]}:{steps[-1]}"] if steps else [])]

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments that a stage's `run` takes besides its job."""
        switches: dict[str, Any] = {name: True for name in self.switches if f"--{name}" != SHARED}
        return switches | ({"profile": self.profile} if self.profile else {})


def run_flags_of(stage: str) -> tuple[RunFlag, ...]:
    """Returns the run flags of a stage."""
    return tuple(flag for flag in RUN_FLAGS if stage in flag.stages)


def shown_run_flags(stage: str) -> list[Flag]:
    """Returns the run flags as help and completion show them."""
    return [
        Flag(name=flag.name, takes=flag.value, sentence=flag.says, default=flag.default if flag.value else False)
        for flag in run_flags_of(stage)
    ]


def take_run_flags(stage: str, words: Sequence[str]) -> tuple[list[str], RunOptions]:
    """Returns the words without the run flags, and the values of the run flags. Raises UserError if a value is
    wrong."""
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


def take_own_flags(kind: type[Own], words: Sequence[str]) -> tuple[Own, list[str]]:
    """Returns the values of a tool's flags as an instance of its dataclass `kind`, and the other words.

    A field is a switch (bool), a string, several strings (a tuple), or a whole number with its range. Raises UserError
    for a value that is not a whole number in this range.
    """
    own = {f"--{field.name.replace('_', '-')}": field for field in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    others, left = list[str](), list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        type_ = own[flag].type if flag in own else None
        if type_ is None or (type_ is bool and equals):
            others.append(word)
            continue
        name, given = own[flag].name, [value] if equals else []
        if type_ is bool:
            values[name] = True
        elif get_origin(type_) is tuple:
            while left and not left[0].startswith("--"):
                given.append(left.pop(0))
            values[name] = (*values.get(name, ()), *filter(None, given))
        else:
            text = value if equals else left.pop(0) if left else ""
            values[name] = _own_value(flag, text, type_)
    return kind(**values), others


def only_word(others: Sequence[str], *, usage: str) -> str:
    """Returns the one word that a tool takes besides its flags. Raises UserError with the usage if there is an unknown
    flag, no word, or more than one."""
    if unknown := next((word for word in others if word.startswith("-")), ""):
        raise UserError(f"there is no flag {shown_value(unknown)}; usage: {usage}")
    if len(others) != 1:
        raise UserError(f"usage: {usage}")
    return others[0]


def _own_value(flag: str, text: str, type_: Any) -> str | int:
    (plain,) = without_none(type_)
    if plain is str:
        return text
    number, (_, allowed) = whole_number(text), get_args(plain)
    if number is None or not allowed.holds(number):
        raise UserError(f"{flag} is {shown_value(text)}; allowed: {allowed}")
    return number


def values_of(words: Sequence[str], flags: Sequence[Flag], *, command: tuple[str, str]) -> dict[str, Any]:
    """Returns the values that the words give to a job's flags, by the name of each flag. `command` is the stage and its
    second word. Raises UserError for a wrong value, and for a word that is neither a flag of the job nor the value of
    one."""
    known = {name: flag for flag in flags for name in flag.names}
    found: dict[str, Any] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, text = word.partition("=")
        flag = known.get(name.replace("_", "-"))
        if not word.startswith("-"):
            raise unexpected_word(word, command=command)
        if flag is None:
            shown = " ".join(["patchline", *command]).rstrip()
            raise unknown_flag(name, [flag.name for flag in flags], command=shown)
        texts = [text] if equals else []
        while not equals and left and not left[0].startswith("--") and (flag.is_many or not texts):
            texts.append(left.pop(0))
        found[flag.name] = _value(flag, texts, name=name)
    return found


def with_values(job: Any, values: Mapping[str, Any]) -> Any:
    """Returns the job with the values of some of its flags. Raises UserError if the job refuses one."""
    own: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for flag, value in values.items():
        group, dot, rest = flag.removeprefix("--").replace("-", "_").partition(".")
        if dot:
            inside.setdefault(group, {})[rest] = value
        else:
            own[group] = value
    groups = {name: _group_with(getattr(job, name), name, inner) for name, inner in inside.items()}
    return replace(job, **own, **groups)


def _group_with(group: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Returns a group of a job with the values of some of its flags. If the group is itself a training job, as in
    `plan`, its messages name the flags that this command has."""
    try:
        return with_values(group, values)
    except UserError as error:
        if not isinstance(group, TrainingJob):
            raise
        raise UserError(with_flags_of_group(str(error), flags_of(group), group=name)) from None


def with_flags_of_group(message: str, flags: Iterable[Flag], *, group: str) -> str:
    """Returns a message that names flags of a group as if it were the whole job, with the group's name in each of these
    flags: `--steps` becomes `--training.steps`."""
    names = {name for flag in flags for name in flag.names}
    return _FLAG.sub(lambda found: f"--{group}.{found[1]}" if found[0] in names else found[0], message)


def _value(flag: Flag, texts: list[str], *, name: str) -> Any:
    if not flag.takes:
        if texts:
            raise UserError(f"{name} is a switch and takes no value; give {flag.name} or {flag.off}")
        return name.replace("_", "-") == flag.name
    if not texts and not flag.is_many:
        raise UserError(f"{name} needs a value: {_allowed(flag)}")
    if flag.may_be_none and texts == ["None"]:
        return None
    if get_origin(flag.kind) is tuple:
        return _groups(flag, texts, name=name)
    values = []
    for text in texts:
        value = _typed(text, without_range(flag.kind))
        if value is None:
            raise UserError(f"{name} is {shown_value(text)}; allowed: {_allowed(flag)}")
        if instead := allowed_instead(value, flag.kind):
            raise UserError(f"{name} is {shown_text(text)}; {instead}")
        values.append(value)
    return tuple(values) if flag.is_many else values[0]


def _groups(flag: Flag, texts: Sequence[str], *, name: str) -> tuple[tuple[Any, ...], ...]:
    """Returns the values of a flag that takes groups of values, such as a URL and its weight. The job checks their
    ranges."""
    kinds = [without_range(kind) for kind in get_args(flag.kind)]
    values = [_typed(text, kinds[place % len(kinds)]) for place, text in enumerate(texts)]
    if None in values or len(values) % len(kinds):
        raise UserError(f"{name} is {shown_value(' '.join(texts))}; allowed: {flag.takes}")
    return tuple(zip(*(values[place :: len(kinds)] for place in range(len(kinds))), strict=True))


def _typed(text: str, kind: Any) -> Any:
    """Returns the text as a value of type `kind`, or None if it is not one."""
    if get_origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if str(choice) == text), None)
    try:
        return kind(text)
    except ValueError:
        return None


def _allowed(flag: Flag) -> str:
    if flag.choices:
        return " or ".join(flag.choices)
    kinds = (text for word, text in _KINDS.items() if flag.takes.startswith(word))
    return next(kinds, f"{flag.takes}, as in {flag.name} {flag.takes}")


def value_in(words: Sequence[str], flag: str) -> str:
    """Returns the last value of a flag among words of the form --flag=value or --flag value, or an empty string."""
    found = ""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else next(iter(words[place + 1 :]), "")
    return found


def with_flags(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Returns a command's words with these flags and their values in place of those of the same names."""
    names, left, skips = {word for word in flags if word.startswith("--")}, list[str](), False
    for word in words:
        if word.startswith("--"):
            skips = word.partition("=")[0].replace("_", "-") in names
            if skips:
                continue
        if not skips:
            left.append(word)
    return [*left, *flags]


def second_word_first(name: str, words: list[str], *, is_help: bool) -> list[str]:
    """Returns the words with the command's second word first, even if it was given as a flag. The second word is empty
    if the command has none, or for help."""
    stage = STAGES[name]
    if stage.recipes:
        return words
    if is_help or not stage.field:
        return ["", *words]
    flag = f"--{stage.field}"
    if stage.is_optional:
        return ["", flag, *words] if words and words[0][:1] not in ("", "-") else ["", *words]
    words = _placed_first(words, flag)
    if not stage.more:
        return words
    switches = [word for one in flags_of(job_class(name)()) if not one.takes for word in one.names]
    return [*words[:1], *_gathered(words[1:], f"--{stage.more}", switches=switches)]


def _placed_first(words: list[str], flag: str) -> list[str]:
    """Returns the words with the value of `flag` first, if it was given as `--flag VALUE` or `--flag=VALUE`."""
    if not words or not words[0].startswith("-"):
        return words
    for place, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return [word.removeprefix(f"{flag}="), *words[:place], *words[place + 1 :]]
        if word == flag and place + 1 < len(words):
            return [words[place + 1], *words[:place], *words[place + 2 :]]
    return words


def _gathered(words: Sequence[str], flag: str, *, switches: Collection[str]) -> list[str]:
    """Moves all values that belong to no flag, and all words after `--`, to the end, after one `flag`. `switches` are
    the flags that take no value."""
    others, values, left = list[str](), list[str](), list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            values += left
            break
        if not word.startswith("-"):
            values.append(word)
        elif word != flag:
            takes_value = "=" not in word and word not in switches
            others += [word, left.pop(0)] if takes_value and left else [word]
    return [*others, flag, *values] if values else others
