"""All ranks compute on the same kind of device, and on GPUs of their own: agreed upon over the store at which they
meet, before there is a process group, whose backend depends on it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated

from torch.distributed import Store  # type: ignore[attr-defined]  # its stub does not export it

from shards.errors import UserError
from shards.files.typed_json import read_record
from shards.schema.config_values import Range

_VERDICT, _READ = "device/verdict", "device/read"
_FAREWELL = timedelta(seconds=10)
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A rank's device: its kind (`cpu`, `cuda`), why it was chosen, and the GPU's own id, empty if it has none."""

    rank: Annotated[int, Range(0)]
    host: str
    kind: str
    reason: str
    gpu: str = ""


def agree_on_device(store: Store, claim: Claim, *, num_ranks: int) -> None:
    """Returns on every rank, or raises the same UserError on every rank."""
    store.set(_key(claim.rank), json.dumps(asdict(claim)))
    if claim.rank == 0:
        claims = [read_record(Claim, store.get(_key(rank))) for rank in range(num_ranks)]
        store.set(_VERDICT, disagreement(claims))
    verdict = store.get(_VERDICT).decode()
    if not verdict:
        return
    if store.add(_READ, 1) == num_ranks:
        store.set(f"{_READ}/all", "1")
    if claim.rank == 0:  # it may serve the store, which the others still read
        _wait(store, f"{_READ}/all")
    raise UserError(verdict)


def disagreement(claims: Sequence[Claim]) -> str:
    """What is wrong with the devices of all ranks, in rank order; empty if nothing is. Pure."""
    kinds = sorted({claim.kind for claim in claims})
    if len(kinds) > 1:
        odd = [claim for claim in claims if claim.kind == "cpu"]
        named = "; ".join(f"rank {one.rank} on host {one.host} ({one.reason})" for one in odd[:_MOST_NAMED])
        more = f"; {len(odd) - _MOST_NAMED} more" if len(odd) > _MOST_NAMED else ""
        return (
            f"{len(odd)} of {len(claims)} ranks would compute on the CPU, the others on GPUs: {named}{more}; repair "
            "the GPU driver there or leave the host out, or give --device cpu to all ranks"
        )
    owners: dict[str, Claim] = {}
    for claim in claims:
        if claim.gpu and claim.gpu in owners:
            return (
                f"ranks {owners[claim.gpu].rank} and {claim.rank} on host {claim.host} have the same GPU, {claim.gpu}; "
                "start one rank per GPU, or give every task a GPU of its own (srun --gpus-per-task=1)"
            )
        owners[claim.gpu] = claim
    return ""


def _wait(store: Store, key: str) -> None:
    try:
        store.wait([key], _FAREWELL)
    except RuntimeError:  # a rank has ended without reading it
        return


def _key(rank: int) -> str:
    return f"device/{rank}"
