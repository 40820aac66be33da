"""The n-gram memory: hashes bit for bit with the released constants, in any chunks, around images; the gated update."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2_jax import engram
from csa2_jax.config import ModelConfig
from csa2_jax.layers import take_layer
from csa2_jax.numerics import Numerics
from tests import random_checkpoint as rc
from tests.golden_sets import golden_file
from tests.oracle import OracleModel
from tests.small_models import load_random, relative_error

ROOT = Path(__file__).resolve().parent.parent
NUMERICS = Numerics("float32", fake_quant=False)
LOOK_BACKS = 3  # ids kept for 4-grams


@functools.cache
def recorded() -> dict[str, np.ndarray]:
    with np.load(golden_file("engram.npz")) as arrays:
        return {name: arrays[name] for name in arrays.files}


@functools.cache
def released() -> tuple[Any, np.ndarray]:
    """(constants of both layers, product tables uint32 [layer, look-back, id, 2]) of the released model."""
    config = ModelConfig.from_hf(ROOT / "configs" / "v41_flash.json")
    tables = [engram.product_table(c, config.engram_compressed_vocab_size) for c in config.engram_constants]
    return config.engram_constants, np.stack(tables)


@functools.partial(jax.jit, static_argnames=("slot", "tokens"))
def _rows(ids_BU: Any, products: Any, pad: Any, *, slot: int, tokens: int) -> Any:
    return engram.hash_rows(ids_BU, products, released()[0][slot], pad, tokens)


def rows_of(ids_BU: np.ndarray, slot: int, tokens: int) -> np.ndarray:
    pad = int(recorded()["pad_compressed"])
    return np.asarray(_rows(jnp.asarray(ids_BU, jnp.int32), released()[1][slot], pad, slot=slot, tokens=tokens))


def fresh(ids: np.ndarray) -> np.ndarray:
    """Ids behind the dead history of a new sequence."""
    return np.concatenate([np.full((len(ids), LOOK_BACKS), -1), ids], axis=1)


# --- hashes -------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("slot", [0, 1])
def test_hashes_are_the_recorded_ones_bit_for_bit(slot: int) -> None:
    """With everything alive, and with masked positions, which an n-gram may neither hold nor cross."""
    z = recorded()
    ids = z["compressed"].astype(np.int64)
    np.testing.assert_array_equal(rows_of(fresh(ids), slot, 120), z["hash_all_alive"][:, :, slot])
    masked = np.where(z["alive_mask"], ids, -1)
    assert (masked < 0).any()
    np.testing.assert_array_equal(rows_of(fresh(masked), slot, 120), z["hash_masked"][:, :, slot])


def hash_by_hand(window: list[int], slot: int) -> list[int]:
    """Python integers: `window` is the token's id and its look-backs, newest first, already replaced by pad."""
    constants, out = released()[0][slot], []
    heads, mixed = len(constants.primes) // LOOK_BACKS, 0
    for back, compressed in enumerate(window):
        mixed ^= compressed * int(constants.multipliers[back])
        if back:
            for column in range((back - 1) * heads, back * heads):
                out.append(mixed % int(constants.primes[column]) + int(constants.offsets[column]))
    return out


def test_hashes_after_an_image_see_pad_and_nothing_before_it() -> None:
    """ids 11 12 13 IMAGE IMAGE 21 22 23 24: the first three positions after an image have shorter and shorter blanks."""
    pad = int(recorded()["pad_compressed"])
    ids = np.array([[11, 12, 13, -1, -1, 21, 22, 23, 24]])
    found = rows_of(fresh(ids), 0, 9)[0]
    windows = {
        2: [13, 12, 11, pad],  # the start of the text
        3: [pad] * 4,  # at an image token look-back 0 itself is pad
        5: [21, pad, pad, pad],
        6: [22, 21, pad, pad],
        7: [23, 22, 21, pad],
        8: [24, 23, 22, 21],
    }
    for position, window in windows.items():
        assert found[position].tolist() == hash_by_hand(window, 0), position
    # A look-back that has passed an image stays pad even where older tokens are alive.
    gap = rows_of(fresh(np.array([[31, 32, -1, 33]])), 0, 4)[0]
    assert gap[3].tolist() == hash_by_hand([33, pad, pad, pad], 0)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_hashes_in_ragged_chunks_equal_one_shot(width: int) -> None:
    """The history carried between calls is all that a hash needs; padding never enters it."""
    z, rng = recorded(), np.random.default_rng(width)
    ids = np.where(z["alive_mask"], z["compressed"], -1)[:, :30].astype(np.int64)
    whole = rows_of(fresh(ids), 1, 30)
    history, done = np.full((3, LOOK_BACKS), -1), np.zeros(3, int)
    while (done < 30).any():
        count = np.minimum(rng.integers(0, width + 1, 3), 30 - done)
        chunk = rng.integers(0, 1000, (3, width))  # garbage where nothing is real
        for b in range(3):
            chunk[b, : count[b]] = ids[b, done[b] : done[b] + count[b]]
        together = np.concatenate([history, chunk], axis=1)
        rows = rows_of(together, 1, width)
        for b in range(3):
            np.testing.assert_array_equal(rows[b, : count[b]], whole[b, done[b] : done[b] + count[b]])
        history = np.asarray(engram.next_history(jnp.asarray(together), jnp.asarray(count), LOOK_BACKS))
        done = done + count


def test_history_marks_image_tokens_dead_and_maps_the_others() -> None:
    token_map = jnp.array([0, 0, 1, 1, 2], jnp.int32)
    tokens, image = jnp.array([[4, 3, 2]]), jnp.array([[False, True, False]])
    found = engram.history_ids(tokens, jnp.array([[7, -1]]), token_map, image)
    np.testing.assert_array_equal(found, [[7, -1, 2, -1, 1]])
    np.testing.assert_array_equal(
        engram.history_ids(tokens, jnp.zeros((1, 0), jnp.int32), token_map, None), [[2, 1, 1]]
    )


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    value=st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4),
    prime=st.lists(st.sampled_from([2, 53, 16_000_057, 16_000_889, 2**25 - 39]), min_size=3, max_size=3),
)
def test_modulo_of_two_limbs_equals_python(value: list[int], prime: list[int]) -> None:
    high, low = (jnp.array([v >> shift & 0xFFFFFFFF for v in value], jnp.uint32) for shift in (32, 0))
    found = jax.jit(engram._modulo)(high, low, jnp.array(prime, jnp.uint32))
    np.testing.assert_array_equal(found, [[v % p for p in prime] for v in value])


def test_product_table_is_exact() -> None:
    constants, tables = released()
    for slot in range(2):
        for back, multiplier in enumerate(constants[slot].multipliers):
            for compressed in (0, 1, 2, 12_345, 99_091):
                high, low = (int(limb) for limb in tables[slot, back, compressed])
                assert (high << 32) + low == compressed * int(multiplier)


# --- the update ---------------------------------------------------------------------------------------------------

KNOBS: dict[str, Any] = {
    "swa_layers": 1, "encoder_ratios": (2,), "encoder_extra": "", "decoder_extra": "U", "hidden_size": 32,
    "engram_layers": (0, 2), "engram_max_ngram_size": 3, "engram_n_heads": 2, "draft_stages": 0, "hc_mult": 4,
}  # fmt: skip


@functools.cache
def small() -> tuple[Any, OracleModel]:
    config = rc.random_config(5, quantisable=True, **KNOBS)
    return load_random(KNOBS, seed=5), OracleModel(config, rc.random_tensors(config, 6))


@functools.partial(jax.jit, static_argnums=0)
def update(slot: int, x: Any, rows: Any, image: Any) -> Any:
    model, _ = small()
    module = take_layer(model.engram, slot)
    return module(x, rows, model.engram_tables[slot], image, model.config, NUMERICS)


def streams(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((1, 6, 4, 32)).astype(np.float32), rng.integers(0, 46, (1, 6, 4)).astype(np.int32)


@pytest.mark.parametrize("slot", [0, 1])
def test_update_equals_the_oracle(slot: int) -> None:
    (_, oracle), (x, rows) = small(), streams(slot)
    expected = oracle.engram(KNOBS["engram_layers"][slot], x[0].astype(np.float64), rows[0], None)
    found = np.asarray(update(slot, x, rows, None))[0]
    assert relative_error(found, expected) < 1e-6
    assert relative_error(found, x[0]) > 0.05  # it writes something


def test_update_leaves_image_tokens_untouched() -> None:
    x, rows = streams()
    image = np.array([[False, True, True, False, False, True]])
    plain, found = np.asarray(update(0, x, rows, None)), np.asarray(update(0, x, rows, image))
    np.testing.assert_array_equal(found[image], x[image])
    np.testing.assert_allclose(found[~image], plain[~image], rtol=1e-6, atol=1e-6)


def test_update_of_a_vanishing_product_is_half_open_and_differentiable() -> None:
    """A stream of zeros gives dot 0, whose sign is 0: the gate is 1/2, whatever the floor under the root."""
    _, rows = streams()
    zeros = np.zeros((1, 6, 4, 32), np.float32)
    expected = small()[1].engram(0, zeros[0].astype(np.float64), rows[0], None)
    assert np.abs(expected).max() > 0.01
    assert relative_error(np.asarray(update(0, zeros, rows, None))[0], expected) < 1e-6
    slope = jax.jit(jax.grad(lambda x: jnp.sum(update(0, x, rows, None))))(jnp.asarray(zeros))
    assert np.isfinite(slope).all()
