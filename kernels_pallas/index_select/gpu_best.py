"""The best of a stream, for GPU kernels: append what may still win, compact when the buffer is full.

A stream delivers (key, id) in ascending id; `key` is an int32 that orders like the score, EMPTY for what does not count. One
query holds n survivors in an append buffer and tau, the key of its K-th best so far (EMPTY until K are held):

    keep      = key > tau                     a later equal score loses to the K earlier ones: strictly greater is exact
    survivors += keep, in stream order        position n + (running count of keep) - 1
    compact   : tau = K-th largest key held;  survivors = those above tau and the first of those equal to it, in order

so ids stay ascending and no sort is needed. The K-th largest is found bit by bit, by counting the keys that reach a threshold:
16 counts for bf16 scores, whose keys have 16 bits, 32 for f32 ones.

Buffers live in global memory (one program's share stays in the L2 cache), because registers cannot be indexed. A program reads
what its other threads wrote, so a barrier stands before such a read, and before what was read is overwritten. Compaction
happens between runs of chunks, never inside: a run only reads inputs and appends, so a compiler may fetch ahead.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

State = tuple[jax.Array, jax.Array]  # n and tau, int32 [queries]


@dataclasses.dataclass(frozen=True)
class Best:
    """Keeps the `count` best of a stream: `bits` of key, and `capacity` (a power of two) slots to append to."""

    count: int
    bits: int
    capacity: int
    barriers: bool  # False in the interpreter, which runs in program order

    @property
    def empty(self) -> int:
        """The key of nothing: below that of every score."""
        return -(1 << (self.bits - 1))

    def barrier(self) -> None:
        """Let every thread of the program see what the others have written."""
        if self.barriers:
            plt.debug_barrier()

    def start(self, queries: int) -> State:
        """Nothing held."""
        return jnp.zeros((queries,), jnp.int32), jnp.full((queries,), self.empty, jnp.int32)

    def push(self, key_ref: Any, id_ref: Any, state: State, key_LQ: jax.Array, id_L: jax.Array) -> State:
        """Append a chunk of the stream to the buffers [Q, capacity], where `compact` has seen to it that it fits."""
        n_Q, tau_Q = state
        keep_LQ = key_LQ > tau_Q[None, :]
        added_Q = jnp.sum(keep_LQ.astype(jnp.int32), axis=0)

        @pl.when(jnp.max(added_Q) > 0)
        def _append() -> None:
            place_LQ = n_Q[None, :] + lax.cumsum(keep_LQ.astype(jnp.int32), axis=0) - 1
            # What is not kept gets a place of its own outside, so that no interpreter lets it overwrite what is.
            place_LQ = jnp.where(keep_LQ, place_LQ, self.capacity)
            row_LQ = jnp.broadcast_to(jnp.arange(n_Q.shape[0], dtype=jnp.int32)[None, :], place_LQ.shape)
            plt.store(key_ref.at[row_LQ, place_LQ], key_LQ, mask=keep_LQ)
            plt.store(id_ref.at[row_LQ, place_LQ], jnp.broadcast_to(id_L[:, None], place_LQ.shape), mask=keep_LQ)

        return n_Q + added_Q, tau_Q

    def compact(self, key_ref: Any, id_ref: Any, state: State, limit: jax.Array) -> State:
        """Compact every buffer that holds more than `limit`."""
        row_Q = jnp.arange(state[0].shape[0], dtype=jnp.int32)

        def one(row: jax.Array, state: State) -> State:
            n = _at(state[0], row)

            def full(state: State) -> State:
                # The second term is 0; without it compilers hold all these addresses in registers while scores are computed.
                slot_N = jnp.arange(self.capacity, dtype=jnp.int32) + jnp.minimum(n, 0)
                self.barrier()
                key_N = plt.load(key_ref.at[row, slot_N], mask=slot_N < n, other=self.empty)
                id_N = plt.load(id_ref.at[row, slot_N], mask=slot_N < n, other=-1)
                place_N, tau, held = self.places(key_N)
                self.barrier()
                plt.store(key_ref.at[row, place_N], key_N, mask=place_N < self.count)
                plt.store(id_ref.at[row, place_N], id_N, mask=place_N < self.count)
                return jnp.where(row_Q == row, held, state[0]), jnp.where(row_Q == row, tau, state[1])

            return lax.cond(n > limit, full, lambda s: s, state)

        return lax.fori_loop(0, row_Q.shape[0], one, state)

    def copy(self, key_ref: Any, id_ref: Any, state: State, best_ids_ref: Any, best_keys_ref: Any | None) -> None:
        """Write what the buffers hold to [Q, slots], ids and (where wanted) keys, padded with -1 and EMPTY."""
        slots = best_ids_ref.shape[1]
        self.barrier()

        def one(row: jax.Array, carry: int) -> int:
            slot_N = jnp.arange(pl.next_power_of_2(slots), dtype=jnp.int32)
            live_N = slot_N < _at(state[0], row)
            for to_ref, from_ref, blank in ((best_ids_ref, id_ref, -1), (best_keys_ref, key_ref, self.empty)):
                if to_ref is not None:
                    values_N = plt.load(from_ref.at[row, slot_N], mask=live_N, other=blank)
                    plt.store(to_ref.at[row, slot_N], values_N, mask=slot_N < slots)
            return carry

        lax.fori_loop(0, state[0].shape[0], one, 0)

    def places(self, key_N: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where each of N keys goes among the best, ascending as they stand (N or more: nowhere); tau; how many are held.

        tau is the count-th largest key, EMPTY when fewer are there. N may not exceed 2**15.
        """
        tau = self._threshold(key_N)
        above_N, equal_N = key_N > tau, (key_N == tau) & (key_N > self.empty)
        # One running count for both: those above tau in the low half, those equal to it in the high half.
        ones_N = above_N.astype(jnp.int32) + (equal_N.astype(jnp.int32) << 16)
        before_N = lax.cumsum(ones_N, axis=0) - ones_N
        total = jnp.sum(ones_N)
        wanted = self.count - (total & 0xFFFF)  # this many of the equal ones
        equal_before_N = before_N >> 16
        place_N = (before_N & 0xFFFF) + jnp.minimum(equal_before_N, wanted)
        keep_N = above_N | (equal_N & (equal_before_N < wanted))
        held = (total & 0xFFFF) + jnp.minimum(total >> 16, wanted)
        return jnp.where(keep_N, place_N, key_N.shape[0]), tau, held

    def _threshold(self, key_N: jax.Array) -> jax.Array:
        """The count-th largest key, or EMPTY: the highest t that `count` keys reach, found bit by bit."""
        if key_N.shape[0] < self.count:
            return jnp.int32(self.empty)

        def descend(i: jax.Array, low: jax.Array) -> jax.Array:
            t = low + (jnp.int32(1) << (self.bits - 1 - i))
            return jnp.where(jnp.sum((key_N >= t).astype(jnp.int32)) >= self.count, t, low)

        return lax.fori_loop(0, self.bits, descend, jnp.int32(self.empty))

    def merge(self, key_N: jax.Array, id_N: jax.Array, best_ids_ref: Any, best_keys_ref: Any) -> None:
        """Write the best of a tile of survivors to [slots], padded like `copy`."""
        slots = best_ids_ref.shape[0]
        place_N, _, held = self.places(key_N)
        slot_N = jnp.arange(key_N.shape[0], dtype=jnp.int32)
        rest_N = (slot_N >= held) & (slot_N < slots)
        blank_N = jnp.where(rest_N, slot_N, key_N.shape[0])
        for to_ref, values_N, blank in ((best_ids_ref, id_N, -1), (best_keys_ref, key_N, self.empty)):
            plt.store(to_ref.at[place_N], values_N, mask=place_N < slots)
            plt.store(to_ref.at[blank_N], jnp.full_like(values_N, blank), mask=rest_N)


def _at(x_Q: jax.Array, row: jax.Array) -> jax.Array:
    """x_Q[row], registers having no index."""
    return jnp.sum(jnp.where(jnp.arange(x_Q.shape[0], dtype=jnp.int32) == row, x_Q, 0))


def sortable(score: jax.Array, bits: int) -> jax.Array:
    """int32 keys that order as f32 scores do (-0 and +0 equal); of bf16 values, 16 bits of it."""
    pattern = lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.int32)
    return (pattern ^ ((pattern >> 31) & 0x7FFFFFFF)) >> (32 - bits)
