"""Roundings, packed codes and quantised products: the recorded numbers bit for bit, and the corners by hand."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2_jax import formats
from csa2_jax.layers import dequantise, linear
from csa2_jax.numerics import Numerics
from tests import oracle_formats as oracle
from tests.golden_sets import golden_file

FORMATS = {
    "window_fp8_32": (formats.WINDOW, oracle.quantise_window_fp8),
    "main_fp4_16": (formats.MAIN, oracle.quantise_main_fp4),
    "index_fp4_32": (formats.INDEX, oracle.quantise_index_fp4),
}
fake_quantise = jax.jit(formats.fake_quantise, static_argnums=1)
quantise = jax.jit(formats.quantise, static_argnums=1)
QUANTISED = Numerics("float32", fake_quant=True)
PLAIN = Numerics("float32", fake_quant=False)


@functools.cache
def recorded() -> dict[str, np.ndarray]:
    with np.load(golden_file("quantizers.npz")) as arrays:
        return {name: arrays[name] for name in arrays.files}


def same_bits(found: Any, expected: Any) -> None:
    """Equal as bit patterns: -0.0 is not 0.0, and NaN is itself."""
    found, expected = (np.ascontiguousarray(np.asarray(a, np.float32)).view(np.uint32) for a in (found, expected))
    np.testing.assert_array_equal(found, expected)


def codes_of(elements: np.ndarray, fmt: formats.Format) -> np.ndarray:
    flat = jnp.reshape(elements, (elements.shape[0], -1))
    if fmt.element == "e2m1":
        return np.asarray(formats.e2m1_codes(flat))
    return np.asarray(flat).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


@pytest.mark.smoke
@pytest.mark.parametrize("source", ["f32", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_gives_the_recorded_values_scales_and_codes(name: str, source: str) -> None:
    z, (fmt, _) = recorded(), FORMATS[name]
    x = jnp.asarray(z[f"input_{source}"], jnp.float32 if source == "f32" else jnp.bfloat16)
    elements, scale = quantise(x, fmt)
    values = fake_quantise(x, fmt)
    assert values.dtype == x.dtype
    scale = np.ldexp(np.float32(1), np.asarray(scale)) if fmt.power_of_two else np.asarray(scale)
    same_bits(scale, z[f"{name}_{source}_scale"])
    np.testing.assert_array_equal(codes_of(elements, fmt), z[f"{name}_{source}_codes"])
    same_bits(values, z[f"{name}_{source}"])


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_twice_is_rounding_once_and_exact_in_bf16(name: str) -> None:
    """So bf16 storage holds every rounded value exactly. Scales that e4m3 itself rounds to its subnormals stay out:
    an amax in (9, 10) * 2^-9 gets scale 2^-8, its maximum becomes 4 * 2^-8, and that asks for scale 2^-9."""
    fmt, _ = FORMATS[name]
    x = recorded()["input_f32"]
    x = x[(np.abs(x) < 1e4).all(axis=1)]
    once = np.asarray(fake_quantise(x, fmt))
    if not fmt.power_of_two:
        once = once[(np.asarray(quantise(x, fmt)[1]) != 2.0**-8).all(axis=1)]
    assert len(once) > 300
    same_bits(fake_quantise(once, fmt), once)
    same_bits(once.astype(ml_dtypes.bfloat16), once)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exponent", [-130, -20, -9, -3, 0, 4])
def test_rounding_scale_is_right_around_a_power_of_two(name: str, exponent: int) -> None:
    """amax just below, at and above max * 2^e, where a ceil taken from a float logarithm slips."""
    fmt, reference = FORMATS[name]
    edge = np.ldexp(np.float32(fmt.max), exponent).astype(np.float32)
    tops = [np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))]
    x = np.linspace(-1, 1, 32, dtype=np.float32)[None] * np.array(tops, np.float32)[:, None]
    x[:, -1] = tops
    with np.errstate(under="ignore"):
        expected = reference(x)
    same_bits(fake_quantise(x, fmt), expected.values)
    if fmt.power_of_two and exponent > -20:
        scale = np.asarray(quantise(x, fmt)[1])[:, 0]
        np.testing.assert_array_equal(scale, [exponent, exponent, exponent + 1])


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_keeps_zeros_and_their_signs(name: str) -> None:
    fmt, reference = FORMATS[name]
    x = np.zeros((3, 32), np.float32)
    x[1], x[2, ::2] = -0.0, 1e-42  # subnormal: rounds to zero or to a subnormal multiple, never to garbage
    same_bits(fake_quantise(x, fmt), reference(x).values)
    same_bits(fake_quantise(x, fmt)[:2], x[:2])


_BITS = st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64)
_NEAR = st.lists(st.floats(-30, 30, width=32), min_size=64, max_size=64)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.one_of(_BITS.map(lambda bits: np.array(bits, np.uint32).view(np.float32)), _NEAR.map(np.float32)))
def test_rounding_equals_the_oracle_on_any_bits(values: np.ndarray) -> None:
    x = np.where(np.isfinite(values) & (np.abs(values) < 1e30), values, np.float32(1.0)).reshape(2, 32)
    for fmt, reference in FORMATS.values():
        with np.errstate(all="ignore"):
            expected = reference(x).values
        same_bits(fake_quantise(x, fmt), expected)


def test_rounding_refuses_a_width_that_is_no_multiple_of_the_group() -> None:
    with pytest.raises(ValueError, match=r"\(2, 40\).*32"):
        formats.quantise(jnp.zeros((2, 40)), formats.WINDOW)


def test_rounding_passes_gradients_straight_through() -> None:
    grad = jax.grad(lambda x: jnp.sum(formats.fake_quantise(x, formats.MAIN) * jnp.arange(32.0)))(
        jnp.linspace(0, 9, 32)
    )
    np.testing.assert_array_equal(grad, np.arange(32.0))


# --- stored weights -----------------------------------------------------------------------------------------------


def test_stored_weights_come_back_as_recorded() -> None:
    """Tiles of 32 x 32 that divide neither axis, and packed fp4 with a scale per row and 32. One tile's scale is so
    small that its values are f32 subnormals."""
    z = recorded()
    codes = jnp.asarray(z["weight_fp8_codes"].view(ml_dtypes.float8_e4m3fn))
    assert codes.shape[0] != codes.shape[1]
    same_bits(dequantise(codes, z["weight_fp8_scale_codes"], jnp.dtype("float32")), z["weight_fp8_dequant"])
    packed = jnp.asarray(z["expert_fp4_packed"].view(np.uint8))
    same_bits(dequantise(packed, z["expert_fp4_scale_codes"], jnp.dtype("float32")), z["expert_fp4_dequant"])


def test_every_tile_has_its_own_scale() -> None:
    """Neither transposed tiles nor tiles of 128 would give this."""
    scale = np.array([[120, 121, 122], [123, 124, 125]], np.uint8)
    ones = jnp.ones((40, 70), jnp.float8_e4m3fn)
    found = dequantise(ones, scale, jnp.dtype("float32"))
    expected = np.kron(2.0 ** (scale.astype(int) - 127), np.ones((32, 32)))[:40, :70]
    np.testing.assert_array_equal(found, expected)


def test_fp4_has_the_even_element_in_the_low_nibble() -> None:
    elements = jnp.array([[0.5, 6.0, -1.5, -0.0]])
    packed = formats.pack_e2m1(elements)
    np.testing.assert_array_equal(packed, [[0x71, 0x8B]])
    same_bits(formats.unpack_e2m1(packed), elements)
    every = jnp.arange(16, dtype=jnp.uint8)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    same_bits(formats.e2m1_values(every), np.concatenate([grid, -grid]))
    np.testing.assert_array_equal(formats.e2m1_codes(formats.e2m1_values(every)), every)
    with pytest.raises(ValueError, match="odd width of 3"):
        formats.pack_e2m1(jnp.zeros((2, 3)))


@pytest.mark.parametrize("numerics", [PLAIN, QUANTISED], ids=["plain", "rounded"])
def test_scale_byte_means_its_power_of_two_in_a_product(numerics: Numerics) -> None:
    """Bytes 0 to 254 as 2^(b - 127), byte 0 included, which is a subnormal that a flush to zero would lose.

    The weight is 1 and the operand a power of two that keeps the product an ordinary number.
    """
    byte = np.arange(255)
    run = jax.jit(lambda x, w, s: linear(x, w, s, numerics))
    found = []
    for operand, chosen in ((2.0**60, byte[:128]), (2.0**-10, byte[128:])):
        x = np.zeros((1, 32), np.float32)
        x[0, 3] = operand
        weight = np.ones((len(chosen), 32), np.float32)
        packed = formats.pack_e2m1(jnp.asarray(weight))
        found.append(np.asarray(run(x, packed, chosen[:, None].astype(np.uint8)))[0].astype(np.float64) / operand)
    np.testing.assert_array_equal(np.concatenate(found), 2.0 ** (byte - 127.0))


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_quantised_product_gives_the_recorded_bits(name: str) -> None:
    z = recorded()
    if name == "fp8":
        weight, scale = z["gemm_w_codes"].view(ml_dtypes.float8_e4m3fn), z["gemm_w_scale_codes"]
    else:
        weight, scale = z["gemm_w4_packed"].view(np.uint8), z["gemm_w4_scale_codes"]
    run = jax.jit(lambda x, w, s: linear(x, w, s, QUANTISED))
    found = run(jnp.asarray(z["gemm_x"], jnp.bfloat16), jnp.asarray(weight), jnp.asarray(scale))
    assert found.dtype == jnp.float32
    same_bits(found, z[f"gemm_{name}_y"])


@pytest.mark.parametrize("width", [32, 64, 160])
@pytest.mark.parametrize("rows", [1, 5])
def test_quantised_product_equals_the_oracle(width: int, rows: int) -> None:
    """One, two and many blocks of K; 40 outputs do not fill their tiles."""
    rng = np.random.default_rng(width + rows)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    value = rng.standard_normal((40, width)).astype(np.float32)
    for kind in ("fp8", "fp4"):
        if kind == "fp8":
            weight, scale = oracle.quantise_weight_fp8(value)
            plain = oracle.dequantise_weight_fp8(weight, scale)
        else:
            weight, scale = oracle.quantise_expert_fp4(value)
            plain, weight = oracle.dequantise_expert_fp4(weight, scale), weight.view(np.uint8)
        args = (jnp.asarray(x), jnp.asarray(weight), jnp.asarray(scale))
        rounded = jax.jit(lambda x, w, s: linear(x, w, s, QUANTISED))(*args)
        np.testing.assert_allclose(rounded, oracle.quantised_matmul(x, plain), rtol=1e-5, atol=2e-5)
        exact = jax.jit(lambda x, w, s: linear(x, w, s, PLAIN))(*args)
        np.testing.assert_allclose(exact, x @ plain.T, rtol=1e-5, atol=2e-5)
        assert np.abs(np.asarray(rounded) - np.asarray(exact)).max() > 1e-2  # the operand is rounded only in the first


def test_cast_to_bf16_is_not_skipped_under_jit() -> None:
    """A narrowing cast that is widened again may be dropped by a compiler; the rounding must stay."""
    x = jnp.float32(1.0) + jnp.float32(2.0**-9)
    found = jax.jit(lambda x: formats.round_to(x, jnp.bfloat16).astype(jnp.float32))(x)
    assert float(found) == 1.0
