"""Which device a rank takes, from tables over a mocked torch.cuda, and how all ranks agree over a real store."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub does not export it

from pipeline.ranks import world as world_module
from pipeline.ranks.devices import Claim, Gpus, agree_on_device, choose_device, disagreement, gpus_from
from pipeline.ranks.host import free_port
from pipeline.ranks.world import bf16_of, current_world, enter, leave, world_from
from shards.errors import TransientError, UserError
from tests.rigs.processes import one_world

FILE = ("/dev/nvidia0",)
BUILD = "12.8"
WAIT = timedelta(seconds=60)


def srun(local_rank: int, num_local: int = 8) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(local_rank),
        "SLURM_STEP_NUM_TASKS": str(num_local),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_STEP_TASKS_PER_NODE": str(num_local),
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29400",
    }


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch.cuda that has `num` GPUs, on a machine whose /dev has `files`."""

    def mocked(num: int, files: tuple[str, ...] = (), build: str | None = BUILD) -> list[str]:
        calls: list[str] = []

        def noting(name: str, value: Any) -> Any:
            def call(*arguments: Any) -> Any:
                calls.append(" ".join([name, *map(str, arguments)]))
                return value

            return call

        for name, value in {
            "is_available": num > 0,
            "device_count": num,
            "set_device": None,
            "get_device_name": "NVIDIA H100",
            "get_device_capability": (9, 0),
        }.items():
            monkeypatch.setattr(torch.cuda, name, noting(name, value))
        monkeypatch.setattr(torch.version, "cuda", build)
        folder = SimpleNamespace(glob=lambda _: files)
        monkeypatch.setattr(world_module, "_GPU_FILES", (folder, "nvidia[0-9]*"))
        return calls

    return mocked


@pytest.mark.parametrize(
    ("wish", "num", "environ", "files", "expected"),
    [
        pytest.param("auto", 0, {}, (), "cpu", id="a machine without GPUs"),
        pytest.param("auto", 0, {"CUDA_VISIBLE_DEVICES": ""}, FILE, "cpu", id="GPUs hidden on purpose"),
        pytest.param("auto", 0, {"CUDA_VISIBLE_DEVICES": "-1"}, FILE, "cpu", id="hidden in another way"),
        pytest.param(
            "auto", 0, {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_JOB_GPUS": "0"}, FILE, "cpu", id="hidden by Slurm"
        ),
        pytest.param("auto", 0, {"SLURM_GPUS_ON_NODE": "0"}, (), "cpu", id="a Slurm job without GPUs"),
        pytest.param("cpu", 8, {}, FILE, "cpu", id="the CPU of a GPU machine"),
        pytest.param("cpu", 0, {}, FILE, "cpu", id="the CPU of a machine whose driver is broken"),
        pytest.param("auto", 8, {}, FILE, "cuda:0", id="alone with 8 GPUs"),
        pytest.param("auto", 8, srun(5), FILE, "cuda:5", id="one rank per GPU"),
        pytest.param("cuda", 8, {**srun(7), "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, FILE, "cuda:7", id="all named"),
        pytest.param("auto", 1, {**srun(5), "CUDA_VISIBLE_DEVICES": "5"}, FILE, "cuda:0", id="--gpus-per-task=1"),
        pytest.param(
            "auto", 1, {**srun(5), "CUDA_VISIBLE_DEVICES": "0"}, FILE, "cuda:0", id="--gpus-per-task=1 with cgroups"
        ),
        pytest.param(
            "cuda", 1, {**srun(5), "CUDA_VISIBLE_DEVICES": "GPU-5ebe9f43"}, FILE, "cuda:0", id="a GPU by its id"
        ),
        pytest.param("cuda:1", 2, {}, FILE, "cuda:1", id="one GPU of two"),
    ],
)
def test_devices(
    cuda: Any, wish: Any, num: int, environ: dict[str, str], files: tuple[str, ...], expected: str
) -> None:
    cuda(num, files)
    world = world_from(environ, device=wish, num_cpus=8)
    assert str(world.device) == expected
    assert world.device_reason


@pytest.mark.parametrize(
    ("wish", "num", "environ", "files", "build", "message"),
    [
        pytest.param(
            "auto",
            0,
            {},
            FILE,
            BUILD,
            r"torch sees no GPU, although /dev/nvidia0 is there: torch.cuda.is_available\(\) is False with CUDA 12.8, "
            r"so its driver does not work or is too old; repair that or leave this host out, or give --device cpu",
            id="a broken driver",
        ),
        pytest.param(
            "auto",
            0,
            {},
            FILE,
            None,
            "although /dev/nvidia0 is there: this torch is built without CUDA",
            id="a CPU build",
        ),
        pytest.param(
            "auto",
            0,
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            (),
            BUILD,
            "although CUDA_VISIBLE_DEVICES is '0,1': ",
            id="named",
        ),
        pytest.param(
            "auto",
            0,
            {**srun(0), "SLURM_GPUS_ON_NODE": "8"},
            (),
            BUILD,
            "although SLURM_GPUS_ON_NODE is '8': ",
            id="given by Slurm",
        ),
        pytest.param(
            "cuda:0",
            0,
            {},
            (),
            None,
            "--device is cuda:0, and torch sees no GPU on this machine: this torch is built without CUDA; repair that, "
            "or give --device cpu",
            id="asked for",
        ),
        pytest.param("cuda:7", 2, {}, FILE, BUILD, "--device is cuda:7; allowed: cuda:0 to cuda:1", id="too high"),
        pytest.param(
            "cuda:0", 8, srun(5), FILE, BUILD, "--device is cuda:0, which is one GPU for the 8 ranks", id="one for all"
        ),
        pytest.param(
            "auto", 4, srun(5), FILE, BUILD, r"local rank 5 has no GPU: this node has 4; start one rank", id="too few"
        ),
        pytest.param(
            "auto", 1, srun(5), FILE, BUILD, r"local rank 5 has no GPU: this node has 1; ", id="one GPU for 8 ranks"
        ),
        pytest.param(
            "auto",
            2,
            {**srun(5), "CUDA_VISIBLE_DEVICES": "0,1"},
            FILE,
            BUILD,
            r"local rank 5 has no GPU: this node has 2; ",
            id="two GPUs a task",
        ),
    ],
)
def test_ranks_without_a_gpu_are_refused(
    cuda: Any, wish: Any, num: int, environ: dict[str, str], files: tuple[str, ...], build: str | None, message: str
) -> None:
    cuda(num, files, build)
    with pytest.raises(UserError, match=message):
        world_from(environ, device=wish, num_cpus=8)


def test_nothing_is_asked_of_a_gpu_before_it_is_set(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before would take memory on the first GPU, from every rank."""
    calls = cuda(8, FILE)
    for name, value in srun(5).items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    bf16_of(current_world().device)
    assert calls[:3] == ["is_available", "device_count", "set_device cuda:5"]
    assert calls[3:] == ["get_device_name cuda:5", "get_device_capability cuda:5"]


def test_deepspeed_is_told_the_number_of_the_gpu(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes LOCAL_RANK for that: with --gpus-per-task=1 each task's GPU is the first."""
    cuda(1, FILE)
    monkeypatch.setenv("LOCAL_RANK", "5")
    enter(replace(one_world(), local_rank=5, device=torch.device("cuda", 0)))
    leave()
    assert os.environ["LOCAL_RANK"] == "0"


def test_the_cpu_asks_nothing_of_gpus(cuda: Any) -> None:
    calls = cuda(8, FILE)
    world_from({}, device="cpu", num_cpus=1)
    assert calls == []


def test_the_tables_functions_are_pure() -> None:
    gpus = gpus_from({"CUDA_VISIBLE_DEVICES": " 3 "}, FILE, num_visible=1, build="")
    assert gpus == Gpus(num_visible=1, names_one=True, announced="CUDA_VISIBLE_DEVICES is ' 3 '")
    assert choose_device("auto", 3, gpus).device == torch.device("cuda", 0)


def gpu(rank: int, *, host: str = "n1", number: str = "") -> Claim:
    return Claim(rank=rank, host=host, kind="cuda", reason="8 GPUs are visible", gpu=f"GPU-{number or rank}")


def cpu(rank: int, *, host: str = "n2") -> Claim:
    return Claim(rank=rank, host=host, kind="cpu", reason="torch sees no GPU there")


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        pytest.param([gpu(0), gpu(1)], "", id="GPUs"),
        pytest.param([cpu(0), cpu(1)], "", id="CPUs"),
        pytest.param([replace(gpu(0), gpu=""), replace(gpu(1), gpu="")], "", id="GPUs without ids"),
        pytest.param(
            [gpu(0), cpu(1), gpu(2)],
            "1 of 3 ranks would compute on the CPU, the others on GPUs: rank 1 on host n2 (torch sees no GPU there); "
            "repair the GPU driver there or leave the host out, or give --device cpu to all ranks",
            id="a broken driver",
        ),
        pytest.param(
            [gpu(0), *(cpu(rank) for rank in range(1, 9))], "8 of 9 ranks would compute on the CPU", id="a broken host"
        ),
        pytest.param(
            [gpu(0), gpu(1, number="0")],
            "ranks 0 and 1 on host n1 have the same GPU, GPU-0; start one rank per GPU, or give every task a GPU of "
            "its own (srun --gpus-per-task=1)",
            id="one GPU for two",
        ),
    ],
)
def test_disagreements(claims: list[Claim], expected: str) -> None:
    found = disagreement(claims)
    assert found.startswith(expected)
    assert bool(found) is bool(expected)


def what_they_say(claims: list[Claim], *, num_missing: int = 0, limit: timedelta = WAIT) -> list[str]:
    """`num_missing`: further ranks, which never arrive."""
    port, num_ranks = free_port(), len(claims) + num_missing
    stores = []  # kept until all have read: the first rank's is the server

    def as_rank(claim: Claim) -> str:
        is_first = claim.rank == 0
        store = TCPStore("127.0.0.1", port, num_ranks, is_master=is_first, timeout=WAIT, wait_for_workers=False)
        stores.append(store)
        try:
            agree_on_device(
                store,
                claim,
                num_ranks=num_ranks,
                limit=limit,
                hosts=lambda arrived: [arrived.get(rank, "n9") for rank in range(num_ranks)],
            )
        except UserError as error:
            return str(error)
        except TransientError as error:
            return f"later: {error}"
        return "agreed"

    with ThreadPoolExecutor(len(claims)) as pool:
        return list(pool.map(as_rank, claims))


def test_all_ranks_say_the_same() -> None:
    assert what_they_say([gpu(0), gpu(1), gpu(2)]) == ["agreed"] * 3
    said = what_they_say([gpu(0), cpu(1), gpu(2)])
    assert said[0].startswith("1 of 3 ranks would compute on the CPU")
    assert said == [said[0]] * 3


def test_all_ranks_name_one_that_does_not_arrive() -> None:
    said = what_they_say([gpu(0), cpu(1)], num_missing=2, limit=timedelta(seconds=0.5))
    assert said == [said[0]] * 2
    assert said[0].startswith("later: ranks 2, 3 of 4 have not arrived within 0 s: ranks 2, 3 on host n9; ")
