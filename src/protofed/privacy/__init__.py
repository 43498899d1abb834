"""What a run promises about what clients send: who learns what, with how much noise, and the protocols for it."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from protofed.errors import UserError


@dataclass(frozen=True)
class Privacy:
    """What the server learns of clients' uploads, and differential privacy (the [privacy] section)."""

    secure_sum: bool = False
    """Whether uploads are summed under masks, so that the server learns only the sum over a round's clients."""
    threshold: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """secure_sum: clients that must take part in a sum, and whose shares are needed to open it; more than half of a
    round's clients. 0: more than two thirds of them."""
    range: Annotated[float, Gt(0), Le(1e9)] = 64.0
    """secure_sum: values are sent as whole steps of a grid from -range to range, and cut at its ends."""
    bits: Literal[24, 32, 40, 48, 56, 64] = 32
    """secure_sum: bits of each number sent. More bits make finer steps and larger messages."""
    unit: Literal["none", "client", "sample"] = "none"
    """Whose presence the noise hides: one client with all its samples, or one sample. none: no noise is added."""
    epsilon: Annotated[float, Le(1e12)] = 0.0
    """The budget of the whole run. It stops before a round that would spend more."""
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """The probability with which the promise may fail; it must be below 1 / the number of clients (or samples)."""
    clip: Annotated[float, Gt(0), Le(1e9)] = 1.0
    """The longest that one client's whole upload (or one sample's part of it) may be, as one vector. For a model this
    is its change since it was downloaded."""
    clip_quantile: Annotated[float, Ge(0), Lt(1)] = 0.0
    """unit = "client": the clip follows the length that this share of the clients' values stays below, by a noised
    count (Andrew et al., NeurIPS 2021). `clip` is then the first round's. 0: the clip stays as it is."""
    clip_rate: Annotated[float, Gt(0), Le(10)] = 0.2
    """clip_quantile: how fast the clip follows: it is multiplied by exp(-clip_rate * (share below - clip_quantile))."""
    where: Literal["client", "sum", "server"] = "client"
    """Who adds the noise: each client to its own upload (nobody has to be trusted), each client its share of it under
    the secure sum, or the server, once, which everybody has to trust."""
    noise: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """The standard deviation of the noise as a multiple of `clip`. 0: as much as epsilon and the rounds ask for."""
    dishonest: Annotated[int, Ge(0), Le(1_000_000)] = 1
    """where = "sum": how many clients of a sum may leave out their noise, or tell it to others; the noise of the rest
    is enough. Each client knows its own: with 0, the noise holds against the server, and not against a client."""
    worth: Annotated[float, Ge(0), Le(1)] = 0.0
    """unit = "sample", where = "client", frozen encoder: less noise on this share of the embedding's dimensions, those
    that tell classes apart best, and more on the others (VPDR, CVPR 2026); at most 0.5. 0: all get the same."""
    worth_epsilon: Annotated[float, Gt(0), Lt(1)] = 0.1
    """worth: the share of epsilon that choosing these dimensions may cost, in all rounds together."""
    worth_limit: Annotated[float, Gt(0), Le(1e9)] = 0.1
    """worth: where the variance between classes over the variance within them is cut; the noise of the choice grows
    with it."""
    sgd_rate: Annotated[float, Ge(0), Le(1)] = 0.0
    """unit = "sample": clients train in steps with noise (DP-SGD), in each of which each sample takes part with this
    probability. 0: nothing that was trained on samples is sent, so the encoder has to be frozen."""
    sgd_clip: Annotated[float, Gt(0), Le(1e9)] = 1.0
    """The longest that one sample's gradient may be in a step."""
    sgd_noise: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """The standard deviation of a step's noise as a multiple of `sgd_clip`. 0: as much as epsilon asks for."""

    @property
    def noisy(self) -> bool:
        """Whether noise is added."""
        return self.unit != "none"

    @property
    def noisy_steps(self) -> bool:
        """Whether local training is DP-SGD."""
        return self.unit == "sample" and self.sgd_rate > 0

    @property
    def adaptive(self) -> bool:
        """Whether the clip follows the clients' lengths."""
        return self.clip_quantile > 0

    def refuse_federation(self) -> None:
        """Refuse noise that clients of a real federation cannot add."""
        if self.adaptive:
            raise UserError(
                f"privacy.clip_quantile = {self.clip_quantile:g} works in simulations only, and in this real "
                "federation the clip is in every client's bundle. Leave it out, and give privacy.clip."
            )
        if self.worth:
            raise UserError(
                f"privacy.worth = {self.worth:g} works in simulations only, and this is a real federation. "
                "Leave it out."
            )
        if self.noisy_steps:
            raise UserError(
                "privacy.sgd_rate works in simulations only, and this is a real federation. Use a frozen encoder "
                "without it, or privacy.unit = 'client'."
            )
        if self.noisy and self.where == "server":
            raise UserError(
                "privacy.where = 'server' works in simulations only, and this is a real federation. Use privacy.where "
                "= 'client', or 'sum' with privacy.secure_sum = true."
            )

    def checked(self) -> "Privacy":
        """Refuse keys that contradict each other."""
        if self.noisy and self.epsilon <= 0:
            raise UserError(
                f"privacy.epsilon = {self.epsilon:g} is not a budget. Give one above 0, such as privacy.epsilon = 8."
            )
        self._check_place()
        self._check_steps()
        usual: dict[str, Any] = asdict(Privacy())
        self._check_clip()
        self._check_worth()
        for key in ("epsilon", "delta", "clip", "where", "noise", "dishonest"):
            if not self.noisy and getattr(self, key) != usual[key]:
                raise UserError(
                    f"privacy.{key} = {getattr(self, key)!r} has no effect without a unit. "
                    "Use privacy.unit = 'client' or 'sample'."
                )
        return self

    def _check_clip(self) -> None:
        """A clip that follows lengths follows those of clients."""
        if self.adaptive and self.unit != "client":
            raise UserError(
                f"privacy.clip_quantile = {self.clip_quantile:g} follows the lengths of whole clients' uploads. Use "
                "privacy.unit = 'client', or leave it out."
            )
        if not self.adaptive and self.clip_rate != Privacy.clip_rate:
            raise UserError(
                f"privacy.clip_rate = {self.clip_rate:g} has no effect while the clip stays as it is. Set "
                "privacy.clip_quantile, such as 0.5, or leave it out."
            )

    def _check_worth(self) -> None:
        """Noise by what a dimension is worth is each client's own, for sums over its samples."""
        if self.worth and (self.unit, self.where) != ("sample", "client"):
            raise UserError(
                f"privacy.worth = {self.worth:g} is for class sums that each client noises by itself. Use privacy.unit "
                "= 'sample' with privacy.where = 'client', or leave it out."
            )
        if self.worth and self.sgd_rate:
            raise UserError(
                f"privacy.worth = {self.worth:g} needs a frozen encoder, and privacy.sgd_rate is for one that is "
                "trained. Leave out one of them."
            )
        if self.worth > 0.5:
            raise UserError(
                f"privacy.worth = {self.worth:g} is more than half of the dimensions: they would get more noise than "
                "the others. Use at most 0.5."
            )
        for key in ("worth_epsilon", "worth_limit"):
            if not self.worth and getattr(self, key) != getattr(Privacy, key):
                raise UserError(
                    f"privacy.{key} = {getattr(self, key):g} has no effect while all dimensions get the same noise. "
                    "Set privacy.worth, such as 0.2, or leave it out."
                )

    def _check_steps(self) -> None:
        """Steps with noise are for single samples, and each client's own."""
        if self.unit != "sample" and self.sgd_rate:
            raise UserError(
                f"privacy.sgd_rate = {self.sgd_rate:g} hides single samples. Use privacy.unit = 'sample', or leave it "
                "out."
            )
        for key in ("sgd_clip", "sgd_noise"):
            if not self.sgd_rate and getattr(self, key) != getattr(Privacy, key):
                raise UserError(
                    f"privacy.{key} = {getattr(self, key):g} has no effect without steps with noise. Set "
                    "privacy.sgd_rate, or leave it out."
                )

    def _check_place(self) -> None:
        """Shares of noise and secure sums belong together."""
        if not self.noisy:
            return
        if self.where == "sum" and not self.secure_sum:
            raise UserError(
                "privacy.where = 'sum' needs a secure sum: without it the server sees every upload with only a share "
                "of the noise. Add privacy.secure_sum = true, or use privacy.where = 'client' or 'server'."
            )
        if self.where != "sum" and self.secure_sum:
            raise UserError(
                f"privacy.where = {self.where!r} does not go with privacy.secure_sum, under which each client adds a "
                "share of the noise. Use privacy.where = 'sum', or privacy.secure_sum = false."
            )
        if self.where != "sum" and self.dishonest != Privacy.dishonest:
            raise UserError(
                f"privacy.dishonest = {self.dishonest} has no effect with privacy.where = {self.where!r}. "
                "Use privacy.where = 'sum'."
            )
        if self.unit == "client" and self.range != Privacy.range:
            raise UserError(
                f"privacy.range = {self.range:g} has no effect with privacy.unit = 'client': clip and noise say how "
                "large a number can be. Leave it out."
            )
