"""A rank's file: every piece lies at the byte that its manifest says."""

import pytest
import torch
from safetensors.torch import load

from pipeline.checkpoints.fragments import Fragment, lay_out
from pipeline.models.weights.safetensors_head import FLOAT_BYTES


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


def test_a_moment_in_bf16_is_widened() -> None:
    moment = torch.randn(5, generator=torch.Generator().manual_seed(1)).bfloat16()
    laid_out = lay_out([Fragment(name="a", start=0, length=5, slots={"master": torch.ones(5), "exp_avg": moment})])
    found = load(b"".join(laid_out.parts()))["exp_avg:a"]
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), moment)


@pytest.mark.parametrize("view", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_view_that_is_not_what_the_fragment_says_is_refused(view: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"master of a is .*; allowed: 2 float32 or bfloat16"):
        lay_out([Fragment(name="a", start=0, length=2, slots={"master": view})])
