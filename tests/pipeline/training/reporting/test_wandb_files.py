"""W&B's files, as W&B wrote them and cut at every kind of place."""

import struct
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.training.reporting.wandb_logger import is_open, last_step
from shards.errors import InvalidDataError

needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed (extra test)")
HEAD = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
BLOCK = 1 << 15


def row(step: int, *, num_bytes: int = 0) -> bytes:
    """A record with the history of one step."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415 - an extra

    record = Record(num=step)
    record.history.step.num = step
    record.history.item.add(key="text", value_json="x" * num_bytes)
    return bytes(record.SerializeToString())


def log_of(*records: bytes) -> bytes:
    """LevelDB's log with these records."""
    data = bytearray(HEAD)
    for record in records:
        rest, is_first = record, True
        while is_first or rest:
            left = BLOCK - len(data) % BLOCK
            if left < 7:
                data += bytes(left)
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[is_first, not rest]
            data += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            is_first = False
    return bytes(data)


@needs_wandb
def test_records_over_several_blocks(tmp_path: Path) -> None:
    path = tmp_path / "run.wandb"
    path.write_bytes(log_of(row(1), row(2, num_bytes=BLOCK * 2), *(row(step, num_bytes=500) for step in range(3, 200))))
    assert last_step(path) == 199


@needs_wandb
@pytest.mark.parametrize(
    ("data", "step"),
    [
        pytest.param(b"", 0, id="empty"),
        pytest.param(HEAD[:5], 0, id="half a head"),
        pytest.param(b"XXXX" + HEAD[4:], 0, id="another file"),
        pytest.param(HEAD, 0, id="no record"),
        pytest.param(HEAD + bytes(40), 0, id="zeros after a power cut"),
        pytest.param(HEAD + struct.pack("<IHB", 5, 60000, 1), 0, id="a wrong checksum, and a length beyond the end"),
    ],
)
def test_what_is_no_record_ends_the_file(tmp_path: Path, data: bytes, step: int) -> None:
    (tmp_path / "run.wandb").write_bytes(data)
    assert last_step(tmp_path / "run.wandb") == step


@needs_wandb
def test_cut_at_every_byte_of_the_last_records(tmp_path: Path) -> None:
    path, whole = tmp_path / "run.wandb", log_of(row(1), row(2), row(3))
    lengths = [len(log_of(*(row(step) for step in range(1, last + 1)))) for last in range(4)]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        assert last_step(path) == sum(length >= needed for needed in lengths[1:])


@needs_wandb
def test_a_changed_byte_ends_the_file(tmp_path: Path) -> None:
    path, whole = tmp_path / "run.wandb", log_of(row(1), row(2), row(3))
    for place in range(len(log_of(row(1))), len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert last_step(path) in (1, 2)


@needs_wandb
def test_records_of_other_hands_are_left_out(tmp_path: Path) -> None:
    """With a right checksum."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415 - an extra

    bad = []
    for value in ("[", "-5", "true", "1e400", "9" * 30):
        record = Record()
        record.history.item.add(key="_step", value_json=value)
        bad.append(record.SerializeToString())
    far = Record()
    far.history.step.num = -7
    (tmp_path / "run.wandb").write_bytes(log_of(row(3), b"\xff" * 20, b"", *bad, far.SerializeToString()))
    assert last_step(tmp_path / "run.wandb") == 3


@needs_wandb
def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises((InvalidDataError, IsADirectoryError)):
        last_step(tmp_path)


def test_a_file_is_open_until_its_process_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.wandb"
    path.touch()
    assert not is_open(path)
    program = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    assert is_open(path)
    process.kill()
    process.communicate()
    assert not is_open(path)
