"""Every command in the documentation: the gate parses it, and a long test runs it unless its block is marked.

A block whose first line is `# needs ...` (a cluster, ImageNet, the network) is only parsed; so are the blocks of a page
that says BY_HAND, and those that begin with `make`, which .ci/run and the tests of the demos run.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import boto3
import pytest

from jobs.arguments import second_word_first, take_run_flags, values_of, with_values
from jobs.flags import flags_of
from jobs.mistakes import HELP_WORDS
from jobs.resolve import default_job, is_file, is_own
from jobs.stages import COMMANDS, STAGES, TOOLS, recipes_of
from shards.errors import UserError
from tests.rigs.faults import every_fault
from tests.rigs.images import class_folders, image_bytes
from tests.rigs.training import FinishedRuns
from tests.test_docs_examples import CHECKOUT, NO_NETWORK, PRELUDE

MARK = "# needs "
BY_HAND = "No test runs the commands of this page"
PAGES = [*CHECKOUT.glob("*.md"), CHECKOUT / "slurm" / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
# Pages whose Python blocks tests/test_docs_examples.py runs, beside the dataset and the run that they name.
WITH_OWN_TEST = ("docs/models.md", "docs/python.md", "docs/streaming.md")
# Runs take fewer steps than those of a reader, and a trial of resuming fewer kills. One page kills a run after 20 s.
WHOLE = ("docs/checkpoints.md",)
_FEWER = """\
case "$1:$2" in
  pretrain:?*|finetune:?*) set -- "$@" --steps 20;;
  verify-resume:*) set -- "$@" --kills 1;;
esac
"""
# Pages that begin with nothing but images and weights.
FROM_IMAGES = ("docs/own-data.md", "docs/from-weights.md", "docs/from-s3.md", "docs/packing.md")
# Commands that end with another code than 0, because they show usage, or find what they look for.
CODES = {"patchline pretrain": {2}, "patchline diff digits_smoke my.yaml": {1}, "patchline doctor": {0, 1}}
SECONDS = 500


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code: its page, from the checkout, its language and its text."""

    page: str
    language: str
    text: str

    @property
    def is_run(self) -> bool:
        """Whether a test must run it."""
        is_bash = self.language == "bash" and not self.text.startswith("make ")
        return is_bash and not self.text.startswith(MARK) and BY_HAND not in (CHECKOUT / self.page).read_text()


@cache
def blocks() -> tuple[Block, ...]:
    """The blocks of all pages that have a language."""
    found = []
    for page in PAGES:
        name = page.relative_to(CHECKOUT).as_posix()
        parts = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        found += [Block(page=name, language=language, text=text) for language, text in parts]
    return tuple(found)


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of Patchline, Python or make in a block, without what a shell does with it."""
    text = block.text.replace("\\\n", " ")
    lines = text.splitlines() if block.language == "bash" else re.findall(r"^\$ (.*)", text, re.MULTILINE)
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("|&;<>"):
                words.append(word)
                continue
            while words and "=" in words[0]:  # variables of its environment
                words = words[1:]
            if words[:1] == ["torchrun"]:
                words = words[words.index("patchline") :]
            if words and "$words" not in words:
                yield [one for one in words if one != "..."]
            words = []


def faults_of(words: Sequence[str]) -> Iterator[str]:
    """What is wrong with a command."""
    if words[0] == "make" and not re.search(rf"^{words[1]}:", (CHECKOUT / "Makefile").read_text(), re.MULTILINE):
        yield f"there is no make {words[1]}"
    if words[:2] == ["python", "-m"] and words[2].partition(".")[0] in ("benchmarks", "docs", "tests"):
        path = CHECKOUT / words[2].replace(".", "/")
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            yield f"there is no {words[2]}"
    yield from (f"there is no {word}" for word in words if word.startswith("slurm/") and not (CHECKOUT / word).exists())
    if words[0] != "patchline" or words[1].startswith("-"):
        return
    if words[1] not in COMMANDS:
        yield f"there is no command {words[1]}"
    elif words[1] in STAGES:
        try:
            parse(words[1], [word for word in words[2:] if word not in HELP_WORDS])
        except (UserError, ValueError) as error:
            yield str(error)
    else:
        stage = next((word for word in words[2:] if word in STAGES), "")
        known = {*TOOLS[words[1]].flags, *TOOLS["sweep"].flags}
        known |= {name for flag in flags_of(job_of(stage or "finetune", "")) for name in flag.names}
        yield from (f"there is no flag {word}" for word in words if word.startswith("--") and word not in known)


def parse(stage: str, given: list[str]) -> None:
    """Parses what follows a stage as the command line does. UserError if it would refuse it."""
    words, _ = take_run_flags(stage, given)
    words = second_word_first(stage, words, is_help=False)
    if words:
        job = job_of(stage, words[0])
        with_values(job, values_of(words[1:], list(flags_of(job)), command=(stage, "")))


def job_of(stage: str, word: str) -> object:
    """The job of a stage's second word; of the first recipe, for an empty word or one that stands for a reader's own
    file or recipe."""
    if STAGES[stage].recipes and not STAGES[stage].field and (word in ("", "RECIPE") or is_file(word) or is_own(word)):
        word = next(iter(recipes_of(stage)))
    return default_job(stage, word)


@every_fault
def test_every_command_is_one_that_there_is() -> Iterator[str]:
    count = 0
    for block in blocks():
        for words in commands(block) if block.language in ("bash", "console") else ():
            count += 1
            yield from (f"{block.page}: {shlex.join(words)}: {fault}" for fault in faults_of(words))
    if count < 150:
        yield f"only {count} commands were found"


@every_fault
def test_no_command_hides_in_another_kind_of_block() -> Iterator[str]:
    """A block with a prompt shows what a command wrote; a command alone is a `bash` block, which is run or marked."""
    for block in blocks():
        if block.language in ("sh", "shell", "zsh"):
            yield f"{block.page}: write bash instead of {block.language}"
        if block.language == "console" and len(block.text.splitlines()) < 2:
            yield f"{block.page}: {block.text.strip()} shows no output: make it a bash block"


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("patchline pack folder --source.rot photos --out data/photos", "--source.rot"),
        ("patchline pretrain digits_smok", "digits_smok"),
        ("patchline pretrain digits_smoke --steps many", "many"),
        ("patchline submit pretrain vit_h14_jft --cluster cluster.yaml --node 8", "--node"),
        ("patchline tain", "tain"),
        ("make docks", "docks"),
        ("python -m benchmarks.lodaer", "lodaer"),
        ("A=1 torchrun --no-python patchline pretrain digits_smoke --data.ur x | tail", "--data.ur"),
    ],
)
def test_a_wrong_command_is_found(command: str, fault: str) -> None:
    (words,) = [words for words in commands(Block(page="", language="bash", text=command)) if words != ["tail"]]
    assert [found for found in faults_of(words) if fault in found]


class Reader:
    """Somebody who types the commands of a page in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def follow(self, page: str) -> None:
        """Runs the page's blocks in order, and writes the files that it shows. Fails with what failed."""
        for block in blocks():
            if block.page != page:
                continue
            if named := re.match(r"# (\w+\.(?:py|yaml))\n", block.text):
                (self.folder / named[1]).write_text(block.text)
            elif block.is_run:
                self.bash(block.text, is_short=page not in WHOLE)
            elif block.language == "python" and page not in WITH_OWN_TEST:
                self._run([sys.executable, "-c", PRELUDE + block.text], block.text)

    def bash(self, text: str, *, is_short: bool) -> None:
        """Runs a block to its end. Each command must end with 0, or as CODES has it."""
        bin_folder = self.folder.parent / "bin"
        bin_folder.mkdir(exist_ok=True)
        real = Path(sys.executable).with_name("patchline")
        more = _FEWER if is_short else ""
        (bin_folder / "patchline").write_text(f'#!/bin/sh\n{more}exec {shlex.quote(str(real))} "$@"\n')
        (bin_folder / "patchline").chmod(0o755)
        failed = self.folder.parent / "failed"
        failed.write_text("")
        trap = f"trap 'echo \"$? $BASH_COMMAND\" >> {shlex.quote(str(failed))}' ERR\n"
        said = self._run(["bash", "-c", trap + text + "\nwait\ntrue\n"], text)
        for line in failed.read_text().splitlines():
            code, _, command = line.partition(" ")
            assert int(code) in CODES.get(command.strip(), {0}), f"{command} ended with {code}:\n{said}"

    def _run(self, words: list[str], text: str) -> str:
        """What a program says, which must end with 0."""
        path = os.pathsep.join(map(str, (self.folder.parent / "bin", Path(sys.executable).parent, os.environ["PATH"])))
        environ = {**os.environ, **NO_NETWORK, "PYTHONPATH": str(CHECKOUT), "PATH": path}
        done = subprocess.run(
            words, cwd=self.folder, env=environ, capture_output=True, text=True, check=False, timeout=SECONDS
        )
        said = f"{text}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, said
        return said


@pytest.fixture(scope="module")
def after_readme(finished_runs: FinishedRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a reader of the README has at its end."""
    folder = tmp_path_factory.mktemp("readme") / "home"
    (folder / "docs").mkdir(parents=True)  # as in a clone
    for name in ("photos", "photos-test"):
        class_folders(folder / name, images_a_class=40 if name == "photos" else 10)
        for old, new in (("c0", "circle"), ("c1", "square"), ("c2", "cat")):
            (folder / name / old).rename(folder / name / new)
    for seed, name in enumerate(("digit.png", "photo.jpg")):
        (folder / name).write_bytes(image_bytes(seed, image_format="PNG" if name.endswith("png") else "JPEG"))
    reader = Reader(folder)
    weights = shlex.quote(str(finished_runs.get(1) / "weights"))
    reader.bash(f"patchline export {weights} --out Ti_16.npz --format vision_transformer", is_short=False)
    reader.follow("README.md")
    return folder


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not shutil.which("jq"), reason="jq is not installed")
@pytest.mark.parametrize("page", sorted({block.page for block in blocks() if block.is_run} - {"docs/models.md"}))
def test_the_commands_of_a_page(page: str, after_readme: Path, s3_endpoint: str, tmp_path: Path) -> None:
    """Runs them as a reader would after the README's own."""
    if page == "README.md":
        assert (after_readme / "digits-again" / "config.json").exists(), "which its last command writes"
        return
    left_out = shutil.ignore_patterns("data", "runs") if page in FROM_IMAGES else None
    shutil.copytree(after_readme, tmp_path / "home", ignore=left_out)
    boto3.session.Session().client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket="bucket")
    Reader(tmp_path / "home").follow(page)
