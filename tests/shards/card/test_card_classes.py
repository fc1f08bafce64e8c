"""The list of classes that the search uses."""

from pathlib import Path

import pytest

from shards.card import card_classes
from shards.card.card import gather_facts
from shards.card.card_classes import class_facts
from shards.dataset import open_dataset
from shards.store import open_store
from tests.rigs.card_datasets import Sample, write_dataset


def test_the_largest_classes_come_first_and_names_hold_no_separator(tmp_path: Path) -> None:
    write_dataset(open_store(str(tmp_path)), [[Sample(labels=(1,)), Sample(labels=(1,))]], ["a\tb\nc", "d"])
    facts = class_facts(gather_facts(open_dataset(str(tmp_path)), num_tiles=0))
    assert facts["to_search"] == "1\t2\td\n0\t0\ta\\tb\\nc"
    assert facts["num_searched"] == "2 classes"


def test_endless_classes_do_not_make_an_endless_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_classes, "MOST_SEARCHED", 2)
    write_dataset(open_store(str(tmp_path)), [[Sample(labels=(4,))]], list("abcde"))
    facts = class_facts(gather_facts(open_dataset(str(tmp_path)), num_tiles=0))
    assert facts["to_search"] == "4\t1\te\n0\t0\ta"
    assert facts["num_searched"] == "the 2 largest of 5 classes"
