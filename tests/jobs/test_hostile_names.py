"""Names from data, settings, weights and servers cannot act on the terminal, nor forge a line of the log."""

import hashlib
import json
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import patchline as patchline_names
from jobs import exit_codes
from pipeline.data.evaluation import label_map
from shards.dataset import open_dataset as open_packed
from shards.errors import PrintableError
from tests.rigs.datasets import packed_folders
from tests.rigs.hostile import HOSTILE, HOSTILE_LINE, assert_harmless
from tests.rigs.images import class_folders, image_bytes, png_with_profile
from tests.rigs.processes import Ended, patchline
from tests.rigs.training import pretrain_words
from tests.rigs.web import web_server

ON_DISK = HOSTILE.replace("/", "")
ON_ONE_LINE = "".join(ON_DISK.splitlines())  # no label has a line break
PROFILE = HOSTILE_LINE.encode("latin-1", "replace")[:70]
MANY = ("--max-quarantined", "0.5")
LONG = "x" * 1_000_000


def harmless(*words: str, **environ: str) -> Ended:
    """Runs the command and checks what it says."""
    ended = patchline(*words, environ=environ)
    assert_harmless(ended.output)
    assert_harmless(ended.errors)
    return ended


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 samples of 3 classes, in a folder with a plain name."""
    return packed_folders(tmp_path_factory.mktemp("hostile"))


def test_names_of_files_and_classes(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=2, images_a_class=20)
    for plain in list(root.iterdir()):
        folder = plain.rename(root / (plain.name + ON_ONE_LINE))
        (folder / f"no image{ON_DISK}.jpg").write_bytes(b"no image")
        (folder / f"{ON_DISK}.png").write_bytes(png_with_profile(PROFILE + plain.name.encode()))
    out, run = str(tmp_path / f"out{ON_DISK}"), tmp_path / f"run{ON_DISK}"
    ended = harmless("pack", "folder", "--source.root", str(root), "--out", out, "--workers", "2", *MANY)
    assert (ended.code, "owned" in ended.errors) == (exit_codes.DONE, True)
    assert harmless("verify", out, "--deep").code == exit_codes.DONE
    assert harmless("card", out).code == exit_codes.DONE
    ended = harmless(*pretrain_words(out, run, "--evaluation.url", out, "--evaluation.every-steps", "8"))
    assert (ended.code, "libpng" in ended.errors) == (exit_codes.DONE, False), ended.errors
    weights = str(run / "weights")
    for more in ((), ("--json",)):
        scores = harmless("evaluate", "--weights", weights, "--data.url", out, *more)
        images = [str(path) for path in sorted(root.glob("*/*"))[:2]]
        predicted = harmless("predict", weights, *images, str(tmp_path / f"gone{ON_DISK}.jpg"), *more)
        assert (scores.code, predicted.code) == (exit_codes.DONE, exit_codes.FAULTS_FOUND)
        if more:
            assert json.loads(scores.output)["data_url"] == out
            assert json.loads(predicted.output.splitlines()[0])["image"] == images[0]
    assert harmless("show", str(run)).code == exit_codes.DONE
    assert harmless("diff", "pretrain", "digits_smoke", str(run)).code == exit_codes.FAULTS_FOUND


def test_a_class_with_line_breaks_is_refused(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=2, images_a_class=4)
    first = sorted(root.iterdir())[0]
    first.rename(root / (first.name + ON_DISK))
    ended = harmless("pack", "folder", "--source.root", str(root), "--out", str(tmp_path / "out"), *MANY)
    assert (ended.code, "has a line break; allowed: text on one line" in ended.errors) == (exit_codes.DONE, True)


def hostile_dataset(packed: Path, folder: Path, *, place: str) -> str:
    """A copy of the dataset with a hostile name in one place, and damaged images, so that it is quoted."""
    shutil.copytree(packed, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    if place == "source":
        files = sorted((folder / "index").glob("*.parquet"))
    else:
        files = [folder / "labels.parquet"] if place == "name" else []
    for file in files:
        table = pq.read_table(file)
        names = pa.array([f"{HOSTILE}{number}" for number in range(len(table))])
        table = table.set_column(table.column_names.index(place), place, names)
        pq.write_table(table, file)
        name = file.relative_to(folder).as_posix()
        manifest["files"][name] = hashlib.sha256(file.read_bytes()).hexdigest()
    if place == "path":
        manifest["shards"][0]["path"] = f"shards/{HOSTILE}.tar"
    elif place == "shards_url":
        manifest["shards_url"] = f"/nowhere/{HOSTILE}"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for tar in sorted(folder.glob("shards/*.tar"))[:2]:
        tar.write_bytes(tar.read_bytes()[:512].ljust(tar.stat().st_size, b"\0"))
    return str(folder)


@pytest.mark.parametrize("place", ["source", "name", "path", "shards_url"])
def test_names_in_an_index_that_a_script_of_the_users_own_reads(
    packed: Path, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody escapes its output: neither its tracebacks, with the errors behind an error, nor its log, nor what it
    prints of a dataset."""
    url, quoted = hostile_dataset(packed, tmp_path / "data", place=place), 0
    dataset = patchline_names.open_dataset(url)
    others = ("c0", "c1")
    attempts: list[Callable[[], object]] = [
        lambda: next(patchline_names.train_batches(url, global_batch=4, image_size=16, quarantine=tmp_path / "list")),
        lambda: list(dataset.evaluation_batches(batch_size=4, image_size=16)),
        lambda: list(dataset),
        lambda: label_map(dataset.dataset, others),
        lambda: label_map(open_packed(str(packed)), dataset.classes),
    ]
    for attempt in attempts:
        try:
            attempt()
        except PrintableError:
            assert_harmless(said := traceback.format_exc())
            quoted += "owned" in said
    for said in (repr(dataset), repr(dataset[len(dataset) - 1]) if place != "shards_url" else "", *caplog.messages):
        assert_harmless(said)
        quoted += "owned" in said
    assert quoted, "nothing has quoted it"


def _set_shards_url(manifest: dict[str, Any]) -> None:
    manifest["shards_url"] = f"/nowhere/{HOSTILE}"


def _set_path(manifest: dict[str, Any]) -> None:
    manifest["shards"][0]["path"] = f"shards/{HOSTILE}.tar"


def _set_sha256(manifest: dict[str, Any]) -> None:
    manifest["shards"][0]["sha256"] = HOSTILE


def _add_field(manifest: dict[str, Any]) -> None:
    manifest[HOSTILE] = HOSTILE


def _set_version(manifest: dict[str, Any]) -> None:
    manifest["format_version"] = HOSTILE


def _add_file(manifest: dict[str, Any]) -> None:
    manifest["files"][HOSTILE] = HOSTILE


@pytest.mark.parametrize(
    "edit",
    [_set_shards_url, _set_path, _set_sha256, _add_field, _set_version, _add_file],
    ids=lambda edit: edit.__name__,
)
def test_an_edited_manifest(packed: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    for path in packed.rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            copy = tmp_path / "data" / path.relative_to(packed)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path)
    manifest = json.loads((packed / "manifest.json").read_text())
    edit(manifest)
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest))
    url = str(tmp_path / "data")
    for words in (("verify", url), ("card", url), pretrain_words(url, tmp_path / "run", "--steps", "1")):
        harmless(*words)


@pytest.mark.parametrize("command", ["show", "diff", "pretrain", "help", "plan", "finetune", "evaluate"])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({HOSTILE: 1}, id="key"),
        pytest.param({"data": {HOSTILE: {HOSTILE: 1}}}, id="inner key"),
        pytest.param({"data": {"url": HOSTILE}}, id="value"),
        pytest.param({"run_dir": f"/dev/null/{HOSTILE}", "data": {"url": "x"}}, id="run directory"),
        pytest.param({"steps": HOSTILE}, id="value of another type"),
        pytest.param({"recipe": HOSTILE}, id="recipe"),
        pytest.param({"stage": HOSTILE}, id="stage"),
        pytest.param({"model": {"name": HOSTILE}}, id="model"),
        pytest.param({"data": {"url": LONG}, LONG: 1}, id="a million characters"),
    ],
)
def test_a_hostile_job(tmp_path: Path, command: str, fields: dict[str, Any]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"recipe": "digits_smoke", **fields}, allow_unicode=True))
    words = {
        "show": ["show", "pretrain", str(path)],
        "diff": ["diff", "pretrain", "digits_smoke", str(path)],
        "help": ["pretrain", str(path), "--help"],
    }
    ended = harmless(*words.get(command, [command, str(path)]))
    assert len(ended.errors) < 50_000


@pytest.mark.parametrize(
    "words",
    [
        (HOSTILE,),
        ("pretrain", HOSTILE),
        ("pretrain", "digits_smoke", f"--{HOSTILE}", "1"),
        ("pretrain", "digits_smoke", "--steps", HOSTILE),
        ("pretrain", "digits_smoke", "--data.url", HOSTILE, "--run-dir", "/dev/null/x"),
        ("show", HOSTILE),
        ("diff", HOSTILE, HOSTILE),
        ("verify", HOSTILE),
        ("verify", "\udcff\udcfe"),
        ("import", HOSTILE, "--out", HOSTILE),
        ("pack", "folder", "--source.root", HOSTILE, "--out", HOSTILE),
    ],
)
def test_hostile_words(words: tuple[str, ...]) -> None:
    assert harmless(*words).code == exit_codes.USER_MISTAKE


def test_a_hostile_server() -> None:
    xml = f"<Error><Code>{HOSTILE_LINE}</Code><Message>no &#10;12:34:56 done: forged {HOSTILE}</Message></Error>"
    body = "".join(character for character in xml if character >= " " or character in "\n\t").encode()
    with web_server() as server:
        server.serve("/bucket/data/manifest.json", body, status=403, headers={"Content-Type": "application/xml"})
        keys = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        ended = harmless("verify", "s3://bucket/data", **keys, AWS_DEFAULT_REGION="x", NO_PROXY="127.0.0.1")
    assert ended.code != exit_codes.DONE
    assert "forged" in ended.errors


def test_an_image_with_a_hostile_name_in_a_class_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jpg").write_bytes(image_bytes(1))
    (tmp_path / "d" / "labels.csv").write_text(f'path,label\na.jpg,"{HOSTILE}"\n', newline="")
    words = ("--source.root", str(tmp_path / "d"), "--source.labels-csv", "labels.csv", "--out", str(tmp_path / "o"))
    harmless("pack", "flat", *words)
