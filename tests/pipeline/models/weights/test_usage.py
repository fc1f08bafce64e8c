"""Class names from the files of other libraries are made unique."""

import logging

import pytest

from pipeline.models.weights.usage import completed_labels, texts_of, unique_labels


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        pytest.param(("a", "b"), ("a", "b"), id="as they are"),
        pytest.param(("crane", "b", "crane"), ("crane", "b", "crane (2)"), id="a bird and a machine"),
        pytest.param(("a", "a (2)", "a"), ("a", "a (2)", "a (2) (2)"), id="the new name is taken"),
    ],
)
def test_a_name_that_comes_again_has_its_id(
    labels: tuple[str, ...], expected: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert unique_labels(labels, where="w") == expected
    assert len(set(expected)) == len(expected)
    assert (expected[-1] in caplog.text) == (labels != expected)


@pytest.mark.parametrize(
    ("labels", "num_classes", "expected"),
    [
        pytest.param(("a", "b"), 2, ("a", "b"), id="as they are"),
        pytest.param(("a", "b"), 4, ("a", "b", "unnamed 2", "unnamed 3"), id="a model of more classes than its data"),
        pytest.param((), 2, ("unnamed 0", "unnamed 1"), id="none"),
        pytest.param(("a", "b", "c"), 2, ("a", "b"), id="names of other classes"),
        pytest.param(("a", "a"), 3, ("a", "a (1)", "unnamed 2"), id="a name twice"),
    ],
)
def test_every_class_has_a_name(labels: tuple[str, ...], num_classes: int, expected: tuple[str, ...]) -> None:
    assert completed_labels(labels, num_classes=num_classes, where="w") == expected


def test_names_are_texts_or_whole_numbers() -> None:
    assert texts_of(["cat", 3], where="w") == ("cat", "3")
