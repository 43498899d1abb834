"""What a frozen encoder gives in one shot, and how fast samples are embedded.

python benchmarks/encoders.py speed                 images a second, and what plain PyTorch does in evaluation mode
python benchmarks/encoders.py heads cifar10 --train 5000 --test 1500
python benchmarks/encoders.py heads pacs32_photo pacs32_art_painting pacs32_cartoon pacs32_sketch

Data is looked for in $PROTOFED_DATA. `heads` gives accuracies of each data set alone, and of one head for all of them.
"""

import argparse
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from protofed.config.experiment import Experiment
from protofed.data import Data
from protofed.data.domain import Domain
from protofed.data.sources import load
from protofed.joining.heads import SummedHead, plan_of
from protofed.runs import frozen

METHODS: dict[str, tuple[str, ...]] = {
    "classmeans": (),
    "classmeans cosine": ("method.distance=cosine",),
    "lda": ("method.shrinkage=0.1",),
    "ridge": ("method.gamma=1",),
}


def speed(encoder: str, images: int, size: int) -> None:
    """Processor seconds, so that other work on the machine hardly counts."""
    choice = Experiment.from_dict({"model": {"name": encoder}}).model[0]
    whole: Any = choice((3, size, size), 10)
    x = torch.rand(images, 3, size, size)
    net = whole.encoder().net.net
    pixels = whole.encoder().net.size

    def plain() -> None:
        with torch.no_grad():
            for part in torch.split(x, frozen.AT_ONCE):
                part = torch.nn.functional.interpolate(part, (pixels, pixels), mode="bilinear")
                net.extract_features((part * 255 - 127) / 128).mean((2, 3))

    def ours() -> None:
        frozen._computed(whole.body, x, torch.device("cpu"), "images", lambda text: None)

    found = {}
    for name, work in (("plain PyTorch", plain), ("protofed", ours)):
        work()
        best = float("inf")
        for _ in range(3):
            started = time.process_time()
            work()
            best = min(best, time.process_time() - started)
        found[name] = images / best
        print(f"{name}: {found[name]:.0f} images of {pixels} x {pixels} pixels a processor second")
    print(f"ratio: {found['protofed'] / found['plain PyTorch']:.2f}")


def heads(encoder: str, names: list[str], train: int, test: int) -> None:
    domains = [_some(load(Data(name=name), None)[0], train, test) for name in names]
    plan = plan_of(encoder, "lda")
    embedded = [
        SummedHead.begun(plan, domains[0].shape).embed(domain, lambda t: print(t, file=sys.stderr))
        for domain in domains
    ]
    print("head", *names, sep=" | ")
    for label, keys in METHODS.items():
        made = plan_of(encoder, label.split()[0], keys)
        alone = []
        together = SummedHead.begun(made, domains[0].shape)
        for name, one in zip(names, embedded, strict=True):
            head = SummedHead.begun(made, domains[0].shape)
            head.add(name, one)
            together.add(name, one)
            alone.append(_share(head.right(one)))
        print(label, *alone, sep=" | ")
        if len(names) > 1:
            print(f"{label}, one head for all", *(_share(together.right(one)) for one in embedded), sep=" | ")


def _some(domain: Domain, train: int, test: int) -> Domain:
    """The first samples; 0: all."""
    first, second = (slice(None, many or None) for many in (train, test))
    return replace(
        domain, x_train=domain.x_train[first], y_train=domain.y_train[first], x_test=domain.x_test[second],
        y_test=domain.y_test[second],
    )  # fmt: skip


def _share(found: tuple[int, int]) -> str:
    right, many = found
    return f"{right / many:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "heads"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--encoder", default="efficientnet_lite0")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--train", type=int, default=0)
    parser.add_argument("--test", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.what == "speed":
        speed(given.encoder, given.images, given.size)
    else:
        heads(given.encoder, given.names, given.train, given.test)


if __name__ == "__main__":
    main()
