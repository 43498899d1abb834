"""One file per paper. This table lists the methods for the command line; a method's file is imported on first use."""

from typing import TYPE_CHECKING

from protofed.importing import Catalogue

if TYPE_CHECKING:
    from protofed.method import Method
    from protofed.methods.ccvr import CCVR as CCVR
    from protofed.methods.classmeans import ClassMeans as ClassMeans
    from protofed.methods.creff import CReFF as CReFF
    from protofed.methods.ditto import Ditto as Ditto
    from protofed.methods.dpfedcl import DPFedCL as DPFedCL
    from protofed.methods.fedavg import FedAvg as FedAvg
    from protofed.methods.fedbabu import FedBABU as FedBABU
    from protofed.methods.fedgh import FedGH as FedGH
    from protofed.methods.fednh import FedNH as FedNH
    from protofed.methods.fedorgp import FedORGP as FedORGP
    from protofed.methods.fedpac import FedPAC as FedPAC
    from protofed.methods.fedpcl import FedPCL as FedPCL
    from protofed.methods.fedper import FedPer as FedPer
    from protofed.methods.fedplvm import FedPLVM as FedPLVM
    from protofed.methods.fedpr import FedPR as FedPR
    from protofed.methods.fedproc import FedProc as FedProc
    from protofed.methods.fedproto import FedProto as FedProto
    from protofed.methods.fedprox import FedProx as FedProx
    from protofed.methods.fedrep import FedRep as FedRep
    from protofed.methods.fedrod import FedROD as FedROD
    from protofed.methods.fedtgp import FedTGP as FedTGP
    from protofed.methods.fesem import FeSEM as FeSEM
    from protofed.methods.fpl import FPL as FPL
    from protofed.methods.gpfl import GPFL as GPFL
    from protofed.methods.i2pfl import I2PFL as I2PFL
    from protofed.methods.lda import LDA as LDA
    from protofed.methods.local import Local as Local
    from protofed.methods.moon import MOON as MOON
    from protofed.methods.mpfedcl import MPFedCL as MPFedCL
    from protofed.methods.pfedfda import PFedFDA as PFedFDA
    from protofed.methods.qda import QDA as QDA
    from protofed.methods.ridge import Ridge as Ridge
    from protofed.methods.spfedcl import SPFedCL as SPFedCL

METHODS: "Catalogue[type[Method]]" = Catalogue(
    {
        "local": "protofed.methods.local:Local",
        "fedavg": "protofed.methods.fedavg:FedAvg",
        "fedprox": "protofed.methods.fedprox:FedProx",
        "fedper": "protofed.methods.fedper:FedPer",
        "fedrep": "protofed.methods.fedrep:FedRep",
        "fesem": "protofed.methods.fesem:FeSEM",
        "ditto": "protofed.methods.ditto:Ditto",
        "fedbabu": "protofed.methods.fedbabu:FedBABU",
        "fedrod": "protofed.methods.fedrod:FedROD",
        "creff": "protofed.methods.creff:CReFF",
        "fedproto": "protofed.methods.fedproto:FedProto",
        "fednh": "protofed.methods.fednh:FedNH",
        "fedpr": "protofed.methods.fedpr:FedPR",
        "mpfedcl": "protofed.methods.mpfedcl:MPFedCL",
        "spfedcl": "protofed.methods.spfedcl:SPFedCL",
        "dpfedcl": "protofed.methods.dpfedcl:DPFedCL",
        "classmeans": "protofed.methods.classmeans:ClassMeans",
        "lda": "protofed.methods.lda:LDA",
        "qda": "protofed.methods.qda:QDA",
        "ridge": "protofed.methods.ridge:Ridge",
        "ccvr": "protofed.methods.ccvr:CCVR",
        "fedgh": "protofed.methods.fedgh:FedGH",
        "fedorgp": "protofed.methods.fedorgp:FedORGP",
        "fedpac": "protofed.methods.fedpac:FedPAC",
        "fedproc": "protofed.methods.fedproc:FedProc",
        "fedtgp": "protofed.methods.fedtgp:FedTGP",
        "fedpcl": "protofed.methods.fedpcl:FedPCL",
        "fedplvm": "protofed.methods.fedplvm:FedPLVM",
        "i2pfl": "protofed.methods.i2pfl:I2PFL",
        "pfedfda": "protofed.methods.pfedfda:PFedFDA",
        "gpfl": "protofed.methods.gpfl:GPFL",
        "fpl": "protofed.methods.fpl:FPL",
        "moon": "protofed.methods.moon:MOON",
    }
)


def __getattr__(name: str) -> "type[Method]":
    """`from protofed.methods import FedProto` imports that method's file."""
    return METHODS.defined(name)
