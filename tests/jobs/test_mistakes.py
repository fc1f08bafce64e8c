"""Wrong words: one message each, which names the word, what is allowed, and what may have been meant."""

from dataclasses import fields
from pathlib import Path

import pytest

from jobs.arguments import values_of
from jobs.cluster.settings import ClusterConfig
from jobs.flags import flags_of
from jobs.mistakes import (
    _SBATCH,
    _STAGES,
    _SYNONYMS,
    refuse_missing,
    required_flags,
    similar_flags,
    unknown_recipe,
    unknown_stage,
)
from jobs.recipes import finetune, pack
from jobs.recipes.pretrain import digits_smoke
from jobs.resolve import default_job
from jobs.stages import STAGES, recipes_of
from pipeline.data.config import DataConfig
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError
from tests.rigs.processes import patchline

TRAINING = list(flags_of(digits_smoke()))
PACKING = list(flags_of(pack.folder()))


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--lr", "--schedule.learning-rate"),
        ("--learning-rate", "--schedule.learning-rate"),
        ("--learning_rate", "--schedule.learning-rate"),
        ("--lerning-rate", "--schedule.learning-rate"),
        ("--batch-size", "--global-batch"),
        ("--epochs", "--steps"),
        ("--wd", "--optimizer.weight-decay"),
        ("--data", "--data.url"),
        ("--output", "--run-dir"),
        ("--out", "--run-dir"),
        ("--stepz", "--steps"),
        ("--model.widht", "--model.width"),
        ("--data.nmu-threads", "--data.num-threads"),
    ],
)
def test_flags_that_may_be_meant_in_training(word: str, meant: str) -> None:
    names = [flag.name for flag in TRAINING]
    assert similar_flags(word, names)[0] == meant
    with pytest.raises(UserError, match=rf"unknown flag {word} of patchline x; did you mean {meant}"):
        values_of([word, "1"], TRAINING, command=("x", ""))


@pytest.mark.parametrize(
    ("word", "meant"), [("--output", "--out"), ("--data-dir", "--source.root"), ("--num-workers", "--workers")]
)
def test_the_same_word_means_another_flag_in_packing(word: str, meant: str) -> None:
    assert similar_flags(word, [flag.name for flag in PACKING])[0] == meant


def test_options_of_sbatch_are_settings_of_the_cluster() -> None:
    """What is proposed can be written there, and what submit is said to set cannot."""
    names = {field.name for field in fields(ClusterConfig)}
    for option, setting in _SBATCH.items():
        key, _, value = setting.partition(":")
        if value:
            ClusterConfig(options=(value.strip(" []").replace("...", "1"),))
        elif setting:
            assert key in names
        elif len(option) > 1:
            with pytest.raises(UserError, match="which patchline sets itself"):
                ClusterConfig(options=(f"--{option}=1",))


def test_a_folder_behind_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a folder, which --source\.root takes\. See patchline pack folder --help"):
        values_of([str(tmp_path)], PACKING, command=("pack", "folder"))
    with pytest.raises(UserError, match=r"a value follows its flag, as in --flag VALUE\. See patchline pack"):
        values_of(["word"], PACKING, command=("pack", "folder"))


def test_what_is_missing_is_named_all_at_once() -> None:
    with pytest.raises(UserError):
        refuse_missing(PACKING, STAGES["pack"].required)
    manifest = [flag.name for flag in required_flags(list(flags_of(pack.manifest())), STAGES["pack"].required)]
    assert manifest == ["--source.files", "--out"]  # --source.root, which it has, too, need not be given


@pytest.mark.parametrize("name", finetune.RECIPES)
def test_every_recipe_of_fine_tuning_asks_for_weights(name: str) -> None:
    with pytest.raises(UserError, match=r"--initial\.weights is missing: "):
        refuse_missing(list(flags_of(finetune.RECIPES[name]())), STAGES["finetune"].required)


def test_a_mix_of_datasets_stands_for_one() -> None:
    job = TrainingJob(run_dir="x", data=DataConfig(mix=(("a", 1.0),)))
    refuse_missing(list(flags_of(job)), STAGES["pretrain"].required)


def test_stages_and_recipes_that_may_be_meant() -> None:
    assert "unknown stage 'evalute'; did you mean evaluate? allowed:" in str(unknown_stage("evalute", list(STAGES)))
    assert "did you mean pretrain?" in str(unknown_stage("train", list(STAGES)))
    assert "did you mean" not in str(unknown_stage("xyzzy", list(STAGES)))
    recipes = list(recipes_of("pretrain"))
    assert "did you mean vit_b16_jft" in str(unknown_recipe("vit_b16", "pretrain", recipes))
    assert "did you mean vit_h14_jft or" in str(unknown_recipe("h14", "pretrain", recipes))
    assert "allowed: what 'patchline pretrain' lists" in str(unknown_recipe("xyzzy", "pretrain", recipes))
    assert "allowed: folder, flat, a YAML file" in str(unknown_recipe("x", "pack", ["folder", "flat"]))


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ("pack", "it is a folder, which --source.root takes; allowed:"),
        ("pretrain", "it is a folder, which --data.url takes; allowed:"),
        ("finetune", "it is a folder, which --data.url takes; allowed:"),
        ("plan", "; allowed:"),
    ],
)
def test_a_folder_in_the_place_of_a_recipe(tmp_path: Path, stage: str, says: str) -> None:
    recipes = list(recipes_of(stage))
    assert f"unknown recipe '{tmp_path}' of patchline {stage}; {says.removeprefix('; ')}" in str(
        unknown_recipe(str(tmp_path), stage, recipes)
    )


def test_all_that_is_ever_suggested_is_there() -> None:
    """A table of words is of no use once a flag has another name."""
    words = [(stage, next(iter(recipes_of(stage))) if STAGES[stage].recipes else "") for stage in STAGES]
    there = {flag.name for stage, word in words for flag in flags_of(default_job(stage, word))}
    there |= {flag.name for recipe in recipes_of("pack").values() for flag in flags_of(recipe())}
    assert {flag for flags in _SYNONYMS.values() for flag in flags} - there == set()
    later = {"predict", "show"}
    assert set(_STAGES.values()) - set(STAGES) <= later
    for entry in STAGES.values():
        required = {name for names in entry.required for name in ((names,) if isinstance(names, str) else names)}
        assert {*required, *entry.usual} <= there


@pytest.mark.parametrize(
    "url", ["https://h/x?X-Amz-Signature=of-mine", "s3://me:of-mine@bucket/x", "s3://b/x?sig=of-mine"]
)
def test_a_url_with_a_secret_is_refused_before_a_record_has_it(tmp_path: Path, url: str) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "own.yaml"
    file.write_text(f"recipe: digits_smoke\nrun_dir: {run_dir}\ndata: {{url: '{url}'}}\n")
    for words in (["digits_smoke", f"--data.url={url}", f"--run-dir={run_dir}"], [str(file)]):
        ended = patchline("pretrain", *words)
        expected = "--data.url is '", "with a password or a signature"
        assert (ended.code, [word in ended.errors for word in expected]) == (2, [True, True]), ended.errors
        assert "of-mine" not in ended.errors
        assert not run_dir.exists()


@pytest.mark.parametrize("command", ["evaluate", "verify", "status", "cancel", "logs", "doctor", "predict", "report"])
def test_no_message_repeats_a_signature(command: str) -> None:
    ended = patchline(command, "https://host/x?X-Amz-Signature=of-mine", environ={"PATH": "/nowhere"})
    assert (ended.code, "of-mine" in ended.errors + ended.output) == (2, False), ended.errors
