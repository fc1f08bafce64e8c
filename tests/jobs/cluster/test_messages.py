"""What submit and its checks say when they refuse, each message once."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.cluster import slurm
from jobs.cluster.secret_names import refuse_secret_lines, refuse_secret_words
from jobs.cluster.settings import ClusterConfig, read_cluster
from jobs.cluster.slurm import slurms_answer, submitted, tasks_of
from jobs.cluster.submit_checks import AskedJob, refuse_job, refuse_unprintable
from jobs.recipes.pretrain import RECIPES
from pipeline.training.reporting.ledger import Ledger
from tests.jobs.cluster.test_slurm import SILENT, programs
from tests.jobs.cluster.test_submit_checks import TINY, check
from tests.rigs.messages import Row, row, table


def setup_line(_: Path, line: str) -> None:
    refuse_secret_lines(["module load x", line], what="setup")


def url_with_a_password(_: Path) -> None:
    refuse_secret_words(["pretrain", "x", "--data.url=s3://bucket/x", "--run-dir", "/a:b@c"])
    refuse_secret_words(["pretrain", "--data.url=s3://KEY:word@bucket/x"])


def url_with_a_signature(_: Path) -> None:
    refuse_secret_words(["evaluate", "https://h/x?X-Amz-Date=1&X-Amz-Signature=word"])


def refused_by_slurm(folder: Path, said: str) -> None:
    environ = programs(folder, sbatch=f"echo 'sbatch: error: {said}' >&2; exit 1")
    slurms_answer([], environ, text="#!/bin/sh\n")


def silent_controller(folder: Path, said: str) -> None:
    environ = programs(folder, sbatch=f"echo 'sbatch: error: Batch job submission failed: {said}' >&2; exit 1")
    slurms_answer([], environ, text="#!/bin/sh\n")


def job_number(folder: Path, answer: str) -> None:
    submitted([], programs(folder, sbatch=f"echo '{answer}'"))


def silent_scontrol(folder: Path, scontrol: str) -> None:
    tasks_of("12", programs(folder, scontrol=scontrol))


def queued_ranks(_: Path, nodes: int, gpus: int, changes: dict[str, int]) -> None:
    job = replace(RECIPES["vit_h14_jft"](), **changes)  # type: ignore[arg-type]
    check(nodes=nodes, job=job, cluster=ClusterConfig(gpus_per_node=gpus))


def margin_shorter_than_saves(folder: Path) -> None:
    """Training waited a second for each save, which a slow disk then took for 150 s. One save did not end for an hour,
    when the disk was away."""
    ledger = Ledger(folder)
    for step, seconds in enumerate((2.0, 2.0, 150.0, 150.0, 3600.0), start=1):
        ledger.seconds["checkpoint"] += 1.0
        ledger.append(folder, step=step, attempt=f"{step:04}-0123abcd", commit_seconds=seconds)
    check(str(folder))


def path_in_a_script(_: Path, run_dir: str) -> None:
    refuse_unprintable(run_dir)


def unprintable_folder(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        (folder / "a\nb").mkdir()
        monkeypatch.chdir(folder / "a\nb")
        refuse_unprintable("")


def checked_job(_: Path) -> None:
    asked = AskedJob(job=None, nodes=7, time_limit="5", has_ranks=True)
    refuse_job(asked, ClusterConfig(spares=2), TINY, {"PATH": ""})


@table(
    # secret_names
    row(
        "a line with a secret, 'export AWS_SECRET_ACCES",
        setup_line,
        "export AWS_SECRET_ACCESS_KEY=abc",
    ).says(
        "setup sets AWS_SECRET_ACCESS_KEY, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: AWS_SECRET_ACCESS_KEY=$(cat FILE)"
    ),
    row(
        'a line with a secret, "module load cuda; HF_TO',
        setup_line,
        "module load cuda; HF_TOKEN='abc' other",
    ).says(
        "setup sets HF_TOKEN, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: HF_TOKEN=$(cat FILE)"
    ),
    row("a line with a secret, 'DB_PASS=\"x y\"'", setup_line, 'DB_PASS="x y"').says(
        "setup sets DB_PASS, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: DB_PASS=$(cat FILE)"
    ),
    row("a line with a secret, 'export A=1 WANDB_API_KE", setup_line, "export A=1 WANDB_API_KEY=abc").says(
        "setup sets WANDB_API_KEY, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: WANDB_API_KEY=$(cat FILE)"
    ),
    row("a line with a secret, 'curl https://me:word@ho", setup_line, "curl https://me:word@host/x").says(
        "setup has a URL with a password or a signature, which would be written to scripts; leave it out"
    ),
    row(
        "a line with a secret, \"curl 'https://host/x?X-",
        setup_line,
        "curl 'https://host/x?X-Amz-Signature=word'",
    ).says("setup has a URL with a password or a signature, which would be written to scripts; leave it out"),
    row("a line with a secret, \"export HF_TOKEN=$'abc'\"", setup_line, "export HF_TOKEN=$'abc'").says(
        "setup sets HF_TOKEN, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: HF_TOKEN=$(cat FILE)"
    ),
    row("a line with a secret, 'export HF_TOKEN=$\"abc\"'", setup_line, 'export HF_TOKEN=$"abc"').says(
        "setup sets HF_TOKEN, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: HF_TOKEN=$(cat FILE)"
    ),
    row("a line with a secret, 'export HF_TOKEN=${X:-ab", setup_line, "export HF_TOKEN=${X:-abc}").says(
        "setup sets HF_TOKEN, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: HF_TOKEN=$(cat FILE)"
    ),
    row(
        "a line with a secret, 'export HF_TOKEN=\"${HF_T",
        setup_line,
        'export HF_TOKEN="${HF_TOKEN-abc}"',
    ).says(
        "setup sets HF_TOKEN, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: HF_TOKEN=$(cat FILE)"
    ),
    row("a line with a secret, \"export HF_TOKEN=${X:='a", setup_line, "export HF_TOKEN=${X:='abc'}").says(
        "setup sets HF_TOKEN, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: HF_TOKEN=$(cat FILE)"
    ),
    row(
        "a line with a secret, 'aws configure set aws_s",
        setup_line,
        "aws configure set aws_secret_access_key abc",
    ).says(
        "setup sets aws_secret_access_key, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: aws_secret_access_key=$(cat FILE)"
    ),
    row(
        'a line with a secret, "aws configure set --pro',
        setup_line,
        "aws configure set --profile vit profile.vit.aws_secret_access_key 'abc'",
    ).says(
        "setup sets aws_secret_access_key, and would be written to scripts and shown by Slurm; keep keys of S3 in "
        "~/.aws/credentials (s3_profile), and read others on the node: aws_secret_access_key=$(cat FILE)"
    ),
    row("a word with a password", url_with_a_password).says(
        "--data.url=s3://***@bucket/x has a password or a signature, which Slurm would show to everybody; leave "
        "it out of the URL, and keep keys of S3 in ~/.aws/credentials (s3_profile in your cluster's settings)"
    ),
    row("a word with a signature", url_with_a_signature).says(
        "https://h/x?X-Amz-Date=***&X-Amz-Signature=*** has a password or a signature, which Slurm would show to "
        "everybody; leave it out of the URL, and keep keys of S3 in ~/.aws/credentials (s3_profile in your "
        "cluster's settings)"
    ),
    # settings
    row("a file that is missing", lambda folder: read_cluster(folder / "none.yaml")).says(
        "DIR/none.yaml cannot be read: No such file or directory; give --cluster your copy of the output of "
        "`patchline example cluster.yaml`"
    ),
    # slurm
    row(
        "Slurm refuses: invalid partition specified: gpuu",
        refused_by_slurm,
        "invalid partition specified: gpuu",
    ).says(
        "Slurm would refuse this job: invalid partition specified: gpuu; `sinfo -s` lists the partitions: correct "
        "`partition:`, or `cpu_partition:` of jobs without GPUs, in your cluster's settings"
    ),
    row(
        "Slurm refuses: invalid partition specified: cpuu",
        refused_by_slurm,
        "invalid partition specified: cpuu",
    ).says(
        "Slurm would refuse this job: invalid partition specified: cpuu; `sinfo -s` lists the partitions: correct "
        "`partition:`, or `cpu_partition:` of jobs without GPUs, in your cluster's settings"
    ),
    row(
        "Slurm refuses: Invalid account or account/partition combination specified",
        refused_by_slurm,
        "Invalid account or account/partition combination specified",
    ).says(
        "Slurm would refuse this job: Invalid account or account/partition combination specified; correct "
        "`account:` and `qos:` in your cluster's settings"
    ),
    row(
        "Slurm refuses: Requested time limit is invalid",
        refused_by_slurm,
        "Requested time limit is invalid",
    ).says(
        "Slurm would refuse this job: Requested time limit is invalid; lower --time; `sinfo -o '%P %l'` lists the "
        "limits"
    ),
    row(
        "Slurm refuses: Requested node configuration is not available",
        refused_by_slurm,
        "Requested node configuration is not available",
    ).says(
        "Slurm would refuse this job: Requested node configuration is not available; lower --nodes, "
        "gpus_per_node, cpus_per_rank, or --mem in `options:`; `sinfo -o '%P %D %c %m %G'` lists what there is"
    ),
    row(
        "Slurm refuses: Memory specification can not be satisfied",
        refused_by_slurm,
        "Memory specification can not be satisfied",
    ).says(
        "Slurm would refuse this job: Memory specification can not be satisfied; lower --mem, --mem-per-cpu or "
        "--mem-per-gpu in `options:` of your cluster's settings, or give `all_memory: no`; `sinfo -o '%P %m'` "
        "lists each node's MB"
    ),
    row("Slurm refuses: QOSMaxMemoryPerUser", refused_by_slurm, "QOSMaxMemoryPerUser").says(
        "Slurm would refuse this job: QOSMaxMemoryPerUser; correct `account:` and `qos:` in your cluster's settings"
    ),
    row("Slurm refuses: something new", refused_by_slurm, "something new").says(
        "Slurm would refuse this job: something new; correct your cluster's settings, or the flags of submit"
    ),
    *(
        row(f"a silent controller, {said!r:.24}", silent_controller, said).says(
            "Slurm does not answer: Batch job submission failed: …; run this on a login node of the cluster, once its "
            "controller answers (`scontrol ping`)"
        )
        for said in ("Unable to contact slurm controller (connect failure)", "Socket timed out on send/recv operation")
    ),
    *(
        row(f"not the number of a job, {answer}", job_number, answer).says(
            "sbatch answered '…' instead of a job's number; see squeue"
        )
        for answer in ("", "yes", "12a", "-3", "١٢")
    ),
    row("another cluster", job_number, "12;other").says(
        "sbatch put job '…' on the cluster '…', and Patchline asks only the cluster of this machine; cancel it there "
        "(scancel --clusters), and submit on a login node of that cluster"
    ),
    row("a program that is not there", lambda _: slurm.ran(["squeue_of_nobody"], os.environ)).says(
        "cannot run squeue_of_nobody: No such file or directory; it comes with Slurm, as sbatch does"
    ),
    *(
        row(
            f"a silent scontrol, {scontrol!r:.24}",
            silent_scontrol,
            scontrol,
        ).says("scontrol does not answer: …; try again when Slurm does")
        for scontrol in (SILENT, "echo 'slurm.conf: file not found' >&2; exit 1", "exit 1")
    ),
    # submit_checks
    row(
        "ranks that the stage would refuse: 3 8 ",
        queued_ranks,
        3,
        8,
        {},
    ).says("--global-batch is 4096, not divisible by 24 ranks; start 8 or 16 or 32 ranks, or change --global-batch"),
    row(
        "ranks that the stage would refuse: 3 0 ",
        queued_ranks,
        3,
        0,
        {},
    ).says("--global-batch is 4096, not divisible by 3 ranks; start 1 or 2 or 4 ranks, or change --global-batch"),
    row(
        "ranks that the stage would refuse: 8 8 global_batch: 4100",
        queued_ranks,
        8,
        8,
        {"global_batch": 4100},
    ).says("--global-batch is 4100, not a multiple of --data.lanes = 512; take 4096, or other lanes"),
    row(
        "ranks that the stage would refuse: 8 8 micro_batch: 48",
        queued_ranks,
        8,
        8,
        {"micro_batch": 48},
    ).says(
        "--micro-batch is 48, which does not divide a rank's share of 64 images (global batch 4096 / 64 ranks); "
        "take a divisor of 64, or 0 for the largest that fits"
    ),
    row(
        "ranks that the stage would refuse: 128 8 ",
        queued_ranks,
        128,
        8,
        {},
    ).says(
        "--data.lanes is 512, fewer than the 1024 ranks, which would read the dataset 2 times an epoch; take "
        "--data.lanes 1024 --data.window-blocks 1, or at most 512 ranks (lanes are fixed once a run has begun: "
        "take as many as the most ranks that it may ever have)"
    ),
    row("a margin shorter than the run's saves", margin_shorter_than_saves).says(
        "a save of this run takes 150 s (the median of the last 5), and at the time limit a run may have to wait for "
        "two: the one being written, and its last; margin_seconds is 120; raise margin_seconds in your cluster's "
        "settings to 301 or more, or submit with --no-check"
    ),
    *(
        row(f"a path in a script, {run_dir}", path_in_a_script, run_dir).says(
            "--run-dir is '/run\\…'; allowed: printable characters, since sbatch reads it from a line of a script; "
            "choose another folder"
        )
        for run_dir in ("/run\n#SBATCH --uid=0", "/run\udcff")
    ),
    row("a current folder that cannot be printed", unprintable_folder).says(
        "the current folder is 'DIR/a\\nb'; allowed: printable characters, since sbatch reads it from a line of a "
        "script; choose another folder"
    ),
    row("a fault, with the way around it", checked_job).says(
        "9 nodes are asked for, spares with them, and partition tiny allows 8: the job would wait for ever; lower "
        "--nodes, or choose another partition, or submit with --no-check"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
