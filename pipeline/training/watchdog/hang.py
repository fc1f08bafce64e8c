"""Finds out which ranks hang, and writes to RUN/stacks what every thread of a rank was doing when the run hung."""

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from pipeline.training.watchdog.heartbeat_files import Beat, Heard, Phase

FOLDER = "stacks"
_MOST_NAMED = 3


def stacks_path(run_dir: Path, *, rank: int, attempt: str) -> Path:
    """Returns the file for a rank's stacks. `attempt`: the token of the attempt; empty while it is not known."""
    return run_dir / FOLDER / f"rank-{rank:05d}-attempt-{attempt or 'starting'}.txt"


def write_stacks(path: Path, *, words: str) -> None:
    """Writes the line `words`, the stacks of all threads, and the names of the threads. Raises OSError if that
    fails."""
    path.parent.mkdir(exist_ok=True)
    names = [f"Thread 0x{thread.ident or 0:016x} is {thread.name}" for thread in threading.enumerate()]
    with path.open("w") as file:
        file.write(f"{words}\n\n{_stacks()}\n" + "".join(f"{name}\n" for name in names))


def _stacks() -> str:
    """Returns the stacks of all threads. They are dumped to memory first: faulthandler holds the interpreter lock while
    it writes, forever if the disk does not answer."""
    with os.fdopen(os.memfd_create("stacks"), "r+", errors="replace") as memory:
        faulthandler.dump_traceback(file=memory, all_threads=True)
        memory.seek(0)
        return memory.read()


def main_stack() -> str:
    """Returns the stack of the main thread, the innermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = reversed(traceback.extract_stack(frame)) if frame else ()
    return "".join(f"  File {call.filename!r}, line {call.lineno} in {call.name}\n" for call in calls)


def culprits(heard: Sequence[Heard], *, silent_after_seconds: float) -> list[Heard]:
    """Returns the ranks for which the others wait: the silent ones or, if there are none, those that are furthest
    behind."""
    silent = [one for one in heard if is_silent(one, after_seconds=silent_after_seconds)]
    if silent:
        return silent
    behind = min(one.beat.place.order for one in heard if one.beat)
    return [one for one in heard if one.beat and one.beat.place.order == behind]


def is_silent(heard: Heard, *, after_seconds: float) -> bool:
    """Returns whether a rank no longer writes its heartbeat: it is stopped, its host is lost, or it has ended."""
    return heard.beat is None or heard.silent_seconds > after_seconds or heard.beat.phase == Phase.ENDED


def hang_message(
    heard: Sequence[Heard], *, num_ranks: int, silent_after_seconds: float, stacks: str, stacks_fault: str = ""
) -> str:
    """Returns the message that says which ranks hang. `heard`: the last beats of all ranks, in rank order, or only this
    rank's own before beats are written. `stacks`: the folder of the stacks. `stacks_fault`: why this rank could not
    write its stacks."""
    found = culprits(heard, silent_after_seconds=silent_after_seconds)
    others = [one for one in heard if one not in found and one.beat]
    is_silence = is_silent(found[0], after_seconds=silent_after_seconds)
    first = found[0].beat
    if first and not is_silence and len(found) == num_ranks > 1:
        why = "" if first.phase == Phase.WAITING_FOR_DATA else ": an exchange between them does not end"
        what = f"all {num_ranks} ranks have {_standing(first)}{why}"
    else:
        named = "; ".join(_named(one, num_ranks, is_silence=is_silence) for one in found[:_MOST_NAMED])
        more = f"; {len(found) - _MOST_NAMED} more ranks likewise" if len(found) > _MOST_NAMED else ""
        what = f"{named}{more}"
        if others and others[0].beat:
            what += f"; the others wait for it in {others[0].beat.place.words()}"
        if is_silence and any(one.beat and one.beat.phase != Phase.ENDED for one in found):
            what += "; whoever is silent is stopped, or its host or its disk does not answer"
    where = f"cannot be written to {stacks} ({stacks_fault})" if stacks_fault else f"are in {stacks}"
    return f"the run hangs: {what}. Stacks {where}; run the same command to continue"


def disk_words(folder: str, seconds: float, calls: Sequence[str] = ()) -> str:
    """Returns the message that a disk does not answer. `seconds`: how long a call to the folder has not returned.
    `calls`: the calls that have not, such as `openat of /data/index`, if they are known."""
    named = f" ({'; '.join([*dict.fromkeys(calls)][:_MOST_NAMED])})" if calls else ""
    return f"the disk or file server of {folder} has not answered for {seconds:.0f} s{named}"


def _named(one: Heard, num_ranks: int, *, is_silence: bool) -> str:
    if one.beat is None:
        return f"rank {one.rank} of {num_ranks} has left no heartbeat since the start"
    who = f"rank {one.rank} of {num_ranks} on host {one.beat.host} (process {one.beat.pid})"
    if one.beat.phase == Phase.ENDED:
        return f"{who} has ended"
    if is_silence:
        return f"{who} has been silent for {one.silent_seconds:.0f} s; last heard in {one.beat.place.words()}"
    return f"{who} has {_standing(one.beat)}"


def _standing(beat: Beat) -> str:
    return f"stood for {beat.seconds:.0f} s in {beat.place.words()}"
