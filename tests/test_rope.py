"""Rotary positions: the right frequencies per kind of layer, the right pairs in everything that is rotated."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csa2_jax import indexer as indexer_module
from csa2_jax import rope
from csa2_jax.attention import Attention
from csa2_jax.compressor import Compressor
from csa2_jax.config import ModelConfig, RopeScaling
from csa2_jax.indexer import Indexer
from csa2_jax.layers import ParamFactory
from csa2_jax.numerics import Numerics
from csa2_jax.state import Step, make_pools, pool_name
from kernels_pallas import storage
from tests import random_checkpoint as rc
from tests.golden_sets import load_trace, materialise

ROOT = Path(__file__).resolve().parent.parent
F32 = jnp.dtype("float32")
NUMERICS = Numerics("float32", fake_quant=False)


def released() -> ModelConfig:
    return ModelConfig.from_hf(ROOT / "configs" / "v41_flash.json")


# --- frequencies --------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_frequencies_of_the_released_model_are_the_two_thetas_with_yarn_where_pools_are_read() -> None:
    config = released()
    pair = np.arange(32)
    window = rope.layer_frequencies(config, reads_pool=False)
    pool = rope.layer_frequencies(config, reads_pool=True)
    assert window.dtype == pool.dtype == np.float32
    np.testing.assert_allclose(window, 10000.0 ** (-pair / 32), rtol=5e-7)
    plain = 160000.0 ** (-pair / 32)
    np.testing.assert_allclose(pool[:16], plain[:16], rtol=5e-7)  # up to pair 15: more than 32 turns in 65,536 tokens
    np.testing.assert_allclose(pool[25:], plain[25:] / 16, rtol=5e-7)  # from pair 25: less than one
    ramp = (pair - 15) / 10
    np.testing.assert_allclose(pool[15:26], (plain / 16 * ramp + plain * (1 - ramp))[15:26], rtol=5e-7)


def test_frequencies_without_an_original_length_have_no_yarn() -> None:
    scaled = rope.inverse_frequencies(16, 160000.0, RopeScaling(16, 32, 1, 4096))
    off = rope.inverse_frequencies(16, 160000.0, RopeScaling(16, 32, 1, 0))
    np.testing.assert_array_equal(off, rope.inverse_frequencies(16, 160000.0))
    assert (scaled != off).any()


def test_frequencies_of_an_empty_ramp_jump_from_plain_to_scaled() -> None:
    """beta_fast = beta_slow with a whole pair index: high - low is floored, nothing divides by zero."""
    width, theta = 8, 10000.0
    original = 2 * math.pi * theta ** (2 * 2 / width)  # pair 2 makes exactly one turn
    found = rope.inverse_frequencies(width, theta, RopeScaling(4, 1, 1, original))  # type: ignore[arg-type]
    plain = rope.inverse_frequencies(width, theta)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[3], plain[3] / 4)
    np.testing.assert_allclose(found[:2], plain[:2])


@pytest.mark.parametrize(("layer", "reads_pool"), [("L0", False), ("L2", True)])
def test_tables_are_the_recorded_ones(layer: str, reads_pool: bool) -> None:
    config = ModelConfig.from_hf(materialise("tiny8_f32_noqat"))
    recorded = load_trace("tiny8_f32_noqat")[f"rope/{layer}"]
    cos, sin = rope.table(jnp.arange(len(recorded)), rope.layer_frequencies(config, reads_pool))
    np.testing.assert_allclose(cos, recorded[..., 0], rtol=0, atol=2e-7)
    np.testing.assert_allclose(sin, recorded[..., 1], rtol=0, atol=2e-7)
    other = rope.table(jnp.arange(len(recorded)), rope.layer_frequencies(config, not reads_pool))[0]
    assert np.abs(np.asarray(other) - recorded[..., 0]).max() > 0.5


@pytest.mark.parametrize("reads_pool", [False, True])
def test_table_is_accurate_up_to_a_million_positions(reads_pool: bool) -> None:
    """Against float64 of the same f32 angle: angles reach 1e6 radians, where a sloppy range reduction is lost."""
    config = released()
    assert config.max_position_embeddings == 1_048_576
    rng = np.random.default_rng(0)
    edges = [0, 1, 127, 65_535, 65_536, 1_048_574, 1_048_575]
    positions = np.concatenate([edges, rng.integers(0, 1_048_576, 20_000)]).astype(np.int32)
    frequencies = rope.layer_frequencies(config, reads_pool)
    cos, sin = jax.jit(lambda p: rope.table(p, frequencies))(positions)
    angle = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angle), rtol=0, atol=3e-7)
    np.testing.assert_allclose(sin, np.sin(angle), rtol=0, atol=3e-7)
    np.testing.assert_allclose(np.asarray(cos) ** 2 + np.asarray(sin) ** 2, 1, rtol=0, atol=1e-6)


# --- rotation -----------------------------------------------------------------------------------------------------


def test_rotate_turns_interleaved_pairs_of_the_last_channels_only() -> None:
    rotation = rope.table(jnp.array([3]), np.array([1.0, 0.25], np.float32))
    x = jnp.array([[7.0, 8.0, 9.0, 1.0, 0.0, 0.0, 2.0]])
    c, s = np.cos([3.0, 0.75]), np.sin([3.0, 0.75])
    expected = [[7.0, 8.0, 9.0, c[0], s[0], -2 * s[1], 2 * c[1]]]
    np.testing.assert_allclose(rope.rotate(x, rotation), expected, rtol=1e-6)


def test_rotate_inverse_undoes_rotate_and_keeps_the_norm() -> None:
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((5, 3, 40)), jnp.float32)
    rotation = rope.over_heads(rope.table(jnp.arange(100, 105), rope.inverse_frequencies(16, 10000.0)))
    turned = rope.rotate(x, rotation)
    assert np.abs(np.asarray(turned - x))[..., 24:].max() > 1
    np.testing.assert_array_equal(turned[..., :24], x[..., :24])
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(rope.rotate(turned, rotation, inverse=True), x, atol=1e-5)


def test_rotate_computes_in_f32_and_casts_once() -> None:
    x = jnp.asarray(np.random.default_rng(2).standard_normal((64, 16)), jnp.bfloat16)
    rotation = rope.table(jnp.arange(64), rope.inverse_frequencies(16, 10000.0))
    found = rope.rotate(x, rotation)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, rope.rotate(x.astype(jnp.float32), rotation).astype(jnp.bfloat16))


# --- basis vectors through everything that is rotated ---------------------------------------------------------------

WIDTH, ROTATED, POSITION = 32, 8, 6


@functools.cache
def config() -> ModelConfig:
    return ModelConfig.from_hf(
        rc.random_config(
            0, quantisable=True, swa_layers=1, encoder_ratios=(2, 3), encoder_extra="", decoder_extra="U", hidden_size=64,
            num_attention_heads=2, o_groups=1, o_lora_rank=32, qk_rope_head_dim=ROTATED, index_n_heads=2, yarn=32,
            engram_layers=(), draft_stages=0,
        )
    )  # fmt: skip


def rows_of_basis(width: int) -> np.ndarray:
    """[WIDTH, width]: row c has a one in channel c."""
    return np.eye(WIDTH, width, dtype=np.float32)


def tokens_at(position: int, batch: int = 1, tokens: int = WIDTH) -> Step:
    """A call whose tokens all sit at `position` (as far as rotary is concerned)."""
    where = jnp.full((batch, tokens), position)
    return Step(
        start_B=jnp.full(batch, position),
        count_B=jnp.full(batch, tokens),
        position_BT=where,
        first_BT=jnp.zeros((batch, tokens), jnp.int32),
        decoder_first_BT=jnp.zeros((batch, tokens), jnp.int32),
        image_BT=None,
        rope_window=rope.table(where, rope.layer_frequencies(config(), reads_pool=False)),
        rope_pool=rope.table(where, rope.layer_frequencies(config(), reads_pool=True)),
    )


def set_weight(linear: Any, value: np.ndarray) -> None:
    assert linear.weight.shape == value.shape
    linear.weight = nnx.Param(jnp.asarray(value))


def attention() -> Attention:
    """One layer whose projections copy: query head 1 and window row are the input's first channels."""
    module = Attention(config(), ParamFactory(F32, False))
    set_weight(module.wq_b, np.concatenate([np.zeros((WIDTH, 32), np.float32), rows_of_basis(32)]))
    set_weight(module.wkv, rows_of_basis(64))
    set_weight(module.wo_a, np.concatenate([np.zeros((32, WIDTH), np.float32), np.eye(32, dtype=np.float32)], axis=1))
    set_weight(module.wo_b, np.eye(64, 32, dtype=np.float32))
    return module


def main_query(step: Step, rotation: rope.Table) -> Any:
    return attention().query(jnp.asarray(rows_of_basis(32)[None]), rotation, config(), NUMERICS)[0, :, 1]


def window_row(step: Step, rotation: rope.Table) -> Any:
    return attention().window_kv(jnp.asarray(rows_of_basis(64)[None]), rotation, config(), NUMERICS)[0]


def output(step: Step, rotation: rope.Table) -> Any:
    heads = jnp.zeros((1, WIDTH, 2, WIDTH)).at[0, :, 1].set(rows_of_basis(WIDTH))
    return attention().output(heads, rotation, config(), NUMERICS)[0, :, :32]


def compressed(what: str, ratio: int) -> Any:
    """Row b of the batch holds tokens that all are basis vector b; the first entry made sits at POSITION."""
    module = Compressor(config(), ratio, ParamFactory(F32, False), stack=())
    set_weight(module.wkv, rows_of_basis(64))
    set_weight(module.wk, np.eye(32, dtype=np.float32))
    pool = make_pools(config(), WIDTH, 16, "f32")[pool_name(ratio)]
    x = jnp.broadcast_to(rows_of_basis(64)[:, None], (WIDTH, ratio, 64))
    pool, _ = module(x, pool, 0, tokens_at(POSITION, WIDTH, ratio), config(), NUMERICS)
    return storage.unpack(pool.kv_GBPH if what == "kv" else pool.key_GBPJ)[0, :, POSITION // ratio]


def index_query(monkeypatch: pytest.MonkeyPatch) -> Any:
    module, seen = Indexer(config(), ParamFactory(F32, False), stack=()), []

    def spy(q: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(q)
        return None, None

    monkeypatch.setattr(indexer_module, "index_select", spy)
    set_weight(module.wq_b, np.concatenate([np.zeros((WIDTH, 32), np.float32), rows_of_basis(32)]))
    x = jnp.zeros((1, WIDTH, 64))
    keys = jnp.zeros((1, 1, 4, WIDTH))
    rows = jnp.asarray(rows_of_basis(32)[None])
    module(rows, x, keys, 0, 2, None, False, tokens_at(POSITION), config(), NUMERICS)
    return seen[0][0, :, 1]


def expected_rows(reads_pool: bool, *, inverse: bool = False, norm: float = 1.0) -> np.ndarray:
    """Row c: basis vector c after the rotation at POSITION."""
    angle = POSITION * rope.layer_frequencies(config(), reads_pool).astype(np.float64) * (-1 if inverse else 1)
    rows = np.eye(WIDTH)
    for j, a in enumerate(angle):
        even = WIDTH - ROTATED + 2 * j
        rows[even, even : even + 2] = np.cos(a), np.sin(a)
        rows[even + 1, even : even + 2] = -np.sin(a), np.cos(a)
    return rows * norm


@pytest.mark.parametrize("reads_pool", [False, True], ids=["window-only layer", "pool layer"])
@pytest.mark.parametrize(
    ("make", "inverse", "norm"), [(main_query, False, 1), (window_row, False, WIDTH**0.5), (output, True, 1)]
)
def test_attention_rotates_the_right_pairs(make: Any, inverse: bool, norm: float, reads_pool: bool) -> None:
    """Main query, window row, and backwards on the output; the norm is 1, or what RMSNorm makes of a basis vector."""
    step = tokens_at(POSITION)
    found = make(step, step.rope_pool if reads_pool else step.rope_window)
    np.testing.assert_allclose(found, expected_rows(reads_pool, inverse=inverse, norm=norm), atol=2e-6)


@pytest.mark.parametrize("what", ["kv", "key"])
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_pool_entry_and_index_key_are_rotated_at_their_first_token(what: str, ratio: int) -> None:
    np.testing.assert_allclose(compressed(what, ratio), expected_rows(True, norm=WIDTH**0.5), atol=1e-5)


def test_index_key_is_made_from_the_latent_before_its_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turning twice would double the angle: key and pool entry get the same rotation from the same latent."""
    np.testing.assert_allclose(compressed("key", 2), compressed("kv", 2), atol=1e-6)
    np.testing.assert_allclose(index_query(monkeypatch), expected_rows(True), atol=2e-6)
