"""What the compiler is given: few arguments, one body per kind of group, caches updated in place."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from csa2_jax import Bound, Model, ModelConfig, Numerics, init_cache
from csa2_jax.bound import _jit_forward

TWIN = "configs/v41_twin.json"


def _abstract_step(
    config: ModelConfig,
    numerics: Numerics,
    tokens: int = 1,
    max_length: int = 256,
    *,
    draft: bool = False,
    storage: str = "f32",
):
    """The arguments of a jitted step over abstract weights: nothing is allocated."""
    model = nnx.eval_shape(lambda: Model(config, numerics=numerics))
    bound = Bound.of(model)
    cache = jax.eval_shape(lambda: init_cache(config, 1, max_length, storage, draft=draft))
    feed_def, feed_state = bound.feed if draft and bound.feed is not None else (None, None)
    shapes = (jax.ShapeDtypeStruct((1, tokens), np.int32), cache, jax.ShapeDtypeStruct((1,), np.int32))
    return (bound.structure, feed_def, bound.state, feed_state, *shapes)


def _lower(args):
    return _jit_forward.lower(*args, all_logits=True, capture=frozenset())


def _layout(groups: int, per_group: int = 6) -> ModelConfig:
    """The 40-layer layout with another number of encoder and decoder groups."""
    twin = ModelConfig.from_hf(TWIN)
    encoder = [2 + per_group * g for g in range(groups)]
    start = 2 + per_group * groups
    decoder = [start + 4 * g for g in range(groups + 1)]
    layers = decoder[-1] + 4
    return dataclasses.replace(
        twin,
        num_hidden_layers=layers,
        compress_ratios=(0, 0, *[2] * (per_group * groups), *[1] * (layers - start), *[0] * 3),
        kv_source_layer_ids=(*encoder, start),
        index_source_layer_ids=(*encoder, *decoder),
        candidate_source_layer_id=start,
        engram_layer_ids=(1, encoder[-1]),
        dspark_target_layer_ids=(layers - 3, layers - 2, layers - 1),
    )


@pytest.mark.parametrize("storage", ["bf16", "packed"])
@pytest.mark.parametrize("draft", [False, True])
def test_step_of_forty_layers_takes_fewer_than_80_arguments(draft, storage):
    # The most there can be: fp8 and fp4 weights with their scales, Engram, a packed cache and the draft head's windows.
    args = _abstract_step(ModelConfig.from_hf(TWIN), Numerics("bfloat16", True), draft=draft, storage=storage)
    assert len(jax.tree.leaves(args[2:])) < 80


@pytest.mark.smoke
def test_equal_groups_do_not_grow_the_program():
    numerics = Numerics("float32", False)
    few, many = (_lower(_abstract_step(_layout(groups), numerics)).as_text() for groups in (2, 6))
    # Window tails are gathered layer by layer behind the scans; the bodies, nearly all of the program, stay the same.
    assert few.count("stablehlo.while") == many.count("stablehlo.while")
    assert many.count("stablehlo.dot_general") == few.count("stablehlo.dot_general")
    assert len(many) < 1.2 * len(few)


def test_unrolled_program_grows_with_the_layers():
    numerics = Numerics("float32", False)
    config = _layout(groups=2)
    scanned = _lower(_abstract_step(config, numerics)).as_text().count("stablehlo.dot_general")
    model = nnx.eval_shape(lambda: Model(config, numerics=numerics, scan_layers=False))
    args = list(_abstract_step(config, numerics))
    bound = Bound.of(model)
    args[0], args[2] = bound.structure, bound.state
    unrolled = _lower(tuple(args)).as_text().count("stablehlo.dot_general")
    assert scanned < 0.35 * unrolled


def test_caches_are_updated_in_place_and_memory_does_not_follow_the_pool():
    config = dataclasses.replace(ModelConfig.from_hf("configs/v41_tiny.json"), max_position_embeddings=1 << 20)
    numerics = Numerics("float32", False)
    temporary = {}
    for length in (1 << 16, 1 << 20):
        args = _abstract_step(dataclasses.replace(config, quantized=False), numerics, max_length=length)
        memory = _lower(args).compile().memory_analysis()
        cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args[5]))
        assert memory.alias_size_in_bytes >= cache_bytes  # every array of the cache is donated and reused
        temporary[length] = memory.temp_size_in_bytes
    # Beyond a constant, only the f32 score row of one query and what sorting it takes may grow with the pool.
    grown = temporary[1 << 20] - temporary[1 << 16]
    assert grown <= 3 * 4 * ((1 << 20) - (1 << 16))


_ONE_STEP = """
import jax, jax.monitoring, numpy as np
from tests.small_models import mini
from csa2_jax import forward, init_cache
jax.config.update("jax_disable_most_optimizations", True)
model = mini()
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
forward(model, np.ones((1, 1), int), init_cache(model.config, 1, 8, "f32"))
print(sum(e.endswith("cache_hits") for e in found), sum(e.endswith("cache_misses") for e in found))
"""


def test_a_new_process_finds_compiled_programs_in_the_persistent_cache(tmp_path: Path) -> None:
    """The same step in two processes: the second compiles nothing."""
    root = Path(__file__).resolve().parent.parent
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(root),
    }
    told = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _ONE_STEP],
            cwd=root,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told.append([int(n) for n in done.stdout.split()])
    (_, first_misses), (second_hits, second_misses) = told
    assert first_misses > 0
    assert (second_hits > 0, second_misses) == (True, 0)
