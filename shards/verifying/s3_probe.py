"""What an S3-compatible store does, tried out with small objects below a prefix of its own, deleted at the end.

The specification is Amazon's S3 API; what other servers leave out is in their own lists of issues (checksum trailers,
conditional writes). Each request has a time limit and no retry, so that a fault is seen and not passed over.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from shards.errors import Finding, TransientError, UserError
from shards.output.quantities import size
from shards.pool import Pool
from shards.storage.s3_client import PART_BYTES, REQUEST_ERRORS, GivenClient, probing_client, storage_errors

RACERS = 16
CREATED, REFUSED = "created", "refused"
_CONDITION_STATUS = (409, 412)  # the answers to a condition that does not hold, and to a writer that comes second
_MIB = 1 << 20
_SMALL_PART, _USUAL_PART = 1 * _MIB, 5 * _MIB
_MOST_SKEW, _SOME_SKEW = 15 * 60, 60  # seconds: what S3 refuses, and what is worth a warning
_DATA = bytes(range(256)) * 16
SAFE = (
    "nothing to do: Patchline never relies on it. Each start of a run writes checkpoints below a name of its own, and "
    "a checkpoint counts only once its manifest verifies"
)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The place to which the probe writes: `prefix` ends with a slash. `clients`: (addressing, checksums) -> client."""

    bucket: str
    prefix: str
    clients: Callable[[str, str], Any]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def client(self) -> Any:
        """The client with the settings that Patchline uses."""
        return self.clients("", "when_required")

    def key(self, name: str) -> dict[str, str]:
        """The words that name an object to boto3."""
        return {"Bucket": self.bucket, "Key": self.prefix + name}


def probe_store(url: str, *, endpoint: str = "", profile: str = "") -> tuple[list[Finding], dict[str, Any]]:
    """The findings, and the facts behind them for a machine. UserError if `url` is no s3:// URL."""
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise UserError(f"--url is {url!r}; allowed: s3://bucket/prefix")
    made: dict[tuple[str, str], Any] = {}

    def clients(addressing: str, checksums: str) -> Any:
        if (addressing, checksums) not in made:
            made[addressing, checksums] = probing_client(
                endpoint=endpoint, profile=profile, addressing=addressing, checksums=checksums
            )
        return made[addressing, checksums]

    if fault := unreachable(url, endpoint=endpoint, profile=profile):
        return [fault], {}
    above = parts.path.strip("/")
    prefix = f"{above}/" if above else ""
    place = _Place(bucket=parts.netloc, prefix=f"{prefix}.patchline-preflight-{secrets.token_hex(8)}/", clients=clients)
    place.facts["endpoint_checked"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        findings = list(_findings(place))
    finally:
        cleaned = _cleaned(place)
    return [*findings, cleaned], place.facts


def unreachable(url: str, *, endpoint: str = "", profile: str = "") -> Finding | None:
    """Why the bucket of a URL cannot be used: no server, no credentials, no bucket, no access; None if it can."""
    bucket = urlsplit(url).netloc
    try:
        client = probing_client(endpoint=endpoint, profile=profile)
        with storage_errors("", bucket=bucket, url=url, clients=GivenClient(client)):
            client.head_bucket(Bucket=bucket)
    except (UserError, TransientError) as error:
        what, _, todo = str(error).rpartition("; ")
        return Finding(name="S3", status="fault", found=what or str(error), allowed="an answer", todo=todo)
    return None


def _findings(place: _Place) -> Iterator[Finding]:
    steps = (_addressing, _checksums, _ranges, _parts, _listing, _conditions, _race, _clock)
    for step in steps:
        try:
            yield step(place)
        except REQUEST_ERRORS as error:
            name = step.__name__.removeprefix("_")
            todo = "give credentials that may read, write, list and delete there, or see the server's log"
            yield Finding(
                name=f"S3 {name}", status="fault", found=_said(error), allowed="the request succeeds", todo=todo
            )


def _addressing(place: _Place) -> Finding:
    works = {style: _reaches(place, style) for style in ("path", "virtual")}
    used = "virtual" if _host_of(place.client, place.bucket).startswith(f"{place.bucket}.") else "path"
    place.facts["addressing"] = {**works, "used": used}
    shown = ", ".join(f"{style}: {'yes' if can else 'no'}" for style, can in works.items())
    value = f"{shown}; Patchline uses {used}"
    if works[used]:
        return Finding(name="S3 addressing", status="ok", found=value)
    todo = "set `s3 = addressing_style = virtual` (or path) in the profile of ~/.aws/config"
    return Finding(name="S3 addressing", status="fault", found=value, allowed="the style that is used", todo=todo)


def _reaches(place: _Place, style: str) -> bool:
    client = place.clients(style, "when_required")
    if style == "virtual" and not _host_of(client, place.bucket).startswith(f"{place.bucket}."):
        return False  # the endpoint is an address, which has no names below it
    try:
        client.head_bucket(Bucket=place.bucket)
    except REQUEST_ERRORS:
        return False
    return True


def _host_of(client: Any, bucket: str) -> str:
    url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "x"})
    return urlsplit(url).hostname or ""


def _checksums(place: _Place) -> Finding:
    """Whether an upload arrives as it was sent, with and without the trailer that newer SDKs send by themselves."""
    works = {mode: _arrives(place, mode) for mode in ("when_required", "when_supported")}
    place.facts["checksums"] = works
    shown = ", ".join(f"{mode}: {'yes' if can else 'no'}" for mode, can in works.items())
    value = f"{shown}; Patchline uses when_required"
    if works["when_required"]:
        return Finding(name="S3 checksums", status="ok", found=value)
    todo = "have the server updated: plain uploads do not arrive as they were sent"
    return Finding(name="S3 checksums", status="fault", found=value, allowed="when_required: yes", todo=todo)


def _arrives(place: _Place, mode: str) -> bool:
    client = place.clients("", mode)
    try:
        client.put_object(**place.key(mode), Body=_DATA)
        return bool(client.get_object(**place.key(mode))["Body"].read() == _DATA)
    except REQUEST_ERRORS:
        return False


def _ranges(place: _Place) -> Finding:
    place.client.put_object(**place.key("ranges"), Body=_DATA)
    answer = place.client.get_object(**place.key("ranges"), Range="bytes=300-1299")
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    is_right = status == 206 and answer["Body"].read() == _DATA[300:1300]
    place.facts["ranges"] = is_right
    if is_right:
        return Finding(name="S3 ranges", status="ok", found="the bytes that were asked for")
    todo = "training reads ranges: use another store, or a proxy that passes Range on"
    value = f"status {status}, and other bytes than those that were asked for"
    return Finding(name="S3 ranges", status="fault", found=value, allowed="206 and those bytes", todo=todo)


def _parts(place: _Place) -> Finding:
    """The smallest part of an upload in parts that is not its last: 5 MiB by the specification."""
    takes = {num_bytes: _takes_part(place, num_bytes) for num_bytes in (_SMALL_PART, _USUAL_PART)}
    place.facts["part_bytes_accepted"] = [num_bytes for num_bytes, can in takes.items() if can]
    ours = f"Patchline's are {size(PART_BYTES)}"
    if takes[_USUAL_PART]:
        least = "parts of 1 MiB are accepted" if takes[_SMALL_PART] else "parts below 5 MiB are refused, as specified"
        return Finding(name="S3 parts", status="ok", found=f"{least}; {ours}")
    todo = "have uploads in parts of 5 MiB allowed: large files are uploaded in parts"
    return Finding(name="S3 parts", status="fault", found=f"parts of 5 MiB are refused; {ours}", todo=todo)


def _takes_part(place: _Place, num_bytes: int) -> bool:
    where, client = place.key(f"parts-{num_bytes}"), place.client
    upload = client.create_multipart_upload(**where)["UploadId"]
    try:
        tags = [
            client.upload_part(**where, UploadId=upload, PartNumber=number, Body=body)["ETag"]
            for number, body in ((1, bytes(num_bytes)), (2, b"end"))
        ]
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})
    except REQUEST_ERRORS:
        client.abort_multipart_upload(**where, UploadId=upload)
        return False
    return int(client.head_object(**where)["ContentLength"]) == num_bytes + 3


def _listing(place: _Place) -> Finding:
    where = place.key("listed")
    place.client.put_object(**where, Body=b"")
    is_there = where["Key"] in _keys(place)
    place.client.delete_object(**where)
    is_gone = where["Key"] not in _keys(place)
    place.facts["list_after_write"] = is_there and is_gone
    if is_there and is_gone:
        return Finding(name="S3 list", status="ok", found="a list shows at once what was written and deleted")
    value = "a list does not show at once what was " + ("deleted" if is_there else "written")
    todo = "a resume may take an older checkpoint: wait before you resubmit, or use a consistent store"
    return Finding(name="S3 list", status="warning", found=value, allowed="at once", todo=todo)


def _keys(place: _Place) -> list[str]:
    pages = place.client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.prefix)
    return [one["Key"] for page in pages for one in page.get("Contents", ())]


def _conditions(place: _Place) -> Finding:
    place.client.put_object(**place.key("taken"), Body=b"first")
    outcome = _create(place, "taken", b"second")
    is_kept = place.client.get_object(**place.key("taken"))["Body"].read() == b"first"
    place.facts["if_none_match"] = outcome == REFUSED and is_kept
    if outcome == REFUSED and is_kept:
        return Finding(name="S3 conditions", status="ok", found="If-None-Match: * keeps an object that exists")
    value = "If-None-Match: * is ignored: an object that exists is replaced"
    if is_kept:
        value = f"a write with If-None-Match: * fails: {outcome}"
    return Finding(name="S3 conditions", status="warning", found=value, allowed="412", todo=SAFE)


def _race(place: _Place) -> Finding:
    start = threading.Barrier(RACERS)

    def one(number: int) -> str:
        start.wait(timeout=30)
        return _create(place, "race", b"%d" % number)

    pool = Pool(RACERS, name="race")
    try:
        futures = [pool.submit(partial(one, number)) for number in range(RACERS)]
        outcomes = [future.result() for future in futures]
    finally:
        pool.close()
    place.facts["race_winners"] = outcomes.count(CREATED)
    return judge_race(outcomes)


def judge_race(outcomes: Sequence[str]) -> Finding:
    """What became of each writer: CREATED, REFUSED, or the fault of a request that says nothing about it. Pure."""
    value = f"{outcomes.count(CREATED)} of {len(outcomes)} writers at once created the same object"
    faults = [outcome for outcome in outcomes if outcome not in (CREATED, REFUSED)]
    if faults:
        value = f"{value}; {len(faults)} failed: {faults[0]}"
    elif outcomes.count(CREATED) == 1:
        return Finding(name="S3 race", status="ok", found=value)
    return Finding(name="S3 race", status="warning", found=value, allowed="1, and the others refused", todo=SAFE)


def _create(place: _Place, name: str, data: bytes) -> str:
    """The outcome of a conditional write. Only an answer about the condition counts as a refusal."""
    try:
        place.client.put_object(**place.key(name), Body=data, IfNoneMatch="*")
    except REQUEST_ERRORS as error:
        response: dict[str, Any] = getattr(error, "response", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return REFUSED if status in _CONDITION_STATUS else _said(error)
    return CREATED


def _clock(place: _Place) -> Finding:
    before = time.time()
    answer = place.client.list_objects_v2(Bucket=place.bucket, Prefix=place.prefix, MaxKeys=1)
    now = (before + time.time()) / 2
    try:
        skew = now - parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return Finding(name="S3 clock", status="warning", found="the server names no date", todo="compare the clocks")
    place.facts["clock_skew_seconds"] = round(skew, 1)
    return judge_skew(skew)


def judge_skew(seconds: float) -> Finding:
    """Judges by how much this machine's clock is ahead of the server's, whose dates have whole seconds. Pure."""
    value = f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the server's"
    if abs(seconds) <= _SOME_SKEW:
        return Finding(name="S3 clock", status="ok", found=value)
    is_refused = abs(seconds) > _MOST_SKEW
    todo = "set the clock of this machine (chrony, ntpd); S3 refuses requests that are 15 minutes off"
    allowed = f"up to {_SOME_SKEW} s"
    return Finding(
        name="S3 clock", status="fault" if is_refused else "warning", found=value, allowed=allowed, todo=todo
    )


def _cleaned(place: _Place) -> Finding:
    """Deletes what the probe has written, one by one: not every server knows DeleteObjects."""
    try:
        for key in _keys(place):
            place.client.delete_object(Bucket=place.bucket, Key=key)
        left = _keys(place)
    except REQUEST_ERRORS as error:
        left = [_said(error)]
    if not left:
        return Finding(name="S3 delete", status="ok", found="nothing of the probe is left")
    todo = f"delete s3://{place.bucket}/{place.prefix} by hand, and allow deleting: old checkpoints are deleted, too"
    return Finding(name="S3 delete", status="warning", found=f"left: {left[0]}", allowed="nothing", todo=todo)


def _said(error: Exception) -> str:
    """The error without the message of the server, which may say anything."""
    response: dict[str, Any] = getattr(error, "response", {})
    code = str(response.get("Error", {}).get("Code", "")) or type(error).__name__
    return f"the server answers {code}"
