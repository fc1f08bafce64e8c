"""`patchline submit sweep` on a real Slurm: tries as an array, and the best of them repeated."""

import json
from pathlib import Path

import pytest

from tests.rigs.slurm import SlurmCluster
from tests.rigs.training import TINY
from tests.slurm.test_chain import jobs_of, logs, wait_until_over
from tests.slurm.test_stage import PATCHLINE
from tests.slurm.test_submit import settings_in, submit

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_the_best_is_repeated_though_a_try_diverges(
    slurm_cluster: SlurmCluster, tmp_path: Path, digits_url: str
) -> None:
    folder = tmp_path / "a sweep"
    words = ["sweep", "pretrain", "digits_smoke", "--data.url", digits_url, "--run-dir", str(folder), *TINY]
    words += ["--schedule.learning-rate", "0", "0.01", "1e30", "--select-on", digits_url, "--seeds=2"]
    settings = settings_in(tmp_path, f"command: [{PATCHLINE}]")
    refused = submit(slurm_cluster, *words, settings)
    assert refused.returncode == 2
    assert "--evaluation.url is missing" in refused.stderr
    done = submit(slurm_cluster, *words, "--evaluation.url", digits_url, settings)
    assert done.returncode == 0, done.stderr
    assert wait_until_over(slurm_cluster, folder) == "done", logs(folder)
    found = json.loads((folder / "sweep.json").read_text())
    assert [one["state"] for one in found["tries"]] == ["done", "done", "failed"]
    assert found["best"] == {"--schedule.learning-rate": "0.01"}
    assert len(found["seeds"]) == 2
    assert found["mean"] == sum(one["accuracy"] for one in found["seeds"]) / 2
    assert [len(job.tasks) for job in jobs_of(folder, "sweep.tries")] == [3], "what diverged was not tried again"
    again = submit(slurm_cluster, *words, "--evaluation.url", digits_url, settings)
    assert again.returncode == 0, again.stderr
