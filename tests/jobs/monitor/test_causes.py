"""The most likely cause of every end, from the lines and files that it leaves.

The lines are as srun, stage.sbatch, torch and patchline write them. Real ends are in test_run_doctor.py and
tests/slurm/.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jobs.cluster.slurm import NodeFacts, parsed
from jobs.monitor.causes import causes_of
from jobs.monitor.evidence import Evidence, evidence_of
from jobs.monitor.log_signs import OURS, PYTHON, SIGNS
from pipeline.training.reporting.ledger import ACCOUNTS
from pipeline.training.watchdog.heartbeat_files import Beat, Phase
from tests.jobs.monitor.test_evidence import NO_SLURM, write_exits, write_log
from tests.jobs.reports.test_ls import make
from tests.rigs.processes import patchline

BEGIN = "stage.sbatch: job 12, start 0, try 0: 2 ranks on n[1-2], master n1:1"


def beat(rank: int, *, step: int = 5, phase: Phase = Phase.COMPUTING, has_dumped: bool = False) -> Beat:
    return Beat(
        rank=rank,
        host=f"n{rank + 1}",
        pid=1,
        attempt="1-a",
        phase=phase.value,
        step=step,
        batch=step,
        seconds=1.0,
        limit_seconds=60.0,
        unix_time=1e9,
        has_dumped=has_dumped,
    )


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """A run that has failed: its heartbeat says that it ended in step 9, and step 5 is saved."""
    run_dir = make(tmp_path / "run", step=5)
    (run_dir / "heartbeats").mkdir()
    ended = asdict(beat(0, step=9, phase=Phase.ENDED))
    (run_dir / "heartbeats" / "rank-00000.json").write_text(json.dumps(ended))
    return run_dir


def first_of(found: Evidence) -> tuple[str, str, str]:
    one = causes_of(found)[0]
    return one.found, one.seen, one.todo


def test_what_torchrun_says_of_its_ranks_is_no_cause(failed: Path) -> None:
    write_log(failed, BEGIN, "0: torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
    assert "ChildFailedError" not in first_of(evidence_of(failed, NO_SLURM))[0]


def test_what_the_batch_script_refused(tmp_path: Path) -> None:
    write_log(tmp_path, "a line of the site", "stage.sbatch: no command patchline on n1: set PATCHLINE to yours")
    words, evidence, _ = first_of(evidence_of(tmp_path, NO_SLURM))
    assert words == "its job ended before the ranks had started: no command patchline on n1: set PATCHLINE to yours"
    assert evidence.startswith("submit/x-12.out:2: stage.sbatch: no command")


@pytest.mark.parametrize(
    ("line", "words", "todo"),
    [
        ("1: OSError: [Errno 28] No space left on device", "a disk is full", "df -h"),
        ("1: error: Disk quota exceeded at /x", "your quota is used up", "quota -s"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.", "memory, or the job's share", "--mem=0"),
        (
            "3: process 812 waits: a disk or file server does not answer (openat of /data/x)",
            "a disk or file server did not answer",
            "check the disk that the line names",
        ),
        ("0: torch.OutOfMemoryError: CUDA out of memory.", "a GPU's memory ran out", "--micro-batch"),
        ("slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT x DUE TO NODE FAILURE ***", "a node was lost", "sinfo"),
        ("slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***", "the time limit", "margin_"),
        ("0: error: --x is 1; allowed: 2", "--x is 1; allowed: 2", ""),
        ("1: [rank3]: 12:00:00 error: --x is 1; allowed: 2", "--x is 1; allowed: 2", ""),
        ("1: [rank3]: [rank3]: ValueError: no", "a rank ended with ValueError: no", "continues it"),
        ("0: ValueError: nobody knew this", "a rank ended with ValueError: nobody knew this", "continues it"),
    ],
)
def test_a_line_of_the_log(failed: Path, line: str, words: str, todo: str) -> None:
    write_log(failed, BEGIN, "0: all is well", line)
    found = first_of(evidence_of(failed, NO_SLURM))
    assert words in found[0]
    assert found[1] == f"submit/x-12.out:3: {line}"
    assert todo in found[2]


def test_a_stopped_checkpoint_writer(failed: Path) -> None:
    """Also of a run that trains on."""
    trouble, todo = "the checkpoint writer (process 7 on n2) is stopped", "`kill -CONT 7` there continues it"
    beats = ((beat(0), 0.0), (replace(beat(1), trouble=trouble, todo=todo), 0.0))
    found = evidence_of(failed, NO_SLURM)
    running = replace(found, beats=beats, facts=replace(found.facts, run=replace(found.facts.run, state="running")))
    words, _, said = first_of(running)
    assert words == "rank 1: the checkpoint writer (process 7 on n2) is stopped"
    assert said == todo


def test_a_record_that_is_damaged(failed: Path) -> None:
    (failed / "job.yaml").write_bytes(b"stage: pretrain\njob: {steps: [[[\n")
    ended = patchline("doctor", str(failed))
    assert (ended.code, ended.errors) == (1, "")
    assert "failed, its record is damaged" in ended.output
    assert "its record is damaged: it is not YAML: line 3" in ended.output


def test_checkpoints_that_are_gone(failed: Path) -> None:
    """The same command would refuse to continue, and to begin again."""
    seconds = dict.fromkeys(ACCOUNTS, 1.0)
    line = {"step": 5, "attempt": "0001-00000000", "unix_time": 1.0, "seconds": seconds}
    (failed / "ledger.jsonl").write_text(json.dumps(line) + "\n")
    words, evidence, todo = first_of(evidence_of(failed, NO_SLURM))
    assert (words, evidence) == (
        "its checkpoints are gone: the ledger names some, and the folder has none",
        "checkpoints",
    )
    assert todo == "put them back, or start it again in another --run-dir"
    assert not any("the same command" in cause.todo for cause in causes_of(evidence_of(failed, NO_SLURM)))
    manifest = failed / "checkpoints" / "step-00000005" / "attempt-0001-00000000" / "MANIFEST.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    assert first_of(evidence_of(failed, NO_SLURM))[0] != words


def test_a_killed_rank_is_the_first_to_end(failed: Path) -> None:
    """srun kills the others, which then leave the same code. Killed for its memory, the log's line comes first."""
    write_exits(failed, rank_1="137", rank_0="137")
    found = replace(evidence_of(failed, NO_SLURM), beats=((beat(0), 0.0), (beat(1), 0.0)))
    words, evidence, todo = first_of(found)
    assert words.startswith("rank 1 on n2 was killed by SIGKILL: by someone, or by the kernel")
    assert evidence.startswith("submit/exits-12-0-0/rank-1: 137")
    assert "dmesg -T | grep -i oom` on n2" in todo
    write_log(failed, BEGIN, "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.")
    assert "memory" in first_of(evidence_of(failed, NO_SLURM))[0]


def test_a_mistake_of_the_user_comes_before_its_consequences(failed: Path) -> None:
    write_log(failed, BEGIN, "1: error: no dataset in 'd'", "0: RuntimeError: Connection closed by peer")
    write_exits(failed, rank_1="2", rank_0="137")
    assert first_of(evidence_of(failed, NO_SLURM))[0] == "no dataset in 'd'"


def test_a_rank_that_hangs_and_one_that_fell_silent(failed: Path) -> None:
    found = evidence_of(failed, NO_SLURM)
    hung = (beat(0, step=6, has_dumped=True), 0.0), (beat(1, has_dumped=True), 0.0)
    stacks = ("stacks/rank-00000-attempt-1-a.txt", "stacks/rank-00001-attempt-1-a.txt")
    words, evidence, _ = first_of(replace(found, beats=hung, stacks=stacks))
    assert words.startswith("it hung; rank 1 on n2 was the furthest behind, in ")
    assert evidence == stacks[1]
    words, _, todo = first_of(replace(found, beats=((beat(0), 0.0), (beat(1), 300.0))))
    assert words.startswith("rank 1 on n2 fell silent ")
    assert "look at n2" in todo


def test_a_held_job_and_a_drained_node_come_first(failed: Path) -> None:
    job = parsed("JobId=7 JobState=PENDING Reason=launch_failed_requeued_held Restarts=1 ExitCode=0:0 NodeList=")
    assert job
    node = NodeFacts(name="n2", state="drained", reason="bad disk")
    found = replace(evidence_of(failed, NO_SLURM), jobs=(job,), nodes=(node,), has_slurm=True)
    first, second = causes_of(found)[:2]
    assert (first.found[:11], first.todo[:18]) == ("job 7 is he", "scontrol release 7")
    assert (second.found, "State=resume" in second.todo) == ("node n2 is drained: bad disk", True)


def test_what_the_folder_says(failed: Path) -> None:
    (failed / "submit").mkdir()
    (failed / "submit" / "gave-up").touch()
    (failed / "STOP").touch()
    line = {"step": 9, "kind": "spike", "action": "rewind"}
    (failed / "guard.jsonl").write_text(json.dumps(line) + "\n")
    found = [cause.found for cause in causes_of(evidence_of(failed, NO_SLURM)) if cause.status == "fault"]
    assert found[0].startswith("it was asked to stop")
    assert any(words.startswith("the guard found a spike of the loss at step 9") for words in found)
    assert any(words.startswith("it has given up") for words in found)


def test_a_dataset_that_is_gone_and_a_full_disk(failed: Path) -> None:
    found = evidence_of(failed, NO_SLURM)
    words = [cause.found for cause in causes_of(replace(found, missing=(("data.url", "/d"),), free_bytes=5 << 20))]
    assert words[0] == "--data.url is '/d', and nothing is there"
    assert any(one == "the disk of its folder has 5 MB left" for one in words)


def test_an_end_without_a_word_is_still_a_fault(failed: Path) -> None:
    (one,) = [cause for cause in causes_of(evidence_of(failed, NO_SLURM)) if cause.status == "fault"]
    assert one.found.startswith("ended in step 9; step 5 is saved")


@pytest.mark.parametrize("label", ["", "0: ", " 3: ", "1: [rank3]: ", "1: [rank3]: [rank3]: "])
def test_a_line_with_and_without_labels(label: str) -> None:
    ours = OURS.match(f"{label}12:00:00 rank 3: error: no dataset in 'd'")
    python = PYTHON.match(f"{label}torch.cuda.OutOfMemoryError: no")
    assert ours
    assert python
    assert (ours[1], python[1]) == ("no dataset in 'd'", "torch.cuda.OutOfMemoryError: no")


@pytest.mark.parametrize("line", ["0: torch.x.ChildFailedError: ", "0: an error: no", "0: all is well", "error"])
def test_what_is_no_cause(line: str) -> None:
    assert not OURS.match(line)
    assert not PYTHON.match(line)
    assert not any(pattern.search(line) for pattern, *_ in SIGNS)


def test_an_evaluation_that_failed_is_told_and_is_no_fault(failed: Path) -> None:
    line = {"step": 9, "kind": "evaluation_failed", "action": "skipped", "reason": "data/test: gone"}
    (failed / "guard.jsonl").write_text(json.dumps(line) + "\n")
    (cause,) = [cause for cause in causes_of(evidence_of(failed, NO_SLURM)) if cause.seen == "guard.jsonl: last line"]
    assert cause.found == "the guard found an evaluation that failed at step 9, the last of 1 (did: skipped)"
    assert cause.status == "ok"
