"""V4's number formats against NumPy: fp8 with bf16 channels behind it, weights in tiles of 128, the Hadamard turn."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from csa2_jax.layers import dequantise, linear
from csa2_jax.numerics import Numerics, hadamard
from kernels_pallas import formats, storage


def fp8_groups(x: np.ndarray, group: int) -> np.ndarray:
    """x rounded to e4m3 in groups of its last axis, by a scale that is the smallest power of two with amax <= 448 scale."""
    grouped = x.astype(np.float64).reshape(*x.shape[:-1], -1, group)
    amax = np.maximum(np.abs(grouped).max(axis=-1, keepdims=True), 1e-4)
    scale = 2.0 ** np.ceil(np.log2(amax / 448.0))
    return ((grouped / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape)


def test_mixed_entries_are_fp8_but_for_the_last_channels() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((1, 2, 5, 512)) * np.exp(rng.standard_normal((1, 2, 5, 1)) * 4)).astype(np.float32)
    x[0, 0, 0] = 0
    fmt = formats.mixed(64, 64)
    expected = np.concatenate(
        [fp8_groups(x[..., :448], 64), x[..., 448:].astype(ml_dtypes.bfloat16).astype(np.float64)], axis=-1
    )
    np.testing.assert_array_equal(np.asarray(formats.rounded(jnp.asarray(x), fmt)), expected)
    packed = storage.pack(jnp.asarray(x), fmt)
    assert (packed.code_bytes, packed.scale_bytes) == (448 + 128, 8)
    assert storage.nbytes(packed) == 2 * 5 * 584
    np.testing.assert_array_equal(np.asarray(storage.unpack(packed)), expected)


def test_packed_mixed_entries_are_written_and_read_one_by_one() -> None:
    rng = np.random.default_rng(1)
    fmt = formats.mixed(16, 8)
    x = rng.standard_normal((2, 3, 7, 40)).astype(np.float32)
    packed = storage.empty((2, 3, 7, 40), fmt)
    slots = np.stack([rng.permutation(7) for _ in range(3)])
    packed = storage.write(packed, 1, jnp.asarray(slots), jnp.asarray(x[1]))
    rounded = np.asarray(formats.rounded(jnp.asarray(x[1]), fmt))
    held = np.asarray(storage.unpack(packed))
    for b in range(3):
        np.testing.assert_array_equal(held[1, b, slots[b]], rounded[b])
    assert not held[0].any()
    index = rng.integers(0, 7, (3, 4))
    found = np.asarray(storage.gather(packed, 1, jnp.asarray(index)))
    np.testing.assert_array_equal(found, held[1][np.arange(3)[:, None], index])
    np.testing.assert_array_equal(np.asarray(storage.chunk(packed, 1, 2, 4)), held[1][:, 2:6])


@pytest.mark.parametrize("width", [32, 128])
def test_hadamard_is_orthogonal_and_its_own_inverse(width: int) -> None:
    x = np.random.default_rng(2).standard_normal((3, width)).astype(np.float32)
    turned = np.asarray(hadamard(jnp.asarray(x)))
    signs = np.array([[(-1) ** bin(i & j).count("1") for j in range(width)] for i in range(width)])
    np.testing.assert_allclose(turned, x.astype(np.float64) @ signs / np.sqrt(width), atol=4e-6)
    np.testing.assert_allclose(np.asarray(hadamard(jnp.asarray(turned))), x, atol=4e-6)
    with pytest.raises(ValueError, match="power of two"):
        hadamard(jnp.ones((2, 12)))


@pytest.mark.parametrize(("out", "width"), [(256, 384), (130, 200), (20, 48)])
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_quantised_products_with_tiles_of_128(out: int, width: int, kind: str) -> None:
    """Operands in groups of 128, fp8 weights in tiles of 128 x 128, fp4 ones by row and 32; against float64."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, width)).astype(np.float32)
    if kind == "fp8":
        weight = (rng.standard_normal((out, width)) * 50).astype(ml_dtypes.float8_e4m3fn)
        exponent = rng.integers(-6, 3, (-(-out // 128), -(-width // 128)))
        numbers = weight.astype(np.float64)
        grown = np.repeat(np.repeat(exponent, 128, 0), 128, 1)[:out, :width]
    else:
        weight = rng.integers(0, 256, (out, width // 2)).astype(np.uint8)
        exponent = rng.integers(-6, 3, (out, -(-width // 32)))
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        numbers = np.stack([values[weight & 15], values[weight >> 4]], -1).reshape(out, width)
        grown = np.repeat(exponent, 32, 1)[:, :width]
    plain = numbers * 2.0**grown
    scale = jnp.asarray((exponent + 127).astype(np.uint8))
    np.testing.assert_array_equal(np.asarray(dequantise(jnp.asarray(weight), scale, jnp.dtype("float32"), 128)), plain)
    padded = np.pad(x, ((0, 0), (0, -width % 128)))
    rounded = fp8_groups(padded, 128)[:, :width]
    numerics = Numerics("float32", fake_quant=True)
    found = linear(jnp.asarray(x), jnp.asarray(weight), scale, numerics, True, 128, 128)
    np.testing.assert_allclose(np.asarray(found), rounded @ plain.T, rtol=2e-5, atol=1e-3 * np.abs(plain).max())
