"""Samples are found as webdataset finds them; labels come from .cls and .json; missing labels have a reason."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from shards.adoption.foreign_samples import FoundSample, SampleRules, TarFault, find_samples
from shards.errors import ImageRefusedError
from shards.sources.tar_members import BrokenOffTarError, DamagedTarError, Member, split_name

RULES = SampleRules()


def member(name: str, data: bytes | ImageRefusedError = b"x") -> Member:
    return Member(name, 512, 1, data)


def found_in(*members: Member, rules: SampleRules = RULES) -> list[FoundSample | TarFault]:
    return list(find_samples(members, rules))


def reasons(*members: Member, rules: SampleRules = RULES) -> list[str]:
    return [item.reason for item in found_in(*members, rules=rules)]


NAMES = st.text(st.sampled_from("ab./_\n"), min_size=1, max_size=8)


@given(NAMES)
def test_names_are_split_as_by_webdataset(name: str) -> None:
    if split_name(name) is not None or not name.startswith("__"):
        assert (split_name(name) or (None, None)) == base_plus_ext(name)


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b/c", "b.c/d", "a.b"]), st.sampled_from(["jpg", "JPG", "cls", "l.jpg"])))
)
def test_samples_are_those_of_webdataset(parts: list[tuple[str, str]]) -> None:
    names = [f"{key}.{suffix}" for key, suffix in parts]
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(bytes([65 + number % 26])))
    members = [Member(name, 0, 1, bytes([65 + number % 26])) for number, name in enumerate(names)]
    file.seek(0)
    found = found_in(*members)
    try:
        by_webdataset = list(group_by_keys(tar_file_expander([{"url": "tar", "stream": file}])))
    except ValueError:
        assert any(isinstance(item, TarFault) and item.is_fatal for item in found)
        return
    expected = [(item["__key__"], item["jpg"], item["cls"]) for item in by_webdataset if {"jpg", "cls"} <= set(item)]
    good = [item for item in found if isinstance(item, FoundSample) and not item.reason]
    assert [(item.key, item.image, item.labels[0].encode()) for item in good] == expected
    assert len(found) == len(by_webdataset)


def test_a_sample_with_all_it_can_have() -> None:
    (sample,) = found_in(member("d.e/a.txt"), Member("d.e/a.JPEG", 99, 5, b"image"), member("d.e/a.cls", b" 7\n"))
    assert sample == FoundSample(
        key="d.e/a", name="d.e/a.JPEG", suffix="JPEG", image=b"image", offset=99, labels=("7",)
    )


def test_the_first_image_key_that_is_there() -> None:
    members = (member("a.png", b"png"), member("a.jpg", b"jpg"), member("a.cls", b"0"))
    for keys, image in ((("jpg", "png"), b"jpg"), (("png", "jpg"), b"png"), (("webp", "png"), b"png")):
        (sample,) = found_in(*members, rules=SampleRules(image_keys=keys))
        assert isinstance(sample, FoundSample)
        assert sample.image == image


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (b'{"label": 3}', ("3",)),
        (b'{"label": "tench"}', ("tench",)),
        (b'{"label": [5, 2, 5]}', ("5", "2", "5")),
        (b'{"label": 1.0}', ("1",)),
        (b'{"label": ["None", "NA"]}', ("None", "NA")),
        (b'{"label": ["a", "b"]}', ("a", "b")),
        (b'\xef\xbb\xbf{"label": 3}', ("3",)),
    ],
)
def test_labels_of_a_json_field(data: bytes, labels: tuple[str, ...]) -> None:
    (sample,) = found_in(member("a.json", data), member("a.jpg"), rules=SampleRules(label_field="label"))
    assert isinstance(sample, FoundSample)
    assert sample.labels == labels


def test_a_byte_order_mark_belongs_to_no_label() -> None:
    (sample,) = found_in(member("a.jpg"), member("a.cls", b"\xef\xbb\xbf0"))
    assert isinstance(sample, FoundSample)
    assert sample.labels == ("0",)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "its .json is damaged"),
        (b"\xff", "its .json is not UTF-8"),
        (b"[" * 200_000, "its .json is nested too deep"),
        (b'{"label": ' + b"[" * 900 + b"]" * 900 + b"}", "is a list; allowed: text, whole numbers and lists of them"),
        (b'{"label": ' + b"9" * 6000 + b"}", "its .json is damaged"),
        (b'{"label": "' + b"9" * 6000 + b'"}', "its label is too long: 6000 characters, allowed: 1024"),
        (b'{"label": %s}' % str(list(range(10_001))).encode(), "too many labels: 10001, allowed: 10000"),
        (b" " * (4 << 20) + b"{}", "its .json has 4194306 bytes, allowed: 4194304"),
        (b"[1]", "no label"),
        (b"{}", "no label"),
        (b'{"label": null}', "no label"),
        (b'{"label": []}', "no label"),
        (b'{"label": ["", null]}', "no label"),
        (b'{"label": true}', "its label True is a bool; allowed: text, whole numbers and lists of them"),
        (b'{"label": [{"a": 1}]}', "is a dict; allowed: text, whole numbers and lists of them"),
    ],
)
def test_json_that_has_no_label(data: bytes, reason: str) -> None:
    (found,) = reasons(member("a.json", data), member("a.jpg"), rules=SampleRules(label_field="label"))
    assert reason in found


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([member("a.jpg")], "no label: it has no member .cls"),
        ([member("a.jpg"), member("a.cls", b"\n")], "no label"),
        ([member("a.jpg"), member("a.cls", b"\xff")], "no label: its .cls is not UTF-8"),
        ([member("a.cls"), member("a.npy")], "no image: its members are cls, npy"),
        ([member(f"a.{n}") for n in range(99)], "no image: its members are 0, 1, 10, 11, 12, 13, 14, 15 and 91 more"),
        ([member("a.jpg"), member("a.cls", b"9" * 6000)], "its label is too long: 6000 characters, allowed: 1024"),
        ([member("a.jpg", ImageRefusedError("too large")), member("a.cls")], "too large"),
        ([member("a.jpg"), member("a.cls", ImageRefusedError("a hard link"))], "a hard link"),
        ([member("Makefile", ImageRefusedError("a hard link"))], "a hard link"),
    ],
)
def test_samples_that_are_refused(members: list[Member], reason: str) -> None:
    assert reasons(*members, member("b.jpg"), member("b.cls")) == [reason, ""]


def test_what_is_no_sample_is_passed_over() -> None:
    members = (
        member("__index__/a.jpg"),
        member("__tag__"),
        member("README"),
        member("d/._a.jpg"),
        member("d/.b.cls"),
    )
    assert found_in(*members) == []


def test_faults_end_a_sample() -> None:
    found = found_in(
        member("a.jpg"), member("", DamagedTarError("gap")), member("a.cls"), member("", BrokenOffTarError("end"))
    )
    assert [item.reason for item in found] == [
        "no label: it has no member .cls",
        "gap",
        "no image: its members are cls",
        "end",
    ]
    assert [item.is_fatal for item in found if isinstance(item, TarFault)] == [False, True]


def test_only_what_is_needed_is_read() -> None:
    names = ("d/a.JPG", "d/a.cls", "d/a.json", "d/a.npy", "d/a.left.jpg", "jpg")
    assert [name for name in names if RULES.is_needed(name)] == ["d/a.JPG", "d/a.cls"]
    rules = SampleRules(label_field="label", image_keys=("left.jpg",))
    assert [name for name in names if rules.is_needed(name)] == ["d/a.json", "d/a.left.jpg"]
