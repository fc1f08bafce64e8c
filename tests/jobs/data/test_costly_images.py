"""Images that cost far more to decode than others of their size, from `pack` to training: refused, or taken by flag."""

import json
from itertools import islice
from pathlib import Path

import pytest

from jobs.cli import main
from pipeline.data.config import DataConfig, Share
from pipeline.data.evaluation import evaluation_batches
from pipeline.data.image_dataset import ImageDataset
from pipeline.data.stream import train_batches
from pipeline.shared_settings import EvaluationTransform
from shards.dataset import open_dataset
from shards.errors import InvalidDataError, WillNotSucceedError
from shards.images.config import ImageLimits
from shards.manifest import MANIFEST_PATH, QUARANTINE_PATH
from shards.store import open_store
from shards.verifying.verify import verify_dataset
from tests.rigs.costly_images import png_of_chunks, progressive_jpeg, sequential_jpeg, webp_animation
from tests.rigs.images import class_folders
from tests.rigs.tables import read_table

COSTLY = {
    "scans.jpg": (progressive_jpeg(1500, 1500, num_scans=882), "--limits.max-scans"),
    "pixels.jpg": (progressive_jpeg(13_000, 8200, num_scans=22, band=21), "--limits.max-scan-pixels"),
    "memory.jpg": (progressive_jpeg(11_000, 11_000, num_scans=1, num_components=3), "--limits.max-memory-bytes"),
    "apart.jpg": (sequential_jpeg(11_000, 11_000, [[1], [2], [3]]), "--limits.max-memory-bytes"),
    "canvas.webp": (webp_animation(8200, 8200, num_frames=1), "--limits.max-memory-bytes"),
    "frames.webp": (webp_animation(8, 8, num_frames=65_600), "--limits.max-chunks"),
    "chunks.png": (png_of_chunks(b"IDAT", b"", num_chunks=65_600), "--limits.max-chunks"),
    "interlaced.png": (png_of_chunks(b"tEXt", b"a\0b", num_chunks=65_600, interlaced=True), "--limits.max-chunks"),
}
LIFTED = {"max-scans": 1000, "max-scan-pixels": 1 << 32, "max-memory-bytes": 1 << 31, "max-chunks": 1 << 17}
FLAGS = [word for name, value in LIFTED.items() for word in (f"--limits.{name}", str(value))]


def refusals(url: Path) -> dict[str, str]:
    """The reason by the image's own name."""
    rows = read_table(open_store(str(url)).read(QUARANTINE_PATH)).to_pylist()
    return {row["source"].rpartition("/")[2]: row["reason"] for row in rows}


def test_pack_and_index_refuse_them_and_take_them_by_the_flags_that_they_name(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=1, images_a_class=2)
    for name, (data, _) in COSTLY.items():
        (root / "c0" / name).write_bytes(data)
    words = ["pack", "folder", f"--source.root={root}", "--max-quarantined=1"]
    assert main([*words, f"--out={tmp_path / 'strict'}"]) == 0
    found = refusals(tmp_path / "strict")
    assert found.keys() == COSTLY.keys()
    assert [name for name, (_, flag) in COSTLY.items() if f"({flag} of pack and index)" not in found[name]] == []
    assert open_dataset(str(tmp_path / "strict")).manifest.limits == ImageLimits()

    assert main([*words, f"--out={tmp_path / 'lifted'}", *FLAGS]) == 0
    assert refusals(tmp_path / "lifted") == {}
    limits = open_dataset(str(tmp_path / "lifted")).manifest.limits
    assert limits == ImageLimits(**{name.replace("-", "_"): value for name, value in LIFTED.items()})

    words = ["index", str(tmp_path / "lifted" / "shards"), "--max-quarantined=1"]
    assert main([*words, f"--index-url={tmp_path / 'strict index'}"]) == 0
    assert len(refusals(tmp_path / "strict index")) == len(COSTLY)
    assert main([*words, f"--index-url={tmp_path / 'lifted index'}", *FLAGS]) == 0
    assert refusals(tmp_path / "lifted index") == {}
    assert open_dataset(str(tmp_path / "lifted index")).manifest.limits == limits


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """Seven ordinary images and c0/scans.jpg, which has 155 scans, packed with the flag that takes it."""
    root = class_folders(tmp_path / "images", num_classes=1, images_a_class=7)
    (root / "c0" / "scans.jpg").write_bytes(progressive_jpeg(40, 50, num_scans=155, band=6))
    words = ["pack", "folder", f"--source.root={root}", f"--out={tmp_path / 'data'}"]
    assert main([*words, "--limits.max-scans=155"]) == 0
    return tmp_path / "data"


def say_nothing_of_limits(url: Path) -> None:
    """The manifest of whoever packed the dataset without these limits."""
    manifest = json.loads((url / MANIFEST_PATH).read_bytes())
    assert manifest.pop("limits")["max_scans"] == 155
    (url / MANIFEST_PATH).write_text(json.dumps(manifest, sort_keys=True, indent=1) + "\n")


def trained(url: Path, quarantine: Path) -> list[str]:
    """The reasons in the quarantine list after two epochs."""
    config = DataConfig(url=str(url), lanes=1)
    with train_batches(global_batch=8, image_size=16, config=config, quarantine=quarantine) as batches:
        assert [batch.images.shape[0] for batch in islice(batches, 2)] == [8, 8]
    return [json.loads(line)["reason"] for line in quarantine.read_text().splitlines()] if quarantine.exists() else []


def scores(url: Path) -> int:
    """How many images an evaluation decodes."""
    dataset = open_dataset(str(url))
    share = Share(global_batch=4, rank=0, num_ranks=1)
    batches = evaluation_batches(
        dataset, batch_size=4, image_size=16, transform=EvaluationTransform(), share=share, threads=1
    )
    return sum(int(mask.sum()) for _, mask in batches)


def test_what_pack_has_taken_is_used_everywhere(url: Path, tmp_path: Path) -> None:
    assert trained(url, tmp_path / "quarantine.jsonl") == []
    assert scores(url) == 8
    assert len(list(ImageDataset(open_dataset(str(url))))) == 8
    assert verify_dataset(str(url), deep=True) == []


@pytest.mark.parametrize("use_library", [True, False])
def test_what_a_dataset_does_not_say_it_has_is_a_bad_sample(
    url: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_library: bool
) -> None:
    if not use_library:
        monkeypatch.setattr("pipeline.data.transform.crop_decoder", lambda: None)
    say_nothing_of_limits(url)
    what = "costly to decode: a JPEG of 155 scans; allowed: 100 (--limits.max-scans of pack and index)"
    [reason] = trained(url, tmp_path / "quarantine.jsonl")
    assert reason.startswith(f"decode: {what}")
    with pytest.raises(WillNotSucceedError, match=r"scans\.jpg.*155 scans; allowed: 100"):
        scores(url)
    with pytest.raises(InvalidDataError, match="155 scans; allowed: 100"):
        list(ImageDataset(open_dataset(str(url))))
    faults = [fault.what for fault in verify_dataset(str(url), deep=True)]
    assert any(what in fault for fault in faults)
    assert any(fault.startswith("limits are") for fault in faults)
