"""The keyed hash never changes: its values are fixed here."""

import numpy as np

from shards.hashing import derive_key, hash_array, mix, uniforms


def test_values_are_frozen() -> None:
    assert mix(1) == 0x5692161D100B05E5
    assert derive_key(1, 2, 3) == DERIVED
    assert hash_array(np.array([0, 1, 2]), key=9).tolist() == HASHED


DERIVED = 17824878756907967
HASHED = [9398003893131893463, 12587370737594032228, 13847876567842155106]


def test_uniforms_are_uniform_and_depend_only_on_value_and_key() -> None:
    draws = uniforms(np.arange(4000), 5, key=3)
    assert draws.shape == (4000, 5)
    assert draws.min() >= 0
    assert draws.max() < 1
    np.testing.assert_allclose(draws.mean(axis=0), 0.5, atol=0.02)
    np.testing.assert_allclose(np.corrcoef(draws.T) - np.eye(5), 0, atol=0.06)
    np.testing.assert_array_equal(uniforms(np.array([7, 3]), 5, key=3), draws[[7, 3]])
    assert not np.array_equal(uniforms(np.array([7]), 5, key=4), draws[[7]])


def test_key_order_and_count_matter() -> None:
    keys = {derive_key(1, 2), derive_key(2, 1), derive_key(1, 2, 0), derive_key(1), derive_key(-1)}
    assert len(keys) == 5
