"""The GPU kernels of sparse attention, interpreted on a CPU: the inherited suite, and what is theirs alone."""

from __future__ import annotations

from kernels.sparse_attention_suite import SparseAttentionSuite


class TestSparseAttentionGpu(SparseAttentionSuite):
    implementation = "pallas_gpu"
    interpret = True
