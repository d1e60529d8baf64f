"""Guesses the class of a bug from the numbers alone: pure functions of tensors.

A wrong part of a tensor often still is something: the right one times a size of the mesh, another
rank's part, a sum before its reduction. `diagnose` says what it is where that is certain to
rounding, and nothing where it is not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch import Tensor

EXACT = 1e-9  # of the reference's largest entry: what counts as equal, in float64
MOST_COMPARED = 2**28  # numbers that a search for moved slices may compare

Where = tuple[slice, ...]


@dataclass(frozen=True)
class Evidence:
    """A part of a tensor that is not what it should be, and what is known around it.

    Args:
        found: the part.
        whole: what the reference has.
        where: the place of the part in the whole.
        sizes: in words and numbers, what a sum could be multiplied or divided by: {"tp": 2}.
        dims: what each dim counts, in the singular: ("sequence", "token", "entry").
        head_size: entries of a head, where the last dim is one of heads.
        peers: by mesh axis: the parts of all ranks along it, and their places.
        source: the whole of what the module was given, where that has the same shape.
        bias: the whole bias of the module.
        previous: the whole of the same tensor at the step before.
    """

    found: Tensor
    whole: Tensor
    where: Where
    sizes: Mapping[str, float] = field(default_factory=dict)
    dims: Sequence[str] = ()
    head_size: int | None = None
    peers: Mapping[str, Sequence[tuple[Where, Tensor]]] = field(default_factory=dict)
    source: Tensor | None = None
    bias: Tensor | None = None
    previous: Tensor | None = None

    @property
    def expected(self) -> Tensor:
        return self.whole[self.where]

    @property
    def margin(self) -> float:
        """How far apart numbers may be that count as equal."""
        return EXACT * self.whole.abs().amax().item() if self.whole.numel() else 0.0

    def same(self, a: Tensor, b: Tensor) -> bool:
        return bool(((a - b).abs() <= self.margin).all())


def diagnose(evidence: Evidence) -> str:
    """What the part is instead of the right one, in words; empty where nothing fits."""
    found = evidence.found.double()
    if found.shape != evidence.expected.shape or found.numel() == 0:
        return ""
    if not found.isfinite().all():
        bad = found.numel() - int(found.isfinite().sum())
        return f"{bad} of {found.numel()} entries are not finite"
    evidence = replace(evidence, found=found, whole=evidence.whole.double())
    if evidence.same(found, evidence.expected):
        return ""
    guesses = (rule(evidence) for rule in RULES)
    return next((guess for guess in guesses if guess), "")


def missing(evidence: Evidence) -> str:
    """All zero."""
    return "it is missing: all zero" if not evidence.found.any() else ""


def multiple(evidence: Evidence) -> str:
    """The right one times a number."""
    ratio = multiple_of(evidence.found, evidence.expected)
    if ratio is None:
        return ""
    names = name_ratio(ratio, evidence.sizes)
    if ratio == -1.0 or abs(ratio + 1.0) < EXACT:
        return "the sign is turned"
    if names:
        return f"{ratio:.6g} times what is right, throughout: {names}"
    if evidence.found.numel() < 2:
        return ""
    digits = 6 if abs(ratio - 1.0) > 1e-4 else 15
    return f"{ratio:.{digits}g} times what is right, throughout"


def multiple_of(a: Tensor, b: Tensor) -> float | None:
    """r where a = r b for every element; None where there is none, or a or b is zero."""
    a, b = a.flatten(), b.flatten()
    squares = b @ b
    if squares == 0:
        return None
    ratio = (a @ b / squares).item()
    # A number that many elements agree on is no chance, one of a single element is.
    margin = EXACT * a.abs().amax()
    fits = bool(((a - ratio * b).abs() <= margin).all())
    return ratio if fits and abs(ratio) > EXACT else None


def name_ratio(ratio: float, sizes: Mapping[str, float]) -> str:
    """Which sizes, products of two or roots, the number could be: "tp or 1/dp"; empty for none."""
    factors = [(name, size) for name, size in sizes.items() if size not in (0, 1)]
    factors += [(f"1/{name}", 1 / size) for name, size in factors]
    roots = [(f"the root of {name}", math.sqrt(size)) for name, size in factors]
    products = [(f"{a} x {b}", x * y) for (a, x), (b, y) in combinations(factors, 2)]
    for kind in (factors, products, roots):
        names = [name for name, size in kind if math.isclose(size, ratio, rel_tol=EXACT)]
        if names:
            return " or ".join(names[:4])
    return ""


def partial_sum(evidence: Evidence) -> str:
    """What the ranks along an axis hold adds up to the right one."""
    for axis, peers in evidence.peers.items():
        parts = [part.double() for where, part in peers if where == evidence.where]
        if len(parts) > 1 and evidence.same(torch.stack(parts).sum(dim=0), evidence.expected):
            return (
                f"the ranks along {axis} hold parts of a sum: added up they are what is right, so "
                f"the reduction over {axis} is missing"
            )
    return ""


def moved(evidence: Evidence) -> str:
    """Made of the right slices, of another place."""
    kinds = [(dim, 1, evidence.dims[dim]) for dim in range(len(evidence.dims))]
    if evidence.head_size and kinds:
        kinds.insert(-1, (len(kinds) - 1, evidence.head_size, "head"))
    for dim, block, kind in kinds:
        guess = moved_along(evidence, dim, block, kind)
        if guess:
            return guess
    return ""


def moved_along(evidence: Evidence, dim: int, block: int, kind: str) -> str:
    """The same, for slices of `block` entries of one dim."""
    matches = matching_blocks(evidence, dim, block)
    if matches is None:
        return ""
    count, total = matches.shape
    first = (evidence.where[dim].start or 0) // block
    own = torch.arange(first, first + count)
    if bool(matches[torch.arange(count), own].all()):
        return ""
    shift = constant_shift(matches, own)
    if shift is not None:
        return describe_shift(shift, own, total, kind)
    if bool((matches.sum(dim=1) == 1).all()):
        order = matches.double().argmax(dim=1)
        text = f"{listed(order.tolist())} for {listed(own.tolist())}"
        if dim == len(evidence.dims) - 1 and is_exchange(order - first, evidence.head_size):
            return f"heads and the entries of a head are exchanged: entries {text}"
        return f"the {plural(kind)} are in another order: {text}"
    return ""


def is_exchange(order: Tensor, head_size: int | None) -> bool:
    """Whether entries that should go by head, then place in the head, go the other way round."""
    if not head_size or len(order) % head_size:
        return False
    wanted = torch.arange(len(order)).reshape(-1, head_size)
    return bool((order == wanted.T.flatten()).all())


def matching_blocks(evidence: Evidence, dim: int, block: int) -> Tensor | None:
    """(i, j): whether slice i of the part is slice j of the whole; None where it is not to tell."""
    span = [*evidence.where]
    span[dim] = slice(None)
    start = evidence.where[dim].start or 0
    sizes = (evidence.found.shape[dim], evidence.whole.shape[dim], start)
    if any(size % block for size in sizes):
        return None
    parts, wholes = (
        x.movedim(dim, 0).reshape(x.shape[dim] // block, -1)
        for x in (evidence.found, evidence.whole[tuple(span)])
    )
    if len(parts) * wholes.numel() > MOST_COMPARED or len(wholes) < 2:
        return None
    distances = torch.cdist(parts, wholes, p=math.inf)
    return (distances <= evidence.margin) & wholes.any(dim=1)


def constant_shift(matches: Tensor, own: Tensor) -> int | None:
    """k where slice i is the one that belongs at i + k, for all i for which there is one.

    Where most of them are right as well, the slices are equal and say nothing.
    """
    count, total = matches.shape
    for shift in sorted(range(-int(own[-1]), total - int(own[0])), key=abs):
        inside = (own + shift >= 0) & (own + shift < total)
        rows = inside.nonzero()[:, 0]
        enough = len(rows) == count or (len(rows) >= 2 and 2 * len(rows) >= count)
        if shift and enough and bool(matches[rows, own[rows] + shift].all()):
            return None if 2 * int(matches[rows, own[rows]].sum()) > len(rows) else shift
    return None


def describe_shift(shift: int, own: Tensor, total: int, kind: str) -> str:
    first, last = int(own[0]), int(own[-1])
    if first + shift >= 0 and last + shift < total:
        there, here = (span(first + k, last + k, kind) for k in (shift, 0))
        return f"it is what belongs to {there}, where {here} should be"
    count = abs(shift)
    way = "early" if shift > 0 else "late"
    return f"shifted: everything is {count} {plural(kind) if count > 1 else kind} too {way}"


def span(first: int, last: int, kind: str) -> str:
    return f"{kind} {first}" if first == last else f"{plural(kind)} {first} to {last}"


def plural(kind: str) -> str:
    return "entries" if kind == "entry" else f"{kind}s"


def named(kind: str, numbers: Sequence[int]) -> str:
    return f"{kind if len(numbers) == 1 else plural(kind)} {listed(numbers)}"


def listed(numbers: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, numbers[:most])) + ", ..." * (len(numbers) > most)


def other_mask(evidence: Evidence) -> str:
    """What is kept in both is right, but other elements are dropped."""
    kept, right = evidence.found != 0, evidence.expected != 0
    both = kept & right
    if bool((kept == right).all()) or bool(kept.all()) or bool(right.all()) or not both.any():
        return ""
    if not evidence.same(evidence.found[both], evidence.expected[both]):
        return ""
    masks = replace(
        evidence, found=kept.double(), whole=(evidence.whole != 0).double(), head_size=None
    )
    if evidence.same(evidence.found, evidence.expected.where(kept, 0.0)):
        return ""  # nothing is kept that should not be: elements are missing
    place = moved(masks)
    return "another dropout mask" + (f": {place}" if place.startswith("it is") else "")


def added_vector(evidence: Evidence) -> str:
    """One vector is added to every token."""
    if evidence.found.ndim < 2 or evidence.found[..., 0].numel() < 2:
        return ""
    apart = (evidence.found - evidence.expected).flatten(0, -2)
    if not evidence.same(apart, apart[:1].expand_as(apart)):
        return ""
    bias = evidence.bias
    if bias is not None:
        times = multiple_of(apart[0], bias.double()[evidence.where[-1]])
        if times is not None and abs(times - round(times)) < 1e-6:
            return "the bias is missing" if round(times) == -1 else bias_counts(round(times) + 1)
    return "the same vector is added to every token: a bias too often, or not at all"


def bias_counts(times: int) -> str:
    return f"the bias counts {times} times"


def zero_slice(evidence: Evidence) -> str:
    """Zero for some slices of a dim, right for the others."""
    for dim, kind in enumerate(evidence.dims):
        others = [d for d in range(evidence.found.ndim) if d != dim]
        wrong = ((evidence.found - evidence.expected).abs() > evidence.margin).any(others)
        zero = (evidence.found == 0).all(others) if others else evidence.found == 0
        if bool((zero | ~wrong).all()) and not bool(wrong.all()):
            start = evidence.where[dim].start or 0
            names = named(kind, (wrong.nonzero()[:, 0] + start).tolist())
            return f"missing: zero for {names}, and right elsewhere"
    return ""


def confined(evidence: Evidence) -> str:
    """Wrong for some slices of a dim, and right for at least half of them."""
    wrong = (evidence.found - evidence.expected).abs() > evidence.margin
    for dim, kind in reversed(list(enumerate(evidence.dims))):
        others = [d for d in range(wrong.ndim) if d != dim]
        slices = (wrong.any(others) if others else wrong).nonzero()[:, 0]
        if 2 * len(slices) <= wrong.shape[dim]:
            start = evidence.where[dim].start or 0
            return f"right but for {named(kind, (slices + start).tolist())}"
    return ""


def left_over(evidence: Evidence) -> str:
    """A multiple of the step before is added."""
    if evidence.previous is None or evidence.found.numel() < 2:
        return ""
    apart = evidence.found - evidence.expected
    if multiple_of(apart, evidence.previous.double()[evidence.where]) is None:
        return ""
    return "what the step before had is still in it"


def addition(evidence: Evidence) -> str:
    """The module adds something to what it is given: the same rules for what it adds."""
    source = evidence.source
    if source is None or source.shape != evidence.whole.shape:
        return ""
    source = source.double()
    added = replace(
        evidence,
        found=evidence.found - source[evidence.where],
        whole=evidence.whole - source,
        source=None,
        peers={},
    )
    guess = next((guess for rule in (missing, multiple, moved) if (guess := rule(added))), "")
    return f"of what it adds: {guess}" if guess else ""


RULES = (
    missing,
    multiple,
    partial_sum,
    moved,
    zero_slice,
    other_mask,
    added_vector,
    left_over,
    addition,
    confined,
)


def diagnose_norm(
    found: float, expected: float, squares: Mapping[str, float], sizes: Mapping[str, float]
) -> str:
    """What a gradient norm counts too often, or leaves out; `squares` are those of its parts."""
    if not math.isfinite(found) or expected == 0:
        return ""
    names = name_ratio((found / expected) ** 2, sizes)
    if names:
        return f"the sum of squares is {(found / expected) ** 2:.6g} times what is right: {names}"
    extra = found**2 - expected**2
    for name, square in squares.items():
        for times in (1, -1):
            if math.isclose(extra, times * square, rel_tol=1e-6) and square > 0:
                return f"{name} {'counts twice' if times == 1 else 'is left out'}"
    return ""
