"""Manifests read back; those of another format, and what is damaged or contradicts itself is none."""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.attempts import Attempt, attempt_from_json, attempt_to_json, token_from_path
from pipeline.checkpoints.manifest import (
    FORMAT,
    CheckpointId,
    CheckpointManifest,
    FragmentLocation,
    LogicalTensor,
    id_from_path,
    is_checkpoint_file,
    manifest_from_json,
    manifest_to_json,
    overlapping,
)
from pipeline.checkpoints.rank_file_out import FileRecord
from pipeline.data.position import StepRange
from pipeline.training.saving.save import saved_job
from shards.files.typed_json import sealed, unsealed
from tests.rigs.faults import every_fault
from tests.rigs.positions import position_at

MANIFEST = CheckpointManifest(
    format=FORMAT,
    id=CheckpointId(step=120, attempt="0003-5f1c2a9e"),
    tensors={
        "head.weight": LogicalTensor(
            shape=(3, 4),
            dtype="float32",
            slots={
                slot: (FragmentLocation(file="rank-00000.safetensors", offset=offset, start=0, length=12, num_files=1),)
                for slot, offset in (("master", 136), ("exp_avg", 184), ("exp_avg_sq", 232))
            },
        )
    },
    files={"rank-00000.safetensors": FileRecord(num_bytes=280, part_bytes=1 << 20, sha256=("ab" * 32,))},
    moments=("exp_avg", "exp_avg_sq"),
    num_updates=119,
    num_samples=1_920,
    position=position_at(120),
    job=saved_job(digits_smoke()),
    losses=(),
    record={"seconds": {"compute": 1.25}, "note": "Größe"},
)


def c(step: int, attempt: str) -> CheckpointId:
    return CheckpointId(step=step, attempt=attempt)


def a(token: str, origin: CheckpointId | None = None) -> Attempt:
    return Attempt(token=token, resumed_from=origin, skipped=())


def changed(*parts: str, **values: object) -> bytes:
    """The manifest with other values in its position, or in the part of it below these names, and its new digest."""
    fields = inner = json.loads(unsealed(manifest_to_json(MANIFEST)))
    for part in parts or ("position",):
        inner = inner[int(part) if part.isdigit() else part]
    inner |= values
    return sealed(json.dumps(fields).encode())


def replaced(**values: object) -> bytes:
    """The manifest with other values at its top, and its new digest."""
    return sealed(json.dumps(json.loads(unsealed(manifest_to_json(MANIFEST))) | values).encode())


def test_a_manifest_reads_back() -> None:
    assert manifest_from_json(manifest_to_json(MANIFEST)) == MANIFEST


def test_every_single_bit_counts() -> None:
    """Also those of the format and of the digest."""
    data = manifest_to_json(MANIFEST)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError):  # noqa: PT011  # of pydantic, of the seal, or our own
            manifest_from_json(bytes(changed))


@every_fault
def test_no_field_of_a_manifest_may_be_missing() -> Iterator[str]:
    """Nothing is filled in, however deep it is."""
    whole = json.loads(unsealed(manifest_to_json(MANIFEST)))
    for path in paths_of({name: value for name, value in whole.items() if name != "record"}):
        if path[:-1] in (
            ("tensors",),
            ("tensors", "head.weight", "slots"),
            ("position", "augment"),
            ("position", "decoder"),
        ):
            continue  # of any name: tensors, moments, which frozen ones lack, and settings, which are compared
        if path[:2] == ("job", "job") and path[2:] not in ((), ("steps",)):
            continue
        values = inner = copy.deepcopy(whole)
        for part in path[:-1]:
            inner = inner[part]
        del inner[path[-1]]
        with suppress(ValueError):
            manifest_from_json(sealed(json.dumps(values).encode()))
            yield f"{'.'.join(map(str, path))} is missing, and nobody says so"


def paths_of(values: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every field."""
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(values, dict):
            yield (name,)
        if isinstance(value, dict | list):
            yield from ((name, *path) for path in paths_of(value))


def of_ranks(*sizes: int) -> CheckpointManifest:
    """Of as many ranks, whose files have these sizes and 4 elements each at byte 136."""
    files = {
        f"rank-{rank:05d}.safetensors": FileRecord(num_bytes=size, part_bytes=1 << 20, sha256=("ab" * 32,))
        for rank, size in enumerate(sizes)
    }
    run = FragmentLocation(file="rank-00000.safetensors", offset=136, start=0, length=4, num_files=len(sizes))
    tensor = LogicalTensor(shape=(len(sizes), 4), dtype="float32", slots={"master": (run,)})
    return replace(MANIFEST, tensors={"a": tensor}, files=files, moments=())


def test_fragments_of_many_ranks_are_one_entry_and_checked_all() -> None:
    data = manifest_to_json(of_ranks(*[152] * 2000))
    assert manifest_from_json(data).tensors["a"].slots["master"][0].num_elements == 8000
    with pytest.raises(ValueError, match=r"element 0 begins beyond the end of rank-00000\.safetensors, at byte 136"):
        manifest_from_json(manifest_to_json(of_ranks(152, 152, 151, 152)))
    hole = of_ranks(152, 152, 152, 152)
    others = {name: file for name, file in hole.files.items() if "2" not in name}
    with pytest.raises(ValueError, match="or one of the 3 files after it is not among the checkpoint's files"):
        manifest_from_json(manifest_to_json(replace(hole, files=others)))


def test_nothing_is_decided_by_the_record() -> None:
    assert manifest_from_json(replaced(record={})) == replace(MANIFEST, record={})


SKIPPING = replace(a("0003-cc", c(40, "0001-aa")), skipped=(StepRange(first=41, end=49),))


@pytest.mark.parametrize("attempt", [a("0001-aa"), a("0002-bb", c(40, "0001-aa")), SKIPPING])
def test_an_attempt_reads_back(attempt: Attempt) -> None:
    assert attempt_from_json(attempt_to_json(attempt)) == attempt


def test_every_single_bit_of_what_an_attempt_skips_counts() -> None:
    """It decides which data the run trains on, and is not always in a checkpoint yet."""
    data = attempt_to_json(SKIPPING)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError):  # noqa: PT011  # of pydantic, or of the seal
            attempt_from_json(bytes(changed))


def test_losses_read_back_to_the_bit() -> None:
    losses = (0.1 + 0.2, 2.302585092994046, 5e-324, 1e300, 3.0)
    assert manifest_from_json(manifest_to_json(replace(MANIFEST, losses=losses))).losses == losses


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param("step-00000120/attempt-0003-5f/MANIFEST.json", c(120, "0003-5f"), id="a manifest"),
        pytest.param("step-00000120/attempt-0003-5f/rank-00000.safetensors", None, id="its fragments"),
        pytest.param("attempts/0003-5f.json", None, id="an attempt"),
        pytest.param("step-x/attempt-0003-5f/MANIFEST.json", None, id="no number"),
        pytest.param("step-\u00b2/attempt-0003-5f/MANIFEST.json", None, id="a digit that is no number"),
        pytest.param("step-0000012\u0661/attempt-0003-5f/MANIFEST.json", None, id="a digit of another script"),
        pytest.param("step-120/attempt-0003-5f/MANIFEST.json", None, id="a number that is not ours"),
        pytest.param("step-00000120/attempt-x/MANIFEST.json", None, id="no attempt"),
        pytest.param("step-00000120/attempt-0003-5f\n/MANIFEST.json", None, id="a line's end"),
        pytest.param("MANIFEST.json", None, id="at the root"),
        pytest.param("a/step-00000120/attempt-0003-5f/MANIFEST.json", None, id="too deep"),
    ],
)
def test_ids_by_path(path: str, expected: CheckpointId | None) -> None:
    assert id_from_path(path) == expected
    if expected:
        assert id_from_path(f"{expected.folder}/MANIFEST.json") == expected


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [("MANIFEST.json", True), ("rank-00012.safetensors", True), (".nfs000001", False), ("notes.txt", False)],
)
def test_only_files_of_a_checkpoint_are_its_files(name: str, is_ours: bool) -> None:
    assert is_checkpoint_file(f"step-00000120/attempt-0003-5f1c2a9e/{name}") is is_ours
    assert not is_checkpoint_file(f"step-\u00b2/attempt-0003-5f1c2a9e/{name}")


@pytest.mark.parametrize(
    ("path", "token"),
    [
        ("attempts/0003-5f1c2a9e.json", "0003-5f1c2a9e"),
        ("attempts/12345-5f1c2a9e.json", "12345-5f1c2a9e"),
        ("attempts/.nfs000001", ""),
        ("attempts/0003-5f1c2a9e.json~", ""),
        ("attempts/\u00b2\u00b2\u00b2\u00b2-5f1c2a9e.json", ""),
        ("attempts/20240101-backup.json", ""),
        ("attempts/old/0003-5f1c2a9e.json", ""),
    ],
)
def test_tokens_by_path(path: str, token: str) -> None:
    assert token_from_path(path) == token


@given(data=st.data())
def test_overlapping_covers_exactly_what_is_asked(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    total = sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    places = tuple(
        FragmentLocation(file=f"rank-{i}", offset=8 * i, start=start, length=length, num_files=1)
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    )
    start = data.draw(st.integers(0, total - 1))
    length = data.draw(st.integers(0, total - start))
    shuffled = tuple(data.draw(st.permutations(places)))
    found = overlapping(shuffled, start=start, length=length)
    elements = [element for _, low, count in found for element in range(low, low + count)]
    assert elements == list(range(start, start + length))
    for place, low, count in found:
        assert count > 0
        assert place.start <= low < low + count <= place.start + place.length


def test_a_gap_is_left_out() -> None:
    places = (
        FragmentLocation(file="x", offset=0, start=0, length=3, num_files=1),
        FragmentLocation(file="y", offset=0, start=5, length=3, num_files=1),
    )
    assert [(low, count) for _, low, count in overlapping(places, start=1, length=6)] == [(1, 2), (5, 2)]


@pytest.mark.parametrize(
    "text", [b'{"a":1}', b'{\n "a": [\n  1\n ]\n}\n', '{"a": "Größe, \\"digest\\": \\""}'.encode()]
)
def test_a_sealed_text_is_json_and_reads_back(text: bytes) -> None:
    data = sealed(text)
    assert json.loads(data) == json.loads(text) | {"digest": json.loads(data)["digest"]}
    assert json.loads(unsealed(data)) == json.loads(text)
