"""What clients' networks take, in bytes and operations: counted once for each architecture."""

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from protofed.data.federation import Federation
from protofed.engines import memory
from protofed.method import Client, Params, Spec
from protofed.models.functional import FunctionalModel, state
from protofed.ops import random

NEAR = 2**23  # bytes of states that a CPU holds at once in a group: more would leave its cache between two uses
MOST = {"cpu": 1024, "cuda": 16384}  # samples in one pass outside of training: what a CPU's cache has room for, or much
COUNTLESS = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError)  # of a model that needs numbers
UNCOUNTED = 1000  # bytes that such a model makes of one of its input, roughly


class Needs:
    """Of the networks of a reference engine's clients."""

    def __init__(
        self,
        federation: Federation,
        architectures: Sequence[str],  # of each client
        models: Mapping[str, FunctionalModel],
        modules: Mapping[str, nn.Module],
        common: Mapping[str, Spec],
    ) -> None:
        self.federation, self.architectures = federation, architectures
        self._models, self._modules, self._common = models, modules, common
        self._together: dict[str, int] = {}
        self._largest: dict[str, int] = {}
        self._flops: dict[str, float] = {}
        self._lanes: dict[str, int] = {}

    def largest(self, number: int) -> int:
        """Bytes of the largest thing that a client's network makes of one sample."""
        name = self.architectures[number]
        if name not in self._largest:
            x = self.federation.train(number).x[:1]
            x = x if len(x) else self.federation.blank(number, 1)
            self._largest[name] = 0
            with torch.no_grad(), contextlib.suppress(*COUNTLESS):
                _, self._largest[name] = memory.counted(self._models[name], Client(*state(self._modules[name])), x)
        return self._largest[name]

    def together(self, number: int) -> int:
        """Samples that pass a client's network at once outside of training: as many as there is memory for."""
        name, device = self.architectures[number], self.federation.device
        if name not in self._together:
            remedy = "Use a smaller model or smaller inputs."
            fits = memory.fitting(3 * self.largest(number), device, f"one sample in {name}", remedy)
            self._together[name] = max(1, min(fits // 2, MOST[device.type]))
        return self._together[name]

    def lanes_that_fit(self, number: int) -> int:
        """How many clients of this network can train at once: by all that a step of one makes, kept or not."""
        name = self.architectures[number]
        if name not in self._lanes:
            model, spec = self._models[name], self._common[name]
            x = self.federation.blank(number, self.federation.widest)

            def step(params: Params, x: Tensor) -> Tensor:
                logits: Tensor = model.training(spec.buffers, key)(Client(params, spec.buffers), x)[1]
                return logits.square().sum()

            key, *inputs = memory.on_meta((random.key(0), spec.params, x))
            spec = spec._replace(buffers=memory.on_meta(spec.buffers))
            try:
                made, _ = memory.counted(torch.func.grad(step), *inputs)
            except COUNTLESS:
                made = UNCOUNTED * self.federation.widest * memory.size(x[:1])
            each, remedy = made + 4 * memory.size(spec.params), "Use a smaller model or batch_size."
            self._lanes[name] = memory.fitting(each, self.federation.device, f"training one client of {name}", remedy)
        return self._lanes[name]

    def states_that_fit(self, number: int) -> int:
        """How many clients' states of this network can be held at once, beside all else."""
        each, device = memory.size(self._common[self.architectures[number]].params), self.federation.device
        room = int(memory.whole(device) * memory.SHARE) // 4
        return max(1, (min(room, NEAR) if device.type == "cpu" else room) // each)

    def flops(self, number: int) -> float:
        """Operations of a training step of a client per sample, roughly: three times those of a forward pass."""
        name = self.architectures[number]
        if name not in self._flops:
            x = self.federation.blank(number, 1)
            client = Client(*state(self._modules[name]))
            with torch.no_grad(), contextlib.suppress(*COUNTLESS), FlopCounterMode(display=False) as counter:
                self._models[name](*memory.on_meta((client, x)))
            self._flops[name] = 3.0 * max(counter.get_total_flops(), memory.size(client.params) / 4)
        return self._flops[name]
