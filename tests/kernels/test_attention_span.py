"""Attention to a whole span of a pool: on XLA one matrix product, elsewhere a selection of everything; both give the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import Unsupported, formats, sparse_attention, storage
from tests.kernels.sparse_attention_suite import attend_reference

B, T, N, H, P, W = 2, 7, 4, 32, 9, 4
OPTIONS: dict[str, Any] = {"window": W, "scale": H**-0.5}


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    end = np.array([[0, 1, 1, 3, 5, 9, 9], [2, 2, 0, 7, 8, 8, 9]], np.int32)
    return {
        "q": rng.standard_normal((B, T, N, H)).astype(np.float32),
        "rows": rng.standard_normal((B, W + T, H)).astype(np.float32),
        "first": np.full((B, T), 2, np.int32),
        "sink": rng.standard_normal(N).astype(np.float32),
        "pool": rng.standard_normal((3, B, P, H)).astype(np.float32),
        "begin": np.minimum(np.array([[0] * T, [1] * T], np.int32), end),
        "end": end,
    }


def selection(a: dict[str, np.ndarray]) -> np.ndarray:
    entry = np.arange(P)
    return np.where((entry >= a["begin"][..., None]) & (entry < a["end"][..., None]), entry, -1)


def attend(a: dict[str, np.ndarray], pool: Any = None, **options: Any) -> Any:
    given = a["pool"] if pool is None else pool
    return sparse_attention(a["q"], a["rows"], a["first"], a["sink"], given, 1, **OPTIONS, **options)


def test_a_span_gives_what_the_reference_gives() -> None:
    a = inputs()
    o, lse = attend(a, span_BT=(a["begin"], a["end"]))
    expected = attend_reference(a["q"], a["rows"], a["first"], a["sink"], a["pool"][1], selection(a), **OPTIONS)
    np.testing.assert_allclose(o, expected[0], atol=5e-6)
    np.testing.assert_allclose(lse, expected[1], atol=5e-6)


def test_gradients_of_a_span_are_those_of_the_selection() -> None:
    a = inputs(1)
    rng = np.random.default_rng(2)
    do, dlse = rng.standard_normal((B, T, N, H)), rng.standard_normal((B, T, N))

    def loss(q: Any, rows: Any, sink: Any, pool: Any, **options: Any) -> Any:
        o, lse = attend(a | {"q": q, "rows": rows, "sink": sink}, pool, **options)
        return jnp.sum(o * do) + jnp.sum(lse * dlse)

    arguments = (a["q"], a["rows"], a["sink"], a["pool"])
    gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
    found = gradient(*arguments, span_BT=(a["begin"], a["end"]))
    expected = gradient(*arguments, selection_BTK=selection(a))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert not np.asarray(found[3])[[0, 2]].any()  # the other pools of the stack


def test_a_span_reads_packed_entries_and_nothing_behind_its_end() -> None:
    a = inputs(3)
    a["end"] = np.minimum(a["end"], 6)
    a["begin"] = np.minimum(a["begin"], a["end"])
    for fmt in (formats.MAIN, formats.mixed(16, 16)):
        packed = storage.pack(jnp.asarray(a["pool"]), fmt)
        plain = np.asarray(storage.unpack(packed))
        found = attend(a, packed, span_BT=(a["begin"], a["end"]))
        expected = attend(a, plain, selection_BTK=selection(a))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=5e-6)
        unwritten = plain.copy()
        unwritten[:, :, 6:] = np.nan
        for one, other in zip(attend(a, unwritten, span_BT=(a["begin"], a["end"])), found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_kernels_are_given_the_span_as_a_selection(implementation: str) -> None:
    a = inputs(4)
    span = (a["begin"], a["end"])
    found = attend(a, span_BT=span, implementation=implementation, interpret=True)
    for one, other in zip(found, attend(a, span_BT=span), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_kernels_refuse_entries_that_only_xla_reads(implementation: str) -> None:
    a = inputs()
    packed = storage.pack(jnp.asarray(a["pool"]), formats.mixed(16, 16))
    with pytest.raises(Unsupported, match="XLA alone"):
        attend(a, packed, selection_BTK=selection(a), implementation=implementation, interpret=True)


def test_a_span_must_fit() -> None:
    a = inputs()
    for options, reason in (
        ({"span_BT": (a["begin"][:, :3], a["end"])}, r"span_BT of \(2, 3\)"),
        ({"span_BT": (a["begin"], a["end"]), "selection_BTK": selection(a)}, "not both"),
        ({"span_BT": (a["begin"].astype(np.float32), a["end"])}, "span_BT"),
        ({}, "come together"),
    ):
        with pytest.raises(ValueError, match=reason):
            attend(a, **options)
