"""The process loads little, serves one trainer, and ends with its pipe."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.checkpoints.writer import process as writer_process
from pipeline.checkpoints.writer_messages import BufferFit, SaveResult, Write, from_line, to_line
from shards.store import open_store

MODULE = "pipeline.checkpoints.writer.process"
HEAVY = ("torch", "numpy", "boto3", "botocore", "pydantic", "pyarrow", "deepspeed")
FOLDER, RECORD = "step-00000004/attempt-0001-aaaaaaaa", "attempts/0001-aaaaaaaa.json"


def test_it_starts_without_anything_heavy() -> None:
    """A rank starts one, and a commit of its own kind (pydantic) or a bucket (boto3) comes later, if at all."""
    program = f"import sys, {MODULE}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_even_a_commit_needs_no_torch() -> None:
    program = f"import sys, {MODULE}, pipeline.checkpoints.commit; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def start(buffer: int, *, parent: int) -> tuple[subprocess.Popen[bytes], int, int]:
    """(process, where commands go, where answers come)."""
    commands, ours = os.pipe()
    theirs, answers = os.pipe()
    words = [sys.executable, "-P", "-m", MODULE, *map(str, (commands, answers, buffer, parent))]
    process = subprocess.Popen(words, pass_fds=(commands, answers, buffer), stderr=subprocess.PIPE)
    os.close(commands)
    os.close(answers)
    return process, ours, theirs


def test_it_serves_until_its_pipe_ends(tmp_path: Path) -> None:
    open_store(str(tmp_path)).write(RECORD, b"")
    buffer = os.memfd_create("test")
    os.pwrite(buffer, b"0123456789", 0)
    process, commands, answers = start(buffer, parent=os.getpid())
    write = Write(save=1, url=str(tmp_path), folder=FOLDER, record=RECORD, rank=0)
    os.write(commands, to_line(BufferFit(num_bytes=10, pieces=())) + to_line(write))
    with os.fdopen(answers, "rb") as file:
        said = from_line(file.readline())
        while said.what == "progress":
            said = from_line(file.readline())
        assert said == SaveResult(save=1, what="written")
        os.close(commands)
        assert file.read() == b""
    assert process.wait(60) == 0
    assert process.stderr
    assert process.stderr.read() == b""
    assert (tmp_path / FOLDER / "rank-00000.safetensors").read_bytes() == b"0123456789"
    os.close(buffer)


@pytest.mark.parametrize("line", [b"nonsense\n", b'{"kind": "SaveResult", "save": 1, "what": "written"} x\n'])
def test_nonsense_ends_it_with_an_error(line: bytes) -> None:
    buffer = os.memfd_create("test")
    process, commands, answers = start(buffer, parent=os.getpid())
    os.write(commands, line)
    assert process.wait(60) == 1
    assert process.stderr
    assert b"JSONDecodeError" in process.stderr.read()
    for number in (buffer, commands, answers):
        os.close(number)


def test_it_ends_at_once_if_its_trainer_is_dead_already() -> None:
    buffer = os.memfd_create("test")
    process, commands, answers = start(buffer, parent=1 << 22)
    assert process.wait(60) == 0
    for number in (buffer, commands, answers):
        os.close(number)


def test_the_rest_of_a_save_that_is_waited_for_is_done_with_normal_priority() -> None:
    taken, is_over = list[tuple[int, int]](), threading.Event()
    relay = writer_process.Relay()

    def steps() -> Iterator[None]:
        for number in range(4):
            if number == 2:
                relay.hurry(1)
            taken.append((number, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
            yield
        is_over.set()

    relay.do(1, steps)
    assert is_over.wait(100)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert taken == [(0, 19), (1, 19), (2, 19), (3, own)]
