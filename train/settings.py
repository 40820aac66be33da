"""A run as a TOML file: read, checked, and refused by name where something is wrong."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

from train.checkpoints import KeepSettings
from train.data import DataSettings
from train.optimizer import OptimizerSettings
from train.parameters import RECIPES, Choice
from train.step import LossSettings


class SettingsError(ValueError):
    """A configuration that cannot be used: names the file, the field, the value and the remedy."""


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """What is trained.

    config: a config.json in the release's layout: the model starts from random weights. checkpoint: a model directory: it starts
        from those. One of the two, relative to the configuration file.
    compute_dtype: of activations; master weights are float32 either way. fake_quant: with the roundings of the released model.
    weights: of a quantised checkpoint: "float32" makes numbers of codes, which can be trained; "stored" keeps the codes, frozen,
        for adapters on top.
    """

    config: str = ""
    checkpoint: str = ""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    fake_quant: bool = False
    weights: Literal["float32", "stored"] = "float32"

    def __post_init__(self) -> None:
        if bool(self.config) == bool(self.checkpoint):
            raise ValueError("give either model.config (random weights) or model.checkpoint (a model directory)")


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Adapters on frozen weights.

    rank: 0 for none. targets: shell patterns on the dotted paths of linears. alpha: their product is scaled by alpha / rank.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("layers.attn.*", "layers.ffn.shared_experts.*")

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"lora.rank={self.rank} must not be negative")


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """How long, where to, and what is told.

    out: folder of checkpoints, metrics and pictures, relative to the configuration file.
    recipe: which parameters are trained: one of RECIPES; by default "adapters" where there are any, else "everything".
    train, freeze: shell patterns on dotted paths, instead of and on top of the recipe.
    export: how the trained model is written to out/model at the end, in the release's layout ("" not at all); of a run with
        adapters those are written, to out/adapters.
    mesh: devices by axis, "data=2,model=4": rows go over "data", parameters as `csa2_jax.sharding` says. "" for one device.
    evaluate_every: steps between evaluations on held-out data, the first before any step; 0 for the end only.
    evaluate_batches: most batches of one.
    """

    out: str = ""
    steps: int = 1000
    seed: int = 0
    recipe: str = ""
    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    mesh: str = ""
    log_every: int = 10
    evaluate_every: int = 200
    evaluate_batches: int = 8
    tensorboard: bool = True
    export: Literal["", "bf16", "f32", "quantised"] = "bf16"

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("log_every", 1), ("evaluate_every", 0), ("evaluate_batches", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"run.{name}={getattr(self, name)} must be at least {least}")
        if not self.out:
            raise ValueError("run.out is missing: name the folder that checkpoints and metrics go to")
        if self.recipe and self.recipe not in RECIPES:
            raise ValueError(f"run.recipe={self.recipe!r} is unknown; choose from {sorted(RECIPES)}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything about a run; each field is a table of the TOML file."""

    model: ModelSettings
    data: DataSettings
    run: RunSettings
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    loss: LossSettings = dataclasses.field(default_factory=LossSettings)
    lora: LoraSettings = dataclasses.field(default_factory=LoraSettings)
    checkpoints: KeepSettings = dataclasses.field(default_factory=KeepSettings)
    base: Path = Path()  # relative names start here

    def choice(self) -> Choice:
        """The parameters to train."""
        named = Choice.recipe(self.run.recipe or ("adapters" if self.lora.rank else "everything"))
        return Choice(self.run.train or named.train, named.freeze + self.run.freeze)

    def path(self, name: str) -> Path:
        """A file or folder that the settings name."""
        return (self.base / name).resolve()


def read_settings(path: Path, changes: typing.Sequence[str] = ()) -> Settings:
    """Settings from a TOML file, with `changes` of the form "data.rows=4" on top."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path} does not exist: give a configuration such as configs/train_tiny.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None
    for change in changes:
        _change(tables, change)
    return parse_settings(tables, path.resolve().parent, str(path))


def parse_settings(tables: dict[str, Any], base: Path, where: str) -> Settings:
    """Settings from parsed TOML."""
    hints = {f.name: f for f in dataclasses.fields(Settings) if f.name != "base"}
    types_ = typing.get_type_hints(Settings)
    _known(tables, list(hints), where, "table")
    made: dict[str, Any] = {"base": base}
    for name, field in hints.items():
        if name in tables:
            made[name] = _section(types_[name], tables[name], name, where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            made[name] = _section(types_[name], {}, name, where)
    return Settings(**made)


def _section(cls: type, values: Any, section: str, where: str) -> Any:
    if not isinstance(values, dict):
        raise SettingsError(f"{where}: {section}={values!r} must be a table, [{section}]")
    hints = typing.get_type_hints(cls)
    _known(values, list(hints), where, f"field of [{section}]")
    made = {name: _value(hints[name], value, f"{section}.{name}", where) for name, value in values.items()}
    try:
        return cls(**made)
    except ValueError as error:
        raise SettingsError(f"{where}: [{section}] {error}") from None


def _known(found: dict[str, Any], names: list[str], where: str, what: str) -> None:
    for name in found:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise SettingsError(
                f"{where}: {name!r} is no {what}{f'; did you mean {near[0]!r}?' if near else ''} There are {', '.join(names)}"
            )


def _value(kind: Any, value: Any, name: str, where: str) -> Any:
    wanted: str
    if dataclasses.is_dataclass(kind):
        return _section(typing.cast("type", kind), value, name, where)
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
        wanted = "a list of strings"
    elif typing.get_origin(kind) is Literal:
        if value in typing.get_args(kind):
            return value
        wanted = f"one of {', '.join(map(repr, typing.get_args(kind)))}"
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        wanted = "a number"
    elif isinstance(kind, types.UnionType) or not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = {int: "a whole number", bool: "true or false", str: "a string"}.get(kind, str(kind))
    else:
        return value
    raise SettingsError(f"{where}: {name}={value!r} must be {wanted}")


def _change(tables: dict[str, Any], change: str) -> None:
    name, sign, text = change.partition("=")
    section, dot, field = name.partition(".")
    if not (sign and dot and field):
        raise SettingsError(f"{change!r} is no change of a setting: say it as section.field=value, such as data.rows=4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    table = tables.setdefault(section, {})
    if isinstance(table, dict):
        table[field] = value
