"""One case: a reader, and edits of its valid files. Made of a seed and a number, or kept as data in cases/.

In half of the cases the checksums that enclose an edited file are made right again, so that its reader is reached.
"""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import formats
from tests.fuzz.byte_edits import Edit
from tests.fuzz.targets import TARGETS, Target

KEPT = Path(__file__).parent / "cases"
TEXTS = {"json", "json lines"}
_NUM_EDITS = (1, 1, 1, 1, 2, 2, 3)
_STRAYS = (".nfs000001", "empty", "x.json", "²", "0009-zz.json", "a\nb", "step-²")
_STRAY_TEXTS = ("", "{}", "null", "[1]", "\xff", '{"token": "x"}', "x" * 1000)


@dataclass(frozen=True, kw_only=True)
class Case:
    """`edits`: (file, format, edit ...) each, in order. `way`: which of the target's readers reads the result.
    `outcome`: what was wrong when the case was found. `note`: how its files were made, for people."""

    target: str
    way: str
    edits: tuple[Edit, ...]
    is_sealed: bool
    outcome: str = ""
    note: str = ""

    def to_json(self) -> str:
        """For people to read, and to keep."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=True) + "\n"


def case_from_json(text: str) -> Case:
    """A kept case."""
    fields: dict[str, Any] = json.loads(text)
    return Case(**fields | {"edits": tuple(fields["edits"])})


def make_case(target: Target, valid: Path, *, seed: int, number: int) -> Case:
    """Case `number` of a seed; the same files give the same case."""
    rng = Random(f"{seed} {target.name} {number}")
    files = sorted((path, kind) for pattern, kind in target.files.items() for path in _matches(valid, pattern))
    way = sorted(target.ways)[number % len(target.ways)]
    name, kind = rng.choice(files)
    data, edits = (valid / name).read_bytes(), []
    for _ in range(rng.choice(_NUM_EDITS)):
        edit = _splice(rng, data, valid, files) if rng.random() < 0.05 else formats.propose(rng, kind, data)
        edits.append([name, *edit])
        data = formats.apply(data, edit)
    if target.strays and rng.random() < 0.5:
        path = f"{rng.choice(target.strays)}/{rng.choice(_STRAYS)}"
        edits = [[path, *formats.whole(rng.choice(_STRAY_TEXTS).encode("latin-1"))]]
    is_sealed = target.seal is not None and rng.random() < target.sealed_share
    return Case(target=target.name, way=way, edits=tuple(edits), is_sealed=is_sealed)


def prepare(case: Case, valid: Path, folder: Path) -> None:
    """Copies the valid files to `folder` (replacing what is there) and makes the case's edits."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(valid, folder)
    for name, *edit in case.edits:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(formats.apply(path.read_bytes() if path.exists() else b"", edit))
    target = TARGETS[case.target]
    if case.is_sealed and target.seal:
        target.seal(folder, sorted({name for name, *_ in case.edits}))


def shorter(case: Case) -> list[Case]:
    """Cases with one edit less."""
    edits = case.edits if len(case.edits) > 1 else ()
    return [replace(case, edits=case.edits[:n] + case.edits[n + 1 :]) for n in range(len(edits))]


def as_data(case: Case, valid: Path) -> Case:
    """The case with the whole content of every binary file that was edited as bytes, so that it stays what it is.

    Edits of text stay edits, since they should follow its format from version to version.
    """
    edits: list[Edit] = []
    for name in dict.fromkeys(name for name, *_ in case.edits):
        own = [edit for file, *edit in case.edits if file == name]
        kinds = [kind for pattern, kind in TARGETS[case.target].files.items() if fnmatch(name, pattern)]
        if any(edit[0] == formats.BYTES for edit in own) and not set(kinds) & TEXTS:
            data = (valid / name).read_bytes()
            for edit in own:
                data = formats.apply(data, edit)
            own = [formats.whole(data)]
        edits += [[name, *edit] for edit in own]
    return replace(case, edits=tuple(edits), note=str(case.edits)[:200] if edits != list(case.edits) else "")


def _splice(rng: Random, data: bytes, valid: Path, files: list[tuple[str, str]]) -> Edit:
    """The start of this file and the end of another."""
    other = (valid / rng.choice(files)[0]).read_bytes()
    return formats.whole(data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :])


def _matches(valid: Path, pattern: str) -> list[str]:
    return [path.relative_to(valid).as_posix() for path in valid.glob(pattern) if path.is_file()]
