"""What a mutation changes in one expression: a rule for each kind of syntax node."""

import ast
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
NAMES = {
    "all": "any",
    "any": "all",
    "min": "max",
    "max": "min",
    "ceil": "floor",
    "amax": "amin",
    "add_": "sub_",
    "mul_": "div_",
    "div_": "mul_",
    "bitwise_and_": "bitwise_or_",
    "bitwise_xor_": "bitwise_or_",
    "is_partial": "is_replicate",
    "is_replicate": "is_partial",
    "is_shard": "is_replicate",
}
ATTRIBUTES = {"MAX": "SUM", "SUM": "MAX", "isend": "irecv"}
STRINGS = {
    "tp": "dp_shard",
    "pp": "tp",
    "dp": "tp",
    "dp_shard": "dp_replicate",
    "dp_replicate": "dp_shard",
    "sum": "mean",
}
PLACEMENTS = {"Replicate": ("Partial()", "Shard(0)"), "Partial": ("Replicate()",)}
DROPPED = {"clone", "contiguous", "detach", "float", "double", "sqrt", "square", "log", "clamp"}
DROPPED |= {"flatten", "exp_", "reversed"}
NUMBERS = {"0": ("1",), "1": ("0", "2"), "0.0": ("1.0",), "1.0": ("0.0",)}


class Edit(NamedTuple):
    """Bytes [start, end) of a file are replaced; `label` says how in a word."""

    start: int
    end: int
    replacement: str
    label: str


class Text:
    """A source file's bytes, addressed by the positions of ast."""

    def __init__(self, source: str) -> None:
        self.bytes = source.encode()
        self.starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined] # only placed nodes

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined] # as above

    def of(self, node: ast.AST) -> str:
        return self.bytes[self.start(node) : self.end(node)].decode()

    def replace(self, node: ast.AST, replacement: str, label: str) -> Edit:
        return Edit(self.start(node), self.end(node), replacement, label)

    def operator(self, left: ast.AST, right: ast.AST, operator: ast.AST) -> Iterator[Edit]:
        """Swap the operator that stands between two operands."""
        old, new = OPERATORS.get(type(operator), ("", ""))
        if old:
            between = self.bytes[self.end(left) : self.start(right)]
            between = re.sub(rb"#.*", lambda comment: b" " * len(comment[0]), between)
            start = self.end(left) + between.index(old.encode())
            yield Edit(start, start + len(old), new, f"{old}>{new}".replace(" ", "-"))


def is_list(node: ast.AST) -> bool:
    """Whether it builds a list or a text, which arithmetic refuses."""
    if isinstance(node, ast.BinOp):
        return is_list(node.left) or is_list(node.right)
    return isinstance(node, ast.List | ast.Tuple | ast.ListComp | ast.JoinedStr)


def binary(node: ast.BinOp, text: Text) -> Iterator[Edit]:
    if not is_list(node):
        yield from text.operator(node.left, node.right, node.op)


def boolean(node: ast.BoolOp, text: Text) -> Iterator[Edit]:
    for left, right in zip(node.values, node.values[1:], strict=False):
        yield from text.operator(left, right, node.op)


def comparison(node: ast.Compare, text: Text) -> Iterator[Edit]:
    """Another operator; and the two sides exchanged where they have an order."""
    operands = [node.left, *node.comparators]
    for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
        yield from text.operator(left, right, operator)
    if len(node.ops) == 1 and isinstance(node.ops[0], ORDERS):
        sides = [f"({text.of(x)})" if has_operator(x) else text.of(x) for x in operands]
        swapped = f"{sides[1]} {OPERATORS[type(node.ops[0])][0]} {sides[0]}"
        yield text.replace(node, swapped, "swap-sides")


def has_operator(node: ast.AST) -> bool:
    return not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)


def unary(node: ast.UnaryOp, text: Text) -> Iterator[Edit]:
    """`not x` and `-x` become x; -1, mostly a dim, becomes another dim."""
    if text.of(node) == "-1":
        for dim in ("0", "-2"):
            yield text.replace(node, dim, f"-1>{dim}")
    elif isinstance(node.op, ast.Not | ast.USub):
        sign = "not " if isinstance(node.op, ast.Not) else "-"
        yield Edit(text.start(node), text.start(node) + len(sign), "", f"drop-{sign.strip()}")


def constant(node: ast.Constant, text: Text) -> Iterator[Edit]:
    """0 and 1 each other, any other integer one more, any other float its half, an axis another."""
    value = node.value
    news: tuple[str, ...] = ()
    if isinstance(value, bool):
        news = (str(not value),)
    elif isinstance(value, int | float):
        other = value + 1 if isinstance(value, int) else value / 2
        news = NUMBERS.get(repr(value), (repr(other),))
    elif isinstance(value, str) and value in STRINGS:
        news = (f'"{STRINGS[value]}"',)
    for new in news:
        yield text.replace(node, new, f"{value!s}>{new}".replace('"', ""))


def attribute(node: ast.Attribute, text: Text) -> Iterator[Edit]:
    if node.attr in ATTRIBUTES:
        end = text.end(node)
        new = ATTRIBUTES[node.attr]
        yield Edit(end - len(node.attr), end, new, f"{node.attr}>{new}")


def call(node: ast.Call, text: Text) -> Iterator[Edit]:
    """Another placement, another function, a method or a bound left out."""
    name, end = called(node), text.end(node.func)
    if name in PLACEMENTS and isinstance(node.func, ast.Name):
        for placement in PLACEMENTS[name]:
            yield text.replace(node, placement, f"{name}>{placement.split('(')[0]}")
    elif name == "Shard":
        yield text.replace(node, "Replicate()", "Shard>Replicate")
    elif name in NAMES:
        yield Edit(end - len(name), end, NAMES[name], f"{name}>{NAMES[name]}")
    if name in DROPPED and isinstance(node.func, ast.Attribute):
        dot = text.bytes.rindex(b".", 0, end)
        yield Edit(dot, text.end(node), "", f"drop-{name}")
    elif name in DROPPED and len(node.args) == 1:
        yield text.replace(node, text.of(node.args[0]), f"drop-{name}")
    if name in ("range", "slice"):
        for bound in node.args:
            yield from off_by_one(bound, text)


def called(node: ast.AST) -> str:
    """The last part of the name of what is called."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def off_by_one(bound: ast.AST, text: Text) -> Iterator[Edit]:
    """A bound that is no number: the numbers are changed by `constant`."""
    if not isinstance(bound, ast.Constant):
        for change in (" + 1", " - 1"):
            yield Edit(text.end(bound), text.end(bound), change, "bound" + change.replace(" ", ""))


def bounds(node: ast.Slice, text: Text) -> Iterator[Edit]:
    """Bounds of a slice one off; a bound that is missing leaves out one element."""
    for bound in (node.lower, node.upper):
        if bound is not None:
            yield from off_by_one(bound, text)
    if node.lower is None and node.upper is not None:
        yield Edit(text.start(node), text.start(node), "1", "bound-first")
    if node.upper is None and node.lower is not None:
        yield Edit(text.end(node), text.end(node), "-1", "bound-last")


def negation(condition: ast.expr, text: Text) -> Iterator[Edit]:
    """`not (condition)`, but where another rule makes the same."""
    same = isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not)
    if isinstance(condition, ast.Compare):
        same = len(condition.ops) == 1 and not isinstance(condition.ops[0], ORDERS)
    if not same:
        yield text.replace(condition, f"not ({text.of(condition)})", "negate")


def branch(node: ast.If | ast.IfExp | ast.While, text: Text) -> Iterator[Edit]:
    return negation(node.test, text)


def filters(node: ast.comprehension, text: Text) -> Iterator[Edit]:
    for condition in node.ifs:
        yield from negation(condition, text)


def context(node: ast.With, text: Text) -> Iterator[Edit]:
    """The body without what it stands under."""
    if all(item.optional_vars is None for item in node.items):
        end = text.end(node.items[-1].context_expr)
        yield Edit(text.start(node), end, "if True", "drop-with")


def augmented(node: ast.AugAssign, text: Text) -> Iterator[Edit]:
    if not is_list(node.value):
        yield from text.operator(node.target, node.value, node.op)


RULES: dict[type[ast.AST], Callable[..., Iterator[Edit]]] = {
    ast.BinOp: binary,
    ast.BoolOp: boolean,
    ast.Compare: comparison,
    ast.UnaryOp: unary,
    ast.Constant: constant,
    ast.Attribute: attribute,
    ast.Call: call,
    ast.Slice: bounds,
    ast.If: branch,
    ast.IfExp: branch,
    ast.While: branch,
    ast.comprehension: filters,
    ast.With: context,
    ast.AugAssign: augmented,
}
