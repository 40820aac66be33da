"""XLA on this CPU beside NumPy, and PyTorch where it is installed, doing the same in float32 as well as they can.

    index_select      products with all keys (or the candidates'), relu, weights, partition for the best
    sparse_attention  gather, two products, softmax with the sink
    compress          softmax over neighbouring rows, RMSNorm, rotation

All get the same arrays. Before anything is timed, all have to agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.kernels_calls import Call, Door
from benchmarks.kernels_measure import seconds_per_call

TOLERANCE: Final = 1e-4  # of the largest number of an output; float32 sums in another order stay far below


def numpy_sparse_attention(call: Call, q: Any, window: Any, first: Any, sink: Any, selection: Any, pool: Any) -> Any:
    """(o, lse); every query reads a full window here, as the calls of this program have it."""
    del first
    rows = sliding_window_view(window, call.sizes.window, axis=1)[:, 1:].swapaxes(2, 3)  # [B, T, W, H], a view
    batch = np.arange(q.shape[0])[:, None, None]
    picked = pool[0][batch, selection]
    scale = call.sizes.width**-0.5
    scores = np.concatenate([q @ rows.swapaxes(2, 3), q @ picked.swapaxes(2, 3)], axis=-1) * scale
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink[:, None] - peak)
    count = call.sizes.window
    o = (weights[..., :count] @ rows + weights[..., count:] @ picked) / total
    return o, (peak + np.log(total))[..., 0]


def numpy_index_select(call: Call, q: Any, w: Any, visible: Any, *rest: Any) -> Any:
    """The best entries in ascending order; among equals, any."""
    del visible
    *candidates, keys = rest
    positions = None
    if candidates:
        blocks, size = candidates[0], call.sizes.block
        positions = (blocks[..., None] * size + np.arange(size)).reshape(*blocks.shape[:2], -1)
        keys_BTPJ = keys[0][np.arange(q.shape[0])[:, None, None], positions]
        dots = q @ keys_BTPJ.swapaxes(2, 3)  # [B, T, I, P]
        scores = (w[:, :, None] @ np.maximum(dots, 0, out=dots))[:, :, 0]
    elif q.shape[1] <= 8:  # one product over all heads
        dots = q.reshape(q.shape[0], -1, q.shape[3]) @ keys[0].swapaxes(1, 2)
        dots = np.maximum(dots, 0, out=dots).reshape(*q.shape[:3], -1)
        scores = (w[:, :, None] @ dots)[:, :, 0]
    else:
        scores = np.zeros((*q.shape[:2], keys.shape[2]), np.float32)
        for head in range(q.shape[2]):
            dots = q[:, :, head] @ keys[0].swapaxes(1, 2)
            scores += np.maximum(dots, 0, out=dots) * w[:, :, head, None]
    count = min(call.sizes.topk, scores.shape[-1])
    best = np.argpartition(scores, -count, axis=-1)[..., -count:]
    if positions is not None:
        best = np.take_along_axis(positions, best, axis=-1)
    return (np.sort(best, axis=-1).astype(np.int32),)


def numpy_compress(call: Call, c: Any, z: Any, c_half: Any, z_half: Any, *rest: Any) -> Any:
    """(latent, entry), zero behind the complete entries."""
    phase, count, norm, cos, sin = rest
    ratio = call.sizes.ratio
    pooled = np.zeros((c.shape[0], cos.shape[1], c.shape[2]), np.float32)
    for b in range(c.shape[0]):
        pairs = ((c_half, c), (z_half, z))
        rows = [np.concatenate([half[b, : phase[b]], new[b, : count[b]]]) for half, new in pairs]
        made = rows[0].shape[0] // ratio
        values, logits = (a[: made * ratio].reshape(made, ratio, -1) for a in rows)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        pooled[b, :made] = (weights * values).sum(axis=1) / weights.sum(axis=1)
    latent = pooled / np.sqrt(np.mean(pooled * pooled, axis=-1, keepdims=True) + 1e-20) * norm
    entry, start = latent.copy(), c.shape[2] - 2 * cos.shape[-1]
    even, odd = latent[..., start::2], latent[..., start + 1 :: 2]
    entry[..., start::2] = even * cos - odd * sin
    entry[..., start + 1 :: 2] = even * sin + odd * cos
    return latent, entry


NUMPY: Final[dict[Door, Callable[..., Any]]] = {
    "sparse_attention": numpy_sparse_attention,
    "index_select": numpy_index_select,
    "compress": numpy_compress,
}


def torch_functions() -> tuple[dict[Door, Callable[..., Any]], str]:
    """The same in PyTorch (arguments as tensors), or nothing and why."""
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError as error:
        return {}, f"torch skipped: {error}"

    def attention(call: Call, q: Any, window: Any, first: Any, sink: Any, selection: Any, pool: Any) -> Any:
        del first
        rows = window.unfold(1, call.sizes.window, 1)[:, 1:].transpose(2, 3)
        batch = torch.arange(q.shape[0])[:, None, None]
        read = torch.cat([rows, pool[0][batch, selection.long()]], dim=2)
        scores = q @ read.transpose(2, 3) * call.sizes.width**-0.5
        with_sink = torch.cat([scores, sink[:, None].expand(*scores.shape[:3], 1)], dim=-1)
        lse = torch.logsumexp(with_sink, dim=-1)
        return torch.exp(scores - lse[..., None]) @ read, lse

    def index(call: Call, q: Any, w: Any, visible: Any, *rest: Any) -> Any:
        del visible
        *candidates, keys = rest
        if candidates:
            blocks, size = candidates[0].long(), call.sizes.block
            positions = (blocks[..., None] * size + torch.arange(size)).flatten(2)
            picked = keys[0][torch.arange(q.shape[0])[:, None, None], positions]
            scores = (w[:, :, None] @ torch.relu(q @ picked.transpose(2, 3)))[:, :, 0]
            best = torch.gather(positions, 2, torch.topk(scores, min(call.sizes.topk, scores.shape[-1])).indices)
        elif q.shape[1] <= 8:
            dots = torch.relu(q.flatten(1, 2) @ keys[0].transpose(1, 2)).unflatten(1, q.shape[1:3])
            best = torch.topk((w[:, :, None] @ dots)[:, :, 0], min(call.sizes.topk, dots.shape[-1])).indices
        else:
            scores = torch.zeros(*q.shape[:2], keys.shape[2])
            for head in range(q.shape[2]):
                scores += torch.relu(q[:, :, head] @ keys[0].transpose(1, 2)) * w[:, :, head, None]
            best = torch.topk(scores, min(call.sizes.topk, scores.shape[-1])).indices
        return (torch.sort(best, dim=-1).values.int(),)

    return {"sparse_attention": attention, "index_select": index}, ""


def disagreement(call: Call, args: Sequence[np.ndarray], ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    """How two results of a call differ, or None. Of selections the scores are compared: equals may be taken in any order."""
    if len(ours) != len(theirs):
        return f"{len(ours)} outputs and {len(theirs)}"
    for i, (a, b) in enumerate(zip(map(np.asarray, ours), map(np.asarray, theirs), strict=True)):
        if call.door == "index_select":
            a, b = _scores(args, a), _scores(args, b)
        if a.shape != b.shape:
            return f"output {i}: {a.shape} and {b.shape}"
        error = float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-30))
        if not error <= TOLERANCE:
            return f"output {i}: {error:.2g} of the largest number apart, {TOLERANCE:.0e} allowed"
    return None


def _scores(args: Sequence[np.ndarray], selection: np.ndarray) -> np.ndarray:
    """Sorted scores of selected entries; an entry that is selected twice has NaN, which agrees with nothing."""
    q, w, keys = args[0], args[1], args[-1]
    picked = keys[0][np.arange(q.shape[0])[:, None, None], np.maximum(selection, 0)]
    scores = np.einsum("bti,btik->btk", w, np.maximum(q @ picked.swapaxes(2, 3), 0))
    twice = (selection[..., 1:] == selection[..., :-1]) & (selection[..., 1:] >= 0)
    scores[..., 1:][twice] = np.nan
    return np.sort(np.where(selection < 0, -np.inf, scores).clip(-1e30), axis=-1)


def seconds_on_host(function: Callable[[], Any], repeat: int) -> float:
    """Median of `repeat` calls, after one to warm up."""
    function()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def compare(
    call: Call, *, repeat: int, xla: Callable[..., Any] | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """(seconds by who, what is wrong by who) for one call; `xla` stands in for our function in tests."""
    ours = xla or call.function("xla")
    args = call.inputs(0)
    held = [np.asarray(a) for a in args]
    expected = NUMPY[call.door](call, *held)
    wrong = disagreement(call, held, jax.tree.leaves(jax.jit(ours)(*args)), expected)
    if wrong is not None:
        return {}, {"xla": wrong}
    seconds = {"xla": seconds_per_call(ours, args, repeat=repeat)}
    seconds["numpy"] = seconds_on_host(lambda: NUMPY[call.door](call, *held), repeat)
    functions, _ = torch_functions()
    faults = {}
    if call.door in functions:
        import torch  # type: ignore[import-not-found]

        tensors = [torch.tensor(a) for a in held]
        with torch.no_grad():
            made = [a.numpy() for a in functions[call.door](call, *tensors)]
            wrong = disagreement(call, held, made, expected)
            if wrong is None:
                seconds["torch"] = seconds_on_host(lambda: functions[call.door](call, *tensors), repeat)
            else:
                faults["torch"] = wrong
    return seconds, faults
