"""The rules by which accuracies are judged. Numbers of different rules are never ranked, marked or tested together."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

OWN = "\N{DAGGER}"  # behind a number that is judged by the rule of its method

Judged = Literal["", "own", "all", "head", "proto"]
"""How a number that is stored once was judged: not at all; by the rule of its method; by that rule, but among all
classes; by classifier or by nearest prototype, among the classes of that rule."""


class Rule(NamedTuple):
    """What classifies a sample, and the classes that it chooses from."""

    by: str  # "head", "proto"
    among: str  # "all", "own"

    def __str__(self) -> str:
        named = {"head": "classifier", "proto": "nearest prototype"}.get(self.by)
        return f"{named}, {self.among} classes" if named else "rule not recorded"

    def of(self, judged: Judged) -> "Rule":
        """The rule of a number of a method that is judged by this one."""
        if judged in ("head", "proto"):
            return self._replace(by=judged)
        return self._replace(among="all") if judged == "all" else self


RULES = tuple(Rule(by, among) for by in ("head", "proto") for among in ("all", "own"))
KEPT: dict[str, dict[Rule, str]] = {
    "accuracy_mean": dict(
        zip(
            RULES,
            ("accuracy_head_mean", "accuracy_head_own_mean", "accuracy_proto_all_mean", "accuracy_proto_own_mean"),
            strict=True,
        )
    ),
    "global_accuracy": {RULES[0]: "global_accuracy_head", RULES[2]: "global_accuracy_proto"},
}
"""Numbers that runs store for several rules, whatever the rule of the method."""


def rule_of(*told: Mapping[str, Any]) -> Rule:
    """The rule of a method, from a summary or from the settings of its run."""
    found = (next(filter(None, (some.get(key) for some in told)), "?") for key in ("inference", "candidates"))
    return Rule(*map(str, found))


def stored(numbers: Mapping[str, Any], key: str, judged: Judged, own: Rule, rule: Rule) -> Any:
    """A number by one rule, from a run whose method is judged by `own`; None if it was not measured."""
    found = numbers.get(KEPT.get(key, {}).get(rule, ""))
    if found is None and own.of(judged) == rule:
        found = numbers.get(key)
    if found is None and key == "accuracy_mean" and own.of("proto") == rule:  # older runs have no other
        found = numbers.get("accuracy_proto_mean")
    return found


def in_order(rules: set[Rule]) -> list[Rule]:
    """Classifiers before prototypes, all classes before own classes, and unknown rules last."""
    return [*(rule for rule in RULES if rule in rules), *sorted(rules - set(RULES))]
