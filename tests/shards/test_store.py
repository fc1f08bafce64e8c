"""Folder and S3 behave the same; S3's faults end in messages that say what to do."""

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import boto3
import botocore.exceptions
import pytest

from shards.errors import StorageError, UserError
from shards.store import LocalStore, MissingObjectError, S3Store, Store, open_store
from tests.rigs.cutting_proxy import CuttingProxy, cutting_proxy
from tests.rigs.s3 import free_port


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "root"))
    return open_store(f"s3://{request.getfixturevalue('s3_bucket')}/some/prefix")


def test_what_was_written_is_read(store: Store) -> None:
    store.write("a/b.bin", b"0123456789")
    assert store.read("a/b.bin") == b"0123456789"
    assert store.read_range("a/b.bin", 2, 5) == b"234"
    assert store.read_range("a/b.bin", 4, 4) == b""
    assert store.size("a/b.bin") == 10
    assert store.exists("a/b.bin")
    assert store.child("a").read("b.bin") == b"0123456789"


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


@pytest.mark.parametrize("action", ["read", "read_range", "size"])
def test_a_missing_object_is_named(store: Store, action: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("no/such"),
        "read_range": lambda: store.read_range("no/such", 0, 4),
        "size": lambda: store.size("no/such"),
    }
    with pytest.raises(MissingObjectError, match="no/such"):
        calls[action]()


@pytest.mark.parametrize(("first", "end"), [(5, 11), (10, 12), (50, 60)])
def test_a_range_behind_the_end_is_never_short(store: Store, first: int, end: int) -> None:
    store.write("x", b"0123456789")
    with pytest.raises(EOFError):
        store.read_range("x", first, end)


def test_listing_is_sorted_as_strings_and_stays_below_its_folder(store: Store) -> None:
    for path in ("a/b", "a-b", "a/c/d", "ab/x", "z"):
        store.write(path, b"")
    assert list(store.list()) == ["a-b", "a/b", "a/c/d", "ab/x", "z"]
    assert list(store.list("a")) == ["a/b", "a/c/d"]
    assert list(store.list("nothing")) == []
    assert list(store.child("a").list()) == ["b", "c/d"]


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


def test_files_go_in_whole(store: Store, tmp_path: Path) -> None:
    local = tmp_path / "file"
    local.write_bytes(os.urandom(70 << 20))  # two parts of a multipart upload, and a bit
    store.write_file("big", local)
    assert store.size("big") == 70 << 20
    assert store.read_range("big", 64 << 20, 70 << 20) == local.read_bytes()[64 << 20 :]


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", ""])
def test_no_path_leads_out(store: Store, path: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        store.write(path, b"")
    with pytest.raises(ValueError, match="relative path"):
        store.read(path)


@pytest.mark.parametrize("url", ["", "http://host/x", "s3://", "s3:///x"])
def test_urls_that_are_no_store_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="s3://bucket/prefix"):
        open_store(url)


@pytest.mark.parametrize("prefix", ["a//b", "../x", "a/./b"])
def test_a_prefix_with_two_spellings_is_refused(prefix: str) -> None:
    with pytest.raises(UserError, match=rf"cannot open 's3://bucket/{re.escape(prefix)}'.*plain relative path"):
        open_store(f"s3://bucket/{prefix}")


def test_a_name_that_no_bucket_can_have_is_the_users_mistake(s3_endpoint: str) -> None:
    with pytest.raises(UserError, match=r"s3://Bad_Bucket!/x.*Invalid bucket name.*correct the URL") as caught:
        open_store("s3://Bad_Bucket!/x").read("a")
    assert type(caught.value) is UserError
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "http://", "http://127.0.0.1:99999", "localhost"])
def test_an_endpoint_that_is_no_url_is_the_users_mistake(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(UserError, match=rf"{re.escape(endpoint)}.*AWS_ENDPOINT_URL"):
        open_store("s3://bucket/x").read("a")


@pytest.mark.parametrize("action", ["read", "exists", "list", "write", "write_file"])
def test_a_missing_bucket_is_said_to_be_missing(s3_endpoint: str, action: str) -> None:
    store = open_store("s3://no-such-bucket/x")
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("a"),
        "exists": lambda: store.exists("a"),
        "list": lambda: list(store.list()),
        "write": partial(store.write, "a", b""),
        "write_file": partial(store.write_file, "a", Path(__file__)),
    }
    with pytest.raises(UserError, match=rf"no bucket 'no-such-bucket' at {s3_endpoint}"):
        calls[action]()


def test_an_unreachable_server_is_said_to_be_unreachable(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StorageError, match=r"unreachable.*AWS_ENDPOINT_URL"):
        open_store("s3://bucket/x").read("a")


def test_missing_credentials_are_said_to_be_missing(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match=r"no usable S3 credentials.*AWS_ACCESS_KEY_ID") as caught:
        open_store("s3://bucket/x").read("a")
    assert type(caught.value) is UserError, "trying again gives no credentials"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            botocore.exceptions.CredentialRetrievalError(provider="custom-process", error_msg="timed out"),
            id="a credential process that failed",
        ),
        pytest.param(
            botocore.exceptions.TokenRetrievalError(provider="sso", error_msg="timed out"), id="a token that failed"
        ),
        pytest.param(botocore.exceptions.MetadataRetrievalError(error_msg="timed out"), id="a metadata service"),
        pytest.param(botocore.exceptions.ReadTimeoutError(endpoint_url="x"), id="a slow answer"),
        pytest.param(botocore.exceptions.ConnectTimeoutError(endpoint_url="x"), id="no answer"),
    ],
)
def test_what_may_pass_is_the_storages_fault(s3_bucket: str, monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    store = open_store(f"s3://{s3_bucket}")
    assert isinstance(store, S3Store)

    def fail(**_: object) -> None:
        raise fault

    monkeypatch.setattr(store.clients.get(), "get_object", fail)
    with pytest.raises(StorageError, match=f"s3://{s3_bucket}"):
        store.read("a")


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingProxy]:
    with cutting_proxy(s3_endpoint) as running:
        monkeypatch.setattr("shards.store.BACKOFF_SECONDS", 0.001)
        yield running


@pytest.fixture
def behind_proxy(s3_bucket: str, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store whose reads go through the proxy, with one object of 1000 bytes."""
    open_store(f"s3://{s3_bucket}").write("x", bytes(range(250)) * 4)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return open_store(f"s3://{s3_bucket}")


@pytest.mark.parametrize(
    ("cuts", "ranges"),
    [
        ([], ["bytes=100-899"]),
        ([300], ["bytes=100-899", "bytes=400-899"]),
        ([0, 1, 798], ["bytes=100-899", "bytes=100-899", "bytes=101-899", "bytes=899-899"]),
    ],
)
def test_a_broken_body_goes_on_from_its_last_good_byte(
    behind_proxy: Store, proxy: CuttingProxy, cuts: list[int], ranges: list[str]
) -> None:
    proxy.cuts = list(cuts)
    assert behind_proxy.read_range("x", 100, 900) == (bytes(range(250)) * 4)[100:900]
    assert proxy.ranges == ranges


def test_a_broken_whole_read_goes_on_too(behind_proxy: Store, proxy: CuttingProxy) -> None:
    proxy.cuts = [10]
    assert behind_proxy.read("x") == bytes(range(250)) * 4
    assert proxy.ranges == ["", "bytes=10-999"]


def test_attempts_are_bounded(behind_proxy: Store, proxy: CuttingProxy) -> None:
    proxy.cuts = [1] * 20
    with pytest.raises(ConnectionError, match=r"broke off 6 times, last in .* at byte 6"):
        behind_proxy.read("x")


def test_one_client_a_process_and_shared_by_children(s3_bucket: str) -> None:
    store = open_store(f"s3://{s3_bucket}/a")
    child = store.child("b")
    assert isinstance(store, S3Store)
    assert isinstance(child, S3Store)
    assert store.clients.get() is child.clients.get()
    assert store.url == f"s3://{s3_bucket}/a"


def test_a_replaced_object_is_not_mixed(
    behind_proxy: Store, proxy: CuttingProxy, s3_bucket: str, s3_endpoint: str
) -> None:
    client = boto3.session.Session().client("s3", endpoint_url=s3_endpoint)

    class ReplaceAtFirstCut(list[int]):
        def pop(self, index: int = -1, /) -> int:  # type: ignore[override]
            client.put_object(Bucket=s3_bucket, Key="x", Body=b"y" * 1000)
            return super().pop(index)

    proxy.cuts = ReplaceAtFirstCut([10])
    with pytest.raises(ConnectionError, match="replaced"):
        behind_proxy.read("x")


def test_a_folder_url_is_a_local_store(tmp_path: Path) -> None:
    assert open_store(f"{tmp_path}/x/") == LocalStore(str(tmp_path / "x"))
