"""The card as a page: readable as XML-like markup, self-contained, small, and inert whatever the names are."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from shards.card.card import gather_facts
from shards.card.card_page import byte_text, render, share_text, shown, title_of
from shards.dataset import open_dataset
from shards.store import open_store
from tests.rigs.card_datasets import Sample, write_dataset
from tests.rigs.images import image_bytes

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</style><style>body{display:none}",
    "--><b>",
    "{{ 7*7 }}{% raw %}",
    "a\nb\x00\x1b[31m",
    "\u202egpj.live",
    "x" * 5000,
    "日本語 شمس",
)
VOID = {"meta", "img", "link", "br"}


class Page(HTMLParser):
    """Tags in order, with a check that they nest."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page.decode())
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path) -> bytes:
    return render(gather_facts(open_dataset(str(folder)), num_tiles=20))


def hostile_dataset(folder: Path) -> bytes:
    samples = [
        Sample(labels=(label, (label + 1) % len(HOSTILE)), image=image_bytes(label), source=name)
        for label, name in enumerate(HOSTILE)
    ]
    quarantine: list[dict[str, object]] = [
        {"position": 0, "source": name, "phase": name, "kind": kind, "reason": name, "match": name, "distance": 1}
        for name in HOSTILE
        for kind in ("refused", "duplicate", "evaluation")
    ]
    matches: list[dict[str, object]] = [
        {"source": name, "evaluation": name, "evaluation_set": name, "distance": 1, "thumbnail": name.encode()}
        for name in HOSTILE
    ]
    settings: dict[str, object] = {name: [name] for name in HOSTILE}
    write_dataset(
        open_store(str(folder)), [samples], HOSTILE, quarantine=quarantine, matches=matches, settings=settings
    )
    return page_of(folder)


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    data = hostile_dataset(tmp_path / HOSTILE[0].replace("/", "_"))
    page = Page(data)
    assert "<script>alert(1)</script>" in page.text
    assert not {"script", "iframe", "object", "embed", "form", "base", "link"} & {tag for tag, _ in page.tags}
    assert sum(tag == "style" for tag, _ in page.tags) == 1
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "{{ 7*7 }}" in page.text
    assert not re.search("[\x00-\x08\x1b\u202e]", data.decode())
    assert len(data) < 1_000_000


def test_nothing_is_asked_of_the_network(tmp_path: Path) -> None:
    page = Page(hostile_dataset(tmp_path))
    for tag, attributes in page.tags:
        assert (attributes.get("src") or "data:").startswith("data:image/jpeg;base64,") or tag != "img"
        assert (attributes.get("href") or "#").startswith("#")
    policy = [found.get("content") for tag, found in page.tags if tag == "meta" and "http-equiv" in found]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_pictures_are_whole_and_described(tmp_path: Path) -> None:
    page = Page(hostile_dataset(tmp_path))
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == len(HOSTILE)
    for attributes in pictures:
        assert attributes["alt"]
        assert base64.b64decode((attributes["src"] or "").partition(",")[2]).startswith(b"\xff\xd8\xff")


def test_equal_datasets_have_equal_cards(tmp_path: Path) -> None:
    pages = []
    for name in ("a", "b"):
        write_dataset(open_store(str(tmp_path / name / "set")), [[Sample(image=image_bytes(1))]], ["c"])
        pages.append(page_of(tmp_path / name / "set"))
    assert pages[0] == pages[1]


def test_many_classes_stay_readable_and_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = (rng.pareto(1.0, size=30_000) * 20).astype(int) % 20_990
    samples = [Sample(labels=(int(label),)) for label in labels]
    write_dataset(open_store(str(tmp_path)), [samples], [f"n{number:08d}" for number in range(21_000)])
    page = page_of(tmp_path)
    assert len(page) < 100_000
    text = Page(page).text
    assert "Largest classes" in text
    assert "Smallest classes that have a sample" in text
    assert "half in " in text


@pytest.mark.parametrize(
    ("shards", "names", "expected"),
    [
        ([], [], "No sample has a label."),
        ([[Sample(labels=())]], ["a"], "No sample has a label."),
        ([[Sample(), Sample()]], ["a"], "Every class has 2 samples."),
        ([[Sample()]], ["a", "b"], "Every class that has any has 1 sample."),
        ([[Sample(), Sample(), Sample(labels=(1,))]], ["a", "b", "c"], "; 1 class has no sample."),
        ([[Sample(), Sample(), Sample(labels=(1,))]], ["a", "b", "c", "d"], "; 2 classes have no sample."),
        ([[Sample(height=1, width=1, num_bytes=1)]], ["a"], "Every image is 1 × 1 pixels."),
        ([[Sample(height=1, width=2000), Sample(height=9000, width=3)]], ["a"], "Most common sizes"),
        ([[Sample(labels=(0, 1))]], ["a", "b"], "Labels together"),
        ([[Sample(orientation=6)]], ["a"], "1 stored on its right side"),
    ],
)
def test_small_and_odd_datasets(tmp_path: Path, shards: list[list[Sample]], names: list[str], expected: str) -> None:
    write_dataset(open_store(str(tmp_path)), shards, names)
    assert expected in Page(page_of(tmp_path)).text


def test_what_was_left_out(tmp_path: Path) -> None:
    reason = "a copy of an image of s3://u:hunter2@e/x?k=hunter2"
    rows: list[dict[str, object]] = [
        {"source": "x.jpg", "phase": "scan", "kind": "refused", "reason": "empty file"},
        {"source": "y.jpg", "phase": "plan", "kind": "duplicate", "reason": "the same bytes", "match": "z.jpg"},
        {"source": "v.jpg", "phase": "plan", "kind": "evaluation", "reason": reason, "match": "w.png", "distance": 3},
    ]
    settings: dict[str, object] = {"source": {"url": "https://me:hunter2@host/list?sig=hunter2", "empty": ""}}
    store = open_store(str(tmp_path))
    write_dataset(store, [[Sample()]], ["a"], quarantine=rows, settings=settings, num_relabelled=1)
    text = Page(page_of(tmp_path)).text
    for expected in ("1 refused, 1 duplicate, 1 too like", "1 of them had other labels", "distance 3", "source.url"):
        assert expected in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("url", "title"),
    [
        ("s3://bucket/a/in21k", "in21k"),
        ("s3://bucket", "bucket"),
        ("/data/sets/digits/", "digits"),
        ("s3://key:secret@bucket", "bucket"),
        ("https://host/x/set?sig=secret", "set"),
    ],
)
def test_title(url: str, title: str) -> None:
    assert title_of(url) == title


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain <b>", "plain <b>"),
        ("a\tb", "a\\tb"),
        ("a\u202eb", "a\\u202eb"),
        ("0123456789", "01…89"),
        ("https://u:p@h/x?y=1 and s3://k@b/c", "https://h/x and s3://b/c"),
    ],
)
def test_shown(text: str, expected: str) -> None:
    assert shown(text, 4 if text.isdecimal() else 90) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_999, "1.00 MB"), (56.5e6, "56.5 MB"), (1.3e12, "1.30 TB")],
)
def test_byte_text(count: float, expected: str) -> None:
    assert byte_text(count) == expected


@pytest.mark.parametrize(
    ("count", "total", "expected"),
    [(0, 9, "0 %"), (9, 9, "100 %"), (1, 3, "33.3 %"), (1, 10**6, "< 0.01 %"), (5, 1000, "0.50 %"), (0, 0, "0 %")],
)
def test_share_text(count: int, total: int, expected: str) -> None:
    assert share_text(count, total) == expected
