"""Two accountants of steps with noise and of releases, of our own, for tests."""

import math

import numpy as np

from protofed.privacy.accounting import NOTHING, PaidSteps


def by_renyi(steps: PaidSteps, times: int, noise: float, delta: float) -> float:
    """The sampled Gaussian at whole orders (Mironov, Talwar and Zhang, 2019, Section 3.3), and the Gaussian's."""
    rate, found = steps.rate, []
    for order in range(2, 120):
        logs = [
            math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            + (k * math.log(rate) if k else 0.0)
            + ((order - k) * math.log1p(-rate) if k < order and rate < 1 else 0.0 if k == order else -math.inf)
            + (k * k - k) / (2 * steps.noise**2)
            for k in range(order + 1)
        ]  # fmt: skip
        largest = max(logs)
        each = (largest + math.log(sum(math.exp(one - largest) for one in logs))) / (order - 1)
        total = times * (steps.many * each + (0.0 if noise == NOTHING else order / (2 * noise**2)))
        found.append(total + math.log(1 / delta) / (order - 1))
    return min(found)


def by_convolution(steps: PaidSteps, times: int, noise: float, delta: float) -> float:
    """Privacy losses of a step on a grid, convolved as often as there are steps: of adding and of removing a sample."""
    width, half = 2e-3, 2**15
    found = []
    for removed in (True, False):
        whole = np.ones(2 * half, dtype=np.complex128)
        kinds = [(steps.rate, steps.noise, times * steps.many)]
        kinds += [] if noise == NOTHING else [(1.0, noise, times)]
        for rate, sigma, many in kinds:
            at = np.linspace(-14 * sigma, 14 * sigma + 1, 400_001)
            absent = np.exp(-(at**2) / (2 * sigma**2))
            there = (1 - rate) * absent + rate * np.exp(-((at - 1) ** 2) / (2 * sigma**2))
            loss = np.log(np.maximum(there, 1e-300) / np.maximum(absent, 1e-300))
            mass = there if removed else absent
            loss = loss if removed else -loss
            place = np.clip(np.rint(loss / width).astype(int), -half, half - 1)
            grid = np.bincount(place + half, weights=mass / mass.sum(), minlength=2 * half)
            whole *= np.fft.fft(np.fft.ifftshift(grid)) ** many
        masses = np.fft.fftshift(np.fft.ifft(whole).real)
        losses = (np.arange(2 * half) - half) * width
        low, high = 0.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            over = losses > middle
            leak = float((masses[over] * -np.expm1(middle - losses[over])).sum())
            low, high = (middle, high) if leak > delta else (low, middle)
        found.append(high)
    return max(found)
