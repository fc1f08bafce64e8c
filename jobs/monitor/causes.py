"""What went wrong with a run, most likely cause first, each with its evidence and what fixes it. Pure functions.

Only the last try is explained: what an earlier one died of was fixed, or is in `patchline report`. Some lines of a
job's log tell by themselves why a run ended.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jobs import exit_codes
from jobs.cluster.queue_reasons import finding_of, findings_of_nodes
from jobs.monitor.evidence import Ended, Evidence, LogLine
from jobs.reports.facts import try_words
from pipeline.training.watchdog.heartbeat_files import Phase
from shards.output.quantities import duration

AGAIN = "the same command, or `patchline submit`, continues it"
_ELSEWHERE = "start it again in another --run-dir"
_LABEL = r"^ *(?:\d+: *)?(?:\[rank\d+\]: ?){0,2}"  # of srun; of stage.sbatch under torchrun, and of torch itself
OURS = re.compile(_LABEL + r"(?:\d\d:\d\d:\d\d )?(?:rank \d+: )?(error: .+)")
PYTHON = re.compile(
    _LABEL + r"(?!.*\bChildFailedError)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:: .*)?)$"
)


@dataclass(frozen=True, kw_only=True)
class Sign:
    """Words in a log that tell a cause by themselves."""

    pattern: re.Pattern[str]
    rank: int
    words: str
    todo: str


def _sign(pattern: str, rank: int, words: str, todo: str) -> Sign:
    return Sign(pattern=re.compile(pattern, re.IGNORECASE), rank=rank, words=words, todo=todo)


SIGNS = (
    _sign("no space left on device", 10, "a disk is full", f"make room (`df -h`, and `df -i`), then {AGAIN}"),
    _sign("disk quota exceeded", 10, "your quota is used up", f"make room (`quota -s`, `lfs quota`), then {AGAIN}"),
    _sign(
        r"oom[-_ ]?kill|out of memory handler|memory cgroup out of memory",
        12,
        "a rank was killed because its node's memory, or the job's share of it, ran out",
        f"lower the loader's workers or --micro-batch, or ask for more memory (`options: [--mem=0]`), then {AGAIN}",
    ),
    _sign(
        r"CUDA out of memory|GPU of .*ran out of memory|torch\.(cuda\.)?OutOfMemoryError",
        12,
        "a GPU's memory ran out",
        f"lower --micro-batch, then {AGAIN}",
    ),
    _sign(
        r"DUE TO NODE FAILURE|Node failure on|node_fail",
        14,
        "a node was lost",
        f"`sinfo -R` lists nodes and reasons; {AGAIN} on others",
    ),
    _sign(
        "DUE TO TIME LIMIT",
        16,
        "the time limit came before the run had saved and stopped",
        f"raise margin_seconds in your cluster's settings, so that a step and a save fit, then {AGAIN}",
    ),
    _sign("DUE TO PREEMPTION", 18, "the job was preempted", AGAIN),
)


_SCRIPT = "stage.sbatch: "
_LITTLE_BYTES = 1 << 30
_SILENT_SECONDS = 60.0
_SIGNALS = {134: "SIGABRT", 135: "SIGBUS", 137: "SIGKILL", 139: "SIGSEGV"}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """`evidence`: a file of the run's folder and its line, or a command. `rank`: the least is the most likely.
    `is_fault` False: worth knowing, and nothing is wrong."""

    rank: int
    words: str
    evidence: str
    todo: str = ""
    is_fault: bool = True


def causes_of(found: Evidence) -> list[Cause]:
    """Most likely first; each said once. None that is a fault: nothing is wrong."""
    state = found.facts.run.state
    has_ended_badly = state in ("failed", "never started", "stopped")
    causes = [*_of_folder(found), *_of_queue(found), *_of_disk(found), *_of_guard(found)]
    causes += _of_writers(found)
    if has_ended_badly:
        causes += [*_of_log(found), *_of_ranks(found), *_of_heartbeats(found), *_of_data(found)]
    if state == "failed" and not any(cause.is_fault and cause.rank < 60 for cause in causes):
        causes += _of_silence(found)
    if state == "never started":
        causes += _of_script(found)
    if state not in ("done", "running"):
        causes += _of_stop(found)
    causes += _of_notes(found)
    if found.has_lost_checkpoints and state != "done":
        words = "its checkpoints are gone: the ledger names some, and the folder has none"
        todo = f"put them back, or {_ELSEWHERE}"
        causes = [replace(cause, todo=cause.todo.replace(AGAIN, _ELSEWHERE)) for cause in causes]
        causes += [Cause(rank=1, words=words, evidence="checkpoints", todo=todo)]
    if job := found.next_job:  # nobody has to start it again
        causes = [replace(cause, todo=cause.todo.replace(AGAIN, f"job {job.job} continues it")) for cause in causes]
    first: dict[str, Cause] = {}
    for cause in sorted(causes, key=lambda one: one.rank):
        first.setdefault(cause.words, cause)
    return list(first.values())


def _of_folder(found: Evidence) -> Iterator[Cause]:
    if found.damage:
        words = f"its record is damaged: {found.damage}"
        todo = "give the command that started it once more, with all its flags: it writes the record again"
        yield Cause(rank=3, words=words, evidence="job.yaml", todo=todo)
    if found.has_stop and found.facts.run.state != "done":
        words = "it was asked to stop, and stays stopped while the file STOP is there; without it, submit again"
        yield Cause(rank=0, words=words, evidence="STOP", todo=f"rm {shlex.quote(str(found.run_dir / 'STOP'))}")
    if found.has_given_up:
        words = "it has given up: tries in a row saved nothing new; the causes around this line say why"
        yield Cause(rank=50, words=words, evidence="submit/gave-up", todo=f"once that is mended, {AGAIN}")


def _of_queue(found: Evidence) -> Iterator[Cause]:
    """A job that waits for what will not come is the first reason; one that runs is none."""
    for at, job in enumerate(found.jobs):
        if job.is_finished and at > 0:
            continue
        one, asked = finding_of(job, run_dir=str(found.run_dir)), f"scontrol show job {job.job}"
        is_fault = bool(one.todo) and not (job.is_finished and found.facts.run.state in ("done", "running"))
        rank = 2 if job.state == "PENDING" else 20
        yield Cause(
            rank=rank if is_fault else 90,
            words=f"job {job.job} {one.words}",
            evidence=asked,
            todo=one.todo,
            is_fault=is_fault,
        )
    for one in findings_of_nodes(found.nodes) if found.facts.run.state != "done" else ():
        yield Cause(rank=4, words=one.words, evidence="sinfo -R", todo=one.todo)
    if found.complaint:
        yield Cause(rank=80, words=f"Slurm says nothing: {found.complaint}", evidence="squeue", is_fault=False)


def _of_log(found: Evidence) -> Iterator[Cause]:
    """The first line of each kind: what follows it is often its consequence."""
    for sign in SIGNS:
        line = next((one for one in found.log if sign.pattern.search(one.text)), None)
        if line:
            yield Cause(rank=sign.rank, words=sign.words, evidence=_at(found, line), todo=sign.todo)
    said = next(((match[1], line) for line in found.log if (match := OURS.match(line.text))), None)
    fell = next(((match[1], line) for line in found.log if (match := PYTHON.match(line.text))), None)
    if said:
        words, line = said
        is_ours = {exit_codes.USER_MISTAKE, exit_codes.WILL_NOT_SUCCEED} & {one.code for one in found.exits}
        yield Cause(rank=8 if is_ours else 24, words=words.removeprefix("error: "), evidence=_at(found, line))
    elif fell:
        words, line = fell
        yield Cause(rank=26, words=f"a rank ended with {words}", evidence=_at(found, line), todo=AGAIN)


def _of_script(found: Evidence) -> Iterator[Cause]:
    """Why a job ended before its ranks had started: what the batch script said last."""
    line = next((one for one in reversed(found.log) if one.text.startswith(_SCRIPT)), None)
    if line and not found.exits and found.next_job is None:
        words = f"its job ended before the ranks had started: {line.text.removeprefix(_SCRIPT).strip()[:400]}"
        yield Cause(rank=18, words=words, evidence=_at(found, line))


def _at(found: Evidence, line: LogLine) -> str:
    return f"{found.log_name}:{line.number}: {line.text.strip()[:200]}"


def _of_ranks(found: Evidence) -> Iterator[Cause]:
    """The first rank to end is the culprit: srun kills the others."""
    first = next((one for one in found.exits if one.code not in (exit_codes.DONE, exit_codes.CONTINUE)), None)
    if first is None:
        return
    where, todo = _host(found, first.rank), AGAIN
    if first.code == 137:
        host = where.removeprefix(" on ") or "its node"
        todo = f"`dmesg -T | grep -i oom` on {host} tells whether memory ran out (fewer workers); else {AGAIN}"
        words = f"rank {first.rank}{where} was killed by SIGKILL: by someone, or by the kernel because memory ran out"
    elif first.code == 135:
        words = f"rank {first.rank}{where} died of SIGBUS, as when /dev/shm or a disk under a mapped file is full"
        todo = f"`df -h /dev/shm` there, fewer workers; then {AGAIN}"
    elif first.code in _SIGNALS:
        words = f"rank {first.rank}{where} died of {_SIGNALS[first.code]}, a fault of a library or of the machine"
    else:
        words, todo = _of_code(first, where)
    yield Cause(rank=28, words=words, evidence=f"{first.path}: {first.code}, the first rank to end", todo=todo)


def _of_code(one: Ended, where: str) -> tuple[str, str]:
    known = {
        exit_codes.USER_MISTAKE: ("refused its words or settings", f"correct what the log names, then {AGAIN}"),
        exit_codes.WILL_NOT_SUCCEED: (
            "ended because it would not succeed",
            f"change what the log names, then {AGAIN}",
        ),
        exit_codes.OUR_BUG: ("met a bug in patchline", "please report it with the log's last lines"),
        exit_codes.CRASH: ("met a fault outside: a disk, storage, or a lost worker", AGAIN),
    }
    words, todo = known.get(one.code, (f"ended with exit code {one.code}", f"see the log's last lines; {AGAIN}"))
    return f"rank {one.rank}{where} {words}", todo


def _host(found: Evidence, rank: int) -> str:
    return next((f" on {beat.host}" for beat, _ in found.beats if beat.rank == rank), "")


def _of_writers(found: Evidence) -> Iterator[Cause]:
    """What keeps a rank that is alive from saving: a stopped checkpoint writer."""
    for beat, _ in found.beats:
        if beat.trouble and beat.phase != Phase.ENDED:
            path = f"heartbeats/rank-{beat.rank:05d}.json"
            words, _, todo = beat.trouble.partition("; ")
            yield Cause(rank=5, words=f"rank {beat.rank}: {words}", evidence=path, todo=todo)


def _of_heartbeats(found: Evidence) -> Iterator[Cause]:
    for beat, _ in found.beats:
        path = f"heartbeats/rank-{beat.rank:05d}.json"
        if beat.error:
            is_full = re.search("no space left|quota exceeded", beat.error, re.IGNORECASE)
            todo = f"make room (`df -h`), then {AGAIN}" if is_full else AGAIN
            yield Cause(rank=10 if is_full else 22, words=f"it ended with: {beat.error}", evidence=path, todo=todo)
            break
    if any(beat.has_dumped for beat, _ in found.beats):
        behind = min((beat for beat, _ in found.beats), key=lambda beat: beat.place.order)
        words = f"it hung; rank {behind.rank} on {behind.host} was the furthest behind, in {behind.place.words()}"
        evidence = next((one for one in found.stacks if f"rank-{behind.rank:05d}-" in one), "heartbeats")
        yield Cause(rank=6, words=words, evidence=evidence, todo=f"read its stacks; {AGAIN}")
    for beat, age in found.beats:
        if age > _SILENT_SECONDS and beat.phase != Phase.ENDED:
            words = f"rank {beat.rank} on {beat.host} fell silent {duration(age)} before the others, in "
            todo = f"look at {beat.host} (`sinfo -R`); {AGAIN}"
            path = f"heartbeats/rank-{beat.rank:05d}.json"
            yield Cause(rank=15, words=words + beat.place.words(), evidence=path, todo=todo)
            break


def _of_data(found: Evidence) -> Iterator[Cause]:
    for field, path in found.missing:
        words = f"--{field.replace('_', '-')} is {path!r}, and nothing is there"
        todo = f"`ls -d {shlex.quote(path)}`; mount or pack it, or give the right path, then {AGAIN}"
        yield Cause(rank=9, words=words, evidence=f"job.yaml: {field}", todo=todo)


def _of_disk(found: Evidence) -> Iterator[Cause]:
    if found.free_bytes is not None and found.free_bytes < _LITTLE_BYTES and found.facts.run.state != "done":
        words = f"the disk of its folder has {found.free_bytes / 1e6:,.0f} MB left"
        yield Cause(
            rank=30,
            words=words,
            evidence=f"df -h {shlex.quote(str(found.run_dir))}",
            todo="make room before it saves again",
        )


_FINDINGS = {"spike": "a spike of the loss", "evaluation_failed": "an evaluation that failed"}


def _of_guard(found: Evidence) -> Iterator[Cause]:
    """The last finding. Of a run that goes on or is done, the guard has dealt with it."""
    for last in found.facts.findings[-1:]:
        step = last["step"]
        kind = _FINDINGS.get(last["kind"], "a loss that is not finite")
        is_late = found.facts.run.state == "failed" and step >= (found.facts.run.step or 0) - 1
        is_late = is_late and last["kind"] != "evaluation_failed"  # which has ended nothing
        words = (
            f"the guard found {kind} at step {step:,}, the last of {len(found.facts.findings)} (did: {last['action']})"
        )
        todo = "lower --schedule.learning-rate, set --clip-norm, or raise --guard.spike-z" if is_late else ""
        rank = 7 if is_late else 92
        yield Cause(rank=rank, words=words, evidence="guard.jsonl: last line", todo=todo, is_fault=is_late)


def _of_silence(found: Evidence) -> Iterator[Cause]:
    """It ended without a word: what is known is where."""
    why = next(iter(found.facts.run.reasons), "it ended, and nothing tells why")
    is_gone = "gone" in why or "no heartbeat" in why
    guess = "; so ends what is killed by SIGKILL, or whose node is lost" if is_gone else ""
    todo = f"`dmesg -T | grep -i oom` on its node tells whether memory ran out; {AGAIN}" if is_gone else AGAIN
    yield Cause(rank=60, words=why + guess, evidence="heartbeats/rank-00000.json", todo=todo)


def _of_stop(found: Evidence) -> Iterator[Cause]:
    by = next((beat.asked_by for beat, _ in found.beats if beat.asked_by), "")
    if found.last_try and not found.has_stop:
        words = f"its last try {try_words(found.last_try)}"
        evidence = f"submit/tries.jsonl:{found.try_number}"
        yield Cause(rank=70, words=words, evidence=evidence, todo=AGAIN, is_fault=False)
    if found.facts.run.state == "stopped" and not found.has_stop:
        words = f"it was stopped{f' by {by}' if by else ''}, with its work saved"
        yield Cause(rank=40, words=words, evidence="ledger.jsonl: last line", todo=AGAIN, is_fault=False)
    if found.facts.run.state == "never started":
        yield from _of_unstarted(found)


def _of_unstarted(found: Evidence) -> Iterator[Cause]:
    """Unless a job of it waits or runs, which has a line of its own."""
    evidence = "job.yaml" if found.facts.stage else "submit"
    if found.next_job:
        return
    if found.complaint:
        words = "it has never started, and Slurm does not say whether a job of it waits"
        todo = "run this again once `squeue --me` answers"
    elif found.jobs or found.has_slurm:
        words, todo = (
            "it has never started, and no job of it waits or runs",
            "see its log if it has one; submit it again",
        )
    else:
        words = f"it has never started: only its {'record' if found.facts.stage else 'folder submit'} is there"
        todo = "submit it, or see what its job waits for"
    yield Cause(rank=75, words=words, evidence=evidence, todo=todo)


def _of_notes(found: Evidence) -> Iterator[Cause]:
    for note in found.facts.notes:
        if "damaged" in note or "cannot be" in note:
            yield Cause(rank=85, words=note, evidence=note.partition(" ")[0].rstrip(":"), is_fault=False)
    for one in found.facts.time.restarts[-3:]:
        words = f"earlier: {one.cause}, {duration(one.seconds)} lost"
        yield Cause(
            rank=95, words=words, evidence=f"starts.jsonl: start {one.attempt.partition('-')[0]}", is_fault=False
        )
