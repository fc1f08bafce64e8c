"""Where a job is from, as a run puts it on record, and as `patchline ls` and the report show it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.origin import Nearest, nearest, origin_of, shown_origin
from jobs.recipes.pretrain import digits_smoke
from jobs.record import Leaves, leaves_of, read_leaves, write_record
from jobs.resolve import recipe_job
from jobs.stages import WITH_SMOKE, recipes_of
from pipeline.models.config import ModelConfig
from pipeline.runs.starts import NO_ORIGIN, Left, Origin, add_start
from pipeline.training.settings.job import TeacherConfig
from tests.rigs.processes import patchline
from tests.rigs.training import pretrain_words


def make(run_dir: Path, *origins: Origin) -> Path:
    write_record(run_dir, stage="pretrain", job=digits_smoke())
    for origin in origins:
        seconds, topology = {"startup": 1.0, "paused": 0.0, "total": 1.0}, (1, 1, "cpu")
        add_start(
            run_dir, attempt="1", resumed_from=None, seconds=seconds, topology=topology, left=Left(), origin=origin
        )
    return run_dir


def test_words_and_what_they_stand_for(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("recipe: digits_smoke\nsteps: 9\n")
    whole = tmp_path / "whole.yaml"
    whole.write_text("stage: pretrain\nsteps: 9\n")
    run_dir = make(tmp_path / "run", Origin(recipe="digits_smoke", file="a.yaml"), NO_ORIGIN)
    old = make(tmp_path / "old")
    for word, origin, shown in (
        ("digits_smoke", Origin(recipe="digits_smoke"), "digits_smoke"),
        ("vit_h14_jft_smoke", Origin(recipe="vit_h14_jft_smoke"), "vit_h14_jft_smoke"),
        ("some/my_recipes.py:my_vit", Origin(recipe="some/my_recipes.py:my_vit"), "my_recipes.py:my_vit"),
        (str(mine), Origin(recipe="digits_smoke", file=str(mine)), "digits_smoke"),
        (str(whole), Origin(file=str(whole)), "whole.yaml"),
        (str(run_dir), Origin(recipe="digits_smoke", file="a.yaml"), "digits_smoke"),
        (str(run_dir / "job.yaml"), Origin(recipe="digits_smoke", file="a.yaml"), "digits_smoke"),
        (str(old / "job.yaml"), NO_ORIGIN, ""),
    ):
        assert (origin_of("pretrain", word), shown_origin(origin)) == (origin, shown), word


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        pytest.param(NO_ORIGIN, "digits_smoke", id="not recorded: the nearest"),
        pytest.param(Origin(recipe="vit_h14_jft"), "vit_h14_jft +", id="recorded, however far"),
        pytest.param(
            Origin(recipe="../../a_recipe_of_tomorrow"), "../../a_recipe_of_tomorrow", id="of a later version"
        ),
        pytest.param(Origin(recipe="a/b.py:c"), "b.py:c", id="Python, which is not executed"),
        pytest.param(Origin(file="a/b.yaml"), "b.yaml", id="a file without a recipe"),
    ],
)
def test_what_a_run_is_compared_with(tmp_path: Path, origin: Origin, words: str) -> None:
    found = nearest("pretrain", read_leaves(make(tmp_path / "run") / "job.yaml"), origin)
    assert found.words().startswith(words)
    assert found.is_recorded is (origin != NO_ORIGIN)


def test_a_recipe_of_your_own_is_named_and_never_executed_again(digits_url: str, tmp_path: Path) -> None:
    recipes, executed = tmp_path / "my_recipes.py", tmp_path / "executed"
    recipes.write_text(
        "from pathlib import Path\nfrom jobs.recipes.pretrain import digits_smoke\n"
        f"Path({str(executed)!r}).touch()\n\ndef my_vit():\n    return digits_smoke()\n"
    )
    words = pretrain_words(digits_url, tmp_path / "runs" / "mine", "--steps", "3")
    assert patchline(words[0], f"{recipes}:my_vit", *words[2:]).code == 0
    executed.unlink()
    listed = patchline("ls", str(tmp_path / "runs"), "--json")
    line = json.loads(listed.output)
    assert line["from_file"] == "my_recipes.py:my_vit"
    assert "my_recipes.py:my_vit" in patchline("ls", str(tmp_path / "runs")).output
    reported = patchline("report", str(tmp_path / "runs" / "mine"))
    assert "pretrain of my_recipes.py:my_vit, done" in reported.output, reported.errors
    page = (tmp_path / "runs" / "mine" / "report.html").read_text()
    assert f"Compared with {line['recipe']}" in page
    assert not executed.exists()


def record(job: Any) -> Leaves:
    return {f"job.{name}": text for name, text in leaves_of(job).items()}


@pytest.mark.parametrize("stage", WITH_SMOKE)
def test_every_recipe_is_found_again(stage: str) -> None:
    """Several may have the same fields."""
    for name in recipes_of(stage):
        for word in (name, f"{name}_smoke"):
            if word.count("_smoke") > 1:
                continue
            job = recipe_job(stage, word)
            moved = replace(job, run_dir="here", threads=3, data=replace(job.data, url="s3://a/b"))
            found = nearest(stage, record(moved))
            assert found.num_changed == 0
            assert leaves_of(recipe_job(stage, found.recipe)) == leaves_of(job)


def test_changes_are_counted() -> None:
    job = recipe_job("pretrain", "vit_b16_i21k")
    changed = replace(job, steps=7, seed=5, schedule=replace(job.schedule, warmup_steps=2))
    found = nearest("pretrain", record(changed))
    assert (found, found.words()) == (Nearest(recipe="vit_b16_i21k", num_changed=3), "vit_b16_i21k +3")
    assert nearest("pretrain", record(job)).words() == "vit_b16_i21k"
    taught = replace(job, loss="softmax", teacher=TeacherConfig(weights="w", sha256="a" * 64))
    assert nearest("pretrain", record(taught)).num_changed == 2, "the digest is the start's"


def test_a_record_of_another_kind_is_nobodys() -> None:
    leaves = {f"job.field_{number}": "x" for number in range(100)}
    assert nearest("pretrain", leaves).words() == "own"


def test_an_older_record_lacks_fields() -> None:
    leaves = record(recipe_job("pretrain", "digits_smoke"))
    older = {name: text for name, text in leaves.items() if not name.startswith(("job.guard", "job.hang"))}
    assert nearest("pretrain", older) == Nearest(recipe="digits_smoke", num_changed=0)


def test_the_model_counts() -> None:
    job = recipe_job("pretrain", "digits_smoke")
    assert isinstance(job.model, ModelConfig)
    wider = replace(job, model=replace(job.model, width=2 * (job.model.width or 1)))
    assert nearest("pretrain", record(wider)) == Nearest(recipe="digits_smoke", num_changed=1)
