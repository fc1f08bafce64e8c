"""Values of the environment that are refused, each with one message; test_world.py has those that are fine."""

import pytest

from pipeline.ranks.environment import numbers_from, place_from
from shards.errors import UserError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
SRUN |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
NO_NUMBERS = ("²", "x", "-1", "1.0", " 1", "0x1", "9" * 5000)
ALLOWED = [
    pytest.param(TORCHRUN, "WORLD_SIZE", "0", "from 1 to 1048576", id="no ranks"),
    pytest.param(TORCHRUN, "WORLD_SIZE", "1048577", "from 1 to 1048576", id="more ranks than there are machines"),
    pytest.param(TORCHRUN, "RANK", "2", "from 0 to 1", id="a rank too many"),
    pytest.param(TORCHRUN, "LOCAL_RANK", "2", "from 0 to 1", id="a local rank too many"),
    pytest.param(TORCHRUN, "LOCAL_WORLD_SIZE", "3", "from 1 to 2", id="more local ranks than ranks"),
    pytest.param(TORCHRUN, "MASTER_PORT", "99999", "from 1 to 65535", id="no port"),
    pytest.param(SRUN, "SLURM_STEP_NUM_TASKS", "0", "from 1 to 1048576", id="no tasks"),
    pytest.param(SRUN, "SLURM_PROCID", "2", "from 0 to 1", id="a task too many"),
    pytest.param(SRUN, "SLURM_LOCALID", "2", "from 0 to 1", id="a local task too many"),
    pytest.param(SRUN, "SLURM_NODEID", "9999999", "from 0 to 1048576", id="no such node"),
]


@pytest.mark.parametrize(("environ", "name", "value", "allowed"), ALLOWED)
def test_a_number_out_of_range_is_refused(environ: dict[str, str], name: str, value: str, allowed: str) -> None:
    with pytest.raises(
        UserError, match=f"^the environment variable {name} is '{value}'; allowed: a whole number {allowed};"
    ):
        place_from(environ | {name: value})


@pytest.mark.parametrize(("environ", "name"), [row.values[:2] for row in ALLOWED])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: value[:10])
def test_what_is_no_number_is_refused_in_one_short_line(environ: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"^the environment variable {name} is '") as refused:
        place_from(environ | {name: value})
    assert len(str(refused.value)) < 450
    assert "\n" not in str(refused.value)


def test_one_rank_needs_neither_an_address_nor_a_port() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "http://x", "MASTER_PORT": "99999"}
    place = place_from(alone)
    assert (place.num_ranks, place.master_address, place.master_port) == (1, "127.0.0.1", 0)


@pytest.mark.parametrize("value", ["4", "x"])
def test_ranks_that_do_not_know_which_they_are_are_refused(value: str) -> None:
    """Each would train alone, and all in one run directory."""
    with pytest.raises(UserError):
        place_from({"WORLD_SIZE": value})
    assert place_from({"WORLD_SIZE": "1"}).num_ranks == 1
    assert place_from(SRUN | {"WORLD_SIZE": value}) == place_from(SRUN)


def test_empty_variables_are_as_good_as_unset() -> None:
    """With RANK empty, each of two processes took itself for rank 0."""
    with pytest.raises(UserError):
        numbers_from({"RANK": "", "WORLD_SIZE": "2"})
    srun = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    assert numbers_from({"RANK": "", "WORLD_SIZE": "", **srun}) == numbers_from(srun)
