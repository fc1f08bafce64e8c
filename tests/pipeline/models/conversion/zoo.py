"""Which of timm's Vision Transformers can be read: builds each of them, small and with random weights, writes the
folder that timm publishes, imports it, and compares the logits, computed in fp64, so that rounding decides nothing.

python -m tests.pipeline.models.conversion.zoo [NAME ...]    prints the rows of these models, or writes the page
                                                              docs/reference/timm_weights.md of all (minutes)

test_zoo.py checks one of each kind and, in the long part, all, with the page.
"""

import json
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_any import open_any
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.timm import open_timm
from pipeline.models.weights.folder import filled_model
from shards.errors import UserError
from tests.pipeline.models.parity import imported, random_images

MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit", "naflexvit")
BOUND = 1e-5
GRID = 3  # patches down and across: an odd number, at which no two forms of rotary positions agree
HEAD_WIDTH = 8
PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "timm_weights.md"
_HEAD = """\
# timm's weights

Which Vision Transformers of timm {version} can be read: {num_read} of {num_all} names. Each is built by timm, small
and with random weights in every tensor, written as timm publishes it, and read as
`patchline finetune --initial.weights FOLDER` reads it. Its logits for random images, computed in fp64, must equal
timm's: "equal to {bound:g}" is the bound on the largest difference, as a share of the largest logit. The others are
refused, with the reason that is shown. A name stands for all published weights of its architecture.

`python -m tests.pipeline.models.conversion.zoo` writes this page; a long test compares it.

| Model | Logits, or why it is refused |
|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one model. `difference`: of the logits, as a share of the largest; None if it was refused, for the
    `reason`."""

    name: str
    difference: float | None = None
    reason: str = ""

    @property
    def words(self) -> str:
        """The result in words that depend on no rounding and on no sizes of tensors."""
        if self.difference is not None:
            return f"equal to {BOUND:g}" if self.difference <= BOUND else f"differs by {self.difference:.0e}"
        return re.sub(r"'FOLDER[^']*'", "the file", re.sub(r" \[[\d, ]+\]", "", self.reason))


def names_in(timm: ModuleType) -> list[str]:
    """All names of today, without those of timm's own tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [name for module in MODULES for name in timm.list_models(module=module)]
    deprecated = timm.models._registry._deprecated_models
    return [name for name in found if not name.startswith("test_") and name not in deprecated]


def small(timm: ModuleType, name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """timm's architecture with two narrow layers on few patches, noise in every tensor, and the arguments for it."""
    with torch.device("meta"):
        whole = timm.create_model(name, depth=1)
    arguments: dict[str, Any] = {"embed_dim": HEAD_WIDTH * whole.blocks[0].attn.num_heads, "depth": 2}
    if hasattr(whole, "embeds"):
        arguments["pos_embed_grid_size"] = (GRID, GRID)
    else:
        arguments["img_size"] = GRID * whole.patch_embed.feat_ratio()
    model = timm.create_model(name, num_classes=3, **arguments).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator) * (parameter.dim() != 4))
    return model, arguments


def outcome(timm: ModuleType, name: str) -> Outcome:
    """Reads one model, or says why not."""
    try:
        model, arguments = small(timm, name)
    except (AttributeError, AssertionError, TypeError):  # a block of another kind, or a depth that cannot be changed
        return Outcome(name=name, reason=refusal(timm, name))
    description = {"architecture": f"{name}.tag", "model_args": arguments}
    with tempfile.TemporaryDirectory() as folder:
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, f"{folder}/model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(description))
        try:
            weights = open_any(folder, Hints())
        except UserError as error:
            return Outcome(name=name, reason=str(error).replace(repr(folder)[1:-1], "FOLDER"))
        side = weights.config.image_size
        images_BHW3 = random_images(side, side)
        cfg: Any = model.pretrained_cfg
        mean, deviation = torch.tensor(cfg["mean"]), torch.tensor(cfg["std"])
        with torch.no_grad():
            theirs_BK = model.double()(((images_BHW3.double() / 255 - mean) / deviation).permute(0, 3, 1, 2))
            ours_BK = filled_model(weights).double()(images_BHW3)
    return Outcome(name=name, difference=float((ours_BK - theirs_BK).abs().max() / theirs_BK.abs().max()))


def refusal(timm: ModuleType, name: str) -> str:
    """Why a model that cannot be made small is refused; "not refused" if it is not."""
    with torch.device("meta"):
        model = timm.create_model(name)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    file = TensorFile(where="FOLDER", shapes=shapes, read=lambda key: torch.zeros(shapes[key]))
    try:
        open_timm(file, {"architecture": name}, Hints())
    except UserError as error:
        return str(error)
    return "not refused"


def outcomes(timm: ModuleType, names: Iterable[str]) -> Iterator[Outcome]:
    """Reads each of the models, without what reading them logs."""
    for name in names:
        logging.disable()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = outcome(timm, name)
        finally:
            logging.disable(logging.NOTSET)
        yield found


def row(found: Outcome) -> str:
    """The row of the page's table."""
    words = found.words.replace("|", r"\|")
    return f"| `{found.name}` | {words} |\n"


def page(found: Sequence[Outcome], *, version: str) -> str:
    """The whole page."""
    num_read = sum(each.difference is not None for each in found)
    head = _HEAD.format(num_read=num_read, num_all=len(found), version=version, bound=BOUND)
    return head + "".join(map(row, found))


def main() -> None:
    """Prints the rows of the models on the command line, or writes the page of all of them."""
    timm = imported("timm")
    names = sys.argv[1:] or names_in(timm)
    found = []
    for each in outcomes(timm, names):
        found.append(each)
        sys.stdout.write(row(each))
        sys.stdout.flush()
    if not sys.argv[1:]:
        PAGE.write_text(page(found, version=timm.__version__))


if __name__ == "__main__":
    main()
