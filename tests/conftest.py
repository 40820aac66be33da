"""Shared set-up: most tests compile with few optimisations, because compiling is where their time goes."""

import gc
from pathlib import Path

import jax
import pytest

# The decisive comparisons and the looks at compiled programs run with what users run with.
OPTIMISED = ("test_recordings_optimised", "test_compile")

# Tests of minutes begin first, or one process would end long after the other.
LONG = ("test_run", "test_gradients", "test_eight_devices", "test_kills")


def optimised(module):
    return module.__name__.rpartition(".")[2] in OPTIMISED


def pytest_collection_modifyitems(items):
    """Mark those, which `make test` runs apart, without the flags that it gives the rest; and the long ones first."""
    for item in items:
        if optimised(item.module):
            item.add_marker(pytest.mark.optimised)
    items.sort(key=lambda item: item.module.__name__.rpartition(".")[2] not in LONG)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request):
    """Few compiler passes for the module's tests (a quarter less time to compile; the program's meaning is the same)."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", before or not optimised(request.module))
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# A process may map 65,530 regions of memory (Linux's default) and every compiled program takes about ten, so a long run of tests
# ends in a segmentation fault unless it lets programs go.
MAPPED_REGIONS = Path("/proc/self/maps")
MOST_REGIONS = 20_000


@pytest.fixture(autouse=True)
def programs_let_go():
    """Drop compiled programs once they take a third of what the process may map."""
    yield
    if MAPPED_REGIONS.exists() and MAPPED_REGIONS.read_bytes().count(b"\n") > MOST_REGIONS:
        jax.clear_caches()
        gc.collect()
