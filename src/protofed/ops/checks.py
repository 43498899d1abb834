"""What a method requires of the clients' architectures, checked before training starts."""

from collections.abc import Sequence

from protofed.errors import UserError
from protofed.method import Spec
from protofed.ops.trees import under


def same_shapes(method: str, specs: Sequence[Spec], shared: str | Sequence[str] = "") -> None:
    """Check that everything that is averaged has the same shape on all clients."""
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
                f"method.name = {method!r} needs one architecture for all clients, but {first.architecture} and "
                f"{other.architecture} differ in {name} ({shapes[0]} and {shapes[1]}). "
                "Use fedproto, which shares prototypes, or give all clients one model."
            )


def one_encoder(method: str, specs: Sequence[Spec], init: str, head: Sequence[str]) -> None:
    """Check that all clients embed alike: one architecture, and the same weights."""
    bodies = [{n: p for n, p in spec.params.items() if not n.startswith(tuple(head))} for spec in specs]
    same_shapes(method, [spec._replace(params=body) for spec, body in zip(specs, bodies, strict=True)])
    if len(names := list(dict.fromkeys(spec.architecture for spec in specs))) > 1:
        raise UserError(
            f"method.name = {method!r} adds up embeddings of all clients, so they need one encoder, but there are "
            f"{len(names)}: {', '.join(names)}. Give all clients one model, or use fedproto."
        )
    if init != "common":
        raise UserError(
            f"method.init = {init!r} gives every client an encoder of its own, but {method} adds up their embeddings. "
            "Use method.init = 'common'."
        )


def same_width(method: str, specs: Sequence[Spec]) -> None:
    """Check that the embeddings of all clients have the same width."""
    widths = {spec.architecture: spec.dim for spec in specs}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{name}: {dim}" for name, dim in widths.items())
        raise UserError(
            f"method.name = {method!r} compares embeddings of all clients, but the widths of model.name differ "
            f"({listed}). Choose models with one embedding width, or use model.project = 64 (in Python: project=64), "
            "which adds a linear layer to your own models."
        )
