"""What the doors refuse, by argument and value, and the empty calls they answer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import compress, formats, index_select, sparse_attention, storage

F, I32 = np.float32, np.int32


def attention(**changes: Any) -> Any:
    inputs: dict[str, Any] = {
        "q_BTNH": np.ones((2, 3, 2, 32), F),
        "window_BSH": np.ones((2, 5, 32), F),
        "first_BT": np.zeros((2, 3), I32),
        "sink_N": np.zeros(2, F),
        "pool_GBPH": np.ones((3, 2, 7, 32), F),
        "group": 1,
        "selection_BTK": np.zeros((2, 3, 4), I32),
        "window": 3,
        "scale": 1.0,
    }
    return sparse_attention(**(inputs | changes))


def selection(**changes: Any) -> Any:
    inputs: dict[str, Any] = {
        "q_BTIJ": np.ones((2, 3, 2, 32), F),
        "w_BTI": np.ones((2, 3, 2), F),
        "keys_GBPJ": np.ones((3, 2, 8, 32), F),
        "group": 0,
        "visible_BT": np.full((2, 3), 8, I32),
        "topk": 4,
    }
    return index_select(**(inputs | changes))


def pooling(**changes: Any) -> Any:
    inputs: dict[str, Any] = {
        "c_BTH": np.ones((2, 3, 4), F),
        "z_BTH": np.ones((2, 3, 4), F),
        "c_half_BMH": np.ones((2, 1, 4), F),
        "z_half_BMH": np.ones((2, 1, 4), F),
        "phase_B": np.zeros(2, I32),
        "count_B": np.full(2, 3, I32),
        "ratio": 2,
    }
    return compress(**(inputs | changes))


def packed(shape: tuple[int, ...] = (1, 2, 5, 32)) -> storage.Packed:
    return storage.pack(np.ones(shape, F), formats.WINDOW)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (attention, {"window_BSH": np.ones((2, 5, 32), np.float16)}, r"window_BSH\.dtype=float16"),
    (attention, {"pool_GBPH": np.ones((3, 2, 7, 32), np.int8)}, r"pool_GBPH\.dtype=int8"),
    (attention, {"first_BT": np.zeros((2, 3), F)}, r"first_BT\.dtype=float32.*integer"),
    (attention, {"sink_N": np.zeros(2, I32)}, r"sink_N\.dtype=int32"),
    (attention, {"selection_BTK": np.zeros((2, 3), I32)}, r"selection_BTK\.shape=\(2, 3\)"),
    (attention, {"group": 3}, r"group=3 must lie in \[0, 3\)"),
    (attention, {"group": -1}, r"group=-1"),
    (attention, {"group": 1.5}, r"group\.dtype=float"),
    (attention, {"window": 2.5}, r"window=2\.5 must be a whole number"),
    (attention, {"window": True}, r"window=True"),
    (attention, {"window_BSH": packed((2, 2, 5, 32))}, r"\[1, B, S, H\].*\(2, 2, 5, 32\)"),
    (
        attention,
        {"window_BSH": storage.Packed(packed().codes, packed().scales[:, :, :4], 32, formats.WINDOW)},
        r"window_BSH\.scales\.shape=\(1, 2, 4, 1\) does not hold 1 bytes",
    ),
    (
        attention,
        {"window_BSH": storage.Packed(packed().codes.astype(F), packed().scales, 32, formats.WINDOW)},
        r"window_BSH\.codes\.dtype=float32 must be uint8",
    ),
    (selection, {"keys_GBPJ": np.ones((3, 2, 8, 32), np.int8)}, r"keys_GBPJ\.dtype=int8"),
    (selection, {"w_BTI": np.ones((2, 3, 2), np.float16)}, r"w_BTI\.dtype=float16"),
    (selection, {"visible_BT": np.full((2, 3), 2.7)}, r"visible_BT\.dtype=float"),
    (selection, {"topk": 2.5}, r"topk=2\.5"),
    (selection, {"make_candidates": -1}, r"make_candidates=-1"),
    (selection, {"group": 7}, r"group=7"),
    (selection, {"candidates_BTC": np.zeros((2, 3, 2), F), "block_size": 2}, r"candidates_BTC\.dtype=float32"),
    (pooling, {"phase_B": np.zeros(2, F)}, r"phase_B\.dtype=float32"),
    (pooling, {"ratio": 2.0}, r"ratio=2\.0"),
    (pooling, {"c_BTH": "rows"}, r"c_BTH"),
]


@pytest.mark.parametrize(("door", "changes", "message"), REFUSED)
def test_doors_refuse_what_they_would_have_to_guess_about(door: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        door(**changes)


def test_doors_take_lists_and_plain_numbers() -> None:
    as_lists = attention(first_BT=[[0] * 3] * 2, sink_N=[0.0, 0.0])
    np.testing.assert_array_equal(as_lists[0], attention()[0])


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0)])
def test_empty_calls_give_empty_results(implementation: str, batch: int, tokens: int) -> None:
    chosen = {"implementation": implementation, "interpret": implementation != "xla"}

    def cut(*names: str, of: Any) -> dict[str, Any]:
        shapes: dict[str, Any] = {
            "q_BTNH": np.ones((batch, tokens, 2, 32), F),
            "window_BSH": np.ones((batch, 5, 32), F),
            "first_BT": np.zeros((batch, tokens), I32),
            "pool_GBPH": np.ones((3, batch, 7, 32), F),
            "selection_BTK": np.zeros((batch, tokens, 4), I32),
            "q_BTIJ": np.ones((batch, tokens, 2, 32), F),
            "w_BTI": np.ones((batch, tokens, 2), F),
            "keys_GBPJ": np.ones((3, batch, 8, 32), F),
            "visible_BT": np.zeros((batch, tokens), I32),
            **{name: np.ones((batch, tokens, 4), F) for name in ("c_BTH", "z_BTH")},
            **{name: np.ones((batch, 1, 4), F) for name in ("c_half_BMH", "z_half_BMH")},
            "phase_B": np.zeros(batch, I32),
            "count_B": np.zeros(batch, I32),
        }
        return of(**{name: shapes[name] for name in names}, **chosen)

    o, lse = cut("q_BTNH", "window_BSH", "first_BT", "pool_GBPH", "selection_BTK", of=attention)
    assert (o.shape, lse.shape) == ((batch, tokens, 2, 32), (batch, tokens, 2))
    chosen_entries, _ = cut("q_BTIJ", "w_BTI", "keys_GBPJ", "visible_BT", of=selection)
    assert chosen_entries.shape == (batch, tokens, 4)
    entries, half, _ = cut("c_BTH", "z_BTH", "c_half_BMH", "z_half_BMH", "phase_B", "count_B", of=pooling)
    assert (entries.shape, half.shape) == ((batch, (tokens + 1) // 2, 4), (batch, 1, 4))


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu", "pallas_gpu"])
def test_a_short_list_of_candidates_binds_even_where_there_is_room_for_every_block(implementation: str) -> None:
    found, _ = selection(
        candidates_BTC=np.broadcast_to(np.array([0, -1, -1, -1, -1], I32), (2, 3, 5)),
        block_size=2,
        topk=6,
        implementation=implementation,
        interpret=implementation != "xla",
    )
    np.testing.assert_array_equal(found, np.broadcast_to([0, 1, -1, -1, -1, -1], (2, 3, 6)))


def test_doors_work_where_wide_integers_are_on() -> None:
    with jax.enable_x64(True):
        found, made = selection(group=jnp.asarray(1), make_candidates=2, block_size=2)
        o, _ = attention()
        entries, *_ = pooling()
    assert (found.dtype, made.dtype, o.dtype, entries.dtype) == (jnp.int32, jnp.int32, jnp.float32, jnp.float32)
