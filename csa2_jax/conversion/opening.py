"""A checkpoint of any layout, opened: its configuration, its tensors by the release's names, and that the two match."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from csa2_jax.accounting import account
from csa2_jax.config import ModelConfig
from csa2_jax.conversion.converted import ConvertedFiles, is_converted
from csa2_jax.conversion.port_names import RenamedFiles, is_port
from csa2_jax.manifest import TensorSpec
from csa2_jax.safetensors_io import TensorFiles


@dataclasses.dataclass(frozen=True)
class Opened:
    """An accounted checkpoint. `changed`: the configuration is not word for word that of config.json."""

    config: ModelConfig
    files: TensorFiles | ConvertedFiles
    specs: tuple[TensorSpec, ...]
    changed: bool = False

    @property
    def directory(self) -> Path:
        """Where it is."""
        return self.files.directory


def open_checkpoint(directory: str | os.PathLike[str]) -> Opened:
    """Open a release-layout directory, with the release's names or those of the port in transformers, or a converted one.

    Only headers are read. Raises CheckpointError for what does not match config.json, FileNotFoundError for what is not there.
    """
    directory = Path(directory)
    if is_converted(directory):
        converted = ConvertedFiles(directory)
        return Opened(converted.config, converted, converted.specs)
    written = config = ModelConfig.from_hf(directory)
    files = TensorFiles(directory)
    if is_port(files):
        files = RenamedFiles(files)
        config = _without_absent_parts(config, files)
    return Opened(config, files, account(config, files), changed=config != written)


def _without_absent_parts(config: ModelConfig, files: TensorFiles) -> ModelConfig:
    """The port's text model has no draft head and no image tower, whatever its config.json says."""
    if config.num_nextn_predict_layers and not any(name.startswith("mtp.") for name in files):
        ratios = config.compress_ratios[: config.num_hidden_layers]
        config = dataclasses.replace(
            config, num_nextn_predict_layers=0, dspark_target_layer_ids=(), compress_ratios=ratios
        )
    if config.has_vision and not any(name.startswith(("vision.", "aligner.", "image_")) for name in files):
        config = dataclasses.replace(config, vision=None)
    return config
