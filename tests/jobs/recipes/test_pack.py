"""The pack recipes: each returns a whole job and says how to run it."""

import inspect

import pytest

from jobs.pack import PackJob
from jobs.recipes.pack import CIFAR10_CLASSES, RECIPES
from shards.sources.kinds import ParquetSource


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_each_recipe_is_a_documented_job(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.__name__ == name
    assert isinstance(recipe(), PackJob)
    assert recipe() == recipe()
    assert f"patchline pack {name}" in inspect.getdoc(recipe)  # type: ignore[operator]


def test_cifar10_keeps_the_integers_of_its_files() -> None:
    source = RECIPES["cifar10"]().source
    assert isinstance(source, ParquetSource)
    assert source.known_labels() == CIFAR10_CLASSES
    assert len(CIFAR10_CLASSES) == 10
