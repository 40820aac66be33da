"""The reference of index selection with packed keys; `test_kernels_xla` has it with plain ones."""

from tests.kernels.index_select_suite import IndexSelectSuite


class TestIndexSelectXla(IndexSelectSuite):
    implementation = "xla"
    storages = ("packed", "packed units")
