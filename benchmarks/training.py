"""Step time and memory of training against the length of a row, beside a plain model with dense attention.

    python benchmarks/training.py            lengths 256 to 2,048, one row each, about ten minutes on two CPU cores
    python benchmarks/training.py --quick    the two shortest

Both models have the same width, depth, heads and active width of the feed-forward, and both run gradients of the same
cross-entropy on as many tokens in the same process; the dense one is a few lines of JAX below: causal softmax attention over
everything. Printed per length: seconds of forward and backward, temporary memory of the compiled program, and the exponents
between neighbouring lengths (1 is linear, 2 quadratic). CSA2 reads window + K entries per query whatever the length; what
grows faster is scoring every visible entry for the index, whose constant is small.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from csa2_jax import ModelConfig, init_model
from train.losses import cross_entropy
from train.parameters import Choice, take_apart
from train.recall import plan_config
from train.step import Batch, LossSettings, losses, objective

PLAN = "W F2 U F1 I U"
LENGTHS = (256, 512, 1024, 2048)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one gradient."""

    seconds: float
    memory: int  # temporary bytes of the compiled program


def csa2(config: ModelConfig, tokens: int) -> tuple[Any, Any]:
    """(gradient function, its arguments) of the CSA2 model on one row."""
    model = init_model(config, 0, compute_dtype="float32", fake_quant=False)
    together, parts = take_apart(model, Choice())
    settings = LossSettings(remat="layer")
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, tokens)).astype(np.int32)
    zeros = np.zeros_like(ids)
    batch = Batch(ids, np.roll(ids, -1, 1), np.ones(ids.shape, np.float32), zeros, zeros)

    def minimised(trained: Any, batch: Any) -> jax.Array:
        sums = losses(together(trained | parts.loads | parts.frozen), batch, settings, 1, jax.random.key(0))
        return objective(sums, settings, jnp.float32(tokens), jnp.float32(tokens))

    return jax.grad(minimised), (parts.trained, batch)


def dense(config: ModelConfig, tokens: int) -> tuple[Any, Any]:
    """The same of a plain transformer: attention of every token to all before it, a feed-forward as wide as what is active."""
    n, h, d = config.num_attention_heads, config.head_dim, config.hidden_size
    f = config.moe_intermediate_size * (config.num_experts_per_tok + 1)
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((config.num_hidden_layers, *shape)) * 0.02, jnp.float32)

    params = {
        "embed": jnp.asarray(rng.standard_normal((config.vocab_size, d)), jnp.float32),
        "layers": {
            "q": weight(d, n * h),
            "k": weight(d, n * h),
            "v": weight(d, n * h),
            "o": weight(n * h, d),
            "w1": weight(d, f),
            "w3": weight(d, f),
            "w2": weight(f, d),
        },
    }
    ids = jnp.asarray(rng.integers(0, config.vocab_size, tokens), jnp.int32)

    def normed(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    @jax.checkpoint
    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        q, k, v = (jnp.einsum("td,de->te", normed(x), w[name]).reshape(-1, n, h) for name in "qkv")
        s = jnp.einsum("tnh,snh->nts", q, k) * h**-0.5
        s = jnp.where(jnp.tril(jnp.ones(s.shape[1:], bool)), s, -jnp.inf)
        x = x + jnp.einsum("nts,snh->tnh", jax.nn.softmax(s, axis=-1), v).reshape(len(x), -1) @ w["o"]
        y = normed(x)
        return x + (jax.nn.silu(y @ w["w1"]) * (y @ w["w3"])) @ w["w2"], None

    def minimised(params: Any, ids: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(layer, params["embed"][ids], params["layers"])
        return cross_entropy(normed(x), params["embed"], jnp.roll(ids, -1), jnp.ones(len(ids))).loss

    return jax.grad(minimised), (params, ids)


def measure(gradient: Any, arguments: Any, repeats: int) -> Cost:
    """The median of a few runs, and the program's own account of its memory."""
    compiled = jax.jit(gradient).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        taken.append(time.perf_counter() - began)
    memory = compiled.memory_analysis()
    return Cost(statistics.median(taken), 0 if memory is None else memory.temp_size_in_bytes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the two shortest lengths")
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the median counts")
    arguments = parser.parse_args()
    config = dataclasses.replace(plan_config(PLAN, 256, window=32, topk=16), max_position_embeddings=1 << 20)
    sizes = f"D = {config.hidden_size}, W = {config.sliding_window}, K = {config.index_topk}"
    print(f"{PLAN}, {sizes}; {jax.devices()[0].device_kind}")
    heading = f"{'tokens':>7} {'CSA2 s':>8} {'dense s':>8} {'ratio':>6} {'CSA2 MB':>8} {'dense MB':>9}"
    print(f"{heading}   exponents: time, memory (CSA2 | dense)")
    before: tuple[int, Cost, Cost] | None = None
    for tokens in LENGTHS[:2] if arguments.quick else LENGTHS:
        ours, theirs = (measure(*f(config, tokens), arguments.repeats) for f in (csa2, dense))
        text = ""
        if before is not None:
            grown = math.log(tokens / before[0])
            powers = [
                math.log(new / old) / grown
                for new, old in (
                    (ours.seconds, before[1].seconds),
                    (ours.memory, before[1].memory),
                    (theirs.seconds, before[2].seconds),
                    (theirs.memory, before[2].memory),
                )
            ]
            text = f"{powers[0]:5.2f} {powers[1]:5.2f} | {powers[2]:5.2f} {powers[3]:5.2f}"
        print(
            f"{tokens:7,} {ours.seconds:8.3f} {theirs.seconds:8.3f} {ours.seconds / theirs.seconds:6.2f} "
            f"{ours.memory / 1e6:8.1f} {theirs.memory / 1e6:9.1f}   {text}",
            flush=True,
        )
        before = (tokens, ours, theirs)


if __name__ == "__main__":
    main()
