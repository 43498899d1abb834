"""A client from the bundle that it got: its settings, the experiment, its data and its model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from protofed.config.experiment import Experiment
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.remote.build import choose_model, client_domain, embedded_here, initial_spec, one_client, task_of
from protofed.remote.client.state import StateFolder
from protofed.remote.client.worker import ClientWorker
from protofed.remote.settings import experiment_hash, load_client, load_members
from protofed.runs.checks import check_phases
from protofed.runs.securesum import check_summable
from protofed.runs.trust import experiment_of, read_toml

if TYPE_CHECKING:
    from protofed.remote.client.noising import ClientNoise
    from protofed.remote.client.summing import ClientSums


def make_worker(
    bundle: Path,
    *,
    data: str | None,
    model: str | None,
    state: Path,
    min_count: int,
    tell: Callable[[str], None],
    trust: bool = False,
) -> ClientWorker:
    """A client from its bundle; a UserError where it cannot take part.

    The bundle is somebody else's: code that its experiment names is imported only if it is known here, or trusted."""
    settings, task = load_client(bundle)
    path = bundle / "experiment.toml"
    experiment = experiment_of(read_toml(path), path, trust, tell)
    if settings.number >= experiment.clients:
        raise UserError(
            f"{bundle / 'client.toml'}: client.number = {settings.number}, but the experiment has clients = "
            f"{experiment.clients}, counted from 0. Get the federation's present bundle."
        )
    if min_count < 0:
        raise UserError(f"--min-count {min_count} should be 0 or more.")
    if min_count > 1 and experiment.privacy.unit == "sample":
        raise UserError(
            f"--min-count {min_count} leaves out small classes, which shows how many samples there are, and "
            "privacy.unit = 'sample' hides that already. Leave it out."
        )
    task = task if task.classes else task_of(experiment)
    choice = choose_model(model, experiment, settings.number)
    domain = embedded_here(experiment, choice, client_domain(data, experiment, settings.number, task), tell)
    engine = one_client(experiment, settings.number, domain, choice)
    check_phases(experiment, engine)
    server_model = experiment.model_of(0)
    server = experiment.method.init_server(initial_spec(engine, server_model, task.shape))
    folder = StateFolder(state, tell)
    noise = _noise(experiment, engine, settings.number, folder) if experiment.privacy.noisy else None
    sums = None
    if experiment.privacy.secure_sum:
        sums = _sums(bundle, experiment, settings.number, folder, tell, None if noise is None else noise.noise)
    return ClientWorker(experiment, settings, task, engine, choice, server, folder, min_count, tell, sums, noise)


def _noise(experiment: Experiment, engine: ReferenceEngine, number: int, state: StateFolder) -> "ClientNoise":
    """What a client needs to noise its uploads itself."""
    from protofed.remote.client.noising import ClientNoise  # needs dp-accounting
    from protofed.runs.budget import check_budget

    for note in check_budget(experiment, engine):
        state.tell(note)
    return ClientNoise(experiment, engine, number, state)


def _sums(
    bundle: Path,
    experiment: Experiment,
    number: int,
    state: StateFolder,
    tell: Callable[[str], None],
    noise: float | None,
) -> "ClientSums":
    """What a client needs for secure sums: its key, and the public keys of all members."""
    check_summable(experiment, ())
    from protofed.privacy.keys import member_identity
    from protofed.remote.client.summing import ClientSums  # needs cryptography

    try:
        listed = load_members(bundle)
        identity = member_identity(number, (bundle / "key").read_bytes(), listed)
    except (OSError, ValueError) as error:
        raise UserError(
            f"privacy.secure_sum needs {bundle / 'key'} and the keys of all members in {bundle / 'client.toml'}, which "
            f"do not fit: {error}. Get the federation's present bundle."
        ) from None
    return ClientSums(experiment, experiment_hash(experiment), identity, listed, state, tell, noise)
