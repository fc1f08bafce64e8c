"""The values of a record by path, as the whole reader would see them, and what is refused."""

from pathlib import Path

import pytest

from jobs.recipes.pretrain import RECIPES
from jobs.record import leaves_of, read_leaves, record_text
from shards.errors import InvalidDataError


@pytest.mark.parametrize("name", ["digits_smoke", "vit_h14_jft"])
def test_a_record_has_the_fields_of_its_job(tmp_path: Path, name: str) -> None:
    job = RECIPES[name]()
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
        pytest.param("a: &x 1\nb: *x\n", "an alias", id="an alias"),
        pytest.param("[" * 5000, "nested too deeply", id="deep"),
        pytest.param("{" * 5000, "nested too deeply", id="groups as names"),
        pytest.param("job:\n" + "- 1\n" * 5000, "more than 4,096 values", id="many"),
        pytest.param("\x00\x01", "it is not YAML", id="binary"),
        pytest.param("a" * (1 << 19), "larger than", id="large"),
    ],
)
def test_what_is_no_record(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(InvalidDataError, match=message):
        read_leaves(tmp_path / "job.yaml")
