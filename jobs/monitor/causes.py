"""Finds out what went wrong with a run. The most likely cause comes first. Each cause says where it can be seen and
what fixes it. All functions are pure.

Only the last try is explained; `patchline report` says why earlier tries failed. Each rule yields findings with a
number, and the lowest number is the most likely cause. Findings that are not faults are notes.
"""

import shlex
from collections.abc import Iterator
from dataclasses import replace

from jobs import exit_codes
from jobs.cluster.queue_reasons import finding_of, findings_of_nodes
from jobs.monitor.evidence import Ended, Evidence, LogLine
from jobs.monitor.log_signs import AGAIN, FULL, OURS, PYTHON, SAME_COMMAND, SIGNS
from jobs.reports.facts import try_words
from pipeline.runs.facts import SILENT_SECONDS
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.watchdog.heartbeat_files import Beat, Phase
from shards.errors import Finding
from shards.output.quantities import duration

Ranked = Iterator[tuple[int, Finding]]
_ELSEWHERE = "start it again in another --run-dir"
_SCRIPT = "stage.sbatch: "
_LITTLE_BYTES = 1 << 30
_OF_LIBRARY = ", a fault of a library or of the machine"
# Exit code of a rank -> how the rank ended, and what to do. {host} stands for its node.
_ENDS = {
    137: (
        "was killed by SIGKILL: by someone, or by the kernel because memory ran out",
        f"`dmesg -T | grep -i oom` on {{host}} tells whether memory ran out (fewer workers); else {AGAIN}",
    ),
    135: (
        "died of SIGBUS, as when /dev/shm or a disk under a mapped file is full",
        f"`df -h /dev/shm` there, fewer workers; then {AGAIN}",
    ),
    134: (f"died of SIGABRT{_OF_LIBRARY}", AGAIN),
    139: (f"died of SIGSEGV{_OF_LIBRARY}", AGAIN),
    exit_codes.USER_MISTAKE: ("refused its words or settings", f"correct what the log names, then {AGAIN}"),
    exit_codes.WILL_NOT_SUCCEED: ("ended because it would not succeed", f"change what the log names, then {AGAIN}"),
    exit_codes.OUR_BUG: ("met a bug in patchline", "please report it with the log's last lines"),
    exit_codes.CRASH: ("met a fault outside the program: a disk, storage, or a lost worker", AGAIN),
}
_GUARD_FINDINGS = {"spike": "a spike of the loss", "evaluation_failed": "an evaluation that failed"}


def causes_of(found: Evidence) -> list[Finding]:
    """Returns the causes without duplicates, most likely first. If none is a fault, nothing is wrong."""
    state = found.facts.run.state
    is_lost = found.has_lost_checkpoints and state != "done"
    ranked = [*_of_folder(found), *_of_queue(found), *_of_disk(found), *_of_guard(found), *_of_writers(found)]
    if state in ("failed", "never started", "stopped"):
        ranked += [*_of_log(found), *_of_ranks(found), *_of_heartbeats(found), *_of_data(found)]
    if state == "failed" and not any(one.status == "fault" and rank < 60 for rank, one in ranked):
        ranked += _of_silence(found)
    if state == "never started":
        ranked += _of_script(found)
    if state not in ("done", "running"):
        ranked += _of_stop(found)
    if is_lost:
        words = "its checkpoints are gone: the ledger names some, and the folder has none"
        ranked.append((1, _fault(words, "checkpoints", f"put them back, or {_ELSEWHERE}")))
    ranked += _of_notes(found)
    again = _ELSEWHERE if is_lost else f"job {found.next_job.job} continues it" if found.next_job else SAME_COMMAND
    first: dict[str, Finding] = {}
    for _, one in sorted(ranked, key=lambda pair: pair[0]):
        first.setdefault(one.found, replace(one, todo=one.todo.replace(AGAIN, again)))
    return list(first.values())


def _fault(found: str, seen: str, todo: str = "") -> Finding:
    return Finding(status="fault", found=found, seen=seen, todo=todo)


def _note(found: str, seen: str, todo: str = "") -> Finding:
    return Finding(found=found, seen=seen, todo=todo)


def _of_folder(found: Evidence) -> Ranked:
    if found.damage:
        todo = "give the command that started it once more, with all its flags: it writes the record again"
        yield 3, _fault(f"its record is damaged: {found.damage}", RECORD_FILE, todo)
    if found.has_stop and found.facts.run.state != "done":
        words = "it was asked to stop, and stays stopped while the file STOP is there; without it, submit again"
        yield 0, _fault(words, "STOP", f"rm {shlex.quote(str(found.run_dir / 'STOP'))}")
    if found.has_given_up:
        words = "it has given up: tries in a row saved nothing new; the causes around this line say why"
        yield 50, _fault(words, "submit/gave-up", f"once that is fixed, {AGAIN}")


def _of_queue(found: Evidence) -> Ranked:
    """Yields a finding for each broken node and each job, except finished jobs older than the newest. A pending job
    that needs the user's help is a likely cause. A job that needs no help is a note."""
    for at, job in enumerate(found.jobs):
        if job.is_finished and at > 0:
            continue
        one = finding_of(job, run_dir=str(found.run_dir))
        is_fault = bool(one.todo) and not (job.is_finished and found.facts.run.state in ("done", "running"))
        rank = 90 if not is_fault else 2 if job.state == "PENDING" else 20
        words, seen = f"job {job.job} {one.found}", f"scontrol show job {job.job}"
        yield rank, replace(one, found=words, seen=seen, status="fault" if is_fault else "ok")
    for one in findings_of_nodes(found.nodes) if found.facts.run.state != "done" else ():
        yield 4, _fault(one.found, "sinfo -R", one.todo)
    if found.complaint:
        yield 80, _note(f"Slurm says nothing: {found.complaint}", "squeue")


def _of_log(found: Evidence) -> Ranked:
    """Yields the first line of each kind in the log, because later lines are often its consequences."""
    for pattern, rank, words, todo in SIGNS:
        line = next((one for one in found.log if pattern.search(one.text)), None)
        if line:
            yield rank, _fault(words, _at(found, line), todo)
    said = next(((match[1], line) for line in found.log if (match := OURS.match(line.text))), None)
    fell = next(((match[1], line) for line in found.log if (match := PYTHON.match(line.text))), None)
    if said:
        is_ours = {exit_codes.USER_MISTAKE, exit_codes.WILL_NOT_SUCCEED} & {one.code for one in found.exits}
        yield 8 if is_ours else 24, _fault(said[0], _at(found, said[1]))
    elif fell:
        yield 26, _fault(f"a rank ended with {fell[0]}", _at(found, fell[1]), AGAIN)


def _of_script(found: Evidence) -> Ranked:
    """Yields the last message of the batch script if the job ended before its ranks had started."""
    line = next((one for one in reversed(found.log) if one.text.startswith(_SCRIPT)), None)
    if line and not found.exits and found.next_job is None:
        said = line.text.removeprefix(_SCRIPT).strip()[:400]
        yield 18, _fault(f"its job ended before the ranks had started: {said}", _at(found, line))


def _at(found: Evidence, line: LogLine) -> str:
    return f"{found.log_name}:{line.number}: {line.text.strip()[:200]}"


def _of_ranks(found: Evidence) -> Ranked:
    """Yields the first rank that failed. It is the cause, because srun then kills the others."""
    first = next((one for one in found.exits if one.code not in (exit_codes.DONE, exit_codes.CONTINUE)), None)
    if first:
        yield 28, _of_rank(first, next((beat.host for beat, _ in found.beats if beat.rank == first.rank), ""))


def _of_rank(one: Ended, host: str) -> Finding:
    unknown = f"ended with exit code {one.code}", f"see the log's last lines; {AGAIN}"
    words, todo = _ENDS.get(one.code, unknown)
    who = f"rank {one.rank} on {host}" if host else f"rank {one.rank}"
    seen = f"{one.path}: {one.code}, the first rank to end"
    return _fault(f"{who} {words}", seen, todo.replace("{host}", host or "its node"))


def _of_writers(found: Evidence) -> Ranked:
    """Yields checkpoint writers in trouble. A rank whose writer is stopped cannot save, although the rank is alive."""
    for beat, _ in found.beats:
        if beat.trouble and beat.phase != Phase.ENDED:
            yield 5, _fault(f"rank {beat.rank}: {beat.trouble}", _file_of(beat), beat.todo)


def _file_of(beat: Beat) -> str:
    return f"heartbeats/rank-{beat.rank:05d}.json"


def _of_heartbeats(found: Evidence) -> Ranked:
    ended = next((beat for beat, _ in found.beats if beat.error), None)
    if ended:
        is_full = any(pattern.search(ended.error) for pattern, *_ in FULL)
        todo = f"make room (`df -h`), then {AGAIN}" if is_full else AGAIN
        yield 10 if is_full else 22, _fault(f"it ended with: {ended.error}", _file_of(ended), todo)
    if any(beat.has_dumped for beat, _ in found.beats):
        behind = min((beat for beat, _ in found.beats), key=lambda beat: beat.place.order)
        words = f"it hung; rank {behind.rank} on {behind.host} was the furthest behind, in {behind.place.words()}"
        seen = next((one for one in found.stacks if f"rank-{behind.rank:05d}-" in one), "heartbeats")
        yield 6, _fault(words, seen, f"read its stacks; {AGAIN}")
    silent = ((beat, age) for beat, age in found.beats if age > SILENT_SECONDS and beat.phase != Phase.ENDED)
    for beat, age in list(silent)[:1]:
        words = f"rank {beat.rank} on {beat.host} fell silent {duration(age)} before the others, in "
        yield 15, _fault(words + beat.place.words(), _file_of(beat), f"look at {beat.host} (`sinfo -R`); {AGAIN}")


def _of_data(found: Evidence) -> Ranked:
    for field, path in found.missing:
        words = f"--{field.replace('_', '-')} is {path!r}, and nothing is there"
        todo = f"`ls -d {shlex.quote(path)}`; mount or pack it, or give the right path, then {AGAIN}"
        yield 9, _fault(words, f"job.yaml: {field}", todo)


def _of_disk(found: Evidence) -> Ranked:
    if found.free_bytes is not None and found.free_bytes < _LITTLE_BYTES and found.facts.run.state != "done":
        words = f"the disk of its folder has {found.free_bytes / 1e6:,.0f} MB left"
        yield 30, _fault(words, f"df -h {shlex.quote(str(found.run_dir))}", "make room before it saves again")


def _of_guard(found: Evidence) -> Ranked:
    """Yields the guard's last finding. It is a fault if the run failed by the next step, unless it is about an
    evaluation. Otherwise it is a note, because the guard has dealt with it."""
    for last in found.facts.findings[-1:]:
        step = last["step"]
        kind = _GUARD_FINDINGS.get(last["kind"], "a loss that is not finite")
        is_late = found.facts.run.state == "failed" and step >= (found.facts.run.step or 0) - 1
        words = (
            f"the guard found {kind} at step {step:,}, the last of {len(found.facts.findings)} (did: {last['action']})"
        )
        if is_late and last["kind"] != "evaluation_failed":  # a failed evaluation does not end a run
            todo = "lower --schedule.learning-rate, set --clip-norm, or raise --guard.spike-z"
            yield 7, _fault(words, "guard.jsonl: last line", todo)
        else:
            yield 92, _note(words, "guard.jsonl: last line")


def _of_silence(found: Evidence) -> Ranked:
    """Yields the state in which a run was last seen, if it ended without a message."""
    why = next(iter(found.facts.run.reasons), "it ended, and nothing tells why")
    is_gone = found.facts.run.has_vanished
    guess = "; a run ends like this if SIGKILL or the loss of its node ends it" if is_gone else ""
    todo = f"`dmesg -T | grep -i oom` on its node tells whether memory ran out; {AGAIN}" if is_gone else AGAIN
    yield 60, _fault(why + guess, "heartbeats/rank-00000.json", todo)


def _of_stop(found: Evidence) -> Ranked:
    by = next((beat.asked_by for beat, _ in found.beats if beat.asked_by), "")
    if found.last_try and not found.has_stop:
        yield (
            70,
            _note(f"its last try {try_words(found.last_try)}", f"submit/tries.jsonl:{found.try_number}", AGAIN),
        )
    if found.facts.run.state == "stopped" and not found.has_stop:
        words = f"it was stopped{f' by {by}' if by else ''}, with its work saved"
        yield 40, _note(words, "ledger.jsonl: last line", AGAIN)
    if found.facts.run.state == "never started" and not found.next_job:  # a pending job has its own line
        yield 75, _of_unstarted(found)


def _of_unstarted(found: Evidence) -> Finding:
    if found.complaint:
        words = "it has never started, and Slurm does not say whether a job of it waits"
        todo = "run this again once `squeue --me` answers"
    elif found.jobs or found.has_slurm:
        words = "it has never started, and no job of it waits or runs"
        todo = "see its log if it has one; submit it again"
    else:
        words = f"it has never started: only its {'record' if found.facts.stage else 'folder submit'} is there"
        todo = "submit it, or see what its job waits for"
    return _fault(words, RECORD_FILE if found.facts.stage else "submit", todo)


def _of_notes(found: Evidence) -> Ranked:
    yield from ((85, one) for one in found.facts.damaged)
    for one in found.facts.time.restarts[-3:]:
        words = f"earlier: {one.cause.words}, {duration(one.seconds)} lost"
        yield 95, _note(words, f"starts.jsonl: start {one.attempt.partition('-')[0]}")
