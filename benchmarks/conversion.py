"""Converting a large checkpoint in little memory: throughput beside a plain copy of the files, under a cap of the system's.

    python benchmarks/conversion.py --gigabytes 3

Writes a random release-layout checkpoint (fp8 and fp4 as the release has them, shards of 512 MB), then in turns copies its files
with `cp` and converts it, each in a process of its own and followed by a sync, so that both have reached the disk. The
converter's address space is limited by the operating system (RLIMIT_AS) to three times the largest tensor and 1 GiB above what
Python needs with everything imported. Prints seconds, MB/s, the ratio and the peak memory; then exports and verifies.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from csa2_jax.config import ModelConfig
from csa2_jax.manifest import TensorSpec, release_tensors

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.5
_CHILD = """
import resource, sys, json, time
from csa2_jax.conversion import convert as module
import orbax.checkpoint, tensorstore
pages = int(open("/proc/self/statm").read().split()[0])
idle = pages * resource.getpagesize()
cap = idle + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (cap, cap))
start = time.monotonic()
done = module.convert(sys.argv[1], sys.argv[2])
print(json.dumps({"seconds": time.monotonic() - start, "bytes": done.nbytes, "idle": idle, "cap": cap,
                  "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def large_config(gigabytes: float) -> ModelConfig:
    """The released proportions at a smaller width, with as many experts as the size asked for takes."""
    data = json.loads((ROOT / "configs" / "v41_flash.json").read_text(encoding="utf-8"))
    text = data["text_config"]
    text |= {
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "q_lora_rank": 256,
        "o_lora_rank": 128,
        "num_attention_heads": 16,
    }
    text |= {
        "vocab_size": 32768,
        "head_dim": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "num_nextn_predict_layers": 0,
    }
    text |= {"engram_layer_ids": [], "engram_num_embeddings": [], "dspark_target_layer_ids": []}
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    data.pop("vision_config", None)

    def size(experts: int) -> int:
        text["n_routed_experts"] = experts
        return sum(spec.nbytes for spec in release_tensors(ModelConfig.from_hf(data)))

    step = size(9) - size(8)
    size(max(8, 8 + math.ceil((gigabytes * 1e9 - size(8)) / step)))
    return ModelConfig.from_hf(data)


def write(config: ModelConfig, directory: Path, shard_bytes: int) -> int:
    """A random checkpoint; returns the bytes of its largest tensor."""
    specs = list(release_tensors(config))
    groups: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if sum(s.nbytes for s in groups[-1]) + spec.nbytes > shard_bytes and groups[-1]:
            groups.append([])
        groups[-1].append(spec)
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 120, 1 << 24, dtype=np.uint8)  # neither NaN nor infinity in any of the formats
    weight_map = {}
    for i, group in enumerate(groups):
        name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        header: dict[str, Any] = {}
        at = 0
        for spec in group:
            header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, at + spec.nbytes]}
            at += spec.nbytes
            weight_map[spec.name] = name
        text = json.dumps(header).encode()
        with (directory / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for spec in group:
                left = spec.nbytes
                while left:
                    first = int(rng.integers(0, len(noise) // 2))
                    block = noise[first : first + left]
                    file.write(block.tobytes())
                    left -= len(block)
    index = {"metadata": {"total_size": sum(s.nbytes for s in specs)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
    return max(spec.nbytes for spec in specs)


def copy(source: Path, target: Path) -> float:
    """Seconds of `cp -r` with everything on the disk at the end."""
    start = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    os.sync()
    return time.monotonic() - start


def converted(source: Path, target: Path, room: int) -> dict[str, Any]:
    """A conversion in a process with so much address space above its imports."""
    start = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", _CHILD, str(source), str(target), str(room)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if run.returncode:
        raise SystemExit(f"the conversion failed under its memory cap:\n{run.stderr[-2000:]}")
    os.sync()
    return json.loads(run.stdout.splitlines()[-1]) | {"whole": time.monotonic() - start}


def main(gigabytes: float = 3.0, rounds: int = 3, place: Path | None = None, json_file: Path | None = None) -> int:
    """Compare conversion with copying; exit status 1 below half of its speed.

    Args:
        gigabytes: of the checkpoint.
        rounds: copies and conversions, in turns; medians count.
        place: a directory on the disk to measure, with room for three such checkpoints; the system's temporary one by default.
        json_file: write the figures.
    """
    from csa2_jax.conversion.export import export
    from csa2_jax.conversion.verify import verify

    console = Console(width=None if Console().is_terminal else 120)
    with tempfile.TemporaryDirectory(dir=place) as name:
        work = Path(name)
        source = work / "release"
        source.mkdir()
        config = large_config(gigabytes)
        largest = write(config, source, 512_000_000)
        size = sum(path.stat().st_size for path in source.iterdir())
        os.sync()
        room = 3 * largest + (1 << 30)
        copies, runs = [], []
        for i in range(rounds):
            copies.append(copy(source, work / "copy"))
            shutil.rmtree(work / "copy")
            runs.append(converted(source, work / f"orbax{i}", room))
            if i:
                shutil.rmtree(work / f"orbax{i}")
        start = time.monotonic()
        export(work / "orbax0", work / "back")
        os.sync()
        back = time.monotonic() - start
        same = verify(source, work / "back")
        seconds = statistics.median(run["seconds"] for run in runs)
        ratio = statistics.median(copies) / seconds
        table = Table(title=f"{size / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, {os.cpu_count()} cores")
        for column in ("", "seconds", "MB/s", "of a copy"):
            table.add_column(column, justify="left" if not column else "right")
        for title, value in (("copy", statistics.median(copies)), ("convert", seconds), ("export", back)):
            of_copy = statistics.median(copies) / value
            table.add_row(title, f"{value:.2f}", f"{size / value / 1e6:.0f}", f"{of_copy:.2f}")
        console.print(table)
        run = max(runs, key=lambda run: run["resident"])
        console.print(
            f"address space capped at {run['cap'] / 1e6:.0f} MB: {run['idle'] / 1e6:.0f} of imports + {room / 1e6:.0f}; "
            f"largest resident {run['resident'] / 1e6:.0f} MB"
        )
        console.print(f"back in the release's layout: {len(same.differences)} of {same.tensors:,} tensors differ")
        verdict = ratio >= TARGET and not same.differences
        console.print(f"convert at {ratio:.2f} of a copy's speed, target {TARGET}: {'met' if verdict else 'missed'}")
        if json_file is not None:
            figures = {
                "bytes": size,
                "largest": largest,
                "copies": copies,
                "runs": runs,
                "export": back,
                "ratio": ratio,
            }
            json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if verdict else 1


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(tyro.cli(main, description=__doc__))
