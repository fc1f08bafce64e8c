"""Fields: values are read strictly by type, omitted ones come from the base, and misspelt names get a suggestion."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from jobs.data.pack import PackJob
from jobs.mistakes import field_names, known_instead, nested
from jobs.record import Fields, Report, job_from, read_tree
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Left:
    kind: Literal["left"] = "left"
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class Right:
    kind: Literal["right"] = "right"
    files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Job:
    whole: int = 1
    number: float = 1.0
    text: str = ""
    truth: bool = False
    choice: Literal["on", "off"] = "off"
    stage: Literal[1, 2] = 1
    maybe: int | None = None
    units: tuple[int, ...] = ()
    mix: tuple[tuple[str, float], ...] = ()
    source: Left | Right = field(default_factory=Left)

    def __post_init__(self) -> None:
        if self.whole < 0:
            raise UserError(f"whole is {self.whole}; allowed: 0 or more")


def read(folder: Path, text: str, *, base: Job | None = None, optional: tuple[str, ...] = ()) -> tuple[Any, Report]:
    (folder / "a.yaml").write_text(text)
    tree = read_tree(folder / "a.yaml")
    assert isinstance(tree, Fields)
    return job_from(tree, kind=Job, base=base, optional={"Job": optional})


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        pytest.param("whole: 16_000", "whole", 16000, id="a long whole number"),
        pytest.param("whole: -0", "whole", 0, id="nought"),
        pytest.param("number: 1e-3", "number", 1e-3, id="what YAML 1.1 takes for a text"),
        pytest.param("number: 3E8", "number", 3e8, id="no sign, no point"),
        pytest.param("number: -.5", "number", -0.5, id="no nought"),
        pytest.param("number: 1.", "number", 1.0, id="no decimals"),
        pytest.param("number: 1.0e-08", "number", 1e-8, id="as records have it"),
        pytest.param("number: 7", "number", 7.0, id="a whole number is a number"),
        pytest.param("text: on", "text", "on", id="a word"),
        pytest.param("text: 2026-11-21", "text", "2026-11-21", id="a date is a text"),
        pytest.param("text: '17'", "text", "17", id="digits in quotes are"),
        pytest.param("text: |\n  a\n", "text", "a\n", id="a block"),
        pytest.param("truth: yes", "truth", True, id="YAML 1.1"),
        pytest.param("truth: False", "truth", False, id="Python"),
        pytest.param("choice: on", "choice", "on", id="a choice that YAML 1.1 takes for true"),
        pytest.param("stage: 2", "stage", 2, id="a choice of numbers"),
        pytest.param("maybe: ~", "maybe", None, id="nothing, where it is allowed"),
        pytest.param("maybe: 3", "maybe", 3, id="something"),
        pytest.param("units: [3, 4]", "units", (3, 4), id="a list"),
        pytest.param("mix: [[a, 1], [b, 2.5]]", "mix", (("a", 1.0), ("b", 2.5)), id="pairs"),
        pytest.param("source: {path: here}", "source", Left(path="here"), id="the base's kind"),
        pytest.param("source: {kind: right, files: [a]}", "source", Right(files=("a",)), id="another kind"),
    ],
)
def test_values_by_the_type_of_their_field(tmp_path: Path, text: str, name: str, value: object) -> None:
    job, report = read(tmp_path, text, base=Job(whole=5))
    assert (report.faults, report.missing) == ([], [])
    assert getattr(job, name) == value
    assert type(getattr(job, name)) is type(value)
    assert name == "whole" or job.whole == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("whole: 1e3", "whole is 1e3; allowed: a whole number", id="a number with a power is not whole"),
        pytest.param("whole: 010", "whole is 010; allowed: a whole number", id="eight or ten"),
        pytest.param("whole: 0x10", "whole is 0x10; allowed: a whole number", id="sixteen"),
        pytest.param("whole: '3'", "whole is the text '3'; allowed: a whole number", id="in quotes"),
        pytest.param(f"whole: {'1_' * 5000}1", f"whole is {'1_' * 100}...; allowed: a whole number", id="endless"),
        pytest.param("whole: true", "whole is true; allowed: a whole number", id="true is not one"),
        pytest.param("whole:", "whole is empty; allowed: a whole number", id="nothing"),
        pytest.param("whole: -1", "whole is -1; allowed: 0 or more", id="what the job refuses"),
        pytest.param("number: fast", "number is fast; allowed: a number", id="a word"),
        pytest.param("number: .nan", "number is .nan; allowed: a number", id="not a number"),
        pytest.param("number: '1e-3'", "number is the text '1e-3'; allowed: a number", id="a number in quotes"),
        pytest.param("number: 1:30", "number is 1:30; allowed: a number", id="ninety, in YAML 1.1"),
        pytest.param("text: 17", "text is 17; allowed: a text, in quotes: '17'", id="a number"),
        pytest.param("text: true", "text is true; allowed: a text, in quotes: 'true'", id="a truth"),
        pytest.param("text:", "text is empty; allowed: a text ('' for none)", id="no text"),
        pytest.param("text: [a]", "text is a list; allowed: a text ('' for none)", id="a list"),
        pytest.param("truth: 1", "truth is 1; allowed: true or false", id="one is not true"),
        pytest.param("truth: 'yes'", "truth is the text 'yes'; allowed: true or false", id="yes in quotes"),
        pytest.param("choice: auto", "choice is auto; allowed: on, off", id="not among the choices"),
        pytest.param("stage: '2'", "stage is the text '2'; allowed: 1, 2", id="a number in quotes"),
        pytest.param("maybe: x", "maybe is x; allowed: a whole number", id="neither"),
        pytest.param("units: 3", "units is 3; allowed: a list, as [a, b]", id="no list"),
        pytest.param("units: [3, x]", "units.1 is x; allowed: a whole number", id="one of a list"),
        pytest.param("mix: [[a]]", "mix.0 has 1 entries; allowed: 2", id="a pair of one"),
        pytest.param("source: here", "source is here; allowed: a group of fields", id="no group"),
        pytest.param("source: {kind: up}", "source.kind is up; allowed: left, right", id="no such kind"),
        pytest.param(
            "source: {files: []}", "unknown field source.files; did you mean files?", id="another kind's field"
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    _, report = read(tmp_path, text, base=Job())
    assert report.faults == [(0 if "-1" in text else 1, message)]


def test_without_a_base_every_field_must_be_there_but_optional_ones(tmp_path: Path) -> None:
    text = "number: 1\ntext: ''\ntruth: no\nchoice: on\nstage: 1\nmaybe: ~\nunits: []\nmix: []\nsource: {kind: left}\n"
    _, report = read(tmp_path, text)
    assert report.missing == ["whole", "source.path"]
    job, report = read(tmp_path, text.replace("{kind: left}", "{kind: left, path: a}"), optional=("whole",))
    assert (report.missing, job) == ([], Job(number=1.0, choice="on", source=Left(path="a")))
    _, report = read(tmp_path, text.replace("kind: left", ""), optional=("whole",))
    assert report.missing == ["source.kind"]


def test_names_are_dotted_and_those_of_every_choice() -> None:
    names = list(field_names(TrainingJob))
    assert names[:3] == ["run_dir", "data", "data.url"]
    assert "data.augment.min_area" in names
    assert {"source.root", "source.labels_csv", "source.files"} <= set(field_names(PackJob))


@pytest.mark.parametrize(
    ("prefix", "given", "meant"),
    [
        pytest.param("", "stepz", "; did you mean steps?", id="a letter"),
        pytest.param("", "global-batch", "; did you mean global_batch?", id="as a flag"),
        pytest.param("schedule.", "learning_rat", "; did you mean learning_rate?", id="in its group"),
        pytest.param("", "learning_rate", "; did you mean schedule: {learning_rate: ...}?", id="without its group"),
        pytest.param("", "warmup_step", "; did you mean schedule: {warmup_steps: ...}?", id="both"),
        pytest.param("schedule.", "weight_decay", "; did you mean optimizer: {weight_decay: ...}?", id="in another"),
        pytest.param("", "data.augment.flip", "; write it as data: {augment: {flip: ...}}", id="with dots"),
        pytest.param("", "qqqq", "", id="like nothing"),
    ],
)
def test_what_was_meant(prefix: str, given: str, meant: str) -> None:
    assert known_instead(given, prefix, TrainingJob) == meant


def test_a_dotted_name_as_yaml() -> None:
    assert nested("steps") == "steps: ..."
    assert nested("a.b.c") == "a: {b: {c: ...}}"
