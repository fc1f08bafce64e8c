"""What it costs 1 to 512 ranks to resume ViT-H/14 from each other's checkpoints: bytes read, requests, time and memory.

No rank runs. The fragments of every rank are computed as DeepSpeed lays them out (tests/pipeline/checkpoints/
test_shares.py compares them with those of real runs), the manifest is made by the code that commits, and then counted
is what each rank's share and the manifest let it ask the store for. All bytes count, also those that are only verified:

    amplification   bytes that all ranks read / bytes of the state (masters and AdamW's two moments, fp32)
    requests        of all ranks
    gathered        whether the ranks show each other their shares, because reading what they need of them by
                    themselves is too much; each then receives the whole state from the others
    seconds, memory of one of 512 resuming ranks (CPU time): to parse and check the manifest, and to plan

ZeRO-2 cuts the state as ZeRO-1 does. Command (at most 5 minutes; docs/benchmarks.md has its table):

    python -m benchmarks.scale_resume --out benchmarks/results/scale_resume.json
"""

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import machine
from benchmarks.rounds import Aim, aims_table, say, write
from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.commit import draft_manifest, with_reports
from pipeline.checkpoints.manifest import (
    CheckpointId,
    CheckpointManifest,
    manifest_from_json,
    manifest_to_json,
    overlapping,
)
from pipeline.checkpoints.rank_file_in import RANGE_BYTES, READ_BYTES, FilePieces, RankFiles, Wanted, pieces_of
from pipeline.checkpoints.rank_file_out import PART_BYTES, FileRecord, RankReport, file_name, rank_of
from pipeline.checkpoints.shares import MOST_AGAIN, Reads, Shares, foreign_reads
from pipeline.models import ModelConfig, shapes_of
from pipeline.models.weights.safetensors_head import FLOAT_BYTES, head_of
from pipeline.training.saving.save import saved_job
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.zero.flat_blocks import layout_of, sizes_of
from pipeline.training.zero.optimizer import ways_of
from shards.store import LocalStore
from tests.rigs.positions import position_at

H14 = ModelConfig(name="vit_h14", image_size=224, num_classes=18291)
SLOTS = ("master", "exp_avg", "exp_avg_sq")
WORLDS = (1, 8, 64, 512)
SAVED = tuple((stage, num_ranks) for stage in (1, 3) for num_ranks in WORLDS)
MOST_AMPLIFICATION, MOST_REQUESTS, MOST_SECONDS, MOST_MB = 1.5, 4, 0.3, 100
SHOWN_BYTES = 128 << 10  # of each of 512 ranks in a round
HELD_BYTES = 16 << 30  # of what it verified, a rank keeps an eighth of the memory that is free: here of 128 GB
Shapes = Mapping[str, tuple[int, ...]]
Report = dict[str, Any]
Owned = tuple[str, int, int]  # tensor, first element, number of elements


def owned(shapes: Shapes, *, stage: int, num_ranks: int) -> Iterator[list[Owned]]:
    """What each rank holds under ZeRO: of every tensor an equal part (3), or an equal slice of all tensors of a
    parameter group, end to end (1 and 2). The tensors are those that DeepSpeed sees (flat_blocks.py)."""
    ways = ways_of(shapes, OptimizerConfig(weight_decay=0.1))
    layout = layout_of(shapes, ways)
    sizes = sizes_of(layout)
    group_of = {name: name if stage == 3 else ways[places[0].name] for name, places in layout.items()}
    begins, ends = dict[str, int](), dict[object, int]()
    for name, size in sizes.items():
        begins[name] = ends.get(group_of[name], 0)
        ends[group_of[name]] = begins[name] + size
    # In stages 1 and 2, DeepSpeed pads a group so that each slice begins at an even element.
    even = 1 if stage == 3 else 2
    slices = {group: even * -(-end // (even * num_ranks)) for group, end in ends.items()}
    for rank in range(num_ranks):
        found = []
        for name, places in layout.items():
            own = slices[group_of[name]]
            for place in places:
                begin = begins[name] + place.start
                first, end = max(begin, rank * own), min(begin + place.numel, (rank + 1) * own)
                if first < end:
                    found.append((place.name, first - begin, end - first))
        yield found


def checkpoint_of(shapes: Shapes, *, stage: int, num_ranks: int) -> CheckpointManifest:
    """The manifest that this many ranks would commit, but for its checksums."""
    reports, heads = [], dict[tuple[tuple[str, int], ...], Any]()
    for rank, own in enumerate(owned(shapes, stage=stage, num_ranks=num_ranks)):
        lengths = tuple((name, length) for name, _, length in own)
        if lengths not in heads:
            heads[lengths] = head_of({f"{slot}:{name}": (length,) for name, length in lengths for slot in SLOTS})
        head = heads[lengths]
        pieces = tuple((n, slot, head.offsets[f"{slot}:{n}"], first, size) for n, first, size in own for slot in SLOTS)
        checksums = ("0" * 64,) * -(-head.num_bytes // PART_BYTES)
        record = FileRecord(num_bytes=head.num_bytes, part_bytes=PART_BYTES, sha256=checksums)
        reports.append(RankReport(save=1, file=file_name(rank), record=record, pieces=pieces))
    draft = draft_manifest(
        CheckpointId(step=7, attempt="0001-a"),
        shapes=shapes,
        position=position_at(7),
        num_updates=7,
        job=saved_job(digits_smoke()),
        record={},
    )
    return with_reports(draft, reports)


def state_bytes(shapes: Shapes) -> int:
    """Of the masters and the moments."""
    return sum(math.prod(shape) for shape in shapes.values()) * len(SLOTS) * FLOAT_BYTES


def reads_of(
    manifest: CheckpointManifest, *, num_ranks: int, manifest_bytes: int, held_bytes: int = HELD_BYTES
) -> list[Reads]:
    """Of each rank: the manifest, then its share. Whoever reads the first part of a file asks for the file's size too,
    and reads all of its header. What does not fit into `held_bytes` is read once more when it is loaded, at most all of
    it."""
    shares, headers = Shares(manifest.files, num_ranks=num_ranks), _header_ends(manifest)
    found = []
    for rank in range(num_ranks):
        num_bytes, num_requests, share_bytes = manifest_bytes, 1, 0
        for name, first, end in shares.of(rank):
            record = manifest.files[name]
            stretches = [(first, end)]
            if first == 0:
                num_requests += 1
                stretches.append((end, -(-headers[name] // record.part_bytes)))
            for low, high in stretches:
                size = max(0, min(high * record.part_bytes, record.num_bytes) - low * record.part_bytes)
                share_bytes += size
                num_requests += -(-size // READ_BYTES)
        again = max(0, share_bytes - held_bytes)
        requests_again = -(-again // RANGE_BYTES)
        found.append(Reads(num_bytes=num_bytes + share_bytes + again, num_requests=num_requests + requests_again))
    return found


def _header_ends(manifest: CheckpointManifest) -> dict[str, int]:
    """Where the header of each file ends, and its first fragment begins."""
    names = sorted(manifest.files, key=rank_of)
    found = np.full(len(names), np.iinfo(np.int64).max)
    for tensor in manifest.tensors.values():
        for locations in tensor.slots.values():
            for each in locations:
                own = slice(rank_of(each.file), rank_of(each.file) + each.num_files)
                found[own] = np.minimum(found[own], each.offset)
    return dict(zip(names, found.tolist(), strict=True))


def wanted_of(manifest: CheckpointManifest, shares: Shares, own: list[Owned]) -> FilePieces:
    """What a rank that holds `own` needs of the files."""
    wanted = [
        Wanted(location=location, first=first, target=torch.empty(count, device="meta"))
        for name, start, length in own
        for slot in SLOTS
        for location, first, count in overlapping(manifest.tensors[name].slots[slot], start=start, length=length)
    ]
    return pieces_of(wanted, shares.names)


def pair(manifest: CheckpointManifest, manifest_bytes: int, shapes: Shapes, *, stage: int, num_ranks: int) -> Report:
    """A row of the table: these ranks resume from the checkpoint."""
    total, shares = state_bytes(shapes), Shares(manifest.files, num_ranks=num_ranks)
    reads = reads_of(manifest, num_ranks=num_ranks, manifest_bytes=manifest_bytes)
    most_again, again, by_themselves = MOST_AGAIN * shares.bounds[-1], 0, list[Reads]()
    for rank, own in enumerate(owned(shapes, stage=stage, num_ranks=num_ranks)):
        by_themselves.append(foreign_reads(wanted_of(manifest, shares, own), shares, rank))
        again += by_themselves[-1].num_bytes
        if again > most_again:
            break
    is_gathered = again > most_again
    if not is_gathered:
        reads = [
            Reads(num_bytes=one.num_bytes + more.num_bytes, num_requests=one.num_requests + more.num_requests)
            for one, more in zip(reads, by_themselves, strict=True)
        ]
    return {
        "to": [stage, num_ranks],
        "amplification": round(sum(each.num_bytes for each in reads) / total, 3),
        "requests": sum(each.num_requests for each in reads),
        "most_requests_of_a_rank": max(each.num_requests for each in reads),
        "gathered": bool(is_gathered),
    }


def resumed(path: Path, shapes: Shapes, *, stage: int, num_ranks: int) -> Report:
    """CPU-seconds and memory of the last but one rank: to parse and check the manifest, and to plan."""
    own = list(owned(shapes, stage=stage, num_ranks=num_ranks))[max(0, num_ranks - 2)]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before, began = _peak_bytes(), time.process_time()
    manifest = manifest_from_json(path.read_bytes())
    parsed = time.process_time()
    files = RankFiles(LocalStore(str(path.parent)), manifest)
    shares = Shares(manifest.files, num_ranks=num_ranks)
    pieces = wanted_of(manifest, shares, own)
    foreign_reads(pieces, shares, max(0, num_ranks - 2))
    cut = shares.cut(pieces, SHOWN_BYTES)
    ended = time.process_time()
    if not files.names or not cut.ranks.size:
        raise AssertionError("nothing was planned")
    return {
        "to": [stage, num_ranks],
        "parse_seconds": round(parsed - began, 3),
        "plan_seconds": round(ended - parsed, 3),
        "memory_mb": round((_peak_bytes() - before) / 1e6, 1),
    }


def _peak_bytes() -> int:
    """The most memory that this process has had."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) << 10


def measured(shapes: Shapes) -> Report:
    """Every checkpoint, read by all numbers of ranks under all stages."""
    found: list[Report] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "MANIFEST.json"
        for stage, num_ranks in SAVED:
            began = time.process_time()
            manifest = checkpoint_of(shapes, stage=stage, num_ranks=num_ranks)
            made = time.process_time() - began
            path.write_bytes(manifest_to_json(manifest))
            locations = [each for one in manifest.tensors.values() for some in one.slots.values() for each in some]
            row = {
                "saved": [stage, num_ranks],
                "fragments": sum(each.num_files for each in locations),
                "entries": len(locations),
                "manifest_bytes": path.stat().st_size,
                "made_seconds": round(made, 2),
                "pairs": [
                    pair(manifest, path.stat().st_size, shapes, stage=to, num_ranks=ranks) for to, ranks in SAVED
                ],
                "rank": [json.loads(_in_process(path, to, max(WORLDS))) for to in (1, 3)],
            }
            say(f"ZeRO-{stage}, {num_ranks} ranks: " + json.dumps(row["pairs"]))
            found.append(row)
    return {"state_bytes": state_bytes(shapes), "held_bytes": HELD_BYTES, "checkpoints": found}


def _in_process(path: Path, stage: int, num_ranks: int) -> str:
    command = [sys.executable, "-m", "benchmarks.scale_resume", "--rank", str(path), str(stage), str(num_ranks)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def aims_of(found: Report) -> list[Aim]:
    """What a resume may cost: the most of all pairs, and of a rank of 512."""
    rows = found["checkpoints"]
    pairs = [each for row in rows for each in row["pairs"]]
    ranks = [each for row in rows for each in row["rank"]]
    return [
        Aim(
            what="bytes read / bytes of the state, all pairs",
            limit=MOST_AMPLIFICATION,
            found=[max(each["amplification"] for each in pairs)],
        ),
        Aim(
            what=f"requests of a rank, {max(WORLDS)} ranks",
            limit=MOST_REQUESTS,
            found=[max(each["most_requests_of_a_rank"] for each in pairs if each["to"][1] == max(WORLDS))],
        ),
        Aim(
            what=f"CPU-seconds of a rank to parse and plan, {max(WORLDS)} ranks",
            limit=MOST_SECONDS,
            found=[max(each["parse_seconds"] + each["plan_seconds"] for each in ranks)],
        ),
        Aim(what="the same in MB of memory", limit=MOST_MB, found=[max(each["memory_mb"] for each in ranks)]),
    ]


def table(found: Report) -> str:
    """A row for each checkpoint, with the amplification of every kind of ranks that reads it."""
    lines = ["| Saved by | Fragments | Entries | Manifest | " + " | ".join(_words(*to) for to in SAVED) + " |"]
    lines.append("|---" * (4 + len(SAVED)) + "|")
    for row in found["checkpoints"]:
        cells = [_words(*row["saved"]), f"{row['fragments']:,}", f"{row['entries']:,}"]
        cells += [f"{row['manifest_bytes'] / 1e6:.2f} MB", *(f"{each['amplification']:.2f}" for each in row["pairs"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _words(stage: int, num_ranks: int) -> str:
    return f"ZeRO-{stage} on {num_ranks}"


def main() -> None:
    """Measures all pairs; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", nargs=3, metavar=("MANIFEST", "STAGE", "RANKS"), help="measures one resuming rank")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.rank:
        path, stage, num_ranks = arguments.rank
        report = resumed(Path(path), shapes_of(H14), stage=int(stage), num_ranks=int(num_ranks))
        sys.stdout.write(json.dumps(report))
        return
    found = measured(shapes_of(H14))
    aims = [aim.row() for aim in aims_of(found)]
    command = "python -m benchmarks.scale_resume" + (f" --out {arguments.out}" if arguments.out else "")
    write(arguments.out, {"command": command, "machine": machine(), **found, "aims": aims})
    sys.stdout.write(f"\n{table(found)}\n{aims_table(aims)}")


if __name__ == "__main__":
    main()
