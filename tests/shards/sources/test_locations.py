"""The same reads from paths, buckets and web servers."""

from pathlib import Path

import pytest

from shards.errors import ImageRefusedError, UserError
from shards.sources.entry import Entry
from shards.sources.locations import Locations
from shards.sources.tree import refused_entry
from shards.store import open_store
from tests.rigs.web import web_server


def test_every_kind_of_location_in_one_list(tmp_path: Path, s3_bucket: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a b.jpg").write_bytes(b"relative")
    (tmp_path / "other.jpg").write_bytes(b"absolute")
    open_store(f"s3://{s3_bucket}/deep").write("猫 x.jpg", b"stored")
    with web_server() as web:
        cases = {
            "a b.jpg": b"relative",
            f"{tmp_path}/other.jpg": b"absolute",
            f"s3://{s3_bucket}/deep/猫 x.jpg": b"stored",
            web.serve("/a.jpg", b"fetched"): b"fetched",
            f"s3://{s3_bucket}/none.jpg": OSError("no object 'none.jpg'"),
            f"s3://{s3_bucket}/a//b.jpg": ImageRefusedError("not a plain relative path"),
            "s3://nonsense": ImageRefusedError("is not s3://bucket/key"),
            f"{web.url}/none.jpg": OSError("the server answers 404"),
            "../other.jpg": ImageRefusedError("no '..'"),
            "gone.jpg": OSError("No such file or directory"),
            f"{tmp_path}/gone\0.jpg": ImageRefusedError("NUL"),
            "file:///etc/passwd": ImageRefusedError("neither a path nor a URL"),
            refused_entry("x", "ftp://a is bad").locator: ImageRefusedError("ftp://a is bad"),
        }
        images = Locations(root=str(tmp_path / "root")).read_many(list(cases))
        for image, expected in zip(images, cases.values(), strict=True):
            assert type(image) is type(expected)
            assert image == expected or str(expected) in str(image)


@pytest.mark.parametrize("ending", ["", "/"])
def test_relative_ones_below_a_prefix_or_an_address(ending: str, s3_bucket: str) -> None:
    open_store(f"s3://{s3_bucket}").write("root/sub/a.jpg", b"stored")
    open_store(f"s3://{s3_bucket}").write("secret.jpg", b"outside")
    images = list(Locations(root=f"s3://{s3_bucket}/root{ending}").read_many(["sub/a.jpg", "../secret.jpg"]))
    assert images[0] == b"stored"
    assert isinstance(images[1], ImageRefusedError)
    with web_server() as web:
        web.serve("/root/a%20b.jpg", b"fetched")
        assert list(Locations(root=f"{web.url}/root{ending}").read_many(["a b.jpg"])) == [b"fetched"]


def test_too_large_is_refused_everywhere(tmp_path: Path, s3_bucket: str) -> None:
    (tmp_path / "a.jpg").write_bytes(b"12345")
    open_store(f"s3://{s3_bucket}").write("a.jpg", b"12345")
    with web_server() as web:
        locations = ["a.jpg", f"s3://{s3_bucket}/a.jpg", web.serve("/a.jpg", b"12345")]
        entries = [Entry(locator=location, name="") for location in locations]
        for _, image in Locations(root=str(tmp_path)).images(entries, max_bytes=4):
            assert isinstance(image, ImageRefusedError)
            assert str(image).startswith("too large")
        assert [image for _, image in Locations(root=str(tmp_path)).images(entries, max_bytes=5)] == [b"12345"] * 3


def test_a_bucket_that_is_not_there_ends_the_job(s3_endpoint: str) -> None:
    with pytest.raises(UserError, match="create the bucket"):
        list(Locations(root=".").read_many(["s3://no-such-bucket/a.jpg"]))
