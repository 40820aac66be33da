"""Tile sizes tried on this device, and the record of what was measured: `kernels_pallas/tuned/<device>.json`.

A record makes `implementation=None` prefer the kernels on devices of its kind (`kernels_pallas.dispatch`), so it is written only
where every call agreed with XLA. Beside what was measured it holds the tile sizes that won, as record[door][key].
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import jax

from benchmarks.kernels_calls import DOORS, Call, Door
from benchmarks.kernels_measure import Ceilings, Measurement, measure
from kernels_pallas import dispatch


@dataclasses.dataclass(frozen=True)
class Tunable:
    """Tile sizes that a device may want otherwise; `key` is where its record keeps them: record[door][key]."""

    door: str
    key: str
    choices: tuple[Mapping[str, Any], ...]


def _grid(**values: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    """Every combination."""
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))


_GPU_ATTENTION = {"heads": (64,), "rows": (32, 64), "warps": (4, 8)}
CANDIDATES: Final[dict[tuple[str, Door], Tunable]] = {
    ("pallas_gpu", "sparse_attention"): Tunable(
        "sparse_attention", "forward", _grid(**_GPU_ATTENTION, stages=(1, 2, 3), splits=(0,))
    ),
    ("pallas_gpu", "sparse_attention backward"): Tunable(
        "sparse_attention", "backward", _grid(**_GPU_ATTENTION, stages=(1, 2), splits=(0,))
    ),
    ("pallas_gpu", "index_select"): Tunable(
        "index_select",
        "constants",
        _grid(stages=(2, 3, 4), programs=(264, 528)),
    ),
    ("pallas_gpu", "compress"): Tunable("compress", "constants", _grid(block_entries=(2, 4, 8), warps=(4, 8))),
    ("pallas_tpu", "sparse_attention"): Tunable("sparse_attention", "constants", _grid(unroll=(4, 8, 16))),
    ("pallas_tpu", "compress"): Tunable("compress", "constants", _grid(block_bytes=(1 << 19, 1 << 20, 1 << 21))),
}


@contextlib.contextmanager
def using(tunable: Tunable, chosen: Mapping[str, Any]) -> Iterator[None]:
    """Kernels traced inside have these tile sizes."""
    records = copy.deepcopy(dispatch.records())
    records.setdefault(dispatch.device_kind(), {}).setdefault(tunable.door, {})[tunable.key] = dict(chosen)
    with mock.patch.object(dispatch, "records", return_value=records):
        jax.clear_caches()
        yield
    jax.clear_caches()


@contextlib.contextmanager
def using_all(implementation: str, chosen: Mapping[Door, Mapping[str, Any]]) -> Iterator[None]:
    """The same for the tile sizes of several doors."""
    with contextlib.ExitStack() as stack:
        for (name, door), tunable in CANDIDATES.items():
            if name == implementation and chosen.get(door):
                stack.enter_context(using(tunable, chosen[door]))
        yield


def choose(
    implementation: str, door: Door, calls: Sequence[Call], *, repeat: int, interpret: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tile sizes with the least time over the calls, summed as multiples of each call's best; and all that was tried.

    A combination that refuses, fails or disagrees on any call is out.
    """
    tunable = CANDIDATES.get((implementation, door))
    if tunable is None or not calls:
        return {}, []
    tried: list[dict[str, Any]] = []
    for chosen in tunable.choices:
        entry: dict[str, Any] = {"tiles": dict(chosen), "seconds": {}}
        tried.append(entry)
        with using(tunable, chosen):
            for call in calls:
                found = measure(call, implementation, repeat=repeat, interpret=interpret)
                if not found.proven:
                    entry["fault"] = f"{call.name}: {found.refused or found.fault or f'error {found.error:.2g}'}"
                    break
                entry["seconds"][call.name] = found.seconds
    sound = [entry for entry in tried if "fault" not in entry]
    if not sound:
        return {}, tried
    best = {call.name: min(entry["seconds"][call.name] for entry in sound) for call in calls}
    winner = min(sound, key=lambda entry: sum(entry["seconds"][name] / best[name] for name in best))
    return winner["tiles"], tried


def write(
    folder: Path,
    kind: str,
    implementation: str,
    calls: Sequence[Call],
    measurements: Sequence[Measurement],
    found: Ceilings,
    tiles: Mapping[Door, Mapping[str, Any]],
    tried: Mapping[Door, Sequence[Mapping[str, Any]]],
) -> Path:
    """Write the record of a device kind. Calls that the kernels refuse are recorded as that: dispatch goes on to XLA for those.

    Raises ValueError, and nothing is written, if a call disagreed with XLA or a door has no call that was proven.
    """
    faults = [f"{m.call}: {m.fault or f'error {m.error:.2g}'}" for m in measurements if m.wrong]
    proven = {call.door for call, m in zip(calls, measurements, strict=True) if m.proven}
    faults += [f"no proven call of {door}" for door in DOORS if door not in proven]
    if faults:
        raise ValueError(f"no record for {kind!r}: {'; '.join(faults)}")
    record: dict[str, Any] = {
        "device_kind": kind,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "jax": jax.__version__,
        "implementation": implementation,
        "ceilings": dataclasses.asdict(found),
    }
    for (name, door), tunable in CANDIDATES.items():
        if name == implementation and tiles.get(door):
            record.setdefault(tunable.door, {})[tunable.key] = dict(tiles[door])
    record["measurements"] = [dataclasses.asdict(m) for m in measurements]
    record["tried"] = {door: list(entries) for door, entries in tried.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^a-z0-9]+', '_', kind.lower()).strip('_')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dispatch.records.cache_clear()
    return path
