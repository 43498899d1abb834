"""Many runs as one: methods x experiments x seeds x parameters, each a run folder found by its hash."""

from protofed.sweep.plan import Cell, Sweep
from protofed.sweep.run import run_cells, run_sweep
from protofed.sweep.watch import SweepWatch
from protofed.sweep.workers import CellOutcome

__all__ = ["Cell", "CellOutcome", "Sweep", "SweepWatch", "run_cells", "run_sweep"]
