"""Names that are not Unicode, and refusing images that are too large."""

import os

from shards.sources.entry import printable, too_large


def test_names_that_are_not_utf8_become_printable() -> None:
    assert printable(os.fsdecode(b"caf\xe9.jpg")) == "caf\\xe9.jpg"
    assert printable("café 猫.jpg") == "café 猫.jpg"


def test_a_refusal_says_how_many_bytes_there_are_and_may_be() -> None:
    assert str(too_large(5, max_bytes=4)) == "too large: 5 bytes, allowed: 4"
