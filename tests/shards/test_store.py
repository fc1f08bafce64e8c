"""A folder and the S3 servers behave in the same way; a URL names one object of any bucket."""

import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from shards.errors import ImageRefusedError, UserError
from shards.store import Buckets, LocalStore, MissingObjectError, Store, open_store

SERVERS = ["s3", pytest.param("ceph", marks=pytest.mark.rgw)]
# UTF-8 order: names above U+FFFF come last, which UTF-16 would sort before U+E000; "-" comes before "/".
ODD_NAMES = ["+", "_x", "a b", "a%20b", "a-b", "a/b", "a/c/d", "ab/x", "z&<z>", "~", "ä", "\ue000", "\U0001f600"]


@pytest.fixture(params=["folder", *SERVERS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "folder":
        return open_store(str(tmp_path / "root"))
    return open_store(f"s3://{request.getfixturevalue(f'{request.param}_bucket')}/some/prefix")


@pytest.fixture
def client(any_bucket: str) -> Any:
    """A plain client for the server that has `any_bucket`."""
    return boto3.session.Session().client("s3")


def test_what_was_written_is_read(store: Store) -> None:
    store.write("a/b.bin", b"0123456789")
    assert store.read("a/b.bin") == b"0123456789"
    assert store.read_range("a/b.bin", 2, 5) == b"234"
    assert store.read_range("a/b.bin", 4, 4) == b""
    assert store.size("a/b.bin") == 10
    assert store.exists("a/b.bin")


def test_overwriting_and_deleting(store: Store) -> None:
    store.write("x", b"old")
    store.write("x", b"newer")
    assert store.read("x") == b"newer"
    store.delete("x")
    store.delete("x")
    assert not store.exists("x")


def test_an_empty_object_is_an_object(store: Store) -> None:
    store.write("empty", b"")
    assert store.read("empty") == b""
    assert store.exists("empty")


@pytest.mark.parametrize("action", ["read", "read_range", "open_read", "size"])
def test_a_missing_object_is_named(store: Store, action: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("no/such"),
        "read_range": lambda: store.read_range("no/such", 0, 4),
        "open_read": lambda: store.open_read("no/such").__enter__(),
        "size": lambda: store.size("no/such"),
    }
    with pytest.raises(MissingObjectError, match="no/such"):
        calls[action]()


@pytest.mark.parametrize(("first", "end"), [(5, 11), (10, 12), (50, 60)])
def test_a_range_behind_the_end_is_never_short(store: Store, first: int, end: int) -> None:
    store.write("x", b"0123456789")
    with pytest.raises(EOFError):
        store.read_range("x", first, end)


def test_listing_is_sorted_by_bytes_and_stays_below_its_folder(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.storage.s3.PAGE_KEYS", 2)
    for path in reversed(ODD_NAMES):
        store.write(path, path.encode())
    assert list(store.list()) == sorted(ODD_NAMES, key=str.encode) == ODD_NAMES
    assert list(store.list_sizes()) == [(path, len(path.encode())) for path in ODD_NAMES]
    assert list(store.list("a")) == ["a/b", "a/c/d"]
    assert list(store.list("nothing")) == []
    assert list(store.list_sizes("a/c")) == [("a/c/d", 5)]


@pytest.mark.parametrize("prefix", ["../x", "a//b"])
def test_no_listing_leads_out(store: Store, prefix: str) -> None:
    for listing in (store.list, store.list_sizes):
        with pytest.raises(ValueError, match="relative path"):
            list(listing(prefix))


def test_keys_that_are_no_plain_paths_are_listed_and_never_read(any_bucket: str, client: Any) -> None:
    keys = ["../up", "/lead", "a/../../up", "a/./b", "a//b", "folder/"]
    for key in keys:
        client.put_object(Bucket=any_bucket, Key=f"data/{key}", Body=b"secret")
    store = open_store(f"s3://{any_bucket}/data")
    assert list(store.list()) == keys
    assert list(store.list_sizes()) == [(key, 6) for key in keys]
    for key in keys:
        with pytest.raises(ValueError, match="relative path"):
            store.read(key)


def test_a_stream_gives_what_is_asked(store: Store) -> None:
    data = os.urandom(700_001)
    store.write("x", data)
    with store.open_read("x") as file:
        assert file.read(3) == data[:3]
        assert file.read(600_000) == data[3:600_003]
        assert file.read(600_000) == data[600_003:]
        assert file.read(1) == b""
    store.write("empty", b"")
    with store.open_read("empty") as file:
        assert file.read() == b""


def test_a_tar_is_read_as_a_stream(store: Store) -> None:
    with store.create("a.tar") as file, tarfile.open(fileobj=file, mode="w") as tar:
        tar.add(__file__, "one.py")
        tar.add(tarfile.__file__, "two.py")
    with store.open_read("a.tar") as file, tarfile.open(fileobj=file, mode="r|") as tar:
        sizes = [(member.name, len(body.read())) for member in tar if (body := tar.extractfile(member))]
    assert sizes == [("one.py", Path(__file__).stat().st_size), ("two.py", Path(tarfile.__file__).stat().st_size)]


def test_only_a_folder_has_files(store: Store) -> None:
    store.write("a/x", b"here")
    path = store.local_path("a/x")
    assert (path.read_bytes() if path else None) == (b"here" if isinstance(store, LocalStore) else None)


def test_a_block_that_fails_writes_nothing(store: Store) -> None:
    store.write("x", b"before")

    def write_half() -> None:
        with store.create("x") as file:
            file.write(b"half")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_half()
    assert store.read("x") == b"before"
    assert list(store.list()) == ["x"]


def test_files_go_in_whole(store: Store) -> None:
    data = os.urandom(70 << 20)  # two parts of a multipart upload, and a bit
    with store.create("big") as file:
        file.write(data)
    assert store.size("big") == 70 << 20
    assert store.read_range("big", 64 << 20, 70 << 20) == data[64 << 20 :]


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", ""])
def test_no_path_leads_out(store: Store, path: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        store.write(path, b"")
    with pytest.raises(ValueError, match="relative path"):
        store.read(path)


@pytest.mark.parametrize("url", ["http://me:hidden@host/x", "s3://me:hidden@bucket/x"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UserError) as caught:
        open_store(url)
    assert "hidden" not in str(caught.value)


def test_a_folder_url_is_a_local_store(tmp_path: Path) -> None:
    assert open_store(f"{tmp_path}/x/") == LocalStore(str(tmp_path / "x"))


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
    with pytest.raises(ImageRefusedError) as caught:
        Buckets().locate(url)
    assert "a:b" not in str(caught.value)
