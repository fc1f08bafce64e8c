"""What `patchline report` says of a wrong path, and of a run that is damaged, hostile, or being written."""

import json
import os
import signal
import stat
import threading
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from jobs.recipes.sam import vit_b16_i1k_sam
from jobs.record import write_record
from jobs.reports.facts import gather, methods_of
from jobs.reports.report import render, summary
from jobs.reports.worth import read_scores, worth_of
from pipeline.training.settings.job import TeacherConfig
from pipeline.training.settings.tokens import TokensConfig
from tests.jobs.reports.test_ls import make
from tests.rigs.browser import CHROMIUM, browser
from tests.rigs.hostile import HOSTILE, assert_harmless
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.processes import patchline
from tests.rigs.training import pretrain_words, start
from tests.rigs.vanishing import vanishes_when_listed

MARKUP = "</title></svg></script><script>document.title='owned'</script><img src=http://127.0.0.1:9/x onerror=owned>\"'"
EVIL = f"{MARKUP}{HOSTILE}"
ATTEMPT = "0001-0badcafe"
ACCOUNTS = ("compute", "data_wait", "checkpoint", "evaluation", "startup", "restarts", "paused")


def fails(*words: str) -> str:
    ended = patchline("report", *words)
    assert (ended.code, ended.output) == (2, ""), ended
    assert ended.errors.count("error: ") == 1
    assert "Traceback" not in ended.errors
    return " ".join(ended.errors.split())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        pytest.param(None, "there is no run in", id="no run"),
        pytest.param("a: [", "is not the record of a run: it is not YAML", id="no YAML"),
        pytest.param("stage: pack\njob: {out: x}\n", "is of the stage 'pack'; reports are made of", id="a dataset"),
        pytest.param("recipe: digits_smoke\n", "it has no stage and job", id="a user's file"),
    ],
)
def test_what_is_no_run_gets_one_message(tmp_path: Path, record: str | None, message: str) -> None:
    if record is not None:
        (tmp_path / "job.yaml").write_text(record)
    assert message in fails(str(tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_the_page_names_the_methods_of_a_run_whose_recipe_has_them(tmp_path: Path) -> None:
    """A setting of the recipe itself is no change."""
    job = vit_b16_i1k_sam()
    teacher = TeacherConfig(weights="/scratch/large <b>/weights", target="hard", sha256="a" * 64)
    tokens = TokensConfig(patch_dropout=0.5, image_sizes=(160,), size_steps=(40_000,))
    job = replace(job, loss="softmax", teacher=teacher, tokens=tokens)
    job = replace(job, optimizer=replace(job.optimizer, name="lamb"), model=replace(job.model, head_std=0.02))
    job = replace(job, data=replace(job.data, augment=replace(job.data.augment, repeats=3)))
    write_record(tmp_path, stage="pretrain", job=job)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    facts = gather(tmp_path)
    assert dict(facts.methods) == {
        "Optimiser": "LAMB",
        "Teacher": "large <b>; its most probable classes are the target for 1.0 of the loss (sha256 aaaaaaaaaaaa...)",
        "SAM": "rho 0.2",
        "Patch dropout": "0.5 of the patches of each image",
        "Smaller images first": "160 px up to step 40000",
        "Repeated augmentation": "3 views of each image",
    }
    assert not [name for name, *_ in facts.changes if "sam" in name]
    page = render(facts, worth_of(tmp_path, running_seconds=1.0), read_scores(tmp_path)).decode()
    assert "Trained with" in page
    assert "large &lt;b&gt;; its most probable classes" in page
    assert "<dt>SAM</dt><dd>rho 0.2</dd>" in page


def test_a_method_that_is_off_is_not_named_however_its_zero_is_written() -> None:
    """A recipe in Python may give a float as an int, and the record keeps it."""
    off = {"optimizer.sam_rho": "0", "tokens.patch_dropout": "0", "data.augment.repeats": "1"}
    assert methods_of(off) == methods_of({"optimizer.sam_rho": "0.0", "tokens.patch_dropout": "0.0"}) == ()
    taught = {"teacher.weights": "large", "teacher.target": "soft", "teacher.share": "1", "teacher.temperature": "1"}
    assert methods_of(taught) == (("Teacher", "large; its probabilities are the target for 1 of the loss"),)


def test_wrong_paths_get_one_message(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", step=4)
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe.html")
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    nowhere = str(tmp_path / "nowhere" / "x.html")
    for words, message in (
        (["nowhere"], "there is no folder 'nowhere'; give a run directory"),
        ([str(tmp_path / "file")], "is a file; give a run directory"),
        ([str(run_dir / "job.yaml")], "is a file; give a run directory"),
        ([str(run_dir), "--out", nowhere], "there is no folder"),
        ([str(run_dir), "--out", str(tmp_path)], "--out is the folder"),
        ([str(run_dir), "--out", str(tmp_path / "file" / "x.html")], "there is no folder"),
        ([str(run_dir), "--out", str(tmp_path / "pipe.html")], "which is there and is no .html file"),
        ([str(run_dir), "--out", str(run_dir / "metrics.jsonl")], "which is there and is no .html file"),
        ([str(run_dir), "--out", str(tmp_path / ("x" * 300))], "File name too long"),
        ([str(run_dir), "--out", "/proc/x.html"], "cannot write '/proc/x.html'"),
    ):
        assert message in fails(*words), words
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before
    assert stat.S_ISFIFO((tmp_path / "pipe.html").stat().st_mode)


def test_a_folder_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root, who may run these tests, may read everything."""

    def refused(path: Path, **_: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("jobs.record.read_local_file", refused)
    assert main(["report", str(tmp_path)]) == 2
    assert "job.yaml': Permission denied; give a run directory" in capsys.readouterr().err


def test_a_hostile_folder_forges_no_line(tmp_path: Path) -> None:
    run_dir = tmp_path / HOSTILE.replace("/", "")
    run_dir.mkdir()
    for record in (b"a: [", b"x" * 300_000, b"\xff"):
        (run_dir / "job.yaml").write_bytes(record)
        ended = patchline("report", str(run_dir))
        assert ended.code == 2
        assert_harmless(ended.errors)


def test_a_run_of_another_version_and_one_that_never_started(tmp_path: Path) -> None:
    """Another version's job record is shown with what differs; its lines of starts.jsonl, which have other fields, are
    left out."""
    run_dir = make(tmp_path / "run")
    record = run_dir / "job.yaml"
    record.write_text(record.read_text() + "  field_of_tomorrow: 7\n")
    ended = patchline("report", str(run_dir))
    assert ended.code == 0
    assert "never started" in ended.output
    assert "field_of_tomorrow" in (run_dir / "report.html").read_text()
    record.write_text(record.read_text().replace("\n  seed: 0\n", "\n"))
    old = {"attempt": ATTEMPT, "unix_time": 1e9, "startup_seconds": 1.0, "total_seconds": 1.0, "resumed_from": None}
    old |= {"num_ranks": 1, "zero_stage": 1, "device": "cpu"}
    left = {"reached": 3, "attempt": "", "phase": "", "step": 0, "is_hung": False}
    origin = {"recipe": "digits_smoke", "file": ""}
    new = {**old, "attempt": "0002", "unix_time": 1e9 + 9, "left": left, "origin": origin}
    others = [{**new, "left": {**left, "mood": "bad"}}, {**new, "tomorrow": [1]}, {**new, "origin": {**origin, "x": 1}}]
    lines = [{**old, "left": left}, others[0], new, *others[1:]]
    (run_dir / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = gather(run_dir)
    assert [one.cause.words for one in facts.time.restarts] == ["killed or crashed after step 3"]
    assert (facts.recipe.recipe, facts.recipe.is_recorded) == ("digits_smoke", True)
    assert ("seed", "0", "(no such field)") in facts.changes


class _Tags(HTMLParser):
    """The elements of a page, and whether all that are opened are closed in order."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.wrong += [
            f"{tag} {name}" for name, _ in attrs if name.startswith("on") or (name in ("src", "href") and tag != "a")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"/{tag}")


def hostile_run(run_dir: Path) -> Path:
    """A folder in which every text is hostile, and numbers are as odd as JSON allows."""
    make(run_dir, step=9)
    record = run_dir / "job.yaml"
    text = record.read_text().replace("url: ''", f"url: {json.dumps(EVIL)}", 1)
    record.write_text(f"{text}  {json.dumps(EVIL)}: {json.dumps(EVIL)}\n  long: {'x' * 100_000}\n")
    values: dict[str, Any] = {"loss": float("nan"), "grad_norm": float("inf"), "images_per_second": 10**400}
    lines: list[dict[str, Any]] = [{"step": 1, **values}, {"step": 2, "loss": 1e299, "test_accuracy": -1e299}]
    lines += [{"step": 3, "loss": 1e-320, "time/step": -5, EVIL: 3, f"time/{EVIL}": 4, "memory/x bytes": -3}]
    lines += [{"step": 4, "loss": EVIL}, {"step": 1 << 61, "loss": 2, "learning_rate": 5e-324}]
    lines += [{"step": (1 << 61) + 1, "loss": 2, "learning_rate": 2e-323}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    left = {"reached": 3, "attempt": ATTEMPT, "phase": EVIL, "step": 3, "is_hung": False, "asked_by": EVIL}
    start = {"attempt": ATTEMPT, "unix_time": 1e9, "startup_seconds": 1.0, "total_seconds": 1.0, "resumed_from": None}
    start |= {"num_ranks": 1, "zero_stage": 1, "device": EVIL, "left": left, "origin": {"recipe": EVIL, "file": EVIL}}
    process = {"host": EVIL, "kernel": EVIL, "pid": 1 << 60, "began": 3}
    ends: list[dict[str, Any]] = [{}, {"phase": "ended", "error": EVIL + "x" * 900_000}, {"is_hung": True}]
    again = [start | {"unix_time": 1e9 + 9 * at, "left": left | end} for at, end in enumerate(ends)]
    (run_dir / "starts.jsonl").write_text("".join(json.dumps({**one, "process": process}) + "\n" for one in again))
    saved = {"step": 3, "attempt": ATTEMPT, "unix_time": 1e9 + 30}
    ledger = [saved | {"seconds": dict.fromkeys(ACCOUNTS, seconds)} for seconds in (1e10, 1e299)]
    (run_dir / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ledger))
    finding = {"step": 3, "kind": EVIL, "action": EVIL, "loss": EVIL, "z": float("nan"), "rewound_to": [EVIL]}
    (run_dir / "guard.jsonl").write_text(json.dumps(finding) + "\n")
    bad = {"sample_id": 3, "source": EVIL + "x" * 900_000, "reason": EVIL}
    (run_dir / "quarantine").mkdir()
    (run_dir / "quarantine" / "rank-00000.jsonl").write_text(json.dumps(bad) + "\n")
    return run_dir


def test_the_lists_of_all_ranks_are_one(tmp_path: Path) -> None:
    """Rank 1's is damaged: a start that was killed left half a line, and rank 2's is a folder."""
    run_dir = make(tmp_path)
    (run_dir / "quarantine" / "rank-00002.jsonl").mkdir(parents=True)
    listed = {"quarantine/rank-00000.jsonl": [(1, "a"), (1, "b")], "quarantine/rank-00001.jsonl": [(2, "a"), (3, "a")]}
    for name, samples in listed.items():
        lines = [
            {"url": url, "sample_id": number, "source": f"{number}.jpg", "reason": "crc32 differs"}
            for number, url in samples
        ]
        (run_dir / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with (run_dir / "quarantine" / "rank-00001.jsonl").open("a") as file:
        file.write('{"url": "a", "samp')
    facts = gather(run_dir)
    assert (facts.quarantine.num_lines, facts.quarantine.num_samples) == (4, 4)
    assert facts.quarantine.reasons == (("crc32 differs", 4),)
    assert dict(facts.quarantine.samples) == {f"{number}.jpg": "crc32 differs" for number in (1, 2, 3)}
    assert [note for note in facts.notes if "quarantine/rank-00002.jsonl" in note]


def test_hostile_text_is_text_and_odd_numbers_are_numbers(tmp_path: Path) -> None:
    run_dir = hostile_run(tmp_path / MARKUP.replace("/", "") / HOSTILE.replace("/", ""))
    out = tmp_path / "page.html"
    for words in (("report", str(run_dir), "--out", str(out)), ("ls", str(tmp_path))):
        ended = patchline(*words)
        assert ended.code == 0, ended.errors
        assert_harmless(ended.output)
        assert_harmless(ended.errors)
        assert all(len(line) <= (80 if words[0] == "report" else 160) for line in ended.output.splitlines())
    page = out.read_text()
    assert len(page) < 500_000
    assert not {"\x1b", "\u202e", "\x9b", "\u2028"} & set(page)
    assert "NaN" not in page.replace("NaN ", "")
    tags = _Tags()
    tags.feed(page)
    assert (tags.wrong, tags.open) == ([], [])
    assert not tags.seen & {"script", "img", "iframe", "link", "object"}
    if CHROMIUM:
        with browser(tmp_path / "profile") as opened:
            for width in (1280, 420):
                seen = opened.open(out, width=width, is_dark=False)
                assert (seen.requests, seen.console, seen.scroll_width) == ([], [], width)


def test_a_checkpoint_that_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make(tmp_path)
    for step in (10, 20):
        (run_dir / "checkpoints" / f"step-{step:08d}" / f"attempt-{ATTEMPT}").mkdir(parents=True)
    is_gone = vanishes_when_listed(monkeypatch, run_dir / "checkpoints" / "step-00000010")
    assert any("no checkpoint is in its folder" in note for note in gather(run_dir).notes)
    assert is_gone()


@pytest.mark.slow
def test_a_run_that_is_read_while_it_trains(digits_url: str, tmp_path: Path) -> None:
    """Its files are cut at any byte, as they are when a line is half-written."""
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--steps", "4000", "--checkpoint.every-steps", "3")
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    try:
        assert wait_until(ranks, step_at_least(2), run_dir)
        began, pause = time.monotonic(), threading.Event()
        while time.monotonic() - began < 3:
            facts = gather(run_dir)
            assert facts.run.state == "running"
            assert [note for note in facts.notes if "cannot be used" in note or "damaged" in note] == []
            assert "running" in summary(facts)
            assert b"running" in render(
                facts, worth_of(run_dir, running_seconds=facts.time.running_seconds), read_scores(run_dir)
            )
            assert sum(facts.time.parts.values()) == pytest.approx(facts.time.wall_seconds, abs=1e-6)
            pause.wait(0.02)
        ranks.processes[0].send_signal(signal.SIGSTOP)  # or its next line would follow the half one
        for name in ("metrics.jsonl", "ledger.jsonl"):
            with (run_dir / name).open("a") as file:
                file.write('{"step": 9, "lo')
        assert not [note for note in gather(run_dir).notes if "cannot be used" in note]
    finally:
        ranks.kill()
    notes = gather(run_dir).notes
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert any(note.startswith(f"{name}: 1 line cannot be used") for note in notes), notes
