"""Edits change files, can be kept as JSON, and give the same result again."""

import json
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import formats
from tests.fuzz.byte_edits import Edit
from tests.fuzz.cases import case_from_json, make_case, prepare
from tests.fuzz.targets import TARGETS

NUM_EDITS = 60
ONE_OF_EACH = {
    "json": ("training run", "DONE"),
    "json lines": ("training run", "metrics.jsonl"),
    "safetensors": ("weights", "model.safetensors"),
    "parquet": ("sources", "listed.parquet"),
    "zip": ("model files", "w.npz"),
    "tar": ("foreign tars", "train-0.tar"),
    "csv": ("sources", "listed.csv"),
    "tfrecord": ("prepared datasets", "kitti/3.3.0/kitti-test.tfrecord-00001-of-00003"),
    "bytes": ("images", "plain.jpg"),
}


@pytest.mark.parametrize("kind", formats.FORMATS)
def test_edits_change_the_file_and_are_data(kind: str, root: Path) -> None:
    folder, name = ONE_OF_EACH[kind]
    data = (root / folder / name).read_bytes()
    changed, names = 0, set()
    for seed in range(NUM_EDITS):
        edit: Edit = formats.FORMATS[kind].propose(Random(seed), data)
        after = formats.FORMATS[kind].apply(data, edit)  # not formats.apply, which forgives
        assert formats.FORMATS[kind].apply(data, json.loads(json.dumps(edit))) == after
        changed += after != data
        names.add(edit[0])
    assert changed > 0.8 * NUM_EDITS
    assert len(names) > 1 or kind == "csv"


def test_a_case_is_the_same_again_and_out_of_its_file(root: Path, tmp_path: Path) -> None:
    for target in TARGETS.values():
        valid = root / target.valid
        case = make_case(target, valid, seed=3, number=5)
        assert make_case(target, valid, seed=3, number=5) == case
        assert case_from_json(case.to_json()) == case
        prepare(case, valid, tmp_path / "case")
        name = case.edits[0][0]
        assert (tmp_path / "case" / name).exists()
