"""Draws the pictures of the documentation from what the commands print and write today.

    python -m docs.pictures                      # all pictures but those below: ten minutes on two cores
    python -m docs.pictures card report          # some of them
    python -m docs.pictures report-cifar10 scores --cifar10 DIR    # DIR/{train,test}.parquet; a quarter of an hour
    python -m docs.pictures session --photographs DIR              # docs/session.md, see docs/session.py; half an hour

Needs tmux, Chromium and, for status and watch, Debian's slurm-wlm and munge. Runs are made once, in the folder of
`--work`, and used again by the next call; `plain`, `transfer_curves`, `small_studies` and `near_duplicates` show
committed results.
"""

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

import patchline
from docs import architecture_figure, curve_figures, order_figure, pos_embed_figure, session, terminal_figure
from pipeline.training.reporting.metrics import read_metrics
from tests.rigs.browser import browser
from tests.rigs.slurm import SlurmCluster, SlurmConfig

DOCS = Path(__file__).resolve().parent
ROWS, DEADLINE_SECONDS = 24, 900.0
# A page is photographed as narrow as a small tablet, so that its text can be read at the width of a telephone.
PAGE_WIDTH, PAGE_SCALE, NUM_COLOURS, MOST_BYTES = 700, 1.5, 128, 250_000
HERO_COLUMNS, HERO_ROWS = 64, 26
KILLED_AT, DRAINED_AT = 160, 150  # steps of digits_smoke, which has 300
NUM_INSPECTED = 64
SHARES = (0.1, 0.3, 1)
MODELS = {
    "small": (),
    "tiny": ("--model.depth", "2", "--model.width", "32", "--model.mlp-width", "128", "--model.num-heads", "2"),
}
SHORT = "--evaluation.every-steps 100 --steps 600 --global-batch 128"
PLAN = "plan vit_h14_jft --gpu h200 --nodes 1 8 16 32 64 --max-time 24 --price 2.5"
SUBMIT = "submit pretrain digits_smoke --cluster cluster.yaml --nodes 2 --time 10 --data.url data/digits"
TRAIN = """\
patchline pretrain digits_smoke --run-dir runs/digits \\
  --data.url data/digits --evaluation.url data/digits-test \\
  --global-batch 64 --evaluation.every-steps 100"""
# Leaves the header and some sections of a page, and the first sheets of each. Images of CIFAR-10 are not ours to show.
CROP = """(([kept, sheets]) => {
  for (const one of document.querySelectorAll("main > section")) {
    one.hidden = !kept.includes(one.getAttribute("aria-labelledby"));
    [...one.querySelectorAll(".columns > *")].slice(sheets).forEach(sheet => sheet.remove());
    one.querySelectorAll(".answers, .columns ~ h3").forEach(image => image.remove());
  }
  document.querySelector("footer").hidden = true;
  document.body.style.paddingBottom = "28px";
  if (kept[0] !== "header") document.body.querySelector("header").hidden = true;
  for (const one of document.querySelectorAll("section:not([hidden])")) { one.style.marginTop = "28px"; }
  return true;
})(%s)"""


@dataclass(frozen=True, kw_only=True)
class Studio:
    """The folder with datasets and runs, and where to find images that the project does not bring along."""

    work: Path
    cifar10: Path = Path()
    photographs: Path = Path()

    @property
    def environ(self) -> dict[str, str]:
        """An environment in which `patchline` is this checkout's."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return dict(os.environ) | {"PATH": path, "PYTHONPATH": str(DOCS.parent)}

    def start(self, command: str, *more: str) -> "subprocess.Popen[bytes]":
        """Starts `patchline COMMAND` in a process group of its own."""
        words = [sys.executable, "-m", "patchline", *command.split(), *more]
        sys.stderr.write(f"$ patchline {' '.join(words[3:])}\n")
        return subprocess.Popen(words, cwd=self.work, env=self.environ, start_new_session=True)

    def patchline(self, command: str, *more: str) -> None:
        """Runs `patchline COMMAND`. Raises CalledProcessError if it fails."""
        process = self.start(command, *more)
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)

    def dataset(self, recipe: str, *more: str) -> str:
        """Packs both splits of a recipe, once, and returns the flags that train on one and evaluate on the other."""
        for name, split in ((recipe, "train"), (f"{recipe}-test", "test")):
            if not (self.work / "data" / name / "manifest.json").exists():
                self.patchline(f"pack {recipe} --split {split} --out data/{name}", *more)
        return f"--data.url data/{recipe} --evaluation.url data/{recipe}-test"

    def run(self, name: str, job: str, *more: str) -> Path:
        """Pre-trains runs/NAME, once, and returns its folder."""
        folder = self.work / "runs" / name
        if not (folder / "DONE").exists():
            self.patchline(f"pretrain {job} --run-dir runs/{name}", *more)
        return folder

    def killed(self) -> Path:
        """Returns the folder of a run on digits that was killed with SIGKILL, resumed and evaluated."""
        folder, job = self.work / "runs" / "digits", self._digits
        if not (folder / "DONE").exists():
            running = self.start(f"pretrain {job} --run-dir runs/digits")
            _wait(lambda: _last_step(folder) >= KILLED_AT, "the step at which the run is killed")
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            self.run("digits", job)
            self.patchline("evaluate runs/digits --data.url data/digits-test")
        return folder

    def unbroken(self) -> Path:
        """Returns the folder of the same run without a kill."""
        return self.run("unbroken", self._digits)

    @property
    def _digits(self) -> str:
        return (
            f"digits_smoke {self.dataset('digits')} --evaluation.every-steps 50 --log-every-steps 1 --global-batch 64"
        )

    def cifar10_run(self) -> Path:
        """Returns the folder of an evaluated run on CIFAR-10, which is far shorter than its recipe."""
        flags = self.dataset("cifar10", "--source.files", f"{self.cifar10}/{{split}}.parquet")
        folder = self.run("cifar10", f"cifar10_small {flags} {SHORT}")
        if not (folder / "scores").exists():
            self.patchline("evaluate runs/cifar10 --data.url data/cifar10-test")
        return folder

    def photograph(self, page: Path, name: str, kept: Sequence[str], *, sheets: int = 99, height: int = 0) -> None:
        """Writes docs/NAME.png: the sections `kept` of a page, with the first `sheets` plots and tables of each.
        `height`: cuts it off below so many pixels of the page (0: nowhere)."""
        with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as opened:
            asks = (CROP % [list(kept), sheets],)
            seen = opened.open(page, width=PAGE_WIDTH, is_dark=False, asks=asks, scale=PAGE_SCALE)
        image = Image.open(io.BytesIO(seen.png)).convert("RGB")
        image = image.crop((0, 0, image.width, round(PAGE_SCALE * height) or image.height))
        path = DOCS / f"{name}.png"
        image.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{path} has {path.stat().st_size} bytes; allowed: at most {MOST_BYTES}")


def card(studio: Studio) -> None:
    """The card of a dataset."""
    studio.dataset("digits")
    studio.patchline("card data/digits")
    studio.photograph(studio.work / "data" / "digits" / "card.html", "card", ("header", "samples-title"), height=944)


def report(studio: Studio) -> None:
    """The report of a run that was killed and resumed."""
    studio.killed()
    studio.patchline("report runs/digits --out report.html")
    studio.photograph(studio.work / "report.html", "report", ("header", "curves", "time", "restarts"), sheets=1)


def loss(studio: Studio) -> None:
    """The losses of a killed and of an unbroken run."""
    curve_figures.draw_losses(curve_figures.losses(studio.unbroken(), studio.killed()))


def report_cifar10(studio: Studio) -> None:
    """The report of a run on CIFAR-10."""
    studio.cifar10_run()
    studio.patchline("report runs/cifar10 --out cifar10.html")
    studio.photograph(studio.work / "cifar10.html", "report-cifar10", ("header", "curves", "time"), sheets=2)


def scores(studio: Studio) -> None:
    """The scores of that run in its report."""
    studio.cifar10_run()
    studio.patchline("report runs/cifar10 --out cifar10.html")
    studio.photograph(studio.work / "cifar10.html", "scores", ("scores",), sheets=3)


def study(studio: Studio) -> None:
    """The comparison of two models, each pre-trained on three shares of the digits."""
    job = f"digits_smoke {studio.dataset('digits')} --evaluation.every-steps 50 --steps 150 --global-batch 64"
    for share in SHARES:
        for name, model in MODELS.items():
            studio.run(f"study/{name}-{round(100 * share)}", job, "--data.subset.share", str(share), *model)
    studio.patchline("compare runs/study --out study.html")
    studio.photograph(studio.work / "study.html", "study", ("header", "plots"), sheets=2)


def inspect_distance(studio: Studio) -> None:
    """The attention distances of the model of `killed`, on digits that it was not trained on."""
    folder = studio.killed()
    images = studio.work / "images"
    images.mkdir(exist_ok=True)
    test = patchline.open_dataset(str(studio.work / "data" / "digits-test"))
    for number in range(NUM_INSPECTED):
        test[number].image.save(images / f"{number}.png")
    studio.patchline(f"inspect runs/digits --images images --max-images {NUM_INSPECTED}")
    shutil.copyfile(folder / "inspect" / "attention_distance.png", DOCS / "inspect_distance.png")


def terminal(studio: Studio) -> None:
    """The README's terminal: a run that is stopped with Ctrl-C and resumed by the same command."""
    folder = studio.work / "terminal"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    own = Studio(work=folder)
    own.dataset("digits")
    with session.terminal(folder, own.environ, columns=HERO_COLUMNS) as screen:
        screen.run(TRAIN, while_it_runs=r"\n1[1-9]\d/300 ", keys="C-c")
        screen.run(TRAIN, clear=False)
        rows = screen.screen().splitlines()[-HERO_ROWS:]
        _draw("terminal", "\n".join(rows), title="patchline", columns=HERO_COLUMNS)


def on_slurm(_: Studio) -> None:
    """`patchline status` and `patchline watch` of a run on a real Slurm of two nodes, one of which is drained."""
    with SlurmCluster(SlurmConfig(num_nodes=2, cpus_per_node=1)) as cluster:
        own = Studio(work=cluster.folder)
        environ = cluster.job_environment()
        environ |= {key: own.environ[key] for key in ("PYTHONPATH",)} | {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
        executable = Path(sys.executable).parent / "patchline"
        (cluster.folder / "cluster.yaml").write_text(f"partition: main\ncommand: [{executable}]\n")
        for command in ("pack digits --out data/digits", f"{SUBMIT} --run-dir runs/digits --steps 3000"):
            subprocess.run([executable, *command.split()], cwd=cluster.folder, env=environ, check=True)
        _wait(lambda: _last_step(cluster.folder / "runs" / "digits") >= DRAINED_AT, "the run's first steps")
        cluster.scontrol("update", "NodeName=n2", "State=drain", "Reason=bad disk")
        for name in ("status", "watch"):
            shown = f"printf '$ patchline {name} runs/digits\\n'; '{executable}' {name} runs/digits; sleep 60"
            screen = _screen(cluster.folder, environ, shown, mark="State=resume")
            _draw(name, screen, title=f"patchline {name} runs/digits", columns=session.COLUMNS)


def session_page(studio: Studio) -> None:
    """The page docs/session.md."""
    words = [sys.executable, "-m", "docs.session", "--photographs", str(studio.photographs)]
    subprocess.run(words, cwd=DOCS.parent, check=True)


def plan(studio: Studio) -> None:
    """The plan of docs/training.md over the number of nodes."""
    studio.patchline(PLAN, "--out", str(DOCS / "plan.svg"))


PICTURES: dict[str, Callable[[Studio], object]] = {
    "architecture": lambda _: (DOCS / "architecture.svg").write_text(architecture_figure.draw()),
    "order": lambda _: order_figure.draw(order_figure.example(), DOCS / "order.svg"),
    "pos_embed": lambda _: pos_embed_figure.draw(pos_embed_figure.example(), DOCS / "pos_embed.svg"),
    "plain": lambda _: curve_figures.draw_plain(),
    "transfer_curves": lambda _: curve_figures.draw_transfer_curves(),
    "small_studies": lambda _: curve_figures.draw_small_studies(),
    "near_duplicates": lambda _: curve_figures.draw_near_duplicates(),
    "plan": plan,
    "card": card,
    "terminal": terminal,
    "report": report,
    "loss": loss,
    "inspect_distance": inspect_distance,
    "study": study,
    "status": on_slurm,
    "watch": on_slurm,
    "report-cifar10": report_cifar10,
    "scores": scores,
    "session": session_page,
}
NEEDS = {"report-cifar10": "cifar10", "scores": "cifar10", "session": "photographs"}


def _last_step(run: Path) -> int:
    with suppress(OSError):
        return max((line["step"] for line in read_metrics(run)), default=0)
    return 0


def _draw(name: str, screen: str, *, title: str, columns: int) -> None:
    (DOCS / f"{name}.svg").write_text(terminal_figure.draw(screen, title=title, columns=columns))


def _screen(folder: Path, environ: dict[str, str], command: str, *, mark: str) -> str:
    """The screen of a command, with its colours, once the mark is on it. The server of tmux is our own."""
    tmux = ["tmux", "-L", folder.name]
    size = ["-x", str(session.COLUMNS), "-y", str(ROWS), "-c", str(folder)]
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", *size, command], env=environ, check=True)
    capture = [*tmux, "capture-pane", "-p", "-e"]
    try:
        _wait(lambda: mark in subprocess.check_output(capture, text=True), f"{mark} on the screen")
        return subprocess.check_output(capture, text=True)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def _wait(is_there: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not is_there():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come in {DEADLINE_SECONDS:.0f} s")
        time.sleep(0.3)


def main() -> None:
    """Draws the pictures that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PICTURES)}; default: all")
    parser.add_argument("--work", type=Path, default=Path("pictures-run"), help="folder of the runs (%(default)s)")
    parser.add_argument("--cifar10", type=Path, help="folder with train.parquet and test.parquet")
    parser.add_argument("--photographs", type=Path, help="folder of class folders of JPEGs")
    arguments = parser.parse_args()
    given = {name for name in PICTURES if name not in NEEDS or getattr(arguments, NEEDS[name])}
    names = arguments.names or [name for name in PICTURES if name in given]
    for name in names:
        if name not in PICTURES:
            parser.error(f"{name!r} is no picture; allowed: {', '.join(PICTURES)}")
        if name not in given:
            parser.error(f"{name} needs --{NEEDS[name]} DIR")
    arguments.work.mkdir(parents=True, exist_ok=True)
    folders = {key: getattr(arguments, key) or Path() for key in ("work", "cifar10", "photographs")}
    studio = Studio(**{key: folder.resolve() for key, folder in folders.items()})
    for drawing in dict.fromkeys(PICTURES[name] for name in names):
        drawing(studio)


if __name__ == "__main__":
    main()
