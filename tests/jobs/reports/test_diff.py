"""`patchline diff` lists the fields in which two jobs differ."""

from pathlib import Path

import pytest

from jobs.recipes.pretrain import digits_smoke
from jobs.record import write_record
from jobs.reports.diff import table
from tests.rigs.processes import patchline


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
    write_record(tmp_path / "run", stage="pretrain", job=digits_smoke())
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
