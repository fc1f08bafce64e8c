"""Edits of archives by structure: members of tars and of zips (NumPy's .npz, PyTorch's files), and cells of a CSV."""

import ast
import io
import tarfile
import warnings
import zipfile
from random import Random

from tests.fuzz import byte_edits, json_edits
from tests.fuzz.byte_edits import Edit

NAMES = ("", "..", "../x", "/x", "a\0b", "x" * 300, "a/b.cls", "x.json", "\x1b[0m.jpg", "x.cls", "x.jpg")
LABELS = ("", "-1", "-5", "1e3", "²", "9" * 20, "9" * 6000, "1048577", "\x1b]0;x\x07", "x" * 70_000, "0\n1", "3 ")
PAX = (
    *(("size", "9" * 5000), ("size", "-1"), ("size", "x"), ("size", "1e3"), ("path", "../x"), ("path", "a\0b")),
    *(("mtime", "9" * 400), ("GNU.sparse.map", "0,1,x"), ("GNU.sparse.major", "1"), ("GNU.sparse.realsize", "9" * 30)),
    *(("size", str(1 << 40)), ("hdrcharset", "BINARY"), ("linkpath", "x" * 9000), ("size", str(1 << 63))),
)
DTYPES = ("<f4", "<f8", "|O", "<f2", ">f4", "|V2", "<c8", "|S4", "<M8[s]", "<i8", "|b1", "[('a', '<f4')]", "f4" * 2000)
SHAPES = (
    *("(-1,)", "(4611686018427387904,)", "(0, 1099511627776)", "(3.0, 4)", "(9, 9)", "()", "3", "((3,), 4)", "None"),
    *("(" * 300 + ")" * 300, "(1,) * 10**9", "(True, 3)", "(" + "1," * 70 + ")", "(" + "9" * 5000 + ",)"),
)
CELLS = (
    *("", "-1", "nan", "\0", "../x", "/etc/passwd", "/dev/zero", '"', "a|b|c", "|" * 5000, "http://[", "s3://", "²"),
    *("x" * (11 << 20), "1" * 400, "1|1", "\x1b]0;x\x07", "file:///x", "%00", "s3://b/\x01"),
)
_HEADER_BYTES, _CHECKSUM = 512, slice(148, 156)
_MEMBER_EDITS = ("drop", "twice", "name", "order", "inside", "inside", "inside")

Members = list[tuple[str, bytes]]


def propose_zip(rng: Random, data: bytes) -> Edit:
    """An edit of a zip."""
    members = _zip_members(data)
    number = rng.randrange(len(members))
    if members[number][0].endswith(".npy") and rng.random() < 0.6:
        return ["header", number, rng.choice((rng.choice(DTYPES), "<f4", "")), rng.choice((rng.choice(SHAPES), ""))]
    if rng.random() < 0.2:
        return ["packed", number, rng.choice((8, 12, 14))]
    return _propose_member(rng, members, number)


def apply_zip(data: bytes, edit: Edit) -> bytes:
    """The zip after the edit."""
    members = _zip_members(data)
    name, number, *rest = edit
    kind = rest[0] if name == "packed" else zipfile.ZIP_STORED
    if name == "header":
        members[number] = (members[number][0], _npy(members[number][1], *rest))
    elif name != "packed":
        members = _members_edited(members, edit)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two members of one name
        for place, (member, content) in enumerate(members):
            archive.writestr(zipfile.ZipInfo(member), content, compress_type=kind if place == number else 0)
    return file.getvalue()


def propose_tar(rng: Random, data: bytes) -> Edit:
    """An edit of a tar."""
    members = _tar_members(data)
    number = rng.randrange(len(members))
    name = rng.choice(("pax", "field", "field", "member", "member", "member"))
    if name == "pax":
        return ["pax", number, *rng.choice(PAX)]
    if name == "field":
        return ["field", number, byte_edits.propose(rng, bytes(_HEADER_BYTES)), rng.random() < 0.7]
    member = members[number][0]
    if member.endswith(".json") and rng.random() < 0.6:
        return ["json", number, json_edits.propose(rng, members[number][1])]
    if member.endswith(".cls") and rng.random() < 0.6:
        return ["text", number, rng.choice(LABELS)]
    return _propose_member(rng, members, number)


def apply_tar(data: bytes, edit: Edit) -> bytes:
    """The tar after the edit."""
    members, (name, number, *rest) = _tar_members(data), edit
    if name == "json":
        members[number] = (members[number][0], json_edits.apply(members[number][1], rest[0]))
    elif name == "text":
        members[number] = (members[number][0], rest[0].encode())
    elif name not in ("pax", "field"):
        members = _members_edited(members, edit)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for place, (member, content) in enumerate(members):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            start = file.tell()
            if name == "pax" and place == number:
                info.pax_headers = {rest[0]: rest[1]}
            tar.addfile(info, io.BytesIO(content))
            if name == "field" and place == number:
                _edit_header(file, start, *rest)
    return file.getvalue()


def propose_csv(rng: Random, data: bytes) -> Edit:
    """An edit of a table of text."""
    rows = data.decode().splitlines()
    row = rng.randrange(len(rows))
    return ["cell", row, rng.randrange(rows[row].count(",") + 1), rng.choice((*CELLS, None, None))]


def apply_csv(data: bytes, edit: Edit) -> bytes:
    """The table after the edit: another text in a cell, or (None) without the cell."""
    rows = [line.split(",") for line in data.decode().splitlines()]
    _, row, column, text = edit
    rows[row][column : column + 1] = [] if text is None else [text]
    return "\n".join(",".join(cells) for cells in rows).encode() + b"\n"


def _propose_member(rng: Random, members: Members, number: int) -> Edit:
    name = rng.choice(_MEMBER_EDITS)
    if name == "inside":
        return ["inside", number, byte_edits.propose(rng, members[number][1])]
    return [name, number, rng.choice((*NAMES, members[0][0]))] if name == "name" else [name, number]


def _members_edited(members: Members, edit: Edit) -> Members:
    name, number, *rest = edit
    member, content = members[number]
    changed: dict[str, Members] = {
        "drop": [],
        "twice": [(member, content)] * 2,
        "order": [(member, content)],
        "name": [(rest[0], content)] if name == "name" else [],
        "inside": [(member, byte_edits.apply(content, rest[0]))] if name == "inside" else [],
    }
    others = members[:number], members[number + 1 :]
    return [*others[0], *others[1], *changed[name]] if name == "order" else [*others[0], *changed[name], *others[1]]


def _npy(content: bytes, dtype: str, shape: str) -> bytes:
    """An array with another type or shape in its header ("": its own)."""
    end = 10 + int.from_bytes(content[8:10], "little")
    own = ast.literal_eval(content[10:end].decode())
    text = f"{{'descr': {dtype if dtype.startswith('[') else repr(dtype or own['descr'])}, 'fortran_order': False, "
    header = f"{text}'shape': {shape or own['shape']}, }}\n".encode()
    return content[:8] + min(len(header), 0xFFFF).to_bytes(2, "little") + header + content[end:]


def _zip_members(data: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(entry.filename, archive.read(entry)) for entry in archive.infolist()]


def _tar_members(data: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        files = [(info.name, tar.extractfile(info)) for info in tar]
        return [(name, file.read()) for name, file in files if file]


def _edit_header(file: io.BytesIO, start: int, edit: Edit, is_sealed: bool) -> None:
    """Edits the header at `start`; `is_sealed`: its checksum is the right one."""
    whole = file.getvalue()
    header = bytearray(byte_edits.apply(whole[start : start + _HEADER_BYTES], edit)[:_HEADER_BYTES])
    header += bytes(_HEADER_BYTES - len(header))
    if is_sealed:
        header[_CHECKSUM] = b" " * 8
        header[_CHECKSUM] = f"{sum(header):06o}\0 ".encode()
    file.seek(start)
    file.write(bytes(header))
    file.seek(0, io.SEEK_END)
