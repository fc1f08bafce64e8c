"""The values in a record (RUN/job.yaml), as text by the path of their field, a hundred times faster than as a job.

For lists of many runs: nothing is checked but the YAML. `jobs/record.py` reads a record as a job.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from jobs.job_files import MOST_BYTES, MOST_DEPTH
from shards.errors import InvalidDataError
from shards.local_file import read_local_file

_MOST_LEAVES = 4096  # a job has about 120
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, unless PyYAML was built without it
Leaves = dict[str, str]


def read_leaves(path: Path) -> Leaves:
    """`stage` and the fields of the job, such as `job.model.name`, items of lists by number. A null is "null".

    Raises OSError, and InvalidDataError if it is not a record.
    """
    data = read_local_file(path, most_bytes=MOST_BYTES)
    try:
        leaves = dict(_leaves(data))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InvalidDataError(f"it is not YAML: {line}{error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidDataError(f"it is not YAML: {str(error).partition(chr(10))[0]}") from error
    if "stage" not in leaves or not any(name.startswith("job.") for name in leaves):
        raise InvalidDataError("it has no stage and job, as a run's record has")
    return leaves


def is_scored(leaves: Leaves) -> bool:
    """Whether the model of a training job is scored while it is trained."""
    parts = ("job.data.held_out.share", "job.data.held_out.count")
    return bool(leaves.get("job.evaluation.url")) or any(leaves.get(name, "0") not in ("0", "0.0") for name in parts)


def leaves_of(job: Any) -> Leaves:
    """The same of a job in memory, without the first word `job.`."""
    return dict(_of_values("", asdict(job)))


@dataclass
class _Open:
    """A mapping or a list that is being read. `name`: of its current item, a number in a list."""

    is_list: bool
    name: str
    wants_name: bool

    def next_item(self) -> None:
        """The current item is complete."""
        self.name = str(int(self.name) + 1) if self.is_list else ""
        self.wants_name = not self.is_list


def _leaves(data: bytes) -> Iterator[tuple[str, str]]:
    """The scalars, with their paths. ValueError if they are too many or too deep; nothing here recurs."""
    opened: list[_Open] = []
    num_leaves = 0
    for event in yaml.parse(data, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias")
        if isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        elif opened and opened[-1].wants_name and isinstance(event, yaml.ScalarEvent):
            opened[-1].name, opened[-1].wants_name = event.value, False
            continue
        elif isinstance(event, yaml.ScalarEvent):
            num_leaves += 1
            if num_leaves > _MOST_LEAVES:
                raise ValueError(f"it has more than {_MOST_LEAVES:,} values")
            yield ".".join(one.name for one in opened), event.value
        elif isinstance(event, yaml.CollectionStartEvent):
            is_list = isinstance(event, yaml.SequenceStartEvent)
            if len(opened) == MOST_DEPTH or (opened and opened[-1].wants_name):
                raise ValueError("it is nested too deeply, or has a group as a name")
            opened.append(_Open(is_list=is_list, name="0" if is_list else "", wants_name=not is_list))
            continue
        if opened:
            opened[-1].next_item()


def _of_values(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _of_values(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, bool) or value is None:
        yield path, "null" if value is None else str(value).lower()
    else:
        yield path, str(value)
