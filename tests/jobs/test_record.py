"""Jobs as YAML: what a file says, records of runs and users' files, and the values of a record by path."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.mistakes import field_names
from jobs.recipes import finetune, pack, pretrain
from jobs.recipes.pretrain import RECIPES as PRETRAIN
from jobs.record import (
    Fields,
    Items,
    Scalar,
    leaves_of,
    open_job,
    read_leaves,
    read_record,
    read_tree,
    record_text,
    write_record,
)
from jobs.settings.models import EvaluateJob, FewshotJob
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError
from tests.rigs.faults import differs, every_fault

RECIPES: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "pack": pack.RECIPES,
    "pretrain": pretrain.RECIPES,
    "finetune": finetune.RECIPES,
}
ALL = [(stage, name) for stage, recipes in RECIPES.items() for name in recipes]


@every_fault
def test_every_recipe_reads_back(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "by the umask").mkdir()
    mode = oct((tmp_path / "by the umask").stat().st_mode & 0o777)
    for stage, name in ALL:
        job: Any = RECIPES[stage][name]()
        run_dir = tmp_path / stage / name
        path = run_dir / "job.yaml"
        write_record(run_dir, stage=stage, job=job)
        try:
            yield from differs(f"{stage} {name}: job", read_record(path, stage=stage, kind=type(job)), job)
        except UserError as error:
            yield f"{stage} {name} does not read back: {error}"
        yield from differs(
            f"{stage} {name}: what is in the folder", [file.name for file in run_dir.iterdir()], [path.name]
        )
        yield from differs(f"{stage} {name}: the folder's mode", oct(run_dir.stat().st_mode & 0o777), mode)
        line = path.read_text().partition("\n")[0]
        yield from differs(f"{stage} {name}: the first line", line, f"# patchline {stage} {path}")


def test_a_run_folder_of_any_name_has_a_record_that_reads_back(tmp_path: Path) -> None:
    job = pretrain.digits_smoke()
    run_dir = tmp_path / "two\nlines: [\x1b"
    write_record(run_dir, stage="pretrain", job=job)
    assert read_record(run_dir / "job.yaml", stage="pretrain", kind=type(job)) == job


def test_no_other_stage_replaces_the_record_of_a_run(tmp_path: Path) -> None:
    """`patchline evaluate RUN --run-dir RUN` took its record from a run."""
    job, run_dir = pretrain.digits_smoke(), tmp_path / "run"
    write_record(run_dir, stage="pretrain", job=job)
    before = (run_dir / "job.yaml").read_text()
    for stage, other in (("evaluate", EvaluateJob()), ("fewshot", FewshotJob())):
        with pytest.raises(UserError, match=rf"run' has a run of patchline pretrain, .* give .*run-{stage}'"):
            write_record(run_dir, stage=stage, job=other)
        write_record(tmp_path / "scores", stage=stage, job=other)
    assert (run_dir / "job.yaml").read_text() == before
    (run_dir / "job.yaml").write_text("stage: pretrain\n  torn")
    with pytest.raises(UserError, match=r"has a job\.yaml of unknown stage"):
        write_record(run_dir, stage="evaluate", job=EvaluateJob())
    for _ in range(2):
        write_record(run_dir, stage="pretrain", job=job)
    assert (run_dir / "job.yaml").read_text() == before


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


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "my.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(path: Path) -> TrainingJob:
    return read_record(path, stage="pretrain", kind=TrainingJob, recipe=lambda name: pretrain.RECIPES[name]())


def test_a_record_may_be_edited(tmp_path: Path) -> None:
    path = rewritten(tmp_path, {"schedule.learning_rate": 1, "data.url": "s3://größe/x", "steps": 500})
    job = read(path)
    assert (job.steps, job.schedule.learning_rate, job.data.url) == (500, 1.0, "s3://größe/x")


def test_a_name_that_yaml_takes_for_a_date_is_a_name(tmp_path: Path) -> None:
    path = rewritten(tmp_path, {})
    path.write_text(path.read_text().replace("run_dir: ''", "run_dir: 2026-11-21"))
    assert read(path).run_dir == "2026-11-21"


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        pytest.param({"stepz": 3}, ("unknown stepz (line ", "; did you mean steps?)"), id="unknown field"),
        pytest.param({"optimizer.lr": 0.1}, ("unknown optimizer.lr (line ",), id="unknown nested field"),
        pytest.param({"optimizer.lr": 0.1, "x": 1}, ("x", "optimizer.lr"), id="two unknown fields"),
        pytest.param({"steps": "ten"}, ("steps is ten; ",), id="text for a number"),
        pytest.param({"steps": "10"}, ("steps is the text '10'; ",), id="strict: digits in quotes are text"),
        pytest.param({"steps": 1.5}, ("steps is 1.5; allowed: a whole number",), id="half a step"),
        pytest.param({"steps": True}, ("steps is true; ",), id="yes is no number"),
        pytest.param({"optimizer.name": "adam"}, ("optimizer.name is adam; allowed: adamw, sgd",), id="no choice"),
        pytest.param({"data.augment": None}, ("data.augment is empty; ",), id="nothing for a group of fields"),
        pytest.param({"model": [1, 2]}, ("model is a list; allowed: a group of fields",), id="a list for a group"),
        pytest.param({"steps": 0}, ("steps",), id="a value that the job itself refuses"),
        pytest.param({"model.image_size": 33}, ("image_size is 33",), id="sizes that do not fit"),
    ],
)
def test_fields_that_are_wrong_are_named(tmp_path: Path, change: dict[str, Any], messages: tuple[str, ...]) -> None:
    path = rewritten(tmp_path, change)
    with pytest.raises(UserError) as caught:
        read(path)
    for message in messages:
        assert message in str(caught.value)


def test_what_a_file_says_wins_over_its_recipe(tmp_path: Path) -> None:
    text = "# mine\nrecipe: digits_smoke\nschedule: {learning_rate: 1e-4}\ndata:\n  augment: {flip: yes}\n"
    job = read(written(tmp_path, text))
    assert (job.schedule.learning_rate, job.data.augment.flip) == (1e-4, True)
    recipe = pretrain.digits_smoke()
    assert (job.schedule.warmup_steps, job.data.augment.min_area) == (30, recipe.data.augment.min_area)
    assert read(written(tmp_path, "stage: pretrain\nrecipe: digits_smoke")) == recipe


def test_every_fault_has_its_line(tmp_path: Path) -> None:
    text = "recipe: digits_smoke\nschedule:\n  learning_rat: 1e-3\n\nsteps: 1e3\n"
    with pytest.raises(UserError) as caught:
        read(written(tmp_path, text))
    assert str(caught.value).splitlines()[1:] == [
        "  line 3: unknown field schedule.learning_rat; did you mean learning_rate?",
        "  line 5: steps is 1e3; allowed: a whole number",
    ]


def test_without_a_recipe_no_field_may_be_missing(tmp_path: Path) -> None:
    """A short file once trained ViT-B/16 from defaults alone."""
    for text in ("steps: 10\n", "stage: pretrain\nsteps: 10\n"):
        with pytest.raises(UserError, match=r"(?s)every field\. Missing are\n  run_dir.*\nAdd `recipe: NAME`"):
            read(written(tmp_path, text))
    whole = yaml.safe_load(record_text("pretrain", pretrain.digits_smoke()))["job"]
    assert read(written(tmp_path, yaml.safe_dump(whole))) == pretrain.digits_smoke()
    del whole["model"]["dropout"], whole["model"]["pooling"]
    with pytest.raises(UserError, match=r"Missing are\n  model\.pooling, model\.dropout\n"):
        read(written(tmp_path, yaml.safe_dump(whole)))


@pytest.mark.parametrize("stage", ["pack", "pretrain"])
@every_fault
def test_a_record_of_another_version_is_refused_in_one_sentence(tmp_path: Path, stage: str) -> Iterator[str]:
    """Nothing is filled in, renamed or left out, whatever the field and however deep it is."""
    job: Any = next(iter(RECIPES[stage].values()))()
    whole = record_text(stage, job)
    end = "; replay it with the version that wrote it, or write a file with `recipe: NAME` and what differs from it"
    by_group = {name.rpartition(".")[0]: name for name in field_names(type(job)) if not name.endswith(".kind")}
    for name in by_group.values():
        changed = yaml.safe_load(whole)
        group = changed["job"]
        *path, last = name.split(".")
        for each in path:
            group = group[each] if isinstance(group, dict) and each in group else None
        if group is None or last not in group:
            continue  # of another kind of source
        group["former_name"] = group.pop(last)
        file = written(tmp_path, yaml.safe_dump(changed))
        with pytest.raises(UserError) as caught:
            read_record(file, stage=stage, kind=type(job))
        said, own = str(caught.value), ".".join([*path, "former_name"])
        begin = f"{file} is not a record of this version, which has every field and no other: unknown {own} (line "
        if not (said.startswith(begin) and said.endswith(f"; missing {name}{end}") and "\n" not in said):
            yield f"{stage}, {name}: {said}"


def test_a_file_says_of_which_stage_and_recipe_it_is(tmp_path: Path) -> None:
    file = open_job(rewritten(tmp_path, {}, stage="finetune"))
    assert (file.stage, file.recipe, file.is_record) == ("finetune", "", True)
    file = open_job(written(tmp_path, "recipe: digits_smoke\nsteps: 3\n"))
    assert (file.stage, file.recipe, file.is_record) == ("", "digits_smoke", False)


def test_a_full_disk_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object, **__: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_record(tmp_path / "run", stage="pretrain", job=pretrain.digits_smoke())
    assert caught.value.filename == str(tmp_path / "run" / "job.yaml")
    assert list((tmp_path / "run").iterdir()) == []


def read_tree_of(folder: Path, text: str | bytes) -> object:
    path = folder / "a.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_tree(path)


def test_values_keep_their_spelling_and_their_lines(tmp_path: Path) -> None:
    tree = read_tree_of(tmp_path, "# first\nrate: 1e-3\non: [010, 'yes']\nempty:\n")
    assert tree == Fields(
        entries={
            "rate": Scalar(text="1e-3", is_plain=True, line=2),
            "on": Items(
                items=(Scalar(text="010", is_plain=True, line=3), Scalar(text="yes", is_plain=False, line=3)), line=3
            ),
            "empty": Scalar(text="", is_plain=True, line=4),
        },
        lines={"rate": 2, "on": 3, "empty": 4},
        line=2,
    )


@pytest.mark.parametrize(
    ("text", "is_nothing"),
    [("~", True), ("null", True), ("", True), ("'null'", False), ("''", False), ("none", False)],
)
def test_what_is_nothing(tmp_path: Path, text: str, is_nothing: bool) -> None:
    tree = read_tree_of(tmp_path, f"a: {text}\n")
    assert isinstance(tree, Fields)
    assert isinstance(tree.entries["a"], Scalar)
    assert tree.entries["a"].is_nothing is is_nothing


@pytest.mark.parametrize("text", ["1000_", "1__0", "1_", "_1", "0_1"])
def test_underscores_stand_between_digits(tmp_path: Path, text: str) -> None:
    for field, allowed in (("steps", "a whole number"), ("schedule.learning_rate", "a finite number")):
        content = rewritten(tmp_path / field, {field: "HERE"}).read_text().replace("HERE", text)
        if field == "schedule.learning_rate" and text == "0_1":
            continue  # 01 is a decimal number
        (tmp_path / field / "job.yaml").write_text(content)
        with pytest.raises(UserError, match=rf"{field} is {text}; allowed: {allowed}|{field} is {text}; "):
            read_record(tmp_path / field / "job.yaml", stage="pretrain", kind=TrainingJob)


def test_a_number_with_underscores(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "run", {"steps": "STEPS", "schedule.learning_rate": "RATE"})
    path.write_text(path.read_text().replace("STEPS", "10_000").replace("RATE", "1_0.2_5e-3"))
    job = read_record(path, stage="pretrain", kind=TrainingJob)
    assert (job.steps, job.schedule.learning_rate) == (10_000, 10.25e-3)


def test_an_empty_file_is_nothing(tmp_path: Path) -> None:
    assert read_tree_of(tmp_path, "# nothing yet\n") == Scalar(text="", is_plain=True, line=1)


@pytest.mark.parametrize("name", ["digits_smoke", "vit_h14_jft"])
def test_a_record_has_the_fields_of_its_job(tmp_path: Path, name: str) -> None:
    job = PRETRAIN[name]()
    (tmp_path / "job.yaml").write_text(record_text("pretrain", job))
    found = read_leaves(tmp_path / "job.yaml")
    assert found.pop("stage") == "pretrain"
    wanted = {f"job.{field}": text for field, text in leaves_of(job).items()}
    assert found.keys() == wanted.keys()
    numbers = {name for name in found if found[name] != wanted[name]}
    assert all(float(found[one]) == float(wanted[one]) for one in numbers), "1.0e-05 and 1e-05"


def test_items_of_lists_have_numbers(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("stage: a\njob:\n  mix: [[x, 1], [y, 2]]\n  after: {b: [], c: 3}\n")
    assert read_leaves(tmp_path / "job.yaml") == {
        "stage": "a",
        "job.mix.0.0": "x",
        "job.mix.0.1": "1",
        "job.mix.1.0": "y",
        "job.mix.1.1": "2",
        "job.after.c": "3",
    }
