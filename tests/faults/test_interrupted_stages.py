"""Ctrl-C in every stage: one line, the documented code, no process left, and nothing that the same command trips over.

Training and packing with several processes have tests of their own (tests/jobs/test_exit_codes.py, test_processes.py).
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from jobs import exit_codes
from pipeline.models import ModelConfig, build_model
from pipeline.models.weights.folder import save_weights
from tests.jobs.models.test_evaluate import TINY
from tests.rigs.datasets import file_hashes, packed_folders
from tests.rigs.held import held_at, hold
from tests.rigs.images import class_folders, image_bytes
from tests.rigs.interrupting import DEADLINE_SECONDS, started

RENAME = "shards.storage.local:_rename"  # a file is written, but not there yet
STAGES = {
    "pack": "pack folder --source.root IMAGES --out OUT --samples-per-shard 4",
    "scan": "pack folder --source.root IMAGES --out OUT --phase scan",
    "index": "index TARS --index-url OUT",
    "verify": "verify PACKED",
    "card": "card PACKED",
    "evaluate": "evaluate WEIGHTS --data.url PACKED --run-dir OUT --device cpu",
    "predict": "predict WEIGHTS IMAGE --device cpu",
    "export": "export WEIGHTS --out OUT --format timm",
    "import": "import WEIGHTS --out OUT",
    "plan": "plan digits_smoke",
    "show": "show digits_smoke",
    "diff": "diff pretrain digits_smoke digits_smoke",
}
HELD = [
    *(("pack", RENAME, count) for count in (1, 3, 4, 7, 8, 12, 14)),  # one of each phase
    *(("scan", RENAME, count) for count in (1, 3)),
    *(("index", RENAME, count) for count in (1, 4)),
    ("verify", "shards.verifying.verify:check_shard", 2),
    ("card", "jobs.data.card:render", 1),
    ("card", RENAME, 1),
    ("evaluate", "jobs.models.evaluate:evaluate", 1),
    ("predict", "jobs.models.predict:_predict", 1),
    ("export", "jobs.models.export_weights:save_as", 1),
    ("import", "jobs.models.import_weights:save_weights", 1),
    ("plan", "jobs.planning.plan:cost_of", 1),
    ("show", "jobs.reports.show:job_of", 1),
    ("diff", "jobs.reports.show:job_of", 1),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the stages read. Nothing of it is changed, but the card is written into the dataset."""
    folder = tmp_path_factory.mktemp("inputs")
    packed = packed_folders(folder, num_classes=2)
    (folder / "image.jpg").write_bytes(image_bytes(1))
    words = {"IMAGES": str(class_folders(folder / "more", num_classes=2)), "PACKED": str(packed)}
    words |= {"TARS": str(packed / "shards"), "IMAGE": str(folder / "image.jpg")}
    config = ModelConfig(**(TINY | {"num_classes": 2}))
    state = build_model(config).state_dict()
    save_weights(folder / "weights", config=config, labels=("c0", "c1"), tensor=lambda name: state[name])
    return words | {"WEIGHTS": str(folder / "weights")}


@pytest.mark.parametrize(("stage", "function", "count"), HELD)
def test_an_interrupt_ends_it(stage: str, function: str, count: int, inputs: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [{**inputs, "OUT": str(out)}.get(word, word) for word in STAGES[stage].split()]
    environ = held_at(function, tmp_path / "held", count=count)
    with started(tmp_path / "said", *words, environ=environ, before=hold) as command:
        command.wait_until((tmp_path / "held").exists)
        command.signal(signal.SIGINT)
        code, group = command.end(), command.process.pid or 0
    wait_until_gone(group)
    assert code == (exit_codes.CONTINUE if words[0] == "pack" else exit_codes.INTERRUPTED), command.said
    assert "Traceback" not in command.said
    last = command.said.splitlines()[-1]
    assert ("stopped; what is packed so far stays in" if words[0] == "pack" else "interrupted") in last
    assert [path for path in file_hashes(tmp_path) if ".tmp-" in path] == []
    with started(tmp_path / "again", *words) as command:
        assert command.end() == exit_codes.DONE, command.said
    assert [path for path in file_hashes(tmp_path) if ".tmp-" in path or path.endswith(".part")] == []


@pytest.mark.long
def test_the_demo(tmp_path: Path) -> None:
    """It runs its stages as processes of their own, and a server."""
    words = ("demo", "--run-dir", str(tmp_path / "demo"))
    with started(tmp_path / "said", *words) as command:
        command.wait_until(lambda: stages_in(tmp_path) != [])
        command.signal(signal.SIGINT)
        assert command.end() == exit_codes.INTERRUPTED, command.said
    assert stages_in(tmp_path) == []
    assert "interrupted; run the same command to start again" in command.said.splitlines()
    assert "Traceback" not in command.said


def wait_until_gone(group: int) -> None:
    """No process is left. One that ends with the command, such as multiprocessing's tracker, may end a little later."""
    deadline, pause = time.monotonic() + DEADLINE_SECONDS, threading.Event()
    with suppress(ProcessLookupError):
        while True:
            os.killpg(group, 0)
            assert time.monotonic() < deadline, "a process is left"
            pause.wait(0.02)


def stages_in(folder: Path) -> list[str]:
    """The command lines of stages that log into this folder's demo."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, log = (path / "cmdline").read_bytes().split(b"\0"), (path / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if b"jobs.cli" in words and str(folder).encode() in log + b" ".join(words):
            found.append(b" ".join(words).decode())
    return found
