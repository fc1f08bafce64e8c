"""The card as a page: well-formed, self-contained, small, and safe for any name."""

import base64
import hashlib
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shards.card import page as card_page
from shards.card.facts import gather_facts
from shards.card.page import Use, class_facts, image_words, render, title_of
from shards.card.tally import Tally
from shards.dataset import open_dataset
from shards.index import INDEX_SCHEMA
from shards.manifest import MANIFEST_PATH
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
VOID = {"meta", "img", "link", "br", "input"}
USE = Use(title="Train on it", commands=(("A small model.", "patchline pretrain photos_smoke --data.url 'a b'"),))


class Page(HTMLParser):
    """Tags in order, with a check that they nest."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
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
        if self._open[-1:] == ["script"]:
            self.scripts.append(data)
        else:
            self.text += data


def page_of(folder: Path) -> bytes:
    return render(gather_facts(open_dataset(str(folder)), num_tiles=20), use=USE)


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
    manifest = write_dataset(
        open_store(str(folder)), [samples], HOSTILE, quarantine=quarantine, matches=matches, settings=settings
    )
    described = replace(manifest, description="\n".join(HOSTILE), licence=HOSTILE[0])
    open_store(str(folder)).write(MANIFEST_PATH, described.to_bytes())
    return page_of(folder)


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    data = hostile_dataset(tmp_path / HOSTILE[0].replace("/", "_"))
    page = Page(data)
    assert "<script>alert(1)</script>" in page.text
    assert not {"iframe", "object", "embed", "form", "base", "link"} & {tag for tag, _ in page.tags}
    assert [sum(tag == only for tag, _ in page.tags) for only in ("style", "script")] == [1, 1]
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
    script = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    allowed = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{script}'"
    assert policy == [f"{allowed}; base-uri 'none'; form-action 'none'"]


def test_the_script_sets_names_as_text_only(tmp_path: Path) -> None:
    (script,) = Page(hostile_dataset(tmp_path)).scripts
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval", "Function", "fetch", "http"):
        assert sink not in script


def test_pictures_are_whole_and_described(tmp_path: Path) -> None:
    page = Page(hostile_dataset(tmp_path))
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == len(HOSTILE)
    for attributes in pictures:
        assert attributes["alt"]
        assert base64.b64decode((attributes["src"] or "").partition(",")[2]).startswith(b"\xff\xd8\xff")


def test_a_picture_is_a_button_with_its_source_beside_it(tmp_path: Path) -> None:
    samples = [Sample(image=image_bytes(1), source="birds/heron 1.jpg")]
    write_dataset(open_store(str(tmp_path)), [samples], ["heron"])
    page = Page(page_of(tmp_path))
    tiles = [attributes for tag, attributes in page.tags if tag == "button" and attributes["class"] == "tile"]
    assert [tile["type"] for tile in tiles] == ["button"]
    for expected in ("birds/heron 1.jpg", "0000000000 in shards/shard-000000.tar", "32 × 24 pixels"):
        assert expected in page.text
    assert [attributes["aria-label"] for tag, attributes in page.tags if tag == "dialog"] == ["Enlarged sample"]


def test_every_button_and_field_has_a_name_for_screen_readers(tmp_path: Path) -> None:
    data = hostile_dataset(tmp_path).decode()
    page = Page(data.encode())
    fields = [attributes["id"] for tag, attributes in page.tags if tag == "input"]
    assert fields == [attributes["for"] for tag, attributes in page.tags if tag == "label"]
    buttons = re.findall(r"<button[^>]*>(.*?)</button>", data)
    assert len(buttons) == sum(tag == "button" for tag, _ in page.tags)
    assert all(re.sub('<img[^>]* alt="([^"]+)"[^>]*>|<[^>]*>', r"\1", button) for button in buttons)


def test_description_licence_and_use(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    manifest = write_dataset(store, [[Sample()]], ["a"])
    assert "Licence" not in Page(page_of(tmp_path)).text
    told = replace(manifest, description="Birds.\n\nSee https://h/x?id=3", licence="MIT\nAs it is.")
    store.write(MANIFEST_PATH, told.to_bytes())
    page = Page(page_of(tmp_path))
    for expected in ("Birds.", "See https://h/x?id=3", "Licence", "As it is.", USE.title, USE.commands[0][1]):
        assert expected in page.text
    assert sum(tag == "details" for tag, _ in page.tags) == 1  # a licence of several lines is folded
    assert USE.title not in Page(render(gather_facts(open_dataset(str(tmp_path)), num_tiles=0))).text


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
    assert len(page) < 600_000  # most of it is the list for the search
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
        ([[Sample(orientation=6)]], ["a"], "1 with EXIF rotation (by 90° clockwise)."),
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
    elsewhere = {"phase": "plan", "kind": "split", "reason": "in the test split"}
    rows += [{"source": f"{n}.jpg", **elsewhere} for n in range(3)]
    settings: dict[str, object] = {"source": {"url": "https://me:hunter2@host/list?sig=hunter2", "empty": ""}}
    store = open_store(str(tmp_path))
    write_dataset(store, [[Sample()]], ["a"], quarantine=rows, settings=settings, num_relabelled=1)
    text = Page(page_of(tmp_path)).text
    counts = "1 refused, 1 duplicate, 1 of evaluation sets, 3 in the other split"
    sums = f"The source has 7 images: 1 are in this dataset, and 6 are left out ({counts})."
    for expected in (sums, "1 of them had other labels", "distance 3", "source.url", "In the other split"):
        assert expected in text
    assert text.count(counts) == 2, "under the number at the top, and with its list"
    assert "hunter2" not in text


def tally_of(*orientations: int, ext: str = "jpg") -> Tally:
    rows = [
        {"size": 9, "ext": ext, "height": 2, "width": 3, "labels": [0], "orientation": turn} for turn in orientations
    ]
    tally = Tally(top_classes=np.array([0]), num_classes=1)
    tally.add(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    return tally


@pytest.mark.parametrize(
    ("orientations", "modes", "expected"),
    [
        ((1, 1), {"RGB": 2}, "2 JPEG; all RGB"),
        ((1,) * 500, {"RGB": 486, "L": 14}, "500 JPEG; 486 RGB, 14 greyscale"),
        ((1, 6), {"RGB": 1, "L": 1}, "2 JPEG; 1 RGB, 1 greyscale; 1 with EXIF rotation (by 90° clockwise)"),
        (
            (6, 6, 3, 8),
            {},
            "4 JPEG; 4 with EXIF rotation (1 by 180°, 2 by 90° clockwise, 1 by 90° anticlockwise)",
        ),
        ((2, 1), {}, "2 JPEG; 1 mirrored by EXIF"),
        (
            (2, 5),
            {"": 2},
            "2 JPEG; all of unknown mode; 1 mirrored by EXIF, 1 with EXIF rotation (by 90° anticlockwise and mirrored)",
        ),
    ],
)
def test_image_words(orientations: tuple[int, ...], modes: dict[str, int], expected: str) -> None:
    assert image_words(tally_of(*orientations), Counter(modes)) == expected


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


def test_the_largest_classes_come_first_and_names_hold_no_separator(tmp_path: Path) -> None:
    write_dataset(open_store(str(tmp_path)), [[Sample(labels=(1,)), Sample(labels=(1,))]], ["a\tb\nc", "d"])
    facts = class_facts(gather_facts(open_dataset(str(tmp_path)), num_tiles=0))
    assert facts["to_search"] == "1\t2\td\n0\t0\ta\\tb\\nc"
    assert facts["num_searched"] == "2 classes"


def test_endless_classes_do_not_make_an_endless_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_page, "MOST_SEARCHED", 2)
    write_dataset(open_store(str(tmp_path)), [[Sample(labels=(4,))]], list("abcde"))
    facts = class_facts(gather_facts(open_dataset(str(tmp_path)), num_tiles=0))
    assert facts["to_search"] == "4\t1\te\n0\t0\ta"
    assert facts["num_searched"] == "the 2 largest of 5 classes"
