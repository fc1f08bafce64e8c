"""`patchline show` prints the job with every field, which the stage reads back as the same job; `patchline diff` lists
the fields in which two jobs differ."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.recipes import finetune, pretrain
from jobs.record import write_record
from jobs.reports.show import table
from jobs.resolve import default_job
from tests.rigs.processes import patchline

LIGHT = """
import sys
from jobs.reports.show import run
sys.argv = []
assert run({words!r}, command={command!r}, override=lambda job, flags, command: job) in (0, 1)
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
    "words", [["show", "pretrain", "digits_smoke"], ["diff", "pretrain", "digits_smoke", "cifar10_small"]]
)
def test_nothing_heavy_is_loaded(words: list[str]) -> None:
    program = LIGHT.format(command=words[0], words=words[1:])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def my_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("recipe: digits_smoke\nschedule: {learning_rate: 3e-4}\nmodel: {name: vit_b16}\n")
    return "my.yaml"


def test_a_line_for_each_field_that_differs(my_yaml: str) -> None:
    ended = patchline("diff", "digits_smoke", my_yaml)
    assert (ended.code, ended.errors) == (1, "")
    assert ended.output == (
        "                        digits_smoke  my.yaml\n"
        "model.name              vit           vit_b16\n"
        "schedule.learning_rate  0.001         0.0003\n"
    )


def test_a_run_is_compared_with_its_recipe(tmp_path: Path) -> None:
    write_record(tmp_path / "run", stage="pretrain", job=pretrain.digits_smoke())
    ended = patchline("diff", str(tmp_path / "run"), "digits_smoke")
    assert (ended.code, ended.output) == (0, f"{tmp_path / 'run'} and digits_smoke do not differ\n")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        pytest.param(("digits_smoke", "digits_48"), 1, "digits_smoke digits_48", id="pre-training and fine-tuning"),
        pytest.param(("cifar10", "digits_48"), 1, "cifar10 digits_48", id="of two stages, the one that fits"),
        pytest.param(("cifar10", "pets"), 1, "cifar10 pets", id="the stage that both have"),
        pytest.param(("pack", "cifar10", "folder"), 1, "source.kind", id="a stage by name"),
        pytest.param(
            ("digits_smoke", "folder"), 2, "digits_smoke is of pretrain, folder is of pack", id="not comparable"
        ),
        pytest.param(("cifar10", "cifar10"), 2, "run: patchline diff pack cifar10 cifar10, or: ", id="several stages"),
        pytest.param(("digits_smoke",), 2, "usage: patchline diff [STAGE] A B", id="one word"),
        pytest.param(("digits_smoke", "digit"), 2, "'digit' is neither a recipe of any stage", id="unknown"),
    ],
)
def test_what_can_be_compared(words: tuple[str, ...], code: int, message: str) -> None:
    ended = patchline("diff", *words)
    assert ended.code == code, ended.errors
    assert message in " ".join((ended.output + ended.errors).split())


def test_a_long_value_does_not_move_the_others() -> None:
    assert table([("", "a.yaml", "b.yaml"), ("steps", "300", "400"), ("data.url", "s3://" + "x" * 80, "y")]) == (
        f"          a.yaml  b.yaml\nsteps     300     400\ndata.url  s3://{'x' * 80}  y\n"
    )
