"""`patchline __judge`: answers what slurm/stage.sbatch asks before, between and after the tries of a job.

The script writes facts to standard input, with one key and its value on each line. The answer on standard output has
the same form, and ends with a line `over`. Exit codes, crashes and markers are read from the run's folder. If Python
cannot start, for example because the code was removed while the job ran, the script decides by itself, by simpler
rules.
"""

import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from jobs.arguments import value_in
from jobs.cluster.judge import (
    CheckFacts,
    NextTry,
    Partition,
    TryFacts,
    chosen,
    faults_of,
    judged,
    nodes_to_avoid,
    ports_of,
)
from jobs.cluster.recorded_jobs import recorded_in
from jobs.exit_codes import DONE, USER_MISTAKE, WILL_NOT_SUCCEED
from jobs.output import put
from pipeline.training.reporting.ledger import NUM_SAVES, save_seconds
from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file
from shards.files.looks import is_a_folder, is_there, patiently

_WITH_MARKER = ("pretrain", "finetune")  # stages that are done when RUN/DONE says so
_LAUNCHERS = ("srun", "torchrun")
_STAGE = re.compile(r"(__)?[a-z][a-z-]*")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_CHECKED = re.compile(r"(\S+) ([0-9]*)( .*)?")
_REACH_SECONDS, _MOST_BYTES = 2.0, 1 << 20
_LEFT_OUT = "after the second time it is left out"
# Variables of sbatch that replace options on which the script relies.
_REPLACING = ("SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_OUTPUT", "SBATCH_SIGNAL", "SBATCH_TIMELIMIT")
_PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY")
Facts = Mapping[str, Sequence[str]]


def answer(words: Sequence[str], *, environ: Mapping[str, str]) -> int:
    """Runs one of `patchline __judge start STAGE ...`, `__judge nodes`, `__judge try` and `__judge avoid`. Raises
    UserError for anything else."""
    facts: dict[str, list[str]] = {}
    for line in sys.stdin.read().splitlines():
        key, _, value = line.partition(" ")
        facts.setdefault(key, []).append(value)
    match list(words):
        case ["start", *rest]:
            lines = _start(rest, facts, environ)
        case ["nodes"]:
            lines = _nodes(facts)
        case ["try"]:
            lines = _lines_of(judged(_try_facts(facts)))
        case ["avoid"]:
            lines = [f"avoid {','.join(nodes_to_avoid(_names(facts, 'left-out'), _partition(facts)))}"]
        case _:
            raise UserError("__judge takes start, nodes, try or avoid")
    put("".join(f"{line}\n" for line in (*lines, "over")))
    return DONE


def _start(words: Sequence[str], facts: Facts, environ: Mapping[str, str]) -> list[str]:
    """Returns the lines that the script needs before the first try. If the job cannot start, they give an exit code and
    a message."""
    try:
        lines = start_of(words, facts)
    except UserError as error:
        return [f"say {error}", "then exit", f"code {USER_MISTAKE}"]
    run_dir, state = value_in(words, "--run-dir"), Path(_text(facts, "state"))
    if run_dir:
        state = Path(run_dir) / "submit"
    gave_up, submitted = state / "gave-up", _submit_time(facts, state)
    if is_there(gave_up):
        if _text(facts, "restart") == "0" and 0 < submitted < int(patiently(gave_up, gave_up.stat).st_mtime):
            why = "a job of this run has given up since this one was submitted: submit again to try again"
            return [f"say {why}", "then exit", f"code {WILL_NOT_SUCCEED}"]
        lines.append("tries-again yes")
    done = Path(run_dir) / "DONE"
    # An older DONE may belong to a shorter run that this job extends.
    if words[0] in _WITH_MARKER and is_there(done) and 0 < submitted < int(patiently(done, done.stat).st_mtime):
        lines.append("may-be-done yes")
    if replaced := [name for name in _REPLACING if name in environ]:
        lines.append(
            f"say {' and '.join(replaced)} may have replaced options of this script (see `scontrol show job`): unset "
            "it for sbatch"
        )
    return [*lines, f"state {state}", f"s3 {store_address(words, environ)}"]


def _submit_time(facts: Facts, state: Path) -> int:
    """Returns when Slurm got this job, in Unix seconds. If Slurm does not answer now, its answer to `patchline submit`
    counts. Returns 0 if nobody knows, as for a job that plain sbatch submitted."""
    said = _text(facts, "submitted")
    if said.isascii() and said.isdecimal() and len(said) < 12:
        return int(said)
    with suppress(UserError):  # the record cannot be read
        job = recorded_in(state).get(_text(facts, "job"))
        return (job.submitted if job else None) or 0
    return 0


def start_of(words: Sequence[str], facts: Facts) -> list[str]:
    """Returns the stage's run directory and the script's settings. Raises UserError if the stage cannot run with these
    settings."""
    from jobs.cluster.settings import seconds_of  # noqa: PLC0415 - loads the reader of settings

    if len(words) < 2 or not _STAGE.fullmatch(words[0]) or words[1].startswith("-"):
        raise UserError("usage: sbatch [OPTIONS] slurm/stage.sbatch STAGE RECIPE [--field VALUE ...]")
    run_dir, has_marker = value_in(words, "--run-dir"), words[0] in _WITH_MARKER
    if not run_dir.isprintable() or (has_marker and (not run_dir or "://" in run_dir)):
        raise UserError(f"--run-dir is {shown_value(run_dir)}; {words[0]} needs a folder that all nodes share")
    retries = _number_of(facts, "retries", default=2, most=100)
    margin = _number_of(facts, "margin", default=120, most=86_400)
    spares = _number_of(facts, "spares", default=0, most=int(_text(facts, "nodes")) - 1)
    launcher = _text(facts, "launcher") or "srun"
    if launcher not in _LAUNCHERS:
        raise UserError(f"PATCHLINE_LAUNCHER is {shown_value(launcher)}; allowed: {', '.join(_LAUNCHERS)}")
    limit = seconds_of(_text(facts, "limit"))
    if limit is not None and limit <= margin:
        raise UserError(
            f"the time limit is {limit} s, and the ranks are asked to save {margin} s before it: raise --time, or "
            "lower --signal=B:USR1@SECONDS and PATCHLINE_MARGIN with it, to no less than a step and a save take"
        )
    marker = "yes" if has_marker else ""
    warnings, measured = [], 0.0
    if has_marker and limit is not None:
        with suppress(OSError, UserError):  # a run that cannot be read is judged by its ranks
            measured = save_seconds(Path(run_dir))
    if 2 * measured >= margin:
        warnings = [
            f"say warning: a save of this run takes {measured:,.0f} s (the median of the last {NUM_SAVES}); at its "
            f"time limit the run has {margin} s to end the save that is being written and make its last one: raise "
            f"margin_seconds to {int(2 * measured) + 1} or more (by hand: --signal=B:USR1@SECONDS and "
            "PATCHLINE_MARGIN)"
        ]
    return [
        *warnings,
        f"run-dir {run_dir}",
        f"has-marker {marker}",
        f"retries {retries}",
        f"spares {spares}",
        f"launcher {launcher}",
    ]


def _number_of(facts: Facts, name: str, *, default: int, most: int) -> int:
    """Returns the number in PATCHLINE_NAME, or `default` if it is empty. Raises UserError unless it is from 0 to
    `most`."""
    text = _text(facts, name) or str(default)
    if not _NUMBER.fullmatch(text) or int(text) > most:
        raise UserError(f"PATCHLINE_{name.upper()} is {shown_value(text)}; allowed: 0 to {most}")
    return int(text)


def store_address(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns HOST:PORT of the S3 store. It is empty if no argument names one, if there is a proxy, or if AWS's
    configuration may name another endpoint."""
    if not any("s3://" in word for word in words) or any(environ.get(name) for name in _PROXIES):
        return ""
    url = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", "")
    if not url:
        path = Path(environ.get("AWS_CONFIG_FILE") or Path(environ.get("HOME", "")) / ".aws" / "config")
        with suppress(OSError):
            if "endpoint_url" in (_content(path) or ""):
                return ""
        url = f"https://s3.{environ.get('AWS_REGION') or 'us-east-1'}.amazonaws.com"
    host = url.rpartition("://")[2].partition("/")[0]
    if not re.search(r":[0-9]+$", host):
        host += ":443" if url.startswith("https:") else ":80"
    return host.replace("[", "").replace("]", "")  # IPv6 addresses have brackets; the port follows the last colon


def _try_facts(facts: Facts) -> TryFacts:
    exits, run_dir, has_marker = Path(_text(facts, "exits")), Path(_text(facts, "run-dir")), _text(facts, "has-marker")
    full, stop, state = _text(facts, "full"), run_dir / "STOP", Path(_text(facts, "state"))
    return TryFacts(
        codes={} if full else _codes(exits),
        nodes=_names(facts, "nodes"),
        num_ranks=int(_text(facts, "ranks")),
        ranks_per_node=int(_text(facts, "ranks-per-node")),
        has_marker=bool(has_marker),
        full=full,
        stop=str(stop) if has_marker and is_there(stop) else "",
        is_asked=bool(_text(facts, "asked")),
        has_saved=bool(_text(facts, "run-dir")) and _has_saved(run_dir, exits / "started"),
        idle=_idle(facts, state),
        number=int(_text(facts, "try")),
        retries=int(_text(facts, "retries")),
    )


def _codes(exits: Path) -> dict[int, int | None]:
    """Reads the exit codes that ranks left, in the order in which the ranks ended. Raises OSError if their folder
    cannot be seen from here, for example in a container."""
    patiently(exits, (exits / "started").stat)
    codes: dict[int, int | None] = {}
    for path in sorted(exits.glob("rank-*"), key=lambda path: patiently(path, path.stat).st_mtime_ns):
        rank, content = path.name.removeprefix("rank-"), _content(path)
        text = content[:8].strip() if content is not None else "?"
        if rank.isdecimal() and (not text or (_NUMBER.fullmatch(text) and len(text) < 4)):
            codes[int(rank)] = int(text) if text else None  # an empty file: the disk had no room for the code
    return codes


def _has_saved(run_dir: Path, started: Path) -> bool:
    """Whether the run has saved something, or recorded a lost shard, since the file `started` was touched. If
    checkpoints are kept elsewhere (--checkpoint.url), looks at the ledger instead, which gets a line for each
    checkpoint."""
    if not is_there(started):
        return False
    begin, checkpoints = patiently(started, started.stat).st_mtime_ns, run_dir / "checkpoints"
    found = checkpoints.rglob("MANIFEST.json") if is_a_folder(checkpoints) else [run_dir / "ledger.jsonl"]
    paths = (run_dir / "quarantine" / "shards.jsonl", *found)
    return any(patiently(path, path.stat).st_mtime_ns > begin for path in paths if is_there(path))


def _idle(facts: Facts, state: Path) -> int:
    """Returns how many tries in a row saved nothing new, in this job and earlier ones. If the script could not write
    the count to the file `idle`, it sends the count. Anything but a single digit counts as 0."""
    text = _text(facts, "idle")
    if not text:
        with suppress(OSError):
            text = (_content(state / "idle") or "")[:8].strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) == 1 else 0


def _nodes(facts: Facts) -> list[str]:
    """Returns the lines that name the ranks' nodes, and a port that is free on this node and on the ranks' first
    node."""
    choice = chosen(_check_facts(facts))
    lines = [f"say {line}" for line in choice.says]
    lines += [f"nodes {' '.join(choice.nodes)}", f"left-out {','.join(choice.left_out)}", f"store {choice.store}"]
    addresses = dict(line.split(" ", 1) for line in facts.get("address", ()) if " " in line)
    hosts = dict.fromkeys(("127.0.0.1", *(addresses[name] for name in choice.nodes[:1] if name in addresses)))
    job, start, number = (int(_text(facts, key)) for key in ("job", "restart", "try"))
    free = (port for port in ports_of(job=job, start=start, number=number) if not any(_listens(h, port) for h in hosts))
    if port := next(free, 0):
        lines.append(f"port {port}")
    return [*lines, *(_lines_of(choice.decision) if choice.decision else ())]


def _listens(host: str, port: int) -> bool:
    """Whether something listens on this port."""
    try:
        socket.create_connection((host, port), timeout=_REACH_SECONDS).close()
    except OSError:
        return False
    return True


def _check_facts(facts: Facts) -> CheckFacts:
    found = [match for line in facts.get("checked", ()) if (match := _CHECKED.fullmatch(line))]
    state, has_store = Path(_text(facts, "state")), bool(_text(facts, "s3"))
    crashes = _crashes(state / "crashes", _text(facts, "job"))
    return CheckFacts(
        nodes=_names(facts, "nodes"),
        num_needed=int(_text(facts, "needed")),
        answers={
            one[1]: (int(one[2]) if one[2] else None, faults_of(_found_in(one[3] or ""), has_store=has_store))
            for one in found
        },
        is_checked=_text(facts, "checks") != "0",
        has_store=has_store,
        server_clock=int(_text(facts, "server-clock")),
        seconds=int(_text(facts, "seconds")),
        crashes={name: crashes.count(name) for name in crashes},
        folder=_text(facts, "run-dir") or "this folder",
        idle=_idle(facts, state),
        partition=_partition(facts),
    )


def _found_in(line: str) -> dict[str, str]:
    """Returns the values in a node's line, such as {"shared": "", "shm-kib": "65536"}."""
    words = (word.partition("=") for word in line.split())
    return {name: value for name, _, value in words}


def _crashes(path: Path, job: str) -> list[str]:
    """Returns the nodes to which this job's crashes were attributed, one entry per crash, from the file at `path`."""
    lines = (_content(path) or "").splitlines() if is_there(path) else []
    return [line.removeprefix(f"{job} ") for line in lines if line.startswith(f"{job} ")]


def _content(path: Path) -> str | None:
    """Returns the text of a small file; None if it is something else, such as a pipe, or larger than _MOST_BYTES.
    Raises OSError if it cannot be read."""
    try:
        return read_local_file(path, most_bytes=_MOST_BYTES).decode(errors="replace")
    except InvalidDataError:
        return None


def _partition(facts: Facts) -> Partition:
    return Partition(
        job=_text(facts, "queue"),
        own=_names(facts, "own"),
        excluded=_names(facts, "excluded"),
        nodes=tuple(facts.get("slurm", ())),
    )


def _names(facts: Facts, key: str) -> tuple[str, ...]:
    return tuple(name for value in facts.get(key, ()) for name in re.split("[ ,]", value) if name)


def _text(facts: Facts, key: str) -> str:
    return facts[key][-1] if key in facts else ""


def _lines_of(decision: NextTry) -> list[str]:
    values = {name.replace("_", "-"): value for name, value in asdict(decision).items()}
    lines = [f"{key} {value}" for key, value in values.items() if value not in ("", None) and value is not False]
    if decision.crashed_on:
        lines.insert(0, f"say only ranks on {decision.crashed_on} crashed by themselves; {_LEFT_OUT}")
    return lines
