"""Every reader of files that others may have written: its files and their formats, how it is called, what it may raise.

UserError is always allowed. A reader under test is named here alone; tests/fuzz/readers.py calls it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shards.errors import WillNotSucceedError
from tests.fuzz import readers, seals

Read = Callable[[Path], str | None]  # may say what it has read
Seal = Callable[[Path, list[str]], None]


@dataclass(frozen=True, kw_only=True)
class Target:
    """`files`: a pattern below the folder `valid`, and the format of the files that it matches. `ways`: who reads them.

    `seal` makes enclosing checksums right again, in `sealed_share` of the cases. `strays`: folders in which foreign
    files appear. `may_raise`: besides UserError. `num_cases`: of a test run.
    """

    name: str
    owner: str
    valid: str
    files: dict[str, str]
    ways: Mapping[str, Read]
    seal: Seal | None = None
    sealed_share: float = 0.5
    strays: tuple[str, ...] = ()
    may_raise: tuple[type[Exception], ...] = ()
    num_cases: int = 40


_DATASET: Mapping[str, Read] = {
    "loader": readers.load,
    "stream": readers.stream,
    "verify": readers.verify,
    "card": readers.card,
}


def _of_dataset(name: str, files: dict[str, str], *, num_cases: int = 28, valid: str = "dataset") -> Target:
    return Target(
        name=name, owner="data", valid=valid, files=files, ways=_DATASET, seal=seals.dataset,
        may_raise=(WillNotSucceedError,), num_cases=num_cases,
    )  # fmt: skip


_NEWEST = "checkpoints/step-00000008/*"
_ALL = (
    _of_dataset("dataset manifest", {"manifest.json": "json"}, num_cases=40),
    _of_dataset("index", {"index/*.parquet": "parquet"}, num_cases=40),
    _of_dataset("blocks", {"blocks.parquet": "parquet"}),
    _of_dataset("shard table", {"shards.parquet": "parquet"}, valid="large dataset"),
    _of_dataset("labels", {"labels.parquet": "parquet"}),
    _of_dataset("plan", {"plan/*.json": "json", "plan/*.parquet": "parquet"}),
    _of_dataset("quarantine", {"quarantine.parquet": "parquet"}),
    _of_dataset("shard tar", {"shards/*.tar": "tar"}),
    Target(
        name="checkpoint manifest", owner="ckpt", valid="training run", files={f"{_NEWEST}/MANIFEST.json": "json"},
        ways={"resume": readers.resume}, may_raise=(WillNotSucceedError,), num_cases=100,
    ),
    Target(
        name="sealed checkpoint", owner="ckpt", valid="training run", seal=seals.checkpoints, sealed_share=1.0,
        files={f"{_NEWEST}/MANIFEST.json": "json", f"{_NEWEST}/rank-*": "safetensors"},
        ways={"resume": readers.resume_resealed}, may_raise=(WillNotSucceedError,), num_cases=100,
    ),
    Target(
        name="rank file", owner="ckpt", valid="training run", files={f"{_NEWEST}/rank-*": "safetensors"},
        ways={"resume": readers.resume}, may_raise=(WillNotSucceedError,),
    ),
    Target(
        name="attempts", owner="ckpt", valid="training run", files={"checkpoints/attempts/*.json": "json"},
        ways={"resume": readers.resume}, strays=("checkpoints/attempts", "checkpoints", "checkpoints/step-00000008"),
        may_raise=(WillNotSucceedError,), seal=seals.attempts, num_cases=80,
    ),
    Target(
        name="ledger", owner="ckpt", valid="training run", files={"ledger.jsonl": "json lines"},
        ways={"ledger": readers.ledger}, num_cases=100,
    ),
    Target(
        name="best.json", owner="ckpt", valid="training run", files={"best.json": "json"},
        ways={"best": readers.best}, seal=seals.best, num_cases=60,
    ),
    Target(
        name="loggers.json", owner="ckpt", valid="training run", files={"loggers.json": "json"},
        ways={"loggers": readers.loggers}, num_cases=60,
    ),
    Target(
        name="metrics", owner="ckpt", valid="training run", files={"metrics.jsonl": "json lines"},
        ways={"metrics": readers.metrics}, num_cases=100,
    ),
    Target(
        name="facts of a run", owner="jobs", valid="training run",
        files={"metrics.jsonl": "json lines", "ledger.jsonl": "json lines", "heartbeats/*": "json", "DONE": "json"},
        ways={"ls": readers.run_facts}, num_cases=100,
    ),
    Target(
        name="leaves of a record", owner="jobs", valid="jobs", files={"job.yaml": "bytes"},
        ways={"ls": readers.record_leaves}, num_cases=100,
    ),
    Target(
        name="DONE", owner="ckpt", valid="training run",
        files={"DONE": "json", "weights/model.safetensors": "safetensors"},
        ways={"done": readers.done}, seal=seals.done, num_cases=100,
    ),
    Target(
        name="weights", owner="weights", valid="weights", seal=seals.own_weights, num_cases=100,
        files={"config.json": "json", "model.safetensors": "safetensors"}, ways={"open": readers.own_weights},
    ),
    Target(
        name="Hugging Face folder", owner="weights", valid="hugging face", num_cases=100,
        files={"*.json": "json", "model.safetensors": "safetensors"}, ways={"import": readers.foreign_weights},
    ),
    *(
        Target(
            name=f"model file {name}", owner="weights", valid="model files", files={name: kind}, num_cases=100,
            ways={"import": readers.model_file(name)},
        )
        for name, kind in (("w.npz", "zip"), ("w.pth", "zip"), ("old.pth", "bytes"), ("w.safetensors", "safetensors"))
    ),
    *(
        Target(
            name=name, owner="sources", valid="jobs", files={name: kind}, ways={"pretrain": readers.job_file(name)},
            num_cases=100,
        )
        for name, kind in (("job.yaml", "bytes"), ("record.yaml", "json"), ("own.yaml", "json"))
    ),
    Target(
        name="foreign tar", owner="sources", valid="foreign tars", files={"*.tar": "tar"}, num_cases=40,
        ways={"labels in cls": readers.index, "labels in json": readers.index_json},
    ),
    *(
        Target(name=name, owner="sources", valid="sources", files={pattern: kind}, ways={"pack": readers.pack(source)})
        for name, pattern, kind, source in (
            ("embedded Parquet", "embedded.parquet", "parquet", readers.embedded),
            ("listed Parquet", "listed.parquet", "parquet", readers.listed("listed.parquet")),
            ("listed CSV", "listed.csv", "csv", readers.listed("listed.csv")),
            ("class tar", "tars/*.tar", "tar", readers.class_tars),
        )
    ),
    Target(
        name="prepared dataset", owner="sources", valid="prepared datasets",
        files={"kitti/3.3.0/*.json": "json", "kitti/3.3.0/*-test*": "tfrecord"},
        ways={"pack": readers.pack(readers.prepared)},
    ),
    Target(
        name="images", owner="sources", valid="images", files={"*": "bytes"}, ways={"header": readers.image_header},
        num_cases=150,
    ),
)  # fmt: skip
TARGETS = {target.name: target for target in _ALL}
