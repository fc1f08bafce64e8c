"""Kills runs of two ranks while they save: `python -m tests.soak.kills --kills 100` (or `make soak`).

Both ranks are killed (SIGKILL) while a checkpoint is being written into a folder or, in every third run, while one of
its objects is being uploaded to an S3 server. The same command starts them again, until the run has been killed three
times and finished. Every start must continue from the newest committed checkpoint, whose files must have their
checksums, and every run must end with the losses of the unbroken run. Writes tests/soak/results/kills.json.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import boto3

from jobs.data import pack
from jobs.recipes.pack import digits
from pipeline.checkpoints.attempts import list_committed, read_attempts
from pipeline.checkpoints.manifest import MANIFEST_NAME, manifest_from_json
from pipeline.checkpoints.rank_file_in import RankFiles
from shards.store import Store, open_store
from tests.rigs.cutting_proxy import cutting_proxy
from tests.rigs.kills import run_and_kill
from tests.rigs.s3 import moto_server
from tests.rigs.training import STEPS, losses, pretrain_words, run

RESULT = Path(__file__).parent / "results" / "kills.json"
KILLS_A_RUN = 3
SAVE_STEPS = 4  # one of `pretrain_words`' checkpoints to the next
UPLOADS_A_SAVE = 5  # two ranks' files, their reports, and the manifest
MOST_DELAY_SECONDS = 0.01  # after the first file of a checkpoint is there
NUM_RANKS = 2
_NAMES_OF_S3 = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


@dataclass(kw_only=True)
class Killed:
    """One run, and what became of it. `newest`: the newest committed checkpoint after each kill, 0 for none."""

    words: list[str]
    run_dir: Path
    store: Store
    kills: list[str] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def note(self, kill: str) -> None:
        """Records a kill, and verifies the newest committed checkpoint that it left."""
        newest = max(list_committed(self.store), key=lambda each: each.step, default=None)
        self.kills.append(kill)
        self.newest.append(newest.step if newest else 0)
        if newest:
            manifest = manifest_from_json(self.store.read(f"{newest.folder}/{MANIFEST_NAME}"))
            files = RankFiles(self.store, manifest)
            for name in manifest.files:
                try:
                    files.verify(name)
                except ValueError:
                    self.damaged.append(f"{newest.folder}/{name}")

    def verdict(self, code: int, expected: dict[int, float]) -> dict[str, object]:
        """What goes into the results."""
        origins = [attempt.resumed_from for attempt in read_attempts(self.store)]
        resumed = [origin.step if origin else 0 for origin in origins][1:]
        is_right = code == 0 and losses(self.run_dir) == expected and resumed == self.newest and not self.damaged
        where = "S3" if self.store.url.startswith("s3:") else "folder"
        facts = {"where": where, "kills": self.kills, "resumed_from": resumed, "newest_committed": self.newest}
        return {**facts, "damaged": self.damaged, "right": is_right}


def campaign(num_kills: int, *, folder: Path, seed: int, bucket: str) -> dict[str, object]:
    """Runs and kills until `num_kills` kills are done; returns what happened."""
    draw, began = random.Random(seed), time.monotonic()
    url = str(folder / "digits")
    pack.run(replace(digits(), out=url))
    run(pretrain_words(url, folder / "unbroken"), num_ranks=NUM_RANKS, log_dir=folder)
    expected = losses(folder / "unbroken")
    runs: list[dict[str, object]] = []
    done = {"folder": 0, "S3": 0}
    while sum(done.values()) < num_kills:
        where = "S3" if len(runs) % 3 == 2 else "folder"
        run_dir = folder / f"run-{len(runs)}"
        saved = f"s3://{bucket}/{run_dir.name}" if where == "S3" else str(run_dir / "checkpoints")
        words = pretrain_words(url, run_dir, "--checkpoint.url", saved)
        killed = Killed(words=words, run_dir=run_dir, store=open_store(saved))
        for _ in range(min(KILLS_A_RUN, num_kills - sum(done.values()))):
            if STEPS not in killed.newest:
                _kill(killed, draw, folder)
        code = run(words, num_ranks=NUM_RANKS, log_dir=folder)
        done[where] += len(killed.kills)
        runs.append(killed.verdict(code, expected))
        sys.stderr.write(f"{sum(done.values())} kills, {len(runs)} runs, right: {_all_right(runs)}\n")
    minutes = round((time.monotonic() - began) / 60, 1)
    return {"kills": done, "runs": len(runs), "all_right": _all_right(runs), "minutes": minutes, "each": runs}


def _kill(killed: Killed, draw: random.Random, folder: Path) -> None:
    """Starts the run and kills it during one of the saves that it has not done yet."""
    newest = killed.newest[-1] if killed.newest else 0
    step = draw.randrange(newest + SAVE_STEPS, STEPS + 1, SAVE_STEPS)
    if killed.store.url.startswith("s3:"):
        _kill_upload(killed, draw, folder, num_saves=(step - newest) // SAVE_STEPS - 1)
        return
    delay, pause = draw.uniform(0, MOST_DELAY_SECONDS), threading.Event()
    before = _files(killed, step)  # of starts that were killed

    def reached(_: Path) -> bool:
        return _files(killed, step) > before and not pause.wait(delay)

    if run_and_kill(killed.words, killed.run_dir, moment=reached, num_ranks=NUM_RANKS, log_dir=folder):
        there = [path.name.partition(".safetensors")[0] for path in _files(killed, step) - before]
        killed.note(f"saving step {step}: {', '.join(sorted(there)) or 'no file'} there")


def _files(killed: Killed, step: int) -> set[Path]:
    return set((killed.run_dir / "checkpoints").glob(f"step-{step:08d}/*/*"))


def _kill_upload(killed: Killed, draw: random.Random, folder: Path, *, num_saves: int) -> None:
    """Kills while an upload of a checkpoint waits for its answer, after `num_saves` whole checkpoints."""
    upstream, which, is_stored = os.environ["AWS_ENDPOINT_URL"], draw.randrange(UPLOADS_A_SAVE), draw.random() < 0.5
    with cutting_proxy(upstream) as proxy:
        proxy.uploads, proxy.stores_held = num_saves * UPLOADS_A_SAVE + which, is_stored
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        try:
            is_killed = run_and_kill(
                killed.words,
                killed.run_dir,
                moment=lambda _: proxy.holding.is_set(),
                num_ranks=NUM_RANKS,
                log_dir=folder,
            )
        finally:
            os.environ["AWS_ENDPOINT_URL"] = upstream
    if is_killed:
        killed.note(f"uploading object {which} of a checkpoint, {'stored' if is_stored else 'lost'}")


def _all_right(runs: list[dict[str, object]]) -> bool:
    return all(bool(each["right"]) for each in runs)


def main() -> int:
    """0 if every killed run equals the unbroken one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, moto_server() as endpoint:
        os.environ.update({"AWS_ENDPOINT_URL": endpoint, **dict.fromkeys(_NAMES_OF_S3, "us-east-1")})
        boto3.session.Session().client("s3").create_bucket(Bucket="kills")
        result = campaign(options.kills, folder=Path(folder), seed=options.seed, bucket="kills")
    command = f"python -m tests.soak.kills --kills {options.kills} --seed {options.seed}"
    RESULT.write_text(json.dumps({"command": command, **result}, indent=1) + "\n")
    return 0 if result["all_right"] else 1


if __name__ == "__main__":
    sys.exit(main())
