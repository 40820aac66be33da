"""The page of what compiles where, written from a run and read back by the test that holds it against one.

python -m tests.aot.report           compile everything, write docs/compiled.md
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.aot import compilers, targets
from tests.aot.collect import FAMILIES, RUNS, compile_family
from tests.aot.compile_cases import Result, listed
from tests.aot.targets import MESHES, SINGLE, Target

PAGE: Final = compilers.ROOT / "docs" / "compiled.md"

_HEAD = """\
# What compiles where

Written by `make aot-report`; do not edit. Every kernel, forward and backward, at the released sizes, compiled by the devices' own
compilers on a machine that has none of the devices. **Compiled means compiled, not run**: shapes, memory and instructions are
accepted; numbers are compared under the interpreter (`tests/kernels`), and on devices only where `kernels_pallas/tuned` holds a
record.

A cell holds the seconds to trace, lower and compile, and the temporary bytes of one device beside arguments and outputs. *No
room*: arguments and outputs alone exceed the memory. *Refused*: the kernel says that it does not take these arguments; the reason
stands below the table. B rows, T queries each, P pool entries. `tests/aot/cases.py` is the list, and says what each may take.

{versions}
"""
_FAMILY_NOTES = {
    "sparse_attention": """\
A call with a pool has three of them in its stack (one at B = 64, P = 1,048,576). *write, attend* puts new entries into the
donated pool first.""",
    "sparse_attention backward": """\
Temporary bytes hold the cotangents of the whole stack, summed in float32. *Added up* puts them into a donated sum.""",
    "index_select": "Temporary bytes hold what several programs found for a query, before that is merged.",
    "compress": "",
}


def versions() -> str:
    """What compiled: the line that a page opens with."""
    found = [f"Python {platform.python_version()}", f"jax {importlib.metadata.version('jax')}"]
    for platform_ in compilers.PLATFORMS:
        for distribution in importlib.metadata.distributions(path=[str(compilers.folder(platform_))]):
            found.append(f"{distribution.metadata['Name']} {distribution.version}")
    return ", ".join(dict.fromkeys(found)) + "."


def render(results: Sequence[Result], families: Mapping[str, Sequence[str]]) -> str:
    """The page. `families` tells which cases stand in which table: family -> ids, with ` on NAME` appended for meshes."""
    by_place = {(result.case, result.target): result for result in results}
    parts = [_HEAD.format(versions=versions())]
    for title, ids in families.items():
        family, _, mesh = title.partition(" on ")
        columns = [targets.TARGETS[mesh]] if mesh else list(SINGLE)
        notes: dict[str, list[str]] = {}
        lines = [f"## {title}", ""]
        if mesh:
            lines += [_mesh_note(columns[0]), ""]
        elif _FAMILY_NOTES[family]:
            lines += [_FAMILY_NOTES[family], ""]
        lines.append(f"| case | {' | '.join(target.name for target in columns)} |")
        lines.append(f"|---|{'---|' * len(columns)}")
        for id_ in ids:
            cells = [_cell(by_place.get((id_, target.name)), target, notes) for target in columns]
            lines.append(f"| {id_} | {' | '.join(cells)} |")
        for i, (reason, where) in enumerate(notes.items(), 1):
            lines += ["", f"[{i}] {', '.join(dict.fromkeys(where))}: {reason}"]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _mesh_note(target: Target) -> str:
    assert target.mesh is not None
    data, model = target.mesh
    return (
        f"{data * model} devices: rows over {data}, heads of attention over {model}, `shard_map` around the door. Bytes are one "
        "device's."
    )


def _cell(result: Result | None, target: Target, notes: dict[str, list[str]]) -> str:
    if result is None:
        return "-"
    if result.verdict == "compiles":
        return f"{result.seconds:.1f} s, {_bytes(result.temp)}"
    reason = " ".join(result.reason.split()) if result.verdict == "refused" else ""
    if not reason:
        return result.verdict
    notes.setdefault(reason, []).append(target.name)
    return f"{result.verdict} [{list(notes).index(reason) + 1}]"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def parse(page: str) -> dict[tuple[str, str], dict[str, str]]:
    """(table's title, case) -> target -> verdict, of a page that `render` wrote."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    title, columns = "", []
    for line in page.splitlines():
        if line.startswith("## "):
            title, columns = line.removeprefix("## "), []
        elif line.startswith("| "):
            case, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            if case == "case":
                columns = cells
            else:
                found[title, case] = {name: _verdict(cell) for name, cell in zip(columns, cells, strict=True)}
    return found


def _verdict(cell: str) -> str:
    return "compiles" if re.match(r"\d", cell) else re.sub(r" \[\d+\]$", "", cell)


def tables() -> dict[str, list[str]]:
    """Title -> ids of cases, from the list."""
    single = {family: [case.id for case in listed(family, SINGLE[0])] for family in FAMILIES}
    meshes = {
        f"{family} on {mesh.name}": [case.id for case in listed(family, mesh)] for mesh in MESHES for family in FAMILIES
    }
    return single | {title: ids for title, ids in meshes.items() if ids}


def main() -> int:
    """Compile, two processes at a time, and write the page; exit code 1 if a case fails."""
    for platform_ in compilers.PLATFORMS:
        if reason := compilers.missing(platform_):
            print(reason, file=sys.stderr)
            return 1

    def compile_and_tell(run: tuple[str, Target]) -> list[Result]:
        found = compile_family(*run)
        print(f"{run[1].name} {run[0]}: {sum(result.seconds for result in found):.0f} s", flush=True)
        return found

    with ThreadPoolExecutor(2) as pool:
        results = [result for found in pool.map(compile_and_tell, RUNS) for result in found]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(results, tables()), encoding="utf-8")
    failed = [result for result in results if result.verdict == "fails"]
    for result in failed:
        print(f"{result.target}: {result.case}: {' '.join(result.reason.split())[:600]}", file=sys.stderr)
    print(f"{PAGE.relative_to(Path.cwd())}: {len(results)} compilations, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
