"""The card beside the manifest, on a folder and on S3; the dataset stays verified."""

from pathlib import Path

import pytest

from jobs.card import CardJob, run
from jobs.verify import VerifyJob
from jobs.verify import run as verify
from shards.errors import UserError
from shards.store import open_store
from tests.rigs.card_datasets import Sample, write_dataset
from tests.rigs.datasets import file_hashes, packed_folders
from tests.rigs.images import image_bytes


def test_only_the_card_is_written(tmp_path: Path) -> None:
    out = packed_folders(tmp_path)
    before = file_hashes(out)
    assert run(CardJob(url=str(out))) == 0
    after = file_hashes(out)
    assert after.pop("card.html")
    assert after == before
    assert verify(VerifyJob(url=str(out), deep=True)) == 0


def test_on_s3(s3_bucket: str) -> None:
    url = f"s3://{s3_bucket}/sets/birds"
    write_dataset(open_store(url), [[Sample(image=image_bytes(shard))] for shard in range(3)], ["a"])
    assert run(CardJob(url=url, num_mosaic=2)) == 0
    page = open_store(url).read("card.html").decode()
    assert "<title>birds" in page
    assert page.count("<img ") == 2
    assert s3_bucket not in page


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"url": ""}, "URL is missing"), ({"url": "/nowhere"}, "no manifest"), ({"num_mosaic": 5000}, "0 to 96")],
)
def test_mistakes(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(CardJob(**fields))  # type: ignore[arg-type]
