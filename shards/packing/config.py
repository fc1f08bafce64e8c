"""The settings of a packing: everything that determines the bytes of a dataset.

They are written to the plan before the first shard. This module loads neither NumPy nor Pillow, so that the command
line starts quickly.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Annotated, Literal

from shards.class_labels import LabelRules
from shards.config_values import Range, refuse_wrong_values
from shards.errors import UserError
from shards.images.config import (
    CODEC_PACKAGES,
    DEFAULT_LIMITS,
    DEFAULT_MAX_DISTANCE,
    HASH_BITS,
    HASH_PACKAGES,
    PERCEPTUAL_HASH,
    ImageChecks,
    ImageLimits,
    Resize,
)
from shards.manifest import Manifest
from shards.sources.kinds import Source, tool_versions

MOST_SEED = 2**63 - 1
MOST_CHARACTERS = 10_000
_LINE_BREAK = "\n"
# Characters that change the direction of the text after them, so that a line looks different from what it says.
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True, kw_only=True)
class Dedup:
    """Which images are left out as duplicates."""

    duplicates: Literal["first", "merge", "keep"] = "first"
    """Images with equal bytes: first keeps the first in the source with its own labels, merge keeps it with the
    labels of all, keep keeps every one. Under first and merge, an image that is listed twice has all its labels."""
    against: tuple[str, ...] = ()
    """Packed evaluation sets (URLs) whose images, mirrored ones included, must not be in the dataset."""
    max_distance: Annotated[int, Range(0, HASH_BITS // 2 - 1)] = DEFAULT_MAX_DISTANCE
    """Bits by which perceptual hashes of near-duplicates may differ, 0 to 127; images that close to an evaluation image
    are left out."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="dedup.")


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """The settings of a dataset that packing images and indexing existing tars share."""

    split: str = "train"
    """Name of the split, such as train or test."""
    samples_per_block: Annotated[int, Range(1)] = 64
    """Images per block, which training reads in one request; 8 to 16 MB suit most stores."""
    labels_file: str = ""
    """File with one class name per line, in the order of their ids; empty: the names found, sorted."""
    labels: LabelRules = LabelRules()
    """How to read labels that could mean two things."""
    limits: ImageLimits = DEFAULT_LIMITS
    """Largest images that are accepted; others are quarantined."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")


@dataclass(frozen=True, kw_only=True)
class PackSpec(DatasetSettings):
    """The settings of a packing, which determine the bytes of the dataset."""

    source: Source
    """Images to pack, and their labels."""
    split_test: Annotated[float, Range(0, below=1, zero="none")] = 0.0
    """Share of each class that is set aside as the test split. This dataset is the test split if it is called test,
    else it has all other images."""
    samples_per_shard: Annotated[int, Range(1)] = 1000
    """Images per shard (a tar file)."""
    seed: Annotated[int, Range(0, MOST_SEED)] = 0
    """Seed for the order of the images in the shards."""
    images: ImageChecks = ImageChecks()
    """Damaged images to leave out."""
    dedup: Dedup = Dedup()
    """Duplicates to leave out."""
    resize: Resize = Resize()
    """Images to store as smaller copies."""
    unlabeled: Literal["refuse", "keep"] = "refuse"
    """Whether images without a label are quarantined, or packed. Scores then leave them out, as ImageNet-ReaL does."""

    @property
    def is_hashed(self) -> bool:
        """Whether the scan computes perceptual hashes. To do so, it decodes every image."""
        return bool(self.dedup.against)

    @property
    def refuses_truncated(self) -> bool:
        """Whether the scan looks for JPEGs and PNGs with a missing part."""
        is_reencoded = self.resize.short_side > 0 or self.resize.convert
        return self.images.truncated == "quarantine" or (self.images.truncated == "auto" and is_reencoded)

    def settings(self) -> dict[str, object]:
        """Returns the settings as plan.json records them."""
        settings: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return settings

    def versions(self) -> dict[str, str]:
        """Returns the versions of the libraries that the written bytes depend on."""
        packages = [*CODEC_PACKAGES, *(HASH_PACKAGES if self.is_hashed else ())]
        return tool_versions(self.source) | {package: version(package) for package in packages}

    def scan_hash(self) -> str:
        """Returns the sha256 of everything that determines the scan. Jobs with the same hash can share listing and scan
        files."""
        decides = {
            "source": asdict(self.source),
            "limits": asdict(self.limits),
            "perceptual_hash": PERCEPTUAL_HASH if self.is_hashed else "",
            "refuses_truncated": self.refuses_truncated,
            "versions": self.versions(),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class About:
    """What people should know about a dataset. It is stored in the manifest, and no other byte of the dataset depends
    on it.

    Texts have at most MOST_CHARACTERS and no control characters except line breaks. An empty text leaves the manifest's
    own text unchanged.
    """

    description: str = ""
    """Description of the dataset, for its manifest and card; can also be added after packing."""
    licence: str = ""
    """Licence of the images, for the manifest and card; can also be added after packing."""

    def __post_init__(self) -> None:
        for option, text in (("--description", self.description), ("--licence", self.licence)):
            _check(option, text)

    def of(self, manifest: Manifest) -> Manifest:
        """Returns the manifest with these texts. If a text is empty, the manifest keeps its own."""
        description = self.description or manifest.description
        return replace(manifest, description=description, licence=self.licence or manifest.licence)


def _check(option: str, text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        message = f"{option} has {len(text):,} characters; allowed: at most {MOST_CHARACTERS:,}"
        raise UserError(f"{message}; shorten it, and link to the full text")
    for place, character in enumerate(text, start=1):
        if _is_refused(character):
            what = f"{option} has {character!r} as character {place}"
            raise UserError(f"{what}; allowed: printable text and line breaks (\\n); remove it")


def _is_refused(character: str) -> bool:
    is_control = ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0
    is_surrogate = 0xD800 <= ord(character) < 0xE000  # a byte of the command line that is not UTF-8
    return character != _LINE_BREAK and (is_control or is_surrogate or character in _TURNING)
