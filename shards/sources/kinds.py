"""All kinds of image sources that can be packed. In a job file, the field `kind` tells them apart."""

from shards.errors import UserError
from shards.sources.archives import ClassTarsSource, TarOfTarsSource
from shards.sources.digits import DigitsSource
from shards.sources.entry import Entry, Reader
from shards.sources.folders import FlatSource, FolderSource
from shards.sources.image_lists import ManifestSource
from shards.sources.parquets import ParquetSource
from shards.sources.vtab import VtabSource

__all__ = [
    "ClassTarsSource",
    "DigitsSource",
    "Entry",
    "FlatSource",
    "FolderSource",
    "ManifestSource",
    "ParquetSource",
    "Reader",
    "Source",
    "TarOfTarsSource",
    "VtabSource",
]

Source = (
    DigitsSource
    | FolderSource
    | FlatSource
    | ClassTarsSource
    | TarOfTarsSource
    | ParquetSource
    | ManifestSource
    | VtabSource
)


def tool_versions(source: Source) -> dict[str, str]:
    """Returns the versions of the libraries that the written bytes depend on."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {package: version(package) for package in ("numpy", "pillow", "pyarrow")}
    if isinstance(source, DigitsSource):
        try:
            versions["scikit-learn"] = version("scikit-learn")
        except PackageNotFoundError as error:
            message = "the digits source needs scikit-learn; install it with: pip install 'patchline[demo]'"
            raise UserError(message) from error
    return versions
