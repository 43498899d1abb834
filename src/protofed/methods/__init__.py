"""One file per paper. A method reaches the command line by being in this table."""

from protofed.method import Method
from protofed.methods.creff import CReFF
from protofed.methods.ditto import Ditto
from protofed.methods.dpfedcl import DPFedCL
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedbabu import FedBABU
from protofed.methods.fednh import FedNH
from protofed.methods.fedper import FedPer
from protofed.methods.fedpr import FedPR
from protofed.methods.fedproto import FedProto
from protofed.methods.fedprox import FedProx
from protofed.methods.fedrep import FedRep
from protofed.methods.fedrod import FedROD
from protofed.methods.fesem import FeSEM
from protofed.methods.local import Local
from protofed.methods.mpfedcl import MPFedCL
from protofed.methods.spfedcl import SPFedCL

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fesem": FeSEM,
    "ditto": Ditto,
    "fedbabu": FedBABU,
    "fedrod": FedROD,
    "creff": CReFF,
    "fedproto": FedProto,
    "fednh": FedNH,
    "fedpr": FedPR,
    "mpfedcl": MPFedCL,
    "spfedcl": SPFedCL,
    "dpfedcl": DPFedCL,
}
