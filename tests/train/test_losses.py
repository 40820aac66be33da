"""Cross-entropy in chunks, the index divergence and the attention mass against NumPy in float64, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import attention_mass, index_divergence
from train.losses import cross_entropy, likeliest


def differences(f: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central finite differences of a float64 function."""
    found = np.zeros(at.shape)
    for place in np.ndindex(*at.shape):
        moved = at.astype(np.float64)
        moved[place] += step
        above = f(moved)
        moved[place] -= 2 * step
        found[place] = (above - f(moved)) / (2 * step)
    return found


def reference_ce(h: np.ndarray, head: np.ndarray, target: np.ndarray, weight: np.ndarray) -> float:
    logits = h.astype(np.float64) @ head.astype(np.float64).T
    logits -= logits.max(axis=-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(-(weight * log_p[np.arange(len(target)), target]).sum())


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 11, None])
@pytest.mark.smoke
def test_cross_entropy_in_chunks_is_that_of_all_logits_with_its_gradient(chunk: int | None) -> None:
    """Chunks that divide the vocabulary of 11, that leave a rest, one entry at a time, and all at once."""
    rng = np.random.default_rng(0)
    h, head = rng.standard_normal((6, 4)).astype(np.float32), rng.standard_normal((11, 4)).astype(np.float32)
    target, weight = rng.integers(0, 11, 6), rng.random(6).astype(np.float32)
    weight[2] = 0

    def loss(h: jax.Array, head: jax.Array) -> jax.Array:
        return cross_entropy(h, head, jnp.asarray(target), jnp.asarray(weight), chunk).loss

    value, (dh, dhead) = jax.value_and_grad(loss, (0, 1))(h, head)
    assert float(value) == pytest.approx(reference_ce(h, head, target, weight), rel=1e-6)
    np.testing.assert_allclose(dh, differences(lambda a: reference_ce(a, head, target, weight), h), atol=2e-6)
    np.testing.assert_allclose(dhead, differences(lambda a: reference_ce(h, a, target, weight), head), atol=2e-6)
    assert not np.asarray(dh)[2].any()
    np.testing.assert_array_equal(likeliest(h, head, chunk), (h @ head.T).argmax(axis=-1))
    right = ((h @ head.T).argmax(axis=-1) == target) * weight
    assert float(cross_entropy(h, head, jnp.asarray(target), jnp.asarray(weight), chunk).correct) == pytest.approx(
        right.sum()
    )


def test_logits_of_a_long_sequence_are_never_in_memory() -> None:
    """Compiled temporaries of forward and backward stay far below the 268 MB of the logits of 4,096 tokens and 16,384 entries."""
    shapes = (jax.ShapeDtypeStruct((4096, 8), jnp.float32), jax.ShapeDtypeStruct((16384, 8), jnp.float32))
    rest = (jax.ShapeDtypeStruct((4096,), jnp.int32), jax.ShapeDtypeStruct((4096,), jnp.float32))
    gradient = jax.jit(jax.grad(lambda *a: cross_entropy(*a, chunk=512).loss, (0, 1)))
    memory = gradient.lower(*shapes, *rest).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 60e6


def make_lesson(seed: int) -> dict[str, np.ndarray]:
    """B = 2, T = 5, P = 7, with absent entries, entries beyond the visible ones, and a query that sees nothing."""
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (2, 5, 3, 4),
        "lse": (2, 5, 3),
        "pool": (2, 2, 7, 4),
        "iq": (2, 5, 2, 3),
        "w": (2, 5, 2),
        "keys": (2, 2, 7, 3),
    }
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["visible"] = np.array([[0, 1, 3, 5, 7], [2, 2, 4, 7, 7]], np.int32)
    arrays["first"] = np.array([[0, 0, 1, 2, 0], [0, 1, 1, 6, 3]], np.int32)
    entries = np.stack([[rng.permutation(7)[:4] for _ in range(5)] for _ in range(2)]).astype(np.int32)
    entries[:, :, 3] = np.where(rng.random((2, 5)) < 0.5, -1, entries[:, :, 3])
    return arrays | {"entries": entries}


def allowed(a: dict[str, np.ndarray], named: bool) -> np.ndarray:
    """Entry numbers [B, T, E], -1 where not to be read."""
    entry = a["entries"] if named else np.broadcast_to(np.arange(7), (2, 5, 7))
    seen = (entry >= a["first"][..., None]) & (entry < a["visible"][..., None]) & (entry >= 0)
    return np.where(seen, entry, -1)


def reference_mass(a: dict[str, np.ndarray], named: bool, joins: bool) -> np.ndarray:
    entry = allowed(a, named)
    found = np.zeros(entry.shape)
    for b, t in np.ndindex(2, 5):
        for n in range(3):
            s = np.array(
                [a["q"][b, t, n].astype(float) @ a["pool"][1, b, e] * 0.5 if e >= 0 else -np.inf for e in entry[b, t]]
            )
            lse = float(a["lse"][b, t, n])
            if joins:
                lse = np.log(np.exp(lse) + np.exp(s).sum())
            found[b, t] += np.exp(s - lse)
    return found


def reference_divergence(a: dict[str, np.ndarray], mass: np.ndarray, named: bool) -> np.ndarray:
    entry = allowed(a, named)
    loss = np.zeros((2, 5))
    for b, t in np.ndindex(2, 5):
        there = entry[b, t] >= 0
        if not there.any():
            continue
        keys = a["keys"][1, b, entry[b, t][there]].astype(float)
        score = (np.maximum(keys @ a["iq"][b, t].T.astype(float), 0) * a["w"][b, t]).sum(axis=-1)
        log_p = score - score.max() - np.log(np.exp(score - score.max()).sum())
        teacher = mass[b, t][there] / mass[b, t][there].sum()
        loss[b, t] = (teacher * (np.log(teacher) - log_p)).sum()
    return loss


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("joins", [True, False])
def test_attention_mass_is_what_a_softmax_gives_each_entry(
    named: bool, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make_lesson(0)
    options = {"entries_BTE": a["entries"] if named else None, "first_BT": a["first"], "joins": joins}
    expected = reference_mass(a, named, joins)
    for block in (1 << 22, 100):  # all queries at once, and a block or two of them
        monkeypatch.setattr("kernels_pallas.index_loss.xla._BLOCK_ELEMENTS", block)
        found = attention_mass(a["q"], a["lse"], a["pool"], 1, a["visible"], scale=0.5, **options)
        np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("block", [1 << 22, 60])
def test_index_divergence_and_its_gradients_are_those_of_the_formula(
    named: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against finite differences in float64, with queries in one block and in several."""
    monkeypatch.setattr("kernels_pallas.index_loss.xla._BLOCK_ELEMENTS", block)
    a = make_lesson(1)
    mass = reference_mass(a, named, True)
    weight = np.random.default_rng(2).standard_normal((2, 5))
    options = {"entries_BTE": a["entries"] if named else None, "first_BT": a["first"]}

    def loss(q: jax.Array, w: jax.Array, keys: jax.Array) -> jax.Array:
        found = index_divergence(q, w, keys, 1, jnp.asarray(mass, jnp.float32), a["visible"], **options)
        return jnp.sum(found * weight)

    found = index_divergence(a["iq"], a["w"], a["keys"], 1, mass.astype(np.float32), a["visible"], **options)
    np.testing.assert_allclose(found, reference_divergence(a, mass, named), atol=2e-6)
    gradients = jax.grad(loss, (0, 1, 2))(a["iq"], a["w"], a["keys"])
    for name, gradient in zip(("iq", "w", "keys"), gradients, strict=True):
        expected = differences(
            lambda x, name=name: (reference_divergence(a | {name: x}, mass, named) * weight).sum(), a[name]
        )
        np.testing.assert_allclose(gradient, expected, atol=3e-5)
        assert np.abs(expected).max() > 1e-2
    assert not np.asarray(gradients[2])[0].any()  # the other pool of the stack


def test_a_perfect_indexer_has_no_divergence_and_no_gradient() -> None:
    a = make_lesson(3)
    keys = a["keys"][1]
    score = (np.maximum(np.einsum("bpj,btij->btpi", keys, a["iq"]), 0) * a["w"][:, :, None]).sum(axis=-1)
    loss, gradient = jax.value_and_grad(
        lambda q: jnp.sum(index_divergence(q, a["w"], a["keys"], 1, jnp.exp(score), a["visible"], first_BT=a["first"]))
    )(a["iq"])
    assert abs(float(loss)) < 2e-6
    assert np.abs(gradient).max() < 2e-6


def test_doors_of_the_index_loss_name_what_does_not_fit() -> None:
    a = make_lesson(0)
    with pytest.raises(ValueError, match=r"lse_BTN.shape=\(2, 5\) must be \[B, T, N\]"):
        attention_mass(a["q"], a["lse"][..., 0], a["pool"], 1, a["visible"], scale=1.0)
    with pytest.raises(ValueError, match=r"mass_BTE.shape=\(2, 5, 6\) must be \(2, 5, 7\)"):
        index_divergence(a["iq"], a["w"], a["keys"], 1, np.ones((2, 5, 6), np.float32), a["visible"])
    with pytest.raises(ValueError, match=r"group=2 must lie in \[0, 2\)"):
        index_divergence(a["iq"], a["w"], a["keys"], 2, np.ones((2, 5, 7), np.float32), a["visible"])
