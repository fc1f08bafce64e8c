"""The dataset of each position of a mixed stream: exact, a pure function of the position, with no state to save.

Every lane group draws from the datasets on its own, by one table for a period of P draws: in any P consecutive draws,
dataset d comes exactly quotas[d] times, evenly spread as in stride scheduling (Waldspurger and Weihl, "Stride
Scheduling: Deterministic Proportional-Share Resource Management", 1995). A keyed hash rotates the table for each lane
group, so that a batch does not get all its samples of a rare dataset at once. Positions stay in their lane group, so a
rank reads its own lanes of every dataset; each dataset's own `SampleOrder` gives the sample at a position.

Shape letters: L lane groups, P draws a period, D datasets.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from shards.errors import UserError
from shards.hashing import ROTATIONS, hash_array

MIXING_VERSION = 1
MOST_DRAWS = 65_536  # a period of this length for ten datasets is a table of 5 MB


def quotas(weights: Sequence[float | str]) -> tuple[int, ...]:
    """The smallest integers in exactly the ratio of the weights as written: 0.7 and 0.3 give 7 and 3.

    UserError if a weight is not a number above 0, or if the sum, which is the period, would be above MOST_DRAWS.
    """
    shares = [_share(weight) for weight in weights]
    if not shares:
        raise UserError("there are no weights to mix by; give one for each dataset, e.g. 3 1")
    scale = lcm(*(share.denominator for share in shares))
    whole = [int(share * scale) for share in shares]
    common = gcd(*whole)
    found = tuple(number // common for number in whole)
    if sum(found) > MOST_DRAWS:
        what = f"the weights {', '.join(str(weight) for weight in weights)} repeat only after {sum(found):,} samples"
        raise UserError(f"{what}; allowed: {MOST_DRAWS:,}; round them, e.g. to {', '.join(_rounded(shares))}")
    return found


def _share(weight: float | str) -> Fraction:
    try:
        share = Fraction(str(weight).strip())
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if share <= 0:
        raise UserError(f"the weight {weight!r} cannot be mixed by; allowed: numbers above 0, e.g. 0.7 or 3")
    return share


def _rounded(shares: list[Fraction]) -> list[str]:
    total = sum(shares)
    return [f"{max(0.001, float(share / total)):.3f}" for share in shares]


class Mixture:
    """The dataset of every position, and the position in that dataset's own order.

    `quotas`: for each dataset, how often it comes in a period; `lanes`: L, the same for the order of every dataset.
    """

    def __init__(self, quotas: tuple[int, ...], *, seed: int, lanes: int) -> None:
        if not quotas or min(quotas) < 1:
            raise ValueError(f"quotas are {quotas}; allowed: one or more numbers of 1 or more")
        if lanes < 1:
            raise ValueError(f"lanes is {lanes}; allowed: 1 or more")
        self.quotas, self.lanes = quotas, lanes
        self.period = sum(quotas)
        self._quotas_D = np.array(quotas, dtype=np.int64)
        self._drawn_P = _even_draws(self._quotas_D)
        one_hot = self._drawn_P[:, None] == np.arange(len(quotas))
        self._before_PD = np.cumsum(one_hot, axis=0, dtype=np.int64) - one_hot  # draws of each among the first k
        key = ROTATIONS.key(seed)
        rotation = hash_array(np.arange(lanes, dtype=np.int64), key=key) % np.uint64(self.period)
        self._rotation_L = rotation.astype(np.int64)

    def split(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(dataset, position in that dataset's own order) of each position of the mixed stream; all of one shape.

        The own positions of a dataset in lane group g are g, g + L, g + 2L, ... without a gap.
        """
        count, group = np.divmod(positions, self.lanes)
        rotation = self._rotation_L[group]
        rounds, place = np.divmod(count + rotation, self.period)
        dataset = self._drawn_P[place]
        drawn = rounds * self._quotas_D[dataset] + self._before_PD[place, dataset]
        own_count = drawn - self._before_PD[rotation, dataset]
        return dataset, own_count * self.lanes + group


def _even_draws(quotas_D: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[P]: the datasets of a period's draws. Draw j of a dataset with quota q is due at (j + 1/2) / q."""
    dataset = np.repeat(np.arange(quotas_D.size), quotas_D)
    number = np.concatenate([np.arange(quota) for quota in quotas_D.tolist()])
    due = (2 * number + 1) / (2 * quotas_D[dataset])  # correctly rounded, so equal fractions are equal
    return dataset[np.lexsort((dataset, due))]
