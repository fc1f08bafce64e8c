"""The keyed hash never changes, no two kinds of draws can have the same key, and every key is in the registry."""

import re
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from shards import hashing
from shards.hashing import BLOCKS, DROPOUT, ROTATIONS, Purpose, derive_key, hash_array, hash_order, mix, uniforms

CHECKOUT = Path(__file__).resolve().parents[2]
PURPOSES = [value for value in vars(hashing).values() if isinstance(value, Purpose)]
# Keys without a purpose, as the registry's docstring says.
WITHOUT = {
    "pipeline/data/mixup.py": "derive_key(key, round_number)",
    "pipeline/models/build.py": "derive_key(seed, zlib.crc32(name.encode()))",
    "pipeline/training/zero/gradient_check.py": "derive_key(what, number)",  # of a copy that is thrown away
    "shards/card/facts.py": "derive_key(_MOSAIC, shard)",
    "shards/sources/digits.py": "derive_key(1797, 80, 20)",
}


def test_no_two_purposes_share_number_and_count_of_words() -> None:
    assert max(Counter((purpose.number, len(purpose.words)) for purpose in PURPOSES).values()) == 1


def test_no_number_is_used_twice_but_for_one_pair() -> None:
    """That pair is part of runs of older versions. No other may be added, even if the words differ."""
    numbers = Counter(purpose.number for purpose in PURPOSES)
    assert {number for number, count in numbers.items() if count > 1} == {ROTATIONS.number} == {DROPOUT.number}
    assert numbers[ROTATIONS.number] == 2


def test_small_values_give_no_key_twice() -> None:
    keys = [p.key(*values) for p in PURPOSES for values in product(range(6), repeat=len(p.words))]
    assert len(set(keys)) == len(keys)


def test_a_key_is_derived_from_the_words_and_the_number() -> None:
    assert BLOCKS.key(11, 3) == derive_key(11, 3, 1)
    assert DROPOUT.key(11, 3, 1, 0) == derive_key(11, 3, 1, 0, 5)
    with pytest.raises(TypeError, match="draws the order of an epoch's blocks takes seed, epoch, not 1 values"):
        BLOCKS.key(11)


def test_every_other_key_is_one_of_four() -> None:
    found = {}
    for path in sorted(path for room in ("shards", "pipeline", "jobs") for path in (CHECKOUT / room).rglob("*.py")):
        name, text = path.relative_to(CHECKOUT).as_posix(), path.read_text()
        calls = [line for line in text.splitlines() if re.search(r"(?<!def )\bderive_key\(", line)]
        if calls and name != "shards/hashing.py":
            assert len(calls) == 1, name
            found[name] = calls[0]
    assert found.keys() == WITHOUT.keys()
    assert all(WITHOUT[name] in line for name, line in found.items())


def test_values_are_frozen() -> None:
    assert mix(1) == 0x5692161D100B05E5
    assert derive_key(1, 2, 3) == DERIVED
    assert hash_array(np.array([0, 1, 2]), key=9).tolist() == HASHED


def test_parts_and_layouts_change_no_hash() -> None:
    """Long arrays are hashed part by part, and an array may be laid out column by column."""
    values = np.arange(3 * 20_000, dtype=np.int64).reshape(3, 20_000)
    one_by_one = [mix(value * 0x9E3779B97F4A7C15 + 9) for value in range(values.size)]
    assert hash_array(values, key=9).reshape(-1).tolist() == one_by_one
    assert hash_array(np.asfortranarray(values), key=9).reshape(-1).tolist() == one_by_one
    assert hash_array(np.array(2), key=9).tolist() == HASHED[2]


@pytest.mark.parametrize("num_values", [0, 1, 2, 16_384, 50_001])
@pytest.mark.parametrize("key", [0, 9, 2**64 - 1])
def test_the_order_of_hashes_is_an_argsort(num_values: int, key: int) -> None:
    expected = np.argsort(hash_array(np.arange(num_values), key=key), kind="stable")
    np.testing.assert_array_equal(hash_order(num_values, key=key), expected, strict=True)


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
