"""What the second word of a command stands for."""

from pathlib import Path

import pytest

from jobs import pretrain, verify
from jobs.recipes.pretrain import digits_smoke
from jobs.recipes.smoke import smoke
from jobs.record import write_record
from jobs.resolve import default_job
from shards.errors import UserError


def test_a_recipe_its_smoke_size_a_record_and_a_url(tmp_path: Path) -> None:
    assert default_job("pretrain", pretrain, "digits_smoke") == digits_smoke()
    assert default_job("pretrain", pretrain, "digits_smoke_smoke") == smoke(digits_smoke())
    write_record(tmp_path, stage="pretrain", job=digits_smoke())
    assert default_job("pretrain", pretrain, str(tmp_path / "job.yaml")) == digits_smoke()
    assert default_job("verify", verify, "s3://bucket/data") == verify.VerifyJob(url="s3://bucket/data")


def test_an_unknown_word_names_what_is_allowed() -> None:
    with pytest.raises(UserError, match=r"unknown recipe 'digit' of patchline pretrain; did you mean digits_smoke"):
        default_job("pretrain", pretrain, "digit")
