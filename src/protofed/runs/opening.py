"""The beginning of a run: set up its folder, or find the round after which an old one stopped."""

from typing import Any

from torch.utils._pytree import tree_map

from protofed.config.experiment import Experiment
from protofed.data.scaling import inputs
from protofed.data.split import Split
from protofed.errors import UserError, option
from protofed.runs.environment import changed_code, environment
from protofed.runs.folder import RunFolder, State
from protofed.runs.probes import Probes
from protofed.runs.record import class_record
from protofed.runs.setup import Prepared
from protofed.runs.trust import remember
from protofed.runs.watch import Watch


def open_or_go_on(
    folder: RunFolder,
    experiment: Experiment,
    prepared: Prepared,
    watch: Watch,
    client_bytes: int | None,
    probes: Probes,
) -> State:
    """Set up a new folder, or find the round after which an old run stopped."""
    started = folder.exists
    if not started:
        folder.write("experiment.toml", experiment.to_toml())
    if prepared.data_here:
        _keep_partition(folder, prepared, started, probes)
        folder.write_json("inputs.json", inputs(prepared.domains, experiment.normalize))
    remember(experiment, folder.path, watch.note)
    for name in changed_code(folder):
        watch.note(f"the file of {name} has changed since the run began: not all of its rounds ran the same code")
    folder.write_json("environment.json", environment(experiment))
    folder.write_json("classes.json", class_record(prepared.domains))
    for note in (*prepared.split.notes, *prepared.notes):
        watch.note(note)
    here = experiment.torch_device()
    state, remarks = folder.restore(here, client_bytes)
    folder.go_back(state)
    for remark in remarks:
        watch.note(remark)
    if started:
        watch.note(f"resuming {folder.path} after round {state.round if state else 0}")
    done = state.round if state else 0
    if len(folder.cut(done)) < done:
        watch.note(f"rounds.jsonl lacks some of the {done} rounds done; the curve will have gaps")
    if state is None:
        server = experiment.method.init_server(prepared.engine.specs()[0])
        state = State(0, server, folder.store(here, client_bytes), _no_totals())
        folder.save(state)  # so that there is always something to fall back to
    kept = tree_map(lambda tensor: tensor.to(here), (state.server, state.centres))
    return state._replace(server=kept[0], centres=kept[1])


def _keep_partition(folder: RunFolder, prepared: Prepared, started: bool, probes: Probes) -> None:
    """Save and draw the partition, which must be the one that the run began with."""
    split, computed = prepared.split, prepared.domains[0].computed
    saved = folder.file("partition.npz" if computed is None else "computed.json")
    if started and saved.is_file():
        before = Split.load(saved) if computed is None else None
        known = (before.hash, before.fingerprint) if before else tuple(folder.read_json(saved.name).get("data", ()))
        if known != (split.hash, split.fingerprint):
            raise UserError(
                f"{folder.path} was started with other data: it no longer gives the partition in {saved}. "
                f"Restore the data, or start again with another {option('out')}."
            )
    if computed is not None:
        folder.write_json(saved.name, {"about": computed.about, "data": [split.hash, split.fingerprint]})
        return
    split.save(saved, prepared.domains)
    probes.partition(split, prepared.domains, folder.file("partition.png"))


def _no_totals() -> dict[str, Any]:
    return {"params_up": 0, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0, "participations": {}, "finished": False}
