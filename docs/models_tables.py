"""Prints the tables of sizes and of pre-training costs in docs/reference/models.md, from the functions that count them.

python -m docs.models_tables
"""

import sys
from collections.abc import Iterable, Sequence

from jobs.recipes.paper_images import JFT
from pipeline.models import ModelConfig
from pipeline.models.config import NAMES
from pipeline.models.flops import FORWARD_AND_BACKWARD, forward_flops, num_parameters

# The paper's Table 6: name, epochs over JFT-300M, exaFLOPs. tests/pipeline/models/test_flops.py holds ours to them.
TABLE_6 = (
    ("vit_b32", 7, 55),
    ("vit_b16", 7, 224),
    ("vit_l32", 7, 196),
    ("vit_l16", 7, 783),
    ("vit_l16", 14, 1567),
    ("vit_h14", 14, 4262),
    ("bit_r50x1", 7, 50),
    ("bit_r50x2", 7, 199),
    ("bit_r101x1", 7, 96),
    ("bit_r152x1", 7, 141),
    ("bit_r152x2", 7, 563),
    ("bit_r152x2", 14, 1126),
    ("bit_r200x3", 14, 3306),
    ("r50_vit_b32", 7, 106),
    ("r50_vit_b16", 7, 274),
    ("r50_vit_l32", 7, 246),
    ("r50_vit_l16", 7, 859),
    ("r50_vit_l16", 14, 1668),
)


def sizes() -> str:
    """The model behind each name, at 224 px, and the paper's axial models, which are an option."""
    header = ("`name`", "architecture", "tokens", "parameters, without head", "with 1,000 classes", "forward, GFLOP")
    axial = [ModelConfig(name=name, attention="axial", pooling="average") for name in ("vit_b16", "vit_b32")]
    return markdown(header, map(_size, [*(ModelConfig(name=name) for name in NAMES), *axial]))


def costs() -> str:
    """Costs of pre-training on JFT-300M: the paper's Table 6 and ours."""
    header = ("`name`", "epochs", "the paper's exaFLOPs", "ours", "difference", "ours without padding", "difference")
    return markdown(header, (_cost(*row) for row in TABLE_6))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (header, ["---"] * len(header), *rows))


def _size(config: ModelConfig) -> tuple[str, ...]:
    described, tokens = [], "-"
    if config.resnet:
        units = " + ".join(map(str, config.resnet.units))
        kind = "basic units" if config.resnet.is_basic else "units"
        what = f"ResNet of {units} {kind}" if units else "root of a ResNet"
        described.append(f"{what}, width x{config.resnet.factor}")
    if not config.is_bit:
        size = config.size
        described.append(f"{size.depth} layers of width {size.width}, MLP {size.mlp_width}, {size.num_heads} heads")
        if config.attention == "axial":
            described.append("each two blocks, with axial attention (`attention`, `pooling`)")
        tokens = str(config.num_prefix_tokens + config.grid[0] * config.grid[1])
    counts = (num_parameters(config, head=False), num_parameters(config))
    giga = f"{forward_flops(config) / 1e9:.1f}"
    return f"`{config.name}`", ", ".join(described), tokens, *(f"{count:,}" for count in counts), giga


def _cost(name: str, epochs: int, paper: int) -> tuple[str, ...]:
    config = ModelConfig(name=name, num_classes=JFT.num_classes, representation=not name.startswith("bit"))
    exa = FORWARD_AND_BACKWARD * JFT.num_images * epochs / 1e18
    ours = (forward_flops(config, skip_padding=skip) * exa for skip in (False, True))
    cells = [cell for one in ours for cell in (f"{one:,.1f}", f"{round(100 * (one / paper - 1), 1) + 0.0:+.1f} %")]
    return f"`{name}`", str(epochs), f"{paper:,}", *cells


if __name__ == "__main__":
    sys.stdout.write(f"{sizes()}\n{costs()}")
