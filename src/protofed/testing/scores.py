"""Rules about predictions and prototypes."""

import torch

from protofed.method import Client, Tree
from protofed.testing.broken import require
from protofed.testing.trial import CLASSES, NEVER, Trial


def predictions(trial: Trial) -> None:
    """Every client can predict, including one that never took part, and so can the global model; prototypes have the
    right form."""
    first, last = trial.rounds[0].server, trial.rounds[-1].after
    taught, new = trial.rounds[-1].updates[0].client, trial.new(NEVER)
    require_scores(trial, "a client before round one", trial.new(0), first, 0, known=False)
    require_scores(trial, "a client that took part", taught, last, 0)
    require_scores(trial, "a client that never took part", new, last, NEVER)
    require_scores(trial, "a client after the last phases", trial.finish(0, taught, last), last, 0)
    require_scores(trial, "a client that had the last phases only", trial.finish(NEVER, new, last), last, NEVER)
    for server, known in ((first, False), (last, True)):
        common = trial.method.global_client(server)
        if common is not None:
            require_scores(trial, "the global model", common, server, 0, known)
        require_prototypes(trial, taught, server)


def require_scores(trial: Trial, who: str, client: Client, server: Tree, number: int, known: bool = True) -> None:
    x, declared = trial.samples(0).x, trial.method.scores
    scores = trial.method.predict(trial.model, client, x, trial.down(server, number))
    remedy = "Name all that `predict` gives in `scores`."
    require(set(scores) == set(declared), f"{who} gives {sorted(scores)}, but scores = {declared!r}", remedy)
    for name, score in scores.items():
        about, shape = f"{name!r} of {who}", tuple(score.shape)
        require(shape == (len(x), CLASSES), f"{about} has shape {shape}", f"Give (B, C), here {(len(x), CLASSES)}.")
        numbers = not bool((score.isnan() | (score == torch.inf)).any())
        require(numbers, f"{about} has NaN or inf", "Give numbers, and -inf to a class that is not known.")
        some = not known or bool(score.isfinite().any(1).all())
        require(some, f"{about} is -inf for all classes", "Let a client do with what comes down, or with what it has.")


def require_prototypes(trial: Trial, client: Client, server: Tree) -> None:
    x, common = trial.samples(0).x, trial.method.prototypes(server)
    z = tuple(trial.method.embed(trial.model, client, x).shape)
    require(len(z) == 2 and z[0] == len(x), f"embed gives shape {z}", f"Give (B, D), here ({len(x)}, D).")
    own = trial.method.prototypes_of(client, server)
    for name, prototypes in (("prototypes", common), ("prototypes_of", own)):
        if prototypes is None:
            continue
        total, weight = tuple(prototypes.total.shape), tuple(prototypes.weight.shape)
        right = len(weight) == 2 and weight[0] == CLASSES and total == (*weight, z[1])
        remedy = f"Give Mean((C, K, D), (C, K)), here with C = {CLASSES} and D = {z[1]}."
        require(right, f"{name} gives shapes {total} and {weight}", remedy)
