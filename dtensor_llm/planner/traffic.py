"""The unit of communication: so many equal operations over a mesh axis, and their bytes.

Payload is the whole tensor on the axis: what each rank brings to an all-reduce or a reduce-scatter,
or has after an all-gather. Wire is what one rank sends of it, by the ring algorithms (Patarin and
Yuan, J. Parallel Distrib. Comput. 69, 2009): a reduce-scatter sends all but one of P parts, an
all-gather too, and an all-reduce is the one after the other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

# Axes that one group often spans together, outermost first, and what they are called then.
JOINT_AXES = {("dp_replicate", "dp_shard"): "dp"}
ALL_AXES = "all"


@dataclass(frozen=True, order=True)
class Traffic:
    """What a rank communicates in `count` operations of one kind over one axis.

    Args:
        operation: all-reduce, all-gather, reduce-scatter, all-to-all, send, recv, ...
        axis: the mesh axis, see `axis_name`.
        count: number of operations.
        payload: bytes of the whole tensors, together.
        wire: bytes this rank sends, together. A fraction where a ring's parts are uneven: what its
            ranks send on average.
    """

    operation: str
    axis: str
    count: int
    payload: int
    wire: Fraction

    def times(self, count: int) -> "Traffic":
        """The same again, `count` times in all."""
        return Traffic(
            self.operation, self.axis, self.count * count, self.payload * count, self.wire * count
        )


def traffic(operation: str, axis: str, num_ranks: int, payload: int) -> Traffic:
    """One operation on `payload` bytes over an axis of `num_ranks`."""
    return Traffic(operation, axis, 1, payload, wire_share(operation, num_ranks) * payload)


def wire_share(operation: str, num_ranks: int) -> Fraction:
    """Bytes that a rank sends over those of the payload."""
    others = Fraction(num_ranks - 1, num_ranks)
    shares = {
        "all-reduce": 2 * others,
        "all-gather": others,
        "reduce-scatter": others,
        "all-to-all": others,
        "recv": Fraction(0),
        "barrier": Fraction(0),
    }
    return shares.get(operation, Fraction(1))  # broadcast, reduce, gather, scatter, send


def axis_name(spanned: Iterable[str], sizes: Mapping[str, int]) -> str:
    """What a group that spans these axes is called.

    One axis by its name, both data-parallel ones `dp`, all of several axes `all`, others joined by
    `+`. Axes of one rank do not count.

    Args:
        spanned: names of axes.
        sizes: the mesh: {axis: ranks}, outermost first.
    """
    used = [axis for axis, size in sizes.items() if size > 1]
    names = tuple(axis for axis in used if axis in set(spanned))
    if len(names) == 1:
        return names[0]
    if names in JOINT_AXES:
        return JOINT_AXES[names]
    return ALL_AXES if names == tuple(used) else "+".join(names)


def merged(parts: Iterable[Traffic]) -> list[Traffic]:
    """One entry for each operation and axis, sorted."""
    sums: dict[tuple[str, str], Traffic] = {}
    for part in parts:
        key = (part.operation, part.axis)
        known = sums.get(key, Traffic(*key, 0, 0, Fraction(0)))
        sums[key] = Traffic(
            *key, known.count + part.count, known.payload + part.payload, known.wire + part.wire
        )
    return sorted(sums.values())
