"""Ranks in a container, on a real Slurm of two nodes: stand-ins for apptainer and for pyxis record their options, and
run the command with the PATH of an image. The batch script and its judge stay outside."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.rigs.slurm import SlurmCluster
from tests.slurm.test_preflight import preflight
from tests.slurm.test_stage import PATCHLINE, logged_steps, program, signal_batch_shell, wait_until_ended
from tests.slurm.test_submit import settings_in, submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]
STEPS = 120


def stand_in(folder: Path, system: str, path: str) -> str:
    """Writes a program that stands in for a container, in which the command `patchline` is another one. Returns the
    PATH of the nodes."""
    inside, tools = folder / "image", folder / "tools"
    inside.mkdir()
    tools.mkdir()
    program(inside / "patchline", f'echo "$1 ${{PYTHONPATH-none}} $PWD" >>{folder}/inside', f'exec {PATCHLINE} "$@"')
    if system == "apptainer":
        program(
            tools / "apptainer",
            f'echo "$*" >>{folder}/calls',
            "shift",
            'while [[ $1 == --* ]]; do case $1 in --bind) shift ;; --pwd) cd "$2"; shift ;; esac; shift; done',
            f'PATH={inside}:$PATH exec "${{@:2}}"',
        )
    else:
        program(
            tools / "srun",
            "[[ $* != --help ]] || { echo --container-image; exit; }",
            "words=() path=$PATH",
            'for word; do case $word in --container-* | --no-container-*) path=IMAGE:$PATH; echo "$word" >>CALLS ;;'
            ' *) words+=("$word") ;; esac; done'.replace("IMAGE", str(inside)).replace("CALLS", f"{folder}/calls"),
            f'srun=$(PATH={path} command -v srun) PATH=$path; exec "$srun" "${{words[@]}}"',
        )
    return f"{tools}:{path}"


@pytest.mark.parametrize("system", ["apptainer", "pyxis"])
def test_ranks_run_in_the_image_and_all_else_outside(slurm_cluster: SlurmCluster, tmp_path: Path, system: str) -> None:
    """A signal asks the ranks for a save, and the requeued job continues."""
    data, run_dir = tmp_path / "digits", tmp_path / "run"
    subprocess.run([PATCHLINE, "pack", "digits", "--out", data], check=True, timeout=120)
    path = stand_in(tmp_path, system, slurm_cluster.job_environment()["PATH"])
    outside = program(tmp_path / "outside", f'echo "$1" >>{tmp_path}/before', f'exec {PATCHLINE} "$@"')
    settings = settings_in(
        tmp_path,
        f"command: ['{outside}']",
        "setup: ['export PYTHONPATH=${PYTHONPATH:-/nowhere}']",
        f"container: {{system: {system}, image: /shared/patchline.img, mounts: ['{tmp_path}:ro']}}",
    )
    words = ("pretrain", "digits_smoke", settings, "--nodes=2", f"--data.url={data}", f"--run-dir={run_dir}")
    refused = submit(slurm_cluster, *words, PATH=path)
    assert (refused.returncode, f"{slurm_cluster.folder} is not in the container" in refused.stderr) == (2, True)
    Path(settings.partition("=")[2]).write_text(
        Path(settings.partition("=")[2]).read_text().replace(":ro'", f"', '{slurm_cluster.folder}'")
    )
    done = submit(slurm_cluster, *words, f"--steps={STEPS}", "--checkpoint.every-steps=20", PATH=path)
    assert done.returncode == 0, done.stderr
    job = json.loads((run_dir / "submit" / "submitted.jsonl").read_text().splitlines()[0])["job"]
    slurm_cluster.wait_for(lambda: len(logged_steps(run_dir)) >= 10, deadline_seconds=300)
    signal_batch_shell(slurm_cluster, job)
    ended = wait_until_ended(slurm_cluster, job)
    log = (run_dir / "submit" / f"pretrain-digits_smoke-{job}.out").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    assert [step for step, _ in logged_steps(run_dir)] == list(range(1, STEPS + 1))
    assert (tmp_path / "inside").read_text().splitlines() == [f"pretrain none {slurm_cluster.folder}"] * 4
    assert set((tmp_path / "before").read_text().split()) == {"__done"}
    calls = (tmp_path / "calls").read_text()
    assert f"{tmp_path}:{tmp_path},{slurm_cluster.folder}:{slurm_cluster.folder}" in calls
    assert "/shared/patchline.img" in calls
    environ = {"PATH": path}
    code, found = preflight(slurm_cluster, settings, f"--run-dir={tmp_path}", "--wait-seconds=120", **environ)
    assert (code, found["command"]["status"]) == (0, "ok"), found
    assert (tmp_path / "inside").read_text().count("--version none /") == 2
