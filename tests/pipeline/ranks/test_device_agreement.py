"""Ranks with different devices all get the same message, over a real store."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub does not export it

from pipeline.ranks.devices import Claim, agree_on_device, disagreement
from pipeline.ranks.free_port import free_port
from shards.errors import TransientError, UserError

WAIT = timedelta(seconds=60)


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
