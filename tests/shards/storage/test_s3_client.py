"""S3's faults end in messages that say what to do, and that hold no secret."""

import io
import json
import os
import re
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from functools import partial
from pathlib import Path

import botocore.exceptions
import pytest
import urllib3
from botocore.response import StreamingBody

from shards.errors import StorageError, UnreachableError, UserError
from shards.files.local_files import write_whole
from shards.storage.retries import RetryConfig
from shards.storage.s3 import S3Store
from shards.storage.s3_client import (
    Body,
    ClientOfProcess,
    DeleteRefusedError,
    RenewedCredentials,
    RequestFault,
    fault_of,
    storage_errors,
)
from shards.store import open_store
from tests.rigs.ceph import Gateway
from tests.rigs.faulty_connection import FaultyProxy
from tests.rigs.faulty_proxy import faulty_proxy
from tests.rigs.s3 import free_port


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


@pytest.mark.parametrize("action", ["read", "exists", "list", "write", "create"])
def test_a_missing_bucket_is_said_to_be_missing(s3_endpoint: str, action: str) -> None:
    store = open_store("s3://no-such-bucket/x")

    def create() -> None:
        with store.create("a") as file:
            file.write(b"")

    calls: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("a"),
        "exists": lambda: store.exists("a"),
        "list": lambda: list(store.list()),
        "write": partial(store.write, "a", b""),
        "create": create,
    }
    with pytest.raises(UserError, match=rf"no bucket 'no-such-bucket' at {s3_endpoint}"):
        calls[action]()


def test_an_unreachable_server_is_said_to_be_unreachable(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UnreachableError, match=r"unreachable.*AWS_ENDPOINT_URL"):
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
        pytest.param(botocore.exceptions.UnauthorizedSSOTokenError(), id="a login that has ended"),
        pytest.param(botocore.exceptions.ReadTimeoutError(endpoint_url="x"), id="a slow answer"),
        pytest.param(botocore.exceptions.ConnectTimeoutError(endpoint_url="x"), id="no answer"),
    ],
)
@pytest.mark.parametrize(
    ("has_answered", "family"),
    [
        pytest.param(False, UnreachableError, id="before the first answer, the address may be wrong"),
        pytest.param(True, StorageError, id="later, the storage is away"),
    ],
)
def test_what_may_pass_is_the_storages_fault_once_it_has_answered(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, fault: Exception, has_answered: bool, family: type[Exception]
) -> None:
    monkeypatch.setattr("shards.storage.s3.RETRIES", RetryConfig(backoff_seconds=0.001))
    store = open_store(f"s3://{s3_bucket}")
    assert isinstance(store, S3Store)
    assert not (has_answered and store.exists("a"))

    def fail(**_: object) -> None:
        raise fault

    monkeypatch.setattr(store.clients.get(), "get_object", fail)
    with pytest.raises(family, match=f"s3://{s3_bucket}"):
        store.read("a")


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("127.0.0.1:1", r"unreachable.*http://\*\*\*@127\.0\.0\.1:1 "),
        ("127.0.0.1:99999", r"http://\*\*\*@127\.0\.0\.1:99999.*AWS_ENDPOINT_URL"),
    ],
)
def test_an_endpoint_with_a_password_is_shown_without_it(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, host: str, message: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://me:hidden@{host}")
    with pytest.raises(UserError, match=message) as caught:
        open_store("s3://bucket/x").read("a")
    assert "hidden" not in str(caught.value)


def test_what_a_credential_process_says_is_not_repeated(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    config.write_text("[profile me]\ncredential_process = sh -c 'echo the key is hidden >&2; exit 1'\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "me")
    with pytest.raises(UnreachableError, match=r"could not be fetched \(CredentialRetrievalError\)") as caught:
        open_store("s3://bucket/x").read("a")
    assert "hidden" not in str(caught.value)


@pytest.mark.rgw
@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_ceph_denies_wrong_keys(ceph_bucket: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "hidden")
    with pytest.raises(UserError, match=rf"access denied.*: GetObject of s3://{ceph_bucket}/a; ") as caught:
        open_store(f"s3://{ceph_bucket}").read("a")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "fault"),
    [
        pytest.param(
            503, "SlowDown", RequestFault(name="503 SlowDown", is_throttle=True), id="Amazon's way to say slower"
        ),
        pytest.param(503, "503", RequestFault(name="503", is_throttle=True), id="a gateway without words"),
        pytest.param(
            429, "TooManyRequests", RequestFault(name="429 TooManyRequests", is_throttle=True), id="others' way"
        ),
        pytest.param(
            500, "InternalError", RequestFault(name="500 InternalError", is_throttle=False), id="a fault of theirs"
        ),
        pytest.param(502, "502", RequestFault(name="502", is_throttle=False), id="a balancer without servers"),
        pytest.param(504, "504", RequestFault(name="504", is_throttle=False), id="a balancer whose server is slow"),
        pytest.param(
            400, "RequestTimeout", RequestFault(name="400 RequestTimeout", is_throttle=False), id="a slow client"
        ),
        pytest.param(404, "NoSuchKey", None, id="it stays missing"),
        pytest.param(403, "AccessDenied", None, id="it stays denied"),
        pytest.param(412, "PreconditionFailed", None, id="it stays replaced"),
        pytest.param(416, "InvalidRange", None, id="it stays short"),
        pytest.param(501, "NotImplemented", None, id="it will not be implemented meanwhile"),
    ],
)
def test_what_may_pass_is_asked_again(status: int, code: str, fault: RequestFault | None) -> None:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    assert fault_of(botocore.exceptions.ClientError(answer, "GetObject")) == fault


def test_a_broken_connection_is_asked_again() -> None:
    error = botocore.exceptions.EndpointConnectionError(endpoint_url="x")
    assert fault_of(error) == RequestFault(name="EndpointConnectionError", is_throttle=False, is_answer=False)


def test_what_nobody_answered_is_told_from_answers() -> None:
    error = botocore.exceptions.CredentialRetrievalError(provider="custom-process", error_msg="hidden")
    assert fault_of(error) == RequestFault(name="CredentialRetrievalError", is_throttle=False, is_answer=False)
    answered = {"Error": {"Code": "500"}, "ResponseMetadata": {"HTTPStatusCode": 500}}
    fault = fault_of(botocore.exceptions.ClientError(answered, "GetObject"))
    assert fault
    assert fault.is_answer


def test_credentials_that_come_the_second_time_do(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.storage.s3.RETRIES", RetryConfig(backoff_seconds=0.001))
    store = S3Store(bucket=s3_bucket)
    store.write("a", b"data")
    client = store.clients.get()
    faults, get = [botocore.exceptions.CredentialRetrievalError(provider="p", error_msg="")] * 3, client.get_object

    def fail_at_first(**request: str) -> object:
        if faults:
            raise faults.pop()
        return get(**request)

    monkeypatch.setattr(client, "get_object", fail_at_first)
    assert store.read("a") == b"data"
    assert store.traffic.counts().retries == 3


@pytest.mark.parametrize(
    "error",
    [
        urllib3.exceptions.SSLError(ssl.SSLError("DECRYPTION_FAILED_OR_BAD_RECORD_MAC")),
        urllib3.exceptions.DecodeError("gzip"),
        urllib3.exceptions.ProtocolError("reset"),
    ],
)
def test_any_fault_of_the_connection_breaks_a_body_off(error: Exception) -> None:
    class Raw(io.RawIOBase):
        def read(self, _: int = -1) -> bytes:
            raise error

        def readinto(self, _: object) -> int:
            raise error

    body = Body({"Body": StreamingBody(Raw(), 10)})
    assert body.read(4) == b""
    assert body.readinto(memoryview(bytearray(4))) == 0


@pytest.mark.parametrize(
    ("lines", "url"),
    [
        ("", "https://oss.example.com/bucket/key?"),
        ("s3 =\n  addressing_style = virtual\n", "https://bucket.oss.example.com/key?"),
        ("s3 =\n  addressing_style = path\n", "https://oss.example.com/bucket/key?"),
    ],
)
def test_buckets_are_addressed_as_the_aws_configuration_says(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, url: str
) -> None:
    """Few servers but Amazon's have a host name for each bucket; some have nothing else."""
    (tmp_path / "config").write_text(f"[default]\nregion = us-east-1\n{lines}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://oss.example.com")
    clients = ClientOfProcess()
    for client in (clients.get(), clients.fresh(), clients.retrying()):
        signed = client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "key"})
        assert signed.startswith(url)


def test_reads_are_tried_once_by_botocore_and_everything_else_more_often(s3_endpoint: str) -> None:
    """Attempts of two who both try again would multiply."""
    clients = ClientOfProcess()
    tries = [client.meta.config.retries["total_max_attempts"] for client in (clients.get(), clients.fresh())]
    assert tries == [1, 1]
    assert clients.retrying().meta.config.retries["total_max_attempts"] > 1
    assert clients.get() is clients.get()
    assert clients.get() is not clients.fresh()


def test_clients_are_not_carried_across_a_fork(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = ClientOfProcess()
    before = clients.get()
    monkeypatch.setattr("os.getpid", lambda: -2)
    assert clients.get() is not before


@pytest.mark.rgw
def test_a_small_body_of_ceph_comes_with_its_headers(ceph_bucket: str) -> None:
    """Without the acknowledgement of the headers, each would take at least 40 ms."""
    store = open_store(f"s3://{ceph_bucket}")
    store.write("x", b"0123456789")
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        assert store.read_range("x", 2, 5) == b"234"
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.035


@pytest.mark.parametrize(
    ("code", "minutes", "said"),
    [
        pytest.param("RequestTimeTooSkewed", 30, "30 minutes ahead of the server's; set the clock", id="fast"),
        pytest.param("RequestTimeTooSkewed", -60, "60 minutes behind the server's; set the clock", id="slow"),
        pytest.param("403", 1440, "1,440 minutes ahead of the server's; set the clock", id="a HEAD has no code"),
        pytest.param("RequestTimeTooSkewed", None, "because the clock of this machine is wrong; set", id="no date"),
        pytest.param("403", 5, r"access denied \(403\)", id="right enough"),
        pytest.param("AccessDenied", None, r"access denied \(AccessDenied\)", id="denied, no date"),
    ],
)
def test_a_wrong_clock_is_said_to_be_wrong(s3_endpoint: str, code: str, minutes: int | None, said: str) -> None:
    date = {} if minutes is None else {"date": formatdate(time.time() - 60 * minutes, usegmt=True)}
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 403, "HTTPHeaders": date}}
    error = botocore.exceptions.ClientError(response, "HeadObject")
    clients = ClientOfProcess()
    with pytest.raises(UserError, match=said), storage_errors("x", bucket="b", url="s3://b", clients=clients):
        raise error


@pytest.fixture
def proxy(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """In front of a server whose bucket has the object x; no credentials are in the environment."""
    S3Store(bucket=s3_bucket).write("x", b"0123456789")
    with faulty_proxy(os.environ["AWS_ENDPOINT_URL"]) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        monkeypatch.setattr("shards.storage.s3_client.PAUSE_SECONDS", 0.1)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        yield running


def keyed() -> ClientOfProcess:
    """Clients with a key, though none is in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "KEY")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        clients = ClientOfProcess()
        clients.get()
        return clients


@contextmanager
def renewed_once(is_so: Callable[[], bool], path: Path, text: str) -> Iterator[None]:
    """Replaces a file of credentials as soon as something inside the block waits for them."""
    is_over = threading.Event()

    def renew() -> None:
        while not is_so() and not is_over.wait(0.01):
            pass
        write_whole(path, text.encode())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
        assert is_so(), "it did not wait"
    finally:
        is_over.set()
        thread.join()


def keys_of(name: str, hidden: str = "secret") -> str:
    """A file of credentials."""
    return f"[default]\naws_access_key_id = {name}\naws_secret_access_key = {hidden}\n"


def created(store: S3Store, data: bytes) -> None:
    with store.create("y") as file:
        file.write(data)


OPERATIONS: dict[str, Callable[[S3Store], object]] = {
    "read": lambda store: store.read("x"),
    "read a range": lambda store: store.read_range("x", 2, 4),
    "size": lambda store: store.size("x"),
    "exists": lambda store: store.exists("z"),
    "list": lambda store: next(store.list()),
    "write": lambda store: store.write("y", b"1"),
    "create": lambda store: created(store, b"1"),
    "create in parts": lambda store: created(store, bytes(70 << 20)),
    "delete": lambda store: store.delete("y"),
}


def test_credentials_of_a_file_are_read_again_once_they_have_expired(
    s3_bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By every operation."""
    path = tmp_path / "credentials"
    path.write_text(keys_of("KEY0"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    store = S3Store(bucket=s3_bucket)
    assert store.exists("x")
    for number, operation in enumerate(OPERATIONS.values(), start=1):
        proxy.expired_keys, proxy.num_expired = frozenset({f"KEY{number - 1}"}), 0
        with renewed_once(lambda: proxy.num_expired > 0, path, keys_of(f"KEY{number}")):
            operation(store)
    proxy.expired_keys = frozenset({f"KEY{len(OPERATIONS)}"})
    late = S3Store(bucket=s3_bucket)
    with pytest.raises(UserError, match="have expired"):
        late.read("x")
    path.write_text(keys_of("NEW"))
    time.sleep(0.1)  # the chain is asked at most once in a while
    assert late.read("x") == b"0123456789", "others are tried, though the first were never accepted"


def test_a_process_of_a_run_that_was_let_in_waits_from_its_first_request_on(
    s3_bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as the writer of checkpoints."""
    path = tmp_path / "credentials"
    path.write_text(keys_of("OLD"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    proxy.expired_keys = frozenset({"OLD"})
    with renewed_once(lambda: proxy.num_expired > 1, path, keys_of("NEW")):
        assert open_store(f"s3://{s3_bucket}", was_let_in=True).exists("x")


def test_a_provider_that_answers_late_is_waited_for(
    s3_bucket: str,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whether it fails or says what has expired. It is asked for each request, as these expire within ten minutes."""

    def credentials(seconds: float) -> str:
        end = datetime.fromtimestamp(time.time() + seconds, tz=UTC).isoformat()
        return json.dumps({"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "S", "Expiration": end})

    path, config = tmp_path / "found.json", tmp_path / "config"
    config.write_text(f"[profile me]\ncredential_process = cat {path}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "me")
    caplog.set_level("INFO")
    path.write_text(credentials(300))
    store = S3Store(bucket=s3_bucket)
    assert store.exists("x")
    path.write_text(credentials(-1))
    with renewed_once(lambda: "(they have expired); waiting" in caplog.text, path, credentials(300)):
        assert store.read("x") == b"0123456789"
    path.unlink()
    with renewed_once(lambda: "(CredentialRetrievalError); waiting" in caplog.text, path, credentials(3600)):
        store.write("y", b"1")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (botocore.exceptions.UnauthorizedSSOTokenError(), "UnauthorizedSSOTokenError"),
        (botocore.exceptions.SSOTokenLoadError(error_msg=""), "SSOTokenLoadError"),
        (botocore.exceptions.LoginRefreshRequired(), "LoginRefreshRequired"),
        (FileNotFoundError(2, "No such file", "/token"), "FileNotFoundError: /token"),
        (FileNotFoundError(2, "No such file", "KEY=hidden"), "FileNotFoundError"),
        (ValueError("hidden"), "ValueError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_login_or_a_file_that_comes_back_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception, reason: str
) -> None:
    """In a run whose credentials were accepted, and in no other."""
    faults = list[Exception]()

    class Found:
        access_key, secret_key, token, method = "A", "S", None, "sso"

        def get_frozen_credentials(self) -> "Found":
            if faults:
                raise faults.pop()
            return self

    monkeypatch.setattr("shards.storage.s3_client.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("shards.storage.s3_client._credentials", lambda _: Found())
    caplog.set_level("INFO")
    accepted, late = RenewedCredentials(is_accepted=True), RenewedCredentials()
    faults += [fault] * 4
    assert accepted.get_frozen_credentials().access_key == "A"
    assert f"({reason}); waiting" in caplog.text
    assert "hidden" not in caplog.text
    faults += [fault] * 4
    with pytest.raises(botocore.exceptions.BotoCoreError):
        late.get_frozen_credentials()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_credentials_that_stay_expired_end_after_the_deadline_and_at_once_if_they_were_never_accepted(
    s3_bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OLD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("shards.storage.s3_client.DEADLINE_SECONDS", 2.0)
    monkeypatch.setattr("shards.storage.s3.RETRIES", RetryConfig(backoff_seconds=0.05, deadline_seconds=2.0))

    accepted, new = S3Store(bucket=s3_bucket), S3Store(bucket=s3_bucket)
    OPERATIONS[operation](accepted)
    proxy.expired_keys = frozenset({"OLD"})
    with pytest.raises(UserError, match=r"credentials for bucket .* have expired \(ExpiredToken\); renew them"):
        OPERATIONS[operation](new)
    assert proxy.num_expired == 1
    with pytest.raises(StorageError, match="ExpiredToken"):
        OPERATIONS[operation](accepted)
    assert proxy.num_expired > 3


@dataclass(kw_only=True)
class Rotation:
    """A user of Ceph whose key is in a file, and nowhere in the environment."""

    gateway: Gateway
    path: Path
    key: str = ""
    secret: str = ""

    def replace(self, *, same_name: bool = False, is_told: bool = True) -> None:
        """Gives the user another key, or another secret for the key, and writes it to the file unless `is_told` is
        false. The old one is refused from then on."""
        old, self.secret = self.key, secrets.token_hex(20)
        self.key = old if same_name else secrets.token_hex(10)
        words = ("--uid=test", "--key-type=s3", "--access-key")
        self.gateway.admin("key", "create", *words, self.key, "--secret-key", self.secret)
        if old not in ("", self.key):
            self.gateway.admin("key", "rm", *words, old)
        if is_told:
            self.tell()

    def tell(self) -> None:
        """Writes the key to the file."""
        write_whole(self.path, keys_of(self.key, self.secret).encode())


@pytest.fixture
def rotation(
    ceph_gateway: Gateway, ceph_bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Rotation]:
    """The bucket has the object x."""
    S3Store(bucket=ceph_bucket).write("x", b"0123456789")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr("shards.storage.s3_client.PAUSE_SECONDS", 0.1)
    user = Rotation(gateway=ceph_gateway, path=tmp_path / "credentials")
    user.replace()
    yield user
    ceph_gateway.admin("key", "rm", "--uid=test", "--key-type=s3", "--access-key", user.key)


@pytest.mark.rgw
@pytest.mark.parametrize("same_name", [False, True], ids=["another key", "another secret"])
def test_a_key_of_ceph_that_was_replaced_is_read_again(rotation: Rotation, ceph_bucket: str, same_name: bool) -> None:
    """By every operation, on a server that refuses the old one with InvalidAccessKeyId or SignatureDoesNotMatch."""
    store = S3Store(bucket=ceph_bucket)
    assert store.exists("x")
    for operation in OPERATIONS.values():
        rotation.replace(same_name=same_name)
        operation(store)


@pytest.mark.rgw
@pytest.mark.parametrize("operation", ["read", "exists", "write"])
def test_a_key_of_ceph_that_is_replaced_in_the_file_later_is_waited_for(
    rotation: Rotation, ceph_bucket: str, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Until the deadline, if the old one was accepted. One that was never accepted is wrong."""
    store, late = S3Store(bucket=ceph_bucket), S3Store(bucket=ceph_bucket)
    assert store.exists("x")
    rotation.replace(is_told=False)
    timer = threading.Timer(1.0, rotation.tell)
    timer.start()
    OPERATIONS[operation](store)
    timer.join()
    rotation.replace(is_told=False)
    with pytest.raises(UserError, match=r"access denied \(InvalidAccessKeyId\)"):
        OPERATIONS[operation](late)
    monkeypatch.setattr("shards.storage.s3_client.DEADLINE_SECONDS", 1.0)
    monkeypatch.setattr("shards.storage.s3.RETRIES", RetryConfig(backoff_seconds=0.05, deadline_seconds=1.0))
    with pytest.raises(StorageError, match="InvalidAccessKeyId"):
        OPERATIONS[operation](S3Store(bucket=ceph_bucket, clients=store.clients))


@pytest.mark.parametrize("operation", ["read", "exists", "list", "write"])
def test_a_redirect_names_the_region_and_what_to_set(s3_bucket: str, proxy: FaultyProxy, operation: str) -> None:
    proxy.region = "eu-west-3"
    with pytest.raises(UserError, match=r"is in the region eu-west-3 \(.*; set AWS_DEFAULT_REGION=eu-west-3$"):
        OPERATIONS[operation](S3Store(bucket=s3_bucket, clients=keyed()))


@pytest.mark.parametrize(
    ("region", "endpoint", "said"),
    [
        (
            "eu-west-3",
            "s3.eu.example.com:8443",
            "AWS_DEFAULT_REGION=eu-west-3, and AWS_ENDPOINT_URL to the server s3.eu",
        ),
        ("", "", r"is in another region \(PermanentRedirect\); set AWS_DEFAULT_REGION to its region$"),
        ("x\x1b[2J", "a b; rm", r"is in another region \(PermanentRedirect\); set AWS_DEFAULT_REGION to its region$"),
    ],
)
def test_what_a_redirect_says_is_checked(s3_endpoint: str, region: str, endpoint: str, said: str) -> None:
    headers = {"HTTPHeaders": {"x-amz-bucket-region": region}}
    response = {"Error": {"Code": "PermanentRedirect", "Endpoint": endpoint}, "ResponseMetadata": headers}
    error = botocore.exceptions.ClientError(response, "GetObject")
    clients = ClientOfProcess()
    with pytest.raises(UserError, match=said), storage_errors("x", bucket="b", url="s3://b", clients=clients):
        raise error


@pytest.mark.rgw
def test_a_bucket_of_ceph_that_refuses_to_delete_is_named(ceph_bucket: str) -> None:
    store = S3Store(bucket=ceph_bucket, prefix="run")
    store.write("x", b"1")
    deny = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:DeleteObject",
        "Resource": f"arn:aws:s3:::{ceph_bucket}/*",
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [deny]})
    store.clients.retrying().put_bucket_policy(Bucket=ceph_bucket, Policy=policy)
    with pytest.raises(DeleteRefusedError, match=r"refuses to delete \(AccessDenied\), as object lock does; allow"):
        store.delete("x")
