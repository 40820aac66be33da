"""How entries are stored: bytes, layouts and the way back, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas import formats, storage
from kernels_pallas.storage import Packed

# Jitted: what they do consists of many small steps.
pack = jax.jit(storage.pack, static_argnums=1, static_argnames="units")
unpack = jax.jit(storage.unpack)
gather = jax.jit(storage.gather, static_argnums=(1, 3))
chunk = jax.jit(storage.chunk, static_argnums=(1, 2, 3))
rounded = jax.jit(formats.rounded, static_argnums=1)

FORMATS = {"main": formats.MAIN, "index": formats.INDEX, "window": formats.WINDOW}


def entries(seed: int = 0, width: int = 128) -> np.ndarray:
    """[2, 3, 128, H] over many magnitudes, with zeros and f32 subnormals."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 3, 128, width)) * np.exp(8 * rng.standard_normal((2, 3, 128, 1)))
    x[0, 0, 0], x[0, 0, 1], x[1, 2, 5, :32] = 0, 1e-42, -0.0
    return x.astype(np.float32)


def bits(x: object) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.int32)


def test_every_e4m3_code_keeps_its_value() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = np.asarray(formats.e4m3_values(codes))
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(np.isnan(found), ~finite)
    np.testing.assert_array_equal(bits(found[finite]), bits(values[finite]))
    np.testing.assert_array_equal(np.asarray(formats.e4m3_codes(values[finite])), codes[finite])


def test_scaling_is_exact_for_every_element_and_every_scale() -> None:
    """All e4m3 values times all powers of two that f32 can hold the product of, subnormal products included."""
    codes = np.arange(128, dtype=np.uint8)
    elements = codes[codes != 0x7F].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exponents = np.arange(-127, 119, dtype=np.int32)
    expected = np.ldexp(elements[:, None].astype(np.float64), exponents).astype(np.float32)
    found = jax.jit(formats.scale_exactly)(*np.broadcast_arrays(elements[:, None], exponents))
    np.testing.assert_array_equal(bits(found), bits(expected))
    negative = jax.jit(formats.scale_exactly)(*np.broadcast_arrays(-elements[:, None], exponents))
    np.testing.assert_array_equal(bits(negative), bits(-expected))


@pytest.mark.smoke
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("units", [False, True])
def test_unpacking_gives_the_rounded_numbers(name: str, units: bool) -> None:
    x, fmt = entries(), FORMATS[name]
    packed = pack(x, fmt, units=units)
    assert packed.shape == x.shape
    assert packed.in_units is units
    np.testing.assert_array_equal(bits(unpack(packed)), bits(rounded(x, fmt)))


def test_the_nibbles_of_a_byte_are_half_a_row_apart() -> None:
    x = np.zeros((1, 1, 1, 32), np.float32)
    x[..., 0], x[..., 3], x[..., 16 + 3], x[..., 31] = 6.0, -1.0, 4.0, 6.0
    packed = pack(x, formats.MAIN)
    codes = np.asarray(packed.codes)[0, 0, 0]
    assert (codes[0], codes[3], codes[15]) == (0x07, 0x6A, 0x70)  # 6 | 0, -1 | 4, 0 | 6
    assert packed.scales.tolist() == [[[[0x38, 0x38]]]]  # e4m3 of 6 / 6, for channels 0-15 and 16-31


def test_released_widths_take_288_and_68_bytes_and_890_per_token() -> None:
    main = pack(np.ones((1, 1, 16, 512), np.float32), formats.MAIN, units=True)
    key = pack(np.ones((1, 1, 128, 128), np.float32), formats.INDEX, units=True)
    assert (main.codes.shape, main.scales.shape) == ((1, 1, 8, 4, 128), (1, 1, 1, 4, 128))
    assert (key.codes.shape, key.scales.shape) == ((1, 1, 16, 4, 128), (1, 1, 1, 4, 128))
    per_entry = [(p.codes.size + p.scales.size) / p.shape[2] for p in (main, key)]
    assert per_entry == [288, 68]
    assert sum(per_entry) * (3 / 2 + 1) == 890


@pytest.mark.parametrize("held", ["plain", "rows of 128", *FORMATS, "index in units"])
def test_reading_chunks_and_single_entries_equals_reading_everything(held: str) -> None:
    x = entries(1)
    stored: object = {"plain": x, "rows of 128": storage.in_rows(np.tile(x, 2))}.get(held)
    if stored is None:
        stored = pack(x, FORMATS[held.split()[0]], units=held.endswith("units"))
    whole = np.asarray(unpack(stored))  # type: ignore[arg-type]
    assert storage.shape(stored) == whole.shape  # type: ignore[arg-type]
    index = np.array([[0, 127, 5], [9, 9, 1], [64, 3, 2]])
    rows = np.arange(3)[:, None]
    np.testing.assert_array_equal(chunk(stored, 1, 3, 7), whole[1][:, 3:10])  # type: ignore[arg-type]
    np.testing.assert_array_equal(gather(stored, 1, index), whole[1][rows, index])  # type: ignore[arg-type]
    blocks = whole[1].reshape(3, 16, 8, -1)[rows, index // 8]
    np.testing.assert_array_equal(gather(stored, 1, index // 8, 8), blocks)  # type: ignore[arg-type]


def test_bytes_that_fill_no_unit_are_refused_by_number() -> None:
    with pytest.raises(ValueError, match="3 entries of 64 bytes"):
        pack(np.ones((1, 1, 3, 128), np.float32), formats.INDEX, units=True)


def test_an_odd_width_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="multiple of the group"):
        pack(np.ones((1, 1, 2, 17), np.float32), formats.MAIN)


def test_packed_says_how_many_bytes_an_entry_takes() -> None:
    packed = pack(entries(), formats.WINDOW)
    assert isinstance(packed, Packed)
    assert (packed.code_bytes, packed.scale_bytes, packed.ndim) == (128, 4, 4)


@pytest.mark.parametrize("held", ["plain", "rows of 128", *FORMATS, "main in units", "index in units"])
def test_writing_entries_changes_those_alone_and_drops_what_has_no_slot(held: str) -> None:
    x, new = entries(2), entries(3)[0, :, :3]
    fmt = FORMATS.get(held.split()[0])
    stored: object = {"plain": x, "rows of 128": storage.in_rows(np.tile(x, 2))}.get(held)
    if held == "rows of 128":
        new = np.tile(new, 2)
    if stored is None:
        stored = pack(x, fmt, units=held.endswith("units"))  # type: ignore[arg-type]
    stored = jax.tree.map(jnp.asarray, stored)
    slots = np.array([[5, 128, 6], [127, 0, 3], [500, 501, 502]])
    found = jax.jit(storage.write, static_argnums=1)(stored, 1, slots, new)
    expected = np.array(unpack(stored))  # type: ignore[arg-type]
    for b in range(3):
        for e in range(3):
            if slots[b, e] < 128:
                expected[1, b, slots[b, e]] = new[b, e] if fmt is None else rounded(new[b, e], fmt)
    np.testing.assert_array_equal(bits(unpack(found)), bits(expected))
    everywhere = jax.jit(lambda s, r: storage.write(s, slice(None), slots, r))(stored, np.stack([new, new]))
    np.testing.assert_array_equal(bits(unpack(everywhere))[1], bits(expected)[1])
