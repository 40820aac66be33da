"""A DeepSeek-V4 model computes what transformers computes: selections, logits, greedy tokens; whole, chunked, cached, ragged."""

from __future__ import annotations

import numpy as np
import pytest

from csa2_jax import forward, generate, init_cache, prefill

pytest.importorskip("transformers", reason="the extra 'oracle' brings transformers and torch")

from tests.v4.transformers_model import KINDS, reference, tokens

CLOSE = 1e-4


def close(found: np.ndarray, expected: np.ndarray) -> None:
    """Logits of a few tenths to ten, float32."""
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_selections_and_logits_are_those_of_transformers(kind: str) -> None:
    ref = reference(kind)
    ids = tokens(2, 300 if kind == "long" else 90, seed=1)
    logits, selected = ref.forward(ids)
    out = forward(ref.ours, ids, capture=("selections",))
    layers = ref.ours.config.plan.index_layers
    assert list(out.selections) == list(layers)
    for layer, theirs in zip(layers, selected, strict=True):
        ours = np.sort(np.asarray(out.selections[layer]), axis=-1)
        width = max(ours.shape[-1], theirs.shape[-1])
        padded = np.pad(theirs, [(0, 0), (0, 0), (0, width - theirs.shape[-1])], constant_values=-1)
        np.testing.assert_array_equal(ours, np.sort(padded, axis=-1), err_msg=f"layer {layer}")
    close(out.logits, logits)


# Around a group of CSA, two of them, the window, a group of HCA and two.
LENGTHS = {
    "flash": (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16, 17, 31, 32, 33),
    "pro": (1, 3, 4, 5, 6, 7, 8, 16, 33),
    "long": (1, 4, 8, 127, 128, 129, 255, 256, 257),
}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_any_length(kind: str) -> None:
    """Last-token logits of a prefill, then two decode steps, are those of a forward by transformers."""
    ref = reference(kind)
    for length in LENGTHS[kind]:
        ids = tokens(1, length + 2, seed=length)
        logits, _ = ref.forward(ids)
        cache = init_cache(ref.ours.config, 1, 512)
        out, cache = prefill(ref.ours, ids[:, :length], cache, chunk=64)
        close(out.logits, logits[:, length - 1])
        for i in (length, length + 1):
            out, cache = forward(ref.ours, ids[:, i : i + 1], cache)
            close(out.logits[:, 0], logits[:, i])


@pytest.mark.parametrize("kind", ["flash", "pro"])
def test_cached_decode_is_that_of_transformers(kind: str) -> None:
    ref = reference(kind)
    ids = tokens(2, 40, seed=3)
    expected = ref.decode(ids, first=5)
    cache = init_cache(ref.ours.config, 2, 64)
    out, cache = forward(ref.ours, ids[:, :5], cache)
    steps = [np.asarray(out.logits)]
    for i in range(5, 40):
        out, cache = forward(ref.ours, ids[:, i : i + 1], cache)
        steps.append(np.asarray(out.logits))
    close(np.concatenate(steps, axis=1), expected)


def test_greedy_tokens_are_those_of_transformers() -> None:
    import torch

    ref = reference("flash")
    for length in (3, 8, 21):
        ids = tokens(1, length, seed=50 + length)
        with torch.no_grad():
            expected = ref.model.generate(
                torch.from_numpy(ids), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=2
            )
        found = [event.token for event in generate(ref.ours, [ids[0].tolist()], max_new_tokens=24, stop_at_eos=False)]
        assert found == expected[0, length:].tolist()
