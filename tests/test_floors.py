"""Imports point down only. The order of the house is the data below; the story is in CONTRIBUTING.md.

A module may import what stands on a lower floor, and a neighbour on its own floor as long as no circle arises. A module
without a floor fails the test: give it one.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Top floor first.
PACKAGES = (
    ("tests", "benchmarks"),
    ("train",),
    ("csa2_jax",),
    ("kernels_pallas",),
)
DOOR = (
    "__init__"  # what `import csa2_jax` gives: it reads everything up to the engine, and only the command line reads it
)
ROOMS = (
    ("__main__",),
    ("cli",),
    (DOOR,),
    ("conversation",),
    ("engine", "gates", "replay"),
    ("streams", "slots", "prefixes", "answers"),
    ("recording",),
    ("generation", "prompt", "prompt_messages", "prompt_parse", "prompt_format"),
    ("prefilling", "decoding"),
    ("speculative",),
    ("bound", "sampling"),
    # Beside the model stands what files and devices need; it reads the model, and nothing below reads it.
    (
        "model",
        "vision",
        "checkpoint",
        "conversion",
        "sharding",
        "placing",
        "token_map",
        "tokenizer",
        "saving",
        "adapters",
    ),
    ("accounting", "manifest", "safetensors_io", "progress", "lineage"),
    ("stack", "dspark"),
    ("block",),
    ("attention", "moe", "engram", "residual", "learning"),
    ("indexer", "compressor", "engram_host"),
    ("layers", "rope", "formats", "state", "numerics", "calls", "structure", "expert_blocks"),
    ("counts",),
    ("config",),
    ("config_rules",),
    ("config_reading",),
    ("plan", "ngram", "generations"),
    ("dims", "embedded"),
)
# Rooms of kernels_pallas that stand open beside its doors: number formats and how entries are stored.
OPEN = ("formats", "storage")
# What a package or a room may not import from outside, and why.
FORBIDDEN = {
    "kernels_pallas": ("flax",),  # kernels know arrays and sizes, no modules
    "csa2_jax.dims": ("jax", "flax"),  # a plan can be printed and tested without a device
    "csa2_jax.plan": ("jax", "flax"),
    "csa2_jax.ngram": ("jax", "flax"),
    "csa2_jax.manifest": ("jax", "flax"),
    "csa2_jax.safetensors_io": ("jax", "flax", "torch"),
}
CHECKED = ("csa2_jax", "kernels_pallas", "train")
LONGEST = 520


def _files(root: Path, package: str) -> Iterator[Path]:
    return iter(sorted((root / package).rglob("*.py")))


def _module(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts)


def _imports(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports, wherever in the file; `from a import b` is `a.b`."""
    here = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join((*start, *filter(None, [node.module])))
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def _room(dotted: str) -> str:
    """The room of csa2_jax that a dotted name leads to; a name that is no room's is one that the door offers."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and _floor(ROOMS, parts[1]) is not None) else DOOR


def _floor(order: tuple[tuple[str, ...], ...], name: str) -> int | None:
    """Height above the ground, or None for a name that has no place."""
    return next((height for height, names in enumerate(reversed(order)) if name in names), None)


def _doors(root: Path) -> set[str]:
    """The names that kernels_pallas offers: what its __init__ binds."""
    path = root / "kernels_pallas" / "__init__.py"
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ():
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _faults(root: Path) -> list[str]:
    """Every import that breaks the order, as `file:line: what`."""
    found: list[str] = []
    neighbours: dict[str, set[str]] = {}
    doors = _doors(root)
    for package in (name for floor in PACKAGES for name in floor):
        height = _floor(PACKAGES, package)
        assert height is not None
        for path in _files(root, package):
            module = _module(root, path)
            room = module.split(".")[1] if package == "csa2_jax" else None
            if room is not None and _floor(ROOMS, room) is None:
                found.append(f"{module}: has no floor in ROOMS")
                continue
            for line, name in _imports(root, path):
                where = f"{path.relative_to(root).as_posix()}:{line}"
                other = name.partition(".")[0]
                for owner, outsiders in FORBIDDEN.items():
                    if f"{module}.".startswith(f"{owner}.") and other in outsiders:
                        found.append(f"{where}: {owner} must not import {other}")
                other_height = _floor(PACKAGES, other)
                if other_height is None:
                    continue
                if other_height > height:
                    found.append(f"{where}: {package} imports {name}, which stands above it")
                if package == "csa2_jax" and other == "kernels_pallas" and not _is_door(name, doors):
                    found.append(f"{where}: {name} is inside kernels_pallas; only its doors may be used")
                if room is None or other != "csa2_jax":
                    continue
                target = _room(name)
                here, there = _floor(ROOMS, room), _floor(ROOMS, target)
                if here is None or there is None or target == room:
                    continue  # a target without a floor is reported as a file of its own
                if there > here:
                    found.append(f"{where}: {room} imports {target}, which stands above it")
                elif there == here:
                    neighbours.setdefault(room, set()).add(target)
    try:
        graphlib.TopologicalSorter(neighbours).prepare()
    except graphlib.CycleError as error:
        found.append(f"neighbours import one another in a circle: {' -> '.join(error.args[1])}")
    return sorted(set(found))


def _is_door(name: str, doors: set[str]) -> bool:
    _, _, rest = name.partition(".")
    return not rest or rest in doors or rest.partition(".")[0] in OPEN


def _long_files(root: Path) -> list[str]:
    paths = [path for package in CHECKED for path in _files(root, package)]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return [f"{path.relative_to(root)}: {lines} lines" for path, lines in lengths.items() if lines > LONGEST]


@pytest.mark.smoke
def test_imports_point_down():
    assert _faults(ROOT) == []


@pytest.mark.smoke
def test_files_are_short_enough_to_read():
    assert _long_files(ROOT) == []


def test_oracle_imports_nothing_of_ours():
    """An oracle that shares code with what it judges agrees with its mistakes."""
    ours = {"csa2_jax", "kernels_pallas", "train"}
    for path in (ROOT / "tests").glob("oracle*.py"):
        shared = [name for _, name in _imports(ROOT, path) if name.partition(".")[0] in ours]
        assert shared == [], path.name


def _house(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("csa2_jax/plan.py", "import csa2_jax.model", "plan imports model"),
        ("csa2_jax/plan.py", "from csa2_jax import model", "plan imports model"),
        ("csa2_jax/plan.py", "from . import model", "plan imports model"),
        ("csa2_jax/plan.py", "def f():\n    from .model import Model", "plan imports model"),
        ("csa2_jax/plan.py", "from csa2_jax import forward", "plan imports __init__"),
        ("csa2_jax/plan.py", "import jax.numpy as jnp", "must not import jax"),
        ("csa2_jax/block.py", "from csa2_jax.checkpoint import load", "block imports checkpoint"),
        ("csa2_jax/block.py", "from csa2_jax.cli.inspect import table", "block imports cli"),
        ("csa2_jax/block.py", "import train.loop", "which stands above it"),
        ("csa2_jax/attention.py", "from kernels_pallas.compress import xla", "only its doors"),
        ("csa2_jax/attention.py", "from kernels_pallas import dispatch", "only its doors"),
        ("csa2_jax/mystery.py", "", "no floor"),
        ("kernels_pallas/compress/xla.py", "import csa2_jax", "which stands above it"),
        ("kernels_pallas/compress/xla.py", "from flax import nnx", "must not import flax"),
        ("train/loop.py", "from tests import oracle", "which stands above it"),
    ],
)
def test_an_import_against_the_order_is_found(tmp_path, name, text, fault):
    sound = {
        "csa2_jax/__init__.py": "from csa2_jax.model import forward",
        "csa2_jax/model.py": "from csa2_jax.block import Block",
        "csa2_jax/checkpoint.py": "from csa2_jax.model import Model",
        "csa2_jax/block.py": "from csa2_jax import attention\nfrom csa2_jax.plan import Plan",
        "csa2_jax/attention.py": "import kernels_pallas\nfrom kernels_pallas import compress",
        "csa2_jax/plan.py": "import dataclasses",
        "csa2_jax/cli/inspect.py": "import csa2_jax\nfrom csa2_jax import forward",
        "kernels_pallas/__init__.py": "from kernels_pallas.compress import compress",
        "kernels_pallas/dispatch.py": "import jax",
        "kernels_pallas/compress/__init__.py": "from kernels_pallas import dispatch\ndef compress(): ...",
        "train/loop.py": "import csa2_jax",
        "tests/test_all.py": "import csa2_jax.model, kernels_pallas.compress, train.loop",
    }
    assert _faults(_house(tmp_path / "sound", sound)) == []
    faults = _faults(_house(tmp_path / "broken", sound | {name: text}))
    assert len(faults) == 1
    assert fault in faults[0]


def test_a_circle_between_neighbours_is_found(tmp_path):
    files = {"csa2_jax/layers.py": "from csa2_jax import rope", "csa2_jax/rope.py": "from csa2_jax import layers"}
    assert "circle" in _faults(_house(tmp_path, files))[0]


def test_a_long_file_is_found(tmp_path):
    _house(tmp_path, {"train/loop.py": "x = 1\n" * (LONGEST + 1), "train/step.py": "x = 1\n" * LONGEST})
    assert _long_files(tmp_path) == [f"train/loop.py: {LONGEST + 1} lines"]
