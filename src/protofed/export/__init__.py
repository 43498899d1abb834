"""Trained models as files that need no protofed."""

from protofed.export.subject import of_newcomer, of_prepared, of_run
from protofed.export.write import check_out, export

__all__ = ["check_out", "export", "of_newcomer", "of_prepared", "of_run"]
