"""The World from a table of environments, and the environments that are refused."""

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from pipeline.ranks.world import World, choose_interface, current_world, fix_kernels, joined, rank_and_size, world_from
from shards.errors import TransientError
from tests.rigs.forks import forks
from tests.rigs.processes import one_world, run_ranks
from tests.rigs.s3 import free_port

MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MASTER}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none"}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
}
INSIDE_A_JOB = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environ", "expected"),  # (rank, ranks, local rank, local ranks, address, port, threads of 8 cores)
    [
        pytest.param({}, (0, 1, 0, 1, "127.0.0.1", 0, 8), id="alone"),
        pytest.param(TORCHRUN, (3, 4, 1, 2, "n1", 29500, 4), id="torchrun"),
        pytest.param(TORCHRUN | {"MASTER_PORT": "29400"}, (3, 4, 1, 2, "n1", 29400, 4), id="torchrun's port"),
        pytest.param(
            TORCHRUN | {"LOCAL_WORLD_SIZE": "4"},
            (3, 4, 1, 4, "127.0.0.1", 29500, 2),
            id="one host: loopback",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", **MASTER}, (1, 2, 1, 2, "n1", 29500, 4), id="on how many hosts is unknown"
        ),
        pytest.param(
            TORCHRUN | ELASTIC | {"OMP_NUM_THREADS": "1"}, (3, 4, 1, 2, "n1", 29500, 4), id="threads are not torchrun's"
        ),
        pytest.param(TORCHRUN | ELASTIC | {"OMP_NUM_THREADS": "3"}, (3, 4, 1, 2, "n1", 29500, 3), id="but the user's"),
        pytest.param(
            TORCHRUN | ELASTIC | {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            (3, 4, 0, 1, "n1", 29500, 1),
            id="torchrun sets none for one rank a node",
        ),
        pytest.param(TORCHRUN | {"OMP_NUM_THREADS": "1"}, (3, 4, 1, 2, "n1", 29500, 1), id="patchline's ranks"),
        pytest.param({"OMP_NUM_THREADS": "2"}, (0, 1, 0, 1, "127.0.0.1", 0, 2), id="the user's threads, alone"),
        pytest.param({"OMP_NUM_THREADS": "3, 2"}, (0, 1, 0, 1, "127.0.0.1", 0, 3), id="the first level's"),
        pytest.param({"OMP_NUM_THREADS": ""}, (0, 1, 0, 1, "127.0.0.1", 0, 8), id="set to nothing"),
        pytest.param(
            SRUN | {"SLURM_CPUS_PER_TASK": "3", "OMP_NUM_THREADS": "2"}, (1, 2, 0, 1, "n1", 29400, 2), id="under srun"
        ),
        pytest.param(SRUN, (1, 2, 0, 1, "n1", 29400, 8), id="srun: 1(x2) is one task on each of two nodes"),
        pytest.param(
            SRUN | {"SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"},
            (1, 11, 0, 4, "n1", 29400, 2),
            id="first of many",
        ),
        pytest.param(
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2"},
            (1, 2, 0, 2, "127.0.0.1", 29400, 4),
            id="srun, one node",
        ),
        pytest.param(SRUN | {"SLURM_CPUS_PER_TASK": "3"}, (1, 2, 0, 1, "n1", 29400, 3), id="srun gives 3 cores a task"),
        pytest.param(SRUN | TORCHRUN, (3, 4, 1, 2, "n1", 29500, 4), id="torchrun inside a Slurm job wins"),
        pytest.param({"RANK": "3"}, (0, 1, 0, 1, "127.0.0.1", 0, 8), id="half of torchrun's names: alone"),
        pytest.param(
            {f"OMPI_COMM_WORLD_{name}": str(n) for name, n in (("RANK", 5), ("SIZE", 8), ("LOCAL_RANK", 1))} | MASTER,
            (5, 8, 1, 8, "n1", 29500, 1),
            id="mpirun",
        ),
        pytest.param(INSIDE_A_JOB, (0, 1, 0, 1, "127.0.0.1", 0, 8), id="in a batch script, not under srun"),
        pytest.param(
            TORCHRUN | {"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "32"},
            (3, 64, 1, 32, "n1", 29500, 1),
            id="at least one thread",
        ),
    ],
)
def test_worlds(environ: Mapping[str, str], expected: tuple[int, int, int, int, str, int, int]) -> None:
    world = world_from(environ, device="cpu", num_cpus=8)
    found = (world.rank, world.num_ranks, world.local_rank, world.num_local_ranks)
    assert (*found, world.master_address, world.master_port, world.num_threads) == expected
    assert world.device == torch.device("cpu")
    assert world.is_first == (expected[0] == 0)


ONE_OF_TWO = {"RANK": "1", "WORLD_SIZE": "2"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
TASK = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "given", "expected"),
    [
        pytest.param({}, (None, None), (0, 1), id="alone"),
        pytest.param(INSIDE_A_JOB, (None, None), (0, 1), id="alone, in a batch script"),
        pytest.param(ONE_OF_TWO, (None, None), (1, 2), id="torchrun: an address to meet at is not needed"),
        pytest.param(TASK, (None, None), (3, 4), id="srun"),
        pytest.param(TASK | ONE_OF_TWO, (None, None), (1, 2), id="torchrun inside srun"),
        pytest.param(TASK | MPIRUN, (None, None), (5, 8), id="mpirun starts one task per node through srun"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "2"}, (None, None), (1, 2), id="MPICH's mpirun"),
        pytest.param(ONE_OF_TWO, (0, 1), (0, 1), id="arguments win"),
        pytest.param(ONE_OF_TWO, (2, 3), (2, 3), id="arguments win, beyond what the environment says"),
        pytest.param(ONE_OF_TWO | {"RANK": "x"}, (0, 3), (0, 3), id="with both, the environment is not read"),
        pytest.param(ONE_OF_TWO, (0, None), (0, 2), id="rank 0 of all"),
        pytest.param(ONE_OF_TWO, (None, 2), (1, 2), id="the number that is known anyway"),
        pytest.param(ONE_OF_TWO, (None, 1), (0, 1), id="only one rank can be meant"),
        pytest.param({}, (1, 2), (1, 2), id="a launcher of one's own"),
        pytest.param({"WORLD_SIZE": "1"}, (None, None), (0, 1), id="a world of one"),
    ],
)
def test_a_process_finds_its_number(
    environ: Mapping[str, str],
    given: tuple[int | None, int | None],
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {**environ})
    assert rank_and_size(*given) == expected


def test_auto_takes_a_gpu_only_where_there_is_one() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert world_from({}, device="auto", num_cpus=1).device.type == expected


def test_the_current_world_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert current_world("cpu") == world_from(os.environ, device="cpu", num_cpus=len(os.sched_getaffinity(0)))


def test_threads_that_are_asked_for_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert current_world("cpu").num_threads == 3
    assert current_world("cpu", threads=1).num_threads == 1


def what_enter_did(world: World) -> tuple[int, int, str, int]:
    """The environment as the libraries see it."""
    dist.barrier()  # a rank that leaves at once closes connections that others are still making
    return dist.get_rank(), dist.get_world_size(), os.environ["DS_ACCELERATOR"], torch.get_num_threads()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_enter_joins_the_group_with_the_worlds_threads(num_ranks: int) -> None:
    assert one_world().num_threads == 1
    assert run_ranks(what_enter_did, num_ranks=num_ranks) == [(rank, num_ranks, "cpu", 1) for rank in range(num_ranks)]


def what_a_rank_says(world: World) -> str:
    """Rank 1 ends without its part in the reduction."""
    try:
        with joined(world):
            if world.is_first:
                dist.all_reduce(torch.zeros(1))
    except TransientError as error:
        return str(error)
    return "done"


def test_a_rank_whose_peer_has_ended_says_so_without_a_traceback() -> None:
    port = free_port()
    with ProcessPoolExecutor(2, mp_context=forks()) as pool:
        said = list(pool.map(what_a_rank_says, [one_world(rank, 2, port=port) for rank in range(2)], timeout=60))
    assert said[1] == "done"
    assert said[0].startswith("the exchange with the other ranks failed (")
    assert said[0].endswith("); if one of them has ended, its own message says why")
    assert "\n" not in said[0]
    assert said[0].isascii()  # gloo's own message has its source file, advice and a picture
    assert "gloo" not in said[0]


def test_entering_leaves_no_rank_for_child_processes_to_believe() -> None:
    """A job submitted by a process that once entered a world must not conclude that torchrun started it."""
    program = (
        "import os\n"
        "from pipeline.ranks.world import current_world, enter, leave\n"
        "enter(current_world('cpu'))\n"
        "leave()\n"
        "assert not {'RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'} & set(os.environ)\n"
    )
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", program], env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("device", "environ", "expected"),
    [
        ("cuda", {}, "lo (NCCL_SOCKET_IFNAME: the one towards that address)"),
        ("cpu", {}, "lo (GLOO_SOCKET_IFNAME: the one towards that address)"),
        ("cuda", {"NCCL_SOCKET_IFNAME": "ib0"}, "ib0 (NCCL_SOCKET_IFNAME: set by the user)"),
    ],
)
def test_the_interface_is_the_one_towards_the_others_and_is_logged(
    device: str,
    environ: Mapping[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "environ", {**environ})
    caplog.set_level("INFO")
    world = replace(one_world(0, 2, port=1), master_address="127.0.0.2", device=torch.device(device, 0))
    choose_interface(world)
    (said,) = caplog.messages
    assert said == f"the ranks meet at 127.0.0.2, over the network interface {expected}"
    assert os.environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", **environ}
    choose_interface(replace(world, rank=1))
    choose_interface(replace(world, master_address="127.0.0.1"))
    assert len(caplog.messages) == 1, "once, and not if all ranks are on one host"


def test_kernels_are_fixed_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, whose kernels compute the same bits anyway, nothing is set."""
    asked: list[object] = []
    monkeypatch.setattr("pipeline.ranks.world.use_deterministic_kernels", asked.append)
    fix_kernels(one_world())
    assert asked == []
    fix_kernels(replace(one_world(), device=torch.device("cuda", 0)))
    assert asked == [os.environ]
