"""One Slurm of two nodes for all tests of the batch scripts."""

from collections.abc import Iterator

import pytest

from tests.rigs.slurm import SlurmCluster, SlurmConfig


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    # One CPU per node, so that two ranks share the two cores of a small machine.
    with SlurmCluster(SlurmConfig(num_nodes=2, cpus_per_node=1)) as cluster:
        yield cluster
