"""What simulated attackers train on: wrong labels, or samples with a trigger in the corner."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from protofed.config.sections import Attack
from protofed.data.batches import Federation, Samples
from protofed.errors import UserError
from protofed.ops import random

TRIGGERED = "triggered"  # test samples with the trigger; counted as right if answered with the attackers' target


def poison(federation: Federation, attack: Attack, attackers: Collection[int]) -> None:
    """Replace the attackers' training samples; for a backdoor, also test all clients on samples with the trigger."""
    if attack.kind not in ("label_flip", "backdoor"):
        return
    if attack.kind == "label_flip":
        federation.replace_train({client: _flipped(federation, client) for client in sorted(attackers)})
        return
    if attack.target >= federation.classes:
        last = federation.classes - 1
        raise UserError(
            f"attack.target = {attack.target}, but the classes are 0 to {last}. Choose a target from 0 to {last}."
        )
    bright = [_bright(federation, domain) for domain in range(len(federation.shapes))]
    federation.replace_train({n: _triggered(federation, n, attack.target, bright) for n in sorted(attackers)})
    tests = [federation.test_part(domain) for domain in range(len(bright))]
    stamped = [
        Samples(stamp(t.x, light), torch.full_like(t.y, attack.target)) for t, light in zip(tests, bright, strict=True)
    ]
    federation.add_tests(TRIGGERED, stamped, [part.y != attack.target for part in tests])


def _flipped(federation: Federation, client: int) -> Samples:
    x, y = federation.train(client)
    return Samples(x, federation.classes - 1 - y)


def _triggered(federation: Federation, client: int, target: int, bright: Sequence[Tensor]) -> Samples:
    """A client's training samples; half of each other class gets the trigger and the target's label."""
    x, y = federation.train(client)
    place = random.ranks(random.key(federation.seed, "trigger", client).to(y.device), y, torch.ones_like(y).bool())
    chosen = (place % 2 == 0) & (y != target)
    wide = chosen.reshape(-1, *[1] * (x.ndim - 1))
    return Samples(torch.where(wide, stamp(x, bright[federation.domain(client)]), x), torch.where(chosen, target, y))


def _bright(federation: Federation, domain: int) -> Tensor:
    """The largest value of each channel or feature in a domain."""
    x = federation.train_part(domain).x
    if not x.is_floating_point():
        raise UserError(
            "attack.kind = 'backdoor' needs samples of real numbers, and these are tokens. Use another kind."
        )
    if not len(x):
        return x.new_zeros([1] * (x.ndim - 1))  # no client holds samples of it
    return x.amax((0, 2, 3))[:, None, None] if x.ndim == 4 else x.flatten(1).amax(0).reshape(x.shape[1:])


def stamp(x: Tensor, bright: Tensor) -> Tensor:
    """Samples (N, ...) with the trigger: in the lower right corner of an image, otherwise in the last features."""
    x = x.clone()
    if x.ndim == 4:
        high, wide = (max(2, side // 8) for side in x.shape[2:])
        x[:, :, -high:, -wide:] = bright
    else:
        last = max(1, x.shape[-1] // 16)
        x[..., -last:] = bright[..., -last:]
    return x
