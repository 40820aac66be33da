"""Tile sizes tried on this device, and the record of what was measured: `kernels_pallas/tuned/<device>.json`.

A record makes `implementation=None` prefer the kernels on devices of its kind (`kernels_pallas.dispatch`). So it is written only
where every call agreed with XLA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax

from benchmarks.kernels_calls import DOORS, Call, Door
from benchmarks.kernels_measure import Ceilings, Measurement, measure


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Constants of a module that a device may want otherwise, and the values to try; the first of each is the default."""

    module: str
    values: Mapping[str, tuple[int, ...]]

    def choices(self) -> list[dict[str, int]]:
        """Every combination."""
        return [dict(zip(self.values, chosen, strict=True)) for chosen in itertools.product(*self.values.values())]


CANDIDATES: Final[dict[tuple[str, Door], Tiles]] = {}


@contextlib.contextmanager
def using(tiles: Tiles, chosen: Mapping[str, int]) -> Iterator[None]:
    """Kernels traced inside have these tile sizes."""
    module = importlib.import_module(tiles.module)
    before = {name: getattr(module, name) for name in chosen}
    try:
        for name, value in chosen.items():
            setattr(module, name, value)
        jax.clear_caches()
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
        jax.clear_caches()


@contextlib.contextmanager
def using_all(implementation: str, chosen: Mapping[str, Mapping[str, int]]) -> Iterator[None]:
    """The same for the tile sizes of several doors."""
    with contextlib.ExitStack() as stack:
        for (name, door), tiles in CANDIDATES.items():
            if name == implementation and chosen.get(door):
                stack.enter_context(using(tiles, chosen[door]))
        yield


def choose(
    implementation: str, door: Door, calls: Sequence[Call], *, repeat: int, interpret: bool = False
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The tile sizes with the least time over the calls, summed as multiples of each call's best; and all that was tried.

    A combination that refuses, fails or disagrees on any call is out.
    """
    tiles = CANDIDATES.get((implementation, door))
    if tiles is None or not calls:
        return {}, []
    tried: list[dict[str, Any]] = []
    for chosen in tiles.choices():
        entry: dict[str, Any] = {"tiles": chosen, "seconds": {}}
        tried.append(entry)
        with using(tiles, chosen):
            for call in calls:
                try:
                    found = measure(call, implementation, repeat=repeat, interpret=interpret)
                except Exception as error:  # whatever a compiler says to a tile that is too large for it
                    entry["fault"] = f"{call.name}: {type(error).__name__}: {error}"[:300]
                    break
                if not found.proven:
                    entry["fault"] = f"{call.name}: {found.refused or f'error {found.error:.2g}'}"
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
    calls: Sequence[Call],
    measurements: Sequence[Measurement],
    found_ceilings: Ceilings,
    tiles: Mapping[str, Mapping[str, int]],
    tried: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Path:
    """Write the record of a device kind. Calls that the kernels refuse are recorded as that: dispatch goes on to XLA for those.

    Raises ValueError, and nothing is written, if a call disagreed with XLA or a door has no call that was proven.
    """
    faults = [f"{m.call}: error {m.error:.2g}" for m in measurements if not m.refused and not m.agrees]
    proven = {call.door for call, m in zip(calls, measurements, strict=True) if m.proven}
    faults += [f"no proven call of {door}" for door in DOORS if door not in proven]
    if faults:
        raise ValueError(f"no record for {kind!r}: {'; '.join(faults)}")
    record = {
        "device_kind": kind,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "jax": jax.__version__,
        "ceilings": dataclasses.asdict(found_ceilings),
        "tiles": {door: dict(chosen) for door, chosen in tiles.items()},
        "tried": {door: list(entries) for door, entries in tried.items()},
        "measurements": [dataclasses.asdict(m) for m in measurements],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^a-z0-9]+', '_', kind.lower()).strip('_')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path
