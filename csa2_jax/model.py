"""The whole text model: embed, encode to H_20, decode, logits; and the public door `forward`.

`Model` holds stacked parameters and static choices. `forward` is one function for every call shape: T >= 1 new tokens per row at
that row's own position, ragged rows, with a cache or without. Prefill chunk, decode step and verification of drafts are the
same code and one jit each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from csa2_jax import rope
from csa2_jax.block import Block
from csa2_jax.compressor import Compressor
from csa2_jax.config import ModelConfig
from csa2_jax.dspark import DraftFeed, DraftHead
from csa2_jax.engram import Engram, EngramTable, hash_rows, history_ids, next_history, product_table
from csa2_jax.engram_host import HostRows, HostTable
from csa2_jax.indexer import Indexer
from csa2_jax.layers import ParamFactory, RMSNorm
from csa2_jax.learning import Learning
from csa2_jax.numerics import Implementation, Numerics, WeightStorage, einsum
from csa2_jax.residual import Collapse, collapse, expand
from csa2_jax.stack import Walk, Weights, stack_tails
from csa2_jax.state import (
    Cache,
    Flow,
    Pool,
    Step,
    make_pools,
    overlaps,
    pool_name,
    rounded_widths,
    window_tail,
    write_windows,
)
from kernels_pallas import waiting_rows

if TYPE_CHECKING:
    from kernels_pallas.storage import Entries


_GROUP_ROWS = frozenset({"group_rows", "key_group_rows"})


class Constant(nnx.Variable):
    """Numbers derived from configuration and tokenizer: not trained, not in the checkpoint."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """What a forward returns.

    logits: f32 [B, T, V], or [B, V] of each row's last real token. Unspecified at padded positions.
    captured: what `capture` asked for, by name and then by layer id.
    """

    logits: jax.Array
    captured: dict[str, Any]

    @property
    def selections(self) -> dict[int, jax.Array]:
        """Per layer that selects: int32 [B, T, K] pool entries, ascending, -1 none. Needs capture=("selections",)."""
        return self._captured("selections")

    @property
    def hidden(self) -> dict[int, jax.Array]:
        """Per layer: the residual streams [B, T, S, D] behind it. Needs capture=("hidden",)."""
        return self._captured("hidden")

    def _captured(self, name: str) -> dict[int, jax.Array]:
        if name not in self.captured:
            raise ValueError(f"this output holds no {name!r}: ask for it with forward(..., capture=({name!r},))")
        return self.captured[name]


class Model(nnx.Module):
    """A DeepSeek-V4.1 model: parameters as stacks over layers, everything else static.

    weights: "stored" keeps fp8 / fp4 codes as the checkpoint has them and plain weights in the compute dtype; "float32" and
        "bfloat16" hold every weight plainly. mHC, sinks, router and the m > 1 compressor are f32 always.
    scan_layers: False unrolls the layer stack (the same numbers; for debugging).
    host_tables: n-gram tables that stay on the host instead of being parameters, see `engram_host`.
    key: initialise at random; without it all weights are zero (or abstract under `nnx.eval_shape`).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        numerics: Numerics | None = None,
        weights: WeightStorage = "stored",
        scan_layers: bool = True,
        token_map: np.ndarray | None = None,
        host_tables: Sequence[HostRows] | None = None,
        key: jax.Array | None = None,
    ) -> None:
        if weights not in ("stored", "float32", "bfloat16"):
            raise ValueError(f"{weights=} must be 'stored', 'float32' or 'bfloat16'")
        self.config, self.numerics, self.scan_layers = config, numerics or Numerics(), scan_layers
        check_roundings(config, self.numerics)
        plain = self.numerics.dtype if weights == "stored" else jnp.dtype(weights)
        tile, group = config.generation.tile, config.generation.operand_group
        make = ParamFactory(plain, config.quantized and weights == "stored", config.quantized, tile, group, key)
        plan, d, v = config.plan, config.hidden_size, config.vocab_size
        self.embed = nnx.Dict(weight=make.normal((v, d)))
        self.norm = RMSNorm(d, make)
        self.head = nnx.Dict(weight=make.normal((v, d)))
        self.collapse = Collapse(config, make) if config.generation.head_collapse else nnx.data(None)
        self.layers = Block(config, make, stack=(config.num_hidden_layers,))
        self.compressors = nnx.Dict(
            {pool_name(m): Compressor(config, m, make, stack=(len(plan.pool_layers(m)),)) for m in plan.ratios}
        )
        selecting = len(plan.index_layers)
        self.indexers = Indexer(config, make, stack=(selecting,)) if selecting else None
        tables = len(config.engram_layer_ids)
        self.engram = Engram(config, make, stack=(tables,)) if tables else None
        self.engram_tables = nnx.List(
            [EngramTable(rows, config, make) for rows in config.engram_num_embeddings]
            if host_tables is None
            else [HostTable(rows) for rows in host_tables]
        )
        constants = ngram_arrays(config, token_map)
        self.token_map = Constant(constants["token_map"]) if tables else None
        self.ngram_products = Constant(constants["ngram_products"]) if tables else None
        drafts = config.num_nextn_predict_layers and not config.generation.own_pools
        self.draft = DraftHead(config, make) if drafts else None

    # ---- the forward, as a pure function of arrays ----

    def __call__(
        self,
        tokens_BT: jax.Array,
        cache: Cache | None,
        count_B: jax.Array,
        *,
        all_logits: bool = True,
        capture: frozenset[str] = frozenset(),
        feed: DraftFeed | None = None,
        accept: Callable[[jax.Array], tuple[jax.Array, Any]] | None = None,
        origin_BT: jax.Array | None = None,
    ) -> tuple[ForwardOutput, Cache | None]:
        """Append each row's first `count_B` tokens to `cache` (or start from nothing). Called under jit by `forward`.

        feed: fills the draft stages' windows, if the cache has any; by default the model's own draft head does.
        accept: from the logits [B, T, V], how many of each row's tokens (int32 [B], at most `count_B`) the cache keeps, and
            anything else to return as `captured["accepted"]`. The cache then is as if only those had ever been given.
        origin_BT: where in its row each token's document begins, int32 in multiples of `config.document_alignment`, for rows
            that hold several; each is then computed as if alone. Without a cache only.
        """
        if origin_BT is not None and cache is not None:
            raise ValueError("a cache holds one document per row: origin_BT is for calls without one")
        step = self._step(tokens_BT, cache, count_B, origin_BT)
        inside = capture if accept is None else capture | _GROUP_ROWS
        walk, ids_BU = self._walk(tokens_BT, cache, step, inside)
        walk = dataclasses.replace(walk, undecided=accept is not None)
        flow = self._embed(tokens_BT, cache, capture)
        pools = cache.pools if cache is not None else self._transient_pools(tokens_BT)
        flow, pools, tails, captured = self.encode(walk, flow, pools)
        flow, pools, decoder_tails, decoder_captured = self.decode(walk, flow, pools)
        for name, by_layer in decoder_captured.items():
            captured.setdefault(name, {}).update(by_layer)
        if "main_hidden" in capture:
            captured["main_hidden"] = _join_targets(flow.main_BTQD)
        if "engram_rows" in capture:
            captured["engram_rows"] = dict(zip(self.config.engram_layer_ids, walk.engram_rows, strict=True))
        logits = self.logits(flow, None if all_logits else count_B)
        rows = {name: captured.pop(name, {}) for name in _GROUP_ROWS}
        if cache is None:
            return ForwardOutput(logits, captured), None
        tails |= decoder_tails
        if accept is not None:
            count_B, captured["accepted"] = accept(logits)
            width = self.config.sliding_window
            tails = {layer: window_tail(rows_BTH, count_B, width) for layer, rows_BTH in tails.items()}
            step = dataclasses.replace(step, count_B=count_B)
            pools = self._halves(cache, pools, rows, step)
        draft_rows = self._draft_rows(cache, step, flow, feed)
        next_cache = self._next_cache(cache, step, pools, tails, ids_BU)
        if draft_rows is not None:
            window = write_windows(cast("Entries", cache.draft_window_LBWH), draft_rows, step)
            next_cache = dataclasses.replace(next_cache, draft_window_LBWH=window)
        return ForwardOutput(logits, captured), next_cache

    def trunk(
        self,
        tokens_BT: jax.Array,
        count_B: jax.Array,
        *,
        learning: Learning | None = None,
        origin_BT: jax.Array | None = None,
        replay_BT: jax.Array | None = None,
        capture: frozenset[str] = frozenset(),
    ) -> tuple[jax.Array, dict[str, Any]]:
        """The normed output [B, T, D] that the head reads, and captures: what training starts from, without logits.

        replay_BT: per token where in its row its document is replayed from, as serving does it: decoder windows of that token and
            those behind it begin there. Tokens before it are as without.
        learning: adds its numbers per layer to the captures ("balance_loss", "expert_load", "index_loss", ...).
        """
        step = self._step(tokens_BT, None, count_B, origin_BT, replay_BT)
        walk, _ = self._walk(tokens_BT, None, step, capture)
        walk = dataclasses.replace(walk, learning=learning)
        flow = self._embed(tokens_BT, None, capture)
        flow, pools, _, captured = self.encode(walk, flow, self._transient_pools(tokens_BT))
        flow, _, _, decoder_captured = self.decode(walk, flow, pools)
        for name, by_layer in decoder_captured.items():
            captured.setdefault(name, {}).update(by_layer)
        if "main_hidden" in capture:
            captured["main_hidden"] = _join_targets(flow.main_BTQD)
        x_BTD = collapse(flow.x_BTSD, self._pre(flow.x_BTSD, flow.pre_BTS), self.numerics)
        return self.norm(x_BTD, self.config.rms_norm_eps, self.numerics), captured

    def encode_only(self, tokens_BT: jax.Array, cache: Cache, count_B: jax.Array) -> Cache:
        """Append tokens whose decoder rows nobody will read: the encoder, and of the decoder their pool entries.

        The decoder's windows hold nothing of them: `decoder_from_B` moves behind them.
        """
        step = self._step(tokens_BT, cache, count_B)
        walk, ids_BU = self._walk(tokens_BT, cache, step, frozenset())
        flow = self._embed(tokens_BT, cache, frozenset(), wants_main=False)
        flow, pools, tails, _ = self.encode(walk, flow, cache.pools)
        pools = walk.pool_only(flow, pools)
        after = self._next_cache(cache, step, pools, tails, ids_BU)
        skipped_B = jnp.where(count_B > 0, after.length_B, cache.decoder_from_B)
        return dataclasses.replace(after, decoder_from_B=skipped_B)

    def encode(self, walk: Walk, flow: Flow, pools: dict[str, Pool]) -> tuple[Flow, dict[str, Pool], dict, dict]:
        """Layers below the decoder: their output, collapsed and normed by the decoder's first layer, is H_20."""
        return walk.segments(self.config.plan.encoder_segments, flow, pools)

    def decode(self, walk: Walk, flow: Flow, pools: dict[str, Pool]) -> tuple[Flow, dict[str, Pool], dict, dict]:
        """The decoder: its first layer makes the one pool that all of it reads."""
        return walk.segments(self.config.plan.decoder_segments, flow, pools)

    def logits(self, flow: Flow, last_of_B: jax.Array | None = None) -> jax.Array:
        """f32 logits; `last_of_B` (token counts) keeps only each row's last real token."""
        x_BTSD, pre_BTS = flow.x_BTSD, flow.pre_BTS
        if last_of_B is not None:
            last = jnp.maximum(last_of_B - 1, 0)[:, None]
            x_BTSD = jnp.take_along_axis(x_BTSD, last[..., None, None], axis=1)
            pre_BTS = jnp.take_along_axis(pre_BTS, last[..., None], axis=1)
        pre_BTS = self._pre(x_BTSD, pre_BTS)
        h_BTD = self.norm(collapse(x_BTSD, pre_BTS, self.numerics), self.config.rms_norm_eps, self.numerics)
        logits = head_logits(h_BTD, self.head["weight"][...])
        return logits if last_of_B is None else logits[:, 0]

    # ---- pieces ----

    def _pre(self, x_BTSD: jax.Array, pre_BTS: jax.Array) -> jax.Array:
        """How the head reads the streams: as the last sub-layer said, in V4 by a projection of its own."""
        return pre_BTS if self.collapse is None else self.collapse(x_BTSD, self.config)

    def _step(
        self,
        tokens_BT: jax.Array,
        cache: Cache | None,
        count_B: jax.Array,
        origin_BT: jax.Array | None = None,
        replay_BT: jax.Array | None = None,
    ) -> Step:
        config, (batch, tokens) = self.config, tokens_BT.shape
        start_B = jnp.zeros(batch, jnp.int32) if cache is None else cache.length_B
        history = 0 if cache is None else config.sliding_window
        offset = jnp.arange(tokens, dtype=jnp.int32)
        position_BT = start_B[:, None] + offset
        # Row r of concat(history, new) holds position start - history + r; a query reads the last W of them, none before 0.
        first_BT = jnp.maximum(history + offset - config.sliding_window + 1, history - start_B[:, None])
        seen_from_B = jnp.zeros(batch, jnp.int32) if cache is None else cache.decoder_from_B
        if origin_BT is not None:
            position_BT, first_BT = position_BT - origin_BT, jnp.maximum(first_BT, origin_BT)
        decoder_first_BT = jnp.maximum(first_BT, (history - start_B + seen_from_B)[:, None])
        if replay_BT is not None:
            replayed_BT = jnp.where(offset >= replay_BT, replay_BT + history, 0)
            decoder_first_BT = jnp.maximum(decoder_first_BT, replayed_BT)
        image_BT = (
            tokens_BT == config.image_token_id if config.has_vision and config.image_token_id is not None else None
        )
        return Step(
            start_B=start_B,
            count_B=count_B,
            position_BT=position_BT,
            first_BT=jnp.maximum(first_BT, 0),
            decoder_first_BT=jnp.maximum(decoder_first_BT, 0),
            image_BT=image_BT,
            rope_window=rope.table(position_BT, rope.layer_frequencies(config, reads_pool=False)),
            rope_pool=rope.table(position_BT, rope.layer_frequencies(config, reads_pool=True)),
            tokens_BT=tokens_BT if config.num_hash_layers else None,
            origin_BT=origin_BT,
            cached=cache is not None,
        )

    def _walk(
        self, tokens_BT: jax.Array, cache: Cache | None, step: Step, capture: frozenset[str]
    ) -> tuple[Walk, jax.Array | None]:
        config = self.config
        ids_BU, rows = None, []
        if self.token_map is not None and self.ngram_products is not None:
            kept = config.engram_max_ngram_size - 1
            history_BE = jnp.full((tokens_BT.shape[0], kept), -1, jnp.int32) if cache is None else cache.ngram_BE
            ids_BU = history_ids(tokens_BT, history_BE, self.token_map[...], step.image_BT)
            pad_id = self.token_map[...][config.engram_pad_token_id]
            for i, constants in enumerate(config.engram_constants):
                position_BT = None if step.origin_BT is None else step.position_BT
                products = self.ngram_products[i]
                rows.append(hash_rows(ids_BU, products, constants, pad_id, tokens_BT.shape[1], position_BT))
        walk = Walk(
            config=config,
            numerics=self.numerics,
            weights=Weights(
                self.layers,
                dict(self.compressors.items()),
                self.indexers,
                self.engram,
                [table.fetch(ids) for table, ids in zip(self.engram_tables, rows, strict=True)],
            ),
            step=step,
            window_LBWH=None if cache is None else cache.window_LBWH,
            engram_rows=rows,
            pools_shared=cache is None,
            capture=capture,
            unroll=not self.scan_layers,
        )
        return walk, ids_BU

    def _embed(
        self, tokens_BT: jax.Array, cache: Cache | None, capture: frozenset[str], *, wants_main: bool = True
    ) -> Flow:
        config, (batch, tokens) = self.config, tokens_BT.shape
        x_BTSD, pre_BTS = expand(self.embed["weight"][...][tokens_BT].astype(self.numerics.dtype), config.hc_mult)
        drafts = cache is not None and cache.draft_window_LBWH is not None
        wants_main = wants_main and ("main_hidden" in capture or drafts)
        targets = len(config.dspark_target_layer_ids)
        main = jnp.zeros((batch, tokens, targets, config.hidden_size), self.numerics.dtype) if wants_main else None
        none = functools.partial(jnp.full, fill_value=-1, dtype=jnp.int32)
        return Flow(
            x_BTSD=x_BTSD,
            pre_BTS=pre_BTS,
            main_BTQD=main,
            selection_BTK=none((batch, tokens, config.index_topk)),
            candidates_BTC=none((batch, tokens, config.candidate_topk_blocks if config.has_candidates else 0)),
        )

    def _transient_pools(self, tokens_BT: jax.Array) -> dict[str, Pool]:
        """Without a cache a pool lives for this call, and one group per ratio is enough: no two are read at once."""
        batch, tokens = tokens_BT.shape
        return make_pools(
            self.config, batch, tokens, "f32" if self.numerics.dtype == jnp.float32 else "bf16", one_group=True
        )

    def _halves(
        self, cache: Cache, pools: dict[str, Pool], rows: dict[str, dict[int, jax.Array]], step: Step
    ) -> dict[str, Pool]:
        """Pools with the open groups as they are after the accepted tokens, from the new C and Z of all tokens, by layer."""
        changed = dict(pools)
        for ratio in self.config.plan.ratios:
            name = pool_name(ratio)
            before, compressor = cache.pools[name], self.compressors[name]
            halves: dict[str, jax.Array] = {}
            for field, captured, bias_LMW in (
                ("half_YGBMH", "group_rows", compressor.bias),
                ("key_half_YGBMJ", "key_group_rows", compressor.keys.bias if compressor.keys is not None else None),
            ):
                half = getattr(before, field)
                if half is None:
                    continue
                new = jnp.stack([rows[captured][layer] for layer in self.config.plan.pool_layers(ratio)], axis=1)
                # Only Z has a bias.
                bias_YLMW = None if bias_LMW is None else jnp.stack([jnp.zeros_like(bias_LMW[...]), bias_LMW[...]])

                def keep(
                    half_BMW: jax.Array, new_BTW: jax.Array, bias_MW: jax.Array | None, ratio: int = ratio
                ) -> jax.Array:
                    options = {"ratio": ratio, "bias_MH": bias_MW, "overlap": overlaps(self.config, ratio)}
                    return waiting_rows(half_BMW, new_BTW, step.start_B % ratio, step.count_B, **options)

                halves[field] = jax.vmap(jax.vmap(keep))(half, new, bias_YLMW)
            changed[name] = dataclasses.replace(pools[name], **halves)
        return changed

    def _draft_rows(self, cache: Cache, step: Step, flow: Flow, feed: DraftFeed | None) -> jax.Array | None:
        """What the draft stages' windows get, if the cache has them."""
        if cache.draft_window_LBWH is None:
            return None
        if feed is None:
            if self.draft is None:
                raise ValueError("the cache has draft windows, but this model has no draft head")
            feed = DraftFeed(self.draft)
        return feed(_join_targets(flow.main_BTQD), step, self.config, self.numerics)

    def _next_cache(
        self, cache: Cache, step: Step, pools: dict[str, Pool], tails: dict[int, jax.Array], ids_BU: jax.Array | None
    ) -> Cache:
        ngram_BE = cache.ngram_BE
        if ids_BU is not None:
            ngram_BE = next_history(ids_BU, step.count_B, ngram_BE.shape[1])
        window_LBWH = write_windows(cache.window_LBWH, stack_tails(tails), step) if tails else cache.window_LBWH
        return Cache(
            length_B=cache.length_B + step.count_B,
            decoder_from_B=cache.decoder_from_B,
            ngram_BE=ngram_BE,
            window_LBWH=window_LBWH,
            draft_window_LBWH=cache.draft_window_LBWH,
            pools=pools,
            max_length=cache.max_length,
        )


def head_logits(h_BTD: jax.Array, weight_VD: jax.Array) -> jax.Array:
    """f32 logits [B, T, V] of normed h."""
    return einsum("btd,vd->btv", h_BTD.astype(jnp.float32), weight_VD.astype(jnp.float32))


def check_roundings(config: ModelConfig, numerics: Numerics) -> None:
    """Refuse widths that the fp8 and fp4 groups do not divide, before anything is allocated."""
    if not numerics.fake_quant:
        return
    for name, width, fmt in rounded_widths(config):
        if (width - fmt.tail) % fmt.group:
            raise ValueError(
                f"{name}={width} must be a multiple of {fmt.group}"
                + (f" (without its {fmt.tail} rotated channels)" if fmt.tail else "")
                + " for the roundings; pass fake_quant=False to go without"
            )


def ngram_arrays(config: ModelConfig, token_map: np.ndarray | None) -> dict[str, np.ndarray]:
    """The Engram constants as arrays: token_map int32 [V] and ngram_products uint32 [layer, look-back, id, 2].

    Raises ValueError unless the map has one id per vocabulary entry and exactly the compressed vocabulary the config declares.
    Without a map (abstract models) the map is zeros.
    """
    if not config.engram_layer_ids:
        return {}
    declared = config.engram_compressed_vocab_size
    if token_map is None:
        token_map = np.zeros(config.vocab_size, np.int32)
    elif (
        token_map.shape != (config.vocab_size,)
        or len(np.unique(token_map)) != declared
        or token_map.max() != declared - 1
    ):
        raise ValueError(
            f"the token map has {token_map.shape} ids and {len(np.unique(token_map))} compressed ones, the configuration needs "
            f"vocab_size={config.vocab_size} and engram_compressed_vocab_size={declared}: it belongs to another tokenizer"
        )
    products = np.stack([product_table(c, declared) for c in config.engram_constants])
    return {"token_map": token_map.astype(np.int32), "ngram_products": products}


def _join_targets(main_BTQD: jax.Array | None) -> jax.Array:
    assert main_BTQD is not None
    return main_BTQD.reshape(*main_BTQD.shape[:2], -1)


def init_model(
    config: ModelConfig,
    seed: int = 0,
    *,
    compute_dtype: str = "bfloat16",
    fake_quant: bool = True,
    scan_layers: bool = True,
    token_map: np.ndarray | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Model:
    """A randomly initialised model (weights normal(0, 0.02), norms 1), made in one jit; weights in the compute dtype.

    compute_dtype, fake_quant, implementation, interpret: see `Numerics`.
    """
    numerics = Numerics(compute_dtype, fake_quant, implementation, interpret)  # type: ignore[arg-type]
    if config.engram_layer_ids and token_map is None:
        raise ValueError(
            f"the n-gram memory of engram_layer_ids={list(config.engram_layer_ids)} needs a token_map, int32 "
            f"[{config.vocab_size}] with {config.engram_compressed_vocab_size} compressed ids; ngram.compress_vocabulary "
            "makes it from a tokenizer"
        )

    def make(key: jax.Array | None) -> Model:
        return Model(
            config,
            numerics=numerics,
            weights=numerics.compute_dtype,
            scan_layers=scan_layers,
            token_map=token_map,
            key=key,
        )

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(jax.random.key(0))))
    state = jax.jit(lambda key: nnx.state(make(key)))(jax.random.key(seed))
    return nnx.merge(graphdef, state)
