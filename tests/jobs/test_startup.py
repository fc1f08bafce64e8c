"""What commands import: nothing heavy to answer, no torch for datasets, and for training torch only after the first
message."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.stages import STAGES, recipes_of
from tests.rigs.images import class_folders

CHECKOUT = Path(__file__).resolve().parent.parent.parent
HEAVY = (
    *("torch", "numpy", "pyarrow", "PIL", "cv2", "scipy", "sklearn", "deepspeed", "boto3", "webdataset", "simplejpeg"),
    *("matplotlib", "jinja2", "tensorboard", "pydantic", "rich", "yaml"),
)
MOST_MODULES = 350  # about 345 are loaded, most of them Python's own
# What only rank 0 uses, and what a library loads if it happens to be installed: on 512 ranks each costs 512 times.
NOT_ON_RANK_1 = (
    *("tensorboard", "torch.utils.tensorboard", "google.protobuf", "absl", "fsspec", "mlflow", "wandb"),
    *("pandas", "matplotlib", "rich", "jinja2", "boto3", "botocore", "sklearn", "torchvision", "webdataset"),
    *("torch._dynamo", "torch._inductor", "sympy", "tyro"),
)
ANSWERED = [
    [],
    ["--help"],
    ["--version"],
    ["pretain"],
    ["completion", "bash"],
    *([stage] for stage in STAGES if STAGES[stage].usage),
    *([stage, "--help"] for stage in STAGES),
    *([stage, next(iter(recipes_of(stage))), "--help-all"] for stage in STAGES if STAGES[stage].recipes),
    ["pretrain", "cifar10_small_smoke", "--help"],
    ["pretrain", "digit"],
    ["pretrain", "digits_smoke"],
    ["pretrain", "digits_smoke", "--lr", "1"],
    ["pack", "folder", "--workers", "x"],
    ["__complete", "pretrain", "digits_smoke", "--"],
]


def test_what_only_answers_loads_nothing_heavy() -> None:
    """One process runs all of them, and reports after each what it has imported."""
    program = (
        "import contextlib, io, json, sys\n"
        "from jobs.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        code = main(words)\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    print(json.dumps([words, code, heavy, len(sys.modules)]))\n"
    )
    command = [sys.executable, "-c", program, json.dumps(ANSWERED)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [words for words, *_ in answers] == ANSWERED
    assert [(words, heavy) for words, _, heavy, _ in answers if heavy] == []
    assert {code for _, code, _, _ in answers} == {0, 2}
    assert max(num_modules for *_, num_modules in answers) <= MOST_MODULES


@pytest.fixture
def tripwire(tmp_path: Path) -> dict[str, str]:
    """An environment in which any process that imports torch says so on standard error and ends."""
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire" / "torch.py").write_text("import os\nos.write(2, b'torch is loaded\\n')\nos._exit(99)\n")
    return {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path / 'wire'}:{CHECKOUT}"}


def patchline(*words: str, environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "patchline", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)


def test_packing_verifying_indexing_and_cards_never_load_torch(tmp_path: Path, tripwire: dict[str, str]) -> None:
    """Nor do their worker processes."""
    root, out, index = (str(tmp_path / name) for name in ("images", "packed", "index"))
    class_folders(Path(root), images_a_class=2)
    commands = [
        ["pack", "folder", "--source.root", root, "--out", out, "--samples-per-shard", "3", "--workers", "2"],
        ["verify", out, "--deep", "--workers", "2"],
        ["card", out, "--num-mosaic", "2"],
        ["index", f"{out}/shards", "--index-url", index, "--workers", "2"],
    ]
    for words in commands:
        done = patchline(*words, environ=tripwire)
        assert (done.returncode, "torch is loaded" in done.stderr) == (0, False), done.stderr


def test_training_says_that_it_starts_before_it_loads_torch(tmp_path: Path, tripwire: dict[str, str]) -> None:
    words = ("pretrain", "digits_smoke", "--data.url", "data", "--run-dir", str(tmp_path / "run"))
    done = patchline(*words, environ=tripwire)
    assert done.returncode == 99
    first, second = done.stderr.splitlines()
    assert first.endswith(f"starting pretrain digits_smoke in {tmp_path / 'run'}")
    assert second == "torch is loaded"
    assert "starting" not in patchline(*words, environ={**tripwire, "RANK": "1", "WORLD_SIZE": "2"}).stderr


def test_rank_1_loads_nothing_that_only_rank_0_needs(digits_url: str, tmp_path: Path) -> None:
    """A rank in a process of its own, as far as it comes alone: its job is checked, and its data is open."""
    program = (
        "import json, sys\n"
        "import jobs.train.pretrain\n"
        "from dataclasses import replace\n"
        "from jobs.recipes.pretrain import digits_smoke\n"
        "from pipeline.ranks.world import current_world\n"
        "from pipeline.training.prepare import prepare\n"
        "job = digits_smoke()\n"
        "job = replace(job, data=replace(job.data, url=sys.argv[1]), run_dir=sys.argv[2], device='cpu')\n"
        "prepared = prepare(job, current_world('cpu'))\n"
        "prepared.stream.data.datasets[0].sample_rows(0)\n"
        f"loaded = [name for name in {NOT_ON_RANK_1!r} if name in sys.modules]\n"
        "print(json.dumps([prepared.world.rank, loaded]))\n"
    )
    rank_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environ = os.environ | rank_1 | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    command = [sys.executable, "-c", program, digits_url, str(tmp_path / "run")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, []]
