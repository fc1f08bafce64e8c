"""If the job leaves it open, a model has as many classes as its data. Surplus classes give a warning, missing ones
an error."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.data import pack
from jobs.recipes.pretrain import digits_smoke
from pipeline.data.training_data import open_training_data
from pipeline.models import build_model
from pipeline.models.loss import balanced_weights
from pipeline.models.weights.folder import save_weights
from pipeline.training.prepare import refuse_other_head, unused_classes, with_classes
from pipeline.training.settings.job import InitialConfig
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.sources.folders import FolderSource
from tests.rigs.images import image_bytes


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


def test_one_class_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        (tmp_path / "images/IMG").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"images/IMG/{number}.png").write_bytes(image_bytes(number))
    pack.run(pack.PackJob(source=FolderSource(root=str(tmp_path / "images")), out=str(tmp_path / "data")))
    recipe = digits_smoke()
    data = open_training_data(replace(recipe.data, url=str(tmp_path / "data")))
    caplog.clear()
    with_classes(recipe, data, [], say=True)
    assert caplog.messages == [
        f"{tmp_path}/data has only one class, 'IMG': there is nothing to tell it from, so a model learns nothing"
    ]


def test_uneven_classes_are_said_and_weighted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, numbers in (("cat", range(10)), ("lynx", range(10, 12))):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in numbers:
            (tmp_path / f"images/{name}/{number}.png").write_bytes(image_bytes(number))
    pack.run(pack.PackJob(source=FolderSource(root=str(tmp_path / "images")), out=str(tmp_path / "data")))
    recipe = digits_smoke()
    data = open_training_data(replace(recipe.data, url=str(tmp_path / "data")))
    assert balanced_weights(data.class_shares, 2).tolist() == pytest.approx([12 / (2 * 10), 12 / (2 * 2)])
    with caplog.at_level(logging.INFO):
        caplog.clear()
        with_classes(replace(recipe, class_weights="balanced"), data, [], say=True)
        with_classes(recipe, data, [], say=False)
        assert not caplog.messages
        with_classes(recipe, data, [], say=True)
    assert caplog.messages == [
        "the classes are uneven: 'cat' has 5 times the images of 'lynx'; --class-weights balanced weights them so that "
        "each class counts as much as any other"
    ]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        pytest.param(tuple("0123456789"), "", id="the same"),
        pytest.param(tuple(f"unnamed {number}" for number in range(10)), "", id="a head without names"),
        pytest.param(
            tuple("012345678x"), r"calls class 9 'x', .* '9' \(1 differ\); give --initial\.new-head", id="others"
        ),
        pytest.param(tuple("0123"), r"has 4 classes, the model 10; give --initial\.new-head", id="fewer"),
    ],
)
def test_a_head_that_is_kept_is_of_the_datas_classes(
    digits_url: str, tmp_path: Path, labels: tuple[str, ...], message: str
) -> None:
    recipe = digits_smoke()
    model = replace(recipe.model, num_classes=len(labels))
    state = build_model(model).state_dict()
    save_weights(tmp_path, config=model, labels=labels, tensor=lambda name: state[name])
    job = replace(recipe, data=replace(recipe.data, url=digits_url), model=replace(recipe.model, num_classes=10))
    data = open_training_data(job.data)
    refuse_other_head(replace(job, initial=InitialConfig(weights=str(tmp_path))), data)
    kept = replace(job, initial=InitialConfig(weights=str(tmp_path), new_head=False))
    with pytest.raises(UserError, match=message) if message else nullcontext():
        refuse_other_head(kept, data)


def test_a_single_unused_output_is_counted_as_one() -> None:
    assert ": 1 of its outputs never has an image;" in unused_classes(9, 10)
