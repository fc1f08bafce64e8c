"""Only the DeepSpeed that was tested is accepted, or the one that the job names; and what a start does not load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.training.settings.job import EngineConfig
from pipeline.training.zero.loading import TESTED, deepspeed_version, refuse_untested_deepspeed, without
from tests.rigs.forks import ONE_THREAD
from tests.rigs.processes import program
from tests.rigs.training import pretrain_words

COMMAND = """
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.99.0+local" if name == "deepspeed" else real(name)
sys.modules.pop("pipeline.training.zero.loading")
import pipeline.training.zero.loading as ours
import pipeline.training.prepare as prepare
prepare.deepspeed_version = ours.deepspeed_version
from jobs.cli import main
sys.exit(main(sys.argv[1:]))
"""
CHECKOUT = Path(__file__).resolve().parents[4]
UNUSED = ("mlflow", "torch._dynamo", "sympy", "boto3", "sklearn")


def test_the_tests_run_with_a_tested_version() -> None:
    assert deepspeed_version() in TESTED


def test_a_run_is_refused_before_it_opens_anything() -> None:
    ended = program(COMMAND, "pretrain", "digits_smoke", "--data.url", "no-such-data", "--run-dir", "no-such-run")
    assert ended.code == 2
    assert ended.errors.count("DeepSpeed 0.99.0 is installed; tested: 0.19.8") == 1
    assert "Traceback" not in ended.errors


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_that_compiles_nothing_loads_no_compiler(tmp_path: Path, digits_url: str, optimizer: str) -> None:
    """In a process of its own, to the end of the run: a name that moves from the start to the first step is no gain."""
    words = pretrain_words(digits_url, tmp_path / "run", "--steps=5", f"--optimizer.name={optimizer}")
    program = (
        "import sys\nfrom jobs.cli import main\n"
        f"code = main({words!r})\n"
        f"sys.exit(code or ' '.join(name for name in {UNUSED!r} if name in sys.modules) or 0)"
    )
    environ = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_name_is_hidden_inside_and_found_again_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with without("colorsys"), pytest.raises(ImportError):
        import colorsys  # noqa: PLC0415
    import colorsys  # noqa: PLC0415

    with without("colorsys"):
        assert sys.modules["colorsys"] is colorsys


@pytest.mark.parametrize(("installed", "allowed"), [(TESTED[-1], ""), (TESTED[-1], "0.99.0"), ("0.99.0", "0.99.0")])
def test_tested_and_named_versions_are_taken(installed: str, allowed: str) -> None:
    refuse_untested_deepspeed(EngineConfig(allow_deepspeed=allowed), installed)
