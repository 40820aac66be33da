"""How close a replay has to be: comparisons pooled by quantity and held against the tolerance of the recording's mode.

Without rounding everything is decided end to end: floats to a few 1e-6 and every integer equal. With rounding, an operand on the
edge of a lattice step falls the other way now and then and takes a selection or an expert with it, so single modules fed with
recorded inputs decide, by quantiles, and end to end only the distribution of the logits says anything. The tolerances leave 3 to
5 times what disturbing the recorder itself in the last bit does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from csa2_jax.recording import Comparison, Recording

_INTEGERS = ("gate_idx", "draft gate_idx", "engram_hash", "index_idx", "index visibility", "candidates", "draft_ids")


@dataclasses.dataclass
class Pooled:
    """One quantity over all steps and layers (or over one step)."""

    quantity: str
    errors: np.ndarray | None = None
    equal: np.ndarray | None = None
    worst: tuple[str, int | None] = ("", None)  # step and layer of the largest error, or of the first difference
    parts: tuple[Comparison, ...] = ()

    @property
    def share_equal(self) -> float | None:
        """Share of equal integers."""
        return None if self.equal is None else float(self.equal.mean())

    def quantile(self, q: float) -> float | None:
        """Quantile of the relative errors."""
        return None if self.errors is None else float(np.quantile(self.errors, q))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One tolerance and what came out: passed if `value` is at most (or, for shares, at least) `bound`."""

    quantity: str
    measure: str  # "max", "p50", "p90", "share above 1e-4", "share equal"
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the tolerance is kept; NaN is not."""
        return self.value >= self.bound if self.measure == "share equal" else self.value <= self.bound


def pool(comparisons: Iterable[Comparison]) -> dict[str, Pooled]:
    """Comparisons by quantity, in order of appearance."""
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(comparison.quantity, []).append(comparison)
    return {quantity: _pool(quantity, group) for quantity, group in groups.items()}


def _pool(quantity: str, group: Sequence[Comparison]) -> Pooled:
    def badness(c: Comparison) -> float:
        if c.errors is not None:
            return float(np.max(c.errors, initial=0.0))
        return 0.0 if c.equal is None else 1.0 - float(c.equal.mean())

    worst = max(group, key=badness)
    errors = [c.errors for c in group if c.errors is not None]
    equal = [c.equal.reshape(-1) for c in group if c.equal is not None]
    return Pooled(
        quantity,
        np.concatenate(errors) if errors else None,
        np.concatenate(equal) if equal else None,
        (worst.step, worst.layer),
        tuple(group),
    )


def judge_end_to_end(recording: Recording, pooled: dict[str, Pooled]) -> list[Verdict]:
    """The tolerances of a whole run."""
    verdicts: list[Verdict | None]
    if recording.mode == "f32_noqat":
        verdicts = [_at_most(pooled, "logits", "max", 5e-5), _at_most(pooled, "logits", "p50", 4e-6)]
        verdicts += [
            _at_most(pooled, quantity, "max", 1e-4)
            for quantity, entry in pooled.items()
            if entry.errors is not None and quantity != "logits"
        ]
        verdicts += [_equal(_without_ties(recording, pooled, quantity), quantity, 1.0) for quantity in _INTEGERS]
        return [v for v in verdicts if v is not None]
    deep = recording.config.num_hidden_layers > 16
    p50, agree = {
        "f32": (0.15, 0.85) if deep else (1e-3, 0.9),
        "fp8_f32": (0.15, 0.85) if deep else (1e-3, 0.9),
        "bf16": (0.4, 0.6) if deep else (0.1, 0.85),
        "fp8": (0.4, 0.6) if deep else (0.2, 0.8),
    }[recording.mode]
    verdicts = [
        _at_most(pooled, "logits", "p50", p50),
        _equal(pooled, "argmax", agree),
        _equal(pooled, "engram_hash", 1.0),
    ]
    return [v for v in verdicts if v is not None]


def judge_modules(recording: Recording, pooled: dict[str, Pooled]) -> list[Verdict]:
    """The tolerances of modules fed with recorded inputs."""
    verdicts: list[Verdict | None] = []
    floats = [q for q, p in pooled.items() if p.errors is not None]
    if recording.mode in ("f32_noqat", "f32", "fp8_f32"):
        exact = recording.mode == "f32_noqat"
        for quantity in floats:
            verdicts.append(_at_most(pooled, quantity, "p90", 2e-6))
            if exact:
                verdicts.append(_at_most(pooled, quantity, "max", 1e-6 if quantity == "pre_mix" else 1e-5))
            elif quantity != "index_score":  # one flipped step of a query moves every score of its row
                verdicts.append(_at_most(pooled, quantity, "share above 1e-4", 0.005))
        if exact:
            verdicts += [_equal(_without_ties(recording, pooled, quantity), quantity, 1.0) for quantity in _INTEGERS]
        return [v for v in verdicts if v is not None]
    for quantity in ("attn_q", "attn_o", "attn_out", "attn_out, same selection", "latent", "engram_h"):
        verdicts += [_at_most(pooled, quantity, "p50", 2e-2), _at_most(pooled, quantity, "p90", 0.1)]
    for quantity in ("draft attn_q", "draft attn_o", "draft attn_out"):
        verdicts += [_at_most(pooled, quantity, "p50", 2e-2), _at_most(pooled, quantity, "p90", 0.1)]
    for quantity in ("ffn_out", "draft ffn_out"):
        verdicts += [_at_most(pooled, quantity, "p50", 3e-3), _at_most(pooled, quantity, "p90", 1e-2)]
    # The residual is f32 inside: with the sub-layers' recorded outputs it has to be all but exact.
    verdicts += [_at_most(pooled, q, "p90", 1e-6) for q in ("pre_mix", "h", "attn_in", "ffn_in")]
    return [v for v in verdicts if v is not None]


def _without_ties(recording: Recording, pooled: dict[str, Pooled], quantity: str) -> dict[str, Pooled]:
    """Without the steps and layers where the recorder noted equal scores at the boundary: its choice there is no contract."""
    kind = {"index_idx": "index", "candidates": "blocks", "gate_idx": "gate"}.get(quantity)
    if kind is None or quantity not in pooled:
        return pooled
    return pool(c for c in pooled[quantity].parts if c.layer is None or not recording.tied(c.step, c.layer, kind))


def _at_most(pooled: dict[str, Pooled], quantity: str, measure: str, bound: float) -> Verdict | None:
    entry = pooled.get(quantity)
    if entry is None or entry.errors is None or not entry.errors.size:
        return None
    errors = entry.errors
    value = {
        "max": lambda: errors.max(),
        "p50": lambda: np.quantile(errors, 0.5),
        "p90": lambda: np.quantile(errors, 0.9),
        "share above 1e-4": lambda: 1.0 - (errors <= 1e-4).mean(),  # NaN counts as above
    }[measure]()
    return Verdict(quantity, measure, float(value), bound)


def _equal(pooled: dict[str, Pooled], quantity: str, bound: float) -> Verdict | None:
    entry = pooled.get(quantity)
    if entry is None or entry.share_equal is None:
        return None
    return Verdict(quantity, "share equal", entry.share_equal, bound)
