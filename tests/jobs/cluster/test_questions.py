"""What slurm/stage.sbatch asks: the facts it sends, what is read from the run's folder, and the lines of the answer."""

import io
import os
import socket
from pathlib import Path

import pytest

from jobs.cluster.judge import ports_of
from jobs.cluster.questions import answer, store_address
from pipeline.training.reporting.ledger import Ledger
from shards.errors import UserError

TRY = ("run-dir ", "has-marker ", "nodes n1 n2", "ranks 2", "ranks-per-node 1", "full ", "asked ", "try 0", "retries 2")


class Asked:
    """A run's folder, and the questions of its batch script."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.run_dir, self.state, self.exits = folder, folder / "submit", folder / "submit" / "exits-7-0-0"
        self.monkeypatch, self.capsys = monkeypatch, capsys
        self.exits.mkdir(parents=True)
        (self.exits / "started").touch()

    def said(self, *words: str, facts: tuple[str, ...] = (), **environ: str) -> dict[str, str]:
        """Returns the answer. Its last line must be `over`."""
        lines = (f"state {self.state}", f"exits {self.exits}", *facts)
        self.monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert answer(words, environ=environ) == 0
        *found, last = self.capsys.readouterr().out.splitlines()
        assert last == "over"
        return dict(line.split(" ", 1) for line in found)

    def rank(self, number: int, text: str, seconds: int) -> None:
        path = self.exits / f"rank-{number}"
        path.write_text(text)
        os.utime(path, (seconds, seconds))


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(tmp_path, monkeypatch, capsys)


def test_a_try_is_judged_by_what_its_ranks_left(asked: Asked) -> None:
    asked.rank(0, "137\n", 2000)
    asked.rank(1, "137\n", 1000)
    (asked.state / "idle").write_text("1\n")
    found = asked.said("try", facts=TRY)
    assert (found["then"], found["end"], found["crashed-on"], found["idle"]) == ("again", "crashed", "n2", "2")


@pytest.mark.parametrize(
    ("text", "memory", "idle"),
    [
        pytest.param("1", "", "2", id="the count of the jobs before"),
        pytest.param("a[$(touch x)]", "", "1", id="no number counts as none"),
        pytest.param("12", "", "1", id="nor does one that this script never writes"),
        pytest.param("0", "1", "2", id="a disk that did not take it: only the job knows"),
    ],
)
def test_the_count_of_idle_tries(asked: Asked, text: str, memory: str, idle: str) -> None:
    (asked.state / "idle").write_text(text)
    assert asked.said("try", facts=(*TRY, f"idle {memory}"))["idle"] == idle


@pytest.mark.parametrize(
    "name", ["checkpoints/step-1/attempt-0/MANIFEST.json", "ledger.jsonl", "quarantine/shards.jsonl"]
)
def test_a_try_that_saved_is_not_idle(asked: Asked, name: str) -> None:
    path = asked.run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    facts = (*TRY, f"run-dir {asked.run_dir}")
    started = (asked.exits / "started").stat().st_mtime
    os.utime(path, (started - 9, started - 9))
    assert asked.said("try", facts=facts)["idle"] == "1"
    os.utime(path, (started + 9, started + 9))
    assert asked.said("try", facts=facts)["idle"] == "0"


def test_a_folder_that_is_not_seen_from_here_is_no_try_without_codes(asked: Asked) -> None:
    """A container may not have the folder. Then the script must decide."""
    with pytest.raises(FileNotFoundError):
        asked.said("try", facts=(*TRY, "exits /nowhere"))


def test_codes_that_are_none_are_passed_over(asked: Asked) -> None:
    asked.rank(0, "garbage", 1000)
    asked.rank(1, "", 2000)
    asked.said("try", facts=TRY)
    (asked.state / "idle").write_text("1")
    assert asked.said("try", facts=TRY)["pause-seconds"], "no room for the code of rank 1"


def test_pipes_in_place_of_files_hold_up_no_answer(asked: Asked, tmp_path: Path) -> None:
    for path in (asked.exits / "rank-1", asked.state / "idle", asked.state / "crashes", tmp_path / "config"):
        os.mkfifo(path)
    asked.rank(0, "137\n", 2000)
    found = asked.said("try", facts=TRY)
    assert (found["end"], found["crashed-on"], found["idle"]) == ("crashed", "n1", "1")
    assert asked.said("nodes", facts=(*CHECK, "checks 0"))["nodes"] == "n1 n2"
    assert store_address(("evaluate", "r", "s3://b"), {"AWS_CONFIG_FILE": str(tmp_path / "config")})


CHECK = (
    *(
        "job 7",
        "restart 0",
        "try 0",
        "run-dir ",
        "nodes n1 n2 n3 n4",
        "needed 2",
        "seconds 1",
        "s3 store:80",
        "checks 1",
    ),
    *("server-clock 1000", "address n1 127.0.0.1", "address n3 127.0.0.1"),
)
FOUND = "shared writable scratch scratch-kib=999999 shm-kib=999999"


def test_nodes_are_chosen_by_what_they_answered(asked: Asked) -> None:
    (asked.state / "crashes").write_text("7 n1\n7 n1\n8 n3\n8 n3\n")
    answers = tuple(f"checked n{number} 1000 {FOUND} s3" for number in (1, 3, 4))
    found = asked.said("nodes", facts=(*CHECK, *answers, f"checked n2 1000 {FOUND} gpus=7 gpus-asked=8"))
    assert (found["nodes"], found["left-out"], found["store"]) == ("n3 n4", "n1,n2", "answers")
    assert "then" not in found


def test_nodes_that_answered_nothing_are_used(asked: Asked) -> None:
    assert asked.said("nodes", facts=(*CHECK, ""))["say"].startswith("no node answered")
    found = asked.said("nodes", facts=(*CHECK, "checks 0"))
    assert (found["nodes"], found["left-out"], found["store"], "say" in found) == ("n1 n2", "", "", False)


def test_a_port_that_is_taken_is_passed_over(asked: Asked) -> None:
    first, second = ports_of(job=7, start=0, number=0)[:2]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert asked.said("nodes", facts=CHECK)["port"] == str(second)


def test_only_the_address_of_the_first_node_of_the_ranks_is_asked(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[str] = []

    def refuses(address: tuple[str, int], **_: float) -> None:
        asked_for.append(address[0])
        raise OSError

    monkeypatch.setattr("socket.create_connection", refuses)
    asked.said("nodes", facts=(*CHECK, "address n1 10.0.0.1"))
    assert asked_for == ["127.0.0.1", "10.0.0.1"]


def test_nodes_to_avoid(asked: Asked) -> None:
    facts = ("left-out n2", "queue gpu|(null)||(null)|n9", "own n1", "own n2", "excluded n9")
    others = tuple(f"slurm n{number} idle (null) 1/1/(null)" for number in (1, 2, 3))
    assert asked.said("avoid", facts=(*facts, *others)) == {"avoid": "n2,n9"}


START = ("limit 1:00:00", "nodes 2", "restart 0", "submitted 1000", "retries ", "margin ", "spares ", "launcher ")


def test_a_job_starts_with_its_numbers(asked: Asked) -> None:
    words = ("start", "pretrain", "r", "--run-dir", "other", f"--run-dir={asked.run_dir}")
    assert asked.said(*words, facts=START) == {
        "run-dir": str(asked.run_dir),
        "has-marker": "yes",
        "retries": "2",
        "spares": "0",
        "launcher": "srun",
        "state": str(asked.state),
        "s3": "",
    }
    Ledger(asked.run_dir).append(asked.run_dir, step=1, attempt="0001-0123abcd", commit_seconds=60.0)
    said = asked.said(*words, facts=START)["say"]
    assert "takes 60 s (the median of the last 5); at its time limit the run has 120 s" in said
    assert "raise margin_seconds to 121 or more" in said
    assert "say" not in asked.said(*words, facts=(*START, "margin 121"))
    for seconds in (5.0, 5.0, 400.0):  # the disk was away once
        Ledger(asked.run_dir).append(asked.run_dir, step=2, attempt="0001-0123abcd", commit_seconds=seconds)
    assert "say" not in asked.said(*words, facts=START)
    found = asked.said("start", "evaluate", "r", facts=(*START, "spares 1", "retries 0", "launcher torchrun"))
    assert (found["run-dir"], found["has-marker"], found["state"]) == ("", "", str(asked.state))
    assert (found["spares"], found["retries"], found["launcher"]) == ("1", "0", "torchrun")


def test_variables_that_replace_the_scripts_options_are_named(asked: Asked) -> None:
    assert "say" not in asked.said("start", "evaluate", "r", facts=START, SBATCH_ACCOUNT="vision")
    found = asked.said("start", "evaluate", "r", facts=START, SBATCH_TIMELIMIT="1", SBATCH_OPEN_MODE="truncate")
    assert found["say"].startswith("SBATCH_OPEN_MODE and SBATCH_TIMELIMIT may have replaced options of this script")


@pytest.mark.parametrize(
    ("words", "fact", "message"),
    [
        (["pretrain"], "", "usage: sbatch"),
        (["pretrain", "--run-dir=x"], "", "usage: sbatch"),
        (["pretrain", "r"], "", "--run-dir is ''"),
        (["pretrain", "r", "--run-dir=s3://bucket/run"], "", "a folder that all nodes share"),
        (["evaluate", "r", "--run-dir=a\nb"], "", "--run-dir is 'a\\nb'"),
        (["evaluate", "r"], "limit 2:00", "the time limit is 120 s"),
        (["evaluate", "r"], "retries a[$(id)]", "PATCHLINE_RETRIES is 'a[$(id)]'; allowed: 0 to 100"),
        (["evaluate", "r"], "retries 101", "PATCHLINE_RETRIES is '101'"),
        (["evaluate", "r"], "spares 2", "PATCHLINE_SPARES is '2'; allowed: 0 to 1"),
        (["evaluate", "r"], "launcher mpirun", "PATCHLINE_LAUNCHER is 'mpirun'; allowed: srun, torchrun"),
    ],
)
def test_what_cannot_work_is_refused(asked: Asked, words: list[str], fact: str, message: str) -> None:
    found = asked.said("start", *words, facts=(*START, fact))
    assert message in found["say"]
    assert (found["then"], found["code"]) == ("exit", "2")


@pytest.mark.parametrize(
    ("restart", "submitted", "ends"),
    [
        pytest.param("0", "1000", True, id="the next job of a chain"),
        pytest.param("0", "", True, id="Slurm is silent, and the next job of a chain is on record"),
        pytest.param(
            "0", "", False, id="Slurm is silent, and nobody knows when it was submitted: it may be a new wish"
        ),
        pytest.param("0", "2026-11-28T10:00:00", False, id="Slurm says it in another format"),
        pytest.param("0", "3000", False, id="submitted again"),
        pytest.param("1", "1000", False, id="this job itself was requeued"),
    ],
)
def test_a_run_that_gave_up_ends_the_jobs_submitted_before(
    asked: Asked, restart: str, submitted: str, ends: bool
) -> None:
    (asked.state / "gave-up").touch()
    if ends and not submitted:
        (asked.state / "submitted.jsonl").write_text('{"job": 7, "submitted": 1000}\n')
    os.utime(asked.state / "gave-up", (2000, 2000))
    words = ("start", "pretrain", "r", f"--run-dir={asked.run_dir}")
    found = asked.said(*words, facts=(*START, "job 7", f"restart {restart}", f"submitted {submitted}"))
    assert (found.get("code"), found.get("tries-again")) == (("78", None) if ends else (None, "yes"))


@pytest.mark.parametrize(
    ("submitted", "asks"),
    [
        pytest.param("1000", "yes", id="by a job before this one"),
        pytest.param("3000", None, id="of a run that this job extends"),
        pytest.param("", None, id="Slurm does not say when it was submitted"),
        pytest.param("2026-11-28T10:00:00", None, id="Slurm says it in another format"),
    ],
)
def test_a_done_that_is_newer_than_the_job_is_looked_at(asked: Asked, submitted: str, asks: str | None) -> None:
    (asked.run_dir / "DONE").touch()
    os.utime(asked.run_dir / "DONE", (2000, 2000))
    words = ("start", "pretrain", "r", f"--run-dir={asked.run_dir}")
    assert asked.said(*words, facts=(*START, f"submitted {submitted}")).get("may-be-done") == asks


def test_other_questions_are_refused(asked: Asked) -> None:
    with pytest.raises(UserError, match="start, nodes, try or avoid"):
        asked.said("why")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"AWS_ENDPOINT_URL": "http://store:7480/x"}, "store:7480"),
        ({"AWS_ENDPOINT_URL": "https://store"}, "store:443"),
        ({"AWS_ENDPOINT_URL": "http://[::1]:7480"}, "::1:7480"),
        ({"AWS_ENDPOINT_URL": "https://[fe80::1]"}, "fe80::1:443"),
        ({"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"}, "b:80"),
        ({"AWS_REGION": "eu-north-1"}, "s3.eu-north-1.amazonaws.com:443"),
        ({"AWS_ENDPOINT_URL": "http://store", "HTTP_PROXY": "http://proxy"}, ""),
        ({"AWS_ENDPOINT_URL": "http://store", "https_proxy": "http://proxy"}, ""),
    ],
)
def test_the_address_of_the_store(environ: dict[str, str], expected: str, tmp_path: Path) -> None:
    plain = {"AWS_CONFIG_FILE": str(tmp_path / "config")} | environ
    assert store_address(("evaluate", "r", "--data.url", "s3://bucket/x"), plain) == expected
    assert store_address(("evaluate", "r", "--data.url", "/data"), plain) == ""
    (tmp_path / "config").write_text("[profile own]\ns3 =\n  endpoint_url = http://s3:1\n")
    if "AWS_REGION" in environ:
        assert store_address(("evaluate", "r", "s3://bucket/x"), plain) == "", "a profile may have another endpoint"
