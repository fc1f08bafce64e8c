"""`patchline submit` on a real Slurm of two nodes."""

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from jobs.chains.state import read_record_of
from tests.rigs.processes import patchline
from tests.rigs.slurm import SlurmCluster, SlurmConfig
from tests.rigs.small_disk import small_disk
from tests.slurm.test_stage import PATCHLINE, SCRIPT, program, wait_until_ended

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def submit(cluster: SlurmCluster, *words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(PATCHLINE), "submit", *words],
        env=cluster.job_environment() | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cluster.folder,
    )


def settings_in(folder: Path, *lines: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text("\n".join(["partition: main", *lines, ""]))
    return f"--cluster={path}"


def kept_from_jobs(stderr: str) -> set[str]:
    """The names in the one line that says which variables are not passed on. It has all of them in a full dry run."""
    (names,) = re.findall(
        r"kept from jobs, since Slurm stores what they inherit: (.*); to pass on .* name it in `environment:`", stderr
    )
    return set(re.sub(r" and \d+ more .*", "", names).split(", "))


def test_a_disk_that_is_full_behind_sbatch_hides_no_job(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    with small_disk(tmp_path / "disk", num_bytes=1 << 20) as disk:
        program(
            tools / "sbatch",
            f'PATH={slurm_cluster.job_environment()["PATH"]} sbatch "$@" || exit $?',
            f"[[ $* == *--test-only* ]] || cat /dev/zero >{disk}/filler 2>/dev/null || :",
        )
        settings = settings_in(tmp_path, f"command: [{PATCHLINE}]", "options: [--hold]")
        words = (
            "pretrain",
            "digits_smoke",
            settings,
            "--no-check",
            "--links=2",
            "--data.url=d",
            f"--run-dir={disk}/run",
        )
        done = submit(slurm_cluster, *words, PATH=f"{tools}:{slurm_cluster.job_environment()['PATH']}")
        queue = slurm_cluster.command("squeue", "--noheader", "--format=%i %Z").splitlines()
        queued = [line.split()[0] for line in queue if str(slurm_cluster.folder) in line]
        slurm_cluster.command("scancel", *queued)
        assert (done.returncode, len(queued)) == (0, 2), done.stderr
        for job in queued:
            assert f"job {job}: pretrain-digits_smoke" in done.stderr
    assert "it lacks this: job" in " ".join(done.stderr.split())


def held_job(cluster: SlurmCluster, folder: Path, **environ: str) -> tuple[list[str], int, str]:
    """Submits a run whose job is held. Returns the words of `submit`, the job's number, and what `submit` said."""
    settings = settings_in(folder, f"command: [{PATCHLINE}]", "time_limit: '10'", "options: [--hold]")
    words = ["pretrain", "digits_smoke", settings, "--no-check", "--data.url=d", f"--run-dir={folder}/run"]
    done = submit(cluster, *words, **environ)
    assert done.returncode == 0, done.stderr
    return words, json.loads((folder / "run" / "submit" / "submitted.jsonl").read_text())["job"], done.stderr


def test_sbatchs_variables_of_a_shell_replace_no_option(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    options = {
        "SBATCH_CLUSTERS": "other",
        "SBATCH_CONSTRAINT": "v100",
        "SBATCH_JOB_NAME": "mine",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_OUTPUT": "/dev/null",
        "SBATCH_PARTITION": "debug",
        "SBATCH_SIGNAL": "KILL@1",
        "SBATCH_TIMELIMIT": "7",
    }
    _, number, said = held_job(slurm_cluster, tmp_path, **options)
    job = slurm_cluster.job(number)
    slurm_cluster.command("scancel", str(number))
    assert (job["Requeue"], job["TimeLimit"], job["JobName"]) == ("1", "00:10:00", "pretrain-digits_smoke")
    assert job["StdOut"].startswith(str(tmp_path))
    assert said.count(f"not given to sbatch: {', '.join(options)};") == 1


def test_the_preferences_of_a_shell_hide_no_job(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """`submit` would add a second job to the run, and `cancel` would leave the first one."""
    words, number, _ = held_job(slurm_cluster, tmp_path)
    looks = {
        "SQUEUE_STATES": "COMPLETED",
        "SQUEUE_PARTITION": "other",
        "SQUEUE_NAMES": "mine",
        "SQUEUE_USERS": "nobody",
    }
    said = {name: submit(slurm_cluster, *words, **{name: value}).stderr for name, value in looks.items()}
    environ = slurm_cluster.job_environment() | looks | {"SCANCEL_STATE": "RUNNING"}
    ended = patchline("cancel", f"{tmp_path}/run", environ=environ)
    states = slurm_cluster.squeue_state(number)
    queue = slurm_cluster.command("squeue", "--noheader", "--format=%i").split()
    slurm_cluster.command("scancel", f"--user={os.getuid()}")
    assert [name for name in looks if f"has a job already: {number} PENDING" not in said[name]] == []
    assert (ended.code, states, queue) == (0, "CANCELLED", []), ended.errors


def test_a_number_that_slurm_uses_again_is_not_the_runs_job(tmp_path: Path) -> None:
    """Slurm has lost its state and counts from 1 again: the numbers of two runs belong to strangers. One run was
    submitted by `patchline submit`, the other by plain sbatch, with a comment of the user. The strangers even have the
    comments of the runs, one of them as the job of another user; the other one is requeued, as the run's job was."""
    config = SlurmConfig(num_nodes=1, cpus_per_node=1)
    run, plain = tmp_path / "run", tmp_path / "plain"

    def told(cluster: SlurmCluster, command: str, folder: Path) -> str:
        ended = patchline(command, str(folder), environ=cluster.job_environment())
        return ended.output + ended.errors

    with SlurmCluster(config) as before:
        words, number, _ = held_job(before, tmp_path)
        comment = before.job(number)["Comment"]
        assert f"job {number}" in told(before, "status", run)
        sleeps = program(tmp_path / "sleeps", "sleep 600")
        of_plain = ["pretrain", "digits_smoke", "--data.url=d", f"--run-dir={plain}"]
        note = ["--output=/dev/null", "--comment=gpu"]
        by_hand = before.sbatch(SCRIPT, *of_plain, options=note, env={"PATCHLINE": str(sleeps)})
        before.wait_for((plain / "submit" / "submitted.jsonl").exists, deadline_seconds=60)
        again = [*of_plain, words[2], "--no-check"]
        before.scontrol("requeue", str(by_hand))  # gives it another submit time
        said = submit(before, *again).stderr
        assert f"has a job already: {by_hand} " in said, said
    stranger = program(tmp_path / "stranger.sbatch", "sleep 600")
    with SlurmCluster(config) as cluster:
        for_whom = {number: ["--uid=nobody", f"--comment={comment}"], by_hand: note}
        last = 0
        while last < by_hand:  # Slurm takes a number for each question, too
            last = cluster.sbatch(stranger, options=["--output=/dev/null", "--hold", *for_whom.get(last + 1, [])])
        cluster.scontrol("release", str(by_hand))
        cluster.wait_for(lambda: cluster.squeue_state(by_hand) == "RUNNING", deadline_seconds=60)
        cluster.scontrol("requeue", str(by_hand))  # so it has another submit time and a start, as the run's job had
        cluster.wait_for(lambda: cluster.squeue_state(by_hand) == "PENDING", deadline_seconds=60)
        cluster.scontrol("hold", str(by_hand))
        for folder, own, again_words in ((run, number, words), (plain, by_hand, again)):
            said = told(cluster, "status", folder)
            assert f"job {own}" not in said, said
            said = told(cluster, "cancel", folder)
            assert "has no job that waits or runs" in said, said
            assert cluster.squeue_state(own) == "PENDING", said
            ended = submit(cluster, *again_words)
            assert "has a job already" not in ended.stderr
            assert re.search(r"job \d+: pretrain-digits_smoke", ended.stderr), ended.stderr
            assert cluster.squeue_state(own) == "PENDING"


@pytest.mark.parametrize("is_bare", [pytest.param(False, marks=pytest.mark.long), True], ids=["environment", "bare"])
def test_a_run_is_submitted_once_and_ends_by_itself(slurm_cluster: SlurmCluster, tmp_path: Path, is_bare: bool) -> None:
    """A real training run on two nodes, in a folder whose name needs quotes. Its job inherits no secrets."""
    data, run_dir = tmp_path / "digits", tmp_path / 'my "50%" runs' / "one"
    subprocess.run([PATCHLINE, "pack", "digits", "--out", data], check=True, timeout=120)
    # As careful sites have it: the job inherits nothing, and srun would pass on nothing.
    options = "options: [--hold, --export=NONE]" if is_bare else "options: [--hold]"
    cluster = settings_in(tmp_path, f"command: [{PATCHLINE}]", f"setup: [env >{tmp_path}/environment]", options)
    words = (
        "pretrain",
        "digits_smoke",
        cluster,
        "--nodes=2",
        f"--data.url={data}",
        f"--run-dir={run_dir}",
        "--steps=30",
    )
    first = submit(slurm_cluster, *words, AWS_SECRET_ACCESS_KEY="of-mine", NCCL_DEBUG="INFO", MY_PAT="of-mine")
    assert first.returncode == 0, first.stderr
    assert "AWS_SECRET_ACCESS_KEY" in kept_from_jobs(first.stderr)
    again = submit(slurm_cluster, *words)
    assert (again.returncode, "has a job already" in again.stderr) == (0, True), again.stderr
    (line,) = [json.loads(line) for line in (run_dir / "submit" / "submitted.jsonl").read_text().splitlines()]
    slurm_cluster.scontrol("release", str(line["job"]))  # held until now, lest it end before it is submitted again
    job = wait_until_ended(slurm_cluster, line["job"])
    log = (run_dir / "submit" / f"pretrain-digits_smoke-{line['job']}.out").read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log
    assert (run_dir / "DONE").exists()
    environment = (tmp_path / "environment").read_text()
    assert ("NCCL_DEBUG=INFO" in environment) != is_bare
    assert "of-mine" not in environment + (run_dir / "submit" / line["script"]).read_text()
    assert (run_dir / "submit" / line["script"]).stat().st_mode & 0o777 == 0o600
    if is_bare:
        return
    by_hand = slurm_cluster.sbatch(run_dir / "submit" / line["script"])
    slurm_cluster.scontrol("release", str(by_hand))
    assert wait_until_ended(slurm_cluster, by_hand)["JobState"] == "COMPLETED", "it runs with sbatch alone"


def test_a_job_inherits_only_what_is_known_to_be_no_secret(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """`submit` names the other variables, but not their values. `environment:` passes them on."""
    seen, fails = tmp_path / "environment", program(tmp_path / "fails", "exit 2")
    secrets = dict.fromkeys(("SSHPASS", "DBPASS", "ADMIN_PW", "MY_CREDS", "JWT", "SENTRY_DSN", "ENTROPY"), "of-mine")
    secrets |= {"SLACK_WEBHOOK_URL": "https://h/of-mine", "WANDB_BASE_URL": "https://h/?X-Amz-Signature=of-mine"}
    plain = {"NCCL_DEBUG": "INFO", "LC_ALL": "C.UTF-8", "MODULEPATH": "/m:/n", "BASH_FUNC_module%%": "() { :; }"}
    lines = (f"command: ['{fails}']", f"setup: [env >{seen}]", "environment: [MY_DATA, WORK_*]")
    words = ("pretrain", "digits_smoke", settings_in(tmp_path, *lines), "--data.url=d", f"--run-dir={tmp_path}/run")
    more = {"MY_DATA": "there", "WORK_A": "there", "HERE": str(tmp_path)}
    done = submit(slurm_cluster, *words, "--shared", **secrets, **plain, **more)
    assert (done.returncode, "of-mine" in done.stderr) == (0, False), done.stderr
    assert len(kept_from_jobs(done.stderr)) == 3, "the line stays short"
    assert re.search(r" and \d+ more \(--dry-run --full names all\);", done.stderr), done.stderr
    full = submit(slurm_cluster, *words, "--shared", "--dry-run", "--full", **secrets, **plain, **more)
    assert set(secrets) <= kept_from_jobs(full.stderr), full.stderr
    assert not (set(plain) | set(more)) & kept_from_jobs(full.stderr)
    job = json.loads((tmp_path / "run" / "submit" / "submitted.jsonl").read_text())["job"]
    wait_until_ended(slurm_cluster, job)
    inherited = set(seen.read_text().splitlines())
    assert not [line for line in inherited if "of-mine" in line]
    expected = {"NCCL_DEBUG=INFO", "LC_ALL=C.UTF-8", "MODULEPATH=/m:/n", "BASH_FUNC_module%%=() {  :"}
    assert expected | {f"{name}={value}" for name, value in more.items()} <= inherited
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in (tmp_path / "run").rglob("*")}
    private = {name: mode for name, mode in modes.items() if mode[4:6] != "rw"}
    assert (private, modes[f"exits-{job}-0-0"], "tries.jsonl" in modes) == ({}, "drwxrwsr-x", True), "--shared"


@pytest.mark.parametrize(
    ("lines", "words", "message"),
    [
        (["partition: gpuu"], [], "`sinfo -s` lists the partitions"),
        ([], ["--nodes=4"], "lower --nodes"),
        ([], ["--nodes=3"], "--global-batch is 128, not divisible by 3 ranks; start 1 or 2 or 4 ranks"),
        ([], ["--nodes=0"], "--nodes is '0'; allowed: 1 to"),
        ([], ["--spares=-1"], "--spares is '-1'; allowed: 0 to"),
        ([], ["--nodes=2", "--spares=1"], "lower --nodes"),
        ([], ["--time=soon"], "--time is 'soon'; allowed: MINUTES"),
        ([], ["--global-batsh=8"], "--global-batch"),
    ],
)
def test_what_slurm_or_the_stage_would_refuse_is_not_submitted(
    slurm_cluster: SlurmCluster, tmp_path: Path, lines: list[str], words: list[str], message: str
) -> None:
    path = settings_in(tmp_path)
    if lines:
        (tmp_path / "cluster.yaml").write_text("\n".join([*lines, ""]))
    ended = submit(slurm_cluster, "pretrain", "digits_smoke", path, "--data.url=d", f"--run-dir={tmp_path}/run", *words)
    assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr
    assert not (tmp_path / "run" / "submit" / "submitted.jsonl").exists()


@pytest.mark.parametrize("words", [["--time=1:00:00"], ["--nodes=2"], ["--steps=3"], ["extra"]])
def test_a_chain_takes_no_flags_of_runs(slurm_cluster: SlurmCluster, tmp_path: Path, words: list[str]) -> None:
    refused = submit(slurm_cluster, "chain.yaml", settings_in(tmp_path), *words)
    expected = f"a chain takes no {words[0].partition('=')[0]}"
    assert (refused.returncode, expected in refused.stderr) == (2, True), refused.stderr


def test_a_dry_run_shows_the_script_and_slurms_answer(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    words = ("evaluate", "w", settings_in(tmp_path), "--data.url=d", "--dry-run", "--full")
    ended = submit(slurm_cluster, *words)
    assert ended.returncode == 0, ended.stderr
    assert "to start at" in ended.stderr
    script = program(tmp_path / "script", "")
    script.write_text(ended.stdout)
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    assert not (slurm_cluster.folder / "patchline-evaluate").exists()
    other = submit(slurm_cluster, *words, "--data.batch-size=8").stdout
    comments = [next(line for line in text.splitlines() if "--comment=" in line) for text in (ended.stdout, other)]
    assert comments[0] != comments[1], "another evaluation is another job"
    own = tmp_path / "own.yaml"
    own.write_text(f"recipe: digits_smoke\nrun_dir: {tmp_path}/run\ndata: {{url: d}}\n")
    from_file = submit(slurm_cluster, "pretrain", str(own), words[2], "--extend", "--dry-run", "--full")
    assert f"\nset -- pretrain {own} --extend --run-dir {tmp_path}/run\n" in from_file.stdout, from_file.stderr
    spared = submit(slurm_cluster, "pretrain", str(own), words[2], "--spares=1", "--dry-run", "--full").stdout
    assert {"#SBATCH --nodes=2", "#SBATCH --no-kill", "export PATCHLINE_SPARES=1"} <= set(spared.splitlines())
    nowhere = submit(slurm_cluster, *words[:-2], PATH=str(PATCHLINE.parent))
    assert (nowhere.returncode, "no sbatch on the PATH" in nowhere.stderr) == (2, True), nowhere.stderr


@pytest.mark.long
def test_a_run_has_one_job_however_it_is_named(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The run is named through a link, with `..`, and by a chain, whose gate then waits for the run's own job."""
    held = settings_in(tmp_path, f"command: [{PATCHLINE}]", "options: [--hold]")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    words = ("pretrain", "digits_smoke", held, "--data.url=d")
    first = submit(slurm_cluster, *words, f"--run-dir={tmp_path}/runs/one")
    assert first.returncode == 0, first.stderr
    job = json.loads((tmp_path / "runs" / "one" / "submit" / "submitted.jsonl").read_text())["job"]
    for path in ("link/one", "runs/two/../one", "runs/one/"):
        again = submit(slurm_cluster, *words, f"--run-dir={tmp_path}/{path}")
        assert (again.returncode, f"has a job already: {job} PENDING" in again.stderr) == (0, True), again.stderr
    chain = tmp_path / "chain.yaml"
    step = (
        f"{{name: train, stage: pretrain, recipe: digits_smoke, flags: [--data.url=d, --run-dir={tmp_path}/link/one]}}"
    )
    chain.write_text(f"folder: {tmp_path}/chain\nsteps:\n- {step}\n")
    assert submit(slurm_cluster, str(chain), held).returncode == 0
    (gate,) = read_record_of(tmp_path / "chain" / "chain").jobs
    assert (gate.kind, slurm_cluster.job(gate.job)["Dependency"]) == ("gate", f"afterany:{job}(unfulfilled)")
    for folder, number in (("link/one", job), ("chain", gate.job)):
        assert f"cancelled {number}, which was PENDING" in cancel(slurm_cluster, tmp_path / folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_a_folder_with_two_names_has_one_job(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The folder is mounted twice, and neither path leads to the other. A copy of the folder is another run."""
    held = settings_in(tmp_path, f"command: [{PATCHLINE}]", "options: [--hold]")
    chain, one, two = tmp_path / "chain.yaml", tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()

    def by_one(*words: str) -> str:
        ended = patchline(*words, environ=slurm_cluster.job_environment())
        assert ended.code == 0, ended.errors
        return ended.errors

    def by_two(*words: str) -> "subprocess.CompletedProcess[str]":
        mounted = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1"; shift; exec "$@"', str(one), str(two)]
        return subprocess.run(
            [*mounted, str(PATCHLINE), *words],
            env=slurm_cluster.job_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    run = ("pretrain", "digits_smoke", held, "--data.url=d")
    by_one("submit", *run, f"--run-dir={one}/run")
    job = json.loads((one / "run" / "submit" / "submitted.jsonl").read_text())["job"]
    again = by_two("submit", *run, f"--run-dir={two}/run")
    assert (again.returncode, f"has a job already: {job} PENDING" in again.stderr) == (0, True), again.stderr
    shutil.copytree(one / "run", one / "copy")
    by_one("submit", *run, f"--run-dir={one}/copy")
    other = json.loads((one / "copy" / "submit" / "submitted.jsonl").read_text().splitlines()[-1])["job"]
    assert other != job, "a copy is another run"
    assert f"cancelled {job}, which was PENDING" in by_two("cancel", f"{two}/run").stderr
    assert f"cancelled {other}, which was PENDING" in by_one("cancel", f"{one}/copy")

    def chain_in(folder: Path) -> str:
        step = "{name: train, stage: pretrain, recipe: digits_smoke, flags: [--data.url=d]}"
        chain.write_text(f"folder: {folder}/chain\nsteps:\n- {step}\n")
        return str(chain)

    by_one("submit", chain_in(one), held)
    jobs = [one.job for one in read_record_of(one / "chain" / "chain").jobs]
    again = by_two("submit", *run, f"--run-dir={two}/chain/train")
    assert (again.returncode, f"has a job already: {jobs[0]} PENDING" in again.stderr) == (0, True), again.stderr
    again = by_two("submit", chain_in(two), held)
    assert (again.returncode, f"has jobs ({jobs[0]} PENDING, {jobs[1]}" in again.stderr) == (2, True), again.stderr
    assert f"cancelled {jobs[0]}, which was PENDING" in by_two("cancel", f"{two}/chain").stderr


@pytest.mark.long
def test_packing_has_one_job_however_its_output_is_written(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    held, out = settings_in(tmp_path, f"command: [{PATCHLINE}]", "options: [--hold]"), tmp_path / "digits"
    assert submit(slurm_cluster, "pack", "digits", held, "--out", str(out)).returncode == 0
    environ, job = slurm_cluster.job_environment(), ""
    for words in (["submit", "pack", "digits", held, f"--out={out}/"], ["status", str(out)]):
        done = subprocess.run(
            [str(PATCHLINE), *words],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        job = job or done.stderr.partition("has a job already: ")[2].partition(" PENDING")[0]
    assert f"job {job}, pack-digits: is held by its user" in done.stdout
    assert f"its log: {slurm_cluster.folder}/patchline-pack/pack-digits-{job}.out" in done.stdout
    assert f"cancelled {job}, which was PENDING" in cancel(slurm_cluster, out)


@pytest.mark.long
def test_one_of_an_arrays_runs_can_be_cancelled(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    held = settings_in(tmp_path, f"command: [{PATCHLINE}]", "options: [--hold]")
    chain, words = tmp_path / "chain.yaml", ("pretrain", "digits_smoke", held, "--data.url=d")
    step = "{name: t, stage: pretrain, recipe: digits_smoke, flags: [--data.url=d], variants: [[--seed=1], [--seed=2]]}"
    chain.write_text(f"folder: {tmp_path}/chain\nsteps:\n- {step}\n")
    assert submit(slurm_cluster, str(chain), held).returncode == 0
    job, gate = read_record_of(tmp_path / "chain" / "chain").jobs
    run_dir = tmp_path / "chain" / "t" / "1"
    again = submit(slurm_cluster, *words, f"--run-dir={run_dir}")
    assert f"has a job already: {job.job}_1 PENDING; nothing" in again.stderr
    assert f"cancelled {job.job}_1, which was PENDING" in cancel(slurm_cluster, run_dir)
    left = slurm_cluster.command("squeue", "--noheader", "--format=%i", f"--jobs={job.job}").split()
    assert left in ([f"{job.job}_0"], [f"{job.job}_[0]"])
    said = cancel(slurm_cluster, tmp_path / "chain")
    assert f"cancelled {left[0]}, which" in said
    assert f"cancelled {gate.job}, which" in said


def cancel(cluster: SlurmCluster, folder: Path) -> str:
    words, environ = [str(PATCHLINE), "cancel", str(folder)], cluster.job_environment()
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.long
def test_a_run_can_be_submitted_again_as_soon_as_it_is_cancelled(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The job's node does not answer for a while, so the job is COMPLETING."""
    stays = program(tmp_path / "stays", f'touch "{tmp_path}/$SLURM_JOB_ID"', "sleep 60")
    cluster = settings_in(tmp_path, f"command: ['{stays}']")
    words = ("pretrain", "digits_smoke", cluster, "--data.url=d", f"--run-dir={tmp_path}/run")
    assert submit(slurm_cluster, *words).returncode == 0
    submitted = tmp_path / "run" / "submit" / "submitted.jsonl"
    first = json.loads(submitted.read_text())["job"]
    slurm_cluster.wait_for((tmp_path / str(first)).exists, deadline_seconds=60)
    said = tmp_path / "said"
    with slurm_cluster.stopped_node(slurm_cluster.job(int(first))["NodeList"]), said.open("w") as stderr:
        cancel(slurm_cluster, tmp_path / "run")
        environ, command = slurm_cluster.job_environment(), [str(PATCHLINE), "submit", *words]
        again = subprocess.Popen(command, env=environ, stderr=stderr, cwd=slurm_cluster.folder)
        waits = f"job {first} is ending: waiting for it"
        slurm_cluster.wait_for(lambda: waits in said.read_text() or again.poll() is not None, deadline_seconds=60)
    assert (again.wait(120), waits in said.read_text()) == (0, True), said.read_text()
    second = json.loads(submitted.read_text().splitlines()[1])["job"]
    assert not (tmp_path / "run" / "submit" / "cancelled").exists()
    assert f"cancelled {second}, which was" in cancel(slurm_cluster, tmp_path / "run")


def test_limits_that_slurm_would_accept_and_never_start_are_refused(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """On this cluster, EnforcePartLimits is NO, its default."""
    slurm_cluster.scontrol("create", "PartitionName=short", "Nodes=ALL", "MaxTime=10", "MaxNodes=1", "State=UP")
    try:
        words = ("pretrain", "digits_smoke", "--data.url=d", f"--run-dir={tmp_path}/run")
        short = settings_in(tmp_path).replace("cluster.yaml", "short.yaml")
        (tmp_path / "short.yaml").write_text(f"partition: short\ncommand: [{PATCHLINE}]\n")
        for flag, message in (
            ("--time=20", "partition short allows 10 min 0 s: the job would wait for ever; lower --time"),
            ("--nodes=2", "partition short allows 1: the job would wait for ever; lower --nodes"),
        ):
            refused = submit(slurm_cluster, *words, short, flag)
            assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
        assert submit(slurm_cluster, *words, short, "--time=20", "--no-check", "--dry-run").returncode == 0
        chain = tmp_path / "chain.yaml"
        step = "{name: train, stage: pretrain, recipe: digits_smoke, flags: [--data.url=d], time: '20'}"
        chain.write_text(f"folder: {tmp_path}/chain\nsteps:\n- {step}\n")
        refused = submit(slurm_cluster, str(chain), short)
        assert (refused.returncode, "step train: the time limit is" in refused.stderr) == (2, True), refused.stderr
        assert ("lower `time:` of the step" in refused.stderr, "--time" in refused.stderr) == (True, False)
        chain.write_text(chain.read_text().replace("20", "5"))
        shown = submit(slurm_cluster, str(chain), short, "--dry-run", "--full")
        assert "#SBATCH --time=10\n" in shown.stdout, "the gate fits, too"
    finally:
        slurm_cluster.scontrol("delete", "PartitionName=short")
