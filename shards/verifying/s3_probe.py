"""Tests whether an S3-compatible store does what Patchline relies on, with small objects below a new prefix.

Patchline relies on the following: objects are read back as they were written, whole or by ranges; large files can be
uploaded in parts; a list shows at once what was written and deleted. It does not rely on conditional writes or checksum
trailers, which some servers lack. Each request has a time limit and is not retried, so that no fault is hidden.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shards.errors import Finding, TransientError, UserError
from shards.output.quantities import size
from shards.storage.s3_client import PART_BYTES, REQUEST_ERRORS, GivenClient, code_of, probing_client, storage_errors

_LEAST_PART = 5 << 20  # the smallest size that S3 allows for a part, except the last
_DATA = bytes(range(256)) * 16


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The place that the probe writes to. `prefix` ends with a slash."""

    bucket: str
    prefix: str
    client: Any

    def key(self, name: str) -> dict[str, str]:
        """Returns the arguments that name an object to boto3."""
        return {"Bucket": self.bucket, "Key": self.prefix + name}


def probe_store(url: str, *, endpoint: str = "", profile: str = "") -> list[Finding]:
    """Returns the findings about a store, and deletes what the probe wrote. Raises UserError if `url` is not an s3://
    URL."""
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise UserError(f"--url is {url!r}; allowed: s3://bucket/prefix")
    if fault := unreachable(url, endpoint=endpoint, profile=profile):
        return [fault]
    above = parts.path.strip("/")
    prefix = f"{above}/" if above else ""
    place = _Place(
        bucket=parts.netloc,
        prefix=f"{prefix}.patchline-preflight-{secrets.token_hex(8)}/",
        client=probing_client(endpoint=endpoint, profile=profile),
    )
    try:
        findings = list(_findings(place))
    finally:
        cleaned = _cleaned(place)
    return [*findings, cleaned]


def unreachable(url: str, *, endpoint: str = "", profile: str = "") -> Finding | None:
    """Returns why the bucket of a URL cannot be used (no server, credentials, bucket or access), or None if it can be
    used."""
    bucket = urlsplit(url).netloc
    try:
        client = probing_client(endpoint=endpoint, profile=profile)
        with storage_errors("", bucket=bucket, url=url, clients=GivenClient(client)):
            client.head_bucket(Bucket=bucket)
    except (UserError, TransientError) as error:
        return Finding(name="S3", status="fault", found=error.what, allowed="an answer", todo=error.todo)
    return None


def _findings(place: _Place) -> Iterator[Finding]:
    for step in (_write, _ranges, _parts, _list):
        try:
            yield step(place)
        except REQUEST_ERRORS as error:
            name = step.__name__.removeprefix("_")
            todo = "give credentials that may read, write, list and delete there, or see the server's log"
            yield Finding(
                name=f"S3 {name}", status="fault", found=_said(error), allowed="the request succeeds", todo=todo
            )


def _write(place: _Place) -> Finding:
    place.client.put_object(**place.key("written"), Body=_DATA)
    if place.client.get_object(**place.key("written"))["Body"].read() == _DATA:
        return Finding(name="S3 write", status="ok", found="an upload arrives as it was sent")
    value, todo = "an upload does not arrive as it was sent", "have the server updated, or use another store"
    return Finding(name="S3 write", status="fault", found=value, allowed="the same bytes", todo=todo)


def _ranges(place: _Place) -> Finding:
    answer = place.client.get_object(**place.key("written"), Range="bytes=300-1299")
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    if status == 206 and answer["Body"].read() == _DATA[300:1300]:
        return Finding(name="S3 ranges", status="ok", found="the bytes that were asked for")
    todo = "training reads ranges: use another store, or a proxy that passes Range on"
    value = f"status {status}, and other bytes than those that were asked for"
    return Finding(name="S3 ranges", status="fault", found=value, allowed="206 and those bytes", todo=todo)


def _parts(place: _Place) -> Finding:
    """Uploads a file in two parts. The first is as small as the S3 specification allows."""
    where, client, ours = place.key("parts"), place.client, f"Patchline's are {size(PART_BYTES)}"
    upload = client.create_multipart_upload(**where)["UploadId"]
    try:
        tags = [
            client.upload_part(**where, UploadId=upload, PartNumber=number, Body=body)["ETag"]
            for number, body in ((1, bytes(_LEAST_PART)), (2, b"end"))
        ]
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})
    except REQUEST_ERRORS:
        client.abort_multipart_upload(**where, UploadId=upload)
        todo = "have uploads in parts of 5 MiB allowed: large files are uploaded in parts"
        return Finding(name="S3 parts", status="fault", found=f"parts of 5 MiB are refused; {ours}", todo=todo)
    if (num_bytes := client.head_object(**where)["ContentLength"]) == _LEAST_PART + 3:
        return Finding(name="S3 parts", status="ok", found=f"parts of 5 MiB are accepted; {ours}")
    value, todo = f"a file of {_LEAST_PART + 3} bytes has {num_bytes} after its upload in parts", "use another store"
    return Finding(name="S3 parts", status="fault", found=value, allowed="all its bytes", todo=todo)


def _list(place: _Place) -> Finding:
    where = place.key("listed")
    place.client.put_object(**where, Body=b"")
    is_there = where["Key"] in _keys(place)
    place.client.delete_object(**where)
    is_gone = where["Key"] not in _keys(place)
    if is_there and is_gone:
        return Finding(name="S3 list", status="ok", found="a list shows at once what was written and deleted")
    value = "a list does not show at once what was " + ("deleted" if is_there else "written")
    todo = "a resume may take an older checkpoint: wait before you resubmit, or use a consistent store"
    return Finding(name="S3 list", status="warning", found=value, allowed="at once", todo=todo)


def _keys(place: _Place) -> list[str]:
    pages = place.client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.prefix)
    return [one["Key"] for page in pages for one in page.get("Contents", ())]


def _cleaned(place: _Place) -> Finding:
    """Deletes what the probe has written, one object at a time, because not every server supports DeleteObjects."""
    is_kept = False
    try:
        for key in _keys(place):
            answer = place.client.delete_object(Bucket=place.bucket, Key=key)
            is_kept = is_kept or bool(answer.get("DeleteMarker"))
        left = _keys(place)
    except REQUEST_ERRORS as error:
        left = [_said(error)]
    if not left and is_kept:
        found = "the bucket keeps every version, as object lock requires: what is deleted still takes up space"
        todo = (
            "each save adds a checkpoint's size: set a lifecycle rule that expires old versions, or use another bucket"
        )
        return Finding(name="S3 delete", status="warning", found=found, allowed="deleted objects are gone", todo=todo)
    if not left:
        return Finding(name="S3 delete", status="ok", found="nothing of the probe is left")
    todo = f"delete s3://{place.bucket}/{place.prefix} by hand, and allow deleting: old checkpoints are deleted, too"
    return Finding(name="S3 delete", status="warning", found=f"left: {left[0]}", allowed="nothing", todo=todo)


def _said(error: Exception) -> str:
    """Returns the error's code, without the server's message, which may contain anything."""
    return f"the server answers {code_of(error) or type(error).__name__}"
