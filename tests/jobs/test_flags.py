"""Every leaf field of a job is a flag, with a sentence, its allowed values and its default."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from jobs.flags import default_text, flags_of, sentences
from jobs.recipes import pack
from jobs.recipes.pretrain import digits_smoke
from jobs.resolve import default_job
from jobs.stages import STAGES, recipes_of
from tests.rigs.faults import every_fault


def jobs() -> Iterator[tuple[str, Any]]:
    """Stage and job, for every stage, and for every recipe of stages with recipes."""
    for stage, entry in STAGES.items():
        words = list(recipes_of(stage)) if entry.recipes else [""]
        yield from ((stage, default_job(stage, word)) for word in words)


@every_fault
def test_every_flag_has_its_own_sentence() -> Iterator[str]:
    for stage, job in jobs():
        said: dict[str, str] = {}
        for flag in flags_of(job):
            name, sentence = f"patchline {stage} {flag.name}", flag.sentence
            if not sentence.endswith((".", ".)")):
                yield f"{name}: put a sentence below the field"
                continue
            if not (sentence[0].isupper() or flag.choices or "." in sentence.split()[0]):
                yield f"{name}: its sentence begins with a small letter: {sentence}"
            same = said.setdefault(sentence, flag.name)
            if same.rpartition(".")[2] != flag.name.rpartition(".")[2]:
                yield f"{name} says the same as {same}: {sentence}"


@dataclass(frozen=True, kw_only=True)
class Parent:
    """A dataclass with fields that are inherited."""

    first: int = 1
    """The first."""
    again: int = 1
    """Said here."""


@dataclass(frozen=True, kw_only=True)
class Child(Parent):
    """A dataclass with a field of its own and one that it redefines."""

    second: int = 2
    """The second,
    on two lines."""
    again: int = 3
    """Said anew."""


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A dataclass that takes settings from another one."""

    first: int = Child.first
    second: int = Child.second
    """Said for this one."""


def test_sentences_come_from_below_the_fields() -> None:
    assert sentences(Child) == {"first": "The first.", "second": "The second, on two lines.", "again": "Said anew."}


def test_a_sentence_comes_from_where_the_default_does() -> None:
    assert sentences(Composed) == {"first": "The first.", "second": "Said for this one."}


@pytest.mark.parametrize(
    ("job", "name", "usage", "default"),
    [
        (digits_smoke(), "--steps", "--steps INT", "300"),
        (digits_smoke(), "--schedule.learning-rate", "--schedule.learning-rate FLOAT", "0.001"),
        (digits_smoke(), "--data.url", "--data.url URL", ""),
        (digits_smoke(), "--data.mix", "--data.mix URL WEIGHT ...", ""),
        (digits_smoke(), "--run-dir", "--run-dir DIR", ""),
        (digits_smoke(), "--engine.zero-stage", "--engine.zero-stage {1,2,3}", "1"),
        (digits_smoke(), "--model.patch", "--model.patch INT", "8"),
        (digits_smoke(), "--model.resnet-units", "--model.resnet-units INT ...", "none"),
        (digits_smoke(), "--data.augment.scaled-decode", "--data.augment.[no-]scaled-decode", "on"),
        (digits_smoke(), "--data.augment.flip", "--data.augment.flip", "off"),
        (pack.parquet(), "--source.files", "--source.files FILE ...", ""),
        (pack.folder(), "--labels-file", "--labels-file FILE", ""),
    ],
)
def test_how_a_flag_is_shown(job: Any, name: str, usage: str, default: str) -> None:
    flag = next(flag for flag in flags_of(job) if flag.name == name)
    assert (flag.usage, default_text(flag)) == (usage, default)


def test_a_switch_has_two_names_and_a_kind_none() -> None:
    flags = {flag.name: flag for flag in flags_of(pack.folder())}
    assert flags["--resize.convert"].names == ("--resize.convert", "--resize.no-convert")
    assert "--source.kind" not in flags  # there is nothing to choose
