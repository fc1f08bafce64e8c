"""Our arm computes the batch that it should; the peer's arm needs its own environment."""

import numpy as np

from benchmarks.order_arms import ARMS, BATCH, LARGE, OURS, ours


def test_ours_gives_a_batch_of_different_samples() -> None:
    num_samples = 100_000
    ids = ours()(num_samples)
    assert ids.shape == (BATCH,)
    assert np.unique(ids).size == BATCH
    assert 0 <= ids.min() <= ids.max() < num_samples


def test_both_sizes_are_measured() -> None:
    assert f"{OURS}, {LARGE:,}" == "patchline, 303,000,000"
    assert "MosaicML, 10,000,000" in ARMS
