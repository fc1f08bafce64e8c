"""The head of a file: aligned, and each tensor begins where it says."""

import json

from pipeline.models.safetensors_head import FLOAT_BYTES, head_of


def test_tensors_lie_end_to_end_behind_an_aligned_head() -> None:
    head = head_of({"a": (2, 3), "scalar": (), "empty": (0, 4), "b": (5,)}, metadata={"format": "pt"})
    length = int.from_bytes(head.data[:8], "little")
    assert (len(head.data), length % 8) == (8 + length, 0)
    header = json.loads(head.data[8:])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert {name: entry["data_offsets"] for name, entry in header.items()} == {
        "a": [0, 24],
        "scalar": [24, 28],
        "empty": [28, 28],
        "b": [28, 48],
    }
    begins = {"a": 0, "scalar": 24, "empty": 28, "b": 28}
    assert head.offsets == {name: len(head.data) + begin for name, begin in begins.items()}
    assert head.num_bytes == len(head.data) + 12 * FLOAT_BYTES
