"""Small exchanges between ranks: JSON in uint8 tensors (object collectives would unpickle), and small reductions."""

import json
from typing import Any

import torch
import torch.distributed as dist

from pipeline.ranks.streams import ReadBack, Streams, read_back


def gather_json(value: object, *, device: torch.device) -> list[Any]:
    """Returns every rank's value, in rank order, on every rank."""
    encoded = _encode(value, device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([encoded.numel()], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: encoded.numel()] = encoded
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [_decode(value[: int(size)]) for value, size in zip(gathered, sizes, strict=True)]


def broadcast_json(value: object, *, device: torch.device) -> Any:
    """Returns rank 0's value on every rank. The values of the other ranks are ignored."""
    encoded = _encode(value, device)
    size = torch.tensor([encoded.numel()], device=device)
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        encoded = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(encoded, src=0)
    return _decode(encoded)


def all_agree(mine: bool, *, device: torch.device) -> bool:
    """Returns True if `mine` is True on every rank."""
    verdict = torch.tensor([int(mine)], device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(int(verdict))


def barrier(*, device: torch.device) -> None:
    """Returns once every rank has called it."""
    all_agree(True, device=device)


def sums(values: list[float], *, device: torch.device) -> list[float]:
    """Returns the element-wise sum over ranks, in float64."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [float(x) for x in total.tolist()]


def launched_sums(values: list[float], *, device: torch.device, streams: Streams) -> ReadBack:
    """Launches the element-wise sum over ranks, in float64, and its copy to the host, and waits for neither.
    Collective."""
    total = streams.pinned(torch.tensor(values, dtype=torch.float64)).to(device, non_blocking=True)
    dist.all_reduce(total)
    return read_back(total, streams)


def summed(values: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    """Returns the element-wise sum over ranks, on the CPU."""
    total = values.to(device)
    dist.all_reduce(total)
    return total.cpu()


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns on every rank the rows of all ranks, in rank order; each rank passes [n, ...] with the same n."""
    rows = rows.contiguous()
    gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, rows)
    return torch.cat(gathered)


def gather_into(gathered: torch.Tensor, own: torch.Tensor) -> None:
    """Puts every rank's flat tensor into `gathered`, one after the other in rank order. The tensors have equal
    lengths."""
    dist.all_gather(list(torch.split(gathered, own.numel())), own)


def _encode(value: object, device: torch.device) -> torch.Tensor:
    data = bytearray(json.dumps(value).encode())
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _decode(encoded: torch.Tensor) -> Any:
    return json.loads(bytes(encoded.cpu().numpy()).decode())
