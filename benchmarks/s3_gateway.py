"""The S3 store of the benchmark: Ceph's RADOS Gateway with the datasets uploaded, and its own CPU time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3

from tests.rigs.ceph import Gateway, ceph_gateway

BUCKET = "bench"


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """A gateway with every dataset under its folder's name; `pids` are its daemons."""

    gateway: Gateway
    pids: tuple[int, ...]

    def url(self, dataset: Path) -> str:
        """The URL of a dataset."""
        return f"s3://{BUCKET}/{dataset.name}"

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """The environment of a process that reads from the gateway, or from a proxy in front of it."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.gateway.endpoint,
            "AWS_ACCESS_KEY_ID": self.gateway.access_key,
            "AWS_SECRET_ACCESS_KEY": self.gateway.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def cpu_seconds(self) -> float:
        """CPU-seconds of all daemons since they started."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def uploaded(datasets: list[Path], folder: Path) -> Iterator[Uploaded]:
    """Starts a gateway with its files in the new `folder`, uploads the datasets, and stops it at the end."""
    with ceph_gateway(folder) as gateway:
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=gateway.endpoint,
            aws_access_key_id=gateway.access_key,
            aws_secret_access_key=gateway.secret_key,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        for dataset in datasets:
            for path in sorted(dataset.rglob("*")):
                if path.is_file():
                    client.upload_file(str(path), BUCKET, f"{dataset.name}/{path.relative_to(dataset)}")
        yield Uploaded(gateway=gateway, pids=_processes_with(str(folder.resolve())))


def _processes_with(word: str) -> tuple[int, ...]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended since
            continue
        if words[0].rpartition(b"/")[2].startswith((b"ceph-", b"radosgw")) and any(word.encode() in w for w in words):
            found.append(int(path.parent.name))
    return tuple(found)
