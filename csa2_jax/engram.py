"""Engram: an n-gram memory. The last n token ids are hashed to table rows, which gate a value into every residual stream.

    row(n, head, t) = (XOR_{i<n} c[t-i] * multiplier[i]) mod prime(n, head) + offset(n, head),   c = compressed ids
    e = concat of rows;  key_s, value = wkv e;  dot_s = <X_s q_w_s, k_w_s key_s> / (rms X_s * rms key_s * sqrt D)
    X_s += sigmoid(sign(dot) sqrt(max(|dot|, 1e-6))) * value

Once a look-back passes position 0 or an image token, it and all further ones read the pad id; image tokens keep their
residual untouched. Source: arXiv 2609.19969 (Engram), arXiv 2601.07372.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from csa2_jax.config import ModelConfig
from csa2_jax.engram_host import FetchedRows
from csa2_jax.layers import Linear, ParamFactory, dequantise, inverse_rms
from csa2_jax.ngram import NgramConstants
from csa2_jax.numerics import Numerics

_CHUNK_BITS = 7  # a remainder below 2**25 shifted by 7 stays below 2**32


class EngramTable(nnx.Module):
    """One Engram layer's table, e4m3 with an e8m0 scale per row and 32 columns in every checkpoint."""

    def __init__(self, rows: int, config: ModelConfig, make: ParamFactory) -> None:
        width = config.engram_head_dim
        if make.key is None:
            self.weight = nnx.Param(jnp.zeros((rows, width), jnp.float8_e4m3fn))
            self.scale: nnx.Param | None = nnx.Param(jnp.zeros((rows, -(-width // 32)), jnp.uint8))
        else:
            self.weight, self.scale = make.normal((rows, width)), None

    def fetch(self, rows_BTY: jax.Array) -> EngramTable:
        """The rows of a call are read where they are used; a table on the host (`engram_host`) asks for them here."""
        del rows_BTY
        return self

    def take(self, rows_BTY: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Rows [B, T, Y, width] as they are stored, and their scales."""
        return self.weight[...][rows_BTY], None if self.scale is None else self.scale[...][rows_BTY]


class Engram(nnx.Module):
    """The projections of all Engram layers, stacked."""

    def __init__(self, config: ModelConfig, make: ParamFactory, *, stack: tuple[int, ...]) -> None:
        s, d = config.hc_mult, config.hidden_size
        self.wkv = Linear((s + 1) * d, config.engram_columns * config.engram_head_dim, make, stack=stack, storage="fp8")
        self.q_weight = make.full((*stack, s, d), 1.0)
        self.k_weight = make.full((*stack, s, d), 1.0)

    def __call__(
        self,
        x_BTSD: jax.Array,
        rows_BTY: jax.Array,
        table: EngramTable | FetchedRows,
        image_BT: jax.Array | None,
        config: ModelConfig,
        numerics: Numerics,
    ) -> jax.Array:
        """Add the gated memory of `rows_BTY` (table rows of each token) to the streams."""
        s, d, eps = config.hc_mult, config.hidden_size, config.rms_norm_eps
        rows, scale = table.take(rows_BTY)
        e_BTK = _dequantise_rows(rows, scale, numerics.dtype).reshape(*rows_BTY.shape[:2], -1)
        out = self.wkv(e_BTK, numerics).astype(jnp.float32)
        key_BTSD = out[..., : s * d].reshape(*out.shape[:2], s, d)
        value_BTD = out[..., s * d :]
        x = x_BTSD.astype(jnp.float32)
        weight_SD = self.q_weight[...].astype(jnp.float32) * self.k_weight[...].astype(jnp.float32)
        dot = jnp.sum(x * weight_SD * key_BTSD, axis=-1, keepdims=True)
        dot = dot * inverse_rms(x, eps) * inverse_rms(key_BTSD, eps) * jnp.float32(d**-0.5)
        gate = jax.nn.sigmoid(jnp.sign(dot) * jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)))
        if image_BT is not None:
            gate = jnp.where(image_BT[..., None, None], 0.0, gate)
        return numerics.cast(x + gate * value_BTD[..., None, :])


def _dequantise_rows(rows: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Gathered rows [..., width] with a scale per 32 columns."""
    if scale is None:
        return rows.astype(dtype)
    flat = dequantise(rows.reshape(-1, rows.shape[-1]), scale.reshape(-1, scale.shape[-1]), dtype)
    return flat.reshape(rows.shape)


# ---- hashing without 64-bit integers ----


def product_table(constants: NgramConstants, compressed_vocab: int) -> np.ndarray:
    """uint32 [look-back, id, 2]: id * multiplier as (high, low) limbs (int64 is off by default in JAX)."""
    products = np.arange(compressed_vocab, dtype=np.uint64)[None, :] * constants.multipliers.astype(np.uint64)[:, None]
    return np.stack([products >> np.uint64(32), products & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


def history_ids(
    tokens_BT: jax.Array, ngram_BE: jax.Array, token_map_V: jax.Array, image_BT: jax.Array | None
) -> jax.Array:
    """Compressed ids [B, E + T]: the stored history, then this call's tokens; -1 where dead."""
    ids = token_map_V[tokens_BT]
    if image_BT is not None:
        ids = jnp.where(image_BT, -1, ids)
    return jnp.concatenate([ngram_BE, ids], axis=1)


def next_history(ids_BU: jax.Array, count_B: jax.Array, kept: int) -> jax.Array:
    """The last `kept` ids after the `count` real tokens of this call."""
    return jnp.take_along_axis(ids_BU, count_B[:, None] + jnp.arange(kept), axis=1)


def hash_rows(
    ids_BU: jax.Array,
    products: jax.Array,
    constants: NgramConstants,
    pad_id: jax.Array,
    tokens: int,
    position_BT: jax.Array | None = None,
) -> jax.Array:
    """Table rows int32 [B, T, sizes * heads] of this call's tokens (the last `tokens` of `ids_BU`).

    position_BT: of the tokens in their documents, where a row holds several: what lies before one is dead.
    """
    sizes = constants.multipliers.shape[0] - 1
    heads = constants.primes.shape[0] // sizes
    history = ids_BU.shape[1] - tokens
    alive: jax.Array | None = None
    high = low = jnp.zeros((), jnp.uint32)
    columns = []
    for back in range(sizes + 1):
        ids = ids_BU[:, history - back : history - back + tokens]
        alive = ids >= 0 if alive is None else alive & (ids >= 0)
        if position_BT is not None:
            alive &= position_BT >= back
        limbs = products[back][jnp.where(alive, ids, pad_id)]
        high, low = high ^ limbs[..., 0], low ^ limbs[..., 1]
        if back:
            primes = constants.primes[(back - 1) * heads : back * heads].astype(np.uint32)
            columns.append(_modulo(high, low, jnp.asarray(primes)))
    rows = jnp.concatenate(columns, axis=-1)
    return (rows + jnp.asarray(constants.offsets.astype(np.uint32))).astype(jnp.int32)


def _modulo(high: jax.Array, low: jax.Array, primes_Y: jax.Array) -> jax.Array:
    """(high * 2**32 + low) mod prime, uint32 [..., Y], a few bits at a time."""
    remainder = jnp.zeros((*high.shape, primes_Y.shape[0]), jnp.uint32)
    for limb in (high, low):
        shift = 32
        while shift > 0:
            bits = min(_CHUNK_BITS, shift)
            shift -= bits
            chunk = (limb >> shift) & jnp.uint32((1 << bits) - 1)
            remainder = ((remainder << bits) | chunk[..., None]) % primes_Y
    return remainder
