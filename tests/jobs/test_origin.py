"""Where a job is from, as a run puts it on record, and as `patchline ls` and the report show it."""

import json
from pathlib import Path

import pytest

from jobs.nearest_recipe import nearest
from jobs.origin import origin_of, shown_origin
from jobs.recipes.pretrain import digits_smoke
from jobs.record import read_leaves, write_record
from pipeline.runs.starts import NO_ORIGIN, Left, Origin, add_start
from tests.rigs.processes import patchline
from tests.rigs.training import pretrain_words


def make(run_dir: Path, *origins: Origin) -> Path:
    write_record(run_dir, stage="pretrain", job=digits_smoke())
    for origin in origins:
        seconds, topology = {"startup": 1.0, "total": 1.0}, (1, 1, "cpu")
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
