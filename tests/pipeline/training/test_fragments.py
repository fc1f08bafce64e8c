"""A rank's file: every piece lies at the byte that its manifest says."""

import torch

from pipeline.training.fragments import FLOAT_BYTES, Position, assemble_manifest, pack_fragments
from pipeline.training.manifest import CheckpointId
from pipeline.training.zero_state import Fragment


def fragment(name: str, start: int, values: list[float]) -> Fragment:
    tensor = torch.tensor(values)
    return Fragment(name=name, start=start, length=len(values), slots={"master": tensor, "exp_avg": -tensor})


def test_offsets_point_at_the_values() -> None:
    fragments = [fragment("a", 3, [1.0, 2.0]), fragment("b", 0, [5.0, 6.0, 7.0])]
    data, pieces = pack_fragments(fragments)
    expected = {f"{f.name} {slot}": view for f in fragments for slot, view in f.slots.items()}
    assert len(pieces) == len(expected)
    for name, slot, offset, _, length in pieces:
        found = torch.frombuffer(bytearray(data[offset : offset + length * FLOAT_BYTES]), dtype=torch.float32)
        assert torch.equal(found, expected[f"{name} {slot}"])


def test_the_manifest_puts_the_ranks_pieces_in_order() -> None:
    reports = []
    for rank, part in enumerate([fragment("a", 2, [3.0, 4.0]), fragment("a", 0, [1.0, 2.0])]):
        data, pieces = pack_fragments([part])
        reports.append({"file": f"rank-{rank}", "sha256": "0" * 64, "num_bytes": len(data), "pieces": pieces})
    manifest = assemble_manifest(
        CheckpointId(step=7, attempt="0001-a"),
        reports,
        position=Position(step=7, num_updates=6, num_samples=70),
        shapes={"a": (2, 2)},
        data_state={},
        record={},
    )
    places = manifest.tensors["a"].slots["master"]
    assert [(place.file, place.start, place.length) for place in places] == [("rank-1", 0, 2), ("rank-0", 2, 2)]
    assert (manifest.moments, manifest.num_updates, manifest.num_samples) == (("exp_avg",), 6, 70)
