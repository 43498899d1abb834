"""Convergence guidance: the constants of FedProto's and FedNH's theorems, estimated on a run (docs/theory.md)."""
