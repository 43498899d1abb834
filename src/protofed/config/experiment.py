"""One experiment: a TOML file and overrides in, a typed and validated object out."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch

from protofed.config import schema
from protofed.config.files import SECTIONS, name_in, override, read_tables
from protofed.config.registry import (
    FLOWER,
    LIGHT,
    ModelChoice,
    check_model,
    check_partition,
    find_method,
    name_of,
    preset_filled,
)
from protofed.config.sections import (
    Attack,
    EngineChoice,
    Evaluate,
    Join,
    Record,
    Robust,
    Scalars,
    Selection,
    Stopping,
    Stragglers,
)
from protofed.data import PARTITIONS, Data, Incremental, Skew
from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.scaling import Scaler
from protofed.errors import UserError, did_you_mean
from protofed.importing import MEMORY, is_path
from protofed.method import Method
from protofed.methods import METHODS
from protofed.models import MODELS
from protofed.ops.optim import Optimizer
from protofed.privacy import Privacy

if TYPE_CHECKING:
    from protofed.data.split import Split

PLAIN: dict[str, Any] = {"optimizer": Optimizer, **LIGHT}  # the sections whose keys do not depend on a name
CHANGED = (
    "robust",
    "attack",
    "privacy",
    "selection",
    "stopping",
    "skew",
    "stragglers",
    "incremental",
)  # sections of which only keys that are not at their defaults are written
SCHEDULE = ("schedule", "warmup", "horizon", "floor", "every", "drop")
LATER = {  # written only if they are not at their defaults
    "data": ("more", "imbalance", "train_samples", "test_samples"), "evaluate": ("auc", "clients"),
    "optimizer": SCHEDULE,
}  # fmt: skip
LATER_OF_PARTITIONS: dict[str | None, tuple[str, ...]] = {"natural": ("per_class", "test_key")}


@dataclass(frozen=True)
class Experiment(Scalars):
    """Everything that defines a run."""

    method: Method = field(default_factory=lambda: METHODS["fedproto"]())
    model: tuple[ModelChoice, ...] = (ModelChoice("cnn_digits"),)
    data: Data = field(default_factory=Data)
    partition: Any = field(default_factory=lambda: PARTITIONS["nway_kshot"]())
    optimizer: Optimizer = field(default_factory=Optimizer)
    engine: EngineChoice = field(default_factory=EngineChoice)
    evaluate: Evaluate = field(default_factory=Evaluate)
    record: Record = field(default_factory=Record)
    join: Join = field(default_factory=Join)
    robust: Robust = field(default_factory=Robust)
    attack: Attack = field(default_factory=Attack)
    privacy: Privacy = field(default_factory=Privacy)
    selection: Selection = field(default_factory=Selection)
    stopping: Stopping = field(default_factory=Stopping)
    skew: Skew = field(default_factory=Skew)
    stragglers: Stragglers = field(default_factory=Stragglers)
    incremental: Incremental = field(default_factory=Incremental)

    @classmethod
    def load(cls, source: str | Path, *overrides: str) -> "Experiment":
        """From a file, or the name of a shipped one ("fedproto/mnist_n3"), with "key.sub=value" overrides."""
        return cls.from_dict(override(read_tables(source), overrides))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Experiment":
        """From the tables of a file."""
        if not isinstance(raw, Mapping):
            raise UserError(f"an experiment is a dict of its keys, not {type(raw).__name__}, such as {{'rounds': 3}}.")
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
        scalars = schema.check_section("", Scalars, raw)
        return cls(**scalars, **{name: _section(name, section) for name, section in sections.items()}).checked()

    def checked(self) -> "Experiment":
        """Checks that involve more than one key."""
        if len(self.model) > self.clients:
            raise UserError(
                f"model.name lists {len(self.model)} models, but there are only clients = {self.clients}. List fewer."
            )
        if self.held_out_clients >= self.clients:
            raise UserError(
                f"held_out_clients = {self.held_out_clients} of clients = {self.clients} leaves nobody to train. "
                "Hold out fewer."
            )
        self.optimizer.check_schedule()
        self.selection.check(self.privacy.noisy, self.privacy.secure_sum)
        self.stragglers.check(self.privacy.noisy, self.evaluate.theory > 0)
        self.stopping.check(self.evaluate, self.privacy.noisy)
        by_sample = self.privacy.noisy and self.privacy.unit == "sample"
        self.incremental.check(self.rounds, self.stopping.patience, self.evaluate.theory > 0, by_sample)
        self.privacy.checked()
        encoders = [choice.name for choice in self.model if choice.pretrained]
        others = [choice.name for choice in self.model if not choice.pretrained]
        if encoders and others and self.data.normalize != "none":
            raise UserError(
                f"{encoders[0]} scales its inputs itself, and {others[0]} takes those of data.normalize = "
                f"{self.data.normalize!r}. With both, use data.normalize = 'none'."
            )
        return self

    @property
    def scheduled(self) -> Optimizer:
        """The optimizer with the step sizes of this many rounds."""
        return self.optimizer.over(self.rounds)

    @property
    def normalize(self) -> str:
        """How inputs are scaled before they reach a model: as `data.normalize` says, except for encoders that scale
        their inputs themselves."""
        return "none" if all(choice.pretrained for choice in self.model) else self.data.normalize

    @property
    def by_client(self) -> bool:
        """Whether uploads are examined client by client before they are combined."""
        privacy = self.privacy
        return self.robust.rule != "none" or self.attack.uploads or privacy.secure_sum or privacy.noisy

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as `from_dict` takes it. CHANGED sections, and keys that were added later, are
        written only if they are not at their defaults, so that older experiments keep their hashes."""
        scalars = {f.name: getattr(self, f.name) for f in fields(Scalars)}
        if all(choice.options == self.model[0].options for choice in self.model):
            names = [choice.name for choice in self.model]
            model: Any = {"name": names[0] if len(names) == 1 else names, **self.model[0].options}
        else:
            model = [{"name": choice.name, **choice.options} for choice in self.model]
        plain = {name: asdict(getattr(self, name)) for name in PLAIN}
        for name, keys in LATER.items():
            plain[name] = schema.without_usual(getattr(self, name), keys)
        changed = {name: schema.changed_keys(getattr(self, name)) for name in CHANGED}
        kind = PARTITIONS.name_of(type(self.partition)) or ""
        tables = plain | {
            "method": {"name": self.method_name, **schema.without_none(self.method)},
            "model": model,
            "partition": ({"name": kind} if kind else {})
            | schema.without_usual(self.partition, LATER_OF_PARTITIONS.get(kind, ())),
            **changed,
        }
        return scalars | {name: tables[name] for name in SECTIONS if tables[name] or name not in changed}

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())

    @property
    def method_name(self) -> str:
        return name_of(type(self.method))

    def model_of(self, client: int) -> ModelChoice:
        """Models are assigned in blocks: with three models, the first third of the clients gets the first one."""
        return self.model[client * len(self.model) // self.clients]

    def federation(
        self,
        domains: Sequence[Domain],
        split: "Split",
        *,
        seed: int | None = None,
        normalize: str | None = None,
        scales: Sequence[Scaler] = (),
    ) -> Federation:
        """All clients' data. Order and normalisation follow this experiment unless arguments say otherwise."""
        if domains[0].computed is not None:
            from protofed.data.computed_batches import (  # few experiments compute their samples
                DrawnFederation,
                DrawnSplit,
            )

            assert isinstance(split, DrawnSplit)
            return DrawnFederation(
                domains[0],
                split,
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                normalize=normalize or self.normalize,
                augmentations=self.data.augment,
                device=self.torch_device(),
                most=min(self.clients, max(1, round(self.participation * self.clients))),
            )
        return Federation(
            domains,
            split,
            seed=self.seed if seed is None else seed,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            normalize=normalize or self.normalize,
            augmentations=self.data.augment,
            device=self.torch_device(),
            scales=scales,
        )

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UserError(
                f"device = {self.device!r}, but torch sees {torch.cuda.device_count()} GPUs here. Use device = 'cpu'."
            )
        return device


def _all_names(section: Any) -> bool:
    return isinstance(section, list) and bool(section) and all(isinstance(name, str) for name in section)


def _nearest_key(key: str, sections: Mapping[str, Any]) -> str:
    """A hint: the section that has this key, or else the closest key outside any section."""
    kinds: dict[str, Any] = {
        "method": METHODS.get(name_in(sections["method"]) or "fedproto"),
        "partition": PARTITIONS.get(name_in(sections["partition"]) or "nway_kshot"),
        **PLAIN,
    }
    for section, kind in kinds.items():
        if kind is not None and key in schema.fields(kind):
            return f"Did you mean {section}.{key}?"
    return did_you_mean(key, [*schema.fields(Scalars), *SECTIONS])


def _section(name: str, raw: Any) -> Any:
    """A section of the file as an object."""
    if name in PLAIN:
        return PLAIN[name](**schema.check_section(name, PLAIN[name], raw))
    return {"method": _method, "model": _models, "partition": _partition}[name](raw)


def _partition(raw: Mapping[str, Any]) -> Any:
    name = raw.get("name", "nway_kshot")
    if isinstance(name, str) and name.startswith(FLOWER):
        from protofed.data.flower import from_flower  # few experiments use it

        return _partition({"name": "flwr", **from_flower(name, raw)})
    check_partition(name)
    kind = PARTITIONS[name]
    return kind(**schema.check_section("partition", kind, {k: v for k, v in raw.items() if k != "name"}))


def _method(raw: Mapping[str, Any]) -> Method:
    kind = find_method(raw.get("name", "fedproto"))
    given = {key: value for key, value in preset_filled(raw, kind).items() if key != "name"}
    method: Method = kind(**schema.check_section("method", kind, given))
    if method.inference not in method.scores:
        name = raw.get("name", "fedproto")
        raise UserError(
            f"method.inference = {method.inference!r}, but {name} does not score by prototypes. "
            "Use method.inference = 'head'."
        )
    return method


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
                from protofed.models import own  # needed only for models of the user's own

                choices.append(ModelChoice(name, own.check_own(name, options)))
            else:
                check_model(name)
                choices.append(ModelChoice(name, schema.check_section("model", MODELS[name], options)))
    if not choices:
        raise UserError("model.name = [] names no model. Name one, or a list that is dealt to the clients.")
    return tuple(choices)
