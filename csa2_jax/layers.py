"""Parameter holders: weights plain, fp8 or fp4, RMSNorm, and the picking of one layer out of a stack.

Weights keep the checkpoint's orientation [out, in]. Parameters of many layers are one array with leading stack axes;
`take_layer` gives the module of one layer, reading `stack[layer]` so that a scan can close over the whole stack.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from csa2_jax import formats
from csa2_jax.numerics import Numerics, einsum

_M = TypeVar("_M", bound=nnx.Module)


class ExpertParam(nnx.Param):
    """A routed-expert stack: `take_layer` leaves it whole, because a slice would copy every expert of the layer."""


class Unstacked(nnx.Variable):
    """A table that is not one per layer: `take_layer` leaves it whole."""


@dataclasses.dataclass
class ParamFactory:
    """Makes the parameters of a model: abstract or zero without `key`, randomly initialised with it.

    plain: dtype of unquantised weights. quantised: whether fp8 / fp4 linears keep their stored codes and scales.
    round_operands: whether fp8 / fp4 linears round their operand; that belongs to the model, stored or dequantised.
    tile: rows and columns of an fp8 weight with one scale. operand_group: channels of an operand with one.
    """

    plain: jnp.dtype
    quantised: bool
    round_operands: bool = False
    tile: int = 32
    operand_group: int = 32
    key: jax.Array | None = None
    std: float = 0.02

    def normal(
        self, shape: tuple[int, ...], dtype: jnp.dtype | None = None, *, kind: type[nnx.Param] = nnx.Param
    ) -> nnx.Param:
        """A weight, normal(0, std) when initialising."""
        dtype = dtype or self.plain
        if self.key is None:
            return kind(jnp.zeros(shape, dtype))
        self.key, key = jax.random.split(self.key)
        return kind((jax.random.normal(key, shape, jnp.float32) * self.std).astype(dtype))

    def full(self, shape: tuple[int, ...], value: float, dtype: jnp.dtype | None = None) -> nnx.Param:
        """A constant: norm gains, biases, scales."""
        return nnx.Param(jnp.full(shape, value, dtype or self.plain))


class Linear(nnx.Module):
    """y = x W^T for a weight [out, in] kept as `storage`: "plain", "f32", "fp8" or "fp4" (the latter two only if quantised)."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        make: ParamFactory,
        *,
        stack: tuple[int, ...] = (),
        storage: str = "plain",
        kind: type[nnx.Param] = nnx.Param,
    ) -> None:
        self.round_operand = make.round_operands and storage in ("fp8", "fp4")
        self.tile, self.operand_group = make.tile, make.operand_group
        quantised = make.quantised and storage in ("fp8", "fp4")
        if quantised and make.key is not None:
            raise ValueError(
                "quantised weights cannot be initialised at random; initialise plain ones and quantise them"
            )
        if not quantised:
            dtype = jnp.dtype(jnp.float32) if storage == "f32" else None
            self.weight = make.normal((*stack, out_features, in_features), dtype, kind=kind)
            self.scale: nnx.Param | None = nnx.data(None)
        elif storage == "fp8":
            self.weight = kind(jnp.zeros((*stack, out_features, in_features), jnp.float8_e4m3fn))
            tiles = (-(-out_features // make.tile), -(-in_features // make.tile))
            self.scale = kind(jnp.zeros((*stack, *tiles), jnp.uint8))
        else:
            self.weight = kind(jnp.zeros((*stack, out_features, in_features // 2), jnp.uint8))
            self.scale = kind(jnp.zeros((*stack, out_features, -(-in_features // 32)), jnp.uint8))
        # An adapter (`adapters`): lora_scale * lora_b lora_a on top of the weight, [..., rank, in] and [..., out, rank].
        self.lora_a: nnx.Param | None = nnx.data(None)
        self.lora_b: nnx.Param | None = nnx.data(None)
        self.lora_scale = 0.0

    def __call__(self, x: jax.Array, numerics: Numerics) -> jax.Array:
        """x [..., in] -> [..., out], cast to the compute dtype."""
        scale = None if self.scale is None else self.scale[...]
        y = linear(x, self.weight[...], scale, numerics, self.round_operand, self.tile, self.operand_group)
        return numerics.cast(self.adapted(y, x, numerics))

    def adapted(self, y: jax.Array, x: jax.Array, numerics: Numerics, at: tuple = ()) -> jax.Array:
        """The product y, f32, plus that of the adapter, if there is one; `at` picks a weight out of a stack."""
        if self.lora_a is None or self.lora_b is None:
            return y
        low = einsum("...k,rk->...r", x, self.lora_a[at or ...].astype(x.dtype))
        return y + self.lora_scale * einsum("...r,nr->...n", numerics.cast(low), self.lora_b[at or ...].astype(x.dtype))

    def plain(self, dtype: jnp.dtype) -> jax.Array:
        """The weight [..., out, in] as numbers, adapter included."""
        weight = dequantise(self.weight[...], None if self.scale is None else self.scale[...], dtype, self.tile)
        if self.lora_a is None or self.lora_b is None:
            return weight
        low_rank = self.lora_scale * einsum("...nr,...rk->...nk", self.lora_b[...], self.lora_a[...])
        return (weight.astype(jnp.float32) + low_rank).astype(dtype)


def linear(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    numerics: Numerics,
    round_operand: bool | None = None,
    tile: int = 32,
    operand_group: int = 32,
) -> jax.Array:
    """x [..., K] times weight [N, K] transposed, f32 [..., N].

    `round_operand` (by default: if the weight has a scale) takes effect when roundings are on.
    A quantised weight is multiplied as the released GEMM does: x rounded to fp8 in groups of `operand_group` along K (when
    roundings are on), a dot product per block of K with one scale (of `tile` for fp8, of 32 for fp4), times (activation scale *
    weight scale), blocks added in f32 in ascending order.
    Its gradient with respect to x is that of the dequantised weight (straight through the rounding); codes have none.
    """
    rounds = scale is not None if round_operand is None else round_operand
    if scale is not None:
        return _quantised_product((numerics.fake_quant and rounds, tile, operand_group), x, weight, scale)
    return product(round_rows(x, rounds, numerics, operand_group), weight.astype(x.dtype))


def round_rows(x: jax.Array, rounds: bool, numerics: Numerics, group: int = 32) -> jax.Array:
    """The operand of a linear that rounds it, where roundings are on: fp8 in groups along K."""
    if not (rounds and numerics.fake_quant):
        return x
    width = x.shape[-1]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -width % group)])
    return formats.fake_quantise(padded, formats.operand(group))[..., :width]


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., K] times weight [N, K] transposed, f32.

    For a single row a CPU takes two halves of the weight as a batch, which its compiler reads 1.8 times faster than one
    (measured on 96 products of 512 x 512: 7.1 ms against 12.3).
    """
    if jax.default_backend() == "cpu" and math.prod(x.shape[:-1]) == 1 and weight.shape[0] % 2 == 0:
        halves = weight.reshape(2, weight.shape[0] // 2, -1)
        row = jnp.broadcast_to(x.reshape(1, 1, -1), (2, 1, x.shape[-1]))
        return einsum("bmk,bnk->bmn", row, halves).reshape(*x.shape[:-1], -1)
    return einsum("...k,nk->...n", x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantised_product(how: tuple[bool, int, int], x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    round_operand, tile, group = how
    elements = formats.unpack_e2m1(weight) if weight.dtype == jnp.uint8 else weight.astype(jnp.float32)
    out, width = elements.shape
    exponent_NB = formats.e8m0_exponent(scale)
    size = 32 if weight.dtype == jnp.uint8 else tile  # of a block along K
    if weight.dtype != jnp.uint8:  # one scale per tile
        exponent_NB = jnp.repeat(exponent_NB, tile, axis=0)[:out]
    padded = -(-width // max(size, group)) * max(size, group)
    blocks, pad = padded // size, padded - width
    exponent_NB = jnp.pad(exponent_NB, ((0, 0), (0, blocks - exponent_NB.shape[1])))
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    # e4m3 and e2m1 elements are exact in bf16, whose products accelerators add in f32 at full speed.
    elements = jnp.pad(elements, ((0, 0), (0, pad))).astype(jnp.bfloat16 if round_operand else x.dtype)
    elements_NBk = elements.reshape(out, blocks, size)
    if round_operand:
        rows, exponent = formats.quantise(x, formats.operand(group))
        rows = rows.astype(jnp.bfloat16)
        exponent = jnp.repeat(exponent, blocks // exponent.shape[-1], axis=-1)
    else:
        rows, exponent = x, None
    rows = rows.reshape(*x.shape[:-1], blocks, size)

    def add_block(block: jax.Array | int, total: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(rows, block, axis=rows.ndim - 2, keepdims=False)
        part = lax.dynamic_index_in_dim(elements_NBk, block, axis=1, keepdims=False)
        shift = lax.dynamic_index_in_dim(exponent_NB, block, axis=1, keepdims=False)
        if exponent is not None:
            shift = shift + lax.dynamic_index_in_dim(exponent, block, axis=exponent.ndim - 1, keepdims=True)
        return total + formats.times_power_of_two(einsum("...k,nk->...n", row, part), shift)

    total = jnp.zeros((*x.shape[:-1], out), jnp.float32)
    if blocks <= 2:
        for block in range(blocks):
            total = add_block(block, total)
        return total
    return lax.fori_loop(0, blocks, add_block, total)


def _quantised_product_fwd(how: tuple, x: jax.Array, weight: jax.Array, scale: jax.Array) -> tuple:
    # An empty array carries x's dtype to the backward pass.
    return _quantised_product(how, x, weight, scale), (weight, scale, jnp.zeros(0, x.dtype))


def _quantised_product_bwd(how: tuple, residuals: tuple, g: jax.Array) -> tuple:
    weight, scale, like = residuals
    plain = dequantise(weight, scale, jnp.dtype(jnp.float32), how[1])
    return einsum("...n,nk->...k", g, plain).astype(like.dtype), None, None


_quantised_product.defvjp(_quantised_product_fwd, _quantised_product_bwd)


def dequantise(weight: jax.Array, scale: jax.Array | None, dtype: jnp.dtype, tile: int = 32) -> jax.Array:
    """A stored weight as plain numbers of `dtype`: fp8 [..., N, K] with a scale per tile, or with one per row and 32 columns."""
    if scale is None:
        return weight.astype(dtype)
    elements = formats.unpack_e2m1(weight) if weight.dtype == jnp.uint8 else weight.astype(jnp.float32)
    by_row = scale.shape[-2] == elements.shape[-2]
    columns = 32 if by_row else tile
    exponent = jnp.repeat(formats.e8m0_exponent(scale), columns, axis=-1)[..., : elements.shape[-1]]
    if not by_row:
        exponent = jnp.repeat(exponent, tile, axis=-2)[..., : elements.shape[-2], :]
    return formats.round_to(formats.scale_exactly(elements, exponent), dtype)


class RMSNorm(nnx.Module):
    """x * rsqrt(mean(x^2) + eps) * weight, all in f32, cast once to the compute dtype."""

    def __init__(self, features: int, make: ParamFactory, *, stack: tuple[int, ...] = ()) -> None:
        self.weight = make.full((*stack, features), 1.0)

    def __call__(self, x: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
        """x [..., features] normalised over its last axis."""
        x = x.astype(jnp.float32)
        return numerics.cast(x * inverse_rms(x, eps) * self.weight[...].astype(jnp.float32))


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """rsqrt(mean(x^2) + eps) over the last axis, kept; the released eps of 1e-20 needs f32."""
    return lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.float32(eps))


def take_layer(stacked: _M | None, layer: jax.Array | int) -> _M:
    """The module of one layer out of a stack (routed experts stay stacked, see `ExpertParam`)."""
    if stacked is None:
        raise ValueError("this configuration has no layer of that kind")
    graphdef, experts, whole, rest = nnx.split(stacked, ExpertParam, Unstacked, ...)
    return nnx.merge(graphdef, experts, whole, jax.tree.map(lambda a: a[layer], rest))
