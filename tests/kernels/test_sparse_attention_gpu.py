"""The GPU kernels of sparse attention, interpreted on a CPU: the inherited suite, and what is theirs alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from kernels.sparse_attention_suite import Inputs, SparseAttentionSuite, make_inputs

from kernels_pallas import Unsupported, formats, sparse_attention, storage
from kernels_pallas.formats import Format
from kernels_pallas.sparse_attention import gpu_rows, pallas_gpu, xla


class TestSparseAttentionGpu(SparseAttentionSuite):
    implementation = "pallas_gpu"
    interpret = True


def wide_inputs() -> Inputs:
    """More than a block of everything: 20 heads (blocks of 16), 37 window rows and 40 slots (blocks of 16), ragged."""
    inputs = make_inputs(9, 1, 3, 40, 37, entries=50, topk=40, width=16)
    rng = np.random.default_rng(1)
    inputs["q_BTNH"] = rng.standard_normal((1, 3, 20, 16)).astype(np.float32)
    inputs["sink_N"] = rng.standard_normal(20).astype(np.float32)
    inputs["selection_BTK"][0, 0] = -1  # a query without pool entries
    inputs["selection_BTK"][0, 1, 3:30] = 7  # one entry over and over, in one block and in the next
    inputs["first_BT"][0, 2] += 30  # fewer rows than a block
    return inputs


@pytest.mark.parametrize("programs", [1, 9], ids=["no split", "4 splits"])
def test_a_query_may_be_shared_among_programs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_gpu, "INTERPRETED_PROGRAMS", programs * 3)
    inputs = wide_inputs()
    options = {"window": 37, "scale": 0.25}

    def both(inputs: Inputs) -> Any:
        kernel = sparse_attention(**inputs, **options, implementation="pallas_gpu", interpret=True)
        return kernel, sparse_attention(**inputs, **options, implementation="xla")

    found, expected = jax.jit(both)(inputs)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_adds_every_block_and_every_repetition(dtype: str) -> None:
    """Cotangents of all arguments against XLA's backward, from the same o and lse."""
    inputs = {k: jnp.asarray(v) for k, v in wide_inputs().items()}
    for name in ("q_BTNH", "window_BSH", "pool_GBPH"):
        inputs[name] = inputs[name].astype(dtype)
    options = {"window": 37, "scale": 0.25, "causal": True}
    rng = np.random.default_rng(2)
    do = jnp.asarray(rng.standard_normal(inputs["q_BTNH"].shape), dtype)
    shift = jnp.asarray(rng.standard_normal(inputs["q_BTNH"].shape[:3]), jnp.float32)

    def both(*arrays: Any) -> Any:
        arrays = *arrays, do, xla.run(*arrays, **options)[1], shift
        return pallas_gpu.backward(*arrays, **options, interpret=True), xla.backward(*arrays, **options)

    found, expected = jax.jit(both)(*inputs.values())
    assert [a.dtype for a in found] == [a.dtype for a in expected]
    tolerance = {"float32": 2e-5, "bfloat16": 2e-2}[dtype]
    for name, a, b in zip(("queries", "window", "pool"), found, expected, strict=True):
        assert a is not None
        assert b is not None
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(b).max() > 0.5, name
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(), err_msg=name)


@pytest.mark.parametrize(
    ("fmt", "width"),
    [(formats.MAIN, 64), (formats.INDEX, 32), (formats.WINDOW, 64)],
    ids=["main", "index, a group over both halves", "window"],
)
def test_rows_unpack_to_the_stored_numbers(fmt: Format, width: int) -> None:
    """Every finite scale (those that keep products in f32's normal range) against every code, bit for bit."""
    rng = np.random.default_rng(0)
    scales = np.arange(27, 240) if fmt.power_of_two else np.delete(np.arange(256), [127, 255])
    size = width // 2 if fmt.element == "e2m1" else width
    codes = rng.permuted(np.tile(np.arange(256), (len(scales), 1)), axis=1)[:, :size]
    if fmt.element == "e4m3":
        codes = np.where(codes % 128 == 127, 0, codes)  # not a number
    scale_rows = np.stack([np.roll(scales, i) for i in range(width // fmt.group)], axis=-1)
    entries = storage.Packed(
        jnp.asarray(codes, jnp.uint8)[None, None], jnp.asarray(scale_rows, jnp.uint8)[None, None], width, fmt
    )
    layout, arrays = gpu_rows.lay_out(entries)

    def kernel(codes_ref: Any, scales_ref: Any, out_ref: Any) -> None:
        row = jnp.arange(len(scales), dtype=jnp.int32)
        refs = (codes_ref, scales_ref)
        group, b = pl.program_id(0), pl.program_id(1)
        out_ref[...] = gpu_rows.load_rows(layout, refs, (group, b), row, row % 5 != 1, jnp.float32)

    shape = jax.ShapeDtypeStruct((len(scales), width), jnp.float32)
    found = np.asarray(pl.pallas_call(kernel, grid=(1, 1), out_shape=shape, interpret=True)(*arrays))
    expected = np.array(storage.unpack(entries)[0, 0])
    expected[np.arange(len(scales)) % 5 == 1] = 0
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(expected)) > 100


def test_weights_meet_bf16_values_rounded_and_the_denominator_unrounded() -> None:
    """A window row of zeros, weight 1, then an entry of ones, weight exp(-x): o is bf16(exp(-x)) / (1 + exp(-x))."""
    x = np.linspace(0.1, 3, 64, dtype=np.float32)
    query = np.zeros((1, 64, 1, 16), np.float32)
    query[0, :, 0, 0] = -x
    query = jnp.asarray(query, jnp.bfloat16)
    pool, selection = jnp.ones((1, 1, 1, 16), jnp.bfloat16), jnp.zeros((1, 64, 1), jnp.int32)
    rows = jnp.zeros((1, 64, 16), jnp.bfloat16)
    first = jnp.arange(64, dtype=jnp.int32)[None]
    inputs = (query, rows, first, jnp.full(1, -jnp.inf), pool, 0, selection)
    options = {"window": 1, "scale": 1.0, "implementation": "pallas_gpu", "interpret": True}
    found = np.asarray(jax.jit(functools.partial(sparse_attention, **options))(*inputs)[0], np.float32)[0, :, 0, 0]
    p = jnp.exp(query[0, :, 0, 0].astype(jnp.float32))
    expected = formats.round_to(formats.round_to(p, jnp.bfloat16).astype(jnp.float32) / (1 + p), jnp.bfloat16)
    unrounded = formats.round_to(p / (1 + p), jnp.bfloat16)
    np.testing.assert_array_equal(found, np.asarray(expected, np.float32))
    assert (np.asarray(unrounded) != np.asarray(expected)).sum() > 5  # so the rounding can be seen


# --- what the hardware path refuses -------------------------------------------------------------------------------


def refusal(**changes: Any) -> str:
    """Why a call at the released shapes (with changes) is refused, seen without running it."""
    shape: Any = jax.ShapeDtypeStruct
    inputs: dict[str, Any] = {
        "q_BTNH": shape((2, 4, 64, 512), "bfloat16"),
        "window_BSH": shape((2, 132, 512), "bfloat16"),
        "first_BT": shape((2, 4), "int32"),
        "sink_N": shape((64,), "float32"),
        "pool_GBPH": shape((3, 2, 4096, 4, 128), "bfloat16"),
        "selection_BTK": shape((2, 4, 500), "int32"),
        **changes,
    }

    def attend(inputs: Inputs) -> Any:
        return sparse_attention(**inputs, window=128, scale=0.1, implementation="pallas_gpu")

    with pytest.raises(Unsupported) as refused:
        jax.eval_shape(attend, inputs)
    return str(refused.value)


def test_widths_that_are_no_power_of_two_are_refused_by_value() -> None:
    shape: Any = jax.ShapeDtypeStruct
    narrow = {"q_BTNH": shape((2, 4, 64, 384), "bfloat16"), "window_BSH": shape((2, 132, 384), "bfloat16")}
    assert "width=384" in refusal(**narrow, pool_GBPH=shape((3, 2, 4096, 3, 128), "bfloat16"))


def test_byte_arrays_that_signed_indices_cannot_reach_are_refused() -> None:
    """fp4 codes are read as words and so reach further: 3 GiB of them pass this check, 3 GiB of e4m3 do not."""
    shape: Any = jax.ShapeDtypeStruct
    entries = 3 * 2**30 // 2 // 512
    fp8 = storage.Packed(shape((1, 2, entries, 512), "uint8"), shape((1, 2, entries, 16), "uint8"), 512, formats.WINDOW)
    assert "2 to 4 GiB" in refusal(pool_GBPH=fp8)
    fp4 = storage.Packed(
        shape((1, 2, 2 * entries, 256), "uint8"), shape((1, 2, 2 * entries, 32), "uint8"), 512, formats.MAIN
    )
    query = shape((2, 4, 64, 512), "bfloat16")
    window, first = shape((2, 132, 512), "bfloat16"), shape((2, 4), "int32")
    selection, options = shape((2, 4, 500), "int32"), {"window": 128, "scale": 0.1, "causal": True, "interpret": False}
    pallas_gpu.check(query, window, first, shape((64,), "float32"), fp4, 0, selection, **options)
