"""Measures every workload on this machine and writes docs/performance.md.

    python benchmarks/performance.py [WORKLOAD...] [--data-dir DIR]

Numbers are kept in docs/performance.json by machine, so that the page shows all of them; --write only writes the page.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).resolve().parent.parent / "docs"
CUDA = [
    ("fedproto-mnist",),
    ("fedproto-mnist-200",),
    ("fednh-cifar",),
    ("fednh-cifar", "engine.precision=tf32"),
    ("fednh-round",),
    ("resnet18-gn",),
    ("resnet18-gn", "engine.precision=bf16"),
    ("pfl-cifar10",),
]
CPU = [("fedproto-mnist",), ("digits-100",), ("pfl-cifar10",)]
HEAD = """# Speed

Seconds a round of the workloads that `protofed bench` knows, evaluation included, medians after warming up. *Reference*
is one client after another on one thread, by plain autograd, with its data resident; *stacked* trains clients together;
*compiled* is the same after compiling, which a run does by itself when it is long enough to repay it. The parts are
those of the faster one, the ratio is the reference to it. The floor is the training's arithmetic at the speed of one
large matrix product. Written by `python benchmarks/performance.py` from `docs/performance.json`.

"""
TAIL = """## Where the rest goes

FedProto's MNIST round on two cores, compiled: a step of five clients takes 3.1 ms, of which oneDNN's convolutions are
63 % (backward 42 %, at some 46 GFLOP/s; forward 21 %, at 53, where one large product reaches 82 to 100), the fused
kernels 31 %, everything else 6 %. Upload and evaluation are forward passes through the same convolutions, 23 to 33
microseconds an image. What was tried and is slower, in ms a step: convolutions as matrix products 4.2 to 4.5, lane by
lane instead of grouped 5.7; a compiled forward pass is as fast as one operation after another. Flower's simulation runs
the same convolutions in two processes, which bounds what can be gained over it.

The 100 clients of digits-100 are small enough for Python to count: training takes 16 of 43 ms, one worker 45 in all.

ResNet18 on an H200: FedProto's on CIFAR-10 (20 clients, batch 8, tf32) takes 3.4 ms a step, of which the optimiser's
passes over 20 times 11 million parameters are a quarter, at 4.2 TB/s, and a pass over the samples for the prototypes
70 ms of a round's 295. FedNH's on small clients (30 a round, 30 images each, bf16) takes 0.29 s a round; it was 0.41 s
when batches were padded to the batch size that no client fills, and cuDNN chose an algorithm for the weights' gradients
that took half of the time. It runs the groups of a convolution one by one, and a quarter of what is left is its turning
of layouts.

An uncompiled step is as slow as its kernels are many. BatchNorm of full batches is torch's own: 777 operations in a
step of that ResNet18 instead of 1,617, and 460 where only the head is trained; on a CPU that makes no difference.
Compiled, FedRep's steps there, ten epochs of the head and one of the body, take a half to a fifth of the time (trials
of four runs, three at a time on one H200).
"""
COLUMNS = "workload|precision|reference|stacked|compiled|ratio|train, upload, evaluate, rest|times the floor|peak MB"


def measure(work: tuple[str, ...], rounds: int, data_dir: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "protofed", "bench", *work, "--json", "--rounds", str(rounds)]
    command += ["--data-dir", data_dir] if data_dir else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def page(machines: dict[str, dict[str, Any]]) -> str:
    text = HEAD
    for machine, found in machines.items():
        some = next(iter(found.values()))
        text += f"## {machine}\n\ntorch {some['torch']}, protofed {some['protofed']}\n\n"
        text += row(*COLUMNS.split("|")) + row(*["---"] * len(COLUMNS.split("|")))
        for line in found.values():
            parts = line["stacked_parts"]
            split = [parts["train"], parts["upload"], parts["evaluate"], parts["aggregate"] + parts["rest"]]
            text += row(
                line["workload"],
                line["precision"],
                f"{line['reference_s']:.3f}",
                f"{line['uncompiled_s']:.4f}",
                f"{line['compiled_s']:.4f}" if "compiled_s" in line else "-",
                f"**{line['ratio']:.1f}**",
                ", ".join(f"{seconds:.4f}" for seconds in split),
                f"{line['times_floor']:.1f}",
                f"{line['peak_mb']:,.0f}",
            )
        text += "\n"
        for line in {line["workload"]: line for line in found.values()}.values():
            text += f"- {line['workload']}: {line['about']}" + (f" ({line['note']})" if line["note"] else "") + "\n"
        text += "\n"
    return text + TAIL


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--machine", default="", help="its name on the page")
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--write", action="store_true", help="only write the page")
    asked = parser.parse_args()
    kept = asked.docs / "performance.json"
    machines: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.is_file() else {}
    if not asked.write:
        cuda = torch.cuda.is_available()
        for work in CUDA if cuda else CPU:
            if asked.workloads and work[0] not in asked.workloads:
                continue
            found = measure(work, asked.rounds, asked.data_dir)
            machines.setdefault(asked.machine or found["device"], {})[" ".join(work)] = found
            kept.write_text(json.dumps(machines, indent=1) + "\n")
            print(f"{' '.join(work)}: {found['stacked_s']:.4f} s, ratio {found['ratio']:.1f}", flush=True)
    (asked.docs / "performance.md").write_text(page(machines), encoding="utf-8")


if __name__ == "__main__":
    main()
