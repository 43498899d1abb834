"""Robust centres: by hand, and what must hold whatever the numbers are."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protofed.config.sections import Robust
from protofed.robust.rules import RULES, capped, clip, geometric_median, krum, lower_median, median, trimmed

ONE_LINE = [0.0, 1.0, 2.0, 3.0, 100.0]
ALL = list(RULES)


def rows(*values: float | list[float]) -> Tensor:
    """One row, a client for each value."""
    return torch.tensor([v if isinstance(v, list) else [v] for v in values])[None]


def ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2])


def centre(name: str, x: Tensor, weight: Tensor | None = None, before: Tensor | None = None, **keys: float) -> Tensor:
    weight = ones(x) if weight is None else weight
    rule = Robust(rule=name, **keys)  # type: ignore[arg-type]
    return RULES[name](x, weight, median(x, weight) if before is None else before, rule)


def test_the_median_by_hand() -> None:
    x = rows(*ONE_LINE)
    assert median(x, ones(x)).tolist() == [[2.0]]
    even = rows([1.0, 8.0], [5.0, 0.0], [3.0, 4.0], [100.0, 2.0])
    assert median(even, ones(even)).tolist() == [[4.0, 3.0]]  # of each coordinate, the middle of two
    heavy = torch.tensor([[1.0, 1.0, 1.0, 1.0, 5.0]])
    assert median(x, heavy).tolist() == [[100.0]]  # more than half of the weight
    heavy[0, 4] = 4.0
    assert median(x, heavy).tolist() == [[51.5]]  # exactly half of it


def test_the_trimmed_mean_by_hand() -> None:
    x = rows(*ONE_LINE)
    assert trimmed(x, ones(x), 0.2).tolist() == [[2.0]]  # (1 + 2 + 3) / 3
    assert trimmed(x, ones(x), 0.0).item() == pytest.approx(21.2)
    assert trimmed(x, ones(x), 0.4).tolist() == [[2.0]]  # the median
    assert trimmed(x, ones(x), 0.01).tolist() == [[2.0]]  # rounded up to a client at each end
    assert trimmed(rows(4.0, 8.0), torch.ones(1, 2), 0.4).tolist() == [[6.0]]  # somebody must be left
    weighted = trimmed(rows(0.0, 1.0, 5.0), torch.tensor([[2.0, 2.0, 2.0]]), 0.3)
    assert weighted.tolist() == [[1.0]]
    # of weight 8 a quarter goes at each end: 1 of the client at 1, all of that at 0, 2 of the one at 7
    assert trimmed(rows(0.0, 1.0, 3.0, 7.0), torch.tensor([[1.0, 2.0, 3.0, 2.0]]), 0.25).item() == 2.5


def test_clipping_by_hand() -> None:
    x, before = rows([0.0, 3.0], [4.0, 0.0], [60.0, 80.0]), torch.zeros(1, 2)
    near = rows([3.0, 0.0], [0.0, 8.0])  # the second is a little farther than the bound, and is pulled back to it
    assert clip(near, ones(near), before, Robust(rule="clip", norm=5.0)).tolist() == [[1.5, 2.5]]
    fixed = clip(x, ones(x), before, Robust(rule="clip", norm=5.0))
    assert fixed[0].tolist() == pytest.approx([7 / 3, 7 / 3])  # the last becomes (3, 4)
    usual = clip(x, ones(x), before, Robust(rule="clip", factor=1.0))  # lengths 3, 4, 100: the bound is 4
    assert usual[0].tolist() == pytest.approx([(4 + 2.4) / 3, (3 + 3.2) / 3])
    there = clip(x, torch.tensor([[1.0, 1.0, 0.0]]), before, Robust(rule="clip", norm=5.0))
    assert there.tolist() == [[2.0, 1.5]]
    about = clip(x + 10, ones(x), before + 10, Robust(rule="clip", norm=5.0))
    assert (about - 10)[0].tolist() == pytest.approx([7 / 3, 7 / 3], abs=1e-5)


def test_centred_clipping_by_hand() -> None:
    x, before = rows(0.0, 3.0, 90.0), torch.zeros(1, 1)
    one = centre("centred_clip", x, before=before, norm=3.0, passes=1)
    assert one.item() == 2.0  # (0 + 3 + 3) / 3
    two = centre("centred_clip", x, before=before, norm=3.0, passes=2)
    assert two.item() == pytest.approx(2 + (-2 + 1 + 3) / 3)


def test_the_geometric_median_by_hand() -> None:
    """Of a right triangle's corners it is Fermat's point; on a line it is the median."""
    corners = rows([0.0, 0.0], [1.0, 0.0], [0.0, 1.0])
    found = geometric_median(corners, ones(corners), 100)[0]
    x = (3 - math.sqrt(3)) / 6  # where all sides are seen under 120 degrees
    assert found.tolist() == pytest.approx([x, x], abs=1e-3)
    line = rows(*ONE_LINE)
    assert geometric_median(line, ones(line), 50).item() == pytest.approx(2.0, abs=1e-3)


def test_krum_by_hand() -> None:
    x = rows(0.0, 1.0, 2.5, 3.0, 100.0)  # n = 5, f = 1: two nearest others
    # scores: 0: 1 + 6.25, 1: 1 + 2.25, 2.5: .25 + 2.25, 3: .25 + 4, 100: 97^2 + ...
    assert krum(x, ones(x), 0.2, several=False).tolist() == [[2.5]]
    assert krum(x, ones(x), 0.2, several=True).item() == pytest.approx((0 + 1 + 2.5 + 3) / 4)
    assert krum(x, ones(x), 0.49, several=True).item() == pytest.approx(6.5 / 4)  # f is at most (n - 3) / 2 = 1
    even = rows(0.0, 1.0, 2.5, 30.0)  # of four clients none can be left out: n is at least 2 f + 3
    assert krum(even, ones(even), 0.49, several=True).item() == pytest.approx(33.5 / 4)
    assert krum(rows(4.0, 8.0), torch.ones(1, 2), 0.3, several=False).tolist() == [[6.0]]  # of two, the mean
    assert krum(rows(0.0, 1.0, 9.0), torch.ones(1, 3), 0.3, several=False).item() in (0.0, 1.0)


@pytest.mark.parametrize("several", [False, True])
def test_krum_where_few_clients_have_a_row(several: bool) -> None:
    """A class that one client holds keeps its prototype, whichever client that is, and however large it is."""
    x = rows(1.0, 2.0, 3.0, 1e25)
    for alone in range(4):
        weight = torch.zeros(1, 4)
        weight[0, alone] = 7.0
        assert krum(x, weight, 0.3, several).item() == x[0, alone, 0]
    two = torch.tensor([[0.0, 1.0, 0.0, 1.0]])  # so far apart that their distance is infinite
    assert krum(x, two, 0.3, several).item() == pytest.approx(5e24)


def test_weights_are_capped_by_their_median() -> None:
    weight = torch.tensor([[1.0, 0.0, 4.0, 100.0], [0.0, 0.0, 0.0, 0.0]])
    assert capped(weight, 2.0).tolist() == [[1.0, 0.0, 4.0, 8.0], [0.0, 0.0, 0.0, 0.0]]
    assert capped(weight, 0.0).tolist() == [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    assert lower_median(weight, weight > 0).tolist() == [4.0, 0.0]


@pytest.mark.parametrize("name", ALL)
def test_whoever_has_no_weight_takes_no_part(name: str) -> None:
    """Absent clients may have anything; a row that nobody has is 0; rows do not touch each other."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 6, 3, generator=g), torch.ones(2, 6)
    weight[0, 2] = weight[0, 4] = 0
    weight[1] = 0
    before = torch.zeros(2, 3)
    spoiled = x.clone()
    spoiled[0, 2], spoiled[0, 4] = 1e30, torch.nan
    some = [0, 1, 3, 5]
    alone = centre(name, x[:1, some], before=before[:1])
    assert torch.allclose(centre(name, spoiled.nan_to_num(1e30), weight, before)[0], alone[0], atol=1e-6)
    assert centre(name, torch.zeros(2, 6, 3), torch.zeros(2, 6), before).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", ALL)
def test_order_place_and_scale_do_not_matter(name: str) -> None:
    g = torch.Generator().manual_seed(1)
    x, weight = torch.randn(1, 9, 4, generator=g), torch.rand(1, 9, generator=g) + 0.5
    before, order = torch.randn(1, 4, generator=g), torch.randperm(9, generator=g)
    plain = centre(name, x, weight, before)
    torch.testing.assert_close(centre(name, x[:, order], weight[:, order], before), plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(centre(name, x + 7, weight, before + 7), plain + 7, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(centre(name, -3 * x, weight, -3 * before), -3 * plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(centre(name, x, 5 * weight, before), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_clients_that_agree_are_agreed_with(name: str) -> None:
    x = torch.tensor([1.0, -2.0, 0.5]).expand(1, 7, 3)
    torch.testing.assert_close(centre(name, x, before=torch.zeros(1, 3), norm=100.0), x[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
@given(honest=st.lists(st.floats(-10, 10, width=32), min_size=7, max_size=9), far=st.sampled_from([1e3, -1e12, 3e38]))
def test_three_of_ten_cannot_move_it_far(name: str, honest: list[float], far: float) -> None:
    """The breakdown point: below half, here three of ten or more, with any values, all on one side."""
    x = rows(*honest, far, far, far)
    found = centre(name, x, before=torch.tensor([[honest[0]]])).item()
    wide = max(honest) - min(honest)
    slack = {"clip": 2 * wide, "centred_clip": 2 * wide, "geometric_median": wide}.get(name, 0.0)
    assert min(honest) - slack - 1e-3 <= found <= max(honest) + slack + 1e-3


@pytest.mark.parametrize("name", ALL)
def test_sites_of_any_weight_cannot_move_it_far_under_the_cap(name: str) -> None:
    """An attacker that says it has a million samples counts at most twice the usual; one with few never counts more."""
    x = rows(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1e6)
    weight = capped(torch.tensor([[50.0, 60.0, 55.0, 45.0, 50.0, 52.0, 51.0, 1e6]]), 2.0)
    assert 0 <= centre(name, x, weight, torch.tensor([[3.0]])).item() <= 6
