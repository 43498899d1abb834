"""What a run needs to know about robust rules and attackers."""

from collections.abc import Sequence

import torch
from torch.utils._pytree import tree_map

from protofed.config.experiment import Experiment
from protofed.engines.reference import ReferenceEngine
from protofed.method import Batch, LocalData
from protofed.ops import random
from protofed.ops.trees import deal
from protofed.robust.combine import check_upload
from protofed.robust.round import attackers
from protofed.runs.cohort import taking_part
from protofed.runs.securesum import check_summable


def attackers_of(experiment: Experiment, samples: Sequence[int]) -> frozenset[int]:
    """The clients of a simulation that attack, given the number of training samples of each client."""
    there = {number: samples[number] for number in taking_part(experiment)} if experiment.attack.on else {}
    return attackers(experiment.attack, experiment.seed, there)


def check_rule(experiment: Experiment, engine: ReferenceEngine) -> None:
    """Check that a robust rule or a secure sum can combine what this method sends; tested on an upload of zeros."""
    if experiment.robust.rule == "none" and not experiment.privacy.secure_sum:
        return
    method, model = experiment.method, engine.model(0)
    device = engine.federation.device
    server = tree_map(lambda tensor: tensor.to(device), method.init_server(engine.specs()[0]))
    down = deal(method.broadcast(server, torch.zeros(1, dtype=torch.int64, device=device)), 0)
    x, y = engine.federation.blank(0, 1).to(device), torch.zeros(1, dtype=torch.int64, device=device)
    counts = torch.zeros(engine.federation.classes, device=device)
    data = LocalData([Batch(x, y, torch.zeros(1, device=device))], counts, random.key(0).to(device))
    client = method.receive(model, engine.client(method, 0), data, down)
    up = method.upload(model, client, data, down)[0]
    check_upload(experiment.robust, up)
    if experiment.privacy.secure_sum:
        check_summable(experiment, up)
