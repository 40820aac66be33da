"""Make this folder from full recordings:  python tests/golden/trim.py SOURCE_DIR

SOURCE_DIR holds one directory per recorded set (config.json, meta.json, model.safetensors, trace.npz) and
quantizers.npz, engram.npz. What is dropped is what no test reads or what can be had from something kept; README.md
beside this file tells the rules.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from tests.golden import codec  # noqa: E402  (the path above makes it importable when this file is run as a program)

CACHES = frozenset({"window_kv_cache", "compress_kv_cache", "index_k_cache", "kv_state", "score_state"})
OUTCOMES = frozenset(
    {"tokens", "ids", "logits", "logits_all", "draft_ids", "engram_hash", "index_idx", "gate_idx", "candidates"}
)
SCORES = frozenset({"main_hidden", "draft_logits", "draft_conf", "gate_w", "index_score", "index_score_raw"})
LAYER = frozenset({"h", "pre_mix", "attn_in", "attn_out", "ffn_in", "ffn_out", "engram_h", "latent"})
INSIDE = frozenset({"attn_q", "attn_o", "attn_idx"})


@dataclass(frozen=True)
class Keep:
    """Which keys `<step>/<site>/<leaf>` of a trace stay. Steps are `prefill` and decode numbers.

    every_step: leaves kept at every step of the backbone. module_steps: decode steps at which, like at the prefill,
    every other leaf is kept too, and those of the draft stages. cache_steps: decode steps whose caches (the state after
    the step) are kept. inside_sites: the layers whose query and raw attention output are kept at the prefill; None is
    all.
    """

    every_step: frozenset[str]
    module_steps: frozenset[int]
    cache_steps: frozenset[int]
    inside_sites: frozenset[str] | None = None

    def __call__(self, key: str) -> bool:
        step, *site, leaf = key.split("/") if "/" in key else (key, "")
        if step != "prefill" and not step.startswith("decode"):
            return True  # once per set: tokens, engram/*, rope/*
        prefill = step == "prefill"
        number = -1 if prefill else int(step.removeprefix("decode"))
        if leaf in CACHES:
            return prefill or number in self.cache_steps
        in_draft = bool(site) and site[0].startswith("M")
        if prefill and in_draft:
            return False  # untouched copies of the embedding
        if leaf in INSIDE and prefill:
            return leaf == "attn_idx" or self.inside_sites is None or site[0] in self.inside_sites
        kept_somewhere = leaf in self.every_step | OUTCOMES | SCORES | LAYER | INSIDE
        if prefill or number in self.module_steps:
            return kept_somewhere
        return leaf in self.every_step and not in_draft


def everything(key: str) -> bool:
    """For recordings that are reduced already."""
    return not key.endswith("/attn_kv")


QUANTISED = Keep(OUTCOMES, frozenset({0, 11, 12}), frozenset({0, 10, 11}))
CALM_TINY8 = {".wo_b.weight": 0.06, ".w2.weight": 0.016, ".engram.wkv.weight": 0.072}
CALM_TWIN40 = {".wo_b.weight": 0.18, ".w2.weight": 0.048, ".engram.wkv.weight": 0.036}


@dataclass(frozen=True)
class Set:
    """How a set is stored. base: the set whose weights explain this one's; factors: the residual writes that were
    scaled on the way."""

    keep: Callable[[str], bool]
    base: str | None = None
    factors: Mapping[str, float] | None = None
    same_weights_as: str | None = None
    plain: bool = False


SETS: dict[str, Set] = {
    "tiny8_f32_noqat": Set(
        Keep(OUTCOMES | SCORES | LAYER, frozenset({0, 1, 11, 12, 22, 23}), frozenset({0, 1, 11, 22, 23})), plain=True
    ),
    "tiny8_f32": Set(
        Keep(OUTCOMES, QUANTISED.module_steps, QUANTISED.cache_steps, frozenset({"L0", "L2", "L5", "L7"})),
        base="tiny8_f32_noqat",
        factors=CALM_TINY8,
    ),
    "tiny8_bf16": Set(QUANTISED, base="tiny8_f32_noqat", same_weights_as="tiny8_f32"),
    "tiny8_fp8": Set(QUANTISED, base="tiny8_f32"),
    "tiny8_vl_f32_noqat": Set(everything),
    "twin40_f32_noqat": Set(everything),
    "twin40_fp8": Set(everything, base="twin40_f32_noqat", factors=CALM_TWIN40),
}
FILES = ("quantizers.npz", "engram.npz")


def trim(source: Path, target: Path) -> None:
    """Write the trimmed folder and its manifest."""
    sets: dict[str, dict[str, str | None]] = {}
    written: list[str] = []

    def write(name: str, data: bytes) -> None:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        written.append(name)

    for name, plan in SETS.items():
        weights = (source / name / "model.safetensors").read_bytes()
        sets[name] = {"weights": None, "base": plan.base, "sha256": hashlib.sha256(weights).hexdigest()}
        for plain in ("config.json", "meta.json"):
            write(f"{name}/{plain}", (source / name / plain).read_bytes())
        with np.load(source / name / "trace.npz") as arrays:
            kept = {key: arrays[key] for key in arrays.files if plan.keep(key)}
        if plan.plain:
            write(f"{name}/model.safetensors", weights)
            np.savez_compressed(target / name / "trace.npz", **kept)
            written.append(f"{name}/trace.npz")
            continue
        sets[name]["weights"] = f"{plan.same_weights_as or name}/weights.xz"
        if plan.same_weights_as is None:
            base = None if plan.base is None else source / plan.base / "model.safetensors"
            write(f"{name}/weights.xz", codec.pack_weights(weights, base, plan.factors))
        write(f"{name}/trace.xz", codec.pack_trace(kept))
        print(name, {path.name: path.stat().st_size for path in sorted((target / name).iterdir())})
    for name in FILES:
        shutil.copyfile(source / name, target / name)
        written.append(name)
    files = {name: hashlib.sha256((target / name).read_bytes()).hexdigest() for name in sorted(written)}
    (target / "manifest.json").write_text(json.dumps({"sets": sets, "files": files}, indent=1) + "\n")
    total = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{total / 1e6:.2f} MB in {target}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trim(Path(sys.argv[1]), HERE)
