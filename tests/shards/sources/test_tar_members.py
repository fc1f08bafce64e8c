"""Headers and members of tars, and what damaged or hostile archives do."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ImageRefusedError
from shards.sources.tar_members import (
    AmbiguousMemberError,
    BrokenOffTarError,
    DamagedTarError,
    Member,
    begins_again,
    is_hidden,
    parse_header,
    parse_long_name,
    parse_number,
    parse_pax,
    read_members,
)
from shards.storage.ahead import Pieces

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
PNG = b"\x89PNG" + bytes(600)
PARTS = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=120)
NAMES = st.one_of(
    st.lists(PARTS, min_size=1, max_size=4).map("/".join),
    st.binary(min_size=1, max_size=80).map(lambda name: name.decode("utf-8", "surrogateescape")),
).filter(lambda name: not name.startswith("/") and not name.endswith("/") and ".." not in name and "\0" not in name)


def block(
    name: str, *, size: int = 0, kind: bytes = tarfile.REGTYPE, tar_format: Literal[0, 1, 2] = tarfile.USTAR_FORMAT
) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tar_format, "utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("field", "number"),
    [
        (b"00000000017\0", 15),
        (b"        17 \0", 15),
        (b"17\0\0\0\0\0\0\0\0\0\0", 15),
        (b"17 \0garbage!", 15),
        (b"777777777777", 8**12 - 1),
        (b"\0" * 12, 0),
        (b" " * 12, 0),
        (b"\x80" + (20 << 30).to_bytes(11, "big"), 20 << 30),
    ],
)
def test_numbers(field: bytes, number: int) -> None:
    assert parse_number(field) == number


def test_a_name_with_a_prefix() -> None:
    name = "a" * 90 + "/" + "b" * 90
    header = parse_header(block(name, size=7))
    assert header is not None
    assert (header.name, header.size, header.kind) == (name, 7, b"0")


def test_a_prefix_in_a_header_without_one_is_refused() -> None:
    """tarfile uses it in headers of any format, other readers in those of ustar alone."""
    changed = bytearray(block("name"))
    changed[257:265] = bytes(8)
    changed[345:350] = b"other"
    changed[148:156] = b"%06o\0 " % (sum(changed[:148]) + 8 * 32 + sum(changed[156:]))
    header = parse_header(bytes(changed))
    assert header is not None
    assert "no format that has a prefix" in header.refusal


@pytest.mark.parametrize("begin", [100, 108, 116, 136, 329, 337])
def test_numbers_at_which_other_readers_stop_are_refused(begin: int) -> None:
    """tarfile takes such a header for the end of the archive."""
    changed = bytearray(block("name"))
    changed[begin : begin + 8] = b"99999999"
    changed[148:156] = b"%06o\0 " % (sum(changed[:148]) + 8 * 32 + sum(changed[156:]))
    with pytest.raises(tarfile.InvalidHeaderError):  # type: ignore[attr-defined]
        tarfile.TarInfo.frombuf(bytes(changed), "utf-8", "surrogateescape")
    header = parse_header(bytes(changed))
    assert header is not None
    assert "not octal" in header.refusal


def test_gnu_headers_have_no_prefix() -> None:
    """GNU tar stores times where ustar has the prefix."""
    changed = bytearray(block("name", tar_format=tarfile.GNU_FORMAT))
    changed[345:357] = b"14371573000\0"
    changed[148:156] = b"%06o\0 " % (sum(changed[:148]) + 8 * 32 + sum(changed[156:]))
    header = parse_header(bytes(changed))
    assert header is not None
    assert header.name == "name"


def test_a_v7_folder_ends_with_a_slash() -> None:
    header = parse_header(block("folder/", kind=tarfile.AREGTYPE))
    assert header is not None
    assert header.kind == b"5"


@given(st.integers(0, 511), st.integers(1, 255))
def test_every_changed_byte_is_found(position: int, change: int) -> None:
    good = block("some/name.jpg", size=12345)
    changed = bytearray(good)
    changed[position] = (changed[position] + change) % 256
    header = parse_header(bytes(changed))
    # A checksum field written differently may have the same value.
    assert header is None or 148 <= position < 156


def test_signed_checksums_of_old_systems() -> None:
    made = bytearray(block("é" * 20))
    signed = sum(byte - 256 if byte > 127 else byte for byte in made[:148] + made[156:]) + 8 * 32
    made[148:156] = b"%06o\0 " % signed
    header = parse_header(bytes(made))
    assert header is not None
    assert header.name == "é" * 20


@pytest.mark.parametrize("data", [b"", bytes(512), b"x" * 512, block("name")[:511]])
def test_what_is_no_header(data: bytes) -> None:
    assert parse_header(data) is None
    assert begins_again(data) is None


def test_reading_goes_on_only_at_a_header_with_its_magic() -> None:
    good = block("name")
    assert begins_again(good) is not None
    old = bytearray(good)
    old[257:265] = bytes(8)
    old[148:156] = b"%06o\0 " % (sum(old[:148]) + 8 * 32 + sum(old[156:]))
    assert parse_header(bytes(old)) is not None
    assert begins_again(bytes(old)) is None


def test_pax_records() -> None:
    assert parse_pax(b"15 path=a = b\n\n10 size=3\n\0\0") == {"path": "a = b\n", "size": "3"}
    assert parse_pax(b"11 path=\xff\xfe\n") == {"path": "\udcff\udcfe"}
    assert parse_pax(b"") == {}
    assert parse_pax(b"14 comment=ab\n") == {}, "what nobody reads is not kept"
    assert parse_pax(b"22 GNU.sparse.major=1\n") == {"GNU.sparse.major": "1"}


def test_long_names() -> None:
    assert parse_long_name(b"n" * 200 + b"\0\0") == "n" * 200


def tar_of(*members: tarfile.TarInfo | tuple[str, bytes], tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar; each TarInfo gets as many zeros as its size says."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member, io.BytesIO(bytes(member.size)))
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return file.getvalue()


def special(name: str, kind: bytes, *, size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, "elsewhere"
    return info


def members_of(
    tar: bytes,
    *,
    first: int = 0,
    wanted: Callable[[str], bool] = lambda _: True,
    max_bytes: int = 1 << 20,
    with_data: Callable[[str], bool] = lambda _: True,
) -> list[Member]:
    pieces = Pieces(lambda begin, end: tar[begin:end], first, len(tar), piece_bytes=700)
    return list(read_members(pieces, wanted=wanted, max_bytes=max_bytes, with_data=with_data))


def outcome(member: Member) -> tuple[str, str]:
    return member.name, str(member.data) if isinstance(member.data, ImageRefusedError) else "read"


def by_tarfile(tar: bytes) -> list[tuple[str, int, int, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
        found = []
        for info in archive:
            file = archive.extractfile(info)
            assert file is not None
            found.append((info.name, info.offset_data, info.size, file.read()))
        return found


@pytest.mark.parametrize("tar_format", FORMATS.values(), ids=FORMATS)
@given(data=st.data())
def test_the_same_members_as_by_tarfile(tar_format: int, data: st.DataObject) -> None:
    names = data.draw(st.lists(NAMES, max_size=6))
    contents = [(name, data.draw(st.binary(max_size=1500))) for name in names]
    if tar_format == tarfile.USTAR_FORMAT:
        contents = [item for item in contents if len(item[0].encode("utf-8", "surrogateescape")) <= 100]
    tar = tar_of(*contents, tar_format=tar_format)
    found = [(member.name, member.offset, member.size, member.data) for member in members_of(tar)]
    assert found == by_tarfile(tar)
    assert [(name, content) for name, _, _, content in found] == contents


def test_odd_names_are_normal() -> None:
    names = [
        "a b.jpg",
        "a.b.c.jpg",
        "图像/ü.jpg",
        "x\udcff\udcfe.jpg",
        "same.jpg",
        "same.jpg",
        "./d/e.jpg",
        "..a/b...jpg",
    ]
    for tar_format in FORMATS.values():
        tar = tar_of(*((name, PNG) for name in names), tar_format=tar_format)
        assert [outcome(member) for member in members_of(tar)] == [(name, "read") for name in names]


def test_offsets_are_those_of_the_whole_object() -> None:
    inner = tar_of(("one.jpg", b"111"), ("two.jpg", b"22"))
    outer = tar_of(("first.txt", b"x" * 1000), ("inner.tar", inner))
    (inner_member,) = members_of(outer, wanted=lambda name: name.endswith(".tar"), with_data=lambda _: False)
    assert (inner_member.data, inner_member.size) == (None, len(inner))
    assert outer[inner_member.offset : inner_member.offset + inner_member.size] == inner
    for member in members_of(outer, first=inner_member.offset, max_bytes=5):
        if member.name.endswith(".jpg"):
            assert outer[member.offset : member.offset + member.size] == member.data


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (special("hard.jpg", tarfile.LNKTYPE), "a hard link, not a file"),
        (special("soft.jpg", tarfile.SYMTYPE), "a symbolic link, not a file"),
        (special("tty.jpg", tarfile.CHRTYPE), "a character device, not a file"),
        (special("disk.jpg", tarfile.BLKTYPE), "a block device, not a file"),
        (special("pipe.jpg", tarfile.FIFOTYPE), "a FIFO, not a file"),
        (special("odd.jpg", b"Z", size=700), "of the unknown type b'Z', not a file"),
        (special("sparse.jpg", tarfile.GNUTYPE_SPARSE, size=700), "a sparse file, not a file"),
        (special("/etc/passwd", tarfile.REGTYPE, size=700), "an absolute path"),
        (special("../up.jpg", tarfile.REGTYPE, size=700), "a path with a '..' part"),
        (special("a/../up.jpg", tarfile.REGTYPE), "a path with a '..' part"),
        (special("", tarfile.REGTYPE, size=700), "it has no name"),
        (special("large.jpg", tarfile.REGTYPE, size=5001), "too large: 5001 bytes, allowed: 5000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_and_what_follows_it(member: tarfile.TarInfo, reason: str) -> None:
    tar = tar_of(("before.jpg", PNG), member, ("after.jpg", PNG))
    found = [outcome(member) for member in members_of(tar, max_bytes=5000)]
    assert found == [("before.jpg", "read"), (member.name, reason), ("after.jpg", "read")]


def test_what_is_too_large_is_not_read() -> None:
    tar = tar_of(special("large.jpg", tarfile.REGTYPE, size=1 << 20), ("after.jpg", PNG))
    asked: list[int] = []

    def read_range(first: int, end: int) -> bytes:
        asked.append(end - first)
        return tar[first:end]

    pieces = Pieces(read_range, 0, len(tar), piece_bytes=4096)
    found = [outcome(member) for member in read_members(pieces, wanted=lambda _: True, max_bytes=5000)]
    assert [name for name, _ in found] == ["large.jpg", "after.jpg"]
    assert sum(asked) < 30_000


def test_folders_and_unwanted_files_are_passed_over() -> None:
    tar = tar_of(
        special("folder", tarfile.DIRTYPE),
        special("old folder/", tarfile.AREGTYPE),
        ("notes.txt", b"x"),
        ("._a.jpg", b"x"),
        ("a.jpg", PNG),
    )
    found = members_of(tar, wanted=lambda name: name.endswith(".jpg") and not is_hidden(name))
    assert [outcome(member) for member in found] == [("a.jpg", "read")]


@pytest.mark.parametrize(
    ("name", "expected"), [("._a.jpg", True), ("d/._a.jpg", True), (".d/a.jpg", False), ("a.jpg", False)]
)
def test_hidden_files(name: str, expected: bool) -> None:
    assert is_hidden(name) is expected


def test_sizes_and_names_of_pax_headers() -> None:
    """The header's own size is 0 and the record has the true one, as for more than 8 GiB."""
    header = special("true.jpg", tarfile.REGTYPE, size=0)
    records = b"12 size=604\n24 path=folder/name.jpg\n"
    record = special("x", b"x", size=len(records))
    tar = (
        record.tobuf(tarfile.USTAR_FORMAT)
        + records.ljust(512, b"\0")
        + header.tobuf(tarfile.USTAR_FORMAT)
        + PNG.ljust(1024, b"\0")
        + tar_of(("next.jpg", PNG))
    )
    found = members_of(tar)
    assert [(member.name, member.data) for member in found] == [("folder/name.jpg", PNG), ("next.jpg", PNG)]


def test_base_256_sizes() -> None:
    header = bytearray(special("a.jpg", tarfile.REGTYPE).tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + len(PNG).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    found = members_of(bytes(header) + PNG.ljust(1024, b"\0") + bytes(1024))
    assert [(member.name, member.data) for member in found] == [("a.jpg", PNG)]


def test_global_pax_headers_hold_for_all() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "of all"}) as archive:
        for name in ("a.jpg", "ü.jpg"):
            info = tarfile.TarInfo(name)
            info.size = len(PNG)
            archive.addfile(info, io.BytesIO(PNG))
    assert [outcome(member) for member in members_of(file.getvalue())] == [("a.jpg", "read"), ("ü.jpg", "read")]


def test_a_damaged_pax_header_refuses_its_member_alone() -> None:
    record = special("x", b"x", size=8).tobuf(tarfile.USTAR_FORMAT) + b"99 path=".ljust(512, b"\0")
    found = [outcome(member) for member in members_of(record + tar_of(("a.jpg", PNG), ("b.jpg", PNG)))]
    assert found[0][0] == "a.jpg"
    assert found[0][1].startswith("its pax header is damaged")
    assert found[1:] == [("b.jpg", "read")]


def test_an_extended_header_of_absurd_size_is_not_read() -> None:
    record = special("x", b"L", size=2 << 20).tobuf(tarfile.USTAR_FORMAT) + bytes(2 << 20)
    found = [outcome(member) for member in members_of(record + tar_of(("a.jpg", PNG), ("b.jpg", PNG)))]
    assert found == [
        ("a.jpg", "its extended header has 2097152 bytes, allowed: 1048576"),
        ("b.jpg", "read"),
    ]


@pytest.mark.parametrize("kind", [b"g", b"x", b"L"])
def test_a_name_of_a_megabyte_is_cut_off(kind: bytes) -> None:
    """A record for all members would cost a megabyte for each header of 512 bytes."""
    name = b"n" * 1_000_000
    records = name if kind == b"L" else b"1000014 path=" + name + b"\n"
    padding = bytes(-len(records) % 512)
    record = special("x", kind, size=len(records)).tobuf(tarfile.USTAR_FORMAT) + records + padding
    found = members_of(record + tar_of(("a.jpg", PNG), ("b.jpg", PNG)))
    refused = ("n" * 100, "its name has 1000000 characters, allowed: 4096")
    assert [outcome(member) for member in found] == [refused, refused if kind == b"g" else ("b.jpg", "read")]


def test_pax_sizes_of_thousands_of_digits_refuse_their_member() -> None:
    records = b"5013 size=" + b"9" * 5002 + b"\n"
    record = special("x", b"x", size=len(records)).tobuf(tarfile.USTAR_FORMAT) + records.ljust(5120, b"\0")
    found = [outcome(member) for member in members_of(record + tar_of(("a.jpg", PNG), ("b.jpg", PNG)))]
    assert found[0][0] == "a.jpg"
    assert found[0][1].startswith("its pax header is damaged: the size b'999")
    assert len(found[0][1]) < 300
    assert found[1:] == [("b.jpg", "read")]


def test_sparse_pax_files_are_refused() -> None:
    records = b"22 GNU.sparse.major=1\n"
    record = special("x", b"x", size=len(records)).tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0")
    found = [outcome(member) for member in members_of(record + tar_of(("a.jpg", PNG)))]
    assert found == [("a.jpg", "a sparse file, not a file")]


def extended(records: bytes, kind: bytes = b"x") -> bytes:
    """A pax header."""
    return special("x", kind, size=len(records)).tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0")


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (extended(b"22 GNU.sparse.major=1\n"), "a sparse file, not a file"),
        (extended(b"25 GNU.sparse.realsize=x\n"), "a sparse file, not a file"),
        (extended(b"9 size=x\n"), "its pax header is damaged: the size b'x' is not a number of bytes"),
        (extended(b"9 size=8\n", b"g"), "a pax header gives one size to all members"),
        (extended(b"9 path=a\n") * 400, "it has more than 16 extended headers"),  # tarfile: RecursionError
    ],
)
def test_what_tarfile_takes_differently_is_told(begin: bytes, reason: str) -> None:
    (found, *_) = members_of(begin + tar_of(("a.jpg", PNG)))
    assert isinstance(found.data, AmbiguousMemberError)
    assert str(found.data) == reason


@pytest.mark.parametrize("end", [bytes(1024), b"g" * 512, b"g" * 100, b""], ids=["end mark", "damage", "part", "end"])
def test_an_extended_header_without_its_member_ends_other_readers(end: bytes) -> None:
    data = tar_of(("a.jpg", PNG))[:1536] + extended(b"9 path=b\n") + end
    assert [type(member.data) for member in members_of(data)] == [bytes, BrokenOffTarError]
    with pytest.raises(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.getmembers()


TWO = tar_of(("a.jpg", PNG), ("b.jpg", PNG))  # a header and two blocks of data each, then zeros


@pytest.mark.parametrize(
    ("num_bytes", "reason"),
    [
        (0, "it ends at byte 0 without an end mark, after 0 members"),
        (300, "it ends at byte 300 without an end mark, after 0 members"),
        (512, "it ends at byte 512, inside 'a.jpg', after 0 members"),
        (1000, "it ends at byte 1000, inside 'a.jpg', after 0 members"),
        (1200, "it ends at byte 1200, in the padding of a member, after 1 members"),
        (1536, "it ends at byte 1536 without an end mark, after 1 members"),
        (1600, "it ends at byte 1600 without an end mark, after 1 members"),
        (2100, "it ends at byte 2100, inside 'b.jpg', after 1 members"),
        (3072, "it ends at byte 3072 without an end mark, after 2 members"),
    ],
)
def test_a_tar_that_breaks_off(num_bytes: int, reason: str) -> None:
    *good, last = members_of(TWO[:num_bytes])
    assert [outcome(member) for member in good] == [("a.jpg", "read"), ("b.jpg", "read")][: (num_bytes + 420) // 1536]
    assert type(last.data) is (DamagedTarError if "end mark" in reason else BrokenOffTarError)
    assert outcome(last) == ("", f"damaged tar: {reason}")


@pytest.mark.parametrize("num_zeros", [512, 1024, 10240])
def test_any_zeros_are_an_end_mark(num_zeros: int) -> None:
    assert [outcome(member) for member in members_of(TWO[:3072] + bytes(num_zeros))] == [
        ("a.jpg", "read"),
        ("b.jpg", "read"),
    ]


def test_data_behind_the_end_mark_is_not_passed_over_in_silence() -> None:
    found = members_of(TWO + TWO)
    assert len(found) == 3
    expected = f"bytes {len(TWO)} to {2 * len(TWO)} are after its end mark and are not read, after 2 members"
    assert str(found[2].data) == f"damaged tar: {expected}"


@pytest.mark.parametrize("garbage", [b"g" * 512, b"\0" * 100 + b"g" * 924], ids=["a block", "two blocks"])
def test_reading_goes_on_behind_a_damaged_stretch(garbage: bytes) -> None:
    found = members_of(TWO[:1536] + garbage + TWO[1536:])
    assert [outcome(member) for member in found] == [
        ("a.jpg", "read"),
        ("", f"damaged tar: no header is in bytes 1536 to {1536 + len(garbage)}, after 1 members"),
        ("b.jpg", "read"),
    ]


def test_a_member_whose_header_is_damaged_is_lost_alone() -> None:
    damaged = bytearray(TWO)
    damaged[130] ^= 1
    assert [outcome(member) for member in members_of(bytes(damaged))] == [
        ("", "damaged tar: no header is in bytes 0 to 1536, after 0 members"),
        ("b.jpg", "read"),
    ]


@pytest.mark.parametrize("data", [b"<html>" * 100, b"g" * 5000])
def test_what_is_no_tar(data: bytes) -> None:
    (member,) = members_of(data)
    expected = f"damaged tar: no header is in bytes 0 to {len(data)}, after 0 members"
    assert outcome(member) == ("", expected)


def test_a_compressed_tar_is_called_so(tmp_path: Path) -> None:
    for mode in ("gz", "bz2", "xz"):
        path = tmp_path / mode
        with tarfile.open(path, f"w:{mode}") as archive:  # type: ignore[call-overload]
            archive.add(__file__)
        (member,) = members_of(path.read_bytes())
        assert outcome(member) == ("", "it is compressed; images cannot be read by offset: decompress it first")


@given(st.binary(max_size=3000), st.integers(0, 4000))
def test_no_bytes_make_it_fail(noise: bytes, position: int) -> None:
    for tar in (noise, TWO[:position] + noise + TWO[position + len(noise) :]):
        for member in members_of(tar):
            assert isinstance(member.data, bytes | ImageRefusedError)
