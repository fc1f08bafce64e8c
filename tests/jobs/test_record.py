"""Jobs as YAML: what a file says, records of runs and users' files, and the values of a record by path."""

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.mistakes import field_names
from jobs.recipes import finetune, pack, pretrain
from jobs.recipes.pretrain import RECIPES as PRETRAIN
from jobs.record import (
    MOST_BYTES,
    MOST_DEPTH,
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
from pipeline.training.settings.job import TrainingJob
from shards.errors import InvalidDataError, UserError
from tests.rigs.faults import differs, every_fault

RECIPES: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "pack": pack.RECIPES,
    "pretrain": pretrain.RECIPES,
    "finetune": finetune.RECIPES,
}
ALL = [(stage, name) for stage, recipes in RECIPES.items() for name in recipes]
LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


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


def test_a_field_whose_name_is_a_number_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown 7 \(line 2\), model\.3 \(line 2\); missing run_dir, "):
        read(written(tmp_path, "stage: pretrain\njob: {7: 8, steps: 20, model: {3: 4}}\n"))


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"stage: [pretrain", "is not YAML", id="not YAML"),
        pytest.param(b"\xff\xd8\xff\xe0\x00", "is not YAML", id="an image"),
        pytest.param(b"", "has no fields; add a line such as `recipe: digits_smoke`", id="empty"),
        pytest.param(b"- 1\n- 2\n", "has no fields", id="a list"),
        pytest.param(b"stage: pretrain\njob:\n", "my.yaml, line 2: `job:` has no fields", id="no job in it"),
        pytest.param(b"job: {}\n", "has the entries job; allowed beside `job:` is `stage:`", id="a job of no stage"),
        pytest.param(b"stage: pretrain\njob: {}\nrecipe: x\n", "entries stage, job, recipe; allowed", id="both forms"),
        pytest.param(b"recipe: [a, b]\n", "my.yaml, line 1: recipe must be a single word", id="two recipes"),
        pytest.param(b"recipe:\n", "my.yaml, line 1: recipe must be a single word", id="no recipe"),
        pytest.param(b"stage: pretran\njob: {}\n", "stage is 'pretran'; allowed: pack, ", id="no stage"),
        pytest.param(b"stage: finetune\njob: {}\n", "run: patchline finetune ", id="another stage"),
        pytest.param(b"stage: !!python/object/apply:os.getcwd []\njob: {}\n", "is not YAML", id="code is not run"),
    ],
)
def test_files_that_are_no_job(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(written(tmp_path, content))


@pytest.mark.parametrize("name", ["nothing.yaml", "folder"])
def test_a_file_that_can_not_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        read(tmp_path / name)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(LAUGHS, r"line 2: the alias \*a; write out what it stands for", id="billion laughs"),
        pytest.param("a: &a [*a]\n", r"the alias \*a", id="a list in itself"),
        pytest.param("a: !!python/object/apply:os.getcwd []\n", "line 1: the tag tag:yaml.org,2002:python", id="code"),
        pytest.param("a: !!str 3\n", "the tag tag:yaml.org,2002:str; leave it out", id="a harmless tag"),
        pytest.param("a: 1\nb: 2\na: 3\n", "line 3: a is given on line 1 already; remove one", id="twice"),
        pytest.param("a: {b: 1, b: 2}\n", "line 1: b is given on line 1 already", id="twice in a group"),
        pytest.param("[1, 2]: 3\n", "line 1: a field's name is a word", id="a list for a name"),
        pytest.param("[" * 100_000, f"line 1: nested deeper than {MOST_DEPTH} levels", id="too deep"),
        pytest.param("- " * 20 + "x", "nested deeper than", id="too deep in blocks"),
        pytest.param("a: [1\nb: 2\n", "is not YAML that a job can be read from: line 2: ", id="broken"),
        pytest.param("a: 1\n---\nb: 2\n", "line 2: but found another document", id="two documents"),
        pytest.param(b"\xff\xd8\xff\xe0\x00", "is not YAML", id="an image"),
        pytest.param(
            "#" * (MOST_BYTES + 1),
            "is larger than 262,144 bytes.*; a job is a YAML file",
            id="too large",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_tree_of(tmp_path, text)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_has_no_end_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.yaml"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"a\.yaml is not a regular file; give a file, .*; a job is a YAML file"):
        read_tree(path)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "it has no stage and job", id="empty"),
        pytest.param("stage: pretrain\n", "it has no stage and job", id="half of it"),
        pytest.param("stage: pretrain\njob: {a: [1\n", "it is not YAML: line", id="cut off"),
        pytest.param("a: &x 1\nb: *x\n", r"the alias \*x", id="an alias"),
        pytest.param("[" * 5000, "nested deeper than", id="deep"),
        pytest.param("{" * 5000, "nested deeper than", id="groups as names"),
        pytest.param("\x00\x01", "it is not YAML", id="binary"),
        pytest.param("a" * (1 << 19), "larger than", id="large"),
    ],
)
def test_what_is_no_record(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(InvalidDataError, match=message):
        read_leaves(tmp_path / "job.yaml")
