"""The `csa2` command: one module per subcommand, imported only when it is asked for.

A subcommand module has a `main` whose signature tyro turns into options; it returns an exit code or None. What a user
can get wrong (ValueError, a missing file) becomes one line on stderr and exit code 2; Ctrl-C exits with 130. Set
CSA2_TRACEBACK=1 to see where an error came from.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

COMMANDS: Final[dict[str, str]] = {
    "inspect": "show a model's plan, pools, bytes and parameters: as tables, JSON or a picture",
    "compare": "this generation beside the ones before: cache, decode and prefill, as tables and a picture",
    "generate": "run a model on a prompt and stream what it says",
    "chat": "talk with a model in the terminal",
    "convert": "release checkpoint -> sharded Orbax checkpoint, resumable; or --plan it without weights",
    "export": "converted checkpoint -> the release's safetensors, bit for bit",
    "verify": "compare two checkpoints of any layout, tensor by tensor",
    "check": "replay a recorded trace through the model and compare every quantity",
}
"""Subcommand -> what it does; each lives in the module of its name in this package."""

_USAGE: Final = """\
usage: csa2 COMMAND [OPTIONS]

DeepSeek-V4.1-Flash in JAX: look into a model directory, run it, convert it, check it against recordings.

commands:
{commands}

csa2 COMMAND --help tells a command's options, csa2 --version the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `csa2 argv` (default: the process's arguments) and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has left; there is nobody to tell. Keep Python's shutdown from flushing into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, NotImplementedError) as error:
        if os.environ.get("CSA2_TRACEBACK"):
            raise
        command = f"csa2 {args[0]}" if args and args[0] in COMMANDS else "csa2"
        print(f"{command}: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print(_USAGE.format(commands="\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())))
        return 0 if args else 2
    name, rest = args[0], args[1:]
    if name == "--version":
        from importlib.metadata import version

        print(f"csa2 {version('csa2-jax')}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name!r} is not a command, there are {', '.join(COMMANDS)}{hint}")
    import tyro

    module = importlib.import_module(f"csa2_jax.cli.{name}")
    code = tyro.cli(module.main, prog=f"csa2 {name}", args=rest, config=(tyro.conf.FlagCreatePairsOff,))
    return code if isinstance(code, int) else 0
