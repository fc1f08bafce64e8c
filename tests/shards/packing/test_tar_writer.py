"""The archive is plain USTAR, the same bytes everywhere, with correct offsets."""

import hashlib
import io
import tarfile

import pytest

from shards.packing.write_shard import MOST_MEMBER_BYTES, TarWriter, header

MEMBERS = {"a.jpg": b"x" * 700, "a.cls": b"3", "empty.json": b"", "b.png": b"y" * 512, "large.jpg": b"z" * 100_001}


def written() -> tuple[bytes, TarWriter, dict[str, int]]:
    """The archive of MEMBERS, its writer, and each member's offset."""
    file = io.BytesIO()
    tar = TarWriter(file)
    offsets = {name: tar.add(name, data) for name, data in MEMBERS.items()}
    tar.finish()
    return file.getvalue(), tar, offsets


def test_tarfile_reads_it_and_offsets_are_of_the_data() -> None:
    data, _, offsets = written()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for item, (name, content) in zip(archive, MEMBERS.items(), strict=True):
            assert (item.name, item.offset_data, item.size) == (name, offsets[name], len(content))
    for name, content in MEMBERS.items():
        assert data[offsets[name] : offsets[name] + len(content)] == content


def test_hash_and_size_are_of_what_was_written() -> None:
    data, tar, _ = written()
    assert tar.num_bytes == len(data)
    assert tar.sha256() == hashlib.sha256(data).hexdigest()


def test_nothing_of_the_machine_is_in_it() -> None:
    data, _, _ = written()
    assert data == written()[0]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        facts = {(item.mtime, item.uid, item.gid, item.uname, item.gname, item.mode) for item in archive}
    assert facts == {(0, 0, 0, "", "", 0o644)}


def test_the_bytes_are_those_of_tarfile() -> None:
    expected = io.BytesIO()
    for name, content in MEMBERS.items():
        expected.write(tarfile_header(name, len(content)) + content + bytes(-len(content) % 512))
    assert written()[0] == expected.getvalue() + bytes(1024)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("0000000001.jpg", 110_123),
        pytest.param("empty", 0, id="no content"),
        pytest.param("x" * 100, MOST_MEMBER_BYTES, id="the longest name and the largest content"),
        pytest.param("\u00e4/\u6f22.json", 7, id="not ASCII"),
    ],
)
def test_headers_are_those_of_tarfile(name: str, num_bytes: int) -> None:
    assert header(name, num_bytes) == tarfile_header(name, num_bytes)


@pytest.mark.parametrize(("name", "num_bytes"), [("x" * 101, 1), ("\u00e4" * 51, 1), ("a", MOST_MEMBER_BYTES + 1)])
def test_what_does_not_fit_into_a_header_is_refused(name: str, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="does not fit into a ustar header"):
        header(name, num_bytes)


def tarfile_header(name: str, num_bytes: int) -> bytes:
    """The header as the standard library makes it."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = num_bytes, 0o644
    return member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
