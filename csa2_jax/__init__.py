"""csa2-jax: DeepSeek-V4.1-Flash in JAX and Flax, with CSA2 compressed sparse attention.

The public door:

    config = ModelConfig.from_hf("dir/config.json")
    model = load_checkpoint("dir", compute_dtype="bfloat16")        # or init_model(config)
    cache = init_cache(model.config, batch=2, max_length=4096)
    out, cache = forward(model, tokens, cache)                      # appends; forward(model, tokens) needs no cache
    for event in generate(model, prompts, max_new_tokens=64): ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from csa2_jax.bound import Bound, forward
    from csa2_jax.checkpoint import load_checkpoint
    from csa2_jax.config import ModelConfig
    from csa2_jax.embedded import default_model
    from csa2_jax.engine import Engine, Event
    from csa2_jax.generation import TokenEvent, draft, generate
    from csa2_jax.model import ForwardOutput, Model, init_model
    from csa2_jax.numerics import Numerics
    from csa2_jax.prefilling import prefill
    from csa2_jax.sampling import Sampling
    from csa2_jax.state import Cache, init_cache
    from kernels_pallas import Unsupported

# Name -> where it lives. Loaded on first use, so that `csa2 --help` and `csa2 inspect` start without JAX.
_HOMES = {
    "Bound": "csa2_jax.bound",
    "Engine": "csa2_jax.engine",
    "Event": "csa2_jax.engine",
    "Sampling": "csa2_jax.sampling",
    "Cache": "csa2_jax.state",
    "ForwardOutput": "csa2_jax.model",
    "Model": "csa2_jax.model",
    "ModelConfig": "csa2_jax.config",
    "Numerics": "csa2_jax.numerics",
    "TokenEvent": "csa2_jax.generation",
    "Unsupported": "kernels_pallas",
    "default_model": "csa2_jax.embedded",
    "draft": "csa2_jax.generation",
    "forward": "csa2_jax.bound",
    "generate": "csa2_jax.generation",
    "init_cache": "csa2_jax.state",
    "init_model": "csa2_jax.model",
    "load_checkpoint": "csa2_jax.checkpoint",
    "prefill": "csa2_jax.prefilling",
}

__all__ = [
    "Bound",
    "Cache",
    "Engine",
    "Event",
    "ForwardOutput",
    "Model",
    "ModelConfig",
    "Numerics",
    "Sampling",
    "TokenEvent",
    "Unsupported",
    "default_model",
    "draft",
    "forward",
    "generate",
    "init_cache",
    "init_model",
    "load_checkpoint",
    "prefill",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
