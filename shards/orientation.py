"""The eight orientations of EXIF 2.32: how stored pixels become upright."""

from dataclasses import dataclass

from PIL.Image import Transpose

TAG = 0x0112
UPRIGHT = 1


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Rows and columns are swapped, then mirrored. `transpose` is Pillow's name for it (None: nothing to do)."""

    is_exchanged: bool
    is_upside_down: bool
    is_leftright: bool
    transpose: Transpose | None


TURNS = {
    orientation: Turn(is_exchanged=exchanged, is_upside_down=upside_down, is_leftright=leftright, transpose=transpose)
    for orientation, (exchanged, upside_down, leftright, transpose) in {
        UPRIGHT: (False, False, False, None),
        2: (False, False, True, Transpose.FLIP_LEFT_RIGHT),
        3: (False, True, True, Transpose.ROTATE_180),
        4: (False, True, False, Transpose.FLIP_TOP_BOTTOM),
        5: (True, False, False, Transpose.TRANSPOSE),
        6: (True, False, True, Transpose.ROTATE_270),
        7: (True, True, True, Transpose.TRANSVERSE),
        8: (True, True, False, Transpose.ROTATE_90),
    }.items()
}
