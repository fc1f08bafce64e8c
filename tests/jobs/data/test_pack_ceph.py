"""Packing to the S3 store that on-premises clusters use."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.data.pack import PackJob, run
from shards.sources.kinds import FolderSource
from shards.store import open_store
from shards.verifying.verify import verify_dataset
from tests.rigs.images import class_folders


@pytest.mark.rgw
def test_ceph_gets_the_same_bytes(tmp_path: Path, ceph_bucket: str) -> None:
    root = class_folders(tmp_path / "images", num_classes=3, images_a_class=4)
    job = PackJob(source=FolderSource(root=str(root)), samples_per_shard=3, samples_per_block=2)
    url = f"s3://{ceph_bucket}/data/train"
    assert run(replace(job, out=str(tmp_path / "one"))) == 0
    assert run(replace(job, out=url, workers=2)) == 0
    store, local = open_store(url), open_store(str(tmp_path / "one"))
    assert list(store.list_sizes()) == list(local.list_sizes())
    assert all(store.read(path) == local.read(path) for path in local.list())
    assert verify_dataset(url, deep=True) == []
