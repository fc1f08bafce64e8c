"""Objects of any bucket by their `s3://bucket/key`, through one client."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shards.errors import ImageRefusedError
from shards.storage.objects import Store, without_secrets

if TYPE_CHECKING:
    from shards.storage.s3 import S3Store

SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The stores of buckets, each made when it is first asked for."""

    stores: dict[str, "S3Store"] = field(default_factory=dict)

    def locate(self, url: str) -> tuple[Store, str]:
        """The store of a URL's bucket, and the key in it. Raises ImageRefusedError for what is no such URL."""
        bucket, _, key = url.removeprefix(SCHEME).partition("/")
        if not url.startswith(SCHEME) or not key or not _BUCKET.fullmatch(bucket):
            raise ImageRefusedError(f"{without_secrets(url)!r} is not s3://bucket/key")
        if bucket not in self.stores:
            from shards.storage.s3 import S3Store  # noqa: PLC0415 - boto3 takes a tenth of a second to load

            known = next(iter(self.stores.values()), None)
            self.stores[bucket] = S3Store(bucket=bucket, clients=known.clients) if known else S3Store(bucket=bucket)
        return self.stores[bucket], key
