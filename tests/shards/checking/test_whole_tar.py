"""A tar as mapped bytes, from a folder and from S3."""

from pathlib import Path

import pytest

from shards.checking.whole_tar import mapped_tar
from shards.store import MissingObjectError, open_store


@pytest.mark.parametrize("data", [b"", b"x" * 100_000])
def test_the_bytes_are_those_of_the_object(tmp_path: Path, s3_bucket: str, data: bytes) -> None:
    for url in (str(tmp_path), f"s3://{s3_bucket}"):
        store = open_store(url)
        store.write("shards/a.tar", data)
        with mapped_tar(store, "shards/a.tar") as tar:
            assert (len(tar), tar[: len(data)]) == (len(data), data)
        with pytest.raises(MissingObjectError), mapped_tar(store, "shards/b.tar"):
            pass
