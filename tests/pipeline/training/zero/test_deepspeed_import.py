"""What a start does not load: on a restart after a fault, all ranks would wait for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.training.zero.loading import without
from tests.rigs.forks import ONE_THREAD
from tests.rigs.training import pretrain_words

CHECKOUT = Path(__file__).resolve().parents[4]
UNUSED = ("mlflow", "torch._dynamo", "sympy", "boto3", "sklearn")


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
