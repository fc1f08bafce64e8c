"""Manifests read back, and the fence lets through what the latest attempt's line wrote."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.recipes.pretrain import digits_smoke
from pipeline.training.manifest import (
    FORMAT,
    Attempt,
    CheckpointId,
    FileRecord,
    FragmentLocation,
    LogicalTensor,
    Manifest,
    attempt_from_json,
    attempt_to_json,
    id_from_path,
    manifest_from_json,
    manifest_to_json,
    next_token,
    overlapping,
    standing_checkpoints,
)
from pipeline.training.saved_job import saved_job
from tests.baseline.record import OLD_RUN
from tests.rigs.positions import position_at

MANIFEST = Manifest(
    format=FORMAT,
    id=CheckpointId(step=120, attempt="0003-5f1c2a9e"),
    tensors={
        "head.weight": LogicalTensor(
            shape=(3, 4),
            dtype="float32",
            slots={"master": (FragmentLocation(file="rank-00000.safetensors", offset=136, start=0, length=12),)},
        )
    },
    files={"rank-00000.safetensors": FileRecord(sha256="ab" * 32, num_bytes=184)},
    moments=("exp_avg", "exp_avg_sq"),
    num_updates=119,
    num_samples=1_920,
    position=position_at(120),
    job=saved_job(digits_smoke()),
    record={"seconds": {"compute": 1.25}, "note": "Größe"},
)


def c(step: int, attempt: str) -> CheckpointId:
    return CheckpointId(step=step, attempt=attempt)


def a(token: str, origin: CheckpointId | None = None) -> Attempt:
    return Attempt(token=token, resumed_from=origin)


def changed(*parts: str, **values: object) -> bytes:
    """The manifest with other values in its position, or in the part of it below these names."""
    fields = inner = json.loads(manifest_to_json(MANIFEST))
    for part in parts or ("position",):
        inner = inner[part]
    inner |= values
    return json.dumps(fields).encode()


def test_a_manifest_reads_back() -> None:
    assert manifest_from_json(manifest_to_json(MANIFEST)) == MANIFEST


def test_a_manifest_of_the_first_format_is_read_as_one_of_this() -> None:
    """One that an older version wrote: the EMA decay had another name, the position no step."""
    (path,) = OLD_RUN.glob("checkpoints/step-*/*/MANIFEST.json")
    old, manifest = json.loads(path.read_text()), manifest_from_json(path.read_bytes())
    assert (old["format"], manifest.format) == (1, FORMAT)
    assert manifest.position.to_json() == {"next_step": 3, **old["data_state"], "image_size": 32}
    kept = ("model", "loss", "optimizer", "job")
    assert {name: getattr(manifest.job, name) for name in kept} == {name: old["record"][name] for name in kept}
    assert (manifest.job.ema_decay, manifest.job.precision) == (0.9, "fp32")
    assert manifest_from_json(manifest_to_json(manifest)) == manifest


def test_nothing_is_decided_by_the_record() -> None:
    fields = json.loads(manifest_to_json(MANIFEST)) | {"record": {}}
    assert manifest_from_json(json.dumps(fields).encode()) == replace(MANIFEST, record={})


@pytest.mark.parametrize("attempt", [a("0001-aa"), a("0002-bb", c(40, "0001-aa"))])
def test_an_attempt_reads_back(attempt: Attempt) -> None:
    assert attempt_from_json(attempt_to_json(attempt)) == attempt


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "not a manifest", id="empty"),
        pytest.param(manifest_to_json(MANIFEST)[:-30], "not a manifest", id="half-written"),
        pytest.param(b"{}", "not a manifest", id="another JSON"),
        pytest.param(b"\xff\xfe", "not a manifest", id="not UTF-8"),
        pytest.param(
            manifest_to_json(MANIFEST).replace(b'"format": 2', b'"format": 3'),
            "manifest format 3, this version reads 1 and 2",
            id="the future",
        ),
        pytest.param(changed(next_step=119), "is of step 120, its position of 119", id="steps that do not agree"),
        pytest.param(changed(seed="0"), r"not a manifest: position\.seed: .* valid integer", id="a seed as a text"),
        pytest.param(changed(later=1), r"not a manifest: position\.later: Unexpected", id="a position with more"),
        pytest.param(changed("job", "model", later=1), "manifest: job: .*'later'", id="a model of a later version"),
        pytest.param(
            changed("job", "model", image_size="x"),
            "job: .*image_size is 'x'",
            id="a model that is wrong",
        ),
        pytest.param(changed("job", "job", steps="x"), "manifest: job: .*steps is 'x'", id="steps that are a text"),
        pytest.param(b'{"format": 1}', "not a manifest: KeyError 'record'", id="the first format without a record"),
        pytest.param(
            b'{"format": 1, "id": {"step": 1}, "data_state": {}, "record": []}',
            "manifest: TypeError",
            id="a record that is a list",
        ),
    ],
)
def test_what_is_no_manifest_is_a_value_error(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        manifest_from_json(data)


@pytest.mark.parametrize("data", [b"", b"{", b'{"token": 3}'])
def test_what_is_no_attempt_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="Attempt"):
        attempt_from_json(data)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param("step-00000120/attempt-0003-5f/MANIFEST.json", c(120, "0003-5f"), id="a manifest"),
        pytest.param("step-00000120/attempt-0003-5f/rank-00000.safetensors", None, id="its fragments"),
        pytest.param("attempts/0003-5f.json", None, id="an attempt"),
        pytest.param("step-x/attempt-0003-5f/MANIFEST.json", None, id="no number"),
        pytest.param("MANIFEST.json", None, id="at the root"),
        pytest.param("a/step-00000120/attempt-0003-5f/MANIFEST.json", None, id="too deep"),
    ],
)
def test_ids_by_path(path: str, expected: CheckpointId | None) -> None:
    assert id_from_path(path) == expected
    if expected:
        assert id_from_path(f"{expected.folder}/MANIFEST.json") == expected


def test_tokens_count_up() -> None:
    assert next_token([], nonce="aa") == "0001-aa"
    assert next_token([a("0002-x"), a("0010-y"), a("0003-z")], nonce="bb") == "0011-bb"


ONE, TWO, THREE = a("0001-x"), a("0002-y", c(20, "0001-x")), a("0003-z", c(40, "0002-y"))


@pytest.mark.parametrize(
    ("committed", "attempts", "expected"),
    [
        pytest.param([], [], [], id="nothing yet"),
        pytest.param([], [ONE], [], id="started, nothing saved"),
        pytest.param([c(10, "0001-x"), c(20, "0001-x")], [ONE], [c(20, "0001-x"), c(10, "0001-x")], id="scratch"),
        pytest.param(
            [c(20, "0001-x"), c(40, "0002-y"), c(50, "0003-z")],
            [ONE, TWO, THREE],
            [c(50, "0003-z"), c(40, "0002-y"), c(20, "0001-x")],
            id="a chain of resumptions",
        ),
        pytest.param(
            [c(20, "0001-x"), c(30, "0001-x"), c(40, "0002-y")],
            [ONE, TWO],
            [c(40, "0002-y"), c(20, "0001-x")],
            id="a zombie went on after the next attempt had resumed from an older checkpoint",
        ),
        pytest.param(
            [c(20, "0001-x"), c(30, "0001-x")],
            [ONE, TWO],
            [c(20, "0001-x")],
            id="the zombie's is newer than anything that stands",
        ),
        pytest.param(
            [c(10, "0001-x"), c(20, "0001-x"), c(5, "0002-y")],
            [ONE, a("0002-y")],
            [c(5, "0002-y")],
            id="a later attempt from scratch: all before it is ignored",
        ),
        pytest.param([c(10, "0001-x")], [ONE, a("0002-y")], [], id="from scratch, and nothing saved yet"),
        pytest.param(
            [c(20, "0001-x"), c(40, "0002-y"), c(30, "0003-z")],
            [ONE, TWO, a("0003-z", c(20, "0001-x"))],
            [c(30, "0003-z"), c(20, "0001-x")],
            id="two attempts from one checkpoint: the later one counts",
        ),
        pytest.param(
            [c(40, "0002-y"), c(60, "0003-z")],
            [TWO, THREE],
            [c(60, "0003-z"), c(40, "0002-y")],
            id="the first attempt's record was deleted",
        ),
        pytest.param([c(20, "0009-q")], [ONE], [], id="written by an attempt that left no record"),
    ],
)
def test_the_fence(committed: list[CheckpointId], attempts: list[Attempt], expected: list[CheckpointId]) -> None:
    assert standing_checkpoints(committed, attempts) == expected
    assert standing_checkpoints(committed[::-1], attempts[::-1]) == expected, "in whatever order they are listed"


@given(data=st.data())
def test_overlapping_covers_exactly_what_is_asked(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    total = sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    places = tuple(
        FragmentLocation(file=f"rank-{i}", offset=8 * i, start=start, length=length)
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
        FragmentLocation(file="x", offset=0, start=0, length=3),
        FragmentLocation(file="y", offset=0, start=5, length=3),
    )
    assert [(low, count) for _, low, count in overlapping(places, start=1, length=6)] == [(1, 2), (5, 2)]
