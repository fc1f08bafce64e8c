"""Tests of the rig: Ceph answers like a production cluster and leaves nothing running."""

from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.rigs.ceph import Gateway, ceph_gateway


def client_of(gateway: Gateway, *, secret_key: str) -> Any:
    return boto3.session.Session().client(
        "s3",
        endpoint_url=gateway.endpoint,
        aws_access_key_id=gateway.access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
    )


def processes_with(word: str) -> list[int]:
    """Ids of the processes with this text in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended since
            continue
    return found


@pytest.mark.long
@pytest.mark.rgw
def test_it_checks_signatures_and_conditions_and_ends_with_its_block(tmp_path: Path) -> None:
    folder = tmp_path / "ceph"
    with ceph_gateway(folder) as gateway:
        assert len(processes_with(str(folder))) == 4
        client = client_of(gateway, secret_key=gateway.secret_key)
        client.create_bucket(Bucket="test")
        client.put_object(Bucket="test", Key="x", Body=b"1", IfNoneMatch="*")
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket="test", Key="x", Body=b"2", IfNoneMatch="*")
        with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
            client_of(gateway, secret_key="another").get_object(Bucket="test", Key="x")
        assert gateway.secret_key not in repr(gateway)
    assert processes_with(str(folder)) == []
