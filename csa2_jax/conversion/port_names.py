"""The names of the open port of this model in Hugging Face transformers, read as those of the release.

The port calls attention `self_attn` and the experts `mlp`, keeps all routed experts of a layer in two arrays (gate above up,
and down), calls scales `weight_scale_inv` (they multiply all the same) and keeps n-gram tables in one list. Its text model has
no draft head. `RenamedFiles` shows such files under the release's names; names that are the release's already stay.
Source: huggingface/transformers pull requests 45643 and 48721, as of September 2026.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Final

from csa2_jax.safetensors_io import CheckpointError, TensorEntry, TensorFiles

_PREFIX: Final = re.compile(r"^(model\.language_model\.|language_model\.model\.|model\.)")
_MARKS: Final = re.compile(r"(^|\.)(self_attn|mlp|embed_tokens|lm_head|input_layernorm|engram_tables|attn_hc|ffn_hc)\.")
_RULES: Final = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"^lm_head\.", "head."),
        (r"^embed_tokens\.", "embed."),
        (r"^engram_tables\.(\d+)\.", r"layers.\1.engram.embed."),
        (r"^visual\.(.*)\.attn\.qkv\.", r"vision.\1.attn.wqkv."),
        (r"^visual\.(.*)\.attn\.proj\.", r"vision.\1.attn.wo."),
        (r"^visual\.", "vision."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
        (r"\.compressor\.indexer\.(kv_proj|gate_proj|kv_norm|position_bias)\b", r".indexer.compressor.\1"),
        (r"\.self_attn\.compressor\.indexer\.", ".self_attn.indexer."),
        (r"\.indexer\.scorer\.", ".indexer."),
        (r"\.self_attn\.indexer\.k_proj\.", ".attn.indexer.wk."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.compressor\.position_bias$", ".compressor.ape"),
        (r"^hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),  # how transformers writes V4's, which it reads again
        (r"\.self_attn\.sinks$", ".attn.attn_sink"),
        (r"\.self_attn\.q_a_norm\.", ".attn.q_norm."),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.gate\.e_score_correction_bias", ".ffn.gate.bias"),
        (r"(\.experts\.\d+|\.shared_experts)\.gate_proj\.", r"\1.w1."),
        (r"(\.experts\.\d+|\.shared_experts)\.up_proj\.", r"\1.w3."),
        (r"(\.experts\.\d+|\.shared_experts)\.down_proj\.", r"\1.w2."),
        (r"\.mlp\.", ".ffn."),
        (r"\.weight_scale_inv$", ".scale"),
    )
)
_FUSED: Final = re.compile(r"^(.*\.ffn\.experts)\.(gate_up_proj|down_proj)(_scale_inv)?(\.weight)?$")


def is_port(names: Mapping[str, TensorEntry]) -> bool:
    """Whether most of these names are the port's rather than the release's."""
    count = sum(bool(_MARKS.search(name) or name.startswith("model.")) for name in names)
    return 2 * count > len(names)


def release_name(name: str) -> str:
    """The release's name of a tensor that the port calls `name`; fused experts keep their own."""
    name = _PREFIX.sub("", name)
    for pattern, text in _RULES:
        name = pattern.sub(text, name)
    return name


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of the release inside one of the port's: expert `expert`, rows from `start` to `stop`; else all of it."""

    entry: TensorEntry
    expert: int | None = None
    start: int = 0
    stop: int = 0


class RenamedFiles(TensorFiles):
    """A directory with the port's names, seen by the release's names.

    Raises CheckpointError where two tensors would have one name, and as `TensorFiles` does.
    """

    def __init__(self, files: TensorFiles) -> None:
        self.__dict__.update(files.__dict__)  # the same open files; only names differ
        self._by_port, self._places = dict(files.items()), {}
        for entry in self._by_port.values():
            for name, place in _places(release_name(entry.name), entry):
                if name in self._places:
                    raise CheckpointError(
                        f"{entry.name} and {self._places[name].entry.name} of {self.directory} are both {name}: remove one"
                    )
                self._places[name] = place
        self._entries = {name: _renamed(name, place) for name, place in self._places.items()}


def _places(name: str, entry: TensorEntry) -> Iterator[tuple[str, _Place]]:
    fused = _FUSED.match(name)
    if fused is None:
        yield name, _Place(entry)
        return
    if len(entry.shape) != 3 or not entry.nbytes or (fused[2] == "gate_up_proj" and entry.shape[1] % 2):
        raise CheckpointError(f"{entry.file}: {entry.name} has shape {list(entry.shape)}, expected [experts, out, in]")
    leaf = "scale" if fused[3] else "weight"
    rows = entry.shape[1]
    parts = {"w2": (0, rows)} if fused[2] == "down_proj" else {"w1": (0, rows // 2), "w3": (rows // 2, rows)}
    for expert in range(entry.shape[0]):
        for linear, (start, stop) in parts.items():
            yield f"{fused[1]}.{expert}.{linear}.{leaf}", _Place(entry, expert, start, stop)


def _renamed(name: str, place: _Place) -> TensorEntry:
    """An entry of its own: rows of a fused array are contiguous in its file."""
    entry = place.entry
    if place.expert is None:
        return dataclasses.replace(entry, name=name)
    _, rows, width = entry.shape
    row = entry.nbytes // (entry.shape[0] * rows)
    start = entry.start + (place.expert * rows + place.start) * row
    count = place.stop - place.start
    return TensorEntry(name, entry.dtype, (count, width), entry.file, start, start + count * row)
