"""The budget of a run before it begins: what promises cannot be kept, and how much noise is needed."""

from collections.abc import Sequence

from protofed.config.experiment import Experiment
from protofed.data.domain import Domain
from protofed.data.scaling import Scaler
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.methods.oneshot import OneShot
from protofed.ops.trees import under
from protofed.privacy import accounting
from protofed.privacy.accounting import NO_STEPS, NOTHING, PaidSteps
from protofed.privacy.release import Layout
from protofed.privacy.sgd import drawn_rate, steps_in_epoch
from protofed.privacy.shared import noised_grid
from protofed.privacy.worth import groups_of, scale_of_choice
from protofed.runs.cohort import draw_cohort, taking_part
from protofed.runs.noised import layout_of, sends_of_samples
from protofed.runs.persample import check_steps


def check_privacy(experiment: Experiment, engine: ReferenceEngine, domains: Sequence[Domain]) -> tuple[str, ...]:
    """Before anything is written, refuse promises that cannot be kept; notes on settings that change to keep one."""
    if not experiment.privacy.noisy:
        return ()
    accounting.check_accountant()
    _check_settings(experiment)
    _check_inputs(experiment, engine, domains)
    layout = layout_of(experiment, engine)
    sums = layout.size > 0
    noise = _check_amounts(experiment, _units(experiment, engine), sums)
    if experiment.privacy.noisy_steps:
        check_steps(experiment, engine, layout)
    if sums:
        _check_uploads(experiment, engine, layout)
    if experiment.privacy.noisy_steps:
        return _notes_of_steps(experiment, engine, layout, noise)
    return _notes(experiment, layout, noise)


def check_budget(experiment: Experiment, engine: ReferenceEngine) -> tuple[str, ...]:
    """The same for clients elsewhere that add the noise themselves."""
    if not experiment.privacy.noisy:
        return ()
    check_plan(experiment, sum(engine.samples(range(experiment.clients))))
    layout = layout_of(experiment, engine)
    if experiment.privacy.unit == "sample":
        _check_encoders(experiment, engine)
        _check_uploads(experiment, engine, layout)
    return _notes(experiment, layout, noise_of(experiment))


def check_plan(experiment: Experiment, samples: int = 0) -> None:
    """What can be said of a federation's budget before there is a model; `samples`: that are known of here."""
    experiment.privacy.refuse_federation()
    if not experiment.privacy.noisy:
        return
    accounting.check_accountant()
    _check_settings(experiment)
    if experiment.privacy.unit == "sample" and experiment.normalize == "auto":
        raise UserError(
            "data.normalize = 'auto' scales every sample by all of its client's samples, which privacy.unit = 'sample' "
            "does not cover in a federation. Use data.normalize = 'half' or 'none'."
        )
    clients = len(taking_part(experiment))
    _check_amounts(experiment, clients if experiment.privacy.unit == "client" else max(clients, samples))


def _check_amounts(experiment: Experiment, units: int, sums: bool = True) -> float:
    """Refuse a delta, an epsilon or shares of noise that promise nothing; the noise over the clip."""
    privacy = experiment.privacy
    if privacy.delta * units >= 1:
        raise UserError(
            f"privacy.delta = {privacy.delta:g} is not below 1 / {units}, so it would allow one of the {units} "
            f"{privacy.unit}s to be published. Use a smaller one."
        )
    noise, steps = noise_of(experiment, sums), steps_of(experiment, sums)
    choice = choice_of(experiment)
    if accounting.affordable(noise, privacy.epsilon, privacy.delta, steps, choice) < 1:
        once = accounting.spent(noise, 1, privacy.delta, steps, choice)
        has = [f"privacy.noise = {noise:g}"] if noise != NOTHING else []
        has += [f"privacy.sgd_noise = {steps.noise:g}"] if steps.many else []
        raise UserError(
            f"privacy.epsilon = {privacy.epsilon:g} is too small for one round: with {' and '.join(has)} it "
            f"spends {once:.3g}. Use a larger budget, or more noise."
        )
    if privacy.where == "sum" and noise != NOTHING:
        noised_grid(privacy, noise, len(draw_cohort(experiment, 0)))
    return noise


def _notes(experiment: Experiment, layout: Layout, noise: float) -> tuple[str, ...]:
    count = "clients count alike, whatever their numbers of samples"
    if experiment.privacy.unit == "sample":
        count = "samples count alike, and nothing that was trained on them is sent"
    notes = (f"privacy: {layout.size:,} numbers a round get noise of {noise:.3g} times the clip; {count}",)
    return (*notes, _note_of_worth(experiment, layout)) if layout.width else notes


def _note_of_worth(experiment: Experiment, layout: Layout) -> str:
    """What is chosen, and how much noise the choice has."""
    privacy, groups = experiment.privacy, groups_of(experiment.privacy, layout.width)
    chosen, others = groups.noises
    scale = scale_of_choice(privacy, groups.sizes[0], choice_of(experiment)) / privacy.worth_limit
    return (
        f"privacy: {groups.sizes[0]} of {layout.width} dimensions get {chosen:.3g} times this noise, and the others "
        f"{others:.3g} times; the noise of the choice is {scale:,.0f} times the largest difference of two scores"
    )


def _notes_of_steps(experiment: Experiment, engine: ReferenceEngine, layout: Layout, noise: float) -> tuple[str, ...]:
    steps, there = steps_of(experiment, layout.size > 0), taking_part(experiment)
    batch = steps.rate * sum(engine.samples(there)) / len(there)
    sums = f"{layout.size:,} numbers of class sums get noise of {noise:.3g} times the clip; " if layout.size else ""
    return (
        f"privacy: in each of {steps.many} steps a round, a client's gradient gets noise of {steps.noise:.3g} times "
        f"privacy.sgd_clip; {sums}samples count alike, and so do clients' models",
        f"privacy: batches have {batch:.3g} samples on average, whose sum is divided by batch_size = "
        f"{experiment.batch_size}; clients train one after another",
    )


def _check_settings(experiment: Experiment) -> None:
    method, name = experiment.method, experiment.method_name
    if isinstance(method, OneShot) and method.second != "none" and experiment.privacy.unit == "client":
        raise UserError(
            f"{name} needs second moments by numbers of samples, and with privacy.unit = 'client' all clients count "
            "alike. Use privacy.unit = 'sample', or method.name = 'classmeans'."
        )
    if isinstance(method, OneShot) and experiment.rounds > 1 and experiment.participation == 1:
        raise UserError(
            f"rounds = {experiment.rounds} would share the privacy budget, and {name} learns all in the first round, "
            "in which all clients take part. Use rounds = 1."
        )
    if experiment.privacy.adaptive and experiment.rounds == 1:
        raise UserError(
            f"privacy.clip_quantile = {experiment.privacy.clip_quantile:g} learns the clip from round to round, and "
            "rounds = 1. Leave it out, and give privacy.clip."
        )
    if experiment.robust.rule != "none" or experiment.attack.uploads:
        what = f"robust.rule = {experiment.robust.rule!r}"
        what = f"attack.kind = {experiment.attack.kind!r}" if experiment.attack.uploads else what
        raise UserError(f"{what} changes single uploads, which [privacy] clips and noises. Use one of the two.")


def _check_inputs(experiment: Experiment, engine: ReferenceEngine, domains: Sequence[Domain]) -> None:
    """Refuse inputs through which one unit's samples could affect another unit's upload outside of releases."""
    own_scale = any(domain.scale is None and not Scaler.of(domain, "none").whole for domain in domains)
    if experiment.normalize == "auto" and own_scale:
        raise UserError(
            "data.normalize = 'auto' scales every sample by all clients' samples, which [privacy] does not cover. "
            "Use data.normalize = 'half' or 'none', or data that carry a mean and a deviation."
        )
    if experiment.privacy.unit == "sample" and not experiment.privacy.noisy_steps:
        _check_encoders(experiment, engine)


def _check_encoders(experiment: Experiment, engine: ReferenceEngine) -> None:
    """What embeds samples was not trained on them."""
    for spec in engine.specs():
        if under(experiment.method.init_client(spec).params, "body."):
            raise UserError(
                f"privacy.unit = 'sample' needs a frozen encoder, because {spec.architecture} would be trained on "
                "the samples that it embeds. Use a model with frozen = true, steps with noise (privacy.sgd_rate = "
                "0.05, in simulations), or privacy.unit = 'client'."
            )


def _check_uploads(experiment: Experiment, engine: ReferenceEngine, layout: Layout) -> None:
    """What is sent of samples can be computed from one sample at a time."""
    if experiment.privacy.unit == "sample" and not sends_of_samples(layout, experiment, engine):
        raise UserError(
            f"privacy.unit = 'sample' needs uploads that are computed from one sample at a time, and "
            f"{experiment.method_name} sends what is left of training (gradients, or method.source = 'inloop'). Use "
            "method.source = 'clean', another method, or privacy.unit = 'client'."
        )


def _units(experiment: Experiment, engine: ReferenceEngine) -> int:
    """How many clients or samples there are."""
    there = taking_part(experiment)
    return len(there) if experiment.privacy.unit == "client" else max(1, sum(engine.samples(there)))


def planned_times(experiment: Experiment) -> int:
    """The most rounds that any client takes part in, by seed and round."""
    if len(draw_cohort(experiment, 0)) == len(taking_part(experiment)):
        return experiment.rounds
    times: dict[int, int] = {}
    for round in range(experiment.rounds):
        for number in draw_cohort(experiment, round):
            times[number] = times.get(number, 0) + 1
    return max(times.values())


def noise_of(experiment: Experiment, sums: bool = True) -> float:
    """The standard deviation of the noise over the clip: as given, or as the budget requires. `sums`: whether anything
    is sent besides what was trained in steps with noise."""
    privacy = experiment.privacy
    if privacy.noisy_steps and not sums:
        return NOTHING
    if privacy.noise:
        return privacy.noise
    times = planned_times(experiment)
    if privacy.noisy_steps and privacy.sgd_noise:
        return accounting.noise_beside(privacy.epsilon, privacy.delta, times, _steps(experiment))
    if choice := choice_of(experiment):
        return accounting.noise_for(privacy.epsilon, privacy.delta, times, choice)
    if privacy.noisy_steps:  # as if they had half the budget to themselves; the steps get what that leaves
        return accounting.noise_for(privacy.epsilon / 2, privacy.delta / 2, times)
    return accounting.noise_for(privacy.epsilon, privacy.delta, times)


def choice_of(experiment: Experiment) -> float:
    """The epsilon of choosing dimensions in one release; 0 if none are chosen."""
    privacy = experiment.privacy
    return privacy.worth_epsilon * privacy.epsilon / planned_times(experiment) if privacy.worth else 0.0


def steps_of(experiment: Experiment, sums: bool = True) -> PaidSteps:
    """A client's steps with noise in a round: with as much noise as given, or as the budget requires."""
    privacy, steps = experiment.privacy, _steps(experiment)
    if not privacy.noisy_steps or privacy.sgd_noise:
        return steps
    noise, times = noise_of(experiment, sums), planned_times(experiment)
    return steps._replace(noise=accounting.step_noise_for(noise, privacy.epsilon, privacy.delta, times, steps))


def _steps(experiment: Experiment) -> PaidSteps:
    privacy, method = experiment.privacy, experiment.method
    if not privacy.noisy_steps:
        return NO_STEPS
    epochs = sum(phase.passes(experiment.local_epochs) for phase in method.phases())
    return PaidSteps(epochs * steps_in_epoch(privacy.sgd_rate), drawn_rate(privacy.sgd_rate), privacy.sgd_noise)
