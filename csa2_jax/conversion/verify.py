"""Are two checkpoints the same? Any two layouts, compared tensor by tensor while they stream past."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from csa2_jax.config import ModelConfig
from csa2_jax.conversion.converted import ConvertedFiles
from csa2_jax.conversion.export import row_blocks
from csa2_jax.conversion.opening import open_checkpoint
from csa2_jax.conversion.stacks import Files
from csa2_jax.conversion.views import Widened
from csa2_jax.manifest import TensorSpec
from csa2_jax.progress import byte_progress
from csa2_jax.safetensors_io import TensorFiles
from csa2_jax.token_map import find_token_map


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that is not the same; `largest` is the largest absolute error where values were compared."""

    name: str
    what: str
    largest: float = 0.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Of two checkpoints: `differences` is empty where they are the same, bit for bit or value for value."""

    tensors: int
    nbytes: int
    exact: int  # compared bit for bit; the others by value, where one side is dequantised
    differences: tuple[Difference, ...]
    digests: dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Side:
    config: ModelConfig
    files: TensorFiles | ConvertedFiles
    specs: dict[str, TensorSpec]
    token_map: np.ndarray | None


def _open(directory: str | os.PathLike[str]) -> _Side:
    opened = open_checkpoint(directory)
    specs = {spec.name: spec for spec in opened.specs}
    return _Side(opened.config, opened.files, specs, find_token_map(Path(directory), opened.config))


def verify(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, digests: bool = False, workers: int = 4
) -> Comparison:
    """Compare two checkpoints of any layout by content: names, shapes, dtypes, values, configuration, token map.

    Tensors that both store alike are compared bit for bit. Where one side holds a quantised weight and the other its values, the
    values are compared, and the largest error is told. digests: also a BLAKE2b digest of every tensor of `a`.

    Raises what opening a checkpoint raises.
    """
    left, right = _open(a), _open(b)
    differences = _configurations(left.config, right.config)
    if (left.token_map is None) != (right.token_map is None) or not np.array_equal(left.token_map, right.token_map):  # type: ignore[arg-type]
        differences.append(Difference("token map", "the compressed ids of the tokens differ"))
    # Scales that one side has folded into its weights are no difference of their own.
    folded = {
        name
        for side, other in ((left, right), (right, left))
        for name in side.specs
        if name.endswith(".scale")
        and name not in other.specs
        and name.removesuffix(".scale") + ".weight" in other.specs
    }
    for side, other, where in ((left, right, b), (right, left, a)):
        absent = [name for name in side.specs if name not in other.specs and name not in folded]
        differences += [Difference(name, f"is not in {where}") for name in absent]
    both = [name for name in left.specs if name in right.specs]
    total = sum(left.specs[name].nbytes for name in both)
    found: dict[str, str] = {}
    exact = 0
    with byte_progress("comparing", total, lines=True) as advance, ThreadPoolExecutor(max(workers, 1)) as pool:
        for name, (same_storage, difference, digest) in zip(
            both, pool.map(lambda name: _tensor(left, right, name, digests, advance), both), strict=True
        ):
            exact += same_storage
            if difference is not None:
                differences.append(difference)
            if digest:
                found[name] = digest
    return Comparison(len(both), total, exact, tuple(differences), found)


def _tensor(left: _Side, right: _Side, name: str, digests: bool, advance: Any) -> tuple[bool, Difference | None, str]:
    """(stored alike, difference, digest) of one tensor that both have."""
    one, two = left.specs[name], right.specs[name]
    hashed = hashlib.blake2b(digest_size=16) if digests else None
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        views = _values(left, name), _values(right, name)
        if None in views or views[0][1] != views[1][1]:  # type: ignore[index]
            advance(one.nbytes)
            return False, Difference(name, f"is {one.dtype} {list(one.shape)} and {two.dtype} {list(two.shape)}"), ""
        (a, spec), (b, _) = views  # type: ignore[misc]
        largest, wrong = 0.0, 0
        for block in row_blocks(spec, wide=True):
            x, y = (side.part(name, block).astype(np.float32, copy=False) for side in (a, b))
            wrong_here, largest_here = _apart(x, y)
            wrong, largest = wrong + wrong_here, max(largest, largest_here)
        if hashed is not None:
            for block in row_blocks(one):
                hashed.update(np.ascontiguousarray(left.files.part(name, block)).reshape(-1).view(np.uint8).data)
        advance(one.nbytes)
        different = Difference(name, f"{wrong} values differ, by {largest:.3g} at most", largest) if wrong else None
        return False, different, hashed.hexdigest() if hashed is not None else ""
    wrong, largest, where = 0, 0.0, None
    for block in row_blocks(one):
        a, b = (np.ascontiguousarray(side.files.part(name, block)) for side in (left, right))
        raw = [v.reshape(-1).view(np.uint8) for v in (a, b)]
        if hashed is not None:
            hashed.update(raw[0].data)
        advance(a.nbytes)
        if not np.array_equal(raw[0], raw[1]):
            unequal = (raw[0] != raw[1]).reshape(a.size, -1).any(axis=1).reshape(a.shape)
            wrong += int(unequal.sum())
            if where is None:
                first = [int(i) for i in np.argwhere(unequal)[0]]
                where = [first[0] + (block[0].start if block else 0), *first[1:]]
            if a.dtype.kind not in "iub":
                largest = max(largest, _apart(a[unequal], b[unequal])[1])
    digest = hashed.hexdigest() if hashed is not None else ""
    if not wrong:
        return True, None, digest
    size = f", by {largest:.3g} at most" if largest else ""
    return True, Difference(name, f"{wrong} elements differ{size}, first at {where}", largest), digest


def _apart(a: np.ndarray, b: np.ndarray) -> tuple[int, float]:
    """(how many values are not equal, the largest finite error); NaN equals NaN."""
    a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(a[unequal].astype(np.float64) - b[unequal].astype(np.float64))
    return int(unequal.sum()), float(np.max(error[np.isfinite(error)], initial=0))


def _values(side: _Side, name: str) -> tuple[Files, TensorSpec] | None:
    """The tensor as f32 values, with the shape they have; None for what has no values of its own."""
    spec = side.specs[name]
    if spec.dtype == "F8_E8M0":
        return None
    wide = dataclasses.replace(spec, dtype="F32", shape=spec.logical_shape)
    if spec.dtype == "F32":
        return side.files, wide
    return Widened(side.files, list(side.specs.values()), [wide]), wide


def _configurations(a: ModelConfig, b: ModelConfig) -> list[Difference]:
    differences = []
    for field in dataclasses.fields(ModelConfig):
        one, two = getattr(a, field.name), getattr(b, field.name)
        if one != two and field.name not in ("inert", "quantized"):
            differences.append(Difference(f"config.json {field.name}", f"is {one!r:.60} and {two!r:.60}"))
    return differences


def report(comparison: Comparison, a: Any, b: Any, shown: int = 20) -> Sequence[str]:
    """Lines for people."""
    by_value = comparison.tensors - comparison.exact
    lines = [
        f"{comparison.tensors:,} tensors, {comparison.nbytes:,} bytes: {comparison.exact:,} compared bit for bit"
        + (f", {by_value:,} by value" if by_value else "")
    ]
    lines += [f"  {d.name} {d.what}" for d in comparison.differences[:shown]]
    if len(comparison.differences) > shown:
        lines.append(f"  and {len(comparison.differences) - shown} more")
    if comparison.differences:
        lines.append(f"{a} and {b} differ")
    else:
        lines.append(f"{a} and {b} hold the same")
    return lines
