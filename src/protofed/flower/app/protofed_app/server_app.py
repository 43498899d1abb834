"""Flower runs this beside the SuperLink; the work is done by the protofed that is installed there."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation to its end."""
    from protofed.flower.serverapp import main

    main(grid)
