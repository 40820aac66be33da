"""The TPU kernel of sparse attention, interpreted on a CPU, through the inherited suite."""

from kernels.sparse_attention_suite import SparseAttentionSuite


class TestSparseAttentionTpu(SparseAttentionSuite):
    implementation = "pallas_tpu"
    interpret = True
