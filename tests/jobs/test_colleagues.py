"""Runs of another user: what a colleague may see, and what a group may do with a run that it shares."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.jobs.cluster.test_slurm import programs
from tests.jobs.reports.test_ls import make
from tests.rigs.processes import Ended, patchline, patchline_of_a_colleague

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
OTHER = 65534
NOBODY = 0xFFFFFFFF  # the number in entries of an ACL that name nobody
ALONE = {"PATH": "/nowhere"}
COMMANDS = ("status", "watch", "logs", "doctor", "report", "show", "save", "stop", "cancel")
MakeRun = Callable[..., Path]
MAKES = """
import sys
from pathlib import Path
from jobs.output import make_folder
for name in ("run", "shared/run"):
    make_folder(Path(sys.argv[1], name))
"""


@pytest.fixture
def run_of_another(tmp_path: Path) -> MakeRun:
    """Makes a finished run with a log, which belongs to another user; `closed`: a part of it that nobody else may
    read."""

    def made(name: str, closed: str | None = None) -> Path:
        run_dir = make(tmp_path / name, step=5)
        submit = run_dir / "submit"
        submit.mkdir()
        (run_dir / "DONE").write_text(json.dumps({"step": 5}))
        (submit / "x-1.out").write_text("0: hello\n")
        (submit / "submitted.jsonl").write_text('{"job": 1}\n')
        subprocess.run(["chmod", "-R", "u=rwX,go=rX", str(run_dir)], check=True, timeout=60)
        if closed is not None:
            (run_dir / closed).chmod(0)
        subprocess.run(["chown", "-R", f"{OTHER}:{OTHER}", str(run_dir)], check=True, timeout=60)
        return run_dir

    return made


def refused(ended: Ended) -> list[str]:
    """What is wrong with how a command was refused."""
    wrong = [f"code {ended.code}"] if ended.code != 2 else []
    if "Permission denied" not in ended.errors or "run the same command" in ended.errors or "[Errno" in ended.errors:
        wrong.append(ended.errors)
    return wrong + (["a traceback"] if "Traceback" in ended.errors else [])


def test_a_run_that_may_not_be_read_ends_each_command_with_words(run_of_another: MakeRun) -> None:
    run_dir = run_of_another("closed", ".")
    ended = {command: patchline_of_a_colleague(command, str(run_dir), environ=ALONE) for command in COMMANDS}
    assert {command: wrong for command, one in ended.items() if (wrong := refused(one))} == {}


def test_a_run_that_may_only_be_read(run_of_another: MakeRun) -> None:
    run_dir = run_of_another("open")
    for command, shown in {
        "status": "open",
        "watch": "step 5",
        "logs": "hello",
        "doctor": "open",
        "show": "job",
    }.items():
        ended = patchline_of_a_colleague(command, str(run_dir), environ=ALONE)
        assert (ended.code, shown in ended.output) == (0, True), (command, ended)
    (run_dir / "DONE").unlink()
    for command in ("report", "stop", "cancel"):
        assert refused(patchline_of_a_colleague(command, str(run_dir), environ=ALONE)) == [], command


def test_a_refusal_says_who_lacks_which_right(run_of_another: MakeRun) -> None:
    """A default ACL of the folder, whose mask takes the right to write from the colleague."""
    run_dir = run_of_another("masked")
    acl = np.array([2], "<u4").tobytes() + b"".join(
        np.array([tag, rights], "<u2").tobytes() + np.array([number], "<u4").tobytes()
        for tag, rights, number in (
            (1, 7, NOBODY),
            (2, 7, os.getuid()),
            (4, 5, NOBODY),
            (16, 5, NOBODY),
            (32, 5, NOBODY),
        )
    )
    try:
        os.setxattr(run_dir, "system.posix_acl_access", acl)
    except OSError as error:
        pytest.skip(f"needs a file system with ACLs: {error}")
    ended = patchline_of_a_colleague("report", str(run_dir), environ=ALONE)
    assert refused(ended) == []
    said = " ".join(ended.errors.split())
    assert f"(user root may not write to {run_dir}: drwxr-xr-x+ nobody:nogroup)" in said


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_a_file_server_that_refuses_the_setgid_bit(tmp_path: Path) -> None:
    """NFSv4 with ACLs answers chmod with EPERM. The run's folder is made, with a warning unless its parent has the
    bit."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2775)
    fault = ["-e", "trace=chmod,fchmodat", "-e", "inject=chmod,fchmodat:error=EPERM"]
    words = ["strace", "-f", "-qqq", "-o", os.devnull, *fault, sys.executable, "-c", MAKES, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120, umask=0o002)
    assert done.returncode == 0, done.stderr
    assert [line.startswith(f"{tmp_path}/run cannot be kept") for line in done.stderr.splitlines()] == [True]
    assert stat.S_IMODE((tmp_path / "shared" / "run").stat().st_mode) == 0o2775


def test_one_run_that_may_not_be_read_does_not_hide_the_others(run_of_another: MakeRun, tmp_path: Path) -> None:
    others = [str(run_of_another(name, closed)) for name, closed in (("shut", "."), ("half", "submit"), ("open", None))]
    ended = patchline_of_a_colleague("status", *others, environ=ALONE)
    assert ended.code == 2, ended
    assert [name in ended.output for name in ("shut", "half", "open")] == [False, True, True], ended.output
    said = " ".join(ended.errors.split())
    assert f"{others[0]} cannot be read: Permission denied at {others[0]}" in said
    assert f"{others[1]} cannot be read: Permission denied at {others[1]}/submit" in said
    as_json = patchline_of_a_colleague("status", "--json", *others, environ=ALONE)
    assert (as_json.code, len(as_json.output.splitlines())) == (2, 2)
    assert refused(patchline_of_a_colleague("logs", others[1], environ=ALONE)) == []
    assert "Permission denied" in patchline_of_a_colleague("doctor", others[1], environ=ALONE).errors
    assert patchline_of_a_colleague("ls", str(tmp_path), environ=ALONE).code == 0


def test_scores_that_may_not_be_read_are_left_out(run_of_another: MakeRun, tmp_path: Path) -> None:
    run_dir = run_of_another("private")
    (run_dir / "scores").mkdir(mode=0)
    ended = patchline_of_a_colleague("ls", str(tmp_path), environ=ALONE)
    assert (ended.code, "private" in ended.output) == (0, True), ended
    ended = patchline_of_a_colleague("report", str(run_dir), "--out", str(tmp_path / "x.html"), environ=ALONE)
    assert ended.code == 0, ended
    assert "scores cannot be read: Permission denied" in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    ("umask", "flags", "folder", "file", "script"),
    [
        (0o022, [], 0o755, 0o644, 0o600),
        (0o077, [], 0o700, 0o600, 0o600),
        (0o027, [], 0o750, 0o640, 0o600),
        (0o022, ["--shared"], 0o2775, 0o664, 0o660),
        (0o077, ["--shared"], 0o2770, 0o660, 0o660),
    ],
)
def test_one_rule_for_what_a_run_leaves(
    tmp_path: Path, umask: int, flags: list[str], folder: int, file: int, script: int
) -> None:
    """Its folders alike, whoever makes them."""
    run_dir = tmp_path / "run"
    before = os.umask(umask)
    try:
        environ = submitting(tmp_path)
        assert submit(environ, tmp_path, *flags, by=partial(patchline, umask=umask)).code == 0
        make(run_dir)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (run_dir, *run_dir.rglob("*"))}
    expected = {"run": folder, "submit": folder, "submitted.jsonl": file, "pretrain-digits_smoke.sbatch": script}
    assert expected.items() <= modes.items(), {name: oct(mode) for name, mode in modes.items()}


def submitting(folder: Path) -> dict[str, str]:
    (folder / "cluster.yaml").write_text("partition: main\ncommand: [patchline]\n")
    answers = {"sbatch": "echo 12", "squeue": "exit 0", "scontrol": "exit 0", "sinfo": "exit 0", "scancel": "exit 0"}
    return programs(folder, **answers)


def submit(environ: dict[str, str], folder: Path, *flags: str, by: Callable[..., Ended] = patchline) -> Ended:
    words = ("pretrain", "digits_smoke", "--data.url=d", f"--run-dir={folder}/run", f"--cluster={folder}/cluster.yaml")
    return by("submit", *words, "--no-check", *flags, environ=environ)


def test_a_shared_run_is_stopped_and_continued_by_a_colleague(tmp_path: Path) -> None:
    """Who is of the group, and whose umask is another."""
    environ, run_dir = submitting(tmp_path), tmp_path / "run"
    assert submit(environ, tmp_path, "--shared").code == 0
    before = os.umask(0o002)
    make(run_dir, step=5)
    os.umask(before)
    subprocess.run(["chown", "-R", f"{OTHER}:{os.getgid()}", str(run_dir)], check=True, timeout=60)
    subprocess.run(["chmod", "g+s", str(run_dir), str(run_dir / "submit")], check=True, timeout=60)  # chown takes it
    stopped = patchline_of_a_colleague("stop", str(run_dir), environ=environ)
    assert stopped.code == 0, stopped
    assert stat.S_IMODE((run_dir / "STOP").stat().st_mode) == 0o664
    (run_dir / "STOP").unlink()
    again = submit(environ, tmp_path, by=patchline_of_a_colleague)
    assert again.code == 0, again
    assert len((run_dir / "submit" / "submitted.jsonl").read_text().splitlines()) == 2
    cancelled = patchline_of_a_colleague("cancel", str(run_dir), environ=environ)
    assert cancelled.code == 0, cancelled


def test_a_folder_that_is_not_shared_is_not_made_so_by_the_way(tmp_path: Path) -> None:
    environ = submitting(tmp_path)
    assert submit(environ, tmp_path).code == 0
    ended = submit(environ, tmp_path, "--shared")
    assert (ended.code, "is not shared; to share it, do: chmod -R g+rwX" in ended.errors) == (2, True), ended.errors
