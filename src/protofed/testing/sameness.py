"""Rules about what must not matter: repetition, order, grouping, padding, and which clients are trained together."""

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from protofed.local import Update
from protofed.method import Batch, Client, LocalData, Params, Phase, Tree
from protofed.ops import random
from protofed.ops.trees import alone, merge, under
from protofed.testing.broken import Broken, require_finite, require_same
from protofed.testing.trees import Leaves, copied, difference, leaves
from protofed.testing.trial import COHORT, Trial, padded, state_of


def purity(trial: Trial) -> None:
    """Functions change nothing that they are given, and draw random numbers only from keys."""
    method, remedy = trial.method, "Make a new tensor or dict in place of changing one (no `x += y`, no `x[i] = y`)."
    for start in (method.init_server, method.init_client):
        spec = trial.spec()
        before: Tree = copied(spec)
        start(spec)
        require_same(spec, before, 0, f"{start.__name__} changed its spec, ", remedy)
    for round in trial.rounds:
        require_same(round.given, round.before, 0, "a round changed what it was given, ", remedy)
    last = trial.rounds[-1]
    client, down = last.updates[0].client, trial.down(last.after, 0)
    given = {"server": last.after, "client": client, "down": down, "x": trial.samples(0).x}
    before = copied(given)
    method.predict(trial.model, client, given["x"], down)
    method.global_client(last.after)
    trial.finish(0, client, last.after)
    where = "predict, global_client or the last phases changed what they were given, "
    require_same(given, before, 0, where, remedy)
    torch.default_generator.manual_seed(2)
    again = trial.play(COHORT, COHORT)
    require_same(
        state_of(again),
        state_of(trial.rounds),
        0,
        "in two runs, with two global seeds of torch, ",
        "Draw from data.key or spec.generator() (protofed.ops.random), and never in `loss`.",
    )


def grouping(trial: Trial) -> None:
    """Uploads may be merged in any grouping."""
    method, last = trial.method, trial.rounds[-1]
    a, b, c, d = (alone(update.up) for update in last.updates.values())
    for name, up in {
        "(a+b)+(c+d)": merge(merge(a, b), merge(c, d)),
        "a+(b+(c+d))": merge(a, merge(b, merge(c, d))),
    }.items():
        require_same(
            method.aggregate(last.server, up, torch.tensor(COHORT)),
            last.after,  # of ((a+b)+c)+d
            1e-4,
            f"uploads merged as {name} against ((a+b)+c)+d, server",
            "Let a Mean hold sums and weights that simply add, in float32; leave means and choices to `aggregate`.",
        )


def order(trial: Trial) -> None:
    """The order of clients in a cohort does not matter, except for rows that the server keeps of the last cohort."""
    remedy = "Combine by sums, or by the clients' numbers in `cohort`, never by a row's position."
    where, last = "after two rounds with the cohort in other orders, ", (1, 3, 2, 0)
    shuffled, straight = state_of(trial.play((2, 0, 3, 1), last)), state_of(trial.rounds)
    wanted, back = leaves(straight["server"]), torch.tensor([last.index(number) for number in COHORT])

    def in_order(place: str, leaf: Any) -> Any:
        by_row = isinstance(leaf, Tensor) and leaf.shape[:1] == (len(COHORT),)
        return leaf[back] if by_row and difference(leaf, wanted.get(place), 1e-3) else leaf

    server = Leaves({place: in_order(place, leaf) for place, leaf in leaves(shuffled["server"]).items()})
    require_same(server, wanted, 1e-3, f"{where}server", remedy)
    require_same(shuffled["clients"], straight["clients"], 1e-3, f"{where}client", remedy)


def padding(trial: Trial) -> None:
    """Samples with mask 0 change neither loss, nor gradient, nor upload."""
    method, last = trial.method, trial.rounds[-1]
    remedy = "Take means by batch.mean(per_sample) and sums by batch.mask; len(batch.y) counts padding."
    for number in COHORT:
        data, down, client = trial.local(number, 1), last.downs[number], last.clients[number]
        batch = trial.epoch(number, 1, 0)[0]
        nothing = padded(batch, 2)._replace(mask=torch.zeros(len(batch.y) + 2))
        for receive, phases in (
            (method.receive, method.phases()),
            (method.last_receive, method.last_phases()),
        ):
            ready = receive(trial.model, client, data, down)
            for phase in phases:
                about = f"in the phase that trains {phase.trains}, client {number}, "
                plain, more = (step(trial, phase, ready, b, down) for b in (batch, padded(batch, 3)))
                require_same(more, plain, 3e-3, about, remedy)
                require_finite(step(trial, phase, ready, nothing, down), f"on padding alone, {about}", remedy)
        update = trial.update(number, client, 1, down, pads=3)
        for part in Update._fields:
            new, old = getattr(update, part), getattr(last.updates[number], part)
            require_same(new, old, 1e-2, f"in a whole round of client {number}, {part}", remedy)


def step(trial: Trial, phase: Phase, client: Client, batch: Batch, down: Tree) -> Tree:
    """The loss, what it reports, and its gradient."""
    loss_of = phase.loss or trial.method.loss

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Tree]]:
        model = trial.model.training(client.buffers, random.key("step"))
        loss = loss_of(model, client._replace(params=client.params | trained), batch, down)
        value, seen = loss if isinstance(loss, tuple) else (loss, ())
        return value, (value, seen)

    gradient, (value, seen) = grad(objective, has_aux=True)(under(client.params, phase.trains))
    return {"loss": value, "seen": seen, "gradient": gradient}


def stacking(trial: Trial) -> None:
    """Two clients at once give what each gives alone, unless `stackable` is False."""
    if not trial.method.stackable:
        return
    method, last, pair = trial.method, trial.rounds[-1], (0, 3)
    remedy = "Decide by torch.where, not by if or float(); or set stackable = False."
    datas = [trial.local(number, 1) for number in pair]
    whole = [Batch(*map(torch.cat, zip(*data.batches, strict=True))) for data in datas]
    most = max(len(batch.y) for batch in whole)
    even = [padded_to(batch, most) for batch in whole]
    datas = [data._replace(batches=[batch]) for data, batch in zip(datas, even, strict=True)]

    def all_of_it(client: Client, data: LocalData, down: Tree) -> Tree:
        client = method.receive(trial.model, client, data, down)
        steps = [step(trial, phase, client, data.batches[0], down) for phase in method.phases()]
        up, client = method.upload(trial.model, client, data._replace(seen=steps[-1]["seen"]), down)
        return steps, up, client, method.predict(trial.model, client, data.batches[0].x, down)

    inputs = [(last.clients[n], data, last.downs[n]) for n, data in zip(pair, datas, strict=True)]
    alone_ = [all_of_it(*mine) for mine in inputs]
    try:
        together = vmap(all_of_it)(*tree_map(lambda *leaves: torch.stack(leaves), *inputs))
    except RuntimeError as error:
        raise Broken(f"torch.vmap says: {str(error).splitlines()[0]} {remedy}") from error
    for row, number in enumerate(pair):
        mine = tree_map(lambda t, row=row: t[row], together)
        require_same(mine, alone_[row], 1e-3, f"of client {number}, stacked and alone, ", remedy)


def padded_to(batch: Batch, size: int) -> Batch:
    """The batch with added zeros that do not count."""
    more = size - len(batch.y)
    return Batch(*(torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for t in batch))
