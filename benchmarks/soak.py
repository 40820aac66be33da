"""A soak of the engine: random requests, cancellations, nonsense and early closes for a while, every answer checked.

    python benchmarks/soak.py --minutes 30

A random small model (4 layers of all modes, draft head) serves prompts that often begin alike. Requests arrive at random; some
are cancelled, some streams are closed early, some requests make no sense and must be refused. Every answer is compared with that
of an engine of its own without reuse (and for greedy requests without drafts), token by token and by log-probability; where two
tokens were equally likely (--tie, in nats), greedy answers may part, which is counted as a tie. No program may be compiled after
warming up, and memory, read from the operating system, must stay where it is after a third of the time, when the prefix store is
full. Prints a line every ten seconds, and draws memory over time with --png.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from csa2_jax import Bound, Engine, ModelConfig, Sampling, init_model

# As few layers as a model with everything can have: ratios 0, 2, 1, 1; candidates; a draft head.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 256,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 16,
        "compress_ratios": [0, 2, 1, 1, 0],
        "compress_rope_theta": 160000.0,
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 4,
        "dspark_noise_token_id": 255,
        "dspark_target_layer_ids": [2, 3],
        "dspark_markov_rank": 8,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
}
NONSENSE: tuple[dict[str, Any], ...] = (
    {"prompt": []},
    {"prompt": [10**6]},
    {"prompt": [-1]},
    {"prompt": [1.5]},
    {"prompt": "text"},
    {"prompt": [5], "max_new_tokens": 0},
    {"prompt": [5], "max_new_tokens": 10**6},
    {"prompt": [5], "stop": "x"},
    {"prompt": [5], "sampling": 3},
)

WRONG_LOGPROB = 1e-3  # nats; in half an hour the largest of half a million was 3e-4, from sums in another order


@dataclasses.dataclass
class Counts:
    """What happened."""

    answers: int = 0
    tokens: int = 0
    checked: int = 0
    wrong: int = 0
    ties: int = 0
    largest_error: float = 0.0  # of a log-probability, nats
    cancelled: int = 0
    closed: int = 0
    refused: int = 0
    accepted_nonsense: int = 0


def resident() -> int:
    """Bytes of this process in memory."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise OSError("this system tells no resident memory in /proc/self/status")


class Soak:
    """The engine under test, the one that answers are compared with, and what is known already."""

    def __init__(self, storage: Literal["f32", "packed"], slots: int, seed: int, tie: float = 1e-5) -> None:
        self.tie = tie
        model = init_model(ModelConfig.from_hf(write_config()), compute_dtype="float32", fake_quant=storage == "packed")
        self.bound = Bound.of(_livelier(model))
        options: dict[str, Any] = {"max_length": 1024, "chunk": 64, "storage": storage}
        self.engine = Engine(self.bound, slots=slots, speculative=True, prefix_bytes=1 << 22, **options)
        # Of as many slots, so that the shapes are the same: a product of other shape may round otherwise.
        alone: dict[str, Any] = {"slots": slots, "prefix_bytes": 0, "decoder": "full"} | options
        self.reference = Engine(self.bound, **alone)
        self.drafting_reference = Engine(
            self.bound, speculative=True, **alone
        )  # drafts change what is drawn, not from what
        self.known: dict[tuple, list[tuple[int, float]]] = {}
        self.rng, self.counts = np.random.default_rng(seed), Counts()
        self.running: dict[int, tuple[tuple, list[tuple[int, float]]]] = {}

    def expected(self, key: tuple) -> list[tuple[int, float]]:
        """The answer, (token, log-probability), to a request that shares nothing with anyone."""
        if key not in self.known:
            prompt, count, sampling = key
            engine = self.drafting_reference if sampling.temperature else self.reference
            ticket = engine.submit(prompt, max_new_tokens=count, sampling=sampling)
            self.known[key] = [(e.token, e.logprob or 0.0) for e in engine.stream(ticket) if e.token is not None]
        return self.known[key]

    def request(self) -> tuple:
        """One of a few hundred requests, so that answers are compared more often than computed."""
        which = int(self.rng.integers(300))
        rng = np.random.default_rng(which)
        base = np.random.default_rng(which % 5).integers(3, 256, 700)
        length = int(rng.integers(1, 600))
        own = rng.integers(3, 256, int(rng.integers(0, 60)))
        prompt = tuple(np.concatenate([base[:length], own]).tolist())
        sampling = Sampling() if which % 3 else Sampling(0.8, top_k=20, top_p=0.9, seed=which)
        return prompt, int(rng.integers(1, 40)), sampling

    def turn(self) -> None:
        """Some arrivals, one step, what it brought, and now and then a cancellation, an early close or nonsense."""
        if len(self.running) < 12 and self.rng.random() < 0.4:
            key = self.request()
            ticket = self.engine.submit(key[0], max_new_tokens=key[1], sampling=key[2])
            self.running[ticket] = (key, [])
        if self.rng.random() < 0.05:
            try:
                self.engine.submit(**NONSENSE[self.rng.integers(len(NONSENSE))])
                self.counts.accepted_nonsense += 1
            except ValueError:
                self.counts.refused += 1
        if self.running and self.rng.random() < 0.03:
            ticket = int(self.rng.choice(list(self.running)))
            if self.engine.cancel(ticket):
                self.counts.cancelled += 1
        for event in self.engine.step():
            self._take(event)
        if self.running and self.rng.random() < 0.02:
            self._close_early(int(self.rng.choice(list(self.running))))

    def _take(self, event: Any) -> None:
        if event.ticket not in self.running:
            return
        key, tokens = self.running[event.ticket]
        if event.token is not None:
            tokens.append((event.token, event.logprob))
            self.counts.tokens += 1
        if event.finished is None:
            return
        del self.running[event.ticket]
        self._check(key, tokens, whole=event.finished != "cancelled")

    def _check(self, key: tuple, found: list[tuple[int, float]], *, whole: bool) -> None:
        """Compare an answer, or what came of it, with the expected one."""
        expected = self.expected(key)
        self.counts.answers += whole
        for at, ((token, logprob), (right, its)) in enumerate(zip(found, expected, strict=False)):
            self.counts.checked += 1
            error = abs(logprob - its)
            if token != right and not key[2].temperature and error <= self.tie:
                self.counts.ties += 1  # each is the largest of its own run: both are, within rounding
                return
            if token != right or error > WRONG_LOGPROB:
                self._wrong(key, f"token {at} is {token} ({logprob:.6f}) and not {right} ({its:.6f})")
                return
            self.counts.largest_error = max(self.counts.largest_error, error)
        if len(found) > len(expected) or (whole and len(found) != len(expected)):
            self._wrong(key, f"{len(found)} tokens and not {len(expected)}")

    def _wrong(self, key: tuple, what: str) -> None:
        self.counts.wrong += 1
        print(f"WRONG: {len(key[0])} prompt tokens, {key[2]}: {what}", flush=True)

    def _close_early(self, ticket: int) -> None:
        """Stream one request for two events and leave; others' events of that time go to them."""
        stream = self.engine.stream(ticket)
        for _ in range(2):
            event = next(stream, None)
            if event is None:
                break
            self._take(event)
        stream.close()
        self.running.pop(ticket, None)
        self.counts.closed += 1


def _livelier(model: Any) -> Any:
    """The initial weights times four: answers then depend on the whole prompt and rarely hang in a loop."""
    from flax import nnx

    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda a: a * 4 if a.ndim > 1 and a.dtype != np.uint8 else a, state))


def write_config() -> Path:
    """The configuration as a file, which is what `ModelConfig.from_hf` reads."""
    import tempfile

    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


def main(
    minutes: float = 30.0,
    storage: Literal["f32", "packed"] = "f32",
    slots: int = 4,
    seed: int = 0,
    tie: float = 1e-5,
    png: Path | None = None,
    json_file: Path | None = None,
) -> int:
    """Exercise the engine for some minutes; exit status 1 if an answer was wrong, nonsense was accepted or memory grew.

    Args:
        minutes: how long; the first third warms up.
        storage: of the cache, packed with roundings on.
        slots: rows that decode together.
        seed: of everything random.
        tie: greedy answers may part where their log-probabilities differ by no more than this.
        png: draw memory over time.
        json_file: write the figures.
    """
    soak = Soak(storage, slots, seed, tie)
    buckets = sum(engine.buckets for engine in (soak.engine, soak.reference, soak.drafting_reference))
    for engine in (soak.engine, soak.reference, soak.drafting_reference):
        engine.warm_up()
    programs = soak.engine.programs()
    print(f"{programs} programs compiled, at most {buckets} in buckets", flush=True)
    start, told = time.monotonic(), 0.0
    memory: list[tuple[float, int]] = []
    while (now := time.monotonic() - start) < 60 * minutes:
        soak.turn()
        if now - told >= 10:
            told = now
            memory.append((now, resident()))
            counts = soak.counts
            print(
                f"[{now / 60:5.1f} min] {counts.answers} answers, {counts.tokens} tokens, {counts.checked} checked, "
                f"{counts.wrong} wrong, {counts.ties} ties; "
                f"{counts.cancelled} cancelled, {counts.closed} closed early, {counts.refused} refused; "
                f"{memory[-1][1] / 2**20:.0f} MiB",
                flush=True,
            )
    settled = [size for at, size in memory if at > 20 * minutes] or [resident()]
    half = len(settled) // 2
    growth = float(np.median(settled[half:]) - np.median(settled[: max(half, 1)]))
    counts, acceptance = soak.counts, soak.engine.acceptance
    low, high, grown = (size / 2**20 for size in (min(settled), max(settled), growth))
    print(f"largest error of a log-probability: {counts.largest_error:.1e} nats")
    print(f"memory after the first third: {low:.0f} to {high:.0f} MiB, growth of the median {grown:.1f} MiB")
    store = soak.engine.prefixes
    print(
        f"prefix store: {store.hits} hits, {store.reused_tokens} tokens reused, {store.nbytes / 2**20:.1f} MiB; "
        f"{acceptance.tokens_per_round:.2f} tokens a round"
    )
    flat = growth < 16 * 2**20
    programs_after = soak.engine.programs()
    if json_file is not None:
        figures = dataclasses.asdict(counts) | {
            "minutes": minutes,
            "storage": storage,
            "growth_bytes": growth,
            "memory": memory,
            "machine": platform.processor() or platform.machine(),
            "jax": jax.__version__,
            "programs": [programs, programs_after],
        }
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if png is not None:
        _draw(memory, png)
    if programs_after != programs:
        print(f"{programs_after - programs} programs were compiled after warming up")
    good = (
        flat and programs_after == programs and not counts.wrong and not counts.accepted_nonsense and counts.answers > 0
    )
    print("all well" if good else "NOT well", flush=True)
    return 0 if good else 1


def _draw(memory: list[tuple[float, int]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot([at / 60 for at, _ in memory], [size / 2**20 for _, size in memory])
    top = 1.2 * max((size for _, size in memory), default=1) / 2**20
    axes.set(xlabel="minutes", ylabel="resident memory, MiB", ylim=(0, top), title="Engine soak")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
