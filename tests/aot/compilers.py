"""Where the compilers for TPU and CUDA are, which ones are wanted, and how they are had.

    python -m tests.aot.compilers        install what is missing into build/aot (CSA2_AOT=... elsewhere)

They are wheels that need no TPU and no driver: libtpu; jax's CUDA plugin with its PJRT library, and of CUDA itself the assembler
and the mathematics library. Which versions belong to the installed jax, jax's own metadata says. They are installed beside the
environment, not into it, because an installed plugin is loaded by every `import jax`. CSA2_REQUIRE_AOT=1 turns "cannot be had"
from a skip into a failure.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
PLATFORMS: Final = ("tpu", "cuda")
_EXTRA: Final = {
    "tpu": "tpu",
    "cuda": "cuda12-local",
}  # cuda12-local: the plugin without CUDA, which is mostly libraries to run
_ASSEMBLER: Final = {"nvidia-cuda-nvcc-cu12": SpecifierSet(">=12.8")}  # ptxas and libdevice; the first that knows B200


def folder(platform_: str) -> Path:
    """Where a platform's compiler is installed."""
    return Path(os.environ.get("CSA2_AOT", ROOT / "build" / "aot")).resolve() / platform_


def required() -> bool:
    """Whether a missing compiler is a failure."""
    return os.environ.get("CSA2_REQUIRE_AOT", "") not in ("", "0")


def wanted(platform_: str) -> dict[str, SpecifierSet]:
    """Distribution -> versions, as the installed jax wants them."""
    found = {}
    for line in importlib.metadata.requires("jax") or ():
        requirement = Requirement(line)
        extra = requirement.marker is not None and requirement.marker.evaluate({"extra": _EXTRA[platform_]})
        if extra and requirement.name.startswith(("libtpu", "jax-cuda")):
            found[requirement.name] = requirement.specifier
    if platform_ == "cuda":  # the plugin asks for its library only together with all of CUDA
        found |= {name.replace("-plugin", "-pjrt"): specifier for name, specifier in found.items()}
        found |= _ASSEMBLER
    if not found:
        raise LookupError(f"jax {importlib.metadata.version('jax')} names no {platform_} compiler")
    return found


def missing(platform_: str) -> str | None:
    """Why the platform's compiler cannot be used from its folder, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"there is no {platform_} compiler for {sys.platform} on {platform.machine()}, only for linux on x86_64"
    present = {
        canonicalize_name(found.metadata["Name"]): found.version
        for found in importlib.metadata.distributions(path=[str(folder(platform_))])
    }
    for name, specifier in wanted(platform_).items():
        version = present.get(canonicalize_name(name))
        if version is None or not specifier.contains(version):
            return (
                f"the {platform_} compiler is not installed: jax {importlib.metadata.version('jax')} wants {name}"
                f"{specifier}, {folder(platform_)} has {version}; `make aot-compilers` fetches it"
            )
    return None


def environment(platform_: str) -> dict[str, str]:
    """Variables of a process that compiles for the platform: no device is looked for, nothing is read from a cache."""
    path = [str(folder(platform_)), str(ROOT), os.environ.get("PYTHONPATH", "")]
    cuda = {"CUDA_ROOT": str(folder(platform_) / "nvidia" / "cuda_nvcc")} if platform_ == "cuda" else {}
    return {
        **os.environ,
        **cuda,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "LLVM_DISABLE_SYMBOLIZATION": "1",  # an aborting compiler should not first spend minutes on naming its stack
    }


def install(platform_: str) -> str | None:
    """Fetch the platform's compiler into its folder; returns why that did not work, or None."""
    reason = missing(platform_)
    if reason is None or "not installed" not in reason:
        return reason
    specifiers = [f"{name}{specifier}" for name, specifier in wanted(platform_).items()]
    place = folder(platform_)
    fresh = place.with_name(f"{place.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--retries", "1", "--timeout", "20", "--target", str(fresh), *specifiers]
    print(f"fetching {' '.join(specifiers)}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return f"{' '.join(specifiers)} could not be installed: {' '.join(last)}"
    shutil.rmtree(place, ignore_errors=True)  # whole or not at all, whatever was there before
    fresh.rename(place)
    return missing(platform_)


def main() -> int:
    """Install what is missing; the exit code is 1 only where the compilers are required."""
    reasons = [reason for reason in map(install, PLATFORMS) if reason is not None]
    for reason in reasons:
        print(reason if required() else f"{reason}\n  (tests that need it will be skipped)", file=sys.stderr)
    return 1 if reasons and required() else 0


if __name__ == "__main__":
    sys.exit(main())
