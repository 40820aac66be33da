"""The small configurations drop entries: a test in which every entry is selected proves nothing about selecting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from csa2_jax import ModelConfig
from csa2_jax.plan import Mode
from tests import random_checkpoint as rc
from tests.golden_sets import SETS, load_trace, materialise
from tests.small_models import MINI_KNOBS, RATIOS_KNOBS, SMALL, oracle_of
from tests.test_oracle_agreement import PINNED, SMALLEST, TOTALS


def drops(config: ModelConfig, tokens: int) -> dict[str, bool]:
    """What a sequence of `tokens` leaves out: pool entries at some FULL layer, candidate blocks where there are any."""
    entries = [tokens // spec.ratio for spec in config.plan.layers if spec.mode is Mode.FULL]
    found = {"entries": config.index_topk < max(entries) / 4}
    if config.has_candidates:
        m = config.plan.layers[config.candidate_source_layer_id].ratio
        found["blocks"] = config.candidate_topk_blocks < -(-(tokens // m) // config.candidate_block_size)
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("name", SETS)
def test_recorded_configurations_drop_entries_and_blocks(name: str) -> None:
    config = ModelConfig.from_hf(materialise(name))
    found = drops(config, load_trace(name)["tokens"].shape[1])
    assert found == {"entries": True, "blocks": True}


RANDOM: dict[str, tuple[dict[str, Any], int]] = {
    "ratios": (RATIOS_KNOBS, 40),
    "mini": (MINI_KNOBS, 12),
    "oracle, everything": (PINNED["everything"], min(TOTALS)),
    "oracle, quantised": (SMALLEST, min(TOTALS)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_configurations_drop_entries_and_blocks(name: str) -> None:
    knobs, tokens = RANDOM[name]
    config = ModelConfig.from_hf(rc.random_config(0, quantisable=True, **knobs))
    assert drops(config, tokens) == {"entries": True, "blocks": True}


def test_a_configuration_that_keeps_everything_is_found() -> None:
    """The rule can fail; this configuration is there to show that a pool may be smaller than K."""
    config = ModelConfig.from_hf(rc.random_config(0, quantisable=True, **PINNED["all entries fit"]))
    assert drops(config, max(TOTALS)) == {"entries": False}


@pytest.mark.parametrize("name", SMALL)
def test_small_models_do_drop_entries_and_blocks_while_running(name: str) -> None:
    """Not only by the numbers of the configuration: towards the end of a sequence what is selected is not simply the
    newest, layers that select do not choose alike, and candidates leave out blocks that would have been selected from."""
    config, tokens = SMALL[name]().config, SMALL[name]().tokens()[0]
    trace, free = (oracle_of(name, fault).forward(tokens) for fault in (None, "no_candidates"))
    late = slice(len(tokens) // 2, None)
    for layer, chosen in trace.selections.items():
        visible = (np.arange(len(tokens)) + 1) // config.plan.layers[layer].ratio
        newest = visible[:, None] - config.index_topk + np.arange(config.index_topk)
        assert (chosen[late] != newest[late]).any(axis=1).mean() > 0.8, layer
    reader = next(spec.layer for spec in config.plan.layers if spec.candidate_source is not None)
    source = config.plan.layers[reader].candidate_source
    assert (trace.selections[source][late] != trace.selections[reader][late]).any(axis=1).mean() > 0.8
    assert (trace.selections[reader][late] != free.selections[reader][late]).any(axis=1).mean() > 0.5
