"""The GPU kernels of compression, interpreted on a CPU: the inherited suite, and what is theirs alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from kernels.compress_suite import CSA, CompressSuite, Sequences, assert_same_bits

from kernels_pallas import compress


class TestCompressGpu(CompressSuite):
    implementation = "pallas_gpu"
    interpret = True


def test_programs_share_a_sequence_without_missing_or_disturbing_an_entry() -> None:
    """Eleven entries for programs of four: the last program repeats the last entry, the later ones see no carried row."""
    at, count = np.array([3, 4]), np.array([43, 40], np.int32)
    sequences = Sequences.exact(1, CSA, 2, 48, 16)
    arrays = (*sequences.chunk(at, count, 43), *sequences.halves(at), (at % 4).astype(np.int32), count)

    def pooled(**chosen: Any) -> Any:
        return jax.jit(functools.partial(compress, bias_MH=sequences.bias, **CSA.options, **chosen))(*arrays)

    found, expected = pooled(implementation="pallas_gpu", interpret=True), pooled(implementation="xla")
    assert_same_bits(found[0], expected[0], np.arange(11) < ((at % 4 + count) // 4)[:, None])
    assert_same_bits(found[1:], expected[1:])
