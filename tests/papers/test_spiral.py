"""FedNH's figure 1 runs, and its uniform head is the regular hexagon."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from protofed.papers.reproduce import spiral as module
from protofed.papers.reproduce.spiral import angles


@pytest.fixture
def spiral(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With a few samples."""
    monkeypatch.setattr(module, "COUNTS", {"balanced": [20] * 6, "imbalanced": [20, 10, 5, 3, 2, 1]})
    return module


@pytest.mark.parametrize("arms", ["printed", "released"])
def test_figure_1(spiral: ModuleType, arms: str) -> None:
    found = spiral.panels(spiral.SETTINGS[arms]._replace(epochs=2, batch_size=16), 0)
    spiral.picture(found, Path("figure.png"))
    assert Image.open("figure.png").size[0] > 800
    for letter, (head, _) in spiral.PANELS.items():
        numbers = found[letter].numbers
        assert numbers["accuracy"] == pytest.approx(np.mean(numbers["accuracy_by_class"]))
        if head == "uniform head":
            assert numbers["smallest_angle"] == pytest.approx(60, abs=1e-3)
            assert numbers["longest_over_shortest"] == pytest.approx(1)
        else:
            assert numbers["smallest_angle"] < 59


def test_released_arms_do_not_overlap(spiral: ModuleType) -> None:
    """At every radius an arm is half a radian wide, and the arms begin a sixth of the circle apart."""
    domain = spiral.released([50, 40, 30, 20, 10, 5])
    radius, turn = np.hypot(*domain.x_train.T), np.arctan2(*domain.x_train.T[::-1])
    offset = (turn - np.pi / 3 * (domain.y_train + (radius - 1) / 9) + 1e-4) % (2 * np.pi)
    assert offset.max() < 0.5 + 2e-4
    assert np.bincount(domain.y_test).tolist() == [50] * 6


def test_only_free_heads_move(spiral: ModuleType) -> None:
    domain = spiral.printed([20] * 6, 0.1)
    before, after = (spiral.fit(spiral.HEADS["uniform head"], domain, epochs, 16, 0) for epochs in (1, 3))
    assert np.array_equal(before.vectors, after.vectors)
    assert not np.allclose(before.z, after.z)
    assert np.allclose(np.linalg.norm(after.z, axis=1), 1, atol=1e-5)
    before, after = (spiral.fit(spiral.HEADS["free head"], domain, epochs, 16, 0) for epochs in (1, 3))
    assert not np.allclose(before.vectors, after.vectors)


def test_angles() -> None:
    assert angles(np.array([[2.0, 0], [0, 3], [-1, 0], [1, 1]])) == pytest.approx([90, 180, 45, 90, 45, 135])
