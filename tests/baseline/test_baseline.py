"""Rearranging the code must not change results: batches, losses of short runs, and resuming a run of an older
version."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.baseline.record import (
    BATCHES,
    LOSSES,
    OLD,
    OLD_LOSSES,
    OLD_RUN,
    OLD_STEPS,
    RUNS,
    batches_of,
    cpu,
    folder_of,
    inside,
    losses_of,
    pack_digits,
    trained,
)
from tests.rigs.training import resumed_steps


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder with the digits, which is the current folder during these tests."""
    with inside(tmp_path_factory.mktemp("baseline")):
        pack_digits()
        yield


def test_batches_are_what_they_were() -> None:
    assert batches_of("digits") == json.loads(BATCHES.read_text())


@pytest.mark.parametrize("name", [name for name in RUNS if name != OLD])
def test_losses_are_what_they_were(name: str) -> None:
    recorded = json.loads(LOSSES.read_text())
    assert losses_of(trained(name)) == same_as(recorded["losses"][name], recorded["cpu"])


def test_a_run_of_an_older_version_continues() -> None:
    """It was stopped after half of its steps. Its manifest has the first format, its job the old field names.

    Decoder 4 changed the pixels of transparent images, so the user has to accept it. The digits have none.
    """
    shutil.copytree(OLD_RUN, folder_of(OLD))
    run_dir = trained(OLD, "--data.allow-other-decoder", steps=2 * OLD_STEPS)
    assert resumed_steps(run_dir) == [0, OLD_STEPS]
    recorded = json.loads(OLD_LOSSES.read_text())
    assert losses_of(run_dir) == same_as(recorded["losses"], recorded["cpu"])


def same_as(losses: list[float], recorded_on: str) -> Any:
    """Bit-identical on the CPU that recorded the values; other CPUs round differently."""
    return losses if recorded_on == cpu() else pytest.approx(losses, rel=1e-4)
