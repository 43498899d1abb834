"""Many runs as one: methods x experiments x seeds x parameters, each a run folder found by its hash."""

from protofed.sweep.plan import Cell, Sweep
from protofed.sweep.run import run_cells, run_sweep
from protofed.sweep.watch import SweepWatch
from protofed.sweep.workers import Outcome

__all__ = ["Cell", "Outcome", "Sweep", "SweepWatch", "run_cells", "run_sweep"]
