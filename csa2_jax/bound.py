"""The public door `forward`, and a model taken apart for it: one jit for every call shape, the cache donated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from csa2_jax.calls import check_call, check_storage, document_origins
from csa2_jax.config import ModelConfig
from csa2_jax.dspark import DraftFeed
from csa2_jax.engram_host import HostRows, HostTable
from csa2_jax.model import ForwardOutput, Model
from csa2_jax.numerics import Numerics
from csa2_jax.state import Cache
from csa2_jax.structure import Structure


@dataclasses.dataclass(frozen=True)
class Bound:
    """A model taken apart once for many calls: splitting an NNX module costs more than a small decode step's dispatch.

    The draft head stays out of the forward's arguments, except the few parameters that fill its windows.
    """

    config: ModelConfig
    numerics: Numerics
    structure: Structure
    state: Any
    feed: tuple[Structure, Any] | None  # of the DraftFeed
    draft: tuple[Structure, Any] | None  # of the whole draft head
    host_tables: tuple[HostRows, ...] = ()

    @classmethod
    def of(cls, model: Model) -> Bound:
        """Take `model` apart. Later changes to its parameters do not reach the result."""
        tables = tuple(table.rows for table in model.engram_tables if isinstance(table, HostTable))
        if model.draft is None:
            return cls(model.config, model.numerics, *Structure.split(model), None, None, tables)
        # Taken apart and put together once, so that dropping the draft head leaves the caller's model alone.
        backbone = nnx.merge(*nnx.split(model))
        backbone.draft = None
        feed, draft = Structure.split(DraftFeed(model.draft)), Structure.split(model.draft)
        return cls(model.config, model.numerics, *Structure.split(backbone), feed, draft, tables)

    @functools.cached_property
    def vocabulary(self) -> tuple[jax.Array, jax.Array]:
        """The embedding and the output head [V, D], which the draft head shares."""
        backbone = self.structure.state(self.state)
        return tuple(backbone[name]["weight"].get_value() for name in ("embed", "head"))  # type: ignore[return-value]

    def prefetch(self, tokens_BT: np.ndarray, start: int, stop: int) -> None:
        """A hint that tokens [B, start:stop] come next: rows of n-gram tables on the host are read meanwhile."""
        stop = min(stop, tokens_BT.shape[1])
        if self.host_tables and start < stop:
            kept = self.config.engram_max_ngram_size - 1
            for table in self.host_tables:
                table.prefetch(tokens_BT[:, max(start - kept, 0) : stop], stop - start)


def forward(
    model: Model | Bound,
    tokens_BT: Int[Array, "B T"] | np.ndarray | Sequence[Sequence[int]],
    cache: Cache | None = None,
    lengths_B: Int[Array, " B"] | np.ndarray | Sequence[int] | None = None,
    *,
    all_logits: bool = True,
    capture: Iterable[str] = (),
    documents_BT: Int[Array, "B T"] | np.ndarray | Sequence[Sequence[int]] | None = None,
) -> Any:
    """Run the model over T new tokens per row.

    With a cache, each row's first `lengths_B` tokens (all T by default, 0 allowed) are appended at that row's own position and
    (output, cache) is returned; the cache passed in is consumed. Without a cache the rows start at position 0 and the output
    alone is returned. Positions follow from the cache and cannot be set.

    Args:
        model: a Model, or in loops the `Bound.of(model)` made from it once.
        tokens_BT: ids in [0, vocab_size).
        lengths_B: how many of each row's T tokens are real; logits behind them are unspecified.
        all_logits: False gives logits [B, V] of each row's last real token only.
        capture: names out of `calls.CAPTURES` to return in `output.captured`.
        documents_BT: for rows that hold several documents one behind the other (without a cache): an id per token, -1 for
            padding. Each document is computed as if alone: positions, windows, groups, selections and n-grams begin with it. It
            must start at a multiple of `config.document_alignment`, see `calls.document_origins`.

    Raises:
        ValueError: ids outside the vocabulary, shapes that do not fit, a call that would exceed the cache's max_length, a
            consumed cache. Unsupported: image tokens (the image tower is not built yet).
    """
    if not isinstance(model, Model | Bound):
        raise ValueError(f"forward takes a Model or a Bound, found {type(model).__name__}")
    tokens, lengths, names = check_call(model.config, tokens_BT, cache, lengths_B, capture)
    bound = model if isinstance(model, Bound) else Bound.of(model)
    if cache is not None:
        check_storage(bound.numerics.fake_quant, cache)
    origins = None
    if documents_BT is not None:
        if cache is not None:
            raise ValueError("a cache holds one document per row: documents_BT is for calls without one")
        origins = document_origins(model.config, documents_BT, tokens.shape)
    before = None if cache is None else cache.lengths()
    drafting = cache is not None and cache.draft_window_LBWH is not None
    feed_structure, feed_state = bound.feed if drafting and bound.feed is not None else (None, None)
    out, cache = _jit_forward(
        *(bound.structure, feed_structure, bound.state, feed_state),
        *(tokens, cache, lengths),
        origins,
        all_logits=all_logits,
        capture=names,
    )
    if cache is None or before is None:
        return out
    return out, cache.with_mirror(before + lengths)


@functools.partial(
    jax.jit, static_argnames=("structure", "feed_structure", "all_logits", "capture"), donate_argnames=("cache",)
)
def _jit_forward(
    structure: Structure,
    feed_structure: Structure | None,
    state: Any,
    feed_state: Any,
    tokens: Int[Array, "B T"],
    cache: Cache | None,
    lengths: Int[Array, " B"],
    origins: Int[Array, "B T"] | None = None,
    *,
    all_logits: bool,
    capture: frozenset[str],
) -> tuple[ForwardOutput, Cache | None]:
    feed = None if feed_structure is None else feed_structure.merge(feed_state)
    model = structure.merge(state)
    return model(tokens, cache, lengths, all_logits=all_logits, capture=capture, feed=feed, origin_BT=origins)


def forward_encoder(bound: Bound, tokens: np.ndarray, cache: Cache, lengths: np.ndarray) -> Cache:
    """Append tokens, as `check_call` returns them, by the encoder and the decoder's pool alone; see `Model.encode_only`."""
    before = cache.lengths()
    cache = _jit_encoder(bound.structure, bound.state, tokens, cache, lengths)
    return cache.with_mirror(before + lengths)


@functools.partial(jax.jit, static_argnames=("structure",), donate_argnames=("cache",))
def _jit_encoder(structure: Structure, state: Any, tokens: jax.Array, cache: Cache, lengths: jax.Array) -> Cache:
    return structure.merge(state).encode_only(tokens, cache, lengths)
