"""This is a first session in a real terminal of 80 columns: an empty clone, the demo, a folder of photographs with some
broken files, training, Ctrl-C, and an export. Then three others come with what they have: weights of timm, tars and a
loop of their own, an account on a cluster. Every screen is shown as it appeared.

    python -m docs.session --photographs DIR      # DIR/CLASS/*.jpg; needs tmux; half an hour on two cores

Writes docs/session.md. The clone is of the last commit, outside any virtual environment. `--only demo,train` runs some
of the parts in the folder of an earlier session (--work).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
COLUMNS, LINES = 80, 50
LONGEST_SECONDS = 1800.0
POLL_SECONDS = 0.1
IMAGES_A_CLASS = 60


@dataclass
class Terminal:
    """A shell in tmux, and the screens it showed, as Markdown."""

    name: str
    folder: Path
    shown: list[str] = field(default_factory=list)
    num_prompts: int = 0

    def run(self, command: str, *, while_it_runs: str = "", keys: str = "", clear: bool = True) -> str:
        """Types a command, waits for the next prompt and keeps the screen. `while_it_runs`: when this pattern first
        appears, `keys` (such as C-c) are pressed. `clear`: clears the screen first; else the screen that is kept
        replaces the one before, which it contains."""
        if clear:
            self.clear()
        else:
            self.shown.pop()
        wanted, waits = self._prompts() + 1, bool(while_it_runs)
        self._type(command)
        began = time.monotonic()
        while self._prompts() < wanted:
            if time.monotonic() - began > LONGEST_SECONDS:
                raise TimeoutError(f"{command} has not ended after {LONGEST_SECONDS:.0f} s:\n{self.screen()}")
            if waits and re.search(while_it_runs, self.screen()):
                waits = False
                _tmux("send-keys", "-t", self.name, keys)
            time.sleep(POLL_SECONDS)
        self.shown.append(f"```\n{without_setup(self.screen())}\n```\n")
        if waits:
            raise RuntimeError(f"{command} ended without showing {while_it_runs!r}:\n{self.screen()}")
        return self.screen()

    def clear(self) -> None:
        """Clears the screen and waits for a prompt."""
        wanted = self._prompts() + 1
        self._type("clear")
        while self._prompts() < wanted:
            time.sleep(POLL_SECONDS)
        _tmux("clear-history", "-t", self.name)

    def screen(self) -> str:
        """Everything shown since the screen was cleared, including lines that have scrolled away."""
        return _tmux("capture-pane", "-t", self.name, "-p", "-S", "-").rstrip().removesuffix("$").rstrip()

    def title(self, text: str) -> None:
        """Adds a heading."""
        sys.stderr.write(f"{text}\n")
        self.shown.append(f"## {text}\n")

    def _type(self, command: str) -> None:
        _tmux("send-keys", "-t", self.name, "-l", command)
        _tmux("send-keys", "-t", self.name, "Enter")

    def _prompts(self) -> int:
        return int(_tmux("show-environment", "-g", f"prompts_{self.name}").partition("=")[2])


def without_setup(screen: str) -> str:
    """The screen without pip's output, which depends on the machine."""
    return re.sub(r"(?s)^(\$ make demo\n).*?^\S*bin/patchline demo\n", r"\1[pip sets up .venv]\n", screen, flags=re.M)


@contextmanager
def terminal(folder: Path, environ: dict[str, str], *, columns: int = COLUMNS) -> Iterator[Terminal]:
    """A bash without personal settings that counts its prompts in tmux's environment."""
    name = f"session-{os.getpid()}"
    _tmux("new-session", "-d", "-s", name, "-x", str(columns), "-y", str(LINES), "-c", str(folder), "/bin/sh")
    _tmux("set-environment", "-g", f"prompts_{name}", "0")
    _tmux("set-option", "-t", name, "history-limit", "20000")
    count = f'prompts=$((${{prompts:--1}} + 1)); tmux set-environment -g prompts_{name} "$prompts"'
    settings = " ".join(f"{key}='{value}'" for key, value in environ.items())
    shell = f"exec env -i {settings} PS1='$ ' PROMPT_COMMAND='{count}' TMUX=$TMUX bash --norc --noprofile"
    _tmux("send-keys", "-t", name, "-l", shell)
    _tmux("send-keys", "-t", name, "Enter")
    try:
        time.sleep(1.0)
        yield Terminal(name=name, folder=folder)
    finally:
        _tmux("kill-session", "-t", name)


def _tmux(*words: str) -> str:
    return subprocess.run(["tmux", *words], check=True, capture_output=True, text=True).stdout


def photographs(source: Path, target: Path) -> None:
    """Copies photographs of each class to target/CLASS, and adds some broken files."""
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        images = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
        (target / folder.name).mkdir(parents=True)
        for image in images[:IMAGES_A_CLASS]:
            shutil.copyfile(image, target / folder.name / image.name)
    classes = sorted(target.iterdir())
    whole = next(classes[0].iterdir()).read_bytes()
    (classes[0] / "half-downloaded.jpg").write_bytes(whole[: len(whole) // 2])
    (classes[0] / "empty.jpg").write_bytes(b"")
    (classes[1] / "page-not-found.jpg").write_bytes(b"<html><body>404 Not Found</body></html>\n")
    (classes[1] / "notes.txt").write_text("not an image\n")


def demo(screen: Terminal) -> None:
    """The demo of the README."""
    screen.title("The demo, in an empty clone")
    screen.run("make demo")
    screen.run("source .venv/bin/activate", clear=False)


def pack(screen: Terminal) -> None:
    """A folder of photographs with broken files in it."""
    screen.title("A folder of photographs, some of them broken")
    packing = "patchline pack folder --source.root photographs --split-test 0.2 \\\n  --out data/photos"
    screen.run(packing)
    screen.run(packing + " --max-quarantined 0.05")
    screen.run("patchline verify data/photos --deep")
    screen.run("patchline card data/photos")


_TRAIN = (
    "patchline pretrain photos_smoke --data.url data/photos --run-dir runs/photos \\\n"
    "  --evaluation.url data/photos-test --evaluation.every-steps 40 --steps 120"
)


def train(screen: Terminal) -> None:
    """A mistake, a start, Ctrl-C, the same command again."""
    screen.title("Mistakes in a command")
    screen.run("patchline pretrain photo_smoke --data.url data/photos")
    screen.run("patchline pretrain photos_smoke --data.url data/photos --lr 1e-3")
    screen.title("Training, Ctrl-C, and the same command again")
    screen.run(_TRAIN, while_it_runs=r"\n(4[1-9]|[5-9]\d)/120 ", keys="C-c")
    screen.run("echo $?", clear=False)
    screen.run(_TRAIN)
    screen.run(_TRAIN)
    screen.run(f"{_TRAIN} \\\n  --schedule.learning-rate 2e-3")


def after(screen: Terminal) -> None:
    """Uses the weights."""
    screen.title("Evaluate, predict, export")
    screen.run("patchline evaluate runs/photos --data.url data/photos-test")
    screen.run("patchline predict runs/photos photographs/*/*beagle* README.md --top 2")
    screen.run("patchline export runs/photos --out photos-timm --format timm")
    screen.run("patchline export runs/photos --out photos-timm --format hugging_face")


_OPERATORS = """\
# Only here, where torchvision is built for another torch:
from benchmarks.torchvision_operators import import_torchvision
import_torchvision()

"""
_VIT_TINY = f"""\
{_OPERATORS}import timm

model = timm.create_model("vit_tiny_patch16_224")
timm.models.save_for_hf(model, "vit-tiny", safe_serialization=True)
"""
_IN_TIMM = f"""\
{_OPERATORS}import patchline, timm, torch
from torch.utils.data import DataLoader

model = timm.create_model("local-dir:tuned-timm", pretrained=True).eval()
settings = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**settings)
photos = patchline.open_dataset("data/photos-test").to_torch(
    transform=transform
)
hits = 0
with torch.no_grad():
    for images, labels in DataLoader(photos, batch_size=16):
        hits += (model(images).argmax(dim=1) == labels).sum().item()
print("top-1 in timm:", hits / len(photos))
"""


def timm(screen: Terminal) -> None:
    """Fine-tunes a folder of timm, and evaluates the result there. RuntimeError if the top-1 differs."""
    screen.title("A user of timm: fine-tune its weights, evaluate them there")
    screen.run("make setup > setup.log 2>&1")
    _write(screen, "evaluate_in_timm.py", _IN_TIMM)
    # Random weights stand for published ones, so that the session needs no network.
    _write(screen, "save_vit_tiny.py", _VIT_TINY)
    screen.run("python save_vit_tiny.py; ls vit-tiny")
    screen.run("patchline finetune photos --initial.weights vit-tiny \\\n  --data.url data/photos --run-dir runs/timm")
    ours = screen.run("patchline evaluate runs/timm --data.url data/photos-test")
    screen.run("patchline export runs/timm --out tuned-timm --format timm")
    screen.run("cat evaluate_in_timm.py")
    theirs = screen.run("python evaluate_in_timm.py", clear=False)
    top1 = re.search(r"top-1 in timm: (\d\.\d+)", theirs)
    if not top1 or f"{float(top1[1]):.4f}" not in ours:
        raise RuntimeError(f"timm's top-1 is not that of patchline evaluate:\n{ours}\n{theirs}")


_LOOP = """\
from itertools import islice

import patchline, torch
from torch.nn.functional import cross_entropy

patchline.index_tars("tars")  # adds an index; the tars stay as they are
photos = patchline.open_dataset("tars")
print(photos, photos[0])

num_classes = len(photos.classes)
config = patchline.ModelConfig(
    name="vit_ti16", image_size=64, num_classes=num_classes
)
model = patchline.build_model(config, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = patchline.train_batches("tars", global_batch=32, image_size=64)
for step, batch in enumerate(islice(batches, 40), 1):
    loss = cross_entropy(model(batch.images), batch.labels[:, 0])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}, loss {loss.item():.3f}")
"""


def pytorch(screen: Terminal) -> None:
    """Trains on tars in a loop of its own."""
    screen.title("A user of PyTorch: WebDataset tars, a loop of their own")
    screen.run("mkdir tars; cp data/photos/shards/*.tar tars; tar tf $(ls tars/*.tar | head -1) | head -4")
    _write(screen, "loop.py", _LOOP)
    screen.run("cat loop.py")
    screen.run("python loop.py", clear=False)


def slurm(screen: Terminal) -> None:
    """Goes from an empty account to a dry run that can be reviewed."""
    screen.title("A user of Slurm: ViT-H/14 on 8 nodes, up to the dry run")
    screen.run("patchline example cluster.yaml > cluster.yaml; grep -v '^#' cluster.yaml | head -12")
    screen.run("patchline plan vit_h14_jft --gpu h100 --nodes 4 8 16 --gpus-per-node 8 --max-time 24")
    screen.run(
        "patchline submit pretrain vit_h14_jft --cluster cluster.yaml --nodes 8 \\\n"
        "  --data.url s3://bucket/jft --run-dir runs/h14 --dry-run"
    )


def _write(screen: Terminal, name: str, content: str) -> None:
    (screen.folder / name).write_text(content)


PARTS = {
    "demo": demo,
    "pack": pack,
    "train": train,
    "after": after,
    "timm": timm,
    "pytorch": pytorch,
    "slurm": slurm,
}


def main() -> None:
    """Runs the session and writes docs/session.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, required=True, help="a folder of class folders of JPEGs")
    parser.add_argument("--work", type=Path, help="folder for the clone (default: a temporary folder)")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "docs" / "session.md")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="patchline-session-"))
    clone = work / "patchline"
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", str(CHECKOUT), str(clone)], check=True)
        photographs(arguments.photographs, clone / "photographs")
    kept = ("PATH", "HOME", "LANG", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
    environ = {name: os.environ[name] for name in kept if name in os.environ} | {
        "TERM": "screen-256color",
        "VIRTUAL_ENV_DISABLE_PROMPT": "1",
    }
    with terminal(clone, environ) as screen:
        screen.shown.append(f"# A first session, screen by screen\n\n{__doc__.split(chr(10) * 2)[0]}\n")
        screen.shown.append(
            f"Recorded with version {version('patchline')} by `python -m docs.session --photographs DIR`.\n"
        )
        for part in arguments.only.split(","):
            PARTS[part](screen)
    arguments.out.write_text("\n".join(screen.shown))


if __name__ == "__main__":
    main()
