"""The second phase of packing makes the frozen plan, which says which image becomes which sample of which shard.

plan.json has the sha256 of the plan's other files and is written last. Its own sha256 is the plan's hash, which every
shard records.
"""

import json
import logging
import shlex
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any

from shards.config_values import Range, as_lines, differences, shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.typed_json import parse_json, record_from
from shards.manifest import FORMAT_VERSION, MANIFEST_PATH, MOST_SAMPLES, sha256_hex
from shards.packing.config import PackSpec
from shards.store import MissingObjectError, Store

PLAN_PATH = "plan/plan.json"
DROPPED_PATH = "plan/dropped.parquet"
MATCHES_PATH = "plan/matches.parquet"
log = logging.getLogger(__name__)
Count = Annotated[int, Range(0, MOST_SAMPLES)]


class AdoptedError(ValueError):
    """The file is not a plan, but the record of tars that `patchline index` has indexed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The content of plan.json. `files`: the sha256 of every other file below plan/.

    `num_quarantined` of the scanned images are in no shard: `num_refused` cannot be packed, `num_unlabeled` have no
    label, and the rest are copies (`num_duplicates`, `num_evaluation`) or in the other split. `num_relabelled`
    duplicates have other labels than the image that stays. `evaluation_sets`: the fingerprint of each set.
    """

    format_version: int
    settings: dict[str, Any]
    versions: dict[str, str]
    label_names: tuple[str, ...]
    num_samples: Count
    num_quarantined: Count
    num_refused: Count
    num_unlabeled: Count
    num_duplicates: Count
    num_relabelled: Count
    num_evaluation: Count
    num_shards: Count
    evaluation_sets: dict[str, str]
    files: dict[str, str]

    @cached_property
    def hash(self) -> str:
        """The sha256 of plan.json."""
        return sha256_hex(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Returns JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, indent=1).encode() + b"\n"

    @staticmethod
    def from_bytes(data: bytes) -> "Plan":
        """Reads plan.json. Raises ValueError for another format version and for impossible values."""
        try:
            found = parse_json(data)
            if isinstance(found, dict) and "adopted" in found:
                raise AdoptedError("a record of tars made by others, no plan")
            refuse_other_format(found)
            return record_from(Plan, found)
        except AdoptedError:
            raise
        except ValueError as error:
            raise ValueError(f"not a plan: {error}") from error


@dataclass(frozen=True, kw_only=True)
class AdoptedRecord:
    """The fields of plan.json that are read after `patchline index` has adopted tars, named as in a plan."""

    settings: dict[str, object]
    label_names: tuple[str, ...]
    num_samples: Count
    num_quarantined: Count
    versions: dict[str, str] = field(default_factory=dict)
    evaluation_sets: dict[str, str] = field(default_factory=dict)
    num_relabelled: Count = 0

    @staticmethod
    def from_bytes(data: bytes) -> "AdoptedRecord":
        """Reads the record. Raises ValueError if the data is not one."""
        found = parse_json(data)
        refuse_other_format(found)
        known = {field.name for field in fields(AdoptedRecord)}
        return record_from(AdoptedRecord, {name: value for name, value in found.items() if name in known})


def plan_record(data: bytes, *, is_adopted: bool) -> Plan | AdoptedRecord:
    """Reads plan.json. Raises ValueError if it is not a plan or, with `is_adopted`, not a record of adopted tars."""
    return AdoptedRecord.from_bytes(data) if is_adopted else Plan.from_bytes(data)


def refuse_other_format(found: Any) -> None:
    """Raises ValueError for a plan.json of another format version."""
    if not isinstance(found, dict) or "format_version" not in found:
        raise ValueError("not a plan: it has no format_version")
    version = found["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(f"its format version is {shown_value(version)}; this version reads {FORMAT_VERSION}")


def read_plan(store: Store, spec: PackSpec, *, may_replan: bool = False) -> Plan | None:
    """Returns the plan in the store, or None if there is none yet. Raises UserError if the plan cannot be used, or was
    made with other settings.

    `may_replan`: the caller makes a new plan if there is none. Unless a shard is written, a plan of other settings then
    counts as none, and the log says so.
    """
    try:
        plan = Plan.from_bytes(store.read(PLAN_PATH))
    except MissingObjectError:
        return None
    except AdoptedError:
        message = f"{store.url} holds an index of tars made by others (patchline index)"
        raise UserError(f"{message}; give another --out") from None
    except ValueError as error:
        todo = f"delete {PLAN_PATH} there and pack again, or give another --out"
        raise UserError(f"{store.url}/{PLAN_PATH} is {error}; {todo}") from error
    if different := differences(plan.settings, spec.settings()):
        what = f"{store.url} is planned with other settings:\n{as_lines(different)}"
        if may_replan and not has_shards(store):
            log.info("%s\nNo shard is written yet, so it is planned again with these", what)
            return None
        raise UserError(f"{what}\nUse those of before, or another --out. {_to_pack_again(store.url)}")
    if plan.num_shards != -(-plan.num_samples // spec.samples_per_shard):
        what = f"says {plan.num_shards} shards for {plan.num_samples} samples, {spec.samples_per_shard} per shard"
        raise InvalidDataError(f"{store.url}/{PLAN_PATH} {what}; delete it and pack again")
    return plan


def has_shards(store: Store) -> bool:
    """Whether any shard is written."""
    return store.exists(MANIFEST_PATH) or next(iter(store.list("shards")), None) is not None


def _to_pack_again(url: str) -> str:
    """Returns how to remove a plan; a command is on a line of its own, so that it can be copied."""
    paths = [f"{url}/{name}" for name in ("plan", "work", "manifest.json")]
    if "://" in url:
        return f"To pack it again, delete {', '.join(paths)}"
    return f"To pack it again:\n  {shlex.join(['rm', '-rf', *paths])}"


def refuse_other_versions(plan: Plan, spec: PackSpec) -> None:
    """Raises UserError if the versions of libraries are not the plan's, since they could write other bytes."""
    different = differences(plan.versions, spec.versions())
    if different:
        what = f"the plan was made with other versions of libraries:\n{as_lines(different)}"
        raise UserError(f"{what}\nInstall the plan's versions, or pack again into another --out")
