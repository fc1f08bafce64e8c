"""Every field of every configuration: wrong types and values out of its range are refused, and help explains it.

The configurations are found by themselves: the jobs of all stages, what is inside them, and those of users' Python.
"""

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from jobs import help as pages
from jobs.chain_file import ChainConfig, StepConfig
from jobs.cluster import ClusterConfig
from jobs.fields import job_from
from jobs.flags import Flag, flags_of, groups_of, sentences
from jobs.mistakes import refuse_wrong_words, required_flags
from jobs.stages import STAGES, job_class
from jobs.yaml_tree import Fields, read_tree
from pipeline.evaluation.config import FewshotConfig
from pipeline.models.config import ModelConfig
from pipeline.models.conversion.config import Change
from pipeline.models.conversion.sizes import Hints
from pipeline.models.usage import Usage
from shards.adoption.foreign_samples import SampleRules
from shards.adoption.foreign_tar import AdoptSpec
from shards.config_values import Range, allowed_instead, without_none, without_range
from shards.errors import UserError
from shards.packing.spec import PackSpec
from shards.sources.kinds import FolderSource
from shards.storage.retries import RetryConfig

CHECKOUT = Path(__file__).resolve().parent.parent.parent
JOBS = list(dict.fromkeys(job_class(stage) for stage in STAGES))
# Made by our own code alone, of values that were checked before.
NOT_GIVEN = {
    "Share",
    "Size",
    "ResNetSize",
    "SavedJob",
    "QueuedJob",
    "ChainJob",
    "ObjectSource",
    "_Source",
    "Found",
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
    FewshotConfig,
)
CONFIGS = list(dict.fromkeys(one for kind in (*JOBS, *OTHERS) for one in inside(kind)))
STEP: dict[str, Any] = {"name": "one", "stage": "verify", "recipe": "data"}
NEEDED: dict[Any, dict[str, Any]] = {  # fields without a default
    AdoptSpec: {"rules": SampleRules()},
    StepConfig: STEP,
    ChainConfig: {"folder": "chain", "steps": (StepConfig(**STEP),)},
    PackSpec: {"source": FolderSource(), "split": "train", "samples_per_shard": 4, "samples_per_block": 2, "seed": 1},
}
FIELDS = [(kind, field) for kind in CONFIGS for field in fields(kind)]
IDS = [f"{kind.__name__}.{field.name}" for kind, field in FIELDS]
every_field = pytest.mark.parametrize(("kind", "field"), FIELDS, ids=IDS)


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


@pytest.mark.parametrize("kind", CONFIGS)
def test_defaults_are_accepted(kind: Any) -> None:
    for field in fields(kind):
        assert allowed_instead(getattr(default(kind), field.name), field.type) == ""


@every_field
def test_wrong_types_are_refused(kind: Any, field: Any) -> None:
    for value in wrong(field.type):
        if isinstance(value, list) and (kind, field.name) == (ModelConfig, "resnet_units"):
            continue  # JSON's form of this tuple, which weights and manifests have
        message = rf"^([\w.]+\.)?{field.name}(\.\d)* (is .*|has \d entries); allowed: [^\n]+$"
        with pytest.raises(UserError, match=message):
            replace(default(kind), **{field.name: value})


@every_field
def test_values_out_of_range_are_refused(kind: Any, field: Any) -> None:
    for number, bounds in ranges(field.type):
        within, outside = around(number, bounds)
        assert outside
        assert [allowed_instead(value, Annotated[number, bounds]) for value in within] == [""] * len(within)
        for value in outside:
            with pytest.raises(UserError) as caught:
                replace(default(kind), **{field.name: held_by(field, value)})
            assert f"; allowed: {bounds}" in str(caught.value)


@every_field
def test_numbers_have_ranges(kind: Any, field: Any) -> None:
    plain = without_range(without_none(field.type)[0])
    if plain in (int, float) and f"{kind.__name__}.{field.name}" not in WITHOUT_RANGE:
        assert list(ranges(field.type))


@every_field
def test_every_field_has_a_sentence(kind: Any, field: Any) -> None:
    if len(get_args(field.type)) == 1 and get_origin(field.type) is Literal:
        return  # the word by which a file tells kinds of sources apart: no flag
    sentence = sentences(kind).get(field.name, "")
    assert sentence.endswith(".")
    assert len(sentence) > 10


def variants() -> Iterator[Any]:
    """Every job, and the job of packing with each source."""
    for kind in JOBS:
        yield kind()
        for field in fields(kind):
            kinds = without_none(field.type)
            yield from (kind(**{field.name: one()}) for one in kinds if len(kinds) > 1)


def flags_with_ranges() -> Iterator[tuple[Any, Flag, float]]:
    for job in variants():
        for flag in flags_of(job):
            for number, bounds in ranges(flag.kind):
                yield from ((job, flag, value) for value in around(number, bounds)[1] if not flag.name.endswith(".mix"))


@pytest.mark.parametrize("job", list(variants()), ids=lambda job: type(job).__name__)
def test_help_shows_every_sentence(job: Any) -> None:
    stage = next(stage for stage in STAGES if job_class(stage) is type(job))
    text = " ".join(pages.of_job(stage, "WORD", job, about="", everything=True, width=100).split())
    for flag in flags_of(job):
        assert flag.sentence
        assert f"{flag.usage} {flag.sentence}" in text
    others = set(flags_of(job)) - set(required_flags(list(flags_of(job)), STAGES[stage].required))
    for group, sentence in groups_of(job).items():
        assert sentence
        assert f"{group}: {sentence}" in text or not any(flag.group == group for flag in others)


@pytest.mark.parametrize(
    ("job", "flag", "value"),
    list(flags_with_ranges()),
    ids=lambda value: value.name if isinstance(value, Flag) else "" if is_dataclass(value) else str(value),
)
def test_flags_and_files_name_the_wrong_value(job: Any, flag: Flag, value: float, tmp_path: Path) -> None:
    ((_, bounds),) = ranges(flag.kind)
    with pytest.raises(UserError) as caught:
        refuse_wrong_words([flag.name, str(value)], list(flags_of(job)), command="patchline x")
    assert str(caught.value) == f"{flag.name} is {value}; allowed: {bounds}"

    *groups, last = flag.name.removeprefix("--").replace("-", "_").split(".")
    lines = [f"{'  ' * depth}{group}:" for depth, group in enumerate(groups)]
    lines.append(f"{'  ' * len(groups)}{last}: {[value] if flag.is_many else value}")
    (tmp_path / "job.yaml").write_text("\n".join(lines))
    tree = read_tree(tmp_path / "job.yaml")
    assert isinstance(tree, Fields)
    _, report = job_from(tree, kind=type(job), base=job)
    name = ".".join([*groups, last, *(["0"] if flag.is_many else [])])
    ((line, message),) = report.faults
    assert (line, message.removesuffix(", or none")) == (len(lines), f"{name} is {value}; allowed: {bounds}")


def test_no_configuration_is_forgotten() -> None:
    """Those that are called so or check themselves, and all that a module of configurations has."""
    found = {}
    for room in ("shards", "pipeline", "jobs"):
        for path in (CHECKOUT / room).rglob("*.py"):
            classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
            for node in classes:
                is_one = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
                is_named_so = path.stem.endswith("config") or node.name.endswith(ENDINGS)
                if is_one and (is_named_so or "refuse_wrong_values(" in ast.unparse(node)):
                    found[node.name] = ".".join(path.relative_to(CHECKOUT).with_suffix("").parts)
    assert len(found) > 20
    forgotten = {name for name, module in found.items() if getattr(import_module(module), name) not in CONFIGS}
    assert forgotten == NOT_GIVEN
