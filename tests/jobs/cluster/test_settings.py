"""cluster.yaml is read strictly, and nothing in it can become an option or a line that it should not be."""

import re
from pathlib import Path

import pytest

from jobs.cluster.container import ContainerConfig
from jobs.cluster.settings import ClusterConfig, asked_seconds, read_cluster, seconds_of
from shards.errors import UserError

EXAMPLE = Path(__file__).resolve().parents[3] / "slurm" / "cluster.example.yaml"


def test_the_example_is_read() -> None:
    found = read_cluster(EXAMPLE)
    assert (found.partition, found.gpus_per_node, found.time_limit) == ("gpu", 8, "24:00:00")
    assert found.setup == ("module load python/3.11",)
    assert found.options == ("--exclude=node017",)


def test_every_field_is_in_the_example() -> None:
    text = EXAMPLE.read_text()
    assert all(f"{name}:" in text for name in ClusterConfig.__dataclass_fields__)


def test_the_lines_of_the_example_that_are_comments_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path, text = tmp_path / "cluster.yaml", EXAMPLE.read_text()
    path.write_text(re.sub(r"^# (?=cpu_|container:|  )", "", text, flags=re.MULTILINE))
    found = read_cluster(path)
    assert (found.cpu_account, found.cpu_qos, found.cpu_constraint) == ("vision_cpu", "normal", "cpu")
    assert found.container == ContainerConfig(
        system="pyxis", image="/shared/patchline.sqsh", mounts=("/shared", "/home/me/.aws:ro")
    )


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
        ("gpu_type: h100\ngpus_per_node: 8\ngpus_by: nothing", "gpus_by nothing, which asks for no GPUs"),
        ("gpus_by: gpus", "gpus_by is gpus; allowed: gpus-per-node, gres, nothing"),
        ("options: ['--gres=nvme:1,gpu:8']", "set `gpus_per_node:` and `gpus_by: gres` instead"),
        ("options: [--exclusive]", "options has '--exclusive'; set `exclusive:` instead"),
        ("exclusive: no", "exclusive is no and cpus_per_rank 0; on a shared node, a rank would get one CPU"),
        ("cpu_account: me two", "cpu_account is 'me two'; allowed: letters"),
        ("container: {mounts: [/shared]}", "container has settings, but no image; give container.image"),
        ("container: {image: /a.sqsh, system: docker}", "allowed: pyxis, apptainer, singularity"),
        ("container: {image: a.sqsh}", "container.image is 'a.sqsh'; allowed for pyxis: the absolute path of a file"),
        ('container: {image: "/a\\n.sif"}', "container.image is '/a\\n.sif'; allowed"),
        ("container: {image: '-x'}", "container.image is '-x'; allowed"),
        ("container: {image: 'docker://debian'}", "allowed for pyxis: the absolute path of a file, or REGISTRY#IMAGE"),
        (
            "container: {system: apptainer, image: debian}",
            "allowed for apptainer: the absolute path of a file, or a URL",
        ),
        ("container: {system: apptainer, image: 'docker://me:word@h/x'}", "container has a URL with a password"),
        ("container: {image: /a.sqsh, command: [env, HF_TOKEN=abc, patchline]}", "container sets HF_TOKEN"),
        ("container: {image: /a.sif, mounts: [shared]}", "container.mounts has 'shared'; allowed: SOURCE"),
        ("container: {image: /a.sif, mounts: ['/a,/etc']}", "container.mounts has '/a,/etc'; allowed"),
        ("container: {image: /a.sif, mounts: ['/$(id)']}", "container.mounts has '/$(id)'; allowed"),
        ("container: {image: /a.sif, mounts: ['/a:/b:rw']}", "container.mounts has '/a:/b:rw'; allowed"),
        ('container: {image: /a.sif, mounts: ["/a\\n/b"]}', "container.mounts has '/a\\n/b'; allowed"),
        ("container: {image: /a.sif, command: []}", "container.command is empty"),
        ('container: {image: /a.sif, command: ["a\\nb"]}', "container.command has 'a\\nb'; allowed"),
        ("container: {image: /a.sif, options: [--wrap=id]}", "allowed for pyxis: --container-NAME"),
        ("container: {image: /a.sif, options: ['--container-env=A B']}", "allowed for pyxis: --container-NAME"),
        ("container: {image: /a.sif, options: [--no-container-mount-home]}", "which patchline sets itself"),
        ("container: {image: /a.sif, system: apptainer, options: [--bind=/]}", "which patchline sets itself"),
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
    apart = ClusterConfig(account="a", cpu_account="c", qos="q", constraint="gpu", cpu_constraint="cpu")
    assert list(apart.place_of(has_ranks=False).values()) == ["", "c", "q", "cpu"]
    assert ClusterConfig(constraint="gpu").place_of(has_ranks=False)["constraint"] == ""
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
