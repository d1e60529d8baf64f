"""What a comparison comes to: one row a quantity, as data and as a table."""

from dataclasses import dataclass

from tabulate import tabulate


def two_values(value: float | None, expected: float | None) -> str:
    """`0.25, where 0.5 is right`, with as many digits as tell them apart."""
    digits = next((n for n in (9, 12, 15) if f"{value:.{n}g}" != f"{expected:.{n}g}"), 17)
    return f"{value:.{digits}g}, where {expected:.{digits}g} is right"


@dataclass(frozen=True)
class Row:
    """The worst error of one quantity.

    Args:
        quantity: "loss", "gradient norm", "gradient", "weight", ...
        worst: name of the tensor that is worst; for a scalar, the step.
        error: relative; infinite where something is not finite.
        bound: the largest error that passes.
        step: that the error is of, counted from 0.
        index: of the worst element in the whole tensor; empty for scalars.
        value: what was found there.
        expected: what the reference has there.
    """

    quantity: str
    worst: str
    error: float
    bound: float
    step: int | None = None
    index: tuple[int, ...] = ()
    value: float | None = None
    expected: float | None = None

    @property
    def passed(self) -> bool:
        return self.error <= self.bound

    @property
    def place(self) -> str:
        """`blocks.0.mlp.up.weight [3, 17] after step 2`, or `step 2`."""
        if self.step is None or self.worst.startswith("step "):
            return self.worst
        index = f" [{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.worst}{index} of step {self.step + 1}"


@dataclass(frozen=True)
class Report:
    """All quantities, and what was different first.

    `first` is the earliest error beyond its bound, in the order in which a step makes its numbers:
    loss, gradients, their norm, then what the update changes.
    """

    rows: tuple[Row, ...]
    first: Row | None = None

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def largest(self) -> Row:
        """The row that is nearest to its bound, or furthest beyond it."""
        return max(self.rows, key=lambda row: row.error / row.bound if row.bound else row.error)

    def __str__(self) -> str:
        table = tabulate(
            [
                (
                    row.quantity,
                    row.worst,
                    ", ".join(map(str, row.index)),
                    f"{row.error:.2e}",
                    f"{row.bound:.2e}",
                    "ok" if row.passed else "FAIL",
                )
                for row in self.rows
            ],
            headers=("quantity", "worst", "at", "error", "bound", "verdict"),
            disable_numparse=True,
        )
        return f"{table}\n{self.verdict}"

    @property
    def verdict(self) -> str:
        """The last lines: the largest error, what failed, and where the runs part."""
        failed = [f"{row.quantity} of {row.worst}" for row in self.rows if not row.passed]
        said = f"DIFFERS from the reference: {', '.join(failed)}" if failed else "equal"
        lines = [f"largest error {self.largest.error:.2e} ({self.largest.quantity}): {said}"]
        if self.first is not None:
            lines.append(f"first difference: {self.first.quantity}, {self.first.place}")
            if self.first.value is not None:
                lines[-1] += f": {two_values(self.first.value, self.first.expected)}"
        return "\n".join(lines)
