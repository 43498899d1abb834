"""One experiment: a TOML file and overrides in, a typed and validated object out."""

import copy
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import tomli_w
import torch

from protofed import schema
from protofed.data.partition import PARTITIONS
from protofed.data.sources import Data
from protofed.errors import UserError, nearest
from protofed.importing import MEMORY, is_path
from protofed.method import Method
from protofed.methods import METHODS
from protofed.models import MODELS, own
from protofed.ops.optim import Optimizer
from protofed.registry import find_method, name_of
from protofed.sections import EngineChoice, Evaluate, Join, ModelChoice, Record, Scalars


@dataclass(frozen=True)
class Experiment(Scalars):
    """All that defines a run."""

    method: Method = field(default_factory=METHODS["fedproto"])
    model: tuple[ModelChoice, ...] = (ModelChoice("cnn_digits"),)
    data: Data = field(default_factory=Data)
    partition: Any = field(default_factory=PARTITIONS["nway_kshot"])
    optimizer: Optimizer = field(default_factory=Optimizer)
    engine: EngineChoice = field(default_factory=EngineChoice)
    evaluate: Evaluate = field(default_factory=Evaluate)
    record: Record = field(default_factory=Record)
    join: Join = field(default_factory=Join)

    @classmethod
    def load(cls, source: str | Path, *overrides: str) -> "Experiment":
        """From a file, or the name of a shipped one ("fedproto/mnist_n3"), with "key.sub=value" overrides."""
        path = find(source)
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid TOML: {error}.") from None
        return cls.from_dict(override(raw, overrides))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Experiment":
        """From the tables of a file."""
        raw = dict(raw)
        sections = {name: raw.pop(name, {}) for name in SECTIONS}
        for name, section in sections.items():
            if isinstance(section, str) or (name == "model" and _all_names(section)):
                sections[name] = {"name": section}
            elif not isinstance(section, dict) and not (name == "model" and isinstance(section, list)):
                raise UserError(f"{name} = {section!r} should be a table: write [{name}] and its keys below it.")
        for key, value in raw.items():
            if key not in schema.fields(Scalars):
                raise UserError(f"unknown key {key} = {value!r}. {_nearest_key(key, sections)}")
        return cls(
            **schema.check("", Scalars, raw),
            method=_method(sections["method"]),
            model=_models(sections["model"]),
            data=Data(**schema.check("data", Data, sections["data"])),
            partition=_named("partition", PARTITIONS, sections["partition"], "nway_kshot"),
            optimizer=Optimizer(**schema.check("optimizer", Optimizer, sections["optimizer"])),
            engine=EngineChoice(**schema.check("engine", EngineChoice, sections["engine"])),
            evaluate=Evaluate(**schema.check("evaluate", Evaluate, sections["evaluate"])),
            record=Record(**schema.check("record", Record, sections["record"])),
            join=Join(**schema.check("join", Join, sections["join"])),
        ).checked()

    def checked(self) -> "Experiment":
        """What no key alone can tell."""
        if len(self.model) > self.clients:
            raise UserError(
                f"model.name lists {len(self.model)} models, but there are only clients = {self.clients}. List fewer."
            )
        if self.held_out_clients >= self.clients:
            raise UserError(
                f"held_out_clients = {self.held_out_clients} of clients = {self.clients} leaves nobody to train. "
                "Hold out fewer."
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as `from_dict` takes it."""
        scalars = {f.name: getattr(self, f.name) for f in fields(Scalars)}
        if all(choice.options == self.model[0].options for choice in self.model):
            names = [choice.name for choice in self.model]
            model: Any = {"name": names[0] if len(names) == 1 else names, **self.model[0].options}
        else:
            model = [{"name": choice.name, **choice.options} for choice in self.model]
        return scalars | {
            "method": {"name": self.method_name, **asdict(self.method)},
            "model": model,
            "data": _table({}, self.data),
            "partition": _table(PARTITIONS, self.partition),
            "optimizer": _table({}, self.optimizer),
            "engine": _table({}, self.engine),
            "evaluate": _table({}, self.evaluate),
            "record": _table({}, self.record),
            "join": _table({}, self.join),
        }

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())

    @property
    def method_name(self) -> str:
        return name_of(type(self.method))

    def model_of(self, client: int) -> ModelChoice:
        """The list of models is dealt in blocks: of three models, the first third of the clients gets the first."""
        return self.model[client * len(self.model) // self.clients]

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UserError(
                f"device = {self.device!r}, but torch sees {torch.cuda.device_count()} GPUs here. Use device = 'cpu'."
            )
        return device


SECTIONS = ("method", "model", "data", "partition", "optimizer", "engine", "evaluate", "record", "join")
SHORT = ("method", "model", "data", "partition", "optimizer", "engine")  # "method=fedavg" is "method.name=fedavg"
NAMED = ("method", "model", "partition")  # their keys depend on their name


def override(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply "key.sub=value". Naming another method, model, partition or preset starts from that one's own fields."""
    result = copy.deepcopy(dict(raw))
    pairs = [_pair(text) for text in overrides]
    for keys, value in pairs:
        section, is_name = keys[0], keys[1:] == ["name"] or keys == [keys[0]]
        if section in NAMED and is_name and _name(result.get(section)) != value:
            result[section] = {"name": value}
    if any(keys == ["method", "preset"] for keys, _ in pairs):
        named = _name(result.get("method"))
        result["method"] = {"name": named} if named else {}
    for keys, value in pairs:
        if len(keys) == 1 and keys[0] in SHORT and not isinstance(value, dict):
            keys = [keys[0], "name"]
        table: Any = result
        for key in keys[:-1]:
            inner = table.get(key, {})
            inner = {"name": inner} if isinstance(inner, str) and key in SECTIONS else inner
            if not isinstance(inner, dict):
                raise UserError(f"{'.'.join(keys)} = {value!r} cannot be set: {key} is {inner!r}, not one table.")
            table[key] = table = inner
        table[keys[-1]] = value
    return result


def _all_names(section: Any) -> bool:
    return isinstance(section, list) and bool(section) and all(isinstance(name, str) for name in section)


def _nearest_key(key: str, sections: Mapping[str, Any]) -> str:
    """A key of some section, or the nearest one outside of any."""
    kinds: dict[str, Any] = {
        "method": METHODS.get(_name(sections["method"]) or "fedproto"),
        "partition": PARTITIONS.get(_name(sections["partition"]) or "nway_kshot"),
        "optimizer": Optimizer,
        "data": Data,
        "engine": EngineChoice,
        "evaluate": Evaluate,
        "record": Record,
        "join": Join,
    }
    for section, kind in kinds.items():
        if kind is not None and key in schema.fields(kind):
            return f"Did you mean {section}.{key}?"
    return nearest(key, [*schema.fields(Scalars), *SECTIONS])


def _pair(text: str) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{text!r} is not an override: write key=value, such as method.lam=0.5 or rounds=10.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    return key.strip().split("."), parsed


def _name(section: Any) -> Any:
    return section.get("name") if isinstance(section, dict) else section


def _named(section: str, registry: Mapping[str, Any], raw: Mapping[str, Any], default: str) -> Any:
    name = raw.get("name", default)
    if not isinstance(name, str) or name not in registry:
        raise UserError(f"{section}.name = {name!r} is unknown. {nearest(str(name), registry)}")
    kind = registry[name]
    return kind(**schema.check(section, kind, {k: v for k, v in raw.items() if k != "name"}))


def _method(raw: Mapping[str, Any]) -> Method:
    kind = find_method(raw.get("name", "fedproto"))
    given = {key: value for key, value in _preset(raw, kind).items() if key != "name"}
    method: Method = kind(**schema.check("method", kind, given))
    if method.inference not in method.scores:
        name = raw.get("name", "fedproto")
        raise UserError(
            f"method.inference = {method.inference!r}, but {name} does not score by prototypes. "
            "Use method.inference = 'head'."
        )
    return method


def _preset(raw: Mapping[str, Any], kind: type[Method]) -> dict[str, Any]:
    """The section with the fields of its preset filled in; what is given beside it counts more."""
    fields = dict(raw)
    preset = fields.pop("preset", None)
    if preset is None:
        return fields
    if preset not in kind.presets:
        raise UserError(f"method.preset = {preset!r} is unknown. {nearest(str(preset), kind.presets)}")
    return kind.presets[preset] | fields


def _models(raw: Any) -> tuple[ModelChoice, ...]:
    tables = raw if isinstance(raw, list) else [raw]
    choices = []
    for table in tables:
        if not isinstance(table, dict):
            raise UserError(f"model = {raw!r} should be a table [model], or several [[model]].")
        named = table.get("name", "cnn_digits")
        options = {key: value for key, value in table.items() if key != "name"}
        for name in named if isinstance(named, list) else [named]:
            if is_path(name) or str(name).startswith(MEMORY):
                choices.append(ModelChoice(name, own.check(name, options)))
            elif not isinstance(name, str) or name not in MODELS:
                raise UserError(
                    f"model.name = {name!r} is unknown. {nearest(str(name), MODELS)} "
                    "One of your own is named by import path: mypackage.module:Net."
                )
            else:
                choices.append(ModelChoice(name, schema.check("model", MODELS[name], options)))
    if not choices:
        raise UserError("model.name = [] names no model. Name one, or a list that is dealt to the clients.")
    return tuple(choices)


def _table(registry: Mapping[str, Any], section: Any) -> dict[str, Any]:
    names = [key for key, kind in registry.items() if kind is type(section)]
    return {"name": names[0], **asdict(section)} if names else asdict(section)


def configs() -> Path:
    """Where the shipped experiments lie: in the package, or beside it in a checkout."""
    here = Path(__file__).parent
    return next((p for p in (here / "configs", here.parent.parent / "configs") if p.is_dir()), here / "configs")


def shipped() -> list[str]:
    """Names of the shipped experiments."""
    return sorted(p.relative_to(configs()).with_suffix("").as_posix() for p in configs().rglob("*.toml"))


def find(source: str | Path) -> Path:
    """The file of an experiment, given by path or by name."""
    for path in (Path(source), configs() / f"{source}.toml"):
        if path.is_file():
            return path
    hint = nearest(str(source).removeprefix("configs/").removesuffix(".toml"), shipped())
    raise UserError(f"there is no experiment {str(source)!r}, neither as a file nor as a shipped one. {hint}")
