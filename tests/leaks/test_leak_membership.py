"""Members are found where a prototype is made of few samples, and nowhere else."""

import pytest
import torch

from protofed.leaks.membership import Background, Guesses

DIM = 20


def play(size: int, prototypes: int, others_only: bool = False, known_size: bool = True) -> dict:
    """Prototypes of so many samples of one Gaussian class, whose dimensions differ and are correlated."""
    generator = torch.Generator().manual_seed(size)
    mix = torch.randn(DIM, DIM, generator=generator) / DIM**0.5 + torch.eye(DIM)
    known = Background.of_embeddings(torch.randn(400, DIM, generator=generator) @ mix)
    guesses = Guesses()
    for _ in range(prototypes):
        z = torch.randn(size, DIM, generator=generator) @ mix
        tested = torch.randn(size, DIM, generator=generator) @ mix if others_only else z
        others = torch.randn(200, DIM, generator=generator) @ mix
        guesses.add(known, z.mean(0, keepdim=True), tested, others, float(size) if known_size else None)
    return guesses.told()


def test_one_sample_is_always_found() -> None:
    told = play(1, 40)
    assert (told["prototypes"], told["members"], told["others"]) == (40, 40, 8000)
    for attack in ("distance", "likelihood"):
        assert told[attack]["auc"] > 0.999
        assert told[attack]["tpr_at_0.001"] > 0.9


def test_the_more_samples_the_fewer_are_found() -> None:
    areas = [play(size, -(-200 // size))["likelihood"]["auc"] for size in (1, 2, 5, 20, 100)]
    assert areas == sorted(areas, reverse=True)
    assert areas[2] > 0.8
    assert areas[4] == pytest.approx(0.6, abs=0.08)  # about Phi(sqrt(D / 2 n))


def test_the_likelihood_finds_more_than_the_distance() -> None:
    told = play(20, 20)
    assert told["likelihood"]["auc"] > told["distance"]["auc"] + 0.05


def test_the_number_of_samples_can_be_guessed() -> None:
    assert play(5, 60, known_size=False)["likelihood"]["auc"] > 0.75


@pytest.mark.parametrize("size", [1, 5])
def test_who_is_not_in_it_is_not_found(size: int) -> None:
    told = play(size, 200, others_only=True)
    assert told["likelihood"]["auc"] == pytest.approx(0.5, abs=0.06)
    assert told["distance"]["auc"] == pytest.approx(0.5, abs=0.06)


def test_the_nearest_of_several_prototypes_counts() -> None:
    known = Background.of_embeddings(torch.randn(100, 2, generator=torch.Generator().manual_seed(0)))
    prototypes = torch.tensor([[5.0, 5.0], [-5.0, -5.0]])
    scores = known.scores(torch.tensor([[5.0, 5.0], [-5.0, -5.0], [5.0, -5.0]]), prototypes, 1.0)
    assert scores["distance"][0] == scores["distance"][1] > scores["distance"][2]


def test_too_few_others_say_nothing_of_low_rates() -> None:
    guesses = Guesses()
    known = Background.of_embeddings(torch.eye(3))
    guesses.add(known, torch.ones(1, 3), torch.ones(2, 3), torch.zeros(50, 3), 1.0)
    assert guesses.told()["distance"]["tpr_at_0.01"] is None
