"""The XLA reference of compression, and what its doors refuse."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.compress_suite import CompressSuite

from kernels_pallas import Unsupported, compress, compress_entries, empty_half


class TestCompressXla(CompressSuite):
    implementation = "xla"


def arguments(ratio: int = 2, width: int = 32, tokens: int = 4, overlap: bool = False) -> tuple[Any, ...]:
    c = np.zeros((2, tokens, width * (2 if overlap else 1)), np.float32)
    return c, c, *empty_half(2, width, ratio, overlap), np.zeros(2, np.int32), np.full(2, tokens, np.int32)


def test_empty_half_is_the_state_before_any_token() -> None:
    c_half, z_half = empty_half(3, 8, 4, overlap=True)
    assert c_half.shape == z_half.shape == (3, 7, 16)
    assert c_half.dtype == z_half.dtype == jnp.float32
    assert not c_half.any()
    assert (z_half[:, :4] == -jnp.inf).all()
    assert jnp.isfinite(z_half[:, 4:]).all()
    assert empty_half(3, 8, 4)[1].shape == (3, 3, 8)


def test_doors_refuse_arguments_that_contradict_one_another_and_name_them() -> None:
    c, z, c_half, z_half, phase, count = arguments()
    with pytest.raises(ValueError, match=r"bias_MH\.shape=\(1, 32\).*\[2, 32\]"):
        compress(c, z, c_half, z_half, phase, count, ratio=2, bias_MH=np.zeros((1, 32), np.float32))
    with pytest.raises(ValueError, match=re.escape("[B, 2 * ratio - 1, H] = [2, 3, 32]")):
        compress(c, z, c_half, z_half, phase, count, ratio=2, overlap=True)
    with pytest.raises(ValueError, match="z_BTH is needed at ratio=2"):
        compress(c, None, c_half, z_half, phase, count, ratio=2)
    with pytest.raises(ValueError, match=r"carried Z has dtype bfloat16.*float32"):
        compress(c, z, c_half, z_half.astype(jnp.bfloat16), phase, count, ratio=2)
    norm, turn, static = np.ones(32, np.float32), np.ones((2, 2, 8), np.float32), {"eps": 1e-6, "dtype": "bfloat16"}
    state = (c, z, c_half, z_half, phase, count)
    with pytest.raises(ValueError, match=r"norm_H\.shape=\(16,\).*\[32\]"):
        compress_entries(*state, norm[:16], (turn, turn), ratio=2, **static)
    with pytest.raises(ValueError, match=re.escape("[B, E, R/2] = [2, 2]")):
        compress_entries(*state, norm, (turn[:, :1], turn[:, :1]), ratio=2, **static)
    with pytest.raises(ValueError, match="storage='int3'"):
        compress_entries(*state, norm, (turn, turn), ratio=2, storage="int3", **static)  # pyright: ignore[reportArgumentType]
    narrow = (*arguments(width=24), norm[:24], (turn, turn))
    with pytest.raises(ValueError, match="groups of 16, of which H=24"):
        compress_entries(*narrow, ratio=2, storage="packed", **static)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_kernels_refuse_widths_that_their_compilers_do_not_take_and_name_them(implementation: str) -> None:
    with pytest.raises(Unsupported, match="H=96"):
        compress(*arguments(width=96), ratio=2, implementation=implementation)
