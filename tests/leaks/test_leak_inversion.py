"""Inversion finds inputs where it can, and likeness compares with the nearest sample."""

import pytest
import torch

from protofed.leaks.inversion import Likely, Range, invert, invert_likely, likeness, variation


def test_a_linear_embedding_is_inverted() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(3, 6, generator=generator)
    matrix = torch.randn(6, 8, generator=generator)
    values = Range(torch.full((6,), -2.0), torch.full((6,), 5.0))
    starts = torch.full((3, 1, 6), 0.5)
    found = invert(lambda x: x @ matrix, values.inputs(truth) @ matrix, starts, values, 800)
    assert torch.allclose(found, truth, atol=5e-3)
    assert torch.equal(found, invert(lambda x: x @ matrix, values.inputs(truth) @ matrix, starts, values, 800))


def test_the_start_that_fits_best_is_kept() -> None:
    """Of a square two inputs have the same embedding: who starts on the other side ends in the wrong valley."""
    values = Range(torch.tensor([-1.0]), torch.tensor([1.0]))

    def embed(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x**2, 0.1 * x], 1)

    goal = embed(torch.tensor([[0.8], [-0.8]]))
    starts = torch.tensor([[[0.1], [0.9]], [[0.1], [0.9]]])
    found = values.inputs(invert(embed, goal, starts, values, 300))
    assert found.flatten().tolist() == pytest.approx([0.8, -0.8], abs=0.02)


def test_values_stay_within_their_range() -> None:
    values = Range(torch.zeros(2), torch.ones(2))
    found = invert(lambda x: x, torch.tensor([[4.0, -4.0]]), torch.full((1, 1, 2), 0.5), values, 100)
    assert found.tolist() == [[1.0, 0.0]]
    assert values.shares(torch.tensor([0.25, 1.0])).tolist() == [0.25, 1.0]
    assert Range(torch.ones(1), torch.ones(1)).shares(torch.ones(1)).tolist() == [0.0]


def test_total_variation_by_hand() -> None:
    picture = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])
    assert float(variation(picture)) == pytest.approx((0 + 1) / 2 + (1 + 0) / 2)


def test_smoothing_makes_pictures_smoother() -> None:
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(1, 1, 1, 8, 8, generator=generator)
    goal = torch.full((1, 1), 0.5)
    values = Range(torch.zeros(1, 8, 8), torch.ones(1, 8, 8))

    def mean(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).mean(1, keepdim=True)

    rough, smooth = (variation(invert(mean, goal, starts, values, 60, weight)) for weight in (0.0, 1.0))
    assert float(smooth) < 0.5 * float(rough)


def test_likeness_is_to_the_nearest_sample_over_what_is_known() -> None:
    guess = torch.tensor([[0.5, 0.5]])
    samples = [torch.tensor([[0.0, 0.0], [0.4, torch.nan], [0.9, 0.9]])]
    found = likeness(guess, samples)
    assert int(found.nearest) == 1
    assert float(found.error) == pytest.approx(0.1)
    assert float(found.psnr) == pytest.approx(20, abs=1e-3)
    assert found.ssim is None


def test_a_likely_input_lies_in_the_directions_of_the_class() -> None:
    """Samples of a class lie on a line: the one that fits a prototype is found from one number, and no other input."""
    generator = torch.Generator().manual_seed(0)
    line = torch.tensor([0.2, -0.1, 0.05])
    samples = 0.5 + torch.randn(50, 1, generator=generator) * line
    likely = Likely.of_samples([samples, samples])
    truth = torch.stack([0.5 + line, 0.5 - 0.5 * line])
    values = Range(torch.zeros(3), torch.ones(3))
    found = invert_likely(lambda x: x[:, :1], truth[:, :1], likely, values, 300)
    assert torch.allclose(found, truth, atol=0.03)


def test_components_of_samples_with_gaps() -> None:
    samples = torch.tensor([[0.1, torch.nan], [0.3, torch.nan], [0.5, torch.nan]])
    likely = Likely.of_samples([samples])
    assert torch.allclose(likely.mean, torch.tensor([[0.3, 0.0]]))
    deviations = likely.directions.norm(dim=2)
    assert deviations.flatten().tolist() == pytest.approx([(0.08 / 3) ** 0.5, 0], abs=1e-6)
    assert torch.allclose(likely.inputs(torch.zeros(1, 2)), likely.mean)
