"""A rank's file: every piece lies at the byte that its manifest says."""

import hashlib

import pytest
import torch
from safetensors.torch import load

from jobs.recipes.pretrain import digits_smoke
from pipeline.models.safetensors_stream import FLOAT_BYTES
from pipeline.training.fragments import PartDigests, assemble_manifest, lay_out
from pipeline.training.manifest import CheckpointId
from pipeline.training.saved_job import saved_job
from pipeline.training.zero_state import Fragment
from tests.rigs.positions import position_at


def fragment(name: str, start: int, values: list[float]) -> Fragment:
    tensor = torch.tensor(values)
    return Fragment(name=name, start=start, length=len(values), slots={"master": tensor, "exp_avg": -tensor})


def test_offsets_point_at_the_values() -> None:
    fragments = [fragment("a", 3, [1.0, 2.0]), fragment("b", 0, [5.0, 6.0, 7.0])]
    laid_out = lay_out(fragments)
    data = b"".join(laid_out.parts())
    assert len(data) == laid_out.head.num_bytes
    expected = {f"{f.name} {slot}": view for f in fragments for slot, view in f.slots.items()}
    assert len(laid_out.pieces) == len(expected)
    for name, slot, offset, _, length in laid_out.pieces:
        found = torch.frombuffer(bytearray(data[offset : offset + length * FLOAT_BYTES]), dtype=torch.float32)
        assert torch.equal(found, expected[f"{name} {slot}"])


@pytest.mark.parametrize("names", [["a"], ["a", "bc", "def"], [], ['ein\u00e9 "name"']])
def test_the_file_is_one_that_safetensors_reads(names: list[str]) -> None:
    fragments = [fragment(name, 0, [1.0, float(number)]) for number, name in enumerate(names)]
    laid_out = lay_out(fragments)
    assert len(laid_out.head.data) % 8 == 0
    found = load(b"".join(laid_out.parts()))
    assert set(found) == {f"{slot}:{name}" for name in names for slot in ("master", "exp_avg")}
    for one in fragments:
        assert torch.equal(found[f"exp_avg:{one.name}"], one.slots["exp_avg"])


def test_nothing_is_copied_before_it_is_written() -> None:
    one = fragment("a", 0, [1.0, 2.0])
    laid_out = lay_out([one])
    one.slots["master"].fill_(9.0)
    assert list(load(b"".join(laid_out.parts()))["master:a"]) == [9.0, 9.0]


@pytest.mark.parametrize("view", [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)])
def test_a_view_that_is_not_what_the_fragment_says_is_refused(view: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"master of a is .*, not 2 float32"):
        lay_out([Fragment(name="a", start=0, length=2, slots={"master": view})])


def test_the_manifest_puts_the_ranks_pieces_in_order() -> None:
    reports = []
    for rank, part in enumerate([fragment("a", 2, [3.0, 4.0]), fragment("a", 0, [1.0, 2.0])]):
        laid_out = lay_out([part])
        record = {"num_bytes": laid_out.head.num_bytes, "part_bytes": 1 << 20, "sha256": ["0" * 64]}
        reports.append({"file": f"rank-{rank}", "record": record, "pieces": laid_out.pieces})
    manifest = assemble_manifest(
        CheckpointId(step=7, attempt="0001-a"),
        reports,
        shapes={"a": (2, 2)},
        position=position_at(7),
        num_updates=6,
        job=saved_job(digits_smoke()),
        record={},
    )
    places = manifest.tensors["a"].slots["master"]
    assert [(place.file, place.start, place.length) for place in places] == [("rank-1", 0, 2), ("rank-0", 2, 2)]
    assert (manifest.moments, manifest.num_updates, manifest.num_samples) == (("exp_avg",), 6, 7 * 16)


@pytest.mark.parametrize("pieces", [(1, 2, 3), (4, 4), (9,), (0, 4, 0), (), (100, 1)])
def test_each_part_has_its_digest_however_the_file_is_written(pieces: tuple[int, ...]) -> None:
    data = bytes(range(sum(pieces)))
    digests, begin = PartDigests(4), 0
    for size in pieces:
        digests.update(memoryview(data)[begin : begin + size])
        begin += size
    expected = [hashlib.sha256(data[first : first + 4]).hexdigest() for first in range(0, len(data), 4)]
    assert digests.record() == {"num_bytes": len(data), "part_bytes": 4, "sha256": expected}
