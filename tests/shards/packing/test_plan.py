"""The plan as a record: read back, hashed, and refused if it belongs to another packing."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shards.class_labels import LabelRules
from shards.errors import UserError
from shards.images.config import ImageChecks, ImageLimits, Resize
from shards.manifest import shard_path
from shards.packing.config import Dedup, PackSpec
from shards.packing.plan import PLAN_PATH, Plan, read_plan, refuse_other_versions
from shards.sources.kinds import FolderSource
from shards.store import Store, open_store
from tests.rigs.images import class_folders
from tests.rigs.packing import pack_spec, planned


@pytest.fixture
def spec(tmp_path: Path) -> PackSpec:
    root = class_folders(tmp_path / "images", num_classes=1, images_a_class=2)
    return pack_spec(FolderSource(root=str(root)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "out"))


def test_the_plan_is_read_back_and_hashes_its_bytes(store: Store, spec: PackSpec) -> None:
    assert read_plan(store, spec) is None
    plan = planned(store, spec)
    assert read_plan(store, spec) == plan
    assert Plan.from_bytes(store.read(PLAN_PATH)).hash == plan.hash


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"samples_per_shard": 5},
        {"split": "test"},
        {"source": FolderSource(root="elsewhere")},
        {"limits": ImageLimits(max_bytes=10)},
        {"dedup": Dedup(duplicates="merge")},
        {"resize": Resize(short_side=256)},
        {"labels_file": "labels.txt"},
        {"labels": LabelRules(numbers="from-1")},
        {"unlabeled": "keep"},
        {"images": ImageChecks(truncated="quarantine")},
        {"split_test": 0.5},
    ],
)
def test_a_plan_of_other_settings_is_refused(
    store: Store, spec: PackSpec, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    planned(store, spec)
    words = rf"planned with other settings:\n  {next(iter(change))}[a-z_.]*: before .*, now "
    other = replace(spec, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"{words}[^;]*To pack it again:\n  rm -rf {store.url}/plan [^\n]*\Z"):
        read_plan(store, other)
    assert "planned" not in caplog.text
    caplog.set_level(logging.INFO)
    assert read_plan(store, other, may_replan=True) is None, "no shard is written, so a new plan may replace this one"
    assert re.search(words, caplog.messages[-1])
    store.write(shard_path(0), b"")
    with pytest.raises(UserError, match=words):
        read_plan(store, other, may_replan=True)
    plan = read_plan(store, spec)
    assert plan is not None
    store.write(PLAN_PATH, replace(plan, settings=other.settings()).to_bytes())
    with pytest.raises(UserError, match=words):
        read_plan(store, spec)


def test_other_library_versions_are_refused(store: Store, spec: PackSpec) -> None:
    plan = planned(store, spec)
    refuse_other_versions(plan, spec)
    with pytest.raises(UserError, match=r"\n  numpy: before 0\.0, now "):
        refuse_other_versions(replace(plan, versions={"numpy": "0.0"}), spec)


def test_a_damaged_plan_is_refused(store: Store, spec: PackSpec) -> None:
    store.write(PLAN_PATH, b"{}")
    with pytest.raises(UserError, match="not a plan"):
        read_plan(store, spec)
