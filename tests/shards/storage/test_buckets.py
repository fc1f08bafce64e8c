"""Which object a URL names."""

import pytest

from shards.errors import ImageRefusedError
from shards.storage.buckets import Buckets
from shards.store import open_store


def test_objects_of_several_buckets(s3_bucket: str) -> None:
    open_store(f"s3://{s3_bucket}").write("a/b c.jpg", b"1")
    buckets = Buckets()
    store, key = buckets.locate(f"s3://{s3_bucket}/a/b c.jpg")
    assert store.read(key) == b"1"
    assert buckets.locate(f"s3://{s3_bucket}/x")[0] is store
    assert buckets.locate("s3://another/x")[0] is not store


@pytest.mark.parametrize(
    "url", ["s3://", "s3://bucket", "s3://bucket/", "s3://a:b@bucket/key", "s3:///key", "/s3://b/k"]
)
def test_what_names_no_object_is_refused(url: str) -> None:
    with pytest.raises(ImageRefusedError, match="is not s3://bucket/key") as caught:
        Buckets().locate(url)
    assert "a:b" not in str(caught.value)
