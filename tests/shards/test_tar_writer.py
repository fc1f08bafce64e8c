"""The archive is plain USTAR, the same bytes everywhere, with offsets that hold."""

import hashlib
import io
import tarfile

from shards.tar_writer import TarWriter

MEMBERS = {"a.jpg": b"x" * 700, "a.cls": b"3", "empty.json": b"", "b.png": b"y" * 512}


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
