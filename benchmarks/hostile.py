"""Malformed and poisoned uploads of one member of three, through the server's roster and engine, in one process.

    python benchmarks/hostile.py --uploads 5000 --seed 1

Of every round it checks that the honest clients' answers are merged, and that a round whose hostile upload was refused
is what it is without that upload, bit for bit. An upload within the bounds is merged: what it moves is printed.
"""

import argparse
import collections
import random
import re
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "remote"))

from federated import set_up, small, worker
from spoilt import poison, worse
from test_federation_hostile import Rehearsed

from protofed.engines.wire import decode, encode
from protofed.ops.trees import alone, merge
from protofed.remote.build import no_client, server_domain
from protofed.remote.protocol import Message, pack_message, unpack_message
from protofed.remote.server.audit import Audit, verify_log
from protofed.remote.server.engine import RemoteEngine
from protofed.remote.server.roster import Roster
from protofed.remote.server.status import Status
from protofed.remote.settings import Bounds, load_federation
from protofed.remote.transport import LocalTransport

RUN = "0123456789abcdef"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uploads", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pick, kinds = random.Random(options.seed), collections.Counter[str]()

    def spoil(message: Message) -> bytes:
        if message.head["kind"] != "answer":
            return pack_message(message.head, message.body)
        how = worse if pick.random() < 0.7 else poison
        kinds[how.__name__] += 1
        return how(message, pick)

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        set_up(home, small("model=mlp_digits"))
        experiment, settings = small("model=mlp_digits"), load_federation(home / "server")
        settings = replace(settings, bounds=Bounds(refusals=0))  # else it is put out after five
        audit = Audit(home / "audit.jsonl")
        status = Status.of(home / "status.json", lambda line: None, settings, 3, 2, audit)
        here = no_client(experiment, server_domain(home / "server", experiment, settings.task))
        ones = [worker(home, number) for number in range(3)]
        nodes = {100: Rehearsed(ones[0]), 101: Rehearsed(ones[1], spoil), 102: Rehearsed(ones[2])}
        transport = LocalTransport(nodes)
        roster = Roster(transport, settings, experiment, here, RUN, status)
        engine = RemoteEngine(experiment, here, roster, status, replace(settings.rounds, minimum=2), 0.0, home)
        server, reasons = experiment.method.init_server(here.specs()[0]), collections.Counter[str]()
        merged, other, farthest, started = 0, 0, 0.0, time.monotonic()
        honest = None
        for _ in range(options.uploads):
            transport.sent.clear()
            trained = engine.train(experiment.method, server, [0, 1, 2], 0)
            if honest is None:
                ups = [alone(decode(unpack_message(nodes[node].known["train"]).body)) for node in (100, 102)]
                honest = merge(*ups)
            if not {0, 2} <= set(trained.answered or ()):
                sys.exit(f"an honest client is missing: {trained.answered}")
            if 1 in (trained.answered or ()):
                merged += 1
                apart = trained.up["prototypes"].value - honest["prototypes"].value
                farthest = max(farthest, float(apart.norm(dim=1).max()))
            else:
                reasons[re.sub(r"-?\d[\d.,]*(e[+-]?\d+)?", "N", str(status.clients[1].last_reason))[:70]] += 1
                other += encode(trained.up) != encode(honest)
        length = float(honest["prototypes"].value.norm(dim=1).max())
        audit.close()
        print(f"{options.uploads} uploads ({dict(kinds)}) in {time.monotonic() - started:.0f} s, seed {options.seed}")
        print(f"refused: {sum(reasons.values())}, of {len(reasons)} kinds; rounds that differ by them: {other}")
        print(f"merged within the bounds: {merged}; a mean prototype moved by {farthest / length:.2f} of the longest")
        print(f"audit log: {verify_log(home / 'audit.jsonl')[0].number} entries, whole")
        for reason, many in reasons.most_common(40):
            print(f"{many:6} {reason}")


if __name__ == "__main__":
    main()
