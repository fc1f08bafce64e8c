"""The job that a name means if no stage is given."""

from pathlib import Path

import pytest

from jobs.recipes.pretrain import digits_smoke
from jobs.record import write_record
from jobs.resolve import SHOWN, file_of, job_of, split_stage, stages_found
from shards.errors import UserError


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
