"""The figures of `patchline inspect`, drawn with matplotlib: arrays in, PNG and SVG files out.

Shape letters: K components, P patch, L layers, h heads, B images, H W pixels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shards.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
_ACROSS = 7  # components in a row, as in Figure 7 of the ViT paper (arXiv 2010.11929)
_INCH = 100  # pixels per inch of a figure; PNG files have 1.5 times as many
# The width is in inches, and the sizes of titles and text are in points. Figures are narrow and their text is large, so
# that a report can be read on a phone.
_WIDTH, _TITLE, _TEXT = 5.2, 11, 10
_IMAGES_ACROSS = 4
_MEASURES = {"cosine_similarity": "features (cosine similarity)", "same_class": "images with the same class"}


def filters(components_KPP3: torch.Tensor) -> "Figure":
    """Draws Figure 7, left: each component as an image, scaled from its lowest to its highest weight."""
    num = len(components_KPP3)
    side = _WIDTH / _ACROSS
    figure = _figure(_WIDTH, 0.4 + side * -(-num // _ACROSS))
    cells = figure.subplots(-(-num // _ACROSS), _ACROSS, squeeze=False).ravel()
    for number, axes in enumerate(cells):
        axes.axis("off")
        if number < num:
            one = components_KPP3[number].numpy()
            axes.imshow((one - one.min()) / max(float(np.ptp(one)), 1e-12), interpolation="nearest")
    figure.suptitle(f"First {num} principal components of the filters", fontsize=_TITLE)
    return figure


def positions(pictures: Sequence[tuple[str, torch.Tensor]]) -> "Figure":
    """Draws Figure 7, centre: uint8[H, W, 3] pictures of similarities with their titles, one below the other."""
    figure = _figure(_WIDTH, 0.5 + _WIDTH * len(pictures))
    for axes, (title, picture) in zip(figure.subplots(len(pictures), 1, squeeze=False)[:, 0], pictures, strict=True):
        axes.imshow(picture.numpy(), interpolation="nearest")
        axes.set_title(title, fontsize=_TITLE)
        axes.axis("off")
    figure.supxlabel("Cosine similarity of each position with all\nothers: -1 (dark) to 1 (bright)", fontsize=_TEXT)
    return figure


def attention_distances(pixels_Lh: torch.Tensor, *, image_size: int, uniform: float) -> "Figure":
    """Draws Figure 7, right: a dot for each head of each layer, and a line where uniform attention would be."""
    figure = _figure(_WIDTH, 4.2)
    axes = figure.subplots()
    layer = np.repeat(np.arange(1, len(pixels_Lh) + 1), pixels_Lh.shape[1])
    axes.scatter(layer, pixels_Lh.numpy().ravel(), s=16, c=layer, cmap="viridis")
    axes.axhline(uniform, color="grey", linestyle="--", linewidth=0.8, label="uniform attention")
    figure.legend(loc="outside lower center", fontsize=_TEXT, frameon=False)
    axes.set_xlabel("Layer", fontsize=_TITLE)
    axes.set_ylabel("Mean attention distance (pixels)", fontsize=_TITLE)
    axes.set_ylim(*_filled(min(uniform, float(pixels_Lh.min())), max(uniform, float(pixels_Lh.max()))))
    axes.tick_params(labelsize=_TEXT)
    axes.set_title(f"How far each head looks, in images of {image_size} px", fontsize=_TITLE)
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def shift_consistency(shifts: Sequence[int], lines: Mapping[str, Sequence[float]], *, stride: int) -> "Figure":
    """Draws a line for each measure over the shift in pixels, with a mark where the image has moved by whole
    patches."""
    figure = _figure(_WIDTH, 4.2)
    axes = figure.subplots()
    for name, values in lines.items():
        axes.plot(shifts, values, marker="o", markersize=3, label=_MEASURES[name])
    for multiple in range(stride, shifts[-1] + 1, stride):
        axes.axvline(multiple, color="grey", linestyle="--", linewidth=0.8)
    axes.set_xlabel(f"Shift (pixels); dashed: multiples of {stride} px", fontsize=_TITLE)
    axes.set_ylabel("Share, or cosine", fontsize=_TITLE)
    axes.set_ylim(*_filled(min(min(values) for values in lines.values()), 1.0))
    axes.tick_params(labelsize=_TEXT)
    figure.legend(loc="outside lower center", fontsize=_TEXT, frameon=False)
    axes.set_title("What stays the same when an image moves", fontsize=_TITLE)
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _filled(lowest: float, highest: float) -> tuple[float, float]:
    """Returns the ends of an axis that these values fill. It begins at 0 only if they come near it."""
    margin = 0.06 * ((highest - lowest) or abs(highest) or 1.0)
    return 0.0 if 0 <= lowest < 0.3 * highest else lowest - margin, highest + margin


def rollouts(images_BHW3: np.ndarray, maps_BHW: torch.Tensor) -> "Figure":
    """Draws Figures 6 and 14: rows of images, and below each image a copy whose brightness is the model's attention."""
    num, across = len(images_BHW3), min(_IMAGES_ACROSS, len(images_BHW3))
    num_rows, side = -(-num // across), min(2.0, _WIDTH / across)
    figure = _figure(_WIDTH, 0.6 + 2 * side * num_rows)
    rows = figure.subplots(2 * num_rows, across, squeeze=False)
    for axes in rows.ravel():
        axes.axis("off")
    for number in range(num):
        row, column = 2 * (number // across), number % across
        image, weight = images_BHW3[number], maps_BHW[number][None, None]
        bright = torch.nn.functional.interpolate(weight, size=image.shape[:2], mode="bilinear", align_corners=False)
        rows[row, column].imshow(image)
        rows[row + 1, column].imshow((image * bright[0, 0].numpy()[..., None]).astype(np.uint8))
    figure.suptitle(
        "What attention takes in, from layer to layer\nup to the output (attention rollout)", fontsize=_TITLE
    )
    return figure


def save(figure: "Figure", folder: Path, name: str) -> list[str]:
    """Writes NAME.png and NAME.svg, and returns these names. Raises UserError if they cannot be written."""
    import matplotlib as mpl  # noqa: PLC0415 - slow

    names = [f"{name}.{kind}" for kind in FORMATS]
    with mpl.rc_context({"svg.hashsalt": name}):
        for one in names:
            metadata = {"Date": None} if one.endswith("svg") else {}
            try:
                figure.savefig(folder / one, dpi=1.5 * _INCH, metadata=metadata)
            except OSError as error:
                raise UserError(
                    f"cannot write {one} in {str(folder)!r}: {error.strerror}", todo="give another --out"
                ) from error
    return names


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow

    return Figure(figsize=(max(width, 4.0), max(height, 1.8)), facecolor="white", layout="constrained")
