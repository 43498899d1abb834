"""Trains a group of clients in lanes, each of which moves from client to client."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from protofed import local
from protofed.engines.stacked.cache import Steps
from protofed.engines.stacked.groups import ClientGroup, Sizes, Work
from protofed.engines.stacked.members import Members
from protofed.engines.stacked.packing import Lanes, fill_lanes
from protofed.engines.stacked.step import Carried, Now, Traced, now_of
from protofed.engines.stacks import along, cloned, put_rows
from protofed.method import Client, Mean, Phase, Tree
from protofed.ops import optim, random
from protofed.ops.replay import Replay
from protofed.ops.trees import under

TRIED = 5  # steps from which the seconds of a round are estimated
DRAWN = 2**27  # most dropout decisions drawn in advance
BLOCK = 2**20  # how many of them at a time


class LaneTraining:
    """Trains groups of clients, all phases of a round."""

    def __init__(self, members: Members, sizes: Sizes, steps: Steps) -> None:
        self.members, self.sizes, self.steps = members, sizes, steps
        self.reference, self.optimizer, self.device = members.reference, members.reference.optimizer, members.device
        self.trial: list[float] | None = None  # seconds of training, if only a few steps are taken to measure it
        self._draws: dict[str, dict[str, torch.Size]] = {}

    def train(self, work: Work, phases: Sequence[Phase], client: Client) -> tuple[Client, Mean, Tree]:
        """All phases of all clients: what `local.train` does for one client."""
        numbers, samples = work.group.numbers, self.members.samples(work.group.architecture)
        key, order = random.fold(work.key, -1), samples.keys("order", work.round, numbers)
        steps = [self.members.federation.steps(i) for i in numbers]
        many, width = len(numbers), self.sizes.width(work.group)
        client = cloned(client)
        home = Carried(client, (), torch.zeros(many, device=self.device), torch.zeros(many, device=self.device), ())  # type: ignore[arg-type]
        lr, local_epochs = self.reference.rate(work.round, numbers), self.reference.local_epochs
        paces = self.reference.paces(work.round, numbers)
        for phase, epochs, rate in local.planned(work.method, phases, client.params, lr, local_epochs):
            whole = [local.steps_in_time(pace, epochs, n) for pace, n in zip(paces, steps, strict=True)]
            lanes = fill_lanes(whole, width)
            if not lanes.length:
                continue  # no client in this group has data
            feed, at = (
                self._feed(work.group, lanes, epochs, whole, order, key),
                torch.as_tensor(rate, device=self.device),
            )
            home = self._phase(work, phase, home, lanes, feed, at)
        return home.client, Mean(home.loss, home.samples), home.seen

    def _phase(self, work: Work, phase: Phase, home: Carried, lanes: Lanes, feed: Tree, rate: Tensor) -> Carried:
        """One phase of all clients in lanes; `home` holds the clients that are not in a lane. `rate` is one for all of
        them, or one each (M,)."""
        group, down, dims = work.group, work.down, work.dims
        samples = self.members.samples(group.architecture)
        moves = self._moves(lanes)
        black, at = samples.black(group.numbers), self.members.ids(lanes.who[0].tolist())
        client = along(at, home.client)
        moments = vmap(lambda p: optim.first_moments(self.optimizer, p, phase.plain))(
            under(client.params, phase.trains)
        )
        zero = torch.zeros(len(at), device=self.device)
        carried = Carried(client, cloned(moments), zero, zero.clone(), ())
        fixed = (along(at, black), along(at, down, dims), along(at, rate) if rate.ndim else rate)
        step, carried = self.steps.step(work, phase, carried, feed, fixed)
        home = home._replace(seen=tree_map(lambda t: t.new_zeros(len(group.numbers), *t.shape[1:]), carried.seen))
        if isinstance(step, Replay):
            carried, _, _, fixed = step.inputs
        else:
            leaves, form = tree_flatten(feed)
            times = list(zip(*(leaf.unbind(0) for leaf in leaves), strict=True))
            step = step.bind(carried, *fixed[1:]) if isinstance(step, Traced) else partial(_loose, step, carried, fixed)
        started: list[float] = []
        for now in range(lanes.length):
            if self.trial is not None:
                started.append(self._time())
                if now == min(TRIED, lanes.length - 1):
                    self.trial.append(float(min(np.diff(started), default=0.0)) * lanes.length)
                    return home
            if now in moves:
                _leave(carried, home, *moves[now][:2])
                _enter(carried, home, fixed, (black, down, rate), dims, *moves[now][::2])
            if isinstance(step, Replay):
                step()
            else:
                step(now_of(samples, tree_unflatten(times[now], form), fixed))
        _leave(carried, home, *moves[lanes.length][:2])
        return home

    def _feed(
        self, group: ClientGroup, lanes: Lanes, epochs: int, whole: Sequence[int], order: Tensor, key: Tensor
    ) -> Tree:
        """What the lanes get at each time (T, W, ...): samples, keys, dropouts, whether busy and in the last epoch.
        `whole`: how many steps each client takes in all."""
        samples = self.members.samples(group.architecture)
        plan = samples.feed(group.numbers, order, epochs, lanes)
        own = np.array([self.members.federation.steps(i) for i in group.numbers])[lanes.who]
        last = lanes.step >= np.array(whole)[lanes.who] - own
        who, step, busy, last = torch.from_numpy(np.stack([lanes.who, lanes.step, lanes.busy, last])).to(self.device)
        keys = random.fold(key[who], step[..., None])
        return plan, keys, self._draw(group, keys), busy.bool(), last.bool()

    def _draw(self, group: ClientGroup, keys: Tensor) -> dict[str, Tensor]:
        """Dropout masks of all steps (T, W, B, ...), unless they would not fit in memory."""
        model, federation = self.members.model(group.numbers[0]), self.members.federation
        with self.members.lock:
            if group.architecture not in self._draws:
                inputs = federation.blank(group.numbers[0], federation.widest)
                self._draws[group.architecture] = model.draws(inputs)
            draws = self._draws[group.architecture]
        each = sum(s.numel() for s in draws.values()) * keys.shape[1]
        if not each or each * len(keys) > DRAWN:
            return {}
        blocks = [model.draw(k, draws) for k in torch.split(keys, max(1, BLOCK // each))]
        return {name: torch.cat([block[name] for block in blocks]) for name in draws}

    def _moves(self, lanes: Lanes) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """For every change: its lanes, who leaves and who enters, in one transfer to the device."""
        parts = [(when, part) for when, change in lanes.changes.items() for part in change]
        whole = self.members.ids([number for _, part in parts for number in part])
        found: dict[int, list[Tensor]] = {}
        for (when, _), piece in zip(parts, torch.split(whole, [len(part) for _, part in parts]), strict=True):
            found.setdefault(when, []).append(piece)
        return {when: (lane, leave, enter) for when, (lane, leave, enter) in found.items()}

    def _time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _leave(carried: Carried, home: Carried, lanes: Tensor, clients: Tensor) -> None:
    """Move clients from their lanes back home."""
    put_rows(home.client, clients, along(lanes, carried.client))
    put_rows(home.seen, clients, along(lanes, carried.seen))
    home.loss.index_add_(0, clients, carried.loss[lanes])
    home.samples.index_add_(0, clients, carried.samples[lanes])


def _enter(
    carried: Carried, home: Carried, fixed: Tree, private: Tree, dims: Tree, lanes: Tensor, clients: Tensor
) -> None:
    """Move clients into free lanes, with all their state."""
    put_rows(carried.client, lanes, along(clients, home.client))
    put_rows((carried.moments, carried.loss, carried.samples, carried.seen), lanes, 0)
    put_rows(fixed[0], lanes, along(clients, private[0]))
    put_rows(fixed[1], lanes, along(clients, private[1], dims), dims)
    if private[2].ndim:
        put_rows(fixed[2], lanes, along(clients, private[2]))


def _loose(step: Callable[..., Any], carried: Carried, fixed: Tree, now: Now) -> None:
    step(carried, now, *fixed[1:])
