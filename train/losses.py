"""Cross-entropy without logits in memory.

    loss = sum_n weight_n (log sum_v exp(h_n . head_v) - h_n . head_target)

Logits [n, V] are never all there at once, forward or backward.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from csa2_jax.numerics import einsum

_LOGITS: Final = 1 << 26  # numbers of a chunk's logits
_LEAST: Final = 256  # vocabulary entries in a chunk


class CrossEntropy(NamedTuple):
    """Sums over tokens, weighted: the loss, and how many were predicted right."""

    loss: jax.Array
    correct: jax.Array


def cross_entropy(
    h_nD: jax.Array, head_VD: jax.Array, target_n: jax.Array, weight_n: jax.Array, chunk: int | None = None
) -> CrossEntropy:
    """sum_n weight_n (log sum_v exp(h_n . head_v) - h_n . head_target), f32, in chunks of the vocabulary.

    Logits [n, chunk] exist for one chunk at a time, forward and backward; the backward computes them again from h and the
    log-sum-exp. Products are those of h's dtype with f32 sums.

    Args:
        h_nD: what the head reads. head_VD: its weight. target_n: token ids. weight_n: f32, 0 where nothing is predicted.
        chunk: vocabulary entries at once; by default as many as make 2^26 logits.
    """
    entries = head_VD.shape[0]
    chunk = chunk or max(_LEAST, _LOGITS // max(h_nD.shape[0], 1))
    loss, correct = _cross_entropy(min(chunk, entries), h_nD, head_VD, target_n, weight_n.astype(jnp.float32))  # type: ignore[misc]
    return CrossEntropy(loss, correct)


def likeliest(h_nD: jax.Array, head_VD: jax.Array, chunk: int | None = None) -> jax.Array:
    """The id of the largest logit, int32 [n], with logits of one chunk at a time. No gradient."""
    h_nD, head_VD = lax.stop_gradient((h_nD, head_VD))
    chunk = chunk or max(_LEAST, _LOGITS // max(h_nD.shape[0], 1))
    return _statistics(min(chunk, head_VD.shape[0]), h_nD, head_VD, jnp.zeros(h_nD.shape[0], jnp.int32))[2]


def _logits(h_nD: jax.Array, rows_vD: jax.Array) -> jax.Array:
    return einsum("nd,vd->nv", h_nD, rows_vD.astype(h_nD.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    chunk: int, h_nD: jax.Array, head_VD: jax.Array, target_n: jax.Array, weight_n: jax.Array
) -> tuple[jax.Array, jax.Array]:
    lse_n, logit_n, best_n = _statistics(chunk, h_nD, head_VD, target_n)
    return jnp.sum(weight_n * (lse_n - logit_n)), jnp.sum(weight_n * (best_n == target_n))


def _statistics(
    chunk: int, h_nD: jax.Array, head_VD: jax.Array, target_n: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(log-sum-exp, the target's logit, the likeliest id), each [n]."""

    def join(carry: tuple[jax.Array, ...], start: jax.Array | int, rows_vD: jax.Array) -> tuple[jax.Array, ...]:
        peak_n, total_n, logit_n, best_n = carry
        logits = _logits(h_nD, rows_vD)
        top_n = jnp.max(logits, axis=-1)
        best_n = jnp.where(top_n > peak_n, start + jnp.argmax(logits, axis=-1).astype(jnp.int32), best_n)
        new_n = jnp.maximum(peak_n, top_n)
        total_n = total_n * jnp.exp(peak_n - new_n) + jnp.sum(jnp.exp(logits - new_n[:, None]), axis=-1)
        inside = (target_n >= start) & (target_n < start + rows_vD.shape[0])
        place = jnp.clip(target_n - start, 0, rows_vD.shape[0] - 1)
        logit_n = jnp.where(inside, jnp.take_along_axis(logits, place[:, None], axis=-1)[:, 0], logit_n)
        return new_n, total_n, logit_n, best_n

    n = h_nD.shape[0]
    carry = (
        jnp.full(n, -jnp.inf, jnp.float32),
        jnp.zeros(n, jnp.float32),
        jnp.zeros(n, jnp.float32),
        jnp.zeros(n, jnp.int32),
    )
    starts, rows, rest = _chunks(chunk, head_VD)
    carry, _ = lax.scan(lambda c, x: (join(c, *x), None), carry, (starts, rows))
    if rest.shape[0]:
        carry = join(carry, head_VD.shape[0] - rest.shape[0], rest)
    peak_n, total_n, logit_n, best_n = carry
    return peak_n + jnp.log(total_n), logit_n, best_n


def _chunks(chunk: int, head_VD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first id of each whole chunk, the chunks [c, chunk, D], what is left over)."""
    whole = head_VD.shape[0] // chunk
    rows = head_VD[: whole * chunk].reshape(whole, chunk, -1)
    return jnp.arange(whole, dtype=jnp.int32) * chunk, rows, head_VD[whole * chunk :]


def _forward(
    chunk: int, h_nD: jax.Array, head_VD: jax.Array, target_n: jax.Array, weight_n: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    lse_n, logit_n, best_n = _statistics(chunk, h_nD, head_VD, target_n)
    loss = jnp.sum(weight_n * (lse_n - logit_n))
    return (loss, jnp.sum(weight_n * (best_n == target_n))), (h_nD, head_VD, target_n, weight_n, lse_n)


def _backward(
    chunk: int, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    h_nD, head_VD, target_n, weight_n, lse_n = saved
    scale_n = weight_n * cotangents[0]

    def pull(start: jax.Array | int, rows_vD: jax.Array) -> tuple[jax.Array, jax.Array]:
        p_nv = jnp.exp(_logits(h_nD, rows_vD) - lse_n[:, None])
        hit_nv = target_n[:, None] == start + jnp.arange(rows_vD.shape[0])
        d_nv = ((p_nv - hit_nv) * scale_n[:, None]).astype(h_nD.dtype)
        return einsum("nv,vd->nd", d_nv, rows_vD.astype(h_nD.dtype)), einsum("nv,nd->vd", d_nv, h_nD)

    def step(dh_nD: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        new_nD, drows_vD = pull(*x)
        return dh_nD + new_nD, drows_vD.astype(head_VD.dtype)

    starts, rows, rest = _chunks(chunk, head_VD)
    dh_nD, drows = lax.scan(step, jnp.zeros(h_nD.shape, jnp.float32), (starts, rows))
    dhead_VD = drows.reshape(-1, head_VD.shape[1])
    if rest.shape[0]:
        new_nD, drest = pull(head_VD.shape[0] - rest.shape[0], rest)
        dh_nD, dhead_VD = dh_nD + new_nD, jnp.concatenate([dhead_VD, drest.astype(head_VD.dtype)])
    return dh_nD.astype(h_nD.dtype), dhead_VD, None, None


_cross_entropy.defvjp(_forward, _backward)
