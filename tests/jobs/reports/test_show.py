"""`patchline show` prints the job with every field, which the stage reads back as the same job."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.recipes import finetune, pretrain
from jobs.resolve import default_job
from tests.rigs.processes import patchline

LIGHT = """
import sys
from jobs.reports.{module} import run
sys.argv = []
assert run({words!r}{more}) in (0, 1)
heavy = {{"torch", "deepspeed", "pyarrow", "cv2"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("words", [("digits_smoke",), ("pretrain", "digits_smoke")])
def test_what_is_shown_is_read_back(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = patchline("show", *words, "--schedule.learning-rate", "1e-4", "--data.url", "s3://b/x")
    assert (ended.code, ended.errors) == (0, "")
    (tmp_path / "shown.yaml").write_text(ended.output)
    recipe = pretrain.digits_smoke()
    schedule, data = replace(recipe.schedule, learning_rate=1e-4), replace(recipe.data, url="s3://b/x")
    assert default_job("pretrain", str(tmp_path / "shown.yaml")) == replace(recipe, schedule=schedule, data=data)
    assert max(map(len, ended.output.splitlines())) <= 80


def test_a_file_is_shown_with_all_that_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("recipe: digits_48\nsteps: 70\n")
    ended = patchline("show", str(tmp_path / "my.yaml"))
    assert ended.code == 0, ended.errors
    (tmp_path / "shown.yaml").write_text(ended.output)
    recipe = finetune.digits_48()
    schedule = replace(recipe.schedule, warmup_steps=7)  # 70 of the recipe's 100 steps, 7 of its 10 warm-up steps
    assert default_job("finetune", str(tmp_path / "shown.yaml")) == replace(recipe, steps=70, schedule=schedule)


def test_a_stage_without_recipes_is_named() -> None:
    ended = patchline("show", "verify", "s3://bucket/data", "--deep")
    assert ended.output == "stage: verify\njob:\n  url: s3://bucket/data\n  deep: true\n  workers: 1\n  run_dir: ''\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ("cifar10",),
            "'cifar10' fits the stages pack and finetune; run: patchline show pack cifar10, "
            "or: patchline show finetune cifar10",
            id="a recipe of two stages",
        ),
        pytest.param((), "usage: patchline show [STAGE] RECIPE", id="no word"),
        pytest.param(("pretrain",), "usage: patchline show [STAGE] RECIPE", id="a stage alone"),
        pytest.param(("digit",), "'digit' is neither a recipe of any stage nor", id="unknown"),
        pytest.param(("pretrain", "digits_48"), "a recipe of patchline finetune, not of pretrain", id="another stage"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    ended = patchline("show", *words)
    assert (ended.code, ended.output) == (2, "")
    assert message in ended.errors


@pytest.mark.parametrize(
    ("module", "words", "more"),
    [
        ("show", ["pretrain", "digits_smoke"], ", override=lambda job, flags, command: job"),
        ("diff", ["pretrain", "digits_smoke", "cifar10_small"], ""),
    ],
)
def test_nothing_heavy_is_loaded(module: str, words: list[str], more: str) -> None:
    program = LIGHT.format(module=module, words=words, more=more)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
