"""The job that the second word of a command stands for, with a stage and without one."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.data.pack import PackJob
from jobs.data.verify import VerifyJob
from jobs.planning.plan import PlanJob
from jobs.recipes.finetune import digits_48
from jobs.recipes.pretrain import cifar10_small, digits_smoke
from jobs.recipes.shorter import smoke
from jobs.record import write_record
from jobs.resolve import SHOWN, default_job, file_of, job_of, split_stage, stages_found, stages_of
from jobs.settings.models import EvaluateJob
from pipeline.models import ModelConfig, build_model
from pipeline.models.weights.folder import save_weights
from pipeline.models.weights.usage import Usage
from pipeline.shared_settings import EvaluationTransform
from shards.errors import UserError

OWN = """
from dataclasses import replace
from jobs.recipes.pretrain import digits_smoke

def mine():
    return replace(digits_smoke(), steps=77)
"""


def file(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_recipe_its_smoke_size_a_record_and_a_url(tmp_path: Path) -> None:
    assert default_job("pretrain", "digits_smoke") == digits_smoke()
    assert default_job("pretrain", "cifar10_small_smoke") == smoke(cifar10_small())
    write_record(tmp_path, stage="pretrain", job=digits_smoke())
    assert default_job("pretrain", str(tmp_path / "job.yaml")) == digits_smoke()
    assert default_job("verify", "s3://bucket/data") == VerifyJob(url="s3://bucket/data")


def test_a_run_directory_stands_for_its_record_unless_a_recipe_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (Path("runs/a"), Path("digits_48")):
        write_record(folder, stage="pretrain", job=replace(digits_smoke(), steps=77))
    assert default_job("pretrain", "runs/a").steps == 77
    assert default_job("finetune", "digits_48") == digits_48()


def test_weights_are_evaluated_as_their_own_evaluation_was(tmp_path: Path) -> None:
    run, transform = tmp_path / "my run", EvaluationTransform(mode="central_crop", filter="area", exif=False)
    write_record(run, stage="pretrain", job=digits_smoke())
    config = ModelConfig(name="vit", image_size=16, patch=8, depth=1, width=8, mlp_width=8, num_heads=2, num_classes=2)
    state, usage = build_model(config).state_dict(), Usage(loss="sigmoid", transform=transform)
    save_weights(run / "weights", config=config, labels=("a", "b"), tensor=lambda name: state[name], usage=usage)
    for path in (str(run), str(run / "weights")):
        job = default_job("evaluate", path)
        assert (job.weights, job.loss, job.data.transform) == (path, "sigmoid", transform)
    later = str(tmp_path / "later")  # weights that a step of a chain will write
    assert default_job("evaluate", later) == EvaluateJob(weights=later)
    write_record(tmp_path / "scores", stage="evaluate", job=EvaluateJob(weights="w"))
    assert default_job("evaluate", str(tmp_path / "scores")) == EvaluateJob(weights="w")


def test_a_function_of_a_python_file_and_its_smoke_size(tmp_path: Path) -> None:
    own = file(tmp_path / "my_recipes.py", OWN)
    mine = replace(digits_smoke(), steps=77)
    assert default_job("pretrain", f"{own}:mine") == mine
    assert default_job("finetune", f"{own}:mine_smoke") == smoke(mine)
    with pytest.raises(UserError, match=r"returned a TrainingJob; .* here a PackJob"):
        default_job("pack", f"{own}:mine")


@pytest.mark.parametrize(
    ("recipe", "base"),
    [
        pytest.param("digits_smoke", digits_smoke(), id="a recipe"),
        pytest.param("cifar10_small_smoke", smoke(cifar10_small()), id="its smoke size"),
    ],
)
def test_a_file_changes_a_recipe(tmp_path: Path, recipe: str, base: object) -> None:
    path = file(tmp_path / "jobs" / "my.yaml", f"recipe: {recipe}\nseed: 5\n")
    assert default_job("pretrain", path) == replace(base, seed=5)  # type: ignore[type-var]


def test_a_file_of_a_stage_without_recipes_has_every_field(tmp_path: Path) -> None:
    path = file(tmp_path / "my.yaml", "url: data\ndeep: yes\nworkers: 2\nrun_dir: ''\n")
    assert default_job("verify", path) == VerifyJob(url="data", deep=True, workers=2)
    with pytest.raises(UserError, match=r"(?s)must have every field.*deep, workers, run_dir"):
        default_job("verify", file(tmp_path / "my.yaml", "url: data\n"))
    with pytest.raises(UserError, match="patchline verify has no recipes"):
        default_job("verify", file(tmp_path / "my.yaml", "recipe: digits\nurl: data\n"))


@pytest.mark.parametrize("word", ["cifar10_small_smoke", "my.yaml", "job.yaml", "my_recipes.py:mine"])
def test_a_plan_takes_what_training_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.chdir(tmp_path)
    file(tmp_path / "my_recipes.py", OWN)
    file(tmp_path / "my.yaml", "recipe: digits_48\nseed: 3\n")
    write_record(tmp_path, stage="finetune", job=digits_48())
    expected = {
        "cifar10_small_smoke": smoke(cifar10_small()),
        "my.yaml": replace(digits_48(), seed=3),
        "job.yaml": digits_48(),
        "my_recipes.py:mine": replace(digits_smoke(), steps=77),
    }
    assert default_job("plan", word) == PlanJob(recipe=word, training=expected[word])


def test_the_stages_that_a_word_may_be_of(tmp_path: Path) -> None:
    own = file(tmp_path / "my_recipes.py", OWN)
    write_record(tmp_path / "run", stage="verify", job=VerifyJob(url="data"))
    table = {
        "digits_smoke": ("pretrain",),
        "cifar10": ("pack", "finetune"),
        "nothing": (),
        f"{own}:mine": ("pretrain", "finetune"),
        file(tmp_path / "a.yaml", "recipe: cifar10"): ("pack", "finetune"),
        file(tmp_path / "b.yaml", "stage: pack\nrecipe: cifar10"): ("pack",),
        file(tmp_path / "c.yaml", "steps: 3"): (),
        str(tmp_path / "run" / "job.yaml"): ("verify",),
    }
    assert {word: stages_of(word) for word in table} == table
    with pytest.raises(UserError, match="no stage has a recipe 'nothing'"):
        stages_of(file(tmp_path / "d.yaml", "recipe: nothing"))


def test_a_choice_between_sources_is_made_by_kind(tmp_path: Path) -> None:
    path = file(tmp_path / "my.yaml", "recipe: folder\nsource: {kind: flat, root: images}\nworkers: 3\n")
    job = default_job("pack", path)
    assert isinstance(job, PackJob)
    assert (job.source.kind, job.workers) == ("flat", 3)
    with pytest.raises(UserError, match=r"line 2: source\.kind is flats; allowed: digits, folder, flat"):
        default_job("pack", file(tmp_path / "my.yaml", "recipe: folder\nsource: {kind: flats}\n"))


@pytest.mark.parametrize(
    ("text", "warmup", "note"),
    [
        pytest.param("steps: 30\n", 3, "warm-up scaled from 30 to 3 steps", id="a shorter run"),
        pytest.param("steps: 3\n", 0, "warm-up scaled from 30 to 0 steps", id="shorter than the warm-up"),
        pytest.param("steps: 30\nschedule: {warmup_steps: 7}\n", 7, "", id="its own warm-up"),
        pytest.param("steps: 600\n", 30, "", id="a longer run"),
    ],
)
def test_a_file_with_other_steps_scales_the_warmup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, warmup: int, note: str
) -> None:
    caplog.set_level("INFO")
    job = default_job("pretrain", file(tmp_path / "my.yaml", f"recipe: digits_smoke\n{text}"))
    assert job.schedule.warmup_steps == warmup
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ([note] if note else [])


def test_a_stage_may_come_first() -> None:
    assert split_stage(["pretrain", "digits_smoke"]) == ("pretrain", ["digits_smoke"])
    assert split_stage(["digits_smoke", "--steps", "3"]) == ("", ["digits_smoke", "--steps", "3"])
    assert split_stage([]) == ("", [])
    with pytest.raises(UserError, match="leave out the word plan"):
        split_stage(["plan", "digits_smoke"])
    of_data = {"pack", "index", "verify", "card"}
    assert set(SHOWN) == of_data | {"pretrain", "finetune", "evaluate", "fewshot", "inspect", "import", "export"}


def test_a_run_directory_stands_for_its_record(tmp_path: Path) -> None:
    write_record(tmp_path / "run", stage="pretrain", job=digits_smoke())
    assert file_of(str(tmp_path / "run")) == str(tmp_path / "run" / "job.yaml")
    assert stages_found(str(tmp_path / "run")) == ("pretrain",)
    assert job_of(str(tmp_path / "run"), "pretrain") == digits_smoke()
    with pytest.raises(UserError, match=r"is neither a recipe of any stage nor a YAML file, a run directory"):
        stages_found(str(tmp_path))


def test_a_folder_of_something_else_hides_no_recipe_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pack digits --out digits` creates such a folder."""
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert stages_found("digits") == ("pack",)


def test_words_of_no_stage(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("steps: 3\n")
    with pytest.raises(UserError, match=r"my\.yaml names neither a stage nor a recipe; add `recipe: NAME`"):
        stages_found(str(tmp_path / "my.yaml"))
    with pytest.raises(UserError, match="'digit' is neither a recipe of any stage nor a YAML file"):
        stages_found("digit")
    (tmp_path / "my.yaml").write_text("stage: demo\nsteps: 3\n")
    (stage,) = stages_found(str(tmp_path / "my.yaml"))
    with pytest.raises(UserError, match="is of the stage 'demo'; allowed: pack, "):
        job_of(str(tmp_path / "my.yaml"), stage)
