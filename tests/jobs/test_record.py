"""RUN/job.yaml replays any job, and refuses what is not exactly one."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.recipes import evaluate, finetune, pack, pretrain
from jobs.record import read_record, stage_of, write_record
from pipeline.training.config import TrainingJob
from shards.errors import UserError

RECIPES: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "pack": pack.RECIPES,
    "pretrain": pretrain.RECIPES,
    "finetune": finetune.RECIPES,
    "evaluate": evaluate.RECIPES,
}
ALL = [(stage, name) for stage, recipes in RECIPES.items() for name in recipes]


@pytest.mark.parametrize(("stage", "name"), ALL)
def test_every_recipe_reads_back(tmp_path: Path, stage: str, name: str) -> None:
    job: Any = RECIPES[stage][name]()
    write_record(tmp_path / "run", stage=stage, job=job)
    path = tmp_path / "run" / "job.yaml"
    assert read_record(path, stage=stage, kind=type(job)) == job
    assert [file.name for file in path.parent.iterdir()] == ["job.yaml"]
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert path.read_text().startswith(f"# patchline {stage} {path}\n")


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        pytest.param("file", "File exists", id="a file"),
        pytest.param("file/run", "Not a directory", id="below a file"),
        pytest.param("/proc/nope", "No such file", id="a file system that takes no folders"),
        pytest.param("run" * 100, "File name too long", id="a name that is too long"),
    ],
)
def test_a_run_folder_that_can_not_be_made_is_the_users_mistake(tmp_path: Path, folder: str, why: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    run_dir = tmp_path / folder
    with pytest.raises(UserError, match=f"cannot write .*{re.escape(str(run_dir))}: {why}.*--run-dir"):
        write_record(run_dir, stage="pretrain", job=pretrain.digits_smoke())


def test_a_record_that_can_not_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").mkdir()
    with pytest.raises(UserError, match=f"cannot write .*{re.escape(str(tmp_path))}: Is a directory"):
        write_record(tmp_path, stage="pretrain", job=pretrain.digits_smoke())


def rewritten(folder: Path, change: dict[str, Any], *, stage: str = "pretrain") -> Path:
    """The record of digits_smoke with dotted fields of the job changed."""
    write_record(folder, stage=stage, job=pretrain.digits_smoke())
    content = yaml.safe_load((folder / "job.yaml").read_text())
    for dotted, value in change.items():
        *parents, last = dotted.split(".")
        target = content["job"]
        for parent in parents:
            target = target[parent]
        target[last] = value
    (folder / "job.yaml").write_text(yaml.safe_dump(content))
    return folder / "job.yaml"


def test_a_record_may_be_edited(tmp_path: Path) -> None:
    path = rewritten(tmp_path, {"schedule.learning_rate": 1, "data.url": "s3://größe/x", "steps": 500})
    job = read_record(path, stage="pretrain", kind=TrainingJob)
    assert (job.steps, job.schedule.learning_rate, job.data.url) == (500, 1.0, "s3://größe/x")


def test_a_name_that_yaml_takes_for_a_date_is_a_name(tmp_path: Path) -> None:
    path = rewritten(tmp_path, {})
    path.write_text(path.read_text().replace("run_dir: ''", "run_dir: 2026-11-21"))
    assert read_record(path, stage="pretrain", kind=TrainingJob).run_dir == "2026-11-21"


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        pytest.param({"stepz": 3}, ("unknown fields stepz",), id="unknown field"),
        pytest.param({"optimizer.lr": 0.1}, ("unknown fields optimizer.lr",), id="unknown nested field"),
        pytest.param({"optimizer.lr": 0.1, "x": 1}, ("x", "optimizer.lr"), id="two unknown fields"),
        pytest.param({"steps": "ten"}, ("steps: ", "(given 'ten')"), id="text for a number"),
        pytest.param({"steps": "10"}, ("steps: ", "(given '10')"), id="strict: digits in quotes are text"),
        pytest.param({"steps": 1.5}, ("steps: ", "(given 1.5)"), id="half a step"),
        pytest.param({"steps": True}, ("steps: ", "(given True)"), id="yes is no number"),
        pytest.param(
            {"schedule.learning_rate": "1e-3"}, ("schedule.learning_rate: ", "'1e-3'"), id="YAML's 1e-3 is text"
        ),
        pytest.param({"optimizer.name": "adam"}, ("optimizer.name: ", "(given 'adam')"), id="not one of the choices"),
        pytest.param({"data.augment": None}, ("data.augment: ",), id="nothing for a group of fields"),
        pytest.param({"model": [1, 2]}, ("model: ",), id="a list for a group of fields"),
        pytest.param({"steps": 0}, ("steps",), id="a value that the job itself refuses"),
        pytest.param({"model.image_size": 33}, ("image_size is 33",), id="sizes that do not fit"),
    ],
)
def test_fields_that_are_wrong_are_named(tmp_path: Path, change: dict[str, Any], messages: tuple[str, ...]) -> None:
    path = rewritten(tmp_path, change)
    with pytest.raises(UserError) as caught:
        read_record(path, stage="pretrain", kind=TrainingJob)
    for message in messages:
        assert message in str(caught.value)


def test_a_field_whose_name_is_a_number_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("stage: pretrain\njob: {7: 8, steps: 20, model: {3: 4}}\n")
    with pytest.raises(UserError, match=r"unknown fields 7, model\.3"):
        read_record(path, stage="pretrain", kind=TrainingJob)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"stage: [pretrain", "is not YAML", id="not YAML"),
        pytest.param(b"\xff\xd8\xff\xe0\x00", "is not YAML", id="an image"),
        pytest.param(b"", "is no job record", id="empty"),
        pytest.param(b"- 1\n- 2\n", "is no job record", id="a list"),
        pytest.param(b"steps: 10\n", "is no job record: it needs the two entries 'stage' and 'job'", id="fields alone"),
        pytest.param(b"stage: pretrain\njob:\n", "job.yaml: ", id="no job in it"),
        pytest.param(b"stage: finetune\njob: {}\n", "run: patchline finetune ", id="another stage"),
        pytest.param(b"stage: !!python/object/apply:os.getcwd []\njob: {}\n", "is not YAML", id="code is not run"),
    ],
)
def test_files_that_are_no_record(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_record(path, stage="pretrain", kind=TrainingJob)


@pytest.mark.parametrize("name", ["nothing.yaml", "folder"])
def test_a_file_that_can_not_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=f"{name} can not be read"):
        read_record(tmp_path / name, stage="pretrain", kind=TrainingJob)


def test_a_record_says_of_which_stage_it_is(tmp_path: Path) -> None:
    assert stage_of(rewritten(tmp_path, {}, stage="finetune")) == "finetune"
    (tmp_path / "job.yaml").write_text("steps: 10\n")
    with pytest.raises(UserError, match="is no job record"):
        stage_of(tmp_path / "job.yaml")
