"""`python -m train --config FILE`: train as a TOML file says, or go on with the run that it began."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train as a TOML file says, or go on with the run that it began.

    The folder run.out gets checkpoints, metrics.jsonl, TensorBoard files and curves.png. Ctrl-C saves and stops; the same command
    goes on from the newest checkpoint, whatever stopped the run.
    """

    config: Path
    """Settings, such as configs/train_tiny.toml."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SECTION.FIELD=VALUE")] = ()
    """Settings to change, such as data.rows=4 run.steps=200."""
    dry_run: bool = False
    """Show which parameter is trained how, and what a step takes; train nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m train argv`; returns the exit code."""
    arguments = tyro.cli(Arguments, prog="python -m train", args=argv, config=(tyro.conf.FlagCreatePairsOff,))
    from train.checkpoints import CheckpointsError
    from train.loop import TrainingError, run
    from train.settings import read_settings

    try:
        settings = read_settings(arguments.config, arguments.set)
        if arguments.dry_run:
            from train.table import show

            show(settings)
            return 0
        if argv is None:
            _keep_programs(settings.path(settings.run.out) / "compiled")
        run(settings)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the newest checkpoint", file=sys.stderr)
        return 130
    except (ValueError, OSError, NotImplementedError, CheckpointsError, TrainingError) as error:
        if os.environ.get("CSA2_TRACEBACK"):
            raise
        print(f"train: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1 if isinstance(error, CheckpointsError | TrainingError) else 2
    return 0


def _keep_programs(folder: Path) -> None:
    """Keep compiled programs beside the run, so that it is taken up again within seconds; another place that is set counts."""
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(folder))


if __name__ == "__main__":
    sys.exit(main())
