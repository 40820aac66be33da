"""DeepSeek-V4 as transformers computes it on a CPU: random weights, logits, greedy tokens, and what its indexers select.

Weights are drawn so that no two scores of an indexer come near one another: with few heads a query often has no positive product
at all, and transformers leaves the order of equal scores open. Where transformers departs from the released code: it keeps pool
entries, window rows and index queries unrounded and does not turn the index queries and keys (an orthogonal turn, which changes
no score), so that it is compared with a model without roundings.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from csa2_jax import Model, load_checkpoint

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY: Final = 96
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 24,
    "o_lora_rank": 8,
    "o_groups": 2,
    "max_position_embeddings": 1024,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "index_n_heads": 24,
    "index_head_dim": 32,
    "hc_mult": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "attn_implementation": "eager",
}
# Layers, tokens of an HCA entry, window, entries selected, layers routed by token id, YaRN's original length.
KINDS: Final = {
    "flash": ("WWCHCHC", 16, 8, 4, 3, 64),  # V4-Flash's order
    "pro": ("HHC", 16, 6, 5, 1, 0),  # V4-Pro's: no layer with a window alone
    "long": ("CH", 128, 128, 16, 1, 128),  # the released ratios and window
}
_TYPES: Final = {"W": "sliding_attention", "C": "compressed_sparse_attention", "H": "heavily_compressed_attention"}


class Reference:
    """A random model of one kind, in transformers and, through the files that transformers writes, here."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        layers, ratio, window, topk, hashed, original = KINDS[kind]
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
        self.config = DeepseekV4Config(
            **SHAPE,
            num_hidden_layers=len(layers),
            layer_types=[_TYPES[one] for one in layers],
            compress_rates={_TYPES["C"]: 4, _TYPES["H"]: ratio},
            sliding_window=window,
            index_topk=topk,
            num_hash_layers=hashed,
            rope_parameters=(rope | {"beta_fast": 32, "beta_slow": 1}) if original else None,
        )
        self.model = DeepseekV4ForCausalLM(self.config).eval()
        _draw(self.model, seed)
        self.selected: list[np.ndarray] = []
        for module in self.model.modules():
            if type(module).__name__ == "DeepseekV4Indexer":
                module.register_forward_hook(lambda _m, _i, out: self.selected.append(out.numpy()))

    @functools.cached_property
    def ours(self) -> Model:
        """The same weights, read from what `save_pretrained` writes."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            return load_checkpoint(Path(folder), compute_dtype="float32", fake_quant=False)

    @torch.no_grad()
    def forward(self, tokens_BT: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits [B, T, V], and per layer that selects the entries [B, T, K] in no order, -1 absent."""
        self.selected.clear()
        logits = self.model(torch.from_numpy(tokens_BT)).logits.numpy()
        return logits, list(self.selected)

    @torch.no_grad()
    def decode(self, tokens_BT: np.ndarray, first: int) -> np.ndarray:
        """Logits [B, T, V] with a cache: `first` tokens at once, then one by one."""
        cache, tokens = DynamicCache(config=self.config), torch.from_numpy(tokens_BT)
        cuts = [slice(0, first), *(slice(i, i + 1) for i in range(first, tokens.shape[1]))]
        steps = [self.model(tokens[:, cut], cache=cache, use_cache=True).logits for cut in cuts]
        return torch.cat(steps, dim=1).numpy()


def _draw(model: torch.nn.Module, seed: int) -> None:
    """Every parameter at random: gains around 1, ids of experts all different, the rest normal."""
    rng = np.random.default_rng(seed)
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        shape = tuple(p.shape)
        if "inv_freq" in name:
            continue
        if name.endswith("tid2eid"):
            experts = SHAPE["n_routed_experts"]
            values = np.stack([rng.permutation(experts)[: shape[1]] for _ in range(shape[0])])
        elif "norm" in name:
            values = 1 + 0.2 * rng.standard_normal(shape)
        else:
            values = 0.3 * rng.standard_normal(shape)
        p.data.copy_(torch.from_numpy(np.asarray(values)))


@functools.cache
def reference(kind: str, seed: int = 0) -> Reference:
    """One `Reference` per kind and process."""
    torch.set_num_threads(1)
    return Reference(kind, seed)


def tokens(batch: int, count: int, seed: int = 0) -> np.ndarray:
    """Random ids that are none of the special ones."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, (batch, count))
