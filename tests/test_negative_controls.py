"""Every part of the model matters: severing one moves the logits, and by what the released code was seen to move.

The faults are planted in our own modules. One compiled program holds all of them behind traced switches, so that a
control costs a call and not a compilation.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csa2_jax import attention, block, compressor, moe, rope
from csa2_jax.attention import Attention
from csa2_jax.engram import Engram
from csa2_jax.indexer import Indexer
from csa2_jax.model import Model
from csa2_jax.moe import Gate
from csa2_jax.plan import Mode
from csa2_jax.residual import HyperConnection
from tests.golden_sets import load_trace, materialise
from tests.small_models import quick_compilation, relative_error, tiny8

SET = "tiny8_f32_noqat"
# Severed here -> what the recording calls it.
REQUIRED = {
    "pool sharing": "no_pool_in_reuse",
    "all pools": "no_pool",
    "selection reuse": "reuse_topk_recent",
    "selection": "index_topk_recent",
    "candidates": "no_candidates",
    "sink": "no_sink",
    "inverse rotation": "no_inverse_rope",
    "engram": "no_engram",
    "mHC deferral": "mhc_unstaggered",
}
FURTHER = {
    "mHC direction": "mhc_comb_transposed",
    "clamps": "no_swiglu_clamp",
    "router bias": "no_gate_bias",
    "pooling weights": "mean_pool",
}
FAULTS = REQUIRED | FURTHER
Run = Callable[[str | None], np.ndarray]


class Planted:
    """Wrappers around our modules that take the wrong turn where a switch is on; `switches` is set while tracing."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.switches: dict[str, jax.Array] = {}
        self.own_pre: jax.Array | None = None
        for owner, name, make in (
            (Attention, "__call__", self.attention),
            (attention, "sparse_attention", self.sparse_attention),
            (Indexer, "__call__", self.indexer),
            (rope, "rotate", self.rotate),
            (Engram, "__call__", self.engram),
            (HyperConnection, "__call__", self.hyper),
            (block, "collapse", self.collapse),
            (moe, "swiglu", self.swiglu),
            (Gate, "__call__", self.gate),
            (compressor, "compress_entries", self.compress),
        ):
            patch.setattr(owner, name, make(getattr(owner, name)))

    def on(self, fault: str, wrong: Any, right: Any) -> Any:
        return jax.tree.map(lambda w, r: jnp.where(self.switches[fault], w, r), wrong, right)

    def newest(self, step: Any, ratio: int, selection: jax.Array) -> jax.Array:
        """The newest K visible entries."""
        topk = selection.shape[-1]
        entry = ((step.position_BT + 1) // ratio)[..., None] - topk + jnp.arange(topk)
        return jnp.where(entry >= 0, entry, -1)

    def attention(self, right: Any) -> Any:
        def call(module: Any, x: Any, history: Any, role: Any, shared: Any, step: Any, *rest: Any) -> Any:
            if role.mode is not Mode.REUSE:
                return right(module, x, history, role, shared, step, *rest)
            chosen = self.on(
                "selection reuse", self.newest(step, role.ratio, shared.selection_BTK), shared.selection_BTK
            )
            chosen = self.on("pool sharing", jnp.full_like(chosen, -1), chosen)
            given = dataclasses.replace(shared, selection_BTK=chosen)
            y, kv, _, seen = right(module, x, history, role, given, step, *rest)
            return y, kv, shared, seen

        return call

    def sparse_attention(self, right: Any) -> Any:
        def call(q: Any, rows: Any, first: Any, sink: Any, pool: Any, group: Any, chosen: Any, **kwargs: Any) -> Any:
            sink = self.on("sink", jnp.full_like(sink, -jnp.inf), sink)
            if chosen is not None:
                chosen = self.on("all pools", jnp.full_like(chosen, -1), chosen)
            return right(q, rows, first, sink, pool, group, chosen, **kwargs)

        return call

    def indexer(self, right: Any) -> Any:
        def call(
            module: Any, qr: Any, x: Any, keys: Any, group: Any, ratio: int, candidates: Any, make: bool, step: Any,
            *rest: Any, **kwargs: Any
        ) -> Any:  # fmt: skip
            selection, made, scores = right(module, qr, x, keys, group, ratio, candidates, make, step, *rest, **kwargs)
            if candidates is not None:
                free, *_ = right(module, qr, x, keys, group, ratio, None, make, step, *rest, **kwargs)
                selection = self.on("candidates", free, selection)
            return self.on("selection", self.newest(step, ratio, selection), selection), made, scores

        return call

    def rotate(self, right: Any) -> Any:
        def call(x: Any, rotation: Any, *, inverse: bool = False) -> Any:
            turned = right(x, rotation, inverse=inverse)
            return self.on("inverse rotation", x, turned) if inverse else turned

        return call

    def engram(self, right: Any) -> Any:
        return lambda module, x, *rest: self.on("engram", x, right(module, x, *rest))

    def hyper(self, right: Any) -> Any:
        def call(module: Any, x: Any, config: Any) -> Any:
            self.own_pre, post, comb = right(module, x, config)
            return self.own_pre, post, self.on("mHC direction", jnp.swapaxes(comb, -1, -2), comb)

        return call

    def collapse(self, right: Any) -> Any:
        return lambda x, pre, numerics: right(x, self.on("mHC deferral", self.own_pre, pre), numerics)

    def swiglu(self, right: Any) -> Any:
        def call(g: Any, u: Any, weight: Any, limit: float, numerics: Any) -> Any:
            clamped = right(g, u, weight, limit, numerics)
            return self.on("clamps", right(g, u, weight, jnp.inf, numerics), clamped)

        return call

    def gate(self, right: Any) -> Any:
        def call(module: Any, *args: Any) -> Any:
            module.bias = nnx.Param(self.on("router bias", jnp.zeros_like(module.bias[...]), module.bias[...]))
            return right(module, *args)

        return call

    def compress(self, right: Any) -> Any:
        def call(c: Any, z: Any, *rest: Any, **kwargs: Any) -> Any:
            z = None if z is None else self.on("pooling weights", jnp.zeros_like(z), z)
            return right(c, z, *rest, **kwargs)

        return call


@pytest.fixture(scope="module")
def run() -> Run:
    """Logits of batch row 0 [T, V] with one fault switched on, or none."""
    model, tokens = tiny8().model, load_trace(SET)["tokens"][:1]
    graphdef, state = nnx.split(model)
    with pytest.MonkeyPatch.context() as patch:
        planted = Planted(patch)

        @jax.jit
        def forward(state: Any, switches: dict[str, jax.Array]) -> jax.Array:
            planted.switches = switches
            merged: Model = nnx.merge(graphdef, state)
            out, _ = merged(jnp.asarray(tokens), None, jnp.full(1, tokens.shape[1], jnp.int32))
            return out.logits[0]

        def call(fault: str | None) -> np.ndarray:
            return np.asarray(forward(state, {name: np.bool_(name == fault) for name in FAULTS}))

        with quick_compilation():
            call(None)  # traced while the faults are planted
    return call


def recorded_logits() -> np.ndarray:
    """[T, V] of batch row 0: the prefill and every decode step of the released code."""
    trace = load_trace(SET)
    prefill = trace["prefill/logits_all"][0]
    steps = range(trace["tokens"].shape[1] - len(prefill))
    return np.concatenate([prefill, [trace[f"decode{k}/logits"][0] for k in steps]])


@pytest.mark.smoke
def test_planting_without_a_fault_changes_nothing(run: Run) -> None:
    assert relative_error(run(None), recorded_logits()) < 5e-5


@pytest.mark.parametrize("fault", FAULTS)
def test_severing_a_part_moves_the_logits_as_recorded(run: Run, fault: str) -> None:
    right, wrong = run(None), run(fault)
    change = np.linalg.norm(wrong - right) / np.linalg.norm(right)
    assert change > 1e-2
    controls = json.loads((materialise(SET) / "meta.json").read_text())["negative_controls_rel_logit_change"]
    assert change == pytest.approx(controls[FAULTS[fault]]["rel"], abs=2e-3)
    # And the comparison with the recording sees it.
    assert relative_error(wrong, recorded_logits()) > 1e-2
