"""A wheel works alone: built from the sdist, installed into an empty environment, it runs README's first run."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SDIST = "import os, sys\nfrom hatchling.build import build_sdist\nos.chdir(sys.argv[1])\nbuild_sdist(sys.argv[2])\n"
FEW_STEPS = {"pretrain": "--steps 20", "finetune": "--steps 5"}
OTHERS = """
patchline export runs/digits/weights --out digits-timm --format timm
patchline import digits-timm --out digits-again
patchline plan vit_h14_jft --gpu h100 --num-gpus 64
patchline example chain.yaml > chain.yaml
patchline example cluster.yaml > cluster.yaml
"""
SUBMIT = "patchline submit pretrain digits_smoke --cluster cluster.yaml --data.url data/digits --run-dir r --dry-run"
DIGIT = "import patchline\npatchline.open_dataset('data/digits-test')[0].image.save('digit.png')\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with pip, and for building hatchling. Removed at the end, since torch is large."""
    folder = tmp_path_factory.mktemp("wheel")
    called(folder, sys.executable, "-m", "venv", "venv")
    called(folder, "venv/bin/python", "-m", "pip", "install", "--quiet", "hatchling>=1.27")
    yield folder
    shutil.rmtree(folder / "venv")


def called(folder: Path, *command: str) -> str:
    """Runs a command there, without anything of the checkout or of this environment; returns what it has written."""
    names = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ["PATH"] = f"{folder / 'venv' / 'bin'}{os.pathsep}{environ['PATH']}"
    program, *words = command
    program = str(folder / program) if program.startswith("venv/") else program
    done = subprocess.run(
        [program, *words], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=1500
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def first_run() -> list[str]:
    """The commands of README's first run, after the setup; those that train take only a few steps."""
    text = (CHECKOUT / "README.md").read_text().partition("\n## Your first run\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1:]
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    lines = [line.replace("IMAGE...", "digit.png") for line in lines]
    return [f"{line} {FEW_STEPS.get(line.split()[1], '')}" for line in lines if line != "patchline doctor"]


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_wheel_of_the_sdist_runs_the_readme_in_an_empty_environment(environment: Path) -> None:
    called(environment, "venv/bin/python", "-c", SDIST, str(CHECKOUT), str(environment))
    (sdist,) = environment.glob("*.tar.gz")
    pip = ("venv/bin/python", "-m", "pip")
    called(environment, *pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(sdist))
    (wheel,) = environment.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
        assert "pipeline/planning/measured/h200.json" in archive.namelist()
    assert {name for name in names if not name.endswith(".dist-info")} == {"jobs", "patchline", "pipeline", "shards"}

    constraints = ("--constraint", str(CHECKOUT / "constraints.txt"))
    called(environment, *pip, "install", "--quiet", *constraints, f"patchline[demo] @ {wheel.as_uri()}")
    called(environment, *pip, "check")
    commands = first_run()
    assert len(commands) >= 12, commands
    at = next(number for number, command in enumerate(commands) if " pretrain " in command)
    for command in commands[:at]:
        called(environment, "bash", "-ec", command)
    called(environment, "venv/bin/python", "-c", DIGIT)
    for command in (*commands[at:], *OTHERS.strip().splitlines()):
        called(environment, "bash", "-ec", command)
    (example,) = re.findall(r"^```python\n(.*?)^```$", (CHECKOUT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert "('" in called(environment, "venv/bin/python", "-c", example)
    loaded = "import jobs, patchline; print(jobs.__file__, patchline.__file__)"
    assert str(CHECKOUT) not in called(environment, "venv/bin/python", "-c", loaded)
    without_slurm = f"PATH={environment / 'venv' / 'bin'}"
    assert "  #SBATCH --gpus-per-node=8\n" in called(environment, "env", without_slurm, *SUBMIT.split())
    assert (environment / "cluster.yaml").read_text() == (CHECKOUT / "slurm" / "cluster.example.yaml").read_text()
