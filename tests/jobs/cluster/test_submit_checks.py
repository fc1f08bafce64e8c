"""What submit refuses by itself: stores, run directories and limits that cannot work, each with the remedy."""

import socket
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.cluster import submit_checks
from jobs.cluster.container import ContainerConfig
from jobs.cluster.settings import ClusterConfig
from jobs.cluster.submit_checks import (
    AskedJob,
    PartitionLimits,
    file_system,
    gate_minutes,
    judge_margin,
    judge_most_nodes,
    judge_time,
    limits_of,
    planned_save_seconds,
    refuse_job,
    refuse_unprintable,
    refuse_unreachable,
    urls_of,
)
from jobs.recipes.pretrain import RECIPES
from shards.errors import UserError
from tests.jobs.cluster.test_slurm import programs
from tests.rigs.processes import patchline
from tests.rigs.s3 import free_port

MOUNTS = (
    "overlay / overlay rw 0 0\ntmpfs /run tmpfs rw 0 0\nserver:/x /shared nfs4 rw 0 0\ntmpfs /my\\040runs tmpfs rw\n"
)
SHOWN = (
    "PartitionName=long Default=NO DefaultTime=00:01:00 MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP\\n"
    "PartitionName=main Default=YES DefaultTime=NONE MaxNodes=4 MaxTime=2-00:00:00 State=UP\\n"
    "PartitionName=tiny Default=NO DefaultTime=NONE MaxNodes=8 MaxTime=00:10:00 State=UP\\n"
)


def check(
    run_dir: str = "",
    *,
    nodes: int = 1,
    job: object = None,
    cluster: ClusterConfig = ClusterConfig(),  # noqa: B008 - frozen
    environ: dict[str, str] = {"PATH": ""},  # noqa: B006 - not changed
    words: Sequence[str] = (),
) -> None:
    """Checks a job for a partition without limits, by default without Slurm."""
    own = SimpleNamespace(run_dir=run_dir) if job is None else replace(job, run_dir=run_dir) if run_dir else job  # type: ignore[type-var]
    asked = AskedJob(job=own, words=tuple(words), nodes=nodes, time_limit="", has_ranks=True)
    refuse_job(asked, cluster, PartitionLimits(name="x"), environ)


def test_one_url_for_each_bucket() -> None:
    words = [
        "pretrain",
        "x",
        "--data.url=s3://a/one",
        "--checkpoint.url",
        "s3://b/two",
        "--run-dir=/s3",
        "s3://a/other",
    ]
    assert urls_of(words) == ["s3://a/one", "s3://b/two"]


def test_a_bucket_that_is_there_passes(s3_bucket: str) -> None:
    refuse_unreachable([f"--data.url=s3://{s3_bucket}/data"], ClusterConfig(), is_dry=False)


@pytest.mark.usefixtures("s3_endpoint")
def test_buckets_that_cannot_be_used_are_refused_or_in_a_dry_run_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match=r"there is no bucket 'none'.*create the bucket or correct the URL, or submit"):
        refuse_unreachable(["--data.url=s3://none/x"], ClusterConfig(), is_dry=False)
    away = ClusterConfig(s3_endpoint=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match="S3 is unreachable"):
        refuse_unreachable(["s3://none/x"], away, is_dry=False)
    assert not caplog.messages
    refuse_unreachable(["s3://none/x", "s3://other/x"], ClusterConfig(), is_dry=True)
    assert ["'none'" in caplog.messages[0], "'other'" in caplog.messages[1]] == [True, True]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/run/x", "tmpfs"), ("/shared/runs/new", "nfs4"), ("/home/x", "overlay"), ("/my runs/x", "tmpfs")],
)
def test_file_systems(path: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(submit_checks, "_MOUNTS", tmp_path / "mounts")
    assert file_system(Path(path)) == kind


def test_a_run_directory_in_memory_is_refused_on_several_nodes(caplog: pytest.LogCaptureFixture) -> None:
    shared = "/dev/shm/run"  # noqa: S108 - nothing is written there
    check(shared)
    assert "a requeue that lands on another node starts from scratch there; choose another folder" in caplog.text
    with pytest.raises(
        UserError, match="on tmpfs, in the memory of this machine; allowed: storage that all nodes share"
    ):
        check(shared, nodes=2)


def test_a_run_that_has_begun_may_have_more_ranks_than_lanes(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    job = replace(RECIPES["vit_h14_jft"](), run_dir=str(tmp_path))
    check(nodes=128, job=job, cluster=ClusterConfig(gpus_per_node=8))


def test_a_margin_shorter_than_a_planned_save(tmp_path: Path) -> None:
    """ViT-H/14 without its head has 631 M parameters, of 12 bytes each in fp32 masters and two moments, and writes them
    at 1 GB/s per node."""
    job = RECIPES["vit_h14_jft"]()
    one, two = (planned_save_seconds(job, nodes=nodes, gpus=8) for nodes in (1, 2))
    assert one == pytest.approx(0.631 * 12, rel=0.02)
    assert two == pytest.approx(one / 2, rel=0.02)
    assert judge_margin(10, planned_seconds=one).status == "ok"
    short = judge_margin(10, planned_seconds=12.0)
    assert short.found == "a save would take about 12 s at 1 GB/s per node; margin_seconds is 10"
    assert short.todo == "raise margin_seconds in your cluster's settings to 13 or more"
    slow = replace(job, model=replace(job.model, depth=128))
    cluster = ClusterConfig(gpus_per_node=8, margin_seconds=20)
    with pytest.raises(UserError, match="a save would take about"):
        check(str(tmp_path), job=slow, cluster=cluster)


def test_what_cannot_be_planned_is_left_to_the_stage() -> None:
    job = replace(RECIPES["vit_h14_jft"](), global_batch=4097)
    assert planned_save_seconds(job, nodes=1, gpus=8) == 0.0


@pytest.fixture
def in_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerConfig:
    """A container that has the current folder, with the home folder outside it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".aws").mkdir(parents=True)
    (tmp_path / "shared").mkdir()
    monkeypatch.chdir(tmp_path / "shared")
    return ContainerConfig(system="apptainer", image="/p.sif", mounts=(f"{tmp_path}/shared", "/raid:/data:ro"))


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--data.url=/raid/jft"], "/raid/jft"),  # which has another path in the container
        (["--data.url", "/other/jft"], "/other/jft"),
        (["--initial.weights=/other/weights"], "/other/weights"),
        (["--data.url=HERE/jft", "--steps=30", "--data.url=s3://b/x", "relative/jft"], ""),
    ],
)
def test_paths_that_the_container_does_not_have(
    in_container: ContainerConfig, caplog: pytest.LogCaptureFixture, words: list[str], missing: str
) -> None:
    words = [word.replace("HERE", str(Path.cwd())) for word in words]
    if not missing:
        check(str(Path("run")), cluster=ClusterConfig(container=in_container), words=words)
        assert "/.aws, where ranks look for the keys of S3; add ~/.aws:ro to container.mounts" in caplog.text
        return
    with pytest.raises(UserError) as error:
        check("run", cluster=ClusterConfig(container=in_container), words=words)
    assert str(error.value).startswith(f"{missing} is not in the container, whose mounts are {Path.cwd()}, /raid:/data")


def test_a_run_directory_outside_the_container_is_refused(in_container: ContainerConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/home/run is not in the container"):
        check(str(tmp_path / "home" / "run"), cluster=ClusterConfig(container=in_container))
    check(str(tmp_path / "home" / "run"), cluster=ClusterConfig(container=replace(in_container, home=True)))


def test_a_cluster_without_pyxis_is_refused(in_container: ContainerConfig, tmp_path: Path) -> None:
    cluster = ClusterConfig(container=replace(in_container, system="pyxis"))
    check(cluster=cluster)  # a laptop, without srun
    check(cluster=cluster, environ=programs(tmp_path, srun="echo --container-image=IMAGE"))
    with pytest.raises(UserError, match=r"this cluster has no pyxis; set container.system to apptainer"):
        check(cluster=cluster, environ=programs(tmp_path, srun="echo --chdir"))


ON_A_DISK = "/dev/sda1 / ext4 rw 0 0\nserver:/x /shared nfs4 rw 0 0\n"


@pytest.fixture
def on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the /proc/mounts and the list of exports of a machine whose root is a disk, and that exports nothing."""
    (tmp_path / "mounts").write_text(ON_A_DISK)
    monkeypatch.setattr(submit_checks, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(submit_checks, "_EXPORTS", tmp_path / "etab")
    return tmp_path


@pytest.mark.parametrize(
    ("run_dir", "nodes", "known", "refused"),
    [
        ("/home/me/run", 2, "gpu1 gpu1.cluster", True),
        ("/home/me/run", 1, "gpu1 gpu1.cluster", False),
        ("/shared/run", 2, "gpu1 gpu1.cluster", False),
        ("/home/me/run", 2, "rig-n1 127.0.0.1", False),
        ("/home/me/run", 2, f"{socket.gethostname()} 10.0.0.1", False),
        ("/home/me/run", 2, "", False),
    ],
)
def test_a_disk_that_other_machines_do_not_see_is_refused(
    on_a_disk: Path, run_dir: str, nodes: int, known: str, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    environ = programs(on_a_disk, sinfo=f"echo {known}")
    expected = pytest.raises(UserError, match=r"is on a disk of this machine \(ext4\), which the nodes, such as gpu1,")
    with expected if refused else nullcontext():
        check(run_dir, nodes=nodes, environ=environ)
    assert ("a requeue that lands on another node" in caplog.text) == (nodes == 1)
    check(run_dir, nodes=nodes, environ={"PATH": str(on_a_disk / "none")})


def test_a_head_node_that_shares_its_disk_passes(on_a_disk: Path) -> None:
    (on_a_disk / "etab").write_text("/home\t*(rw,sync)\n/opt/my\\040tools\t10.0.0.0/8(ro)\n")
    environ = programs(on_a_disk, sinfo="echo gpu1 gpu1")
    check("/home/me/run", nodes=2, environ=environ)
    with pytest.raises(UserError, match="is on a disk of this machine"):
        check("/homes/me/run", nodes=2, environ=environ)


def test_paths_with_a_backslash_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm could not open a log there, so the job would end at once with 0:53, without a log."""
    (tmp_path / "back\\b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "back\\b")
    for run_dir in ("back\\b", str(tmp_path / "link" / "run")):
        with pytest.raises(UserError, match=r"--run-dir is .*; allowed: a path without a backslash"):
            refuse_unprintable(run_dir)
    with pytest.raises(UserError, match=r"^folder is .*; allowed: a path without a backslash"):
        refuse_unprintable("c\\hain", what="folder")
    refuse_unprintable(str(tmp_path / "my 'own' \"50%\" $é"))
    monkeypatch.chdir(tmp_path / "link")
    with pytest.raises(UserError, match=r"the current folder is .*without a backslash.*choose another folder"):
        refuse_unprintable("")


def test_a_submission_that_slurm_refuses_leaves_nothing(tmp_path: Path) -> None:
    """Otherwise the folder would look like a run whose job is gone."""
    (tmp_path / "cluster.yaml").write_text("command: [patchline]\n")
    words = ("pretrain", "digits_smoke", f"--cluster={tmp_path}/cluster.yaml", "--no-check", "--data.url=d")
    refuses = "echo 'sbatch: error: Requested time limit is invalid' >&2; exit 1"
    environ = programs(tmp_path, sbatch=refuses, squeue="exit 0")
    ended = patchline("submit", *words, f"--run-dir={tmp_path}/runs/one", environ=environ)
    assert (ended.code, "Slurm would refuse this job: Requested time limit" in " ".join(ended.errors.split())) == (
        2,
        True,
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("partition", "limits"),
    [
        ("", PartitionLimits(name="main", seconds=172800, default_seconds=172800, nodes=4)),
        ("long", PartitionLimits(name="long", default_seconds=60)),
        ("tiny,main", PartitionLimits(name="tiny,main", seconds=172800, default_seconds=172800, nodes=8)),
        ("tiny,long", PartitionLimits(name="tiny,long")),
        ("none", PartitionLimits(name="none")),
    ],
)
def test_the_limits_of_a_partition(tmp_path: Path, partition: str, limits: PartitionLimits) -> None:
    assert limits_of(partition, programs(tmp_path, scontrol=f"printf '{SHOWN}'")) == limits


def test_no_limits_if_slurm_does_not_say(tmp_path: Path) -> None:
    assert limits_of("main", programs(tmp_path, scontrol="exit 1")) == PartitionLimits(name="main")
    assert limits_of("main", {"PATH": ""}) == PartitionLimits(name="main")


TINY = PartitionLimits(name="tiny", seconds=600, default_seconds=90, nodes=8)


@pytest.mark.parametrize(
    ("limits", "time_limit", "found", "todo"),
    [
        (
            TINY,
            "11",
            "the time limit is 11 min 0 s, and partition tiny allows 10 min 0 s: the job would",
            "lower --time",
        ),
        (
            TINY,
            "1-00",
            "the time limit is 1 d 0 h, and partition tiny allows 10 min 0 s: the job would wait for ever",
            "",
        ),
        (TINY, "", "partition tiny ends a job without a time limit after 1 min 30 s, and the ranks are", "give --time"),
        (TINY, "2", "the time limit is 2 min 0 s, and the ranks are asked to save 120 s before it", "raise --time"),
        (TINY, "10", "10 min 0 s, asked for: 10 min 0 s, of which 120 s are to save", ""),
        (TINY, "10:00", "10 min 0 s, asked for: 10 min 0 s", ""),
        (replace(TINY, default_seconds=600), "", "10 min 0 s, asked for: the default", ""),
        (PartitionLimits(name="x"), "365-00", "no limit, asked for: ", ""),
    ],
)
def test_a_time_limit_that_waits_for_ever_or_saves_nothing_is_a_fault(
    limits: PartitionLimits, time_limit: str, found: str, todo: str
) -> None:
    one = judge_time(limits, time_limit, margin=120)
    assert (one.found[: len(found)], one.todo[: len(todo)]) == (found, todo)
    assert (one.status == "fault") == bool(one.todo)


def test_more_nodes_than_a_partition_allows_are_a_fault() -> None:
    assert [judge_most_nodes(TINY, num_nodes).status for num_nodes in (8, 9)] == ["ok", "fault"]
    assert "9 nodes are asked for, spares with them, and partition tiny allows 8" in judge_most_nodes(TINY, 9).found
    assert judge_most_nodes(PartitionLimits(name="x"), 10_000).status == "ok"


def test_gates_fit_the_partition() -> None:
    assert [gate_minutes(PartitionLimits(name="x", seconds=each)) for each in (None, 7200, 630, 120)] == [30, 30, 10, 2]
    with pytest.raises(
        UserError, match="partition x allows 1 min 0 s, and a gate of a chain needs 2 minutes; set cpu_"
    ):
        gate_minutes(PartitionLimits(name="x", seconds=60))
