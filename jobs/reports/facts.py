"""Reads what `patchline report` says about a run from the run's folder. The run may still be training.

Any file except the record may be missing, half-written or damaged. Each such fault becomes a note, and the other facts
are still shown. stage.sbatch writes a line to RUN/submit/tries.jsonl for each try of a run's jobs, which says how the
try ended.
"""

import glob
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.cluster.recorded_jobs import newest_try
from jobs.origin import Nearest, is_place, nearest
from jobs.record import Leaves, is_scored, leaves_of, read_leaves
from jobs.reports.compare_names import OPTIMIZERS
from jobs.resolve import recipe_job
from jobs.stages import WITH_SMOKE
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointManifest, id_from_path, manifest_from_json
from pipeline.runs.curves import NO_CURVES, Curves, read_tail_of_curves
from pipeline.runs.facts import Notes, RunFacts, read_facts
from pipeline.runs.starts import FILE_NAME as STARTS
from pipeline.runs.starts import MOST_SECONDS, read_starts
from pipeline.runs.summary_file import read_curves
from pipeline.runs.time import RunTime, time_of, topology_of
from pipeline.shared_settings import METRICS_FILE, RECORD_FILE
from pipeline.training.reporting.ledger import ACCOUNTS
from pipeline.training.reporting.ledger import FILE_NAME as LEDGER
from shards.config_values import shown, whole_number
from shards.errors import Finding, InvalidDataError, UserError
from shards.files.local_files import (
    Line,
    each_line,
    is_finite,
    is_step,
    object_in,
    open_local_file,
    read_lines,
    read_local_file,
    read_tail,
)
from shards.files.looks import is_a_folder
from shards.output.quantities import plural
from shards.output.terminal import printable_name

_MOST_MANIFEST_BYTES, _MOST_LISTED = 256 << 20, 20
_METRICS_TAIL_BYTES = 4 << 20  # of the metrics: some 4,000 lines
_MOST_KINDS, _MOST_SAMPLES = 1000, 1_000_000
_BRACKETS, _NUMBERS = re.compile(r"\s*\([^()]*\)"), re.compile(r"\b(?:[0-9a-f]{8,}|[0-9][0-9,.]*)\b")
_TRIES_TAIL_BYTES, _CHUNK = 1 << 16, 1 << 20
_MOST_WORD = 80
_ZERO, _ONE = ("0", "0.0"), ("1", "1.0")  # as records have them: a recipe may give a float as an int
_SAID_ALREADY = ("done", "gave up", "told to stop")
_KNOWN = {
    "done": "is done",
    "stopped": "saved and stopped, and is to be continued",
    "asked to stop": "was asked to stop before it had saved anything, and is to be continued",
    "too few nodes": "found too few healthy nodes, and is to be continued",
    "ended from outside": "was ended from outside: cancelled, preempted, or started again on other nodes",
    "at fault": "was refused, or found a fault that every try would find",
    "gave up": "gave up",
    "told to stop": "was stopped by the file STOP",
}
_CRASHES = (
    (exit_codes.CRASH, "by a fault outside the program: storage, a disk, a lost worker or rank"),
    (exit_codes.OUR_BUG, "by a bug in patchline"),
    (137, "by SIGKILL"),
    (135, "by SIGBUS"),
    (139, "by SIGSEGV"),
    (134, "by SIGABRT"),
)
Change = tuple[str, str, str]


def last_try(run_dir: Path) -> tuple[Line | None, int]:
    """Returns the last usable line of tries.jsonl and its number, counted from 1; None and 0 if there is none."""
    path = run_dir / "submit" / "tries.jsonl"
    with suppress(OSError, InvalidDataError):
        tail = read_tail(path, most_bytes=_TRIES_TAIL_BYTES)
        found = tail.last(lambda line: isinstance(line.get("end"), str)) if tail else None
        if tail and found:
            lines = tail.data.split(b"\n")
            at = max(number for number, line in enumerate(lines) if object_in(line) == found)
            return found, line_breaks(path, tail.num_bytes - len(tail.data)) + at + 1
    return None, 0


def said_of_last_try(run_dir: Path) -> str:
    """Returns how the newest try ended. The text is empty while the try runs, and if the run's state already says how
    it ended."""
    line, _ = last_try(run_dir)
    is_said = line is None or line["end"] in _SAID_ALREADY or not is_newest(run_dir, line)
    return "" if is_said else f"its last try {try_words(line)}"  # type: ignore[arg-type]


def is_newest(run_dir: Path, line: Line) -> bool:
    """Whether no try has begun after the one in `line`. Each try makes a folder when it begins."""
    found = None
    with suppress(UserError):  # the storage does not answer
        found = newest_try(run_dir)
    return found is None or found == tuple(line.get(name) for name in ("job", "start", "try"))


def line_breaks(path: Path, num_bytes: int) -> int:
    """Counts the line breaks in the first `num_bytes` of a file."""
    count = 0
    with open_local_file(path) as file:
        while num_bytes > 0 and (data := file.read(min(_CHUNK, num_bytes))):
            count, num_bytes = count + data.count(b"\n"), num_bytes - len(data)
    return count


def try_words(line: Line) -> str:
    """Returns how a try ended and which sick nodes it did not use, such as `crashed (exit code 9) on n2 alone, and is
    to be continued; left out: n3`."""
    nodes = line.get("left_out")
    left_out = f"; left out: {printable_name(nodes[:_MOST_WORD])}" if isinstance(nodes, str) and nodes else ""
    return f"{_end_words(line)}{left_out}"


def _end_words(line: Line) -> str:
    end, codes = str(line["end"]), list(_codes(line))
    if end != "crashed":
        return _KNOWN.get(end, f"ended as: {end[:_MOST_WORD]}")
    named = next((words for code, words in _CRASHES if code in codes), "")
    shown = f"exit code {' and '.join(map(str, codes))}" if codes else "no rank left an exit code"
    ended = f"ended {named} ({shown})" if named else f"crashed ({shown})"
    node = line.get("crashed_on")
    alone = f" on {printable_name(node[:_MOST_WORD])} alone" if isinstance(node, str) and node else ""
    return f"{ended}{alone}, and is to be continued"


def _codes(line: Line) -> Iterator[int]:
    """Yields the exit codes of ranks that failed, at most four."""
    codes = line.get("exit_codes")
    found = [code for code in codes if type(code) is int and 0 < code < 256] if isinstance(codes, list) else []
    yield from [code for code in found if code != exit_codes.CONTINUE][:4] or found[:4]


@dataclass(frozen=True, kw_only=True)
class Bad:
    """The samples in quarantine: the number of lines and of different samples (each start of the run lists the samples
    again), the most frequent reasons with the numbers in them left out, and some of the samples."""

    num_lines: int
    num_samples: int
    reasons: tuple[tuple[str, int], ...]
    samples: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """Everything that the report shows. `last_try`: how the last try ended, if that is known and the run's state does
    not say it. `num_images`: how many images the run has trained on, including repeats. `path`: the run's folder, as it
    was given. `scored_on`: what the run's accuracy is measured on, in words. `evaluation_url`: its --evaluation.url.
    `methods`: what it is trained with beyond labels and whole images, as name and words. `changes`: settings that
    differ from the recipe, as field, the recipe's value and the run's value. `places`: paths and other fields that are
    not settings, in the same form. `environment`: names and values. `notes`: what is missing or cannot be read.
    `damaged`: the notes about files that cannot be used."""

    name: str
    run: RunFacts
    path: str = ""
    stage: str = ""
    methods: tuple[tuple[str, str], ...] = ()
    recipe: Nearest = Nearest(recipe="", num_changed=0)
    changes: tuple[Change, ...] = ()
    places: tuple[Change, ...] = ()
    num_steps: int | None = None
    num_images: int = 0
    scored_on: str = ""
    evaluation_url: str = ""
    last_try: str = ""
    curves: Curves = NO_CURVES
    time: RunTime = field(default_factory=lambda: time_of([], [], unix_end=None))
    findings: tuple[Line, ...] = ()
    quarantine: Bad = Bad(num_lines=0, num_samples=0, reasons=(), samples=())
    data: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    damaged: tuple[Finding, ...] = ()


class _Notes(Notes):
    """Collects notes on files that cannot be read."""

    @contextmanager
    def judging(self, name: str) -> Iterator[None]:
        """Turns an error inside the `with` block into a note."""
        try:
            yield
        except OSError as error:
            self.fault(name, f"{name} cannot be read: {error.strerror or error}")
        except (ValueError, InvalidDataError) as error:
            self.fault(name, f"{name} is damaged: {error}")


def gather(run_dir: Path, *, has_whole_curves: bool = True) -> ReportFacts:
    """Returns the facts of the run in a folder. Raises UserError if there is no run in it. `has_whole_curves`: whether
    to read all of its metrics, not only the end."""
    leaves = _record(run_dir)
    stage, notes = leaves["stage"], _Notes()
    num_steps = whole_number(leaves.get("job.steps", ""))
    run = read_facts(run_dir, num_steps=num_steps, is_scored=is_scored(leaves))
    notes.all, notes.damaged = list(run.reasons), list(run.damaged)
    is_running = run.state == "running"
    curves = _curves(run_dir, notes, is_running=is_running, is_whole=has_whole_curves)
    ledger, starts, findings = _ledger(run_dir, notes, is_running=is_running), [], []
    with notes.judging(STARTS):
        starts = read_starts(run_dir)
    with notes.judging("guard.jsonl"):
        findings = read_lines(run_dir / "guard.jsonl", is_usable=_is_finding).objects
    end = time.time() if is_running else run.last_seen
    manifest = _newest(run_dir, notes)
    recipe = nearest(stage, leaves, run.origin)
    changes = _changes(stage, recipe.recipe, leaves)
    return ReportFacts(
        name=run_dir.resolve().name or str(run_dir),
        path=str(run_dir),
        stage=stage,
        methods=(*_optimiser(leaves), *methods_of({name.removeprefix("job."): leaves[name] for name in leaves})),
        recipe=recipe,
        changes=tuple(one for one in changes if not is_place(one[0])),
        places=tuple(one for one in changes if is_place(one[0])),
        num_steps=num_steps,
        num_images=(run.step or 0) * (whole_number(leaves.get("job.global_batch", "")) or 0),
        scored_on=_scored_on(leaves),
        evaluation_url=leaves.get("job.evaluation.url", ""),
        run=run,
        last_try="" if run.state in ("running", "done") else said_of_last_try(run_dir),
        curves=curves,
        time=time_of(ledger, starts, unix_end=end),
        findings=tuple(findings),
        quarantine=_quarantine(run_dir, notes),
        data=_data(leaves, manifest),
        environment=_environment(manifest, topology_of(starts[-1]) if starts else ""),
        notes=tuple(notes.all),
        damaged=tuple(notes.damaged),
    )


def methods_of(settings: Leaves, *, quoted: Callable[[str], str] = printable_name) -> tuple[tuple[str, str], ...]:
    """Returns a job's teacher, SAM, and what it does to images and patches in training, each as a name and words;
    nothing for what it does without. `settings`: the values of a training job by field. `quoted`: quotes the teacher's
    name, which is that of its folder, since the rest of its path may name machines and people."""
    found = []
    if path := settings.get("teacher.weights", ""):
        found.append(("Teacher", _teacher_words(settings, quoted(_folder_of_weights(path)))))
    if (rho := settings.get("optimizer.sam_rho", "0")) not in _ZERO:
        found.append(("SAM", f"rho {rho}"))
    if sizes := _listed(settings, "tokens.patch_sizes"):
        found.append(("Patch sizes", f"{', '.join(sizes)} px, of which each step draws one"))
    if (share := settings.get("tokens.patch_dropout", "0")) not in _ZERO:
        whole = settings.get("tokens.whole_steps", "0")
        last = "" if whole == "0" else f", but none in the last {whole} steps"
        found.append(("Patch dropout", f"{share} of the patches of each image{last}"))
    phases = zip(_listed(settings, "tokens.image_sizes"), _listed(settings, "tokens.size_steps"), strict=False)
    if smaller := [f"{size} px up to step {step}" for size, step in phases]:
        found.append(("Smaller images first", ", ".join(smaller)))
    if (repeats := settings.get("data.augment.repeats", "1")) != "1":
        found.append(("Repeated augmentation", f"{repeats} views of each image"))
    return tuple(found)


def _optimiser(leaves: Leaves) -> tuple[tuple[str, str], ...]:
    """Returns the optimiser of a run as a name and words, if it is another one than AdamW and SGD."""
    name = leaves.get("job.optimizer.name", "")
    return () if name in ("", "adamw", "sgd") else (("Optimiser", OPTIMIZERS.get(name, name)),)


def _listed(settings: Leaves, name: str) -> list[str]:
    """Returns the values of a setting that is a list."""
    return [value for key, value in settings.items() if key.startswith(f"{name}.")]


def _teacher_words(settings: Leaves, name: str) -> str:
    """Returns which teacher a job has and how it learns from it."""
    is_soft, temperature = settings.get("teacher.target") == "soft", settings.get("teacher.temperature", "1")
    learned = "probabilities are" if is_soft else "most probable classes are"
    if is_soft and temperature not in _ONE:
        learned = f"probabilities at temperature {temperature} are"
    words = f"{name}; its {learned} the target for {settings.get('teacher.share')} of the loss"
    if settings.get("model.distillation_token") == "true":
        words += ", for the distillation token"
    digest = settings.get("teacher.sha256", "")
    return f"{words} (sha256 {shown(digest)})" if digest else words


def _folder_of_weights(path: str) -> str:
    """Returns the name of a run, a folder or a file of weights: `large` for runs/large/weights."""
    parts = [part for part in path.split("/") if part]
    is_inner = len(parts) > 1 and parts[-1] == "weights"
    return parts[-2 if is_inner else -1][:_MOST_WORD] if parts else "unnamed"


def _record(run_dir: Path) -> Leaves:
    advice = "give a run directory, as `patchline ls` lists them"
    try:
        leaves = read_leaves(run_dir / RECORD_FILE)
    except NotADirectoryError:
        raise UserError(f"{str(run_dir)!r} is a file; {advice}") from None
    except FileNotFoundError:
        is_there = is_a_folder(run_dir)
        what = f"no run in {str(run_dir)!r}: it has no {RECORD_FILE}" if is_there else f"no folder {str(run_dir)!r}"
        raise UserError(f"there is {what}; {advice}") from None
    except OSError as error:
        raise UserError(f"cannot read {str(run_dir / RECORD_FILE)!r}: {error.strerror}", todo=advice) from error
    except InvalidDataError as error:
        what = printable_name(str(error))  # the error may contain the folder's name
        raise UserError(f"{str(run_dir / RECORD_FILE)!r} is not the record of a run: {what}; {advice}") from error
    if leaves["stage"] not in WITH_SMOKE:
        allowed = " or ".join(WITH_SMOKE)
        raise UserError(f"{str(run_dir)!r} is of the stage {leaves['stage']!r}; reports are made of {allowed}")
    return leaves


def _scored_on(leaves: Leaves) -> str:
    """Returns what the run's accuracy is measured on, or an empty string if the run is not scored during training."""
    if is_scored(leaves | {"job.evaluation.url": ""}):  # a held-out part takes precedence over a dataset
        return "on the held-out part"
    url = leaves.get("job.evaluation.url", "")
    return f"on {url}" if url else ""


def _curves(run_dir: Path, notes: _Notes, *, is_running: bool, is_whole: bool) -> Curves:
    """Reads the curves, or their ends. While the run is running, the last line of its metrics may be half-written."""
    found = NO_CURVES
    with notes.judging(METRICS_FILE):
        path = run_dir / METRICS_FILE
        found = read_curves(path) if is_whole else read_tail_of_curves(path, most_bytes=_METRICS_TAIL_BYTES)
        num_unusable = found.num_unusable + (found.has_half_line and not is_running)
        if num_unusable:
            notes.fault(METRICS_FILE, f"{METRICS_FILE}: {plural(num_unusable, 'line')} cannot be used and left out")
        if not found.curves:
            notes.all.append(f"{METRICS_FILE} has no line yet: no curves are drawn")
    if not any(run_dir.glob("events.out.tfevents.*")):
        notes.all.append("there is no file of TensorBoard; the curves here are from metrics.jsonl and do not need it")
    return found


def _ledger(run_dir: Path, notes: _Notes, *, is_running: bool) -> list[Line]:
    """Reads the ledger's usable lines, and notes the others."""
    with notes.judging(LEDGER):
        found = read_lines(run_dir / LEDGER, is_usable=_is_of_ledger)
        num_unusable = found.num_unusable - (is_running and found.has_half_line)
        if num_unusable:
            notes.fault(LEDGER, f"{LEDGER}: {plural(num_unusable, 'line')} cannot be used; the time is from the others")
        elif not found.objects:
            notes.all.append(f"{LEDGER} has no line: nothing has been saved yet")
        return found.objects
    return []


def _is_of_ledger(line: Line) -> bool:
    seconds = line.get("seconds")
    return (
        is_step(line.get("step"))
        and _is_time(line.get("unix_time"))
        and isinstance(line.get("attempt"), str)
        and isinstance(seconds, dict)
        and all(_is_time(seconds.get(name)) for name in ACCOUNTS)
    )


def _is_time(value: object) -> bool:
    """Whether the value is a plausible number of seconds: the duration of a run, or Unix time."""
    return is_finite(value) and 0 <= value < MOST_SECONDS  # type: ignore[operator]


def _is_finding(line: Line) -> bool:
    return is_step(line.get("step")) and isinstance(line.get("kind"), str) and isinstance(line.get("action"), str)


def _quarantine(run_dir: Path, notes: _Notes) -> Bad:
    """Reads the quarantine lists of all ranks."""
    reasons: Counter[str] = Counter()
    samples: dict[str, str] = {}
    seen: set[object] = set()
    num_lines = 0
    for name in sorted(glob.glob("quarantine/rank-*.jsonl", root_dir=run_dir)):  # noqa: PTH207
        for line in _bad_lines(run_dir, name, notes):
            num_lines += 1
            reason = line["reason"][:200]
            kind = _NUMBERS.sub("…", _BRACKETS.sub("", reason))
            if kind in reasons or len(reasons) < _MOST_KINDS:
                reasons[kind] += 1
            if is_step(line.get("sample_id")) and len(seen) < _MOST_SAMPLES:
                seen.add((str(line.get("url", ""))[:200], line["sample_id"]))
            if len(samples) < _MOST_LISTED:
                samples.setdefault(str(line.get("source", line.get("sample_id")))[:1000], reason)
    return Bad(
        num_lines=num_lines,
        num_samples=len(seen),
        reasons=tuple(reasons.most_common(_MOST_LISTED)),
        samples=tuple(samples.items()),
    )


def _bad_lines(run_dir: Path, name: str, notes: _Notes) -> Iterator[Line]:
    """Yields the lines of a quarantine list. It reads them one by one, because there may be millions."""
    with notes.judging(name):
        for _, _, line in each_line(run_dir / name):
            if line is not None and isinstance(line.get("reason"), str):
                yield line


def _newest(run_dir: Path, notes: _Notes) -> CheckpointManifest | None:
    """Returns the manifest of the newest checkpoint in the run's folder; None if it cannot be read or there is none,
    for example because checkpoints are in a bucket."""
    folder = run_dir / "checkpoints"
    # Unlike Path.glob in Python 3.11, glob.glob continues if a folder is removed meanwhile.
    names = glob.glob(f"step-*/attempt-*/{MANIFEST_NAME}", root_dir=folder)  # noqa: PTH207
    found = [(one, folder / name) for name in names if (one := id_from_path(name))]
    if not found:
        notes.all.append("no checkpoint is in its folder: the data's fingerprint and the environment are not known")
        return None
    newest = max(found, key=lambda pair: (pair[0].attempt, pair[0].step))[1]
    with notes.judging(str(newest.relative_to(run_dir))):
        return manifest_from_json(read_local_file(newest, most_bytes=_MOST_MANIFEST_BYTES))
    return None


def _changes(stage: str, name: str, leaves: Leaves) -> tuple[Change, ...]:
    """Returns every field in which the run differs from the recipe `name`, including fields that only one of them has.
    The result is empty if `name` is."""
    own = {name.removeprefix("job."): value for name, value in leaves.items() if name.startswith("job.")}
    if not name:
        return ()
    recipe = leaves_of(recipe_job(stage, name))
    names = dict.fromkeys([*recipe, *own])
    return tuple(
        (name, recipe.get(name, "(no such field)"), own.get(name, "(no such field)"))
        for name in names
        if not _is_same(recipe.get(name), own.get(name))
    )


def _is_same(one: str | None, other: str | None) -> bool:
    if one == other:
        return True
    try:
        return one is not None and other is not None and float(one) == float(other)
    except ValueError:
        return False


def _data(leaves: Leaves, manifest: CheckpointManifest | None) -> tuple[tuple[str, str], ...]:
    url = leaves.get("job.data.url") or "a mixture"
    if manifest is None:
        return (("dataset", url),)
    position = manifest.position.to_json()
    skipped = [f"{one['first']:,} to {one['end'] - 1:,}" for one in position["skipped"]]
    named = (
        ("dataset", url),
        ("fingerprint", position["dataset"]),
        ("samples consumed", f"{manifest.num_samples:,}"),
        ("updates made", f"{manifest.num_updates:,}"),
        ("global batch", position["global_batch"]),
        ("seed", position["seed"]),
        ("skipped data steps", ", ".join(skipped) or "none"),
    )
    return tuple((name, str(value)) for name, value in named)


def _environment(manifest: CheckpointManifest | None, topology: str) -> tuple[tuple[str, str], ...]:
    found = [("last start", topology)] if topology else []
    record: Any = manifest.record if manifest else {}
    for group in ("topology", "engine", "bits", "versions"):
        values = record.get(group)
        if isinstance(values, dict):
            found += [(f"{group}.{name}", str(value)) for name, value in values.items() if value != ""]
    return tuple(found[:80])
