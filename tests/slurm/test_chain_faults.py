"""A whole chain under faults, on a real Slurm of two nodes and a real S3 store: it ends by itself, with the losses and
the weights of the same stages run by hand. tests/soak/chain_faults.py is the longer campaign."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.chains.state import read_plan_of
from tests.rigs.ceph import ceph_cluster, missing_programs
from tests.rigs.slurm import SlurmCluster, SlurmConfig
from tests.rigs.test_ceph import client_of
from tests.rigs.training import losses
from tests.soak.chain_faults import BUCKET, PATCHLINE, STAGES, Run, break_things, weights

pytestmark = [pytest.mark.slurm, pytest.mark.long]
EVERY = 30


def by_hand(run: Run, folder: Path) -> None:
    """Runs the training stages of the chain on this machine, with the arguments that the chain froze."""
    units = {unit.name: unit for unit in read_plan_of(run.folder / "chain" / "chain").units}
    environ = os.environ | {
        "AWS_ENDPOINT_URL": run.keys.endpoint,
        "AWS_ACCESS_KEY_ID": run.keys.access_key,
        "AWS_SECRET_ACCESS_KEY": run.keys.secret_key,
    }
    for name in STAGES:
        words = [word.replace(str(run.folder / "chain"), str(folder)) for word in units[name].words[0]]
        command = [str(PATCHLINE), *words, "--processes=2", "--threads=1"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr


def done_position(run_dir: Path) -> dict[str, Any]:
    """Returns the position in its data at which a finished run stands."""
    found: dict[str, Any] = json.loads((run_dir / "DONE").read_text())["position"]
    return found


def ends_as_if_nothing_had_happened(
    tmp_path: Path, disturb: Callable[[Run], None], *, steps: int, num_packed: int
) -> None:
    """Runs a chain, disturbs it, and compares it with its stages run by hand.

    The last fault comes at step 120 of `steps`. `num_packed`: how many jobs the shards phase has.
    """
    if missing_programs() and "rgw" not in os.environ.get("PATCHLINE_REQUIRE", ""):
        pytest.skip(f"needs {', '.join(missing_programs())}")
    with (
        SlurmCluster(SlurmConfig(num_nodes=2, cpus_per_node=1)) as cluster,
        ceph_cluster(tmp_path / "ceph") as storage,
    ):
        keys = storage.gateway()
        client_of(keys, secret_key=keys.secret_key).create_bucket(Bucket=BUCKET)
        run = Run(cluster, storage, keys, tmp_path / "chained", steps=steps, every=EVERY)
        run.submit()
        disturb(run)
        assert run.finish() == "done"
        by_hand(run, tmp_path / "by hand")
    assert len(run.jobs("pack.shards")) == num_packed, "only the killed task is packed again"
    for name in STAGES:
        chained, expected = run.folder / "chain" / name, tmp_path / "by hand" / name
        assert losses(chained) == losses(expected)
        assert weights(chained) == weights(expected)
        position = done_position(chained)
        assert position == done_position(expected), "the same samples were used"
        assert not position.get("skipped")
        assert not (chained / "quarantine").exists(), "no sample was replaced"
    assert sorted(losses(run.pretrain)) == list(range(1, steps + 1)), "every step once"
    assert json.loads((run.folder / "chain" / "evaluate" / "scores.json").read_text())["num_images"] == 1438
    assert len(run.faults) == 4


@pytest.mark.timeout(1500)
def test_it_ends_by_itself_whatever_breaks(tmp_path: Path) -> None:
    """A task of an array is killed. In training, a rank and slurmctld are killed, a node is lost, and S3 is away."""
    ends_as_if_nothing_had_happened(tmp_path, break_things, steps=200, num_packed=2)
