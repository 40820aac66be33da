"""Checkpoints of a run: Orbax, written in the background, whole or not at all, a few kept.

A checkpoint holds what training moves (parameters, router biases, optimizer, step) as `state`, and the place in the data as
`place`. What is frozen is not written: it comes from the model that the run started from. Arrays are restored onto whatever
devices and shardings the state asks for that is to be filled.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.step import TrainState


class CheckpointsError(RuntimeError):
    """A checkpoint that could not be written or read: names the place, the reason and what is still whole."""


@dataclasses.dataclass(frozen=True)
class KeepSettings:
    """When checkpoints are written and which stay.

    save_every: steps between them. keep: how many of the newest stay. keep_every: steps whose multiples all stay, 0 for none.
    """

    save_every: int = 500
    keep: int = 3
    keep_every: int = 0

    def __post_init__(self) -> None:
        for name, least in (("save_every", 1), ("keep", 1), ("keep_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"checkpoints.{name}={getattr(self, name)} must be at least {least}")


class Checkpoints:
    """The checkpoints under one folder."""

    def __init__(self, folder: Path, settings: KeepSettings) -> None:
        self.folder, self._settings = folder, settings
        options = ocp.CheckpointManagerOptions(
            max_to_keep=settings.keep,
            keep_period=settings.keep_every or None,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def due(self, step: int, last: int) -> bool:
        """Whether a checkpoint is to be written behind `step` of a run of `last` steps."""
        return step % self._settings.save_every == 0 or step == last

    @property
    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, place: str) -> None:
        """Begin to write a checkpoint; an error of the one before comes out here or in `finish`."""
        step = int(state.step)
        args = ocp.args.Composite(state=ocp.args.StandardSave(_tree(state)), place=ocp.args.JsonSave({"data": place}))
        try:
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._broken(f"the checkpoint of step {step} could not be written", error) from error

    def restore(self, state: TrainState) -> tuple[TrainState, str]:
        """(`state` with everything that training moves from the newest checkpoint, the place in the data)."""
        step = self.latest
        if step is None:
            raise CheckpointsError(f"{self.folder} holds no checkpoint")
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _tree(state))
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target), place=ocp.args.JsonRestore())
        try:
            found = self._manager.restore(step, args=args)
        except Exception as error:
            raise self._broken(f"the checkpoint of step {step} could not be read", error) from error
        return _filled(state, found["state"]), found["place"]["data"]

    def finish(self) -> None:
        """Wait until everything is written."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._broken("a checkpoint could not be written", error) from error

    def close(self) -> None:
        """Let go of the folder."""
        self._manager.close()

    def _broken(self, what: str, error: Exception) -> CheckpointsError:
        try:
            whole = sorted(self._manager.all_steps(read=True))
        except Exception:
            whole = []
        kept = f"whole ones: steps {', '.join(map(str, whole))}" if whole else "there is no whole one yet"
        remedy = "Free space there or choose another run.out" if isinstance(error, OSError) else "See to that"
        reason = " ".join(str(error).split())[:300]
        return CheckpointsError(
            f"{what} under {self.folder} ({type(error).__name__}: {reason}); {kept}. {remedy}, then start the same command again"
        )


def _tree(state: TrainState) -> dict[str, Any]:
    """What is written: plain dicts of arrays, so that a checkpoint can be read without this package."""
    flat, _ = jax.tree.flatten_with_path(state.optimizer)
    optimizer = {jax.tree_util.keystr(path): leaf for path, leaf in flat}
    return {"step": state.step, "trained": state.trained, "loads": state.loads, "optimizer": optimizer}


def _filled(state: TrainState, tree: dict[str, Any]) -> TrainState:
    flat, structure = jax.tree.flatten_with_path(state.optimizer)
    leaves = [tree["optimizer"][jax.tree_util.keystr(path)] for path, _ in flat]
    return dataclasses.replace(
        state,
        step=tree["step"],
        trained=tree["trained"],
        loads=tree["loads"],
        optimizer=jax.tree.unflatten(structure, leaves),
    )
