"""The probe of a store on real servers, on one that ignores conditions, and on none at all."""

import re
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from shards.errors import Finding, UserError
from shards.storage.s3_client import probing_client
from shards.verifying.s3_probe import CREATED, RACERS, REFUSED, judge_race, judge_skew, probe_store, unreachable
from tests.rigs.faulty_proxy import faulty_proxy
from tests.rigs.s3 import free_port


def test_a_store_that_keeps_to_the_specification(any_bucket: str) -> None:
    """moto and Ceph; nothing is left in the bucket."""
    findings, facts = probe_store(f"s3://{any_bucket}/some/prefix")
    assert [(one.name, one.status) for one in findings] == [
        (f"S3 {name}", "ok")
        for name in ("addressing", "checksums", "ranges", "parts", "list", "conditions", "race", "clock", "delete")
    ], findings
    assert facts["addressing"] == {"path": True, "virtual": False, "used": "path"}
    assert facts["checksums"]["when_required"]
    assert facts["part_bytes_accepted"] == [5 << 20]
    assert (facts["if_none_match"], facts["race_winners"], facts["list_after_write"]) == (True, 1, True)
    assert abs(facts["clock_skew_seconds"]) < 60
    assert "Contents" not in boto3.session.Session().client("s3").list_objects_v2(Bucket=any_bucket)


def test_a_store_that_ignores_conditions_is_named_and_safe(s3_endpoint: str, s3_bucket: str) -> None:
    with faulty_proxy(s3_endpoint) as proxy:
        proxy.is_lax = True
        findings, facts = probe_store(f"s3://{s3_bucket}", endpoint=proxy.endpoint)
    found = {one.name: one for one in findings}
    assert (facts["if_none_match"], facts["race_winners"]) == (False, RACERS)
    for name in ("S3 conditions", "S3 race"):
        assert found[name].status == "warning"
        assert "never relies on it" in found[name].todo
    assert {one.status for one in findings if one.name not in ("S3 conditions", "S3 race")} == {"ok"}


def test_a_store_that_does_not_know_conditions_has_refused_nothing(
    s3_endpoint: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may answer 501 to a header that it does not know: the write fails, but nobody has lost a race."""

    def unknown(client: Any, **_: Any) -> Any:
        def fail(params: dict[str, Any], **_: Any) -> None:
            if "If-None-Match" in params["headers"]:
                response = {"Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}}
                raise ClientError(response, "PutObject")

        client.meta.events.register("before-call.s3.PutObject", fail)
        return client

    monkeypatch.setattr(
        "shards.verifying.s3_probe.probing_client", lambda **settings: unknown(probing_client(**settings))
    )
    findings, facts = probe_store(f"s3://{s3_bucket}", endpoint=s3_endpoint)
    found = {one.name: one for one in findings}
    assert (facts["if_none_match"], facts["race_winners"]) == (False, 0)
    for name, said in (("conditions", "fails: the server answers NotImplemented"), ("race", f"{RACERS} failed: the")):
        assert (found[f"S3 {name}"].status, said in found[f"S3 {name}"].found) == ("warning", True), found


@pytest.mark.parametrize(
    ("outcomes", "status", "words"),
    [
        pytest.param([REFUSED, CREATED, REFUSED], "ok", "1 of 3 writers", id="as specified"),
        pytest.param([CREATED, CREATED, REFUSED], "warning", "2 of 3 writers", id="conditions are not atomic"),
        pytest.param([REFUSED, REFUSED], "warning", "0 of 2 writers", id="nobody wins"),
        pytest.param([CREATED, REFUSED, "a reset"], "warning", "1 of 3 .*; 1 failed: a reset", id="one is not known"),
    ],
)
def test_only_answers_about_the_condition_decide_a_race(outcomes: list[str], status: str, words: str) -> None:
    found = judge_race(outcomes)
    assert found.status == status
    assert re.search(words, found.found)


def test_what_cannot_be_reached_is_one_finding(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (missing,), _ = probe_store("s3://no-such-bucket-here/x")
    assert (missing.status, "create the bucket" in missing.todo) == ("fault", True), missing
    (away,), _ = probe_store("s3://bucket/x", endpoint=f"http://127.0.0.1:{free_port()}")
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


def test_a_url_of_something_else() -> None:
    with pytest.raises(UserError, match=r"--url is 'data'; allowed: s3://"):
        probe_store("data")


@pytest.mark.parametrize(
    ("seconds", "status", "words"),
    [(1.0, "ok", "1 s ahead of"), (-90.0, "warning", "90 s behind"), (1000.0, "fault", "1000 s ahead of")],
)
def test_a_clock_that_is_off(seconds: float, status: str, words: str) -> None:
    found = judge_skew(seconds)
    assert (found.status, words in found.found) == (status, True)


def test_nothing_is_to_be_done_unless_a_finding_says_so() -> None:
    found = Finding(name="partition", status="ok", found="gpu")
    assert (found.allowed, found.todo) == ("", "")
