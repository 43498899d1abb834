"""One table or figure of a paper: what it reports, how it is run here, and what it claims."""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protofed.errors import UserError, did_you_mean

FOLDER = Path(__file__).parent / "entries"
PAPERS = {
    "fedproto": "FedProto (Tan et al., AAAI 2022, arXiv 2105.00243; the tables are those of its first version)",
    "fednh": "FedNH (Dai et al., AAAI 2023, arXiv 2212.02758)",
    "fedpr": "FedPR (Qiao et al., 2023, arXiv 2307.10575)",
    "mpfedcl": "MP-FedCL (Qiao et al., 2023, arXiv 2304.01950)",
    "board": "Leaderboards: the settings of other people's tables, with every method that fits",
    "natural": "Natural federations: clients that exist, such as people, hospitals and makers of devices",
    "privacy": "Privacy: what noise with a budget costs, on frozen encoders",
    "studies": "Studies of our own: readings of the papers side by side, and all methods in one setting",
}


class Strict(BaseModel):
    """A table of the file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Number(NamedTuple):
    """A reported number with its deviation."""

    value: float
    std: float | None


class PaperColumn(Strict):
    """One column of a table: a number of the runs whose labels are `at`."""

    title: str
    group: str = ""
    """Columns with the same group form one table."""
    at: dict[str, str] = {}
    """Labels of its runs: the experiment, or a parameter of the sweep."""
    metric: str = "accuracy_mean"
    """See `protofed.papers.reproduce.measure`."""
    unit: Literal["%", "", "s", "MB"] = "%"

    @property
    def name(self) -> str:
        return f"{self.group}, {self.title}" if self.group else self.title


class Claim(Strict):
    """One row is above others, in some columns or all. If the paper's numbers say below, below is expected."""

    is_: str = Field(alias="is")
    above: list[str]
    in_: list[str] = Field(default=[], alias="in")
    """Names of columns; empty: all."""
    than: str = ""
    """The column to compare with, if it is another one."""
    says: str = ""
    """What the paper says, in short, if it gives no numbers."""


class PaperFigure(Strict):
    """How the figure is drawn; see `protofed.papers.reproduce.figures`."""

    kind: Literal["lines", "curves", "embeddings", "plane", "similarity", "bars"]
    x: str = ""
    """lines: the parameter along the axis."""
    metric: str = "accuracy_mean"
    dashed: str = ""
    """curves: the same by nearest prototype, for runs that have it; `metric` is then by classifier."""
    methods: list[str] = []
    """The rows to draw; empty: all."""
    clients: list[int] = []
    """embeddings, plane: the clients whose test samples are drawn; empty: all."""
    classes: list[int] = []
    """embeddings: the classes to draw; empty: all."""
    names: list[str] = []
    """Names of these classes."""
    by: Literal["tsne", "pca"] = "tsne"
    log: bool = False


class Digits(Strict):
    """Changes for when the data set is missing, so that the built-in digits can be used."""

    changes: list[str]
    methods: dict[str, list[str]] = {}
    parameters: dict[str, list[Any]] = {}


class Quick(Strict):
    """A smaller version for a laptop."""

    experiment: list[str] = []
    seeds: list[int] = [0, 1]
    changes: list[str] = []
    methods: list[str] = []
    parameters: dict[str, list[Any]] = {}
    digits: Digits | None = None


class StandIn(Strict):
    """Other data to use when the data is missing."""

    says: str
    changes: list[str]
    methods: dict[str, list[str]] = {}


class PaperEntry(Strict):
    """One table or figure."""

    name: str
    shows: str
    """The table or figure of the paper."""
    title: str
    importance: int
    """Entries with 1 run first."""
    about: str
    """What the paper does in this table or figure, and what it says about it."""
    replaced: str = ""
    """What differs from the paper, why, and how to supply it."""
    remarks: str = ""
    """What the measured numbers show."""
    finding: str = ""
    """The same in a sentence or two, for the overview."""
    kind: Literal["runs", "count", "partition", "spiral"] = "runs"
    round_seconds: float = 0.05
    """Estimated seconds per round on an H200, if there is no measured time."""
    sweep: dict[str, Any] = {}
    columns: list[PaperColumn] = []
    reported: dict[str, list[str]] = {}
    """What the paper reports: for each row, one text per column ("97.13 ± 0.30"; empty if it has none)."""
    claims: list[Claim] = []
    figure: PaperFigure | None = None
    quick: Quick = Quick()
    stand_in: StandIn | None = None

    @property
    def paper(self) -> str:
        return self.name.partition("/")[0]

    @property
    def experiments(self) -> list[str]:
        named = self.sweep.get("experiment", [])
        return [named] if isinstance(named, str) else list(named)

    @property
    def rows(self) -> list[str]:
        """Names of the rows, in the order of the sweep's methods."""
        return list(self.sweep.get("methods", {})) or list(self.reported)

    def column(self, name: str) -> PaperColumn:
        return next(column for column in self.columns if column.name == name)

    def paper_number(self, row: str, column: str) -> Number | None:
        """What the paper reports in this place."""
        numbers = self.reported.get(row)
        if not numbers:
            return None
        return parse(numbers[[c.name for c in self.columns].index(column)])

    @model_validator(mode="after")
    def _whole(self) -> "PaperEntry":
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError("two columns have one name")
        for row, numbers in self.reported.items():
            if len(numbers) != len(names):
                raise ValueError(f"reported.{row} has {len(numbers)} numbers for {len(names)} columns")
            for text in numbers:
                parse(text)
        for claim in self.claims:
            rows, columns = [claim.is_, *claim.above], [*claim.in_, *([claim.than] if claim.than else [])]
            if unknown := [row for row in rows if row not in self.rows]:
                raise ValueError(f"a claim names the row {unknown[0]!r}")
            if unknown := [column for column in columns if column not in names]:
                raise ValueError(f"a claim names the column {unknown[0]!r}")
        return self


def parse(text: str) -> Number | None:
    """ "97.13 ± 0.30" or "5120"; None if there is no number."""
    if not text:
        return None
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?", text)):
        raise ValueError(f"{text!r} is not a number: write 97.13 ± 0.30, 5120 or nothing")
    return Number(float(found[1]), float(found[2]) if found[2] else None)


def entry_names() -> list[str]:
    """Every entry, paper by paper, tables before figures."""
    found = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml")]
    return sorted(
        found, key=lambda name: (list(PAPERS).index(name.partition("/")[0]), "/table" not in name, _natural(name))
    )


def _natural(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def load_entry(name: str) -> PaperEntry:
    path = FOLDER / f"{name}.toml"
    if name not in entry_names():
        raise UserError(f"there is nothing to reproduce called {name!r}. {did_you_mean(name, entry_names())}")
    try:
        return PaperEntry(name=name, **tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise UserError(f"{path} is not a valid entry: {error}.") from None
