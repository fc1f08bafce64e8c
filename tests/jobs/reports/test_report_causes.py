"""The cause and the cost of every restart, of one real run that ended in every way in which a run can; and what
`patchline doctor RUN` says just after such an end."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.ranks import Ranks
from jobs.reports.facts import ReportFacts, gather
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.processes import patchline
from tests.rigs.small_disk import small_disk
from tests.rigs.training import DIVERGES, FinishedRuns, pretrain_words, start

pytestmark = pytest.mark.slow
STEPS = 4000
FP32 = ("--engine.precision", "fp32")
HANG = ("--hang.step-seconds", "4", "--hang.other-seconds", "60")


@dataclass(kw_only=True)
class Interrupted:
    """A run that is started, interrupted and started again. `began`: since the first start was put on record."""

    words: list[str]
    run_dir: Path
    folder: Path
    began: float = 0.0
    codes: list[int] = field(default_factory=list)

    def until(
        self, end: Callable[[Ranks], None], *, num_ranks: int = 1, also: Callable[[Path], bool] = Path.exists
    ) -> None:
        """Starts it, waits for some steps and for another moment, and ends it."""
        last = gather(self.run_dir).run.step or 0 if (self.run_dir / "job.yaml").exists() else 0
        ranks = start(self.words, num_ranks=num_ranks, log_dir=self.folder)
        try:
            assert wait_until(ranks, lambda run_dir: (run_dir / "starts.jsonl").exists(), self.run_dir)
            self.began = self.began or time.time()
            assert wait_until(ranks, step_at_least(last + 4), self.run_dir)
            assert wait_until(ranks, also, self.run_dir)
            end(ranks)
            self.codes.append(ranks.wait())
        finally:
            ranks.kill()

    def facts(self) -> ReportFacts:
        return gather(self.run_dir)


def by_signal(number: signal.Signals) -> Callable[[Ranks], None]:
    return lambda ranks: ranks.processes[0].send_signal(number)


def diagnosis(run_dir: Path) -> str:
    """The most likely cause of the last end, as the doctor says it."""
    ended = patchline("doctor", str(run_dir), "--json")
    assert ended.code == 1, ended.errors
    return str(json.loads(ended.output)["causes"][0]["words"])


def assert_sums(found: ReportFacts, *, since: float) -> None:
    """The bar is the wall time: from the first record, which comes a moment after the start, to the end."""
    assert sum(found.time.parts.values()) == pytest.approx(found.time.wall_seconds, abs=1e-6)
    assert found.run.last_seen is not None
    assert found.time.wall_seconds == pytest.approx(found.run.last_seen - since, abs=2.0)
    assert all(one.seconds >= 0 for one in found.time.restarts)


@pytest.mark.long
def test_every_orderly_end_and_every_disorderly_one(digits_url: str, tmp_path: Path) -> None:
    data, run_dir = tmp_path / "data", tmp_path / "run"
    shutil.copytree(digits_url, data)
    words = pretrain_words(str(data), run_dir, "--steps", str(STEPS), "--checkpoint.every-steps", "3", *FP32, *HANG)
    run_ = Interrupted(words=words, run_dir=run_dir, folder=tmp_path)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        run_.until(by_signal(number))
    run_.until(lambda _: (run_dir / "STOP").touch())
    (run_dir / "STOP").unlink()
    run_.until(by_signal(signal.SIGKILL))
    run_.until(lambda _: shutil.rmtree(data / "shards"))
    assert str(data) in diagnosis(run_dir)
    shutil.copytree(Path(digits_url) / "shards", data / "shards")
    run_.words += ["--checkpoint.every-steps", "1000"]  # it hangs in a step, not in a save, whose limit is longer
    run_.until(lambda ranks: ranks.processes[1].send_signal(signal.SIGSTOP), num_ranks=2)
    assert diagnosis(run_dir).startswith("it hung; rank 1 on "), diagnosis(run_dir)
    run_.until(by_signal(signal.SIGTERM))
    stopped, killed = exit_codes.CONTINUE, -signal.SIGKILL
    assert run_.codes[:5] == [stopped] * 4 + [killed], run_.codes
    found = run_.facts()
    causes = [one.cause.words for one in found.time.restarts]
    expected = ("stopped by SIGTERM", "stopped by SIGUSR1", "stopped by SIGINT", "stopped by the file STOP")
    for cause, beginning in zip(causes, (*expected, "killed or", "ended by an error", "hung in step"), strict=True):
        assert cause.startswith(beginning), causes
    assert all(one.step and one.startup_seconds for one in found.time.restarts), found.time.restarts
    assert all(one.lost_steps == 0 for one in found.time.restarts[:4]), found.time.restarts
    assert str(data) in causes[5], "the error names what is missing"
    assert_sums(found, since=run_.began)
    assert found.run.state == "stopped"


def test_a_full_disk_is_named_even_though_nothing_can_be_written(digits_url: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", num_bytes=16 << 20) as disk:
        run_dir, filler = disk / "run", disk / "filler"
        words = pretrain_words(digits_url, run_dir, "--steps", str(STEPS), *FP32, "--checkpoint.every-steps", "3")
        run_ = Interrupted(words=[*words, "--hang.step-seconds", "20"], run_dir=run_dir, folder=tmp_path)

        def fill(_: Ranks) -> None:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 12))

        def is_beating(run_dir: Path) -> bool:
            return (run_dir / "heartbeats" / "rank-00000.json").exists()

        run_.until(fill, also=is_beating)
        assert "o space left" in diagnosis(run_dir)
        filler.unlink()
        run_.until(by_signal(signal.SIGTERM))
        found = run_.facts()
        (restart,) = found.time.restarts
        assert restart.cause.words.startswith("ended by an error in step"), restart
        assert "o space left" in restart.cause.words
        assert_sums(found, since=run_.began)


def test_what_the_guard_skipped_and_the_limit_that_ended_the_run(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    shutil.copytree(finished_runs.diverged(), tmp_path / "run")
    words = pretrain_words(finished_runs.url, tmp_path / "run", *DIVERGES)
    assert patchline(*words).code == exit_codes.WILL_NOT_SUCCEED
    assert diagnosis(tmp_path / "run").startswith("the guard found a loss that is not finite at step 5, the last of 6")
    ended = patchline("report", str(tmp_path / "run"))
    assert ended.code == 0
    assert "guard: step 3: non finite, no update" in ended.output, ended.output
    found = gather(tmp_path / "run")
    assert {str(one["action"]) for one in found.findings} == {"no update"}
    (restart,) = found.time.restarts
    assert restart.cause.words.startswith("ended by an error in step"), restart
    assert restart.cause.words.partition(": ")[2], "in words"
