"""What people should know of a dataset: its description and its licence. The manifest holds both; no other byte of the
dataset depends on them."""

import logging
from dataclasses import dataclass, replace

from shards.errors import UserError
from shards.manifest import MANIFEST_PATH, Manifest
from shards.store import Store

log = logging.getLogger(__name__)

MOST_CHARACTERS = 10_000
_LINE_BREAK = "\n"
# These turn the direction of the text after them, so that a line looks different from what it says.
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


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


def describe(store: Store, manifest: Manifest, about: About) -> None:
    """Write the texts into the manifest of a finished dataset, if they are new."""
    from shards.manifest_table import write_manifest  # noqa: PLC0415 - settings that only answer do not need tables

    described = about.of(manifest)
    if described != manifest:
        write_manifest(store, described)
        log.info("description and licence written to %s/%s", store.url, MANIFEST_PATH)


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
