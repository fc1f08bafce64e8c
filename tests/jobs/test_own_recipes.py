"""A recipe in a Python file of one's own, found by its path; what is wrong with it is said in lines of that file."""

import json
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from jobs.recipes.shorter import smoke
from jobs.resolve import is_own, own_job
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError
from tests.rigs.processes import patchline

TEXT = '''
from __future__ import annotations
from dataclasses import dataclass, replace
from jobs.recipes.pretrain import digits_smoke
from pipeline.training.settings.job import TrainingJob

@dataclass
class Sizes:
    """Dataclasses look for their own module, which must be there."""
    steps: int = 50

def fine() -> TrainingJob:
    return replace(digits_smoke(), steps=Sizes().steps)

def fine_smoke_not():
    return fine()

def other():
    return {"steps": 3}

def broken():
    return TrainingJob(stepz=3)

def refused():
    return replace(fine(), steps=0)

def leaves():
    raise SystemExit("done here")

def needs(size):
    return fine()

def _hidden():
    return fine()
'''


def read(folder: Path, name: str, *, has_smoke: bool = True) -> TrainingJob:
    with chdir(folder):
        job = own_job(f"mine.py:{name}", kinds=(TrainingJob,), has_smoke=has_smoke)
    assert isinstance(job, TrainingJob)
    return job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TEXT)
    return tmp_path


def test_the_job_that_a_function_returns(folder: Path) -> None:
    before = list(sys.path)
    assert read(folder, "fine").steps == 50
    assert read(folder, "fine_smoke") == smoke(read(folder, "fine"))
    assert sys.path == before


@pytest.mark.parametrize(
    ("word", "own"),
    [
        ("a.py:b", True),
        ("dir/a.py", True),
        ("../a.py:b_smoke", True),
        ("a.yaml", False),
        ("digits", False),
        ("apy:b", False),
    ],
)
def test_words_that_name_a_python_file(word: str, own: bool) -> None:
    assert is_own(word) is own


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("gone", r"has no function 'gone' without arguments. It has: mine\.py:fine, mine", id="none"),
        pytest.param("needs", "has no function 'needs' without arguments", id="takes arguments"),
        pytest.param("_hidden", "has no function '_hidden'", id="hidden"),
        pytest.param("replace", "has no function 'replace'", id="imported, and takes arguments"),
        pytest.param("Sizes", "has no function 'Sizes'", id="a class"),
        pytest.param("", "is a file; a recipe is a function in it. It has: mine.py:fine", id="the file alone"),
        pytest.param("other", r"mine\.py:other returned a dict; .* here a TrainingJob", id="no job"),
        pytest.param("leaves", "SystemExit: done here", id="ends the interpreter"),
    ],
)
def test_functions_that_are_no_recipe(folder: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(folder, name)
    with pytest.raises(UserError, match="has no function 'fine_smoke'"):
        read(folder, "fine_smoke", has_smoke=False)


def test_a_failing_function_is_shown_by_its_own_lines(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(folder, "broken")
    lines = str(caught.value).splitlines()
    assert lines[0] == "mine.py failed:"
    assert 'File "mine.py", line ' in lines[1]
    assert lines[2].strip() == "return TrainingJob(stepz=3)"
    assert lines[-1] == "TypeError: TrainingJob.__init__() got an unexpected keyword argument 'stepz'"
    with pytest.raises(UserError) as caught:
        read(folder, "refused")
    files = [line for line in str(caught.value).splitlines() if line.startswith("  File ")]
    assert len(files) == 1, "the lines of our configurations are left out"
    assert "steps is 0; allowed: 1 to 1,000,000,000" in str(caught.value)


def test_a_file_called_as_a_module_of_python_does_not_replace_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(TEXT)
    own_job(f"{tmp_path}/json.py:fine", kinds=(TrainingJob,), has_smoke=False)
    assert sys.modules["json"] is json


OWN_RUN = """
from dataclasses import replace
from jobs.recipes.pretrain import digits_smoke

def tiny():
    job = digits_smoke()
    model = replace(job.model, width=8, depth=1, mlp_width=8, num_heads=2)
    return replace(job, model=model, steps=1, global_batch=16, schedule=replace(job.schedule, warmup_steps=0))
"""


def test_a_run_of_an_own_recipe(digits_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's record does not need the Python file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    Path("mine/recipes.py").write_text(OWN_RUN)
    words = ("pretrain", "mine/recipes.py:tiny", "--data.url", digits_url, "--run-dir", "run", "--seed", "3")
    ended = patchline(*words, "--device", "cpu")
    assert ended.code == 0, ended.errors
    refused = patchline(*words, "--device", "cpu", "--model.pooling", "average", "--data.augment.flip")
    assert refused.code == 2
    lines = {line.strip() for line in refused.errors.splitlines()}
    assert {"model.pooling: before token, now average", "data.augment.flip: before false, now true"} <= lines
    Path("mine/recipes.py").unlink()
    shown = patchline("show", "run")
    assert (shown.code, "  seed: 3\n" in shown.output) == (0, True)


@pytest.mark.parametrize("words", ["show run", "show run/job.yaml", "plan run/job.yaml", "pretrain run"])
def test_a_file_of_others_starts_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/evil.py").write_text("open('executed', 'w')\ndef f(): pass\n")
    Path("run/job.yaml").write_text("stage: pretrain\nrecipe: evil.py:f\n")
    ended = patchline(*words.split())
    assert "'evil.py:f' is Python, which a YAML file cannot start; name it on the command line" in ended.errors
    assert (ended.code, Path("executed").exists()) == (2, False)
