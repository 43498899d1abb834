"""The available methods and models: protofed's, methods of installed packages (entry points), and import paths."""

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from protofed.config import schema
from protofed.config.sections import (
    Attack,
    EngineChoice,
    Evaluate,
    Join,
    Record,
    Robust,
    Selection,
    Stopping,
    Stragglers,
)
from protofed.data import PARTITIONS, Data, Incremental, Skew
from protofed.errors import UserError, did_you_mean
from protofed.importing import imported, is_path, path_of
from protofed.methods import METHODS
from protofed.models import MODELS
from protofed.privacy import Privacy

if TYPE_CHECKING:
    import torch

    from protofed.method import Method


GROUP = "protofed.methods"  # the entry points under which installed packages offer methods
FLOWER = "flwr:"  # begins the name of a partitioner of flwr-datasets
LIGHT: dict[str, Any] = {  # the sections whose classes need no PyTorch
    "data": Data, "engine": EngineChoice, "evaluate": Evaluate, "record": Record, "join": Join, "robust": Robust,
    "attack": Attack, "privacy": Privacy, "selection": Selection, "stopping": Stopping, "skew": Skew,
    "stragglers": Stragglers, "incremental": Incremental,
}  # fmt: skip


def find_method(name: object, key: str = "method.name") -> "type[Method]":
    """A method's class, from METHODS, an entry point, or an import path ("mymethods.root:RootWeighted")."""
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    return whole_method(imported(key, method_path(name, key)), f"{key} = {name!r}")


def method_path(name: object, key: str = "method.name") -> str:
    """The import path of a method: one of METHODS, of an entry point, or given as a path."""
    if isinstance(name, str) and name in METHODS:
        return METHODS.places[name]
    offered = {point.name: point.value for point in entry_points(group=GROUP)}
    path = offered.get(str(name), name)
    if not isinstance(path, str) or not is_path(path):
        raise UserError(f"{key} = {name!r} is unknown. {did_you_mean(str(name), [*METHODS, *offered])}")
    return path


def check_partition(name: object) -> None:
    """Refuse a partition that protofed does not have."""
    if not isinstance(name, str) or name not in PARTITIONS:
        raise UserError(f"partition.name = {name!r} is unknown. {did_you_mean(str(name), PARTITIONS)}")


def check_model(name: object) -> None:
    """Refuse a model that protofed does not have."""
    if not isinstance(name, str) or name not in MODELS:
        raise UserError(
            f"model.name = {name!r} is unknown. {did_you_mean(str(name), MODELS)} "
            "Name your own by its import path: mypackage.module:Net."
        )


def whole_method(kind: Any, called: str = "") -> "type[Method]":
    """Check that methods can be made from a class; errors name it as it was `called`."""
    from protofed.method import Method  # with PyTorch, which the name of a method does not need

    called = called or f"method = {getattr(kind, '__name__', kind)}"
    if not isinstance(kind, type) or not issubclass(kind, Method) or inspect.isabstract(kind):
        lacking = ", ".join(sorted(getattr(kind, "__abstractmethods__", ())))
        raise UserError(
            f"{called} is not a method: it should be a class that extends protofed.Method"
            + (f" and defines {lacking}." if lacking else ".")
        )
    own = [key for key, hint in inspect.get_annotations(kind).items() if "ClassVar" not in str(hint)]
    if own and "__dataclass_fields__" not in vars(kind):
        raise UserError(
            f"{called} has the field {own[0]} but is not a dataclass. Write @dataclass(frozen=True) above the class."
        )
    for one in dataclasses.fields(kind):
        if one.init and one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            raise UserError(
                f"{called}: its field {one.name} has no default. Give it one, as in {one.name}: float = 1.0."
            )
    return kind


def is_method(name: str) -> bool:
    """Whether `find_method` accepts it: a method's name, or an import path."""
    return name in METHODS or is_path(name) or name in {point.name for point in entry_points(group=GROUP)}


def name_of(kind: "type[Method]") -> str:
    """The name by which `find_method` finds a class."""
    if name := METHODS.name_of(kind):
        return name
    path = path_of(kind)
    if path is None:
        raise UserError(
            f"{kind.__name__} is defined inside of a function, where no run can find it again. "
            "Define it at the top of a file."
        )
    return next((point.name for point in entry_points(group=GROUP) if point.value == path), path)


def all_methods() -> "dict[str, type[Method]]":
    """protofed's methods and those of entry points, without the ones that cannot be loaded."""
    found = dict(METHODS)
    for point in entry_points(group=GROUP):
        try:
            found.setdefault(point.name, find_method(point.name))
        except UserError:
            continue
    return found


def preset_filled(raw: Mapping[str, Any], kind: "type[Method]") -> dict[str, Any]:
    """The section with its preset's fields filled in; keys given explicitly win."""
    fields = dict(raw)
    preset = fields.pop("preset", None)
    if preset is None:
        return fields
    if not kind.presets:
        raise UserError(
            f"method.preset = {preset!r}: {raw.get('name')} has no presets. Leave it out, or set the method's own keys."
        )
    if not isinstance(preset, str) or preset not in kind.presets:
        raise UserError(f"method.preset = {preset!r} is unknown. {did_you_mean(str(preset), kind.presets)}")
    return kind.presets[preset] | fields


@dataclass(frozen=True)
class ModelChoice:
    """One architecture of the [model] section, with its fields."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A label that distinguishes choices of the same model with different fields."""
        usual = {key: default for key, (_, default) in schema.fields(MODELS[self.name]).items()} if self.known else {}
        given = {key: value for key, value in self.options.items() if key not in usual or value != usual[key]}
        return self.name + (f"({', '.join(f'{k}={v}' for k, v in given.items())})" if given else "")

    @property
    def known(self) -> bool:
        """Whether it comes with protofed."""
        return self.name in MODELS

    @property
    def takes_tokens(self) -> bool:
        """Whether whole numbers reach it unchanged: a user's own model may take them; of protofed's models, few do."""
        return not self.known or getattr(MODELS[self.name], "takes_tokens", False)

    @property
    def pretrained(self) -> bool:
        """Whether it is an encoder that comes with its weights and scales its own inputs."""
        return self.known and getattr(MODELS[self.name], "pretrained", False)

    @property
    def frozen(self) -> bool:
        """Whether it is a pretrained encoder of which only the part on top is trained."""
        return self.pretrained and self.options.get("body", "frozen") == "frozen"

    @property
    def encoder_width(self) -> int:
        """Numbers in a frozen encoder's embedding."""
        width: int = MODELS[self.name].embedding  # type: ignore[attr-defined]
        return width

    def unfit_data(self, x: Any, shape: tuple[int, ...]) -> str:
        """Why a pretrained encoder cannot take these raw samples, in words; empty if it can."""
        return str(MODELS[self.name].unfit_data(x, shape, **self.options)) if self.pretrained else ""  # type: ignore[attr-defined]

    def settled(self, shape: tuple[int, ...]) -> "ModelChoice":
        """The same for samples of any shape: a pretrained encoder treats all of them like those of this shape."""
        if not self.pretrained:
            return self
        options: dict[str, Any] = MODELS[self.name].settled(shape, **self.options)  # type: ignore[attr-defined]
        return ModelChoice(self.name, options)

    def trained_part(self, shape: tuple[int, ...], classes: int) -> "torch.nn.Module":
        """Build what is trained: the whole model, or what follows a frozen encoder, whose embeddings are its inputs."""
        if not self.frozen:
            return self(shape, classes)
        made: torch.nn.Module = MODELS[self.name].behind(shape, classes, **self.options)  # type: ignore[attr-defined]
        return made

    def __call__(self, shape: tuple[int, ...], classes: int, sample: "torch.Tensor | None" = None) -> "torch.nn.Module":
        """Build the module; a user's own model is inspected with sample inputs (B, ...)."""
        if self.known:
            return MODELS[self.name](shape, classes, **self.options)
        from protofed.models import own  # needed only for models of the user's own

        return own.build_own(self.name, self.options, shape, classes, sample)
