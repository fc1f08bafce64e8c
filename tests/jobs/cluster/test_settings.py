"""cluster.yaml is read strictly, and nothing in it can become an option or a line that it should not be."""

from pathlib import Path

import pytest

from jobs.cluster.settings import ClusterConfig, asked_seconds, read_cluster, seconds_of
from shards.errors import UserError

EXAMPLE = Path(__file__).resolve().parents[3] / "slurm" / "cluster.example.yaml"


def test_the_example_is_read() -> None:
    found = read_cluster(EXAMPLE)
    assert (found.partition, found.gpus_per_node, found.time_limit) == ("gpu", 8, "24:00:00")
    assert found.setup == ("module load cuda/12.6",)
    assert found.options == ("--exclude=node017",)


def test_every_field_is_in_the_example() -> None:
    text = EXAMPLE.read_text()
    assert all(f"{name}:" in text for name in ClusterConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("options: ['--export=ALL,HF_TOKEN=abc']", "options sets HF_TOKEN"),
        ("setup: [export HF_TOKEN=abc]", "setup sets HF_TOKEN, and would be written to scripts"),
        ("command: [env, AWS_SECRET_ACCESS_KEY=abc, patchline]", "command sets AWS_SECRET_ACCESS_KEY"),
        ("partition: 'gpu --wrap=id'", "partition is 'gpu --wrap=id'; allowed: letters"),
        ('account: "me\\n#SBATCH --uid=0"', "account is "),
        ("options: ['--wrap=id']", "options has '--wrap=id', which patchline sets itself"),
        (
            "options: [--comm=x]",
            "options has '--comm=x', which sbatch may take for --comment, which patchline sets itself",
        ),
        ("options: [--job-n=x]", "for --job-name, which patchline sets itself; leave it out"),
        ("options: [--test-only]", "options has '--test-only', with which sbatch does not answer as it must; leave it"),
        ("options: [--wai]", "options has '--wai', which sbatch may take for --wait, with which"),
        ("options: [--parsable]", "does not answer as it must"),
        ("options: [--partition=gpu]", "options has '--partition=gpu'; set `partition:` instead"),
        ("options: [--acc=me]", "options has '--acc=me', which sbatch may take for --account; set `account:` instead"),
        ("options: [--cpus-per-task=4]", "set `cpus_per_rank:` instead"),
        ("options: [--gpus=4]", "options has '--gpus=4'; set `gpus_per_node:` instead"),
        ("options: [--ntasks=4]", "options has '--ntasks=4', which patchline sets itself"),
        ("options: ['--exclude=a b']", "allowed: --name or --name=value"),
        ("options: [--requeue]", "which patchline sets itself"),
        ("time_limit: 1 day", "time_limit is '1 day'; allowed: MINUTES"),
        ("margin_seconds: 1", "margin_seconds is 1; allowed: 10 to"),
        ('setup: ["module load a\\nrm -r b"]', "setup has 'module load a\\nrm -r b'; allowed: one line"),
        ("s3_endpoint: https://me:secret@s3.example.org", "without a password"),
        ("gpus: 8", "unknown field gpus"),
        ("gpu_type: h100:8\ngpus_per_node: 8", "gpu_type is 'h100:8'; allowed: letters, digits and _.-"),
        ("gpu_type: h100", "gpu_type is h100 and gpus_per_node 0; give gpus_per_node, too"),
        ("gpus_per_node: eight", "gpus_per_node is eight; allowed: a whole number"),
        ("- partition", "has no fields"),
    ],
)
def test_what_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(line + "\n")
    with pytest.raises(UserError) as error:
        read_cluster(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_other_options_pass() -> None:
    """Options that begin like one of patchline's own are refused, too."""
    options = (
        "--hold",
        "--exclude=n1",
        "--export=NONE",
        "--mem=0",
        "--nodelist=n[1-2]",
        "--time-min=5",
        "--wait-all-nodes=1",
    )
    assert ClusterConfig(options=options).options == options


def test_the_partition_of_a_job() -> None:
    both = ClusterConfig(partition="gpu", cpu_partition="cpu")
    assert [both.partition_for(has_ranks=each) for each in (True, False)] == ["gpu", "cpu"]
    assert ClusterConfig(partition="gpu").partition_for(has_ranks=False) == "gpu"
    with pytest.raises(UserError, match="set `partition:` instead"):
        ClusterConfig(partition="gpu", options=("--partition=x",))


@pytest.mark.parametrize(
    ("shown", "seconds"), [("1-00:00:00", 86_400), ("02:30:00", 9000), ("05:00", 300), ("UNLIMITED", None)]
)
def test_limits_as_slurm_shows_them(shown: str, seconds: int | None) -> None:
    assert seconds_of(shown) == seconds


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("", None), ("90", 5400), ("90:30", 5430), ("24:00:00", 86_400), ("2-12", 216_000), ("1-00:30:00", 88_200)],
)
def test_limits_as_sbatch_reads_them(given: str, seconds: int | None) -> None:
    assert asked_seconds(given) == seconds
