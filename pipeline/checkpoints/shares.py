"""When a run resumes, its ranks together read every byte of a checkpoint once, a share each, and exchange their shares.

If the number of ranks or the ZeRO stage has changed, a rank needs many short pieces: under ZeRO-3, each of 512 ranks
holds 13 KB of each of a thousand tensors. To verify a piece, a rank must read the 1 MiB part that contains it, because
checksums are per part. If every rank read its pieces by itself, the ranks would read the checkpoint a hundred times
over. So each rank reads and verifies a share: consecutive whole parts of the files, about the same number for every
rank. If nothing has changed, its share is its own file. It also reads what it needs from other shares, if that is at
most 40 % of the checkpoint for all ranks together. Otherwise, the shares are gathered on all ranks, 64 MiB at a time,
and each rank copies what it needs. For ViT-H/14, each rank then receives 8 GB. An all-to-all would send less, but NCCL
keeps buffers for each pair of ranks that has ever exchanged anything: gigabytes of a GPU's memory at 512 ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.checkpoints.rank_file_in import (
    RANGE_BYTES,
    FilePieces,
    RankFiles,
    Targets,
    Wanted,
    pieces_of,
    plan_ranges,
)
from pipeline.checkpoints.rank_file_out import FileRecord, rank_of
from pipeline.ranks.collectives import gather_into, sums
from pipeline.ranks.world import World

_GATHERED_BYTES = 64 << 20  # bytes of all ranks' shares that are gathered at once
MOST_AGAIN = 0.4  # up to this fraction of all bytes is read from other ranks' shares


class Shares:
    """Cuts all files of a checkpoint, put end to end in the order of their ranks, into a share for each of `num_ranks`
    ranks.

    Shares consist of whole parts, and of whole files if `num_ranks` divides the number of files. `bounds`,
    int64[num_ranks + 1]: the byte at which each share begins, and the end of the last. `bases`, int64[files]: the byte
    at which each file begins.
    """

    def __init__(self, files: Mapping[str, FileRecord], *, num_ranks: int) -> None:
        self.names = tuple(sorted(files, key=rank_of))
        self._records = [files[name] for name in self.names]
        self.files = files
        sizes = np.array([record.num_bytes for record in self._records], dtype=np.int64)
        self.bases = np.cumsum(sizes) - sizes
        self._cuts = [self._cut(number, num_ranks) for number in range(num_ranks + 1)]
        total = int(sizes.sum())
        self.bounds = np.array(
            [
                self.bases[file] + part * self._records[file].part_bytes if file < len(sizes) else total
                for file, part in self._cuts
            ],
            dtype=np.int64,
        )

    def _cut(self, number: int, num_ranks: int) -> tuple[int, int]:
        """Returns the number of the file, and of its part, at which share `number` begins."""
        file, rest = divmod(number * len(self.names), num_ranks)
        return file, len(self._records[file].sha256) * rest // num_ranks if rest else 0

    def of(self, rank: int) -> list[tuple[str, int, int]]:
        """Returns a rank's share: for each file (name, first, end), with the parts first..end-1."""
        (first_file, first_part), (end_file, end_part) = self._cuts[rank : rank + 2]
        found = []
        for file in range(first_file, min(end_file + 1, len(self.names))):
            first = first_part if file == first_file else 0
            end = end_part if file == end_file else len(self._records[file].sha256)
            if first < end:
                found.append((self.names[file], first, end))
        return found

    def stretch(self, rank: int, number: int, size: int) -> FilePieces:
        """Returns the pieces of files that a rank shows to the others in round `number`: `size` bytes of its share, or
        fewer at its end. All pieces go to one target."""
        low = min(self.bounds[rank] + number * size, self.bounds[rank + 1])
        high = min(low + size, self.bounds[rank + 1])
        files = np.arange(np.searchsorted(self.bases, low, side="right") - 1, np.searchsorted(self.bases, high))
        bases = self.bases[files]
        begins = np.maximum(low - bases, 0)
        ends = np.minimum(np.append(bases[1:], high), high) - bases
        targets, ats = np.zeros_like(files), begins + bases - low
        return FilePieces(names=self.names, files=files, begins=begins, ends=ends, targets=targets, ats=ats)

    def cut(self, pieces: FilePieces, size: int) -> "CutPieces":
        """Returns the pieces, cut where shares and their stretches of `size` bytes end."""
        counts = -(-np.diff(self.bounds) // size)
        ranks = np.repeat(np.arange(counts.size), counts)
        rounds = _counted(counts)
        begins = self.bounds[ranks] + rounds * size
        ends = np.append(begins[1:], self.bounds[-1])
        bases = self.bases[pieces.files]
        first = np.searchsorted(begins, bases + pieces.begins, side="right") - 1
        counts = np.searchsorted(begins, bases + pieces.ends, side="left") - first
        which = np.repeat(np.arange(counts.size), counts)
        stretches, bases, found = first[which] + _counted(counts), bases[which], pieces.chosen(which)
        low = np.maximum(found.begins, begins[stretches] - bases)
        high = np.minimum(found.ends, ends[stretches] - bases)
        return CutPieces(
            pieces=replace(found, begins=low, ends=high, ats=found.ats + low - found.begins),
            ranks=ranks[stretches],
            rounds=rounds[stretches],
            offsets=bases + low - begins[stretches],
        )


@dataclass(frozen=True, kw_only=True)
class CutPieces:
    """Pieces that each lie in one stretch of one rank's share. `ranks`, `rounds` and `offsets` are int64[pieces]: that
    rank, the round in which it shows the stretch, and the byte of the stretch at which the piece begins."""

    pieces: FilePieces
    ranks: NDArray[np.int64]
    rounds: NDArray[np.int64]
    offsets: NDArray[np.int64]


def _counted(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the concatenation of 0, ..., count - 1 for each count."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, kw_only=True)
class Reads:
    """How much a rank reads from the store, and with how many requests."""

    num_bytes: int
    num_requests: int


def foreign_reads(pieces: FilePieces, shares: Shares, rank: int) -> Reads:
    """Returns what a rank would have to read to get the pieces that are not in its share."""
    begins, ends = (shares.bases[pieces.files] + each for each in (pieces.begins, pieces.ends))
    is_own = (begins >= shares.bounds[rank]) & (ends <= shares.bounds[rank + 1])
    parts = {name: record.part_bytes for name, record in shares.files.items()}
    sizes = [
        min(each.end * parts[each.file], shares.files[each.file].num_bytes) - each.first * parts[each.file]
        for each in plan_ranges(pieces.chosen(~is_own), parts, most_bytes=RANGE_BYTES)
    ]
    return Reads(num_bytes=sum(sizes), num_requests=len(sizes))


def fill_together(files: RankFiles, shares: Shares, wanted: Sequence[Wanted], *, world: World) -> None:
    """Fills what each rank wants, from its own share and from the other ranks' shares. Collective."""
    pieces, targets = pieces_of(wanted, shares.names), Targets(each.target for each in wanted)
    (again,) = sums([float(foreign_reads(pieces, shares, world.rank).num_bytes)], device=world.device)
    if again <= MOST_AGAIN * shares.bounds[-1]:
        files.copy(pieces, targets)
        return
    longest = int(np.diff(shares.bounds).max())
    size = min(longest, max(1, _GATHERED_BYTES // world.num_ranks))
    cut = shares.cut(pieces, size)
    order = np.argsort(cut.rounds, kind="stable")
    bounds = np.searchsorted(cut.rounds[order], np.arange(-(-longest // size) + 1))
    shown = torch.zeros(size, dtype=torch.uint8)
    gathered = torch.empty(world.num_ranks * size, dtype=torch.uint8, device=world.device)
    for number, (low, high) in enumerate(pairwise(bounds.tolist())):
        files.copy(shares.stretch(world.rank, number, size), Targets([shown]))
        gather_into(gathered, shown.to(world.device))
        now = order[low:high]
        own = cut.pieces.chosen(now)
        lows = cut.ranks[now] * size + cut.offsets[now]
        targets.put(gathered, own.targets, ats=own.ats, lows=lows, sizes=own.ends - own.begins)
