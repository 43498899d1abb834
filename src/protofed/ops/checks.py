"""What a method needs of the clients' architectures, said before training starts."""

from collections.abc import Sequence

from protofed.errors import UserError
from protofed.method import Spec
from protofed.ops.trees import under


def same_shapes(method: str, specs: Sequence[Spec], shared: str | Sequence[str] = "") -> None:
    """Everything that is averaged must have one shape."""
    first = specs[0]
    mine = under(first.params, shared)
    for other in specs[1:]:
        theirs = under(other.params, shared)
        differing = [n for n in mine.keys() | theirs.keys() if n not in mine or n not in theirs]
        differing += [n for n in mine.keys() & theirs.keys() if mine[n].shape != theirs[n].shape]
        if differing:
            name = min(differing)
            shapes = [tuple(p[name].shape) if name in p else "none" for p in (mine, theirs)]
            raise UserError(
                f"method.name = {method!r} averages one architecture, but {first.architecture} and "
                f"{other.architecture} differ in {name} ({shapes[0]} and {shapes[1]}). "
                "Use fedproto, which shares prototypes, or give all clients one model."
            )


def same_width(method: str, specs: Sequence[Spec]) -> None:
    """Prototypes of all clients must live in one space."""
    widths = {spec.architecture: spec.dim for spec in specs}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{name}: {dim}" for name, dim in widths.items())
        raise UserError(
            f"method.name = {method!r} compares embeddings of all clients, but the widths of model.name differ "
            f"({listed}). Choose models with one embedding width, or use model.project = 64 (in Python: project=64), "
            "which adds a linear layer to models of your own."
        )
