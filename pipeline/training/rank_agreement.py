"""Before anything else, the ranks compare what they are about to run: versions, code, data, job and what they can do.

Ranks that differ train one model all the same, and a wrong one: a node with an old installation or an old copy of the
dataset is noticed by nobody. So the first exchange after joining is a digest of everything that must be equal, 64 bytes
per rank; only if digests differ do the ranks exchange what is behind them, and all end with the same message.
"""

import hashlib
import json
import platform
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from pipeline.ranks.arrival import ranks_words
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.world import bf16_of
from pipeline.training.prepare import Prepared
from shards.config_values import flattened, shown
from shards.errors import UserError

_LIBRARIES = ("patchline", "torch", "deepspeed", "numpy")
_ROOMS = ("shards", "pipeline", "jobs", "patchline")
_CODE = "code "
_MISSING = "missing"
_MOST_LINES, _MOST_FILES = 20, 3

Facts = Mapping[str, str]


def refuse_other_runs(prepared: Prepared) -> None:
    """UserError, the same on every rank, if another rank is about to run something else. Collective."""
    if prepared.world.num_ranks > 1:
        refuse_disagreement(facts_to_agree(prepared), device=prepared.world.device)


def refuse_disagreement(facts: Facts, *, device: torch.device) -> None:
    """UserError, the same on every rank, unless the facts are equal on all ranks. Collective."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    if len(set(gather_json(digest, device=device))) == 1:
        return
    lines = disagreements(gather_json(dict(facts), device=device))
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    listed = "\n".join(f"  {line}" for line in [*lines[:_MOST_LINES], *more])
    raise UserError(
        f"the ranks are not about to run the same thing:\n{listed}\n"
        "Start all ranks with the same command, from the same installation, on the same data"
    )


def disagreements(facts: Sequence[Facts]) -> list[str]:
    """A line for every fact that differs: which ranks have what, those with the rarest value first. Pure. `facts`: of
    each rank, in rank order."""
    names = dict.fromkeys(name for each in facts for name in each)
    different = [name for name in names if len({each.get(name) for each in facts}) > 1]
    files = [name for name in different if name.startswith(_CODE)]
    lines = [f"{name}: {_groups(facts, [name])}" for name in different if name not in files]
    if files:
        some = ", ".join(name.removeprefix(_CODE) for name in files[:_MOST_FILES])
        others = f" and {len(files) - _MOST_FILES} other files" if len(files) > _MOST_FILES else ""
        lines.append(f"code, in {some}{others}: {_groups(facts, files)}")
    return lines


def facts_to_agree(prepared: Prepared) -> dict[str, str]:
    """What must be the same on every rank, by its name in the message."""
    job, held_out = prepared.job, prepared.held_out
    facts: dict[str, object] = {"python": platform.python_version()}
    facts |= {name: version(name) for name in _LIBRARIES}
    if job.engine.precision == "auto":  # the ranks would have to choose
        facts["bf16"] = bf16_of(prepared.world.device).reason
    if job.engine.compile == "auto":
        facts["torch.compile"] = "works" if prepared.is_compiled else "is not used"
    if job.engine.float8 != "off" and find_spec("torchao"):
        facts["torchao"] = version("torchao")
    facts |= {name: value for name, value in flattened(prepared.stream.start.to_json()).items() if _is_of_data(name)}
    facts["held-out dataset"] = None
    facts |= {f"held-out dataset {name}".strip(): one.fingerprint for name, one in held_out.items()}
    if fewshot := prepared.fewshot:
        facts |= {"few-shot dataset": fewshot.train.fingerprint, "few-shot test dataset": fewshot.test.fingerprint}
    facts |= flattened(asdict(job))
    return {name: shown(value) for name, value in facts.items()} | code_facts(Path(__file__).resolve().parents[2])


def _is_of_data(name: str) -> bool:
    """Whether a field of a position tells of the data; the others are fields of the job, too."""
    return name not in ("decoder.libjpeg", "decoder.huffman") and name.partition(".")[0] in (
        "dataset",
        "subset",
        "held_out",
        "mix",
        "decoder",
        "order_version",
    )


def code_facts(root: Path) -> dict[str, str]:
    """The crc32 of every Python file of ours below the folder that holds the rooms, by its path."""
    paths = sorted(path for room in _ROOMS for path in (root / room).rglob("*.py"))
    return {_CODE + path.relative_to(root).as_posix(): f"{zlib.crc32(path.read_bytes()):08x}" for path in paths}


def _groups(facts: Sequence[Facts], names: Sequence[str]) -> str:
    """`ranks 3, 7: 2.12.0; the other 14: 2.13.0`. Several facts are shown as one digest."""
    ranks_of: dict[str, list[int]] = {}
    for rank, each in enumerate(facts):
        values = [each.get(name, _MISSING) for name in names]
        value = values[0] if len(values) == 1 else f"{zlib.crc32(json.dumps(values).encode()):08x}"
        ranks_of.setdefault(value, []).append(rank)
    groups = sorted(ranks_of.items(), key=lambda group: (len(group[1]), -group[1][0]))
    last_value, last_ranks = groups[-1]
    words = [f"{ranks_words(ranks)}: {value}" for value, ranks in groups[:-1]]
    last = f"the other {len(last_ranks)}" if len(last_ranks) > 1 else ranks_words(last_ranks)
    return "; ".join([*words, f"{last}: {last_value}"])
