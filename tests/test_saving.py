"""A model written in the release's layout and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2_jax import load_checkpoint
from csa2_jax.adapters import attach
from csa2_jax.conversion.views import quantise
from csa2_jax.safetensors_io import TensorFiles
from csa2_jax.saving import save_checkpoint
from tests.golden_sets import materialise


def state(model: Any) -> dict[str, np.ndarray]:
    return {".".join(map(str, p)): np.asarray(v[...]) for p, v in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("weights", ["quantised", "bf16", "f32"])
def test_a_saved_model_is_the_same_model(weights: Any, tmp_path: Path) -> None:
    """Numbers that came from fp8 and fp4 codes are such numbers again to the bit, and exact in bf16 too.

    The codes may differ: where rounding made a tile's largest number smaller, a smaller scale holds the same numbers.
    """
    source = materialise("tiny8_fp8")
    model = load_checkpoint(source, compute_dtype="float32", fake_quant=False, weights="float32")
    save_checkpoint(model, tmp_path / "saved", weights=weights)
    again = load_checkpoint(tmp_path / "saved", compute_dtype="float32", fake_quant=False, weights="float32")
    for name, array in state(model).items():
        np.testing.assert_array_equal(state(again)[name], array, err_msg=name)
    if weights == "quantised":
        ours, theirs = TensorFiles(tmp_path / "saved"), TensorFiles(source)
        assert {name: (t.shape, t.dtype) for name, t in ours.items()} == {
            name: (t.shape, t.dtype) for name, t in theirs.items()
        }


@settings(deadline=None, max_examples=30, derandomize=True, database=None)
@given(
    seed=st.integers(0, 999),
    kind=st.sampled_from(["fp8", "fp4"]),
    scale=st.integers(-40, 40),
    rows=st.sampled_from([1, 32]),
)
def test_quantised_weights_are_the_nearest_codes_with_the_smallest_scale_that_holds_them(
    seed: int, kind: Any, scale: int, rows: int
) -> None:
    """Against plain NumPy: one group at a time, powers of two by searching, nearest code by trying all of them."""
    rng = np.random.default_rng(seed)
    rows = 1 if kind == "fp4" else rows
    weight = (rng.standard_normal((40, 70)) * np.exp2(scale) * np.exp(rng.standard_normal((40, 70)) * 2)).astype(
        np.float32
    )
    weight[:32, :32] = 0
    codes, scales = quantise(weight, (rows, 32), kind)
    exponents = scales.astype(int) - 127
    grid_dtype = ml_dtypes.float8_e4m3fn if kind == "fp8" else ml_dtypes.float4_e2m1fn
    every = np.arange(256 if kind == "fp8" else 16, dtype=np.uint8).view(grid_dtype).astype(np.float64)
    grid = np.unique(every[np.isfinite(every)])
    found = np.repeat(np.repeat(np.exp2(exponents.astype(float)), 32, 1)[:, :70], rows, 0)[:40]
    if kind == "fp8":
        values = codes.astype(np.float64)
    else:
        nibbles = np.stack([codes.view(np.uint8) & 15, codes.view(np.uint8) >> 4], -1).reshape(40, 70)
        values = every[nibbles]
    limit = 448.0 if kind == "fp8" else 6.0
    for i in range(0, 40, rows):
        for j in range(0, 70, 32):
            amax = np.abs(weight[i : i + rows, j : j + 32].astype(np.float64)).max()
            e = exponents[i // rows, j // 32]
            if amax == 0:
                continue
            assert amax <= limit * 2.0**e
            assert amax > limit * 2.0 ** (e - 1)
    target = weight.astype(np.float64) / found
    best = np.abs(target[..., None] - grid).min(-1)
    np.testing.assert_allclose(np.abs(values - target), best, rtol=1e-9, atol=1e-12)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    stored = load_checkpoint(materialise("tiny8_fp8"), compute_dtype="float32")
    with pytest.raises(ValueError, match=r"belongs to stored codes: load the model with weights='float32'"):
        save_checkpoint(stored, tmp_path / "a")
    plain = load_checkpoint(
        materialise("tiny8_f32_noqat"), compute_dtype="float32", fake_quant=False, weights="float32"
    )
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="exists already: name a new directory"):
        save_checkpoint(plain, tmp_path / "there")
    attach(plain, ["layers.attn.wq_a"], 2, 2.0)
    with pytest.raises(ValueError, match=r"layers.attn.wq_a.lora_a is an adapter"):
        save_checkpoint(plain, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert jax.tree.leaves(plain.layers.attn.wq_a.lora_a[...])
