"""Shared set-up: most tests compile with few optimisations, because compiling is where their time goes."""

import jax
import pytest

# The decisive comparisons and the looks at compiled programs run with what users run with.
OPTIMISED = ("test_recordings", "test_cli_check", "test_compile")


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request):
    """Few compiler passes for the module's tests (a quarter less time to compile; the program's meaning is the same)."""
    before = jax.config.read("jax_disable_most_optimizations")
    quick = request.module.__name__.rpartition(".")[2] not in OPTIMISED
    jax.config.update("jax_disable_most_optimizations", quick or before)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
