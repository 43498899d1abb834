"""Small errors in a source file: operators, numbers, choices, conditions, calls and what is left out, one at a time."""

import ast
import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.Pow: ("**", "*"),
    ast.Mod: ("%", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "&"),
    ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
NAMES = {
    "sum": "mean", "mean": "sum", "any": "all", "all": "any", "min": "max", "max": "min", "amin": "amax",
    "maximum": "minimum", "params": "buffers", "value": "total",
}  # fmt: skip
DROPPED = {"clamp", "detach", "masked_fill", "abs"}  # x.clamp(...) becomes x
UNWRAPPED = {"normalize", "relu", "softmax", "per_client"}  # F.relu(x) becomes x
KEPT = {"device", "dtype", "strict"}  # keywords that no test on a CPU could miss
ABSTRACT = {"init_server", "loss", "upload", "aggregate", "slots", "cluster"}  # others become what is inherited
WORDS = ("paper", "losses", "not_followed")  # what a class says about itself


class Edit(NamedTuple):
    """Some bytes of a source, and what replaces them."""

    start: int
    end: int
    text: str


class Mutant(NamedTuple):
    """A file with one error: which line became what."""

    file: str
    number: int
    line: str
    mutant: str
    source: bytes

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is known by, wherever in the file it is."""
        return self.file, self.line, self.mutant


def mutants(file: str, source: bytes, others: dict[str, list[str]]) -> Iterator[Mutant]:
    """Every mutant of a source; `others` has the replacements of strings that are choices."""
    tree = ast.parse(source)
    seen = {ast.dump(tree)}
    for start, end, text in edits(tree, source, others):
        made = source[:start] + text.encode() + source[end:]
        with contextlib.suppress(SyntaxError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dump = ast.dump(ast.parse(made))
            if dump not in seen:
                seen.add(dump)
                old, new = (version.decode().splitlines() for version in (source, made))
                number = next(n for n, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
                yield Mutant(file, number + 1, old[number].strip(), new[number].strip(), made)


def choices(sources: Sequence[bytes]) -> dict[str, list[str]]:
    """Every string that a Literal allows, with the next one of every such Literal; and the two parts of a model."""
    found = {"head.": ["body."], "body.": ["head."], "params": ["buffers"], "buffers": ["params"]}
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if _is_literal(node):
            values = [c.value for c in ast.walk(node.slice) if isinstance(c, ast.Constant)]
            for value, other in zip(values, values[1:] + values[:1], strict=True):
                found[value] = [*dict.fromkeys([*found.get(value, []), other])]
    return found


def edits(tree: ast.AST, source: bytes, others: dict[str, list[str]]) -> Iterator[Edit]:
    """Every error that is made in a source."""
    made = _Edits(source, others)
    for node, parent in _walk(tree):
        yield from made.of_operators(node, parent)
        yield from made.of_expressions(node, parent)
        yield from made.of_statements(node, parent)


class _Edits:
    """The errors that are made in single nodes of a source."""

    def __init__(self, source: bytes, others: dict[str, list[str]]) -> None:
        self.source, self.others = source, others
        self.lines = source.splitlines(keepends=True)
        fields = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AnnAssign))
        self.defaults = {
            field.target.id: repr(field.value.value)
            for field in fields
            if isinstance(field.target, ast.Name) and isinstance(field.value, ast.Constant)
        }

    def of_operators(self, node: ast.AST, parent: ast.AST | None) -> Iterator[Edit]:
        match node:
            case ast.BinOp():
                yield from self.operator(node.left, node.right, node.op)
                if isinstance(parent, ast.Return) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
                    yield Edit(self.last(node.left), self.last(node), "")
            case ast.Compare():
                for left, kind, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                    yield from self.operator(left, right, kind)
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from self.operator(left, right, node.op)
            case ast.UnaryOp():
                yield Edit(self.first(node), self.first(node.operand), "")

    def of_expressions(self, node: ast.AST, parent: ast.AST | None) -> Iterator[Edit]:
        match node:
            case ast.If() | ast.IfExp() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
                yield self.whole(
                    node.test, f"not ({self.source[self.first(node.test) : self.last(node.test)].decode()})"
                )
            case ast.Attribute(value=ast.Name(id="self")) if node.attr in self.defaults:
                yield self.whole(node, self.defaults[node.attr])  # a field that is not looked at
            case ast.Attribute() if node.attr in NAMES:
                yield Edit(self.last(node) - len(node.attr), self.last(node), NAMES[node.attr])
            case ast.Name() if node.id in NAMES and isinstance(parent, ast.Call):
                yield self.whole(node, NAMES[node.id])
            case ast.Call():
                yield from self.call(node)
            case ast.Dict() if len(node.values) > 1 and all(node.keys):
                left, right = node.values[:2]
                yield Edit(
                    self.first(left),
                    self.last(right),
                    self.text(right) + self.source[self.last(left) : self.first(right)].decode() + self.text(left),
                )
            case ast.Tuple() if len(node.elts) > 1 and all(map(_is_text, node.elts)):
                for gone in node.elts:
                    yield self.whole(
                        node, f"({', '.join(self.text(element) for element in node.elts if element is not gone)},)"
                    )
            case ast.Constant() if not (isinstance(parent, ast.keyword) and parent.arg in KEPT):
                yield from self.constant(node, isinstance(parent, ast.Compare))

    def of_statements(self, node: ast.AST, parent: ast.AST | None) -> Iterator[Edit]:
        match node:
            case ast.FunctionDef() if isinstance(parent, ast.ClassDef) and node.name not in ABSTRACT:
                at = self.source.find(b"def ", self.first(node)) + len("def ")
                yield Edit(at, at + len(node.name), node.name + "_")
            case ast.AugAssign():
                yield self.whole(node, "pass")
            case ast.Assign() if {n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)} & {
                n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)
            }:
                yield self.whole(node, "pass")

    def first(self, node: ast.stmt | ast.expr | ast.keyword) -> int:
        return sum(map(len, self.lines[: node.lineno - 1])) + node.col_offset

    def last(self, node: ast.stmt | ast.expr | ast.keyword) -> int:
        return sum(map(len, self.lines[: node.end_lineno - 1])) + node.end_col_offset  # type: ignore[operator]

    def whole(self, node: ast.stmt | ast.expr, text: str) -> Edit:
        return Edit(self.first(node), self.last(node), text)

    def operator(self, left: ast.expr, right: ast.expr, kind: ast.AST) -> Iterator[Edit]:
        old, new = OPERATORS.get(type(kind), ("", ""))
        at = self.source.find(old.encode(), self.last(left), self.first(right))
        if old and at >= 0:
            yield Edit(at, at + len(old), new)

    def call(self, node: ast.Call) -> Iterator[Edit]:
        if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED:
            yield Edit(self.last(node.func.value), self.last(node), "")
        if node.args and isinstance(node.func, ast.Attribute | ast.Name) and _name(node.func) in UNWRAPPED:
            yield self.whole(node, self.text(node.args[0]))
        given = [*node.args, *node.keywords]
        for before, word, after in zip([None, *given], given, [*given[1:], None], strict=False):
            if isinstance(word, ast.keyword) and word.arg and word.arg not in KEPT:
                end = self.last(word) if before or not after else self.first(after)
                yield Edit(self.last(before) if before else self.first(word), end, "")

    def constant(self, node: ast.Constant, compared: bool) -> Iterator[Edit]:
        value = node.value
        if isinstance(value, bool):
            yield self.whole(node, repr(not value))
        elif isinstance(value, int | float):
            yield self.whole(node, repr(value + 1))
            yield self.whole(node, repr(value * 2))
        elif isinstance(value, str) and (value in self.others or compared):
            for other in self.others.get(value, [value + "_"]):
                yield self.whole(node, json.dumps(other))

    def text(self, node: ast.expr) -> str:
        return self.source[self.first(node) : self.last(node)].decode()


def _walk(node: ast.AST, parent: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """All nodes but annotations, decorators and texts."""
    if isinstance(node, ast.Raise | ast.JoinedStr) or (isinstance(node, ast.Expr) and _is_text(node.value)):
        return
    if _is_literal(node):
        return
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in WORDS:
        return
    yield node, parent
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child, node)


def _name(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"
