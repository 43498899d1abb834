"""One file per paper. A method reaches the command line by being in this table."""

from protofed.method import Method
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproto import FedProto
from protofed.methods.local import Local

METHODS: dict[str, type[Method]] = {"local": Local, "fedavg": FedAvg, "fedproto": FedProto}
