"""Rearranging the code must not change results: batches and losses of short runs."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.baseline.record import (
    BATCHES,
    LOSSES,
    RUNS,
    batches_of,
    cpu,
    inside,
    losses_of,
    pack_digits,
    trained,
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder with the digits, which is the current folder during these tests."""
    with inside(tmp_path_factory.mktemp("baseline")):
        pack_digits()
        yield


def test_batches_are_what_they_were() -> None:
    assert batches_of("digits") == json.loads(BATCHES.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_what_they_were(name: str) -> None:
    recorded = json.loads(LOSSES.read_text())
    assert losses_of(trained(name)) == same_as(recorded["losses"][name], recorded["cpu"])


def same_as(losses: list[float], recorded_on: str) -> Any:
    """Bit-identical on the CPU that recorded the values; other CPUs round differently."""
    return losses if recorded_on == cpu() else pytest.approx(losses, rel=1e-4)
