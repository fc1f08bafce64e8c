"""Saves run in the background if every host has room for it, and the log says so with numbers."""

import io
import logging
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest

from pipeline.checkpoints.config import CheckpointConfig
from pipeline.checkpoints.writer import copies
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.copies import Room, choose_writer
from pipeline.ranks.world import World
from shards.errors import UserError
from shards.store import open_store
from tests.rigs.processes import run_ranks


def chosen(
    world: World,
    folder: Path,
    available: tuple[int, int],
    asynchronous: Literal["auto", "on", "off"],
    training: int = 0,
) -> tuple[str, str, bool]:
    """(what was chosen or refused, the log, whether a writer is left) for 2 MB a rank, of two on one host."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("pipeline").addHandler(handler)
    logging.getLogger("pipeline").setLevel(logging.INFO)
    config, writer = CheckpointConfig(asynchronous=asynchronous), None if asynchronous == "off" else Writer()
    with mock.patch.object(copies, "available_bytes", return_value=available[world.rank]):
        try:
            found = choose_writer(
                config, writer, open_store(str(folder)), world, num_bytes=2_000_000, training_bytes=training
            )
            name = type(found).__name__
            found.close()
        except UserError as error:
            name = str(error)
    return name, said.getvalue(), bool(writer and writer.pid)


def test_with_room_on_every_host(tmp_path: Path) -> None:
    first, second = run_ranks(chosen, tmp_path, (9_000_000, 9_000_000), "auto", num_ranks=2)
    assert first == ("BackgroundWriter", "asynchronous checkpoints: 2.0 MB of host memory per rank\n", False)
    assert second == ("BackgroundWriter", "", False)


WHY = (
    "the ranks on the host of rank 1 need 4.0 MB for one copy of their state, but 4.1 MB of memory are available "
    "there, of which they may take 90%"
)


def test_without_room_on_one_host_no_rank_saves_in_the_background(tmp_path: Path) -> None:
    first, second = run_ranks(chosen, tmp_path, (9_000_000, 4_100_000), "auto", num_ranks=2)
    assert first == ("InlineWriter", f"checkpoints are written while training waits: {WHY}\n", False)
    assert second == ("InlineWriter", "", False)


def test_the_room_that_training_needs_is_not_given_away(tmp_path: Path) -> None:
    first, _ = run_ranks(chosen, tmp_path, (9_000_000, 9_000_000), "auto", 3_000_000, num_ranks=2)
    why = WHY.replace("rank 1", "rank 0").replace("4.1 MB", "9.0 MB").replace("state,", "state and 6.0 MB to train,")
    assert first == ("InlineWriter", f"checkpoints are written while training waits: {why}\n", False)


def test_a_job_that_requires_room_is_refused(tmp_path: Path) -> None:
    found = run_ranks(chosen, tmp_path, (9_000_000, 4_100_000), "on", num_ranks=2)
    todo = "give --checkpoint.asynchronous auto or off, or start fewer ranks per host"
    assert found == [(f'checkpoint.asynchronous is "on", but {WHY}; {todo}', "", False)] * 2


def test_off_starts_nothing(tmp_path: Path) -> None:
    assert run_ranks(chosen, tmp_path, (0,), "off", num_ranks=1) == [("InlineWriter", "", False)]


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (
            Room(rank=8, needed_bytes=14_400_000_000, available_bytes=15_000_000_000),
            "need 14.4 GB for one copy",
        ),
        (Room(rank=8, needed_bytes=1, available_bytes=9, fault="it could not be taken: full"), "but it could not be"),
    ],
)
def test_the_words_have_numbers(room: Room, words: str) -> None:
    assert not room.is_enough
    assert room.words().startswith("the ranks on the host of rank 8 need ")
    assert words in room.words()
