"""Every field of every configuration: wrong types and values out of its range are refused, and help explains it.

The configurations are found by themselves: the jobs of all stages, what is inside them, and those of users' Python.
"""

import ast
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from jobs import help as pages
from jobs.arguments import values_of
from jobs.chains.steps import ChainConfig, StepConfig
from jobs.cluster.settings import ClusterConfig
from jobs.flags import Flag, flags_of, groups_of, sentences
from jobs.mistakes import required_flags
from jobs.record import Fields, job_from, read_tree
from jobs.settings.runs import PlanJob
from jobs.stages import STAGES, job_class
from pipeline.evaluation.config import FewshotConfig
from pipeline.models.config import ModelConfig
from pipeline.models.conversion.config import Change, Hints
from pipeline.models.weights.usage import Usage
from pipeline.planning.cluster_plan import MARGIN_SECONDS
from pipeline.planning.rates import PLANNED_MFU
from shards.adoption.foreign_samples import SampleRules
from shards.adoption.foreign_tar import AdoptSpec
from shards.config_values import Range, allowed_instead, shown_value, without_none, without_range
from shards.errors import UserError
from shards.packing.config import DatasetSettings, PackSpec
from shards.sources.kinds import FolderSource
from shards.storage.retries import RetryConfig
from tests.rigs.faults import differs, every_fault

CHECKOUT = Path(__file__).resolve().parent.parent.parent
JOBS = list(dict.fromkeys(job_class(stage) for stage in STAGES))
# Made by our own code alone, of values that were checked before.
NOT_GIVEN = {
    "About",
    "Share",
    "Size",
    "ResNetSize",
    "SavedJob",
    "QueuedJob",
    "ChainJob",
    "_Source",
    "Turns",
    "CheckedJob",
    "RecordedJob",
    "AskedJob",
    "Retention",
    "SumSource",
}
ENDINGS = ("Config", "Hints", "Job", "Rules", "Source", "Spec")  # of the names of configurations
WITHOUT_RANGE = {"TrainingJob.seed", "VerifyResumeJob.seed", "ModelConfig.head_bias"}  # any number will do


def inside(kind: Any) -> Iterator[Any]:
    """A configuration and all those in its fields."""
    yield kind
    for field in fields(kind):
        for one in without_none(field.type):
            if is_dataclass(one):
                yield from inside(one)


OTHERS = (
    *(Change, RetryConfig, Usage, SampleRules, AdoptSpec, PackSpec, Hints, ClusterConfig, ChainConfig, StepConfig),
    *(FewshotConfig, DatasetSettings),
)
CONFIGS = list(dict.fromkeys(one for kind in (*JOBS, *OTHERS) for one in inside(kind)))
STEP: dict[str, Any] = {"name": "one", "stage": "verify", "recipe": "data"}
NEEDED: dict[Any, dict[str, Any]] = {  # fields without a default
    AdoptSpec: {"rules": SampleRules()},
    PackSpec: {"source": FolderSource()},
    StepConfig: STEP,
    ChainConfig: {"folder": "chain", "steps": (StepConfig(**STEP),)},
}
FIELDS = [(f"{kind.__name__}.{field.name}", kind, field) for kind in CONFIGS for field in fields(kind)]


@dataclass(frozen=True)
class Stranger:
    """No configuration of ours."""


@cache
def default(kind: Any) -> Any:
    return kind(**NEEDED.get(kind, {}))


def wrong(kind: Any) -> Iterator[Any]:
    """Values that a field of this type must refuse."""
    kinds = without_none(kind)
    plain = without_range(kinds[0])
    if get_args(kind) == () or type(None) not in get_args(kind):
        yield None
    if plain is int:
        yield from (True, 1.5, 2.0, "1", math.nan)
    elif plain is float:
        yield from (True, "0.5", math.nan, math.inf, -math.inf, 10**400)
    elif plain is bool:
        yield from (0, 1, "true")
    elif plain is str:
        yield from (3, b"x", Path("x"), ("x",))
    elif get_origin(plain) is Literal:
        yield from ("no such word", True, 1.0, [])
    elif get_origin(plain) is tuple:
        yield from (3, "abc", [], (Stranger(),), *((item,) for item in wrong(get_args(plain)[0])))
    else:
        yield from (Stranger(), {}, "x")


def ranges(kind: Any) -> Iterator[tuple[Any, Range]]:
    """The numbers of a type that have ranges, those in tuples included."""
    for one in without_none(kind):
        if get_origin(one) is Annotated:
            yield from ((get_args(one)[0], rule) for rule in get_args(one)[1:])
        elif get_origin(one) is tuple:
            yield from (found for item in get_args(one) if item is not Ellipsis for found in ranges(item))


def around(number: type, bounds: Range) -> tuple[list[float], list[float]]:
    """The outermost values within a range, and the next ones, which are outside."""

    def beside(bound: float, towards: float) -> float:
        return int(bound + math.copysign(1, towards)) if number is int else math.nextafter(bound, towards)

    within, outside = [], []
    for bound, towards in ((bounds.least, -math.inf), (bounds.most, math.inf)):
        if bound is not None:
            within.append(number(bound))
            outside.append(beside(bound, towards))
    for bound, towards in ((bounds.above, math.inf), (bounds.below, -math.inf)):
        if bound is not None:
            within.append(beside(bound, towards))
            outside.append(number(bound))
    return within, outside


def held_by(field: Any, number: float) -> Any:
    """A value of the field with this number in it."""
    if get_origin(without_none(field.type)[0]) is not tuple:
        return number
    return (("a", number),) if field.name == "mix" else (number,)


def refusal(kind: Any, field: Any, value: Any) -> str:
    """The message with which a configuration refuses the value of a field; empty if it accepts it."""
    try:
        replace(default(kind), **{field.name: value})
    except UserError as error:
        return str(error)
    return ""


@every_fault
def test_defaults_are_accepted() -> Iterator[str]:
    for kind in CONFIGS:
        try:
            made = default(kind)
        except UserError as error:
            yield f"{kind.__name__} refuses its own defaults: {error}"
            continue
        for field in fields(kind):
            value = getattr(made, field.name)
            if instead := allowed_instead(value, field.type):
                yield f"{kind.__name__}.{field.name} is {shown_value(value)} by default; {instead}"


@every_fault
def test_wrong_types_are_refused() -> Iterator[str]:
    for name, kind, field in FIELDS:
        for value in wrong(field.type):
            if isinstance(value, list) and (kind, field.name) == (ModelConfig, "resnet_units"):
                continue  # JSON's form of this tuple, which weights and manifests have
            message = refusal(kind, field, value)
            if not message:
                yield f"{name} accepts {shown_value(value)}"
            elif not re.search(rf"^([\w.]+\.)?{field.name}(\.\d)* (is .*|has \d entries); allowed: [^\n]+$", message):
                yield f"{name} refuses {shown_value(value)} with a message of another form: {message}"


@every_fault
def test_values_out_of_range_are_refused() -> Iterator[str]:
    for name, kind, field in FIELDS:
        for number, bounds in ranges(field.type):
            within, outside = around(number, bounds)
            if not outside:
                yield f"{name} has a range without bounds"
            for value in within:
                if allowed_instead(value, Annotated[number, bounds]):
                    yield f"{name}: {value} is within {bounds}, but not allowed"
            for value in outside:
                message = refusal(kind, field, held_by(field, value))
                if not message:
                    yield f"{name} accepts {value}; its range is {bounds}"
                elif f"; allowed: {bounds}" not in message:
                    yield f"{name} refuses {value} without naming its range, {bounds}: {message}"


@every_fault
def test_numbers_have_ranges() -> Iterator[str]:
    for name, _, field in FIELDS:
        plain = without_range(without_none(field.type)[0])
        if plain in (int, float) and name not in WITHOUT_RANGE and not list(ranges(field.type)):
            yield f"{name} is a number without a range"


def taken_over() -> Iterator[tuple[str, Any, Any]]:
    """Every field that names a field of another dataclass as its default, and both types."""
    for kind in CONFIGS:
        (node,) = ast.parse(inspect.getsource(kind)).body
        types = {field.name: field.type for field in fields(kind)}
        for one in node.body if isinstance(node, ast.ClassDef) else ():
            match one:
                case ast.AnnAssign(ast.Name(name), _, ast.Attribute(ast.Name(other), field)):
                    origin = vars(sys.modules[kind.__module__])[other]
                    if is_dataclass(origin):
                        there = {field.name: field.type for field in fields(origin)}
                        yield f"{kind.__name__}.{name} is {other}.{field}", types[name], there[field]


@every_fault
def test_a_setting_of_another_dataclass_has_its_type_and_range() -> Iterator[str]:
    assert len(list(taken_over())) > 30
    for name, own, there in taken_over():
        if own != there:
            yield f"{name}: its type is {own}, and there {there}"


def test_a_plan_assumes_the_defaults_of_packing_and_of_clusters() -> None:
    """These defaults cannot name each other: loading the one would slow the other's help down, or it is in a room
    above."""
    assert PlanJob.samples_per_block == DatasetSettings.samples_per_block
    assert ClusterConfig.margin_seconds == MARGIN_SECONDS
    assert f"{PLANNED_MFU}, which NVIDIA published" in sentences(PlanJob)["mfu"]


@every_fault
def test_every_field_has_a_sentence() -> Iterator[str]:
    for name, kind, field in FIELDS:
        if len(get_args(field.type)) == 1 and get_origin(field.type) is Literal:
            continue  # the word by which a file tells kinds of sources apart: no flag
        sentence = sentences(kind).get(field.name, "")
        if not sentence.endswith(".") or len(sentence) <= 10:
            yield f"{name} has no sentence below it, but {sentence!r}"


def variants() -> Iterator[Any]:
    """Every job, and the job of packing with each source."""
    for kind in JOBS:
        yield kind()
        for field in fields(kind):
            kinds = without_none(field.type)
            yield from (kind(**{field.name: one()}) for one in kinds if len(kinds) > 1)


@every_fault
def test_help_shows_every_sentence() -> Iterator[str]:
    for job in variants():
        stage = next(stage for stage in STAGES if job_class(stage) is type(job))
        text = " ".join(pages.of_job(stage, "WORD", job, about="", everything=True, width=100).split())
        flags = list(flags_of(job))
        for flag in flags:
            if not flag.sentence or f"{flag.usage} {flag.sentence}" not in text:
                yield f"the help of {stage} lacks: {flag.usage} {flag.sentence or '(no sentence)'}"
        required = required_flags(flags, STAGES[stage].required)
        groups = {flag.group for flag in flags if flag not in required}
        for group, sentence in groups_of(job).items():
            if not sentence or (group in groups and f"{group}: {sentence}" not in text):
                yield f"the help of {stage} lacks: {group}: {sentence or '(no sentence)'}"


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A value just out of the range of a flag."""

    flag: Flag
    value: float
    bounds: Range

    @property
    def field(self) -> str:
        """The flag's name in a file: `data.augment.min_area`."""
        return self.flag.name.removeprefix("--").replace("-", "_")

    def message(self, name: str) -> str:
        """What refuses the value of the flag or field with this name."""
        return f"{name} is {self.value}; allowed: {self.bounds}"


def wrong_values(job: Any) -> list[list[Wrong]]:
    """The wrong values of each flag with a range."""
    return [
        [Wrong(flag=flag, value=value, bounds=bounds) for value in around(number, bounds)[1]]
        for flag in flags_of(job)
        for number, bounds in ranges(flag.kind)
        if not flag.name.endswith(".mix")
    ]


def yaml_lines(wrongs: list[Wrong]) -> dict[str, str]:
    """Field or group -> its line in a job's file, for fields in the order of their flags."""
    lines: dict[str, str] = {}
    for wrong in wrongs:
        *groups, last = wrong.field.split(".")
        for depth, group in enumerate(groups):
            lines.setdefault(".".join(groups[: depth + 1]), f"{'  ' * depth}{group}:")
        lines[wrong.field] = f"{'  ' * len(groups)}{last}: {[wrong.value] if wrong.flag.is_many else wrong.value}"
    return lines


@every_fault
def test_flags_name_the_wrong_value() -> Iterator[str]:
    for job in variants():
        flags = list(flags_of(job))
        for wrong in chain.from_iterable(wrong_values(job)):
            where = f"{type(job).__name__}: the refusal of {wrong.flag.name} {wrong.value}"
            message = ""
            try:
                values_of([wrong.flag.name, str(wrong.value)], flags, command=("x", ""))
            except UserError as error:
                message = str(error)
            yield from differs(where, repr(message), repr(wrong.message(wrong.flag.name)))


@every_fault
def test_files_name_the_wrong_value(tmp_path: Path) -> Iterator[str]:
    """A file has one wrong value of each flag: the reader must report all of them, with their lines."""
    path = tmp_path / "job.yaml"
    for job in variants():
        for wrongs in zip_longest(*wrong_values(job)):
            given = [wrong for wrong in wrongs if wrong]
            lines = yaml_lines(given)
            path.write_text("\n".join(lines.values()))
            tree = read_tree(path)
            assert isinstance(tree, Fields)
            _, report = job_from(tree, kind=type(job), base=job)
            numbers = {name: number for number, name in enumerate(lines, start=1)}
            expected = Counter((numbers[one.field], one.message(one.field + ".0" * one.flag.is_many)) for one in given)
            found = Counter((line, message.removesuffix(", or none")) for line, message in report.faults)
            for number, message in expected - found:
                yield f"{type(job).__name__}: nothing says of line {number} of a file: {message}"
            for number, message in found - expected:
                yield f"{type(job).__name__}: wrongly said of line {number} of a file: {message}"


@every_fault
def test_no_configuration_is_forgotten() -> Iterator[str]:
    """Those that are called so or check themselves, and all that a module of configurations has."""
    found = {}
    for path in (path for room in ("shards", "pipeline", "jobs") for path in (CHECKOUT / room).rglob("*.py")):
        if "dataclass" not in (text := path.read_text()):
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef):
                continue
            is_one = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
            is_named_so = path.stem.endswith("config") or node.name.endswith(ENDINGS)
            if is_one and (is_named_so or "refuse_wrong_values(" in ast.unparse(node)):
                found[node.name] = ".".join(path.relative_to(CHECKOUT).with_suffix("").parts)
    assert len(found) > 20
    forgotten = {name for name, module in found.items() if getattr(import_module(module), name) not in CONFIGS}
    for name in sorted(forgotten - NOT_GIVEN):
        yield f"{found[name]}.{name} is in no job: add it to OTHERS, or to NOT_GIVEN if only our own code makes it"
    for name in sorted(NOT_GIVEN - forgotten):
        yield f"{name} is in NOT_GIVEN, but is no configuration, or is in a job"
