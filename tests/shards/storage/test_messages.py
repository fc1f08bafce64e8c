"""What storage says when it refuses or fails, each message once."""

import errno
import io
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest

from shards.storage.ahead import in_order
from shards.storage.local import LocalStore
from shards.storage.objects import checked_path
from shards.storage.ranges import ReusedMemory
from shards.storage.retries import RetryConfig
from shards.storage.s3 import S3Store
from shards.storage.s3_client import ClientOfProcess, probing_client, storage_errors
from shards.storage.temporary import temporary_file
from tests.rigs.messages import Row, row, table
from tests.shards.storage.test_ranges import freed
from tests.shards.storage.test_s3_read import DATA, answer, read_of


def ordered(_: Path, threads: int, window: int) -> None:
    list(in_order(str, [1], threads=threads, window=window))


def file_in_the_way(folder: Path) -> None:
    (folder / "file").write_bytes(b"")
    LocalStore(str(folder / "file")).write("x", b"")


def writing_into(tmp_path: Path, folder: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    LocalStore(str(tmp_path / folder)).write("x", b"")


def fault_of_a_disk(folder: Path, code: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:

        def fail(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(Path, "mkdir", fail)
        LocalStore(str(folder / "a")).write("x", b"")


def reading_a(folder: Path, kind: str) -> None:
    path = folder / "it"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    LocalStore(str(folder)).read("it")


def path_of_an_object(_: Path, path: str) -> None:
    checked_path(path)


def too_much_memory(_: Path) -> None:
    memory = ReusedMemory()
    memory.give_back(None)
    memory.give_back(b"bytes")
    freed(memory, 2)
    memory.take(1 << 60)


def retry_config(_: Path, values: dict[str, float]) -> None:
    RetryConfig(**values)  # type: ignore[arg-type]


def ranges_ignored(_: Path) -> None:
    read_of(lambda _: {"Body": io.BytesIO(DATA), "ContentLength": len(DATA), "ETag": "a"}, 10, 20).data()


def replaced_object(_: Path, names: tuple[str, ...]) -> None:
    number = 0

    def answered(request: dict[str, str]) -> dict[str, Any]:
        nonlocal number
        number += 1
        return answer(request, most=100, **dict.fromkeys(names, f"W/{number}"))

    read_of(answered, 0, 1000).data()


def no_temporary_folder(_: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:

        def fails() -> None:
            raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")

        monkeypatch.setattr(tempfile, "TemporaryFile", fails)
        temporary_file().__enter__()


def aws_settings(folder: Path, /, config: str = "", *, asks: str = "a store", **variables: str) -> None:
    """Uses a bucket, or makes a probe's client, with a configuration file, variables and, unless given, no keys."""
    (folder / "config").write_text(config)
    files = {"AWS_CONFIG_FILE": str(folder / "config"), "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(folder)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in (files | away | variables).items():
            monkeypatch.setenv(name, value)
        if asks == "a store":
            S3Store(bucket="b").exists("x")
        else:
            probing_client(profile="me")


def login_ended(_: Path) -> None:
    with storage_errors("x", bucket="b", url="s3://b", clients=ClientOfProcess()):
        raise botocore.exceptions.LoginRefreshRequired()


KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
SSO = "sso_account_id = 1\nsso_role_name = r\nsso_region = us-east-1\nsso_start_url = https://x\nregion = us-east-1\n"
CORRECT = "correct ~/.aws/config, ~/.aws/credentials or the AWS_ variable with this value"
OR_KEYS = "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


@table(
    # ahead
    row("threads and window: 0 1", ordered, 0, 1).says(
        "ValueError: threads is 0, window is 1: both must be at least 1"
    ),
    row("threads and window: 1 0", ordered, 1, 0).says(
        "ValueError: threads is 1, window is 0: both must be at least 1"
    ),
    # local
    row("a file in the way of a folder", file_in_the_way).says(
        "cannot write DIR/file/x: File exists; use a folder that this user may write to"
    ),
    row("a file system that takes no folders", writing_into, "/proc/nope").says(
        "cannot write /proc/nope/x: No such file or directory; use a folder that this user may write to"
    ),
    row("a name that is too long", writing_into, "name" * 100).says(
        "cannot write DIR/namename…/x: File name too long; use a folder that this user may write to"
    ),
    row("a link to itself", writing_into, "loop/x").says(
        "cannot write DIR/loop/x/x: Too many levels of symbolic links; use a folder that this user may write to"
    ),
    row("a fault of a disk, 28", fault_of_a_disk, errno.ENOSPC).says("OSError: [Errno 28] No space left on device"),
    row("a fault of a disk, 122", fault_of_a_disk, errno.EDQUOT).says("OSError: [Errno 122] Disk quota exceeded"),
    row("a fault of a disk, 5", fault_of_a_disk, errno.EIO).says("OSError: [Errno 5] Input/output error"),
    row("a fault of a disk, 116", fault_of_a_disk, errno.ESTALE).says("OSError: [Errno 116] Stale file handle"),
    *(
        row(f"not a regular file, {kind}", reading_a, kind).says(
            "InvalidDataError: DIR/it is not a regular file; give a file, not a pipe or a device"
        )
        for kind in ("pipe", "device", "socket")
    ),
    # objects
    row("path of an object: ", path_of_an_object, "").says(
        "ValueError: object path '' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("path of an object: /etc/passwd", path_of_an_object, "/etc/passwd").says(
        "ValueError: object path '/etc/passwd' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("path of an object: ../x", path_of_an_object, "../x").says(
        "ValueError: object path '../x' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("path of an object: a/../../x", path_of_an_object, "a/../../x").says(
        "ValueError: object path 'a/../../x' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("path of an object: a/./b", path_of_an_object, "a/./b").says(
        "ValueError: object path 'a/./b' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("path of an object: a//b", path_of_an_object, "a//b").says(
        "ValueError: object path 'a//b' is not a plain relative path: it has an empty part, the one between the "
        "two slashes after 'a'; copy it to a name without //"
    ),
    row("path of an object: a\\x00b", path_of_an_object, "a\0b").says(
        "ValueError: object path 'a\\x00b' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("the empty part of a path", lambda _: checked_path("a/b//c")).says(
        "ValueError: object path 'a/b//c' is not a plain relative path: it has an empty part, the one between the "
        "two slashes after 'a/b'; copy it to a name without //"
    ),
    # ranges
    row(
        "more memory than there is",
        too_much_memory,
    ).says("MemoryError: 1152921504606846976 bytes for a block of images: Cannot allocate memory"),
    # retries
    row("retries, {'fruitless_tries': 0}", retry_config, {"fruitless_tries": 0}).says(
        "fruitless_tries is 0; allowed: 1 or more"
    ),
    row("retries, {'backoff_seconds': -1.0", retry_config, {"backoff_seconds": -1.0}).says(
        "backoff_seconds is -1.0; allowed: 0 or more"
    ),
    row("retries, {'budget_reserve': -1.0}", retry_config, {"budget_reserve": -1.0}).says(
        "budget_reserve is -1.0; allowed: 0 or more"
    ),
    row("retries, {'budget_share': -0.1}", retry_config, {"budget_share": -0.1}).says(
        "budget_share is -0.1; allowed: 0 or more"
    ),
    # s3_client
    row("no SSO login", aws_settings, f"[default]\n{SSO}").says(
        "UnreachableError: the S3 credentials for s3://b could not be fetched (SSOTokenLoadError); run aws sso login "
        f"with the same profile, {OR_KEYS}"
    ),
    row("an AWS login that has ended", login_ended).says(
        "UnreachableError: the S3 credentials for s3://b could not be fetched (LoginRefreshRequired); run aws login "
        f"with the same profile, {OR_KEYS}"
    ),
    row(
        "no file with a web identity",
        aws_settings,
        AWS_ROLE_ARN="arn:aws:iam::123456789012:role/x",
        AWS_WEB_IDENTITY_TOKEN_FILE="/nonexist",
    ).says(
        "UnreachableError: the S3 credentials for s3://b could not be fetched (FileNotFoundError: /nonexist); make "
        f"this file readable or correct its path, {OR_KEYS}"
    ),
    *(
        row(f"a credential process: {command}", aws_settings, f"[default]\ncredential_process = {command}\n").says(
            f"UnreachableError: the S3 credentials for s3://b could not be fetched ({why}); try again, {OR_KEYS}"
        )
        for command, why in (("echo hidden", "JSONDecodeError"), ("KEY=hidden run", "FileNotFoundError"))
    ),
    row(
        "a probe's credential process", aws_settings, "[profile me]\ncredential_process = echo hidden\n", asks="a probe"
    ).says(
        "UnreachableError: the S3 credentials for profile 'me' could not be fetched (JSONDecodeError); try "
        f"again, {OR_KEYS}"
    ),
    *(
        row(f"a broken configuration for {asks}", aws_settings, "[default\n", asks=asks, **KEYS).says(
            f"S3 cannot be used: Unable to parse config file: DIR/config; {CORRECT}"
        )
        for asks in ("a store", "a probe")
    ),
    row("an addressing style", aws_settings, "[default]\ns3 =\n  addressing_style = foo\n", **KEYS).says(
        "S3 cannot be used: S3 addressing style foo is invalid. Valid options are: 'auto', 'virtual', and 'path'; "
        f"{CORRECT}"
    ),
    row("a source profile", aws_settings, "[default]\nrole_arn = x\nsource_profile = nope\n").says(
        f'S3 cannot be used: The source_profile "nope" referenced in the profile "default" does not exist; {CORRECT}'
    ),
    *(
        row(f"{name}={value}", aws_settings, **variables, **{name: value}).says(f"S3 cannot be used: {said}; {CORRECT}")
        for name, value, said, variables in (
            ("AWS_DEFAULTS_MODE", "foo", "Client configured with invalid defaults mode: foo. …", KEYS),
            (
                "AWS_ACCOUNT_ID_ENDPOINT_MODE",
                "foo",
                "The configured value 'foo' for 'account_id_endpoint_mode' …",
                KEYS,
            ),
            (
                "AWS_REQUEST_MIN_COMPRESSION_SIZE_BYTES",
                "abc",
                'Invalid value "abc" for request_min_compression_…',
                KEYS,
            ),
            ("AWS_METADATA_SERVICE_TIMEOUT", "abc", "invalid literal for int() with base 10: 'abc'", {}),
        )
    ),
    # s3_read
    row("a storage that ignores ranges", ranges_ignored).says(
        "BadAnswerError: the range asked was ignored 6 times, last in s3://b/x at byte 10"
    ),
    *(
        row(f"an object that is replaced, known by, {names}", replaced_object, names).says(
            "ReplacedError: s3://b/x was replaced while it was read"
        )
        for names in (("ETag",), ("LastModified",))
    ),
    # temporary
    row("no folder for temporary files", no_temporary_folder).says(
        "StorageError: No usable temporary directory found in ['/tmp', '/var/tmp']; make room there, or set "
        "TMPDIR to another folder"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
