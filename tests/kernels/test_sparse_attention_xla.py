"""The XLA reference of sparse attention through the inherited suite."""

from kernels.sparse_attention_suite import SparseAttentionSuite


class TestSparseAttentionXla(SparseAttentionSuite):
    implementation = "xla"
