"""Every gradient against finite differences in float64, exact zeros where a loss must not reach, documents packed and apart."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from csa2_jax.learning import IndexLoss
from kernels_pallas import Unsupported
from tests.small_models import quick_compilation
from tests.train.float64 import in_float64
from tests.train.small import rows, trainable
from train.draft_loss import DraftLossSettings
from train.parameters import DRAFT, INDEXER, Choice, matches, take_apart
from train.step import Batch, LossSettings, Sums, losses

WIDTH = 24
SEGMENTS = 6
TERMS = ("lm", "index", "balance", "draft")
SETTINGS = LossSettings(remat="none", draft=DraftLossSettings(1.0, places=3, confidence=1.0, targets="tokens"))


def documents(seed: int = 0) -> list[np.ndarray]:
    """Lengths that are no multiple of a group or block, and with K - 1, K and K + 1 entries visible to the last token (K = 3)."""
    model = trainable()
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.config.vocab_size, n).astype(np.int32) for n in (5, 7, 9, 11, 23)]


def apart() -> Batch:
    return rows([[d] for d in documents()], WIDTH, 1)


def packed() -> Batch:
    a, b, c, d, e = documents()
    align = trainable().config.document_alignment
    return rows([[a, b], [c, d], [e], [], []], WIDTH, align)


@functools.cache
def parts() -> Any:
    return take_apart(trainable(), Choice())


def terms(trained: dict[str, Any], batch: Any, settings: LossSettings = SETTINGS) -> tuple[jax.Array, Sums]:
    """All loss terms as one vector, so that one backward, once per term, serves every test."""
    together, p = parts()
    sums = losses(together(trained | p.loads | p.frozen), batch, settings, SEGMENTS, jax.random.key(0))
    draft = sums["draft"] + sums["draft_confidence"]
    return jnp.stack([sums["lm"], sums["index"], sums["balance"], draft]), sums


def both(trained: dict[str, Any], batch: Any, settings: LossSettings = SETTINGS) -> tuple[Any, Any]:
    """(terms, their gradients by path [term, ...])."""
    value, pull, _ = jax.vjp(lambda t: terms(t, batch, settings), trained, has_aux=True)
    (jacobian,) = jax.vmap(pull)(jnp.eye(len(TERMS), dtype=value.dtype))
    return value, jacobian


@functools.cache
def compiled(settings: LossSettings = SETTINGS) -> Any:
    return jax.jit(functools.partial(both, settings=settings))


@functools.cache
def found(which: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    _, p = parts()
    with quick_compilation():
        value, jacobian = compiled()(p.trained, {"apart": apart, "packed": packed}[which]())
    return np.asarray(value), {name: np.asarray(a) for name, a in jacobian.items()}


def reaches(term: str, name: str) -> bool:
    """Whether a loss is meant to train a parameter."""
    if matches(name, INDEXER):
        return term == "index"
    if matches(name, DRAFT):
        return term == "draft"
    if term == "lm":
        return True
    # Routers balance what they are given: everything below the last router, the head and the last norm do not count.
    return term == "balance" and name not in ("head.weight", "norm.weight")


def test_each_loss_reaches_its_parameters_and_no_other() -> None:
    """Exactly zero where it must not, not zero where it should: cross-entropy never the indexer, its loss never the backbone, the
    draft head's never anything else."""
    _, jacobian = found("apart")
    for name, gradient in jacobian.items():
        for i, term in enumerate(TERMS):
            if not reaches(term, name):
                assert not gradient[i].any(), (term, name)
            elif term != "balance":  # whose last layer's parameters behind the router take no part
                assert gradient[i].any(), (term, name)
            assert np.isfinite(gradient[i]).all(), (term, name)
    balance = {name for name, gradient in jacobian.items() if gradient[TERMS.index("balance")].any()}
    assert {"layers.ffn.gate.weight", "layers.attn.wq_b.weight", "embed.weight", "engram.wkv.weight"} <= balance


def test_packed_documents_have_the_losses_and_gradients_of_separate_ones() -> None:
    """Lengths that are no multiple of a group; all terms but the draft head's, whose places are drawn per row."""
    value, jacobian = found("apart")
    other, packed_jacobian = found("packed")
    np.testing.assert_allclose(other[:3], value[:3], rtol=2e-6)
    for name, gradient in jacobian.items():
        for i, term in enumerate(TERMS[:3]):
            scale = np.abs(gradient[i]).max()
            np.testing.assert_allclose(
                packed_jacobian[name][i], gradient[i], rtol=0, atol=2e-4 * scale + 1e-8, err_msg=f"{term} {name}"
            )


def test_gradients_are_those_of_finite_differences_in_float64() -> None:
    """Per parameter (so per module) and loss: the derivative in a random direction, where the loss is meant to reach.

    The same code runs in float64; its gradient agrees with central differences to seven digits, and the gradient in float32
    with that to four.
    """
    _, p = parts()
    batch = packed()
    _, single = found("packed")
    rng = np.random.default_rng(1)
    with in_float64(), quick_compilation():
        together, _ = parts()
        exact = {name: jnp.asarray(np.asarray(a), jnp.float64) for name, a in p.trained.items()}
        rest = {
            name: jnp.asarray(np.asarray(a), jnp.float64) if a.dtype == np.float32 else a
            for name, a in (p.loads | p.frozen).items()
        }

        def f(trained: dict[str, Any]) -> jax.Array:
            sums = losses(together(trained | rest), batch, SETTINGS, SEGMENTS, jax.random.key(0))
            return jnp.stack([sums["lm"], sums["index"], sums["balance"], sums["draft"] + sums["draft_confidence"]])

        def gradient(trained: dict[str, Any]) -> Any:
            value, pull = jax.vjp(f, trained)
            return jax.vmap(pull)(jnp.eye(len(TERMS), dtype=value.dtype))[0]

        forward = jax.jit(f)
        jacobian = jax.jit(gradient)(exact)
        assert jax.tree.leaves(jacobian)[0].dtype == jnp.float64
        checked = 0
        for name, a in exact.items():
            direction = rng.standard_normal(a.shape)
            step = 1e-5 * float(np.abs(np.asarray(a)).max() + 1e-3) / np.abs(direction).max()
            above, below = (np.asarray(forward(exact | {name: a + s * step * direction})) for s in (1, -1))
            slope = (above - below) / (2 * step)
            along = np.asarray(jnp.sum(jacobian[name] * direction, axis=tuple(range(1, a.ndim + 1))))
            size = np.sqrt(np.sum(np.square(np.asarray(jacobian[name])), axis=tuple(range(1, a.ndim + 1))))
            for i, term in enumerate(TERMS):
                if reaches(term, name):
                    assert abs(slope[i] - along[i]) <= 1e-6 * size[i] + 1e-7, (
                        term,
                        name,
                    )
                    error = np.abs(single[name][i] - np.asarray(jacobian[name][i])).max()
                    assert error <= 3e-4 * np.abs(np.asarray(jacobian[name][i])).max() + 1e-7, (term, name)
                    checked += size[i] > 1e-6
        assert checked > 70


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["layer", pytest.param("group", marks=pytest.mark.exhaustive)])
def test_computing_again_changes_no_gradient(remat: Any) -> None:
    value, jacobian = found("packed")
    with quick_compilation():
        again, other = compiled(dataclasses.replace(SETTINGS, remat=remat))(parts()[1].trained, packed())
    np.testing.assert_allclose(again, value, rtol=1e-6)
    for name, gradient in jacobian.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(other[name], gradient, rtol=0, atol=1e-4 * scale + 1e-9, err_msg=name)


def test_a_selection_across_a_window_only_layer_has_no_served_teacher() -> None:
    from csa2_jax.plan import build_plan

    plan = build_plan(
        num_hidden_layers=3,
        compress_ratios=[2, 0, 2],
        kv_source_layer_ids=[0],
        index_source_layer_ids=[0],
        candidate_source_layer_id=None,
    )
    with pytest.raises(Unsupported, match=r"layers \[2\] reuse a selection across a window-only layer"):
        IndexLoss().check(plan)
    IndexLoss(teacher="own").check(plan)
    with pytest.raises(ValueError, match="domain='all' must be one of"):
        IndexLoss(domain="all")  # type: ignore[arg-type]


def test_padding_counts_nowhere() -> None:
    """Other ids in the padding change no sum."""
    _, p = parts()
    batch = packed()
    other = dataclasses.replace(batch, tokens=np.where(batch.segment < 0, 7, batch.tokens))
    with quick_compilation():
        values = [np.asarray(compiled()(p.trained, b)[0]) for b in (batch, other)]
    np.testing.assert_array_equal(values[0][:3], values[1][:3])
