"""Makes the checksums of edited files right again, as an attacker would, so that what is behind them is reached."""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError)

_DIGEST = b', "digest": "'  # the last field of a manifest that has one; it is of all bytes before it


def dataset(folder: Path, changed: list[str]) -> None:
    """The manifest's checksums and sizes."""
    _update(folder / "manifest.json", lambda fields: _of_dataset(fields, folder, changed))


def checkpoints(folder: Path, changed: list[str]) -> None:
    """The manifest's checksums of its rank files, and its digest of itself."""
    for path in {(folder / name).parent / "MANIFEST.json" for name in changed}:
        if not all(name.endswith(path.name) for name in changed):
            _update(path, lambda fields, parent=path.parent: _of_checkpoint(fields, parent))
        _seal(path)


def attempts(folder: Path, changed: list[str]) -> None:
    """The digests of attempts' records."""
    for name in changed:
        _seal(folder / name)


def best(folder: Path, changed: list[str]) -> None:
    """The digest in best.json."""
    del changed
    _seal(folder / "best.json")


def own_weights(folder: Path, changed: list[str]) -> None:
    """The hash of config.json in the tensors' header."""
    path = folder / "model.safetensors"
    if "config.json" not in changed or path.name in changed:
        return
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    save_file(load_file(path), path, metadata=metadata | {"config_sha256": digest})


def done(folder: Path, changed: list[str]) -> None:
    """The hash of the weights in DONE, and its digest."""
    del changed
    digest = hashlib.sha256((folder / "weights" / "model.safetensors").read_bytes()).hexdigest()
    _update(folder / "DONE", lambda fields: fields.update(weights_sha256=digest))
    _seal(folder / "DONE")


def _seal(path: Path) -> None:
    """The digest of a file that has one."""
    body, mark, _ = path.read_bytes().rpartition(_DIGEST)
    if mark:
        path.write_bytes(body + mark + hashlib.sha256(body).hexdigest().encode() + b'"}\n')


def _update(path: Path, change: Any) -> None:
    """Changes a JSON file; one that is no JSON any more, or without the fields to change, stays as it is."""
    try:
        fields = json.loads(path.read_bytes())
        change(fields)
    except _UNREADABLE:
        return
    path.write_text(json.dumps(fields) + "\n")


def _of_dataset(fields: dict[str, Any], folder: Path, changed: list[str]) -> None:
    for name in changed:
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if name in fields["files"]:
            fields["files"][name] = digest
        if name == "plan/plan.json":
            fields["plan_hash"] = digest
        for shard in fields.get("shards", ()):
            if shard["path"] == name:
                shard |= {"sha256": digest, "num_bytes": (folder / name).stat().st_size}


def _of_checkpoint(fields: dict[str, Any], folder: Path) -> None:
    for name, record in fields["files"].items():
        data = (folder / name).read_bytes()
        record["num_bytes"] = len(data)
        size = record["part_bytes"]
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        record["sha256"] = [hashlib.sha256(part).hexdigest() for part in parts]
