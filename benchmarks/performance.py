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

Seconds per round for each workload of `protofed bench`: medians after a warm-up, evaluation included. *Reference*
trains one client after another on one thread, with plain autograd and its data in memory. *Stacked* trains clients
together. *Compiled* is the same with compiled steps, which a run uses on its own if it is long enough for compiling to
pay off. The parts are those of the faster of these two, and the ratio says how many times longer the reference takes.
The floor is the time that the training's arithmetic would take at the speed of one large matrix product. `python
benchmarks/performance.py` writes this page from `docs/performance.json`.

"""
TAIL = """## A million clients

![Seconds of set-up and of a round, memory and run folder, from 100 to 1,000,000 clients](images/scale.svg)

If [data is computed when a client is drawn](data.md#a-million-clients), the number of clients hardly matters. Here 100
clients take part in a round, with 20 samples each and a small CNN. Set-up takes 3.0 s for a million clients, as it
does for a hundred, and memory is 0.42 GB. With FedAvg, a round takes 1.05 times as long as with 100 clients. With
FedProto it takes 1.28 times as long, because nearly every client of a round is new and begins with its own weights
(`init = "per_client"`), and building its network takes 0.3 ms. Drawing the cohort takes 2 ms and computing its samples
1 ms. Measured by `python benchmarks/scale.py` on one thread: medians of six rounds, on a machine that was busy with
other work, so points scatter by about a fifth.

## Next to fluke

FedProto's MNIST run (20 clients, batch 8, one epoch, without evaluation) takes fluke 0.8.1 1.23 s per round, and
protofed 0.35 s: 3.5 times as long by the clock, and twice the CPU time (1.23 s against 0.60 s; fluke uses one thread).
`python benchmarks/against_rivals.py fluke` installs fluke into an environment of its own and lets both take turns round
by round, with the same samples and network. The two cores did other work as well. fluke trains one client after
another and builds each batch's targets in a Python loop over its samples. The script also runs
[BlazeFL](https://pypi.org/project/blazefl/), which needs Python 3.12; that is not measured yet.

## Where the rest goes

FedProto's MNIST round on two cores, compiled: a step of five clients takes 3.1 ms. Of this, oneDNN's convolutions take
63 % (backward 42 %, at about 46 GFLOP/s; forward 21 %, at 53, where one large product reaches 82 to 100), the fused
kernels 31 %, and everything else 6 %. Upload and evaluation are forward passes through the same convolutions, at 23 to
33 microseconds per image. We tried two alternatives, and both are slower: convolutions as matrix products (4.2 to 4.5
ms per step), and one lane at a time instead of grouped (5.7 ms). Compiling a forward pass does not make it faster.
Flower's simulation runs the same convolutions in two processes, which limits how much faster we can be.

The 100 clients of digits-100 are so small that Python's own overhead matters: training takes 16 of 43 ms. A single
worker needs 45 ms in all.

ResNet18 on an H200: FedProto on CIFAR-10 (20 clients, batch 8, tf32) takes 3.4 ms per step. A quarter of that goes to
the optimiser's passes over 20 times 11 million parameters, at 4.2 TB/s. The pass over the samples that computes the
prototypes takes 70 of a round's 295 ms. FedNH with small clients (30 a round, 30 images each, bf16) takes 0.29 s per
round. It used to take 0.41 s: batches were padded to the full batch size, which no client fills, and cuDNN chose an
algorithm for the weights' gradients that took half of the time. cuDNN runs the groups of a convolution one by one, and
a quarter of the remaining time is its conversion of layouts.

The time of an uncompiled step depends on how many kernels it launches. For full batches we use torch's own BatchNorm:
a step of that ResNet18 then has 777 operations instead of 1,617, and 460 if only the head is trained. On a CPU this
makes no difference. When FedRep's steps there are compiled (ten epochs of the head and one of the body), they take
between a fifth and half of the time (trials of four runs, three at a time on one H200).
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
