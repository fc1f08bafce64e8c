"""Which runs in the folder of a sweep count: the repetitions in its sweep.json, as long as they have its values.

A sweep again with other values or fewer seeds leaves runs behind, in `seeds` and in `earlier`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.record_leaves import read_leaves
from shards.errors import InvalidDataError
from shards.files.typed_json import parse_json
from shards.local_file import read_local_file
from shards.output.quantities import plural

_SWEEP, _MOST_BYTES = "sweep.json", 16 << 20
_MOST_NAMED = 3
_KINDS = ("tries", "seeds", "earlier")
_MOVES = "--data.url"  # a dataset may have another address by now


def sweep_of(run_dir: Path) -> Path | None:
    """The folder of the sweep that a run is of, if it has a sweep.json; None: of none."""
    folder = _plain(run_dir)
    sweep = folder.parent.parent
    return sweep if folder.parent.name in _KINDS and (sweep / _SWEEP).is_file() else None


def name_in_sweep(run_dir: Path) -> str:
    """Such as `seeds/0`."""
    folder = _plain(run_dir)
    return f"{folder.parent.name}/{folder.name}"


def read_sweep(sweep: Path) -> dict[str, Any] | None:
    """What its sweep.json says; None if that cannot be read."""
    try:
        found = parse_json(read_local_file(sweep / _SWEEP, most_bytes=_MOST_BYTES))
    except (OSError, ValueError, InvalidDataError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("seeds"), list) else None


def is_repetition(run_dir: Path, facts: Mapping[str, Any] | None) -> bool:
    """Whether the sweep of these facts lists the run among its repetitions, with the values that the run has."""
    name = name_in_sweep(run_dir)
    own = [one for one in facts["seeds"] if isinstance(one, dict) and one.get("folder") == name] if facts else []
    return bool(own) and all(_has_values(run_dir, one.get("values", {})) for one in own)


def left_out(names: Sequence[str], facts: Mapping[str, Any] | None) -> str:
    """The note on runs of a sweep, by these names, that are not its repetitions."""
    if facts is None:
        return f"its {_SWEEP} cannot be read, so its repetitions are not known; the same sweep again writes it"
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    listed = ", ".join(sorted(names)[:_MOST_NAMED])
    return f"{plural(len(names), 'run')} of the sweep that are not its repetitions: {listed}{more}"


def _has_values(folder: Path, values: Any) -> bool:
    """Whether the run's record has the values of these flags. What it does not say is no difference."""
    if not isinstance(values, dict):
        return False
    try:
        leaves = read_leaves(folder / "job.yaml")
    except (OSError, InvalidDataError):
        return not values
    return all(_is_same(leaves.get(_leaf(flag)), value) for flag, value in values.items() if flag != _MOVES)


def _plain(path: Path) -> Path:
    """From the root on, without dots, which have no name; links stay."""
    return Path(os.path.normpath(path.absolute()))


def _leaf(flag: str) -> str:
    return f"job.{flag.removeprefix('--').replace('-', '_')}"


def _is_same(recorded: str | None, given: Any) -> bool:
    if recorded is None or given == "None":
        return True
    try:
        return float(recorded) == float(given)
    except (TypeError, ValueError):
        return recorded == str(given)
