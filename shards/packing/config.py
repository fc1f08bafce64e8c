"""What is packed, and how: everything that decides a byte of a dataset, frozen before the first shard.

It loads neither numpy nor Pillow: the command line reads it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Annotated, Literal

from shards.class_labels import LabelRules
from shards.errors import UserError
from shards.images.config import (
    CODEC_PACKAGES,
    DEFAULT_MAX_DISTANCE,
    HASH_BITS,
    HASH_PACKAGES,
    PERCEPTUAL_HASH,
    ImageChecks,
    ImageLimits,
    Resize,
)
from shards.manifest import Manifest
from shards.schema.config_values import Range, refuse_wrong_values
from shards.sources.kinds import Source, tool_versions

MOST_SEED = 2**63 - 1
MOST_CHARACTERS = 10_000
_LINE_BREAK = "\n"
# These turn the direction of the text after them, so that a line looks different from what it says.
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
class SetAside:
    """The test split that is set aside of a collection, and on which side of it this dataset is."""

    share: Annotated[float, Range(0, below=1, zero="none")] = 0.0
    """Share of each class's images that is set aside, from 0 to below 1."""
    side: Literal["train", "test"] = "train"
    """train: all other images; test: those that are set aside."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="set_aside.")


@dataclass(frozen=True, kw_only=True)
class PackSpec:
    """The settings of a packing."""

    source: Source
    """Images to pack, and their labels."""
    split: str
    """Name of the split, such as train or test."""
    samples_per_shard: Annotated[int, Range(1)]
    """Images per shard."""
    samples_per_block: Annotated[int, Range(1)]
    """Images per block."""
    seed: Annotated[int, Range(0, MOST_SEED)]
    """Seed for the order of the images in the shards."""
    labels_file: str = ""
    """File with one class name per line, in the order of their ids; empty: the names found, sorted."""
    labels: LabelRules = LabelRules()
    """How labels are read that could be meant two ways."""
    limits: ImageLimits = field(default_factory=ImageLimits)
    """Largest images that are accepted."""
    images: ImageChecks = field(default_factory=ImageChecks)
    """Damaged images to leave out."""
    dedup: Dedup = field(default_factory=Dedup)
    """Duplicates to leave out."""
    resize: Resize = field(default_factory=Resize)
    """Images to store as smaller copies."""
    unlabeled: Literal["refuse", "keep"] = "refuse"
    """Whether images without a label are quarantined, or packed: scores then leave them out, as ImageNet-ReaL does."""
    set_aside: SetAside = SetAside()
    """Test split that is set aside."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")

    @property
    def is_hashed(self) -> bool:
        """Whether the scan makes perceptual hashes, for which it decodes every image."""
        return bool(self.dedup.against)

    @property
    def refuses_truncated(self) -> bool:
        """Whether the scan looks for JPEGs of which a part is missing."""
        is_reencoded = self.resize.short_side > 0 or self.resize.convert
        return self.images.truncated == "quarantine" or (self.images.truncated == "auto" and is_reencoded)

    def settings(self) -> dict[str, object]:
        """The settings as plan.json records them."""
        settings: dict[str, object] = json.loads(json.dumps(asdict(self)))
        if self.unlabeled == "refuse":  # as in plans that were made before there was a choice
            del settings["unlabeled"]
        if self.labels == LabelRules():
            del settings["labels"]
        if self.images == ImageChecks():
            del settings["images"]
        if self.set_aside == SetAside():
            del settings["set_aside"]
        return settings

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that can change a written byte."""
        packages = [*CODEC_PACKAGES, *(HASH_PACKAGES if self.is_hashed else ())]
        return tool_versions(self.source) | {package: version(package) for package in packages}

    def scan_hash(self) -> str:
        """sha256 of what decides the scan: two jobs that share it can share listing and scan files."""
        decides = {
            "source": asdict(self.source),
            "limits": asdict(self.limits),
            "perceptual_hash": PERCEPTUAL_HASH if self.is_hashed else "",
            "versions": self.versions(),
        } | ({"refuses_truncated": True} if self.refuses_truncated else {})
        if not self.source.labels_are_names:
            decides["labels"] = "as written"
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class About:
    """Texts of at most MOST_CHARACTERS, without control characters but line breaks; empty: nothing is said."""

    description: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        for option, text in (("--description", self.description), ("--licence", self.licence)):
            _check(option, text)

    def of(self, manifest: Manifest) -> Manifest:
        """The manifest with these texts; one that is empty here stays as it is there."""
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
    is_surrogate = 0xD800 <= ord(character) < 0xE000  # bytes of the command line that are not UTF-8
    return character != _LINE_BREAK and (is_control or is_surrogate or character in _TURNING)
