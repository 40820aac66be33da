"""An independent oracle of DeepSeek-V4.1-Flash (CSA2): plain NumPy, one sequence, one shot, no cache.

It is written from the model's numerics alone (arXiv 2609.19969 and the released tensors' layout) and shares no code
with the implementation it judges. Loops run over tokens, layers, compression groups and pool entries; heads and
channels are vectorised. The default is float64 without activation rounding, which is the exact-logic oracle; float32
and bfloat16 follow the released casts (bfloat16 values are held in float32 arrays).

Letters: T tokens, n residual copies, D width, N heads, H head width, R rotary width (the last R channels), W window,
m compression ratio, P pool entries, K selected entries, I index heads, J index width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.oracle_config import ModelShape, ngram_rows, rotary_frequencies
from tests.oracle_formats import (
    dequantise_expert_fp4,
    dequantise_rows_fp8,
    dequantise_weight_fp8,
    quantise_expert_fp4,
    quantise_weight_fp8,
    quantised_matmul,
    round_index_fp4,
    round_main_fp4,
    round_operand_fp8,
    round_window_fp8,
)
from tests.oracle_trace import FAULTS, DraftResult, OracleTrace, SharedState

__all__ = [
    "FAULTS",
    "DraftResult",
    "OracleModel",
    "OracleTrace",
    "SharedState",
    "quantise_expert_fp4",
    "quantise_weight_fp8",
    "round_index_fp4",
    "round_main_fp4",
    "round_window_fp8",
]


class OracleModel:
    """The text backbone and the DSpark draft head of one checkpoint.

    `tensors` holds release names in stored dtypes. fp8 and fp4 weights are dequantised exactly; with `fake_quant`
    cache entries and index operands are rounded, and so is the operand of every quantised linear whose weight has a
    `.scale`. `token_map` gives the Engram's compressed id of every token id; None means t // 2 where the config
    declares half the vocabulary. `fault` plants one of FAULTS as a negative control.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, np.ndarray],
        *,
        fake_quant: bool = False,
        dtype: Any = np.float64,
        token_map: np.ndarray | None = None,
        fault: str | None = None,
    ) -> None:
        if fault is not None and fault not in FAULTS:
            raise ValueError(f"unknown {fault=}, one of {FAULTS} expected")
        self.shape = ModelShape.from_hf(config)
        self.tensors = tensors
        self.fake_quant = fake_quant
        self.fault = fault
        self.is_bf16 = np.dtype(dtype) == ml_dtypes.bfloat16
        self.real = np.float32 if self.is_bf16 else np.dtype(dtype).type
        if self.real not in (np.float32, np.float64):
            raise ValueError(f"{dtype=} must be float64, float32 or bfloat16")
        self.token_map = self._token_map(token_map)
        self.frequencies = {ratio > 0: rotary_frequencies(self.shape, ratio) for ratio in (0, 1)}
        self._weights: dict[str, np.ndarray] = {}

    def _token_map(self, token_map: np.ndarray | None) -> np.ndarray:
        s = self.shape
        if token_map is not None:
            return np.asarray(token_map, np.int64)
        if s.engram_layers and 2 * s.engram_compressed_vocab != s.vocab:
            raise ValueError(
                f"token_map is needed: {s.engram_compressed_vocab} compressed ids are not half of {s.vocab} ids"
            )
        return np.arange(s.vocab, dtype=np.int64) // 2

    # --- weights and linear algebra -----------------------------------------------------------------------------

    def tensor(self, name: str) -> np.ndarray:
        """A stored tensor by its release name, dequantised, in the working precision."""
        if name not in self._weights:
            self._weights[name] = self._read(name).astype(self.real)
        return self._weights[name]

    def _read(self, name: str) -> np.ndarray:
        if name not in self.tensors:
            raise KeyError(f"checkpoint has no tensor {name}")
        stored = self.tensors[name]
        if stored.dtype not in (ml_dtypes.float8_e4m3fn, np.int8, np.uint8):
            return stored
        scale_name = name.removesuffix(".weight") + ".scale"
        if scale_name not in self.tensors:
            raise ValueError(f"{name} is stored as {stored.dtype} but {scale_name} is missing")
        scale = self.tensors[scale_name]
        if stored.dtype != ml_dtypes.float8_e4m3fn:
            return dequantise_expert_fp4(stored, scale, name)
        dequantise = dequantise_rows_fp8 if name.endswith("engram.embed.weight") else dequantise_weight_fp8
        return dequantise(stored, scale, name)

    def cast(self, x: np.ndarray) -> np.ndarray:
        """One cast to the compute dtype."""
        if self.is_bf16:
            return x.astype(ml_dtypes.bfloat16).astype(np.float32)
        return x.astype(self.real)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """x W^T with one cast; the operand is rounded to e4m3 if the weight is quantised and rounding is on."""
        weight = self.tensor(f"{name}.weight")
        if not (self.fake_quant and f"{name}.scale" in self.tensors):
            return self.cast(x @ weight.T)
        if self.real is np.float64:
            return round_operand_fp8(x).astype(np.float64) @ weight.T
        return self.cast(quantised_matmul(x, weight))

    def rms_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """x * rsqrt(mean x^2 + eps) * weight, one cast."""
        scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.shape.rms_eps)
        return self.cast((x * scale.astype(self.real)) * self.tensor(f"{name}.weight"))

    def rope(self, x: np.ndarray, positions: np.ndarray, ratio: int, *, inverse: bool = False) -> np.ndarray:
        """Rotate channel pairs (2j, 2j + 1) of the last R channels; x is [T, H] or [T, heads, H]."""
        width = self.shape.rope_width
        angle = positions.astype(np.float32)[:, None] * self.frequencies[ratio > 0]  # float32, as the tables are
        angle = angle.astype(self.real) * (-1 if inverse else 1)
        if x.ndim == 3:
            angle = angle[:, None, :]
        cos, sin = np.cos(angle), np.sin(angle)
        even, odd = x[..., -width::2], x[..., x.shape[-1] - width + 1 :: 2]
        out = x.copy()
        out[..., -width::2] = even * cos - odd * sin
        out[..., x.shape[-1] - width + 1 :: 2] = even * sin + odd * cos
        return self.cast(out)

    def rounded(self, rounding: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
        """A cache or index rounding, applied only with fake_quant."""
        return rounding(x).astype(self.real) if self.fake_quant else x

    # --- attention ----------------------------------------------------------------------------------------------

    def query(self, prefix: str, x: np.ndarray, positions: np.ndarray, ratio: int) -> tuple[np.ndarray, np.ndarray]:
        """(low-rank query [T, rank], rotated heads [T, N, H])."""
        s = self.shape
        low_rank = self.rms_norm(f"{prefix}.q_norm", self.linear(f"{prefix}.wq_a", x))
        heads = self.linear(f"{prefix}.wq_b", low_rank).reshape(len(x), s.heads, s.head_width)
        return low_rank, self.rope(heads, positions, ratio)

    def local_kv(self, prefix: str, x: np.ndarray, positions: np.ndarray, ratio: int) -> np.ndarray:
        """Window (or draft) entries [T, H]; one vector serves as key and value of all heads."""
        kv = self.rms_norm(f"{prefix}.kv_norm", self.linear(f"{prefix}.wkv", x))
        return self.rounded(round_window_fp8, self.rope(kv, positions, ratio))

    def read(self, prefix: str, query: np.ndarray, kv: np.ndarray) -> np.ndarray:
        """One token's heads [N, H] over its entries [E, H]: softmax with a per-head sink in the denominator only."""
        if len(kv) == 0:
            return np.zeros_like(query)
        logits = (query @ kv.T) * self.real(self.shape.head_width**-0.5)
        top = np.maximum(logits.max(axis=-1, keepdims=True), self.real(-1e30))
        p = np.exp(logits - top)
        total = p.sum(axis=-1, keepdims=True)
        if self.fault != "no_sink":
            total = total + np.exp(self.tensor(f"{prefix}.attn_sink")[:, None] - top)
        return self.cast((self.cast(p) @ kv) / total)

    def output(self, prefix: str, o: np.ndarray, positions: np.ndarray, ratio: int) -> np.ndarray:
        """Rotate back by the query's position, then G groups of consecutive heads through wo_a, then wo_b."""
        s = self.shape
        if self.fault != "no_inverse_rope":
            o = self.rope(o, positions, ratio, inverse=True)
        grouped = o.reshape(len(o), s.output_groups, -1)
        wo_a = self.tensor(f"{prefix}.wo_a.weight").reshape(s.output_groups, -1, grouped.shape[-1])
        low_rank = np.stack([grouped[:, g] @ wo_a[g].T for g in range(s.output_groups)], axis=1)
        return self.linear(f"{prefix}.wo_b", self.cast(low_rank).reshape(len(o), -1))

    def attention(self, layer: int, x: np.ndarray, shared: SharedState, trace: OracleTrace) -> np.ndarray:
        """attn_in [T, D] -> attn_out [T, D] of one backbone layer; FULL and REINDEX layers update `shared`."""
        s, prefix, spec = self.shape, f"layers.{layer}.attn", self.shape.layers[layer]
        x = self.cast(x)
        positions = np.arange(len(x))
        low_rank, query = self.query(prefix, x, positions, spec.ratio)
        window = trace.window_kv[layer] = self.local_kv(prefix, x, positions, spec.ratio)
        if spec.makes_pool:
            self.make_pool(layer, x, shared, trace)
        if spec.makes_selection:
            self.make_selection(layer, x, low_rank, shared, trace)
        o = np.empty_like(query)
        for t in range(len(x)):
            entries = [window[max(0, t - s.window + 1) : t + 1]]
            if spec.ratio and self.fault != "no_pool":
                assert shared.pool_kv is not None
                assert shared.selection is not None
                chosen = shared.selection[t]
                if self.fault == "reuse_recent" and not spec.makes_selection:
                    visible = (t + 1) // spec.ratio
                    chosen = np.arange(max(0, visible - s.index_topk), visible)
                entries.append(shared.pool_kv[chosen])
            o[t] = self.read(prefix, query[t], np.concatenate(entries))
        return self.output(prefix, o, positions, spec.ratio)

    # --- compressor and indexer ---------------------------------------------------------------------------------

    def make_pool(self, layer: int, x: np.ndarray, shared: SharedState, trace: OracleTrace) -> None:
        """Groups of m tokens -> latents -> index keys (not rotated, not rounded yet) and pool entries."""
        prefix, m = f"layers.{layer}.attn", self.shape.layers[layer].ratio
        count = len(x) // m  # a partial group waits
        if m == 1:
            content = self.linear(f"{prefix}.compressor.wkv", x)
        else:
            kv = x @ self.tensor(f"{prefix}.compressor.wkv.weight").T
            gate = x @ self.tensor(f"{prefix}.compressor.wgate.weight").T
            content = np.empty((count, kv.shape[1]), self.real)
            for j in range(count):
                group = slice(j * m, (j + 1) * m)
                p = np.exp(gate[group] - gate[group].max(axis=0))  # softmax over the group, per channel
                content[j] = (p / p.sum(axis=0) * kv[group]).sum(axis=0)
            content = self.cast(content)
        latent = trace.latent[layer] = self.rms_norm(f"{prefix}.compressor.norm", content)
        positions = np.arange(count) * m
        key = self.rms_norm(f"{prefix}.indexer.k_norm", self.linear(f"{prefix}.indexer.wk", latent))
        key = self.rounded(round_index_fp4, self.rope(key, positions, m))
        pool = self.rounded(round_main_fp4, self.rope(latent, positions, m))
        shared.pool_key = trace.pool_key[layer] = key
        shared.pool_kv = trace.pool_kv[layer] = pool
        shared.candidates = None  # candidates address one pool

    def make_selection(
        self, layer: int, x: np.ndarray, low_rank: np.ndarray, shared: SharedState, trace: OracleTrace
    ) -> None:
        """Score the visible pool entries, keep the best K; at the candidate source keep the best blocks too."""
        s, prefix, m = self.shape, f"layers.{layer}.attn.indexer", self.shape.layers[layer].ratio
        assert shared.pool_key is not None
        count = len(x)
        query = self.linear(f"{prefix}.wq_b", low_rank).reshape(count, s.index_heads, s.index_width)
        query = self.rounded(round_index_fp4, self.rope(query, np.arange(count), m))
        scale = self.real(s.index_width**-0.5 * s.index_heads**-0.5)
        weights = self.cast(self.linear(f"{prefix}.weights_proj", x) * scale)
        scores = np.full((count, len(shared.pool_key)), -np.inf, self.real)
        restricted = shared.candidates is not None and self.fault != "no_candidates"
        inherited, selection, blocks = shared.candidates, [], []
        for t in range(count):
            visible = (t + 1) // m
            dots = np.maximum(self.cast(query[t] @ shared.pool_key[:visible].T), 0)  # [I, visible]
            score = self.cast(self.cast(dots * weights[t][:, None]).sum(axis=0))
            if restricted:
                assert inherited is not None
                allowed = np.isin(np.arange(visible) // s.candidate_block, inherited[t])
                score = np.where(allowed, score, -np.inf)
            scores[t, :visible] = score
            selection.append(best(score, s.index_topk))
            if layer == s.candidate_source:
                blocks.append(self.best_blocks(score))
        shared.selection = selection
        trace.index_score[layer] = scores
        trace.selections[layer] = padded_rows(selection, s.index_topk)
        if layer == s.candidate_source:
            shared.candidates = trace.candidates[layer] = blocks

    def best_blocks(self, score: np.ndarray) -> np.ndarray:
        """Block ids by maximum score, the block of the newest visible entry forced in; nothing visible: none."""
        s = self.shape
        starts = range(0, len(score), s.candidate_block)
        block_score = np.array([score[start : start + s.candidate_block].max() for start in starts])
        if len(score):
            block_score[(len(score) - 1) // s.candidate_block] = np.inf
        return best(block_score, s.candidate_topk)

    # --- residual copies ----------------------------------------------------------------------------------------

    def hyper(self, prefix: str, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(pre [T, n], post [T, n], comb [T, n, n]) of one sub-layer, from the stream that enters it."""
        s, n, eps = self.shape, self.shape.copies, self.real(self.shape.hc_eps)
        flat = copies.reshape(len(copies), -1)
        mixes = flat @ self.tensor(f"{prefix}_fn").T
        mixes = mixes / np.sqrt(np.mean(flat * flat, axis=-1, keepdims=True) + self.real(s.rms_eps))
        gain, base = self.tensor(f"{prefix}_scale"), self.tensor(f"{prefix}_base")
        a = mixes * np.repeat(gain, [n, n, n * n]) + base
        pre = sigmoid(a[:, :n]) + eps
        post = 2 * sigmoid(a[:, n : 2 * n])
        logits = a[:, 2 * n :].reshape(-1, n, n)
        comb = np.exp(logits - logits.max(axis=2, keepdims=True))
        comb = comb / comb.sum(axis=2, keepdims=True) + eps
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        for _ in range(s.sinkhorn_iters - 1):
            comb = comb / (comb.sum(axis=2, keepdims=True) + eps)
            comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        return pre, post, comb

    def collapse(self, copies: np.ndarray, pre_mix: np.ndarray) -> np.ndarray:
        """sum_j pre_mix[j] * X_j, one cast: [T, n, D] -> [T, D]."""
        return self.cast((pre_mix[:, :, None] * copies).sum(axis=1))

    def sublayer(
        self, prefix: str, kind: str, copies: np.ndarray, pre_mix: np.ndarray, apply: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """mixes, collapse with the previous sub-layer's pre, RMSNorm, `apply`, update: (copies, this pre)."""
        pre, post, comb = self.hyper(f"{prefix}.hc_{kind}", copies)
        collapsed = self.collapse(copies, pre if self.fault == "mhc_unstaggered" else pre_mix)
        y = apply(self.rms_norm(f"{prefix}.{kind}_norm", collapsed))
        kept = np.einsum("tjk,tjd->tkd", comb, copies)  # the residual is indexed by comb's first axis
        return self.cast(post[:, :, None] * y[:, None, :] + kept), pre

    # --- experts ------------------------------------------------------------------------------------------------

    def moe(
        self, prefix: str, x: np.ndarray, active: int, image_mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ffn_out [T, D], expert ids [T, k] best first): routed experts in ascending order, then the shared one."""
        s = self.shape
        x = self.cast(x)
        score = np.sqrt(softplus(x @ self.tensor(f"{prefix}.gate.weight").T))
        bias = np.broadcast_to(self.tensor(f"{prefix}.gate.bias"), score.shape)
        if image_mask is not None and image_mask.any():
            bias = np.where(image_mask[:, None], self.tensor(f"{prefix}.gate.bias_vl"), bias)
        chosen = np.argsort(-(score + bias), axis=1, kind="stable")[:, :active]
        weight = np.take_along_axis(score, chosen, axis=1)
        if active > 1:
            weight = weight / (weight.sum(axis=1, keepdims=True) + self.real(1e-20))
        weight = weight * self.real(s.routed_scale)
        total = np.zeros(x.shape, self.real)
        for expert in range(score.shape[1]):
            rows, slots = np.nonzero(chosen == expert)
            if len(rows):
                total[rows] += self.expert(f"{prefix}.experts.{expert}", x[rows], weight[rows, slots])
        shared = self.expert(f"{prefix}.shared_experts", x, np.ones(len(x), self.real))
        return self.cast(total + shared), chosen

    def expert(self, prefix: str, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """w2 cast(silu(gate) * up * weight); up is clipped on both sides, gate only from above."""
        limit = self.real(self.shape.swiglu_limit)
        gate = np.minimum(self.linear(f"{prefix}.w1", x), limit)
        up = np.clip(self.linear(f"{prefix}.w3", x), -limit, limit)
        h = gate * sigmoid(gate) * up
        return self.linear(f"{prefix}.w2", self.cast(h * weight[:, None]))

    # --- Engram -------------------------------------------------------------------------------------------------

    def engram(self, layer: int, copies: np.ndarray, rows: np.ndarray, image_mask: np.ndarray | None) -> np.ndarray:
        """Add the gated n-gram memory to every residual copy."""
        s, prefix, real = self.shape, f"layers.{layer}.engram", self.real
        memory = self.cast(self.tensor(f"{prefix}.embed.weight")[rows].reshape(len(rows), -1))
        mixed = self.linear(f"{prefix}.wkv", memory).reshape(len(rows), s.copies + 1, s.width)
        key, value = mixed[:, :-1], mixed[:, -1:]
        dot = (copies * self.tensor(f"{prefix}.q_weight") * self.tensor(f"{prefix}.k_weight") * key).sum(axis=2)
        for vector in (copies, key):
            dot = dot / np.sqrt(np.mean(vector * vector, axis=2) + real(s.rms_eps))
        dot = dot * real(s.width**-0.5)
        gate = sigmoid(np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), real(1e-6))))
        if image_mask is not None:
            gate = np.where(image_mask[:, None], 0, gate)
        return self.cast(copies + gate[:, :, None] * value)

    # --- the whole model ----------------------------------------------------------------------------------------

    def start(self, embedded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """n identical residual copies, and a pre_mix that is one-hot on copy 0."""
        n = self.shape.copies
        pre_mix = np.zeros((len(embedded), n), self.real)
        pre_mix[:, 0] = 1
        return np.repeat(embedded[:, None, :], n, axis=1), pre_mix

    def token_ids(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """One sequence of ids, checked."""
        ids = np.asarray(tokens, np.int64)
        if ids.ndim != 1 or len(ids) == 0 or ids.min() < 0 or ids.max() >= self.shape.vocab:
            raise ValueError(f"tokens of shape {ids.shape} must be one sequence of ids in 0..{self.shape.vocab - 1}")
        return ids

    def forward(
        self,
        tokens: Sequence[int] | np.ndarray,
        *,
        embedded: np.ndarray | None = None,
        image_mask: np.ndarray | None = None,
    ) -> OracleTrace:
        """All layers on one sequence from position 0; `embedded` [T, D] overwrites the embedding where images are."""
        s, ids = self.shape, self.token_ids(tokens)
        mask = None if image_mask is None else np.asarray(image_mask, bool)
        x = self.tensor("embed.weight")[ids] if embedded is None else embedded
        copies, pre_mix = self.start(self.cast(x))
        trace = OracleTrace(logits=np.empty(0), main_hidden=np.empty((len(ids), 0), self.real))
        shared, means = SharedState(), {}
        for layer in range(len(s.layers)):
            if layer in s.engram_layers:
                rows = trace.engram_hash[layer] = ngram_rows(s, self.token_map, ids, layer, mask)
                if self.fault != "no_engram":
                    copies = self.engram(layer, copies, rows, mask)
            if layer in s.draft_targets:
                means[layer] = self.cast(copies.mean(axis=1))
            copies, pre_mix = self.block(layer, copies, pre_mix, shared, trace, mask)
        if means:
            trace.main_hidden = np.concatenate([means[layer] for layer in s.draft_targets], axis=1)
        final = self.rms_norm("norm", self.collapse(copies, pre_mix))
        trace.logits = final @ self.tensor("head.weight").T
        return trace

    def block(
        self,
        layer: int,
        copies: np.ndarray,
        pre_mix: np.ndarray,
        shared: SharedState,
        trace: OracleTrace,
        image_mask: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """One backbone layer: attention, then feed-forward, each inside the residual mixing."""
        prefix = f"layers.{layer}"

        def attend(x: np.ndarray) -> np.ndarray:
            trace.attn_in[layer] = x
            trace.attn_out[layer] = self.attention(layer, x, shared, trace)
            return trace.attn_out[layer]

        def feed_forward(x: np.ndarray) -> np.ndarray:
            trace.ffn_in[layer] = x
            y, trace.gate_idx[layer] = self.moe(f"{prefix}.ffn", x, self.shape.active_experts, image_mask)
            trace.ffn_out[layer] = y
            return y

        copies, pre_mix = self.sublayer(prefix, "attn", copies, pre_mix, attend)
        copies, pre_mix = self.sublayer(prefix, "ffn", copies, pre_mix, feed_forward)
        trace.hidden[layer], trace.pre_mix[layer] = copies, pre_mix
        return copies, pre_mix

    def draft(self, trace: OracleTrace, position: int, token: int) -> DraftResult:
        """One DSpark step: main positions up to `position` are known, `token` was sampled for position + 1."""
        return self.draft_from(trace.main_hidden[: position + 1], token)

    def draft_from(self, main_hidden: np.ndarray, token: int) -> DraftResult:
        """The draft step after the last row of `main_hidden` [p + 1, targets * D]."""
        s = self.shape
        if s.draft_stages == 0:
            raise ValueError("this configuration has no draft stages")
        seen, block = len(main_hidden), s.draft_block
        first = max(0, seen - s.window)
        main = self.rms_norm("mtp.0.main_norm", self.linear("mtp.0.main_proj", self.cast(main_hidden[first:])))
        ids = self.token_ids([token] + [s.noise_token] * (block - 1))
        positions = seen + np.arange(block)
        copies, pre_mix = self.start(self.cast(self.tensor("embed.weight")[ids]))
        for stage in range(s.draft_stages):
            prefix = f"mtp.{stage}"
            window = self.local_kv(f"{prefix}.attn", main, np.arange(first, seen), 0)  # no attn_norm on this path

            def attend(x: np.ndarray, prefix: str = f"{prefix}.attn", window: np.ndarray = window) -> np.ndarray:
                _, query = self.query(prefix, x, positions, 0)
                entries = np.concatenate([window, self.local_kv(prefix, x, positions, 0)])  # drafts see all drafts
                o = np.stack([self.read(prefix, query[i], entries) for i in range(block)])
                return self.output(prefix, o, positions, 0)

            def feed_forward(x: np.ndarray, prefix: str = f"{prefix}.ffn") -> np.ndarray:
                return self.moe(prefix, x, s.draft_active_experts)[0]

            copies, pre_mix = self.sublayer(prefix, "attn", copies, pre_mix, attend)
            copies, pre_mix = self.sublayer(prefix, "ffn", copies, pre_mix, feed_forward)
        return self.draft_head(self.collapse(copies, pre_mix), token)

    def draft_head(self, x: np.ndarray, token: int) -> DraftResult:
        """Shared head plus a bias from the token before, left to right; confidence from the stream before the norm."""
        last = f"mtp.{self.shape.draft_stages - 1}"
        logits = self.rms_norm(f"{last}.norm", x) @ self.tensor("head.weight").T
        embed, head = self.tensor(f"{last}.markov_head.embed.weight"), self.tensor(f"{last}.markov_head.head.weight")
        proj = self.tensor(f"{last}.confidence_head.proj.weight")
        ids, confidence = [int(token)], []
        for i in range(len(x)):
            previous = embed[ids[i]]
            logits[i] += head @ previous
            confidence.append((proj @ np.concatenate([x[i], previous]))[0])
            ids.append(int(np.argmax(logits[i])))
        return DraftResult(np.array(ids), logits, np.array(confidence))


# --- small functions ----------------------------------------------------------------------------------------------


def best(score: np.ndarray, count: int) -> np.ndarray:
    """Ascending indices of the `count` largest scores above -inf; equal scores (0.0 and -0.0 too): lowest index."""
    order = np.argsort(-score, kind="stable")[:count]
    return np.sort(order[score[order] > -np.inf])


def padded_rows(rows: list[np.ndarray], width: int) -> np.ndarray:
    """Ragged index lists as one int array [T, width], -1 at the end."""
    out = np.full((len(rows), width), -1, np.int64)
    for t, row in enumerate(rows):
        out[t, : len(row)] = row
    return out


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)) without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
