"""The attention of DeepSeek's models from the first to this one: what each keeps of a token, as a formula and as arrays.

    MHA   2 N c b                       keys and values of N heads of c channels, b bytes a number
    GQA   2 g c b                       of g groups of heads; MQA: g = 1
    MLA   (512 + 64) b                  one latent and one rotated key for all heads
    DSA   656 + 132                     the latent in fp8, its scales, the rotated key in bf16; an index key in fp8 and its scale
    CSA   (584 + 68) / 4                per 4 tokens an entry in fp8 (448 + 128 + 8) and an index key in fp4 (64 + 4)
    HCA   584 / 128
    CSA2  sum of 356 / m over the layers that make a pool; every other layer reads one of those

Per layer and token. Pure Python and NumPy. Sources: arXiv 2401.02954, 2405.04434, 2412.19437, 2512.02556, 2609.19969; the
released DeepSeek-V4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from csa2_jax.config import ModelConfig
from csa2_jax.manifest import cached_bytes_per_token, pool_entry_bytes
from csa2_jax.plan import Mode

_BF16: Final = np.dtype(np.uint16)  # NumPy has no bf16; what counts is its size
_FP8: Final = np.dtype(np.uint8)
_F32: Final = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Ancestor:
    """A model whose cache grows alike in all layers.

    per_token: shapes and dtypes of what a layer stores per token. bytes_per_layer: the same by the formula.
    """

    name: str
    attention: str
    layers: int
    formula: str
    bytes_per_layer: int
    per_token: tuple[tuple[tuple[int, ...], np.dtype], ...]

    @property
    def bytes_per_token(self) -> int:
        """By the formula."""
        return self.layers * self.bytes_per_layer

    def measured(self, tokens: int = 2) -> float:
        """Bytes per token of arrays made as the cache would hold them."""
        made = [np.empty((self.layers, tokens, *shape), dtype) for shape, dtype in self.per_token]
        return sum(a.nbytes for a in made) / tokens


ANCESTORS: Final = (
    Ancestor("DeepSeek 67B", "GQA", 95, "95 x 2 x 8 x 128 x 2", 2 * 8 * 128 * 2, (((2, 8, 128), _BF16),)),
    Ancestor("DeepSeek-V2", "MLA", 60, "60 x (512 + 64) x 2", (512 + 64) * 2, (((512,), _BF16), ((64,), _BF16))),
    Ancestor("DeepSeek-V3", "MLA", 61, "61 x (512 + 64) x 2", (512 + 64) * 2, (((512,), _BF16), ((64,), _BF16))),
    Ancestor(
        "DeepSeek-V3.2",
        "DSA",
        61,
        "61 x (656 + 132)",
        656 + 132,
        (((512,), _FP8), ((4,), _F32), ((64,), _BF16), ((128,), _FP8), ((1,), _F32)),
    ),
)
RELEASED: Final = {"DeepSeek-V4-Flash": "v4_flash", "DeepSeek-V4-Pro": "v4_pro", "DeepSeek-V4.1-Flash": "v41_flash"}


def released_config(name: str) -> ModelConfig:
    """The released configuration that configs/NAME.json holds."""
    inside = Path(__file__).parent / "embedded" / f"{name}.json"
    return ModelConfig.from_hf(inside if inside.is_file() else Path(__file__).parents[1] / "configs" / f"{name}.json")


@dataclasses.dataclass(frozen=True)
class Kept:
    """What one model keeps per token: by its formula, and of arrays."""

    name: str
    attention: str
    formula: str
    bytes_per_token: float
    measured: float


def cache_formula(config: ModelConfig) -> str:
    """How the bytes per token of a configuration add up, as `21 x 652 / 4 + 20 x 584 / 128`."""
    groups: dict[tuple[Mode, int], int] = {}
    for spec in config.plan.layers:
        if spec.mode.makes_pool:
            groups[spec.mode, spec.ratio] = groups.get((spec.mode, spec.ratio), 0) + 1
    return " + ".join(f"{n} x {pool_entry_bytes(config, mode):g} / {m}" for (mode, m), n in groups.items())


def kept(measure: Callable[[ModelConfig], float]) -> list[Kept]:
    """Every model of the line, oldest first; `measure` tells the bytes per token of a configuration's arrays."""
    found = [Kept(a.name, a.attention, a.formula, a.bytes_per_token, a.measured()) for a in ANCESTORS]
    for name, file in RELEASED.items():
        config = released_config(file)
        attention = "CSA + HCA" if config.generation.own_pools else "CSA2"
        found.append(Kept(name, attention, cache_formula(config), cached_bytes_per_token(config), measure(config)))
    return found
