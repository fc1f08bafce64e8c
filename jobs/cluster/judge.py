"""Decides what a Slurm job does next: which nodes a try uses, what follows when it ends, and which nodes to avoid.

All functions here are pure. jobs/cluster/questions.py collects the facts, and slurm/stage.sbatch carries out what is
decided here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jobs.exit_codes import CONTINUE, CRASH, DONE, FAULTS_FOUND, USER_MISTAKE, WILL_NOT_SUCCEED

MOST_IDLE = 3  # the job gives up after this many tries in a row that save nothing new
MOST_CRASHES = 2  # a node is left out after this many tries in which only its ranks crashed
CLOCK_SECONDS = 60  # how far a node's clock may be off, in addition to the duration of the check
LEAST_SCRATCH_KIB, LEAST_SHM_KIB = 262_144, 65_536  # the least that must be free in the scratch folder and in /dev/shm
LAST_PAUSE_SECONDS = 120  # before the last try, if the storage may have caused the crashes
# Ports of rank 0 are below the kernel's ephemeral ports, which begin at 32768.
_FIRST_PORT, _NUM_PORTS, _NUM_CANDIDATES = 20_000, 12_000, 100
_TERMINATED, _KILLED = 143, 137  # exit codes of ranks that srun ended
# With these codes a rank did not crash by itself: it was done, lost another rank or the storage, or was asked to stop.
_OF_OTHERS = (DONE, CRASH, CONTINUE, _TERMINATED)
_USABLE = ("idle", "allocated", "mixed", "completing", "planned")  # states of nodes that can be used
_ONE_FEATURE = re.compile(r"\(null\)|[A-Za-z0-9_]+")


@dataclass(frozen=True, kw_only=True)
class NextTry:
    """The next step of the batch script: try again in this allocation, requeue the job, or exit with `code`.

    `end`: the word for tries.jsonl; nothing is recorded if it is empty. `idle`: how many tries in a row saved nothing
    new; None leaves the count as it is. `crashed_on`: the node to blame for a crash, if there is only one. `gives_up`:
    whether jobs of this run that were submitted earlier end at once. `pause_seconds`: how long the script first waits,
    so that the storage can recover; None if it does not wait.
    """

    then: Literal["again", "requeue", "exit"]
    code: int = CONTINUE
    end: str = ""
    words: str = ""
    idle: int | None = None
    crashed_on: str = ""
    gives_up: bool = False
    pause_seconds: int | None = None


@dataclass(frozen=True, kw_only=True)
class TryFacts:
    """A try that ended, but did not complete its stage.

    `codes`: the exit code of each rank that left one, in the order in which the ranks ended; None if the disk had no
    room for the code. `nodes`: the ranks' nodes, in the order of the ranks. `has_marker`: whether the stage writes
    RUN/DONE when it is done. `full`: the folder of the records, if no file could be written to it, so that the ranks
    were not started.
    `stop`: RUN/STOP, if it exists. `is_asked`: whether the job was asked to stop. `has_saved`: whether the try saved
    anything new, or recorded a lost shard. `idle`: how many tries in a row had done neither before this one. `number`:
    the try's number in this allocation, from 0.
    """

    codes: Mapping[int, int | None] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    num_ranks: int = 1
    ranks_per_node: int = 1
    has_marker: bool = False
    full: str = ""
    stop: str = ""
    is_asked: bool = False
    has_saved: bool = False
    idle: int = 0
    number: int = 0
    retries: int = 0

    def any_said(self, code: int) -> bool:
        """Whether a rank exited with this code."""
        return code in self.codes.values()

    def all_said(self, code: int) -> bool:
        """Whether every rank exited with this code."""
        return all(self.codes.get(rank) == code for rank in range(self.num_ranks))


@dataclass(frozen=True, kw_only=True)
class Partition:
    """What Slurm says about a job and the nodes of its partition. `job`: what squeue prints for `%P|%f|%n|%v|%x`.
    `own`: the job's nodes. `excluded`: the nodes that the job avoids already. `nodes`: what sinfo prints for `%N %T %f
    %c/%m/%G`, one line for each node in each of its partitions."""

    job: str = ""
    own: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckFacts:
    """The results of a check of a job's nodes.

    `answers`: for each node that answered, its clock in seconds and its faults. `is_checked`: whether the nodes were
    checked; False if the user has switched the check off. `has_store`: whether the nodes had to reach a store.
    `server_clock`: the file server's clock. `seconds`: how long the check took. `crashes`: for each node, the number of
    this job's tries in which only ranks on that node crashed. `folder`: the folder that the nodes must share.
    """

    nodes: tuple[str, ...]
    num_needed: int
    answers: Mapping[str, tuple[int | None, tuple[str, ...]]]
    is_checked: bool = True
    has_store: bool = False
    server_clock: int = 0
    seconds: int = 0
    crashes: Mapping[str, int] = field(default_factory=dict)
    folder: str = "this folder"
    idle: int = 0
    partition: Partition = field(default_factory=Partition)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The nodes that the ranks use, the nodes that are left out, and lines for the log. `store`: "answers" if a node
    has reached the store, "away" if none has; empty if the store was not checked. `decision`: what to do if the try
    cannot begin; None if it can."""

    nodes: tuple[str, ...]
    left_out: tuple[str, ...]
    says: tuple[str, ...]
    store: Literal["", "answers", "away"] = ""
    decision: NextTry | None = None


def judged(facts: TryFacts) -> NextTry:
    """Decides what follows from the end of a try that did not complete its stage."""
    idle = 0 if facts.has_saved else facts.idle + 1
    if facts.full:
        return _without_room(facts, idle)
    if facts.stop and not facts.any_said(WILL_NOT_SUCCEED):  # a rank that finds STOP when it starts exits with 2
        words = f"stopped by {facts.stop}: delete it and submit again to continue"
        return NextTry(then="exit", code=WILL_NOT_SUCCEED, end="told to stop", words=words)
    for code in (USER_MISTAKE, WILL_NOT_SUCCEED, *(() if facts.has_marker else (FAULTS_FOUND,))):
        if facts.any_said(code):
            words = f"exit code {code}: not tried again, it would end the same way"
            return NextTry(then="exit", code=code, end="at fault", words=words)
    if facts.is_asked and not facts.any_said(CONTINUE):
        if idle >= MOST_IDLE:
            why = f"asked to stop before anything was saved, {idle} times in a row: it needs more time before its limit"
            return _given_up(why, idle=0)
        words = "asked to stop before anything could be saved: to be continued"
        return NextTry(then="requeue", end="asked to stop", words=words, idle=idle)
    # One stopped rank does not mean that the job stopped: if another rank was killed, srun may ask the rest to stop.
    is_stopped = facts.all_said(CONTINUE) or (facts.is_asked and facts.any_said(CONTINUE))
    how, node = ("stopped", "") if is_stopped else ("crashed", crashed_node(facts))
    if idle >= MOST_IDLE:
        why = f"{how}, the last of {idle} tries in a row that saved nothing new: not tried again; see the log above"
        return _given_up(why, idle=0, crashed_on=node)
    is_outside = facts.any_said(CRASH) or None in facts.codes.values()
    is_again = how == "crashed" and facts.number < facts.retries
    what = "trying again in this allocation" if is_again else "to be continued"
    return NextTry(
        then="again" if is_again else "requeue",
        end=how,
        words=f"{how}, tries in a row that saved nothing new: {idle}; {what}",
        idle=idle,
        crashed_on=node,
        pause_seconds=LAST_PAUSE_SECONDS if how == "crashed" and idle == MOST_IDLE - 1 and is_outside else None,
    )


def _without_room(facts: TryFacts, idle: int) -> NextTry:
    """Decides what follows if a try could not begin, because the disk has no room for the exit codes of its ranks."""
    if facts.is_asked:
        return NextTry(
            then="requeue", words=f"asked to stop while {facts.full} takes no file: to be continued", idle=idle
        )
    if idle < MOST_IDLE:
        return NextTry(then="again", idle=idle)
    todo = "make room, or have the disk looked at; then submit again"
    return _given_up(f"{facts.full} takes no file, {idle} times in a row: {todo}", idle=0)


def _given_up(why: str, *, idle: int | None = None, crashed_on: str = "") -> NextTry:
    """Returns the decision to give up. `idle`: the count with which the next job begins."""
    return NextTry(
        then="exit", code=WILL_NOT_SUCCEED, end="gave up", words=why, idle=idle, crashed_on=crashed_on, gives_up=True
    )


def crashed_node(facts: TryFacts) -> str:
    """Returns the one node whose ranks crashed by themselves in this try. Returns an empty string if no rank did, if
    ranks on several nodes did (as with a bug), or if the run uses only one node and the try saved something new. A
    killed rank counts only if it was the first to crash, since srun kills the others later."""
    found: list[str] = []
    for rank, code in facts.codes.items():
        if code is None or code in _OF_OTHERS or (code == _KILLED and found):
            continue
        found += facts.nodes[rank // facts.ranks_per_node :][:1]
    is_blamed = len(set(found)) == 1 and (len(facts.nodes) > 1 or not facts.has_saved)
    return found[0] if is_blamed else ""


def ports_of(*, job: int, start: int, number: int) -> list[int]:
    """Returns ports for rank 0, which uses the first free one. The ports differ from job to job and from try to try."""
    first = job * 101 + start * 11 + number
    return [_FIRST_PORT + (first + each * 997) % _NUM_PORTS for each in range(_NUM_CANDIDATES)]


def faults_of(found: Mapping[str, str], *, has_store: bool = False) -> tuple[str, ...]:
    """Returns the faults of a node. `found`: the values that `check_node` in slurm/stage.sbatch printed, by name."""
    rules = {
        "unshared": "shared" in found,
        "read-only": "shared" not in found or "writable" in found,
        "no-scratch": "scratch" in found,
        "scratch-full": _whole(found.get("scratch-kib", "")) >= LEAST_SCRATCH_KIB,
        "shm-full": _whole(found.get("shm-kib", "")) >= LEAST_SHM_KIB,
        "gpu": _whole(found.get("gpus", "")) >= _whole(found.get("gpus-asked", "")),
        "s3": "s3" in found or not has_store,
    }
    return tuple(name for name, is_well in rules.items() if not is_well)


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


def chosen(facts: CheckFacts) -> Choice:
    """Chooses the nodes for a try after their check. A node whose ranks have crashed repeatedly is used again only if
    nothing can replace it, neither a spare node nor another node after a requeue. If no node reaches the store, the
    fault is not in the nodes."""
    if not facts.answers:
        says = ("no node answered, not even this one: nothing was checked",) if facts.is_checked else ()
        return Choice(nodes=facts.nodes[: facts.num_needed], left_out=(), says=says)
    if not facts.has_store:
        return _chosen(facts)
    is_away = all("s3" in found for _, found in facts.answers.values())
    if is_away:
        without = {
            name: (clock, tuple(fault for fault in found if fault != "s3"))
            for name, (clock, found) in facts.answers.items()
        }
        facts = replace(facts, answers=without)
    return replace(_chosen(facts), store="away" if is_away else "answers")


def _chosen(facts: CheckFacts) -> Choice:
    odd, apart = odd_clocks(facts)
    says = [apart] if apart else []
    faults = {name: _fault_of(name, facts, is_odd=name in odd) for name in facts.nodes}
    healthy, left_out, elsewhere = _parted(faults, facts, allowed=("",))
    if len(healthy) < facts.num_needed and not elsewhere:
        healthy, left_out, elsewhere = _parted(faults, facts, allowed=("", "crashes"))
    says += [f"node {name} is left out: {faults[name]}" for name in left_out]
    num_unshared = sum("unshared" in found for _, found in facts.answers.values())
    if 1 <= len(facts.nodes) - 1 <= num_unshared:
        why = f"the nodes do not share {facts.folder}: choose --run-dir on storage that all of them mount"
        return Choice(nodes=healthy, left_out=left_out, says=tuple(says), decision=_given_up(why))
    num, needed = len(healthy), facts.num_needed
    says.append(f"checked {len(facts.nodes)} nodes in {facts.seconds} s, {num} are healthy, {needed} are needed")
    decision = None
    if len(healthy) < facts.num_needed:
        # If a requeue will replace nodes that crash, this does not count as another try that saved nothing.
        is_counted = "crashes" not in faults.values() or not elsewhere
        decision = _too_few(",".join(left_out), facts.idle + 1 if is_counted else None)
    return Choice(nodes=healthy[: facts.num_needed], left_out=left_out, says=tuple(says), decision=decision)


def _too_few(left_out: str, idle: int | None) -> NextTry:
    if idle is not None and idle >= MOST_IDLE:
        return _given_up(f"too few healthy nodes, {idle} times in a row: {left_out}", idle=0)
    words = f"too few healthy nodes: to be continued. To avoid them, submit with --exclude={left_out}"
    return NextTry(then="requeue", end="too few nodes", words=words, idle=idle)


def _fault_of(name: str, facts: CheckFacts, *, is_odd: bool) -> str:
    _, found = facts.answers.get(name, (None, ("no-answer",)))
    found = (*found, *(("clock",) if is_odd else ()))
    # A run on one node moves only if its last tries saved nothing, since a rare bug looks like a sick node there.
    may_move = facts.num_needed > 1 or facts.idle >= MOST_CRASHES
    if not found and facts.crashes.get(name, 0) >= MOST_CRASHES and may_move:
        found = ("crashes",)
    return ",".join(found)


def _parted(
    faults: Mapping[str, str], facts: CheckFacts, *, allowed: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Returns the nodes whose fault (empty: none) is allowed, the other nodes, and the nodes to avoid after a
    requeue."""
    healthy = tuple(name for name, fault in faults.items() if fault in allowed)
    left_out = tuple(name for name in faults if name not in healthy)
    return healthy, left_out, nodes_to_avoid(left_out, facts.partition)


def odd_clocks(facts: CheckFacts) -> tuple[frozenset[str], str]:
    """Returns the nodes whose clock is far from the median of all clocks, including the file server's. If half of the
    clocks disagree with the other half, nobody can tell which are right. In that case, returns no nodes, and a line for
    the log."""
    clocks = {name: clock for name, (clock, _) in facts.answers.items() if clock is not None}
    ordered, most = sorted([*clocks.values(), facts.server_clock]), CLOCK_SECONDS + facts.seconds
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    if clocks and high - low > most:
        return frozenset(), f"the clocks of the nodes and of the file server are {high - low} s apart: set them"
    return frozenset(name for name, clock in clocks.items() if not low - most <= clock <= high + most), ""


def nodes_to_avoid(left_out: Sequence[str], partition: Partition) -> tuple[str, ...]:
    """Returns the nodes that the job should avoid after a requeue: those left out, and those that it avoids already.
    Returns no nodes if too few others have the same hardware as the job's own, since the job would wait for ever. Also
    returns none if the job asked for certain nodes, a reservation, or more than one feature."""
    if not left_out or partition.job.count("|") != 4:
        return ()
    _, feature, required, reservation, _ = partition.job.split("|")
    if required or reservation != "(null)" or not _ONE_FEATURE.fullmatch(feature):
        return ()
    avoided = dict.fromkeys((*left_out, *partition.excluded))
    rows = [row for line in partition.nodes if len(row := line.split(maxsplit=3)) == 4]
    alike = {hardware for name, _, _, hardware in rows if name in partition.own}
    others = {
        name
        for name, state, features, hardware in rows
        if name not in avoided
        and hardware in alike
        and state in _USABLE
        and (feature == "(null)" or feature in features.split(","))
    }
    return tuple(avoided) if len(others) >= len(partition.own) else ()
