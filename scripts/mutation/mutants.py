"""All the small changes of a source file that a test suite should notice: one place each.

`mutants_of` parses a file and gives every mutant that one of the rules below makes. A mutant is a
splice in the text, so that its diff is the line that changed and nothing else. What is not mutated,
and why:

- docstrings, annotations, imports, `__all__`, decorators: they compute nothing
- messages (f-strings, what is raised, what an assert says) and the conditions of asserts, which
  would fail at once; the `raise` and the `assert` themselves are deleted, but for those that tell
  the type checker what the next line takes for granted
- `strict=` of zip, a guard against our own mistakes: it shows in no result
- the first binding of a name, `self.x = ...` in `__init__`, the `return` at the end of a function:
  deleting them is a NameError, an AttributeError or a None for every caller, an easy kill that says
  nothing
- what only a GPU can tell: `only_for_gpus`, and `non_blocking=` of copies
"""

import ast
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from hashlib import blake2s

from mutation.rules import RULES, Edit, Text, called, negation

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
NO_CODE = (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert, ast.JoinedStr, ast.Global)


@dataclass(frozen=True)
class Mutant:
    """One changed place of one file.

    Attributes:
        id: file, function, kind and a hash of the statement: the same wherever the statement moves.
        file: as it was given to `mutants_of`.
        line: of the change, from 1.
        source: the whole mutated text.
        diff: the lines that differ, `-` and `+`.
    """

    id: str
    file: str
    line: int
    source: str
    diff: str


def deletion(node: ast.stmt, function: FunctionNode, text: Text) -> Iterator[Edit]:
    """`pass` in place of a statement of `function`, where that is not an error for every caller."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        deletable = node.value is not None and not binds_first(node, function)
    elif isinstance(node, ast.If | ast.For | ast.While):
        is_elif = text.of(node).startswith("elif")
        deletable = len(node.body) > 1 and not node.orelse and not is_elif
    elif isinstance(node, ast.Return):
        deletable = node is not function.body[-1]
    elif isinstance(node, ast.Assert):
        deletable = not narrows(node.test)
    else:
        kinds = (ast.Expr, ast.AugAssign, ast.Raise, ast.Break, ast.Continue)
        deletable = isinstance(node, kinds)
    if deletable:
        yield text.replace(node, "pass", "delete")


def narrows(test: ast.expr) -> bool:
    """Whether a condition says no more than of which types things are."""
    if isinstance(test, ast.BoolOp):
        return all(map(narrows, test.values))
    is_not = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)
    return is_not or called(test) == "isinstance"


def binds_first(node: ast.Assign | ast.AnnAssign, function: FunctionNode) -> bool:
    """Whether one of the targets has no value yet: a name, or an attribute in `__init__`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    leaves = [x for t in targets for x in (t.elts if isinstance(t, ast.Tuple) else [t])]
    known = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
    for name in ast.walk(function):
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
            known |= {name.id} if name.lineno < node.lineno else set()
    return any(
        leaf.id not in known if isinstance(leaf, ast.Name) else function.name == "__init__"
        for leaf in leaves
    )


def result(node: ast.Return, function: FunctionNode, text: Text) -> Iterator[Edit]:
    """The returned number with the other sign, the returned truth value inverted."""
    kind = function.returns.id if isinstance(function.returns, ast.Name) else ""
    if node.value is not None and kind in ("Tensor", "float", "int"):
        yield text.replace(node.value, f"-({text.of(node.value)})", "return-minus")
    elif node.value is not None and kind == "bool":
        yield from negation(node.value, text)


def only_for_gpus(node: ast.AST, text: Text) -> bool:
    """Code that changes nothing on the CPU, where the tests run.

    A choice by the type of the device, and statements that only move tensors to the rank's device.
    """
    if isinstance(node, ast.If | ast.IfExp) and "device.type" in text.of(node.test):
        return True
    if not isinstance(node, ast.Assign):
        return False
    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    return all(called(x) == "to" and re.search(r"device\)$", text.of(x)) for x in values)


def is_documentation(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and (isinstance(node.value.value, str) or node.value.value is ...)
    )


def parts(node: ast.AST) -> list[ast.AST]:
    """The children that compute something."""
    if isinstance(node, NO_CODE) or is_documentation(node):
        return []
    if isinstance(node, FunctionNode | ast.Lambda):
        defaults = [x for x in [*node.args.defaults, *node.args.kw_defaults] if x is not None]
        return [*defaults, *(node.body if isinstance(node, FunctionNode) else [node.body])]
    if isinstance(node, ast.ClassDef):
        return [*node.body]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value is not None else []
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
        return []
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        return []  # the sign and the number are one
    if isinstance(node, ast.keyword) and node.arg in ("strict", "non_blocking"):
        return []
    if called(node) == "isinstance":
        return [node.args[0]]  # type: ignore[attr-defined] # a Call
    return list(ast.iter_child_nodes(node))


@dataclass(frozen=True)
class Place:
    """Where an edit stands: names of classes and functions, the innermost ones of both kinds."""

    names: tuple[str, ...] = ()
    function: FunctionNode | None = None
    statement: ast.stmt | None = None


def edits(node: ast.AST, text: Text, place: Place) -> Iterator[tuple[Edit, Place]]:
    if only_for_gpus(node, text):
        return
    function = place.function
    if isinstance(node, ast.stmt):
        place = Place(place.names, function, node)
        if function is not None and not is_documentation(node):
            yield from ((edit, place) for edit in deletion(node, function, text))
            if isinstance(node, ast.Return):
                yield from ((edit, place) for edit in result(node, function, text))
    rule = RULES.get(type(node))
    if rule is not None:
        yield from ((edit, place) for edit in rule(node, text))
    if isinstance(node, FunctionNode | ast.ClassDef):
        inner = node if isinstance(node, FunctionNode) else None
        place = Place((*place.names, node.name), inner, node)
    for part in parts(node):
        yield from edits(part, text, place)


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines; all of them compile, no two are equal."""
    text, found, seen = Text(source), [], set()
    repeats: Counter[str] = Counter()
    tree = ast.parse(source)
    starts = [text.start(statement) for statement in tree.body]
    for edit, place in edits(tree, text, Place()):
        mutated = text.bytes[: edit.start] + edit.replacement.encode() + text.bytes[edit.end :]
        if mutated in seen or mutated == text.bytes:
            continue
        seen.add(mutated)
        # The rest of the file is as it was.
        whole = bisect_right(starts, edit.start) - 1
        end = text.end(tree.body[whole]) - len(text.bytes)
        compile(mutated[starts[whole] : end or None], file, "exec")
        name = identity(edit, place, text, file)
        repeats[name] += 1
        name += f"#{repeats[name]}" if repeats[name] > 1 else ""
        line = text.bytes.count(b"\n", 0, edit.start) + 1
        after = mutated.decode()
        found.append(Mutant(name, file, line, after, line_diff(source, after)))
    return sorted(found, key=lambda mutant: mutant.line)


def identity(edit: Edit, place: Place, text: Text, file: str) -> str:
    """`loss.py:function:kind:hash`: of the statement before and after, wherever it stands."""
    assert place.statement is not None
    start = text.start(place.statement)
    body = getattr(place.statement, "body", None)
    end = text.end(place.statement)
    if body and edit.end <= text.start(body[0]):
        end = text.start(body[0])  # the head of a compound statement
    change = f"{edit.start - start}:{edit.end - start}:{edit.replacement}"
    whole = text.bytes[start:end] + b"\0" + change.encode()
    digest = blake2s(whole, digest_size=4).hexdigest()
    return f"{file}:{'.'.join(place.names) or 'module'}:{edit.label}:{digest}"


def line_diff(before: str, after: str) -> str:
    """Of the lines from the first to the last that differ: the search takes long in whole files."""
    a, b = before.splitlines(), after.splitlines()
    start = num_equal(a, b)
    end = num_equal(a[start:][::-1], b[start:][::-1])
    lines = unified_diff(a[start : len(a) - end], b[start : len(b) - end], n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def num_equal(a: Sequence[str], b: Sequence[str]) -> int:
    """How many lines the two have in common, from the first on."""
    differ = (index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))
