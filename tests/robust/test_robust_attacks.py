"""What attackers send and train on: by hand, on uploads of a few numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from protofed import Experiment, UserError
from protofed.config.sections import Attack, Robust
from protofed.method import Each, Mean
from protofed.ops import random
from protofed.robust.attacks import attacked
from protofed.robust.combine import combine
from protofed.robust.poison import TRIGGERED, stamp
from protofed.robust.round import Uploads, attackers
from protofed.runs.robustness import attackers_of
from protofed.runs.setup import prepare

PROTOTYPES = torch.tensor(  # three clients, two classes, two numbers; the last client attacks
    [[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 4.0]], [[2.0, 1.0], [1.0, 2.0]]]
)
COUNTS = torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 4.0]])
BODY = torch.tensor([[1.0, 1.0], [3.0, 3.0], [5.0, 5.0]])
HEAD = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]])
SAMPLES = torch.tensor([1.0, 1.0, 2.0])


def rows() -> dict[str, Mean]:
    model = {"body.w": BODY * SAMPLES[:, None], "head.fc.weight": HEAD * SAMPLES[:, None, None]}
    return {"model": Mean(model, SAMPLES), "prototypes": Mean(PROTOTYPES * COUNTS[..., None], COUNTS)}


def lied(kind: str, tree: Any = None, before: Any = None, round: int = 0, **keys: Any) -> Any:
    keys = {"share": 0.3, **keys}
    attack = Attack(kind=kind, **keys)  # type: ignore[arg-type]
    return attacked(attack, tree or rows(), before or {}, [None, None, random.key(0, "attack", round, 2)], 2, (0, 1))


def values(mean: Mean, name: str = "") -> Tensor:
    """What single clients have, without their weights."""
    total = mean.total[name] if name else mean.total
    return total / mean.weight.reshape(*mean.weight.shape, *[1] * (total.ndim - mean.weight.ndim))


def same_tree(left: Any, right: Any, clients: slice) -> bool:
    leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (left, right)]
    return all(torch.equal(a[clients], b[clients]) for a, b in zip(*leaves, strict=True))


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "noise", "swap", "collude", "backdoor"])
def test_honest_clients_send_what_they_have_and_attackers_do_not(kind: str) -> None:
    told = lied(kind)
    assert same_tree(told, rows(), slice(0, 2))
    assert not torch.equal(told["prototypes"].total[2], rows()["prototypes"].total[2])
    assert torch.equal(told["model"].weight, SAMPLES)
    if kind != "swap":  # which swaps weights too
        assert torch.equal(told["prototypes"].weight, COUNTS)


def test_sign_flip_turns_prototypes_round_and_a_models_change() -> None:
    told = lied("sign_flip")
    assert values(told["prototypes"])[2].tolist() == (-3 * PROTOTYPES[2]).tolist()
    # in the first round a change is counted from the honest clients' mean, 2: 2 - 3 * (5 - 2)
    assert values(told["model"], "body.w")[2].tolist() == [-7.0, -7.0]
    _, before = combine(Robust(), {"model": rows()["model"]}, {})  # (1 + 3 + 2 * 5) / 4 = 3.5
    later = lied("sign_flip", before=before)
    assert values(later["model"], "body.w")[2].tolist() == [-1.0, -1.0]  # 3.5 - 3 * (5 - 3.5)


def test_scale_multiplies_all_that_is_sent() -> None:
    told = lied("scale", factor=7.0)
    assert values(told["prototypes"])[2].tolist() == (7 * PROTOTYPES[2]).tolist()
    assert values(told["model"], "head.fc.weight")[2].tolist() == [[35.0], [42.0]]


def test_noise_is_as_large_as_the_factor_says_and_new_in_every_round() -> None:
    wide = {"model": Mean({"w": torch.full((3, 20_000), 2.0)}, torch.ones(3))}
    first, again, next_round = (lied("noise", wide, round=r)["model"].total["w"][2] - 2 for r in (0, 0, 1))
    assert first.std().item() == pytest.approx(10, rel=0.02)  # five times the root mean square, 2
    assert torch.equal(first, again)
    assert torch.corrcoef(torch.stack([first, next_round]))[0, 1].abs().item() < 0.03


def test_swap_exchanges_two_classes_of_prototypes_and_of_the_head_and_leaves_the_body() -> None:
    told = lied("swap")
    assert values(told["prototypes"])[2].tolist() == PROTOTYPES[2].flip(0).tolist()
    assert told["prototypes"].weight[2].tolist() == [4.0, 2.0]
    assert values(told["model"], "head.fc.weight")[2].tolist() == [[6.0], [5.0]]
    assert values(told["model"], "body.w")[2].tolist() == [5.0, 5.0]


def test_colluders_all_send_the_honest_mean_less_their_spread() -> None:
    told = lied("collude", factor=1.5)
    # of class 0 the honest have (1, 0) and (3, 0): mean 2, deviation 1
    assert values(told["prototypes"])[2].tolist() == [[0.5, 0.0], [0.0, 1.5]]
    attack = Attack(kind="collude", share=0.6)
    keys = [None, random.key(0, 1), random.key(0, 2)]
    two = attacked(attack, rows(), {}, keys, 2, (0, 1))
    assert torch.equal(values(two["prototypes"])[1], values(two["prototypes"])[2])


def test_a_backdoor_pushes_other_classes_away_from_the_target_and_amplifies_a_model() -> None:
    told = lied("backdoor", target=1, factor=2.0)
    assert values(told["prototypes"])[2].tolist() == [[4.0, -1.0], [1.0, 2.0]]  # (2, 1) + 2 * (1, -1); the target stays
    assert values(told["model"], "body.w")[2].tolist() == [8.0, 8.0]  # 2 + 2 * (5 - 2)
    lacking = rows()
    lacking["prototypes"].weight[2, 1] = 0.0  # it has no sample of the target, so no trigger's prototype
    lacking["prototypes"].total[2, 1] = 0.0
    assert values(lied("backdoor", lacking, target=1)["prototypes"])[2, 0].tolist() == [2.0, 1.0]


def test_what_is_sent_client_by_client_is_attacked_too() -> None:
    each = {"model": Each({"w": BODY.clone()}), "weight": Each(SAMPLES)}
    told = lied("scale", each, factor=4.0)
    assert told["model"].rows["w"].tolist() == [[1.0, 1.0], [3.0, 3.0], [20.0, 20.0]]
    assert torch.equal(told["weight"].rows, SAMPLES)  # how much it counts is not its choice


def test_attackers_are_drawn_by_the_seed_or_by_their_samples() -> None:
    samples = {number: 10 + number for number in range(10)}
    some = attackers(Attack(kind="scale", share=0.3), 0, samples)
    assert len(some) == 3
    assert some == attackers(Attack(kind="noise", share=0.3), 0, samples)  # the same for every attack
    assert any(some != attackers(Attack(kind="scale", share=0.3), seed, samples) for seed in range(1, 5))
    assert attackers(Attack(kind="scale", share=0.01, who="smallest"), 0, samples) == {0}
    assert attackers(Attack(kind="scale", share=0.2, who="largest"), 0, samples) == {8, 9}
    assert attackers(Attack(kind="scale", share=0.0), 0, samples) == frozenset()


def test_only_clients_that_take_part_attack() -> None:
    plan = Experiment.load("demo", "held_out_clients=5", "attack.kind=scale", "attack.share=0.99")
    assert len(attackers_of(plan, [10] * 20)) == 15


def data_of(*changes: str) -> tuple[Experiment, Any, frozenset[int]]:
    plan = Experiment.load("demo", "clients=6", "engine=reference", "model=mlp_digits", *changes)
    data = prepare(plan).engine.federation  # type: ignore[attr-defined]
    return plan, data, attackers_of(plan, data.sizes)


def test_flipped_labels_are_the_attackers_alone_and_counted_so() -> None:
    _, honest, _ = data_of()
    _, data, bad = data_of("attack.kind=label_flip", "attack.share=0.34")
    assert len(bad) == 2
    for client in range(6):
        (x, y), (old_x, old_y) = data.train(client), honest.train(client)
        assert torch.equal(x, old_x)
        assert torch.equal(y, 9 - old_y if client in bad else old_y)
        assert data.counts[client].tolist() == y.bincount(minlength=10).tolist()
        assert torch.equal(data.test(client).y, honest.test(client).y)


def test_a_backdoor_is_trained_by_attackers_and_tested_on_all() -> None:
    _, honest, _ = data_of()
    _, data, bad = data_of("attack.kind=backdoor", "attack.target=3", "attack.share=0.34")
    bright = honest.train_part(0).x.max()
    for client in range(6):
        (x, y), (old_x, old_y) = data.train(client), honest.train(client)
        changed = (y != old_y).nonzero()[:, 0].tolist()
        if client not in bad:
            assert torch.equal(x, old_x)
            assert not changed
            continue
        for label in set(old_y.tolist()) - {3}:  # half of each other class, rounded up
            many = int((old_y == label).sum())
            assert sum(int(old_y[i]) == label for i in changed) == (many + 1) // 2
        assert (y[changed] == 3).all()
        assert (x[changed][:, :, 6:, 6:] == bright).all()
        assert torch.equal(x[changed][:, :, :6], old_x[changed][:, :, :6])
        kept = [i for i in range(len(y)) if i not in changed]
        assert torch.equal(x[kept], old_x[kept])
    for client in range(6):
        assert torch.equal(data.test(client).x, honest.test(client).x)
        x, y = honest.test(client)
        triggered = data.test(client, TRIGGERED)
        assert torch.equal(triggered.x, stamp(x[y != 3], bright))
        assert (triggered.y == 3).all()
    assert torch.equal(data.global_test(0).x, honest.global_test(0).x)


def test_features_that_are_no_image_carry_the_trigger_at_their_end() -> None:
    x = torch.zeros(2, 32)
    assert stamp(x, torch.arange(32.0))[1].tolist() == [0.0] * 30 + [30.0, 31.0]
    assert not x.any()  # a copy


def test_a_backdoor_to_a_class_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"attack\.target = 10, but the classes are 0 to 9\. Choose"):
        data_of("attack.kind=backdoor", "attack.target=10")


@pytest.mark.parametrize(
    "rule", ["clip", "centred_clip", "median", "trimmed", "geometric_median", "krum", "multi_krum"]
)
@pytest.mark.parametrize("worst", [torch.inf, torch.nan, 3e38])
def test_an_upload_that_is_no_number_takes_no_part(rule: str, worst: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 4, 3, generator=generator)
    spoiled = x.clone()
    spoiled[6, 1] = worst  # of one class
    robust = Uploads(Robust(rule=rule), Attack(), 0, 4)  # type: ignore[arg-type]
    before = {"0": Mean(torch.zeros(4, 3), torch.ones(4))}
    found, centres = robust.together({"p": Mean(spoiled, torch.ones(7, 4))}, range(7), 1, before)
    plain, _ = robust.together({"p": Mean(x, torch.ones(7, 4))}, range(7), 1, before)
    assert torch.isfinite(found["p"].value).all()
    assert torch.equal(found["p"].value[[0, 2, 3]], plain["p"].value[[0, 2, 3]])  # other classes are as they were
    assert found["p"].value[1].norm() < 2 * x[:6, 1].norm(dim=1).max()
    assert bool(centres) == (rule in ("clip", "centred_clip"))  # all that the next round needs


@pytest.mark.parametrize("worst", [torch.inf, torch.nan, 1e30])
def test_what_stays_client_by_client_is_bounded_by_clipping(worst: float) -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 5.0], [worst, 1.0]])
    up = {"model": Each({"w": x}), "size": Each(SAMPLES)}
    found, _ = combine(Robust(rule="clip", factor=2.0), up, {})
    assert found["model"].rows["w"][:2].tolist() == x[:2].tolist()
    assert found["model"].rows["w"][2].norm() <= 10.001
