"""A Flower program names a ServerApp; protofed's server claims the run and does the work itself."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]  # mypy does not follow Flower, which is an extra
def main(grid: Grid, context: Context) -> None:
    """Only `protofed server` can serve this run: it has the data and the settings."""
    raise RuntimeError("this run is served by 'protofed server', and by nothing else that claims it")
