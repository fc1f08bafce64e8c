"""If the job leaves it open, a model has as many classes as its data. Surplus classes give a warning, missing ones
an error."""

import logging
from dataclasses import replace

import pytest

from jobs.recipes.pretrain import digits_smoke
from pipeline.data.training_data import open_training_data
from pipeline.training.classes import unused_classes, with_classes
from shards.dataset import open_dataset
from shards.errors import UserError


@pytest.mark.parametrize(
    ("asked", "expected", "said"),
    [
        pytest.param(0, 10, [], id="left open"),
        pytest.param(10, 10, [], id="the same"),
        pytest.param(
            1000,
            1000,
            [
                "the data has 10 classes, the model 1000: 990 of its outputs never have an image; "
                "--model.num-classes 0 takes the data's"
            ],
            id="more than the data has",
        ),
    ],
)
def test_classes(digits_url: str, caplog: pytest.LogCaptureFixture, asked: int, expected: int, said: list[str]) -> None:
    recipe = digits_smoke()
    job = replace(recipe, data=replace(recipe.data, url=digits_url), model=replace(recipe.model, num_classes=asked))
    data, held_out = open_training_data(job.data), open_dataset(digits_url)
    with caplog.at_level(logging.WARNING):
        found = with_classes(job, data, [held_out], say=True)
        assert with_classes(job, data, [held_out], say=False) == found, "other ranks say nothing"
    assert found == replace(job, model=replace(job.model, num_classes=expected))
    assert [record.getMessage() for record in caplog.records] == said


def test_fewer_than_the_data_has_are_refused(digits_url: str) -> None:
    recipe = digits_smoke()
    job = replace(recipe, data=replace(recipe.data, url=digits_url), model=replace(recipe.model, num_classes=9))
    with pytest.raises(UserError, match=r"has 10 classes, the model has 9; set --model\.num-classes 10"):
        with_classes(job, open_training_data(job.data), [], say=True)


def test_a_single_unused_output_is_counted_as_one() -> None:
    assert ": 1 of its outputs never has an image;" in unused_classes(9, 10)
