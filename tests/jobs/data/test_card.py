"""The card is written beside the manifest, in a folder and on S3; the dataset still verifies."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.data.card import CardJob, run, use_of
from jobs.data.verify import VerifyJob
from jobs.data.verify import run as verify
from jobs.recipes import pretrain
from shards.card.facts import CardFacts, gather_facts
from shards.dataset import open_dataset
from shards.manifest import MANIFEST_PATH
from shards.pages.page import whole_flags
from shards.store import open_store
from tests.rigs.card_datasets import Sample, write_dataset
from tests.rigs.datasets import file_hashes, packed_folders
from tests.rigs.images import image_bytes
from tests.rigs.processes import patchline


def test_only_the_card_is_written(tmp_path: Path) -> None:
    out = packed_folders(tmp_path)
    before = file_hashes(out)
    assert run(CardJob(url=str(out))) == 0
    after = file_hashes(out)
    assert after.pop("card.html")
    assert after == before
    assert verify(VerifyJob(url=str(out), deep=True)) == 0


def test_on_s3(s3_bucket: str) -> None:
    url = f"s3://{s3_bucket}/sets/birds"
    write_dataset(open_store(url), [[Sample(image=image_bytes(shard))] for shard in range(3)], ["a"])
    write_dataset(open_store(f"{url}-test"), [[Sample()]], ["a"])
    assert run(CardJob(url=url, num_mosaic=2)) == 0
    page = open_store(url).read("card.html").decode()
    assert "<title>birds" in page
    assert page.count("<img ") == 2
    data = f"--data.url {url} --evaluation.url {url}-test --run-dir runs/birds"
    commands = f"pretrain photos_smoke {data}", f"finetune photos --initial.weights WEIGHTS {data}-tuned"
    for command in commands:
        drawn = whole_flags(f"<code>patchline {command}</code>")
        assert drawn in page
        page = page.replace(drawn, "")
    assert s3_bucket not in page


def facts_of(url: Path | str, *samples: Sample, split: str = "train", kind: str = "folder") -> CardFacts:
    store = open_store(str(url))
    manifest = write_dataset(store, [samples or [Sample()]], ["a", "b"], settings={"source": {"kind": kind}})
    store.write(MANIFEST_PATH, replace(manifest, split=split).to_bytes())
    return gather_facts(open_dataset(str(url)), num_tiles=0)


def commands_of(facts: CardFacts, *, has_test: bool = False) -> list[str]:
    use = use_of(facts, has_test=has_test)
    assert use is not None
    return [command for _, command in use.commands]


@pytest.mark.parametrize(
    ("url", "facts", "command"),
    [
        ("birds", {}, "pretrain photos_smoke --data.url birds --run-dir runs/birds"),
        ("my birds;rm", {}, "pretrain photos_smoke --data.url 'my birds;rm' --run-dir 'runs/my birds;rm'"),
        ("d", {"kind": "digits"}, "pretrain digits_smoke --data.url d --run-dir runs/d"),
        ("b-test", {"split": "test"}, "evaluate runs/b --data.url b-test"),
        ("d-test", {"split": "test", "kind": "digits"}, "evaluate runs/d --data.url d-test"),
        ("a\nb", {}, "pretrain photos_smoke --data.url URL --run-dir 'runs/a\\nb'"),
    ],
    ids=["as it is", "quoted", "digits", "a test split", "the digits' test split", "not to be copied"],
)
def test_the_command_that_uses_it(
    url: str, facts: dict[str, str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands_of(facts_of(url, **facts))[0] == f"patchline {command}"
    stage, second = shlex.split(command)[:2]
    assert stage == "evaluate" or second in pretrain.RECIPES


def test_several_labels_need_the_sigmoid_loss(tmp_path: Path) -> None:
    assert all(" --loss sigmoid " in one for one in commands_of(facts_of(tmp_path, Sample(labels=(0, 1)))))
    assert use_of(facts_of(tmp_path / "none", Sample(labels=()))) is None


def test_the_commands_train_and_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed_folders(tmp_path).rename("my photos")
    facts = gather_facts(open_dataset("my photos"), num_tiles=0)
    assert not any("--evaluation" in one for one in commands_of(facts)), "no test set is beside it"
    shutil.copytree("my photos", "my photos-test")
    first, second = (shlex.split(one)[1:] for one in commands_of(facts, has_test=True))
    tiny = ["--steps", "1", "--schedule.warmup-steps", "0", "--global-batch", "8", "--model.depth", "1"]
    for words in ([*first, *tiny], ["show", *second]):
        ended = patchline(*words)
        assert ended.code == 0, ended.errors
    (line,) = (tmp_path / "runs" / "my photos" / "metrics.jsonl").read_text().splitlines()
    assert "test_accuracy" in line
