"""The GPU kernel of index selection, run by Pallas's interpreter."""

from tests.kernels.index_select_suite import IndexSelectSuite


class TestIndexSelectGpu(IndexSelectSuite):
    implementation = "pallas_gpu"
    interpret = True
