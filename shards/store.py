"""Opens the places where bytes are stored: a folder, an S3 prefix, or objects of any bucket."""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from shards.errors import ImageRefusedError, UserError
from shards.files.local_files import at_home
from shards.output.url_secrets import has_user, without_secrets
from shards.storage.local import LocalStore
from shards.storage.objects import MissingObjectError, Store, checked_path
from shards.storage.retries import ReadStoppedError, RetryBudget

if TYPE_CHECKING:
    from shards.storage.s3 import S3Store

__all__ = [
    "SCHEME",
    "Buckets",
    "LocalStore",
    "MissingObjectError",
    "ReadStoppedError",
    "Store",
    "open_store",
    "trust_addresses",
]

SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


@lru_cache(maxsize=32)
def open_store(url: str, *, was_let_in: bool = False) -> Store:
    """Returns the store at a folder path or `s3://bucket/prefix`, without using the disk or the network. `was_let_in`:
    whether another process of this run has used the store. If so, its credentials are right, and after they expire,
    requests wait for new ones.

    The same URL gives the same store within a process: it takes 0.25 s to make an S3 client, and every task opens its
    store.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise UserError("a dataset URL is empty", todo="give a folder or s3://bucket/prefix")
        return LocalStore(str(Path(at_home(url))))
    shown = without_secrets(url)
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise UserError(f"cannot open {shown!r}", todo="give a folder or s3://bucket/prefix")
    if has_user(url):
        todo = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and give s3://bucket/prefix"
        raise UserError(f"cannot open {shown!r}: credentials do not belong in a URL", todo=todo)
    from shards.storage.s3 import S3Store  # noqa: PLC0415 - boto3 takes a tenth of a second to load
    from shards.storage.s3_client import ClientOfProcess  # noqa: PLC0415 - as above

    try:
        below = checked_path(prefix.strip("/")) if prefix.strip("/") else ""
        return S3Store(bucket=bucket, prefix=below, clients=ClientOfProcess(was_let_in=was_let_in))
    except ValueError as error:
        raise UserError(f"cannot open {url!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The stores of buckets. Each is made when it is first needed."""

    stores: dict[str, "S3Store"] = field(default_factory=dict)

    def locate(self, url: str) -> tuple[Store, str]:
        """Returns the store of a URL's bucket, and the key in it. Raises ImageRefusedError if the URL is not an s3://
        URL with a bucket and a key."""
        bucket, _, key = url.removeprefix(SCHEME).partition("/")
        if not url.startswith(SCHEME) or not key or not _BUCKET.fullmatch(bucket):
            raise ImageRefusedError(f"{without_secrets(url)!r} is not s3://bucket/key")
        if bucket not in self.stores:
            from shards.storage.s3 import S3Store  # noqa: PLC0415 - boto3 takes a tenth of a second to load

            known = next(iter(self.stores.values()), None)
            self.stores[bucket] = S3Store(bucket=bucket, clients=known.clients) if known else S3Store(bucket=bucket)
        return self.stores[bucket], key


def trust_addresses() -> None:
    """Tells this process that another process with the same environment has just reached the stores. Errors are then
    retried instead of taken for a wrong address, as if the stores had answered this process."""
    RetryBudget.is_known_to_answer = True
