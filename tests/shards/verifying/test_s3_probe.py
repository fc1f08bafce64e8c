"""The probe of a store on real servers, on one that does not do what Patchline relies on, and on none at all."""

import io
import secrets
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from shards.errors import Finding
from shards.storage.s3_client import probing_client
from shards.verifying.s3_probe import probe_store, unreachable
from tests.rigs.faulty_proxy import faulty_proxy
from tests.rigs.processes import patchline
from tests.rigs.s3 import free_port


def test_a_store_that_keeps_to_the_specification(any_bucket: str) -> None:
    """moto and Ceph; nothing is left in the bucket."""
    findings = probe_store(f"s3://{any_bucket}/some/prefix")
    names = ("write", "ranges", "parts", "list", "delete")
    assert [(one.name, one.status) for one in findings] == [(f"S3 {name}", "ok") for name in names], findings
    assert "Contents" not in boto3.session.Session().client("s3").list_objects_v2(Bucket=any_bucket)


def other_answer(**values: Any) -> Callable[..., None]:
    """A change of the server's answer before the client sees it."""
    return lambda parsed, **_: parsed.update(values)


def refused(**_: Any) -> None:
    response = {"Error": {"Code": "EntityTooSmall"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    raise ClientError(response, "UploadPart")


@pytest.mark.parametrize(
    ("event", "change", "found"),
    [
        pytest.param(
            "after-call.s3.GetObject",
            lambda parsed, **_: parsed.update(Body=io.BytesIO(b"other")),
            {"S3 write": ("fault", "use another store"), "S3 ranges": ("fault", "a proxy that passes Range on")},
            id="other bytes",
        ),
        pytest.param(
            "before-call.s3.UploadPart",
            refused,
            {"S3 parts": ("fault", "uploads in parts of 5 MiB")},
            id="parts are refused",
        ),
        pytest.param(
            "after-call.s3.HeadObject",
            other_answer(ContentLength=3),
            {"S3 parts": ("fault", "use another store")},
            id="a part is lost",
        ),
        pytest.param(
            "after-call.s3.ListObjectsV2",
            other_answer(Contents=[]),
            {"S3 list": ("warning", "wait before you resubmit")},
            id="a list lags behind",
        ),
        pytest.param(
            "before-call.s3.PutObject",
            refused,
            {
                "S3 write": ("fault", "give credentials that may"),
                "S3 ranges": ("fault", "give credentials that may"),
                "S3 list": ("fault", "give credentials that may"),
            },
            id="nothing may be written",
        ),
        pytest.param(
            "before-call.s3.DeleteObject",
            refused,
            {"S3 list": ("fault", "give credentials that may"), "S3 delete": ("warning", "by hand")},
            id="nothing may be deleted",
        ),
    ],
)
def test_what_a_store_does_not_do_is_named(
    s3_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    event: str,
    change: Callable[..., None],
    found: dict[str, tuple[str, str]],
) -> None:
    def changed(**settings: Any) -> Any:
        client = probing_client(**settings)
        client.meta.events.register(event, change)
        return client

    monkeypatch.setattr("shards.verifying.s3_probe.probing_client", changed)
    findings = probe_store(f"s3://{s3_bucket}")
    assert {one.name: one.status for one in findings if one.status != "ok"} == {
        name: status for name, (status, _) in found.items()
    }, findings
    assert all(found[one.name][1] in one.todo for one in findings if one.status != "ok"), findings


def test_what_cannot_be_reached_is_one_verdict(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (missing,) = probe_store("s3://no-such-bucket-here/x")
    assert (missing.status, "create the bucket" in missing.todo) == ("fault", True), missing
    (away,) = probe_store("s3://bucket/x", endpoint=f"http://127.0.0.1:{free_port()}")
    assert "S3 is unreachable" in away.found
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    nobody = unreachable("s3://bucket/x", endpoint=s3_endpoint)
    assert nobody is not None
    assert "no usable S3 credentials" in nobody.found
    named = unreachable("s3://bucket/x", endpoint=s3_endpoint, profile="none-such")
    assert named is not None
    assert "no profile 'none-such'" in named.found


def test_nothing_is_to_be_done_unless_a_verdict_says_so() -> None:
    found = Finding(name="partition", status="ok", found="gpu")
    assert (found.allowed, found.todo) == ("", "")


def test_a_bucket_in_another_region_is_named_with_what_to_set(
    s3_bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By preflight and by verify."""
    with faulty_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.region = "eu-west-3"
        (fault,) = probe_store(f"s3://{s3_bucket}/x")
        assert (fault.status, fault.todo) == ("fault", "set AWS_DEFAULT_REGION=eu-west-3")
        ended = patchline("verify", f"s3://{s3_bucket}/x")
    assert ended.code == 2
    assert ended.errors.endswith("is in the region eu-west-3 (PermanentRedirect); set AWS_DEFAULT_REGION=eu-west-3\n")


@pytest.mark.rgw
def test_a_bucket_of_ceph_that_keeps_old_versions_is_named(ceph_endpoint: str) -> None:
    """Under object lock, nothing that retention deletes frees any space."""
    bucket = f"test-{secrets.token_hex(6)}"
    client = boto3.session.Session().client("s3")
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    found = {one.name: one for one in probe_store(f"s3://{bucket}/x")}
    assert found["S3 list"].status == "ok"
    assert found["S3 delete"].status == "warning"
    assert "object lock" in found["S3 delete"].found
    assert "lifecycle rule" in found["S3 delete"].todo
