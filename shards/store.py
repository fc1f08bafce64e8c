"""Where bytes lie: a folder, or an S3 prefix."""

from functools import lru_cache
from pathlib import Path

from shards.errors import UserError
from shards.storage.local import LocalStore
from shards.storage.objects import MissingObjectError, Store, checked_path, without_secrets

__all__ = ["LocalStore", "MissingObjectError", "Store", "open_store"]


@lru_cache(maxsize=32)
def open_store(url: str) -> Store:
    """The store at a folder path or `s3://bucket/prefix`. Touches neither disk nor network.

    A process gets the same store for the same URL: an S3 client takes a quarter of a second to make, and every task
    opens the store that it works on.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise UserError("a dataset URL is empty; give a folder or s3://bucket/prefix")
        return LocalStore(str(Path(url)))
    shown = without_secrets(url)
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise UserError(f"cannot open {shown!r}; give a folder or s3://bucket/prefix")
    if shown != url:
        todo = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and give s3://bucket/prefix"
        raise UserError(f"cannot open {shown!r}: credentials do not belong in a URL; {todo}")
    from shards.storage.s3 import S3Store  # noqa: PLC0415 - boto3 takes a tenth of a second to load

    try:
        return S3Store(bucket=bucket, prefix=checked_path(prefix.strip("/")) if prefix.strip("/") else "")
    except ValueError as error:
        raise UserError(f"cannot open {url!r}: {error}") from error
