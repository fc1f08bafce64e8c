"""The checks of a machine that `patchline doctor` makes without loading torch: versions, cores, memory, disk, open
files. Pure functions (`judge_...`) judge values that the other functions read."""

import os
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from pipeline.ranks.host import available_bytes
from pipeline.training.zero.loading import TESTED, deepspeed_version
from shards.errors import Finding, judged
from shards.output.quantities import size

_GB = 10**9
_LEAST_MEMORY, _LEAST_DISK, _LEAST_SHARED = 4 * _GB, 10 * _GB, 1 * _GB
_FEW_FILES = 4096
_PYTHONS = ((3, 11), (3, 15))  # the same as in pyproject.toml
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_SHARED = Path("/dev/shm")  # noqa: S108 - looked at, never written to
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[^\]]*\])?\s*(?P<bounds>[^;]*)(?P<only>;.*)?")
_BOUND = re.compile(r"(>=|<|==)\s*([\w.*]+)")


def local_checks() -> list[Finding]:
    """Returns the findings of all checks that answer at once."""
    return [
        judge_python(sys.version_info[:3]),
        judge_versions(_installed()),
        judge_deepspeed(deepspeed_version() if version_of("deepspeed") else ""),
        judge_cores(len(os.sched_getaffinity(0)), _text(_CPU_LIMIT)),
        judge_memory(available_bytes()),
        judge_shared(shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None),
        judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    ]


def folder_check(folder: Path) -> Finding:
    """Checks the disk of the folder or, if it does not exist, of the nearest folder above it that does."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"patchline doctor")
            os.fsync(file.fileno())
        fault = ""
    except OSError as error:
        fault = error.strerror or str(error)
    return judge_disk(str(there), shutil.disk_usage(there).free, fault)


def judge_python(found: Sequence[int]) -> Finding:
    """Judges whether this Python is supported."""
    least, below = _PYTHONS
    is_ok = least <= tuple(found[:2]) < below
    todo = "install Python 3.11 to 3.14, then `make setup`"
    return judged("Python", ".".join(map(str, found)), is_ok=is_ok, todo=todo, otherwise="fault")


def judge_versions(installed: Iterable[tuple[str, str, str]]) -> Finding:
    """Judges whether all libraries are installed in versions that fit. `installed`: the name, bounds and version of
    each; the version is empty if it is missing."""
    every = list(installed)
    wrong = [
        f"{name} {found or 'is missing'}{f', needed: {bounds}' if bounds else ''}"
        for name, bounds, found in every
        if not found or not fits(found, bounds)
    ]
    shown = ", ".join(f"{name} {found}" for name, _, found in every if name in ("patchline", "torch", "numpy"))
    found = "; ".join(wrong) or f"{shown} and {len(every) - 3} others fit"
    todo = "run `make setup`, or `pip install` the versions of constraints.txt"
    return judged("libraries", found, is_ok=not wrong, todo=todo, otherwise="fault")


def judge_deepspeed(found: str) -> Finding:
    """Judges whether a run accepts this version of DeepSpeed."""
    is_ok = found in TESTED
    words = f"{found}, which is tested" if is_ok else f"{found or 'missing'}; tested: {', '.join(TESTED)}"
    todo = f"pip install deepspeed=={TESTED[-1]}, or accept it by --engine.allow-deepspeed {found}"
    return judged("DeepSpeed", words, is_ok=is_ok, todo=todo, otherwise="fault")


def judge_cores(num_cores: int, limit: str) -> Finding:
    """Judges whether a container's limit allows the use of all cores. `limit`: the text of the cgroup's cpu.max, such
    as `400000 100000` for four cores, or `max 100000`."""
    words = limit.split()
    quota = int(words[0]) / int(words[1]) if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]) else 0
    is_ok = not 0 < quota < num_cores
    found = f"{num_cores}" if is_ok else f"{num_cores} cores, of which this container may use {quota:.4g}"
    todo = f"give --threads {max(1, int(quota))}, or OMP_NUM_THREADS: more threads would wait for each other"
    return judged("cores", found, is_ok=is_ok, todo=todo)


def judge_memory(free_bytes: int) -> Finding:
    """Judges whether there is enough memory for a rank. `free_bytes`: the memory that processes may still allocate."""
    if free_bytes >= 1 << 60:
        return Finding(name="memory", status="warning", found="not known", todo="mount /proc")
    todo = "end other programs, or raise the container's limit: a rank needs 1 to 2 GB beside its model"
    return judged("memory", f"{size(free_bytes)} are free", is_ok=free_bytes >= _LEAST_MEMORY, todo=todo)


def judge_shared(free_bytes: int | None) -> Finding:
    """Judges whether there is enough room in /dev/shm, through which ranks on one machine exchange gradients.
    `free_bytes` is None if there is no /dev/shm."""
    found = f"there is no {_SHARED}" if free_bytes is None else f"{size(free_bytes)} are free in {_SHARED}"
    todo = "with several ranks per machine, give the container more (docker run --shm-size 8g, or --ipc host)"
    return judged("shared memory", found, is_ok=free_bytes is not None and free_bytes >= _LEAST_SHARED, todo=todo)


def judge_files(soft: int, hard: int) -> Finding:
    """Judges whether this process may open enough files. A limit of -1 means that there is none."""
    is_raisable = hard == resource.RLIM_INFINITY or hard >= _FEW_FILES
    todo = f"run `ulimit -n {_FEW_FILES}` first" if is_raisable else "have the administrator raise the limit (nofile)"
    return judged(
        "open files",
        "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}",
        is_ok=soft == resource.RLIM_INFINITY or soft >= _FEW_FILES,
        todo=f"for many ranks or connections, {todo}",
    )


def judge_disk(folder: str, free_bytes: int, fault: str) -> Finding:
    """Judges whether there is enough room on a disk. `fault`: why the folder cannot be written to, or empty if it can
    be."""
    if fault:
        todo = "give --folder, --out and --run-dir a folder that this user may write to"
        return Finding(name="disk", status="fault", found=f"{folder} cannot be written to: {fault}", todo=todo)
    todo = "make room; `patchline plan RECIPE --gpu h100` says how large a run's checkpoints are"
    return judged("disk", f"{size(free_bytes)} are free in {folder}", is_ok=free_bytes >= _LEAST_DISK, todo=todo)


def fits(found: str, bounds: str) -> bool:
    """Returns whether a version is within bounds such as `<2.14,>=2.11`. The part after a plus sign names the build and
    is ignored."""
    compare: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
        ">=": lambda one, other: one >= other,
        "<": lambda one, other: one < other,
        "==": lambda one, other: one[: len(other)] == other,
    }
    return all(compare[sign](_numbers(found), _numbers(bound)) for sign, bound in _BOUND.findall(bounds))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", text.partition("+")[0].partition("*")[0]))


def _installed() -> list[tuple[str, str, str]]:
    """Returns the name, bounds and version of Patchline and of its requirements, without extras."""
    found = [("patchline", "", version_of("patchline"))]
    for text in requires("patchline") or []:
        match = _REQUIREMENT.fullmatch(text)
        if match and not match["only"]:
            found.append((match["name"], match["bounds"].strip(), version_of(match["name"])))
    return found


def version_of(name: str) -> str:
    """Returns the version of an installed distribution; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:4096]
    except OSError:
        return ""
