"""Which stored pixels a view needs and what is done with them: pure geometry.

The crop of the upright image is turned the way the image is stored. A JPEG is decoded at 1/2, 1/4 or 1/8 if the crop at
that scale still covers the view in both directions; the crop's sides are then rounded to whole pixels of the decoded
image, halves up, in the image as stored.
"""

from dataclasses import dataclass

from pipeline.data.augment import Crop, Viewport
from pipeline.data.decode import scaled_size
from shards.orientation import Turn

_DENOMINATORS = (8, 4, 2)
_LEAST_SCALED = 8  # a smaller view is never decoded scaled: simplejpeg could take another scale of the same size


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class ViewPlan:
    """The image of stored_height x stored_width is decoded at 1 / denominator; the box is cut from that as it is
    stored, turned upright, and shown through the viewport."""

    stored_height: int
    stored_width: int
    denominator: int
    box: Box
    turn: Turn
    viewport: Viewport


def plan_view(size: tuple[int, int], turn: Turn, crop: Crop, viewport: Viewport, *, denominator: int) -> ViewPlan:
    """The plan for a crop of the upright image; `size` is (height, width) as stored."""
    box = _scaled(_stored_box(crop, turn, size), size, denominator)
    return ViewPlan(
        stored_height=size[0], stored_width=size[1], denominator=denominator, box=box, turn=turn, viewport=viewport
    )


def largest_denominator(crop: Crop, *, height: int, width: int) -> int:
    """The smallest scale at which a JPEG's crop still covers a view of height x width, as 8, 4, 2 or 1."""
    if min(height, width) < _LEAST_SCALED:
        return 1
    return next((f for f in _DENOMINATORS if crop.height >= f * height and crop.width >= f * width), 1)


def _stored_box(crop: Crop, turn: Turn, size: tuple[int, int]) -> Box:
    height, width = size[::-1] if turn.is_exchanged else size
    top = height - crop.top - crop.height if turn.is_upside_down else crop.top
    left = width - crop.left - crop.width if turn.is_leftright else crop.left
    if turn.is_exchanged:
        return Box(top=left, left=top, height=crop.width, width=crop.height)
    return Box(top=top, left=left, height=crop.height, width=crop.width)


def _scaled(box: Box, size: tuple[int, int], denominator: int) -> Box:
    if denominator == 1:
        return box
    half, (height, width) = denominator // 2, scaled_size(*size, denominator)
    top, left = (box.top + half) // denominator, (box.left + half) // denominator
    bottom = min(height, (box.top + box.height + half) // denominator)
    right = min(width, (box.left + box.width + half) // denominator)
    return Box(top=top, left=left, height=bottom - top, width=right - left)
