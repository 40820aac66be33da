"""Training on meshes of eight (fake) devices; `test_eight_devices` runs this file in a process that has them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from csa2_jax import ModelConfig, init_model
from csa2_jax.sharding import named_sharding
from tests.train.test_run import MODEL
from tests.train.test_step import OPTIMIZER, batch, cut
from train.checkpoints import Checkpoints, KeepSettings
from train.optimizer import make_optimizer
from train.parameters import Choice, take_apart
from train.placement import Placement
from train.step import LossSettings, TrainState, make_step

CONFIG = ModelConfig.from_hf(
    {"model_type": "deepseek_v41", "text_config": {"model_type": "deepseek_v41_text", **MODEL}}
)
KEEP = KeepSettings(save_every=1)


def prepared(mesh: str, seed: int = 1) -> tuple[Any, Placement, TrainState]:
    """(a function that makes the step, where things go, a fresh state)."""
    placement = Placement.parse(mesh, 4)
    together, parts = take_apart(init_model(CONFIG, seed, compute_dtype="float32", fake_quant=False), Choice())
    optimizer = make_optimizer(parts.trained, Choice(), CONFIG, OPTIMIZER, 10)
    state = placement.state(TrainState.start(placement.parts(parts), optimizer))
    losses = LossSettings(remat="none")

    def step() -> Any:
        where = placement.shardings(state)
        return make_step(together, optimizer, CONFIG, losses, OPTIMIZER, 4, shardings=where)

    return step, placement, state


def arrays(state: TrainState) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(a) for path, a in jax.tree.flatten_with_path(state)[0]}


def test_a_step_on_a_mesh_is_the_step_of_one_device_and_its_checkpoint_goes_anywhere(tmp_path: Path) -> None:
    found = {}
    for mesh in ("", "data=2,model=4"):
        make, placement, state = prepared(mesh)
        jax.config.update("jax_disable_most_optimizations", True)
        state, told = make()(state, placement.batch(cut(batch(), 1)))
        found[mesh] = (
            state,
            {name: np.asarray(told[name]) for name in ("loss", "index", "gradient_norm", "update_norm")},
        )
    for name, value in found[""][1].items():
        np.testing.assert_allclose(found["data=2,model=4"][1][name], value, rtol=2e-4, err_msg=name)
    split = found["data=2,model=4"][0]
    for name, bias in found[""][0].loads.items():
        np.testing.assert_array_equal(split.loads[name], bias)
    assert not split.trained["layers.ffn.experts.w1.weight"].sharding.is_fully_replicated
    momentum = [a for a in jax.tree.leaves(split.optimizer) if not a.sharding.is_fully_replicated]
    assert momentum, "what the optimizer keeps of a split parameter is split too"

    # Saved on eight devices, restored on 1, 2 and 4 x 2, also while another mesh is active.
    writing = Checkpoints(tmp_path / "checkpoints", KEEP)
    writing.save(split, "{}")
    writing.finish()
    writing.close()
    expected = arrays(split)
    for mesh, active in (("", False), ("model=2", False), ("data=4,model=2", False), ("model=2", True)):
        _, placement, fresh = prepared(mesh, seed=2)
        whole = jax.set_mesh(jax.make_mesh((8,), ("model",))) if active else contextlib.nullcontext()
        with whole, contextlib.closing(Checkpoints(tmp_path / "checkpoints", KEEP)) as reading:
            restored, place = reading.restore(fresh)
        assert place == "{}"
        for name, value in arrays(restored).items():
            if ".frozen" not in name:
                np.testing.assert_array_equal(value, expected[name], err_msg=f"{mesh} {name}")
        for name, a in restored.trained.items():
            assert a.sharding.is_equivalent_to(fresh.trained[name].sharding, a.ndim)
            if placement.mesh is not None:
                assert a.sharding.is_equivalent_to(named_sharding(name, a.shape, placement.mesh), a.ndim)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=4,model=4", "takes 16 devices, this process has 8"),
        ("data=3", r"data\.rows=4 do not divide over data=3"),
        ("rows=2", "no rule speaks of axis 'rows'"),
    ],
)
def test_meshes_that_cannot_be_are_refused(mesh: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement.parse(mesh, 4)
