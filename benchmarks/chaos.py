"""Federations in network namespaces under a seeded plan of faults, until there were enough of them: a table of all.

    python benchmarks/chaos.py --faults 200 --seed 1 --out chaos.jsonl

Every line of the output is a fault, or the end of a federation. `--table chaos.jsonl ...` writes them as Markdown.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "tools"))

import torch
from chaos import BACK_SECONDS, SECURE, Federation, compared, plan
from namespaces import why_not

NAMES = ["north", "south", "west"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--each", type=int, default=20, help="faults for one federation")
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--longest", type=float, default=120.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("chaos.jsonl"))
    parser.add_argument("--keep", type=Path, help="a folder for the logs of federations that did not do well")
    parser.add_argument("--secure", action="store_true", help="uploads are summed under masks")
    parser.add_argument("--table", type=Path, nargs="+")
    given = parser.parse_args()
    if given.table:
        print(table([json.loads(line) for path in given.table for line in path.read_text().splitlines()]))
        return
    if reason := why_not():
        sys.exit(reason)
    torch.set_num_threads(1)
    done, number = 0, 0
    while done < given.faults:
        number += 1
        seed = 1000 * given.seed + number
        with tempfile.TemporaryDirectory() as home:
            count = min(given.each, given.faults - done)
            more = SECURE if given.secure else ()
            done += one(Path(home), seed, count, given.rounds, given.longest, given.out, given.keep, more)


def one(
    home: Path,
    seed: int,
    count: int,
    rounds: int,
    longest: float,
    out: Path,
    keep: Path | None,
    more: tuple[str, ...] = (),
) -> int:
    """One federation from its first client to its end; how many faults it saw."""
    minimum = len(NAMES) if seed % 2 else len(NAMES) - 1
    begun, seen, well = time.monotonic(), 0, True
    federation = Federation(home / "machines", NAMES, rounds, minimum, *more)
    end: dict[str, Any] = {"end": seed, "minimum": minimum}
    try:
        faults = plan(seed, count, NAMES, longest)
        for what in federation.suffer(faults, seed, most=2):
            seen += 1
            line = {"federation": seed, "minimum": minimum, "round": what.round, **what.fault._asdict()}
            line["together"] = what.together
            back = what.back if math.isfinite(what.back) else None
            well &= back is not None and back <= BACK_SECONDS
            write(out, line | {"back": back, "remarks": federation.remarks[:]})
            federation.remarks.clear()
        federation.stop()
        end |= {**compared(federation, home / "simulated")._asdict(), "remarks": federation.remarks}
        well &= not end["lost"] and end["furthest"] < 1e-4
    except Exception as error:
        traceback.print_exc()
        well, end["error"] = False, f"{type(error).__name__}: {error}"[:500]
    finally:
        federation.close()
    write(out, end | {"faults": seen, "seconds": time.monotonic() - begun})
    if keep is not None and not well:
        shutil.copytree(home, keep / str(seed), dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
    return max(seen, 1)


def write(out: Path, line: dict[str, Any]) -> None:
    print(line, flush=True)
    with open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def table(lines: list[dict[str, Any]]) -> str:
    """What happened, by kind of fault, and federation by federation."""
    faults, ends = [line for line in lines if "what" in line], [line for line in lines if "end" in line]
    rows = ["| fault | who | how often | back after (median) | slowest | stuck |", "|---|---|---|---|---|---|"]
    kinds = sorted({(line["what"], role(line["who"])) for line in faults})
    for what, who in kinds:
        some = [line["back"] for line in faults if (line["what"], role(line["who"])) == (what, who)]
        there = sorted(back for back in some if back is not None)
        middle = f"{there[len(there) // 2]:.1f} s" if there else "-"
        slowest = f"{there[-1]:.1f} s" if there else "-"
        rows.append(f"| {what} | {who} | {len(some)} | {middle} | {slowest} | {len(some) - len(there)} |")
    rows += ["", "| federation | must answer | rounds | of them partial | faults | states lost | result differs by |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for end in ends:
        lost = len(end["lost"]) if "lost" in end else "?"
        off = f"{end['furthest']:.1e}" if "furthest" in end else end.get("error", "?")
        many = f"{end.get('rounds', '?')} | {end.get('partial', '?')} | {end['faults']}"
        rows.append(f"| {end['end']} | {end['minimum']} of {len(NAMES)} | {many} | {lost} | {off} |")
    rows += [
        "",
        "| federation | round | fault | who | for | with another | back after |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in sorted(faults, key=lambda line: line["federation"]):
        back = "never" if line["back"] is None else f"{line['back']:.1f} s"
        lasted = f"{line['seconds']:.1f} s" if line["seconds"] else "-"
        shown = (line["federation"], line["round"], line["what"], line["who"], lasted)
        rows.append(f"| {' | '.join(map(str, shown))} | {'yes' if line['together'] else '-'} | {back} |")
    return "\n".join(rows)


def role(who: str) -> str:
    return "a client" if who in NAMES else who


if __name__ == "__main__":
    main()
