"""The sizes of the mesh axes, as they are asked for: numbers, before there is any mesh."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class MeshSizes:
    """Requested size of each mesh axis, in ranks; `ep` reuses ranks of dp_shard x cp.

    `tp_row` and `tp_col` stand in the place of `tp`: tensor parallelism in two dimensions.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    tp_row: int = 1
    tp_col: int = 1

    @property
    def dp(self) -> int:
        """Ranks along both data-parallel axes: how many ways the global batch is split."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp * self.tp_row * self.tp_col

    def __str__(self) -> str:
        """The text that `parse_mesh` reads back: `2x2x4`, or the named form where needed."""
        sizes = dataclasses.asdict(self)
        grid = (sizes.pop("tp_row"), sizes.pop("tp_col"))
        if self.dp_replicate == self.cp == self.ep == 1 and grid == (1, 1):
            return f"{self.tp}x{self.pp}x{self.dp_shard}"
        texts = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
        if grid != (1, 1):
            texts.insert(0, f"tp={self.tp_row}x{self.tp_col}")
        return ",".join(texts)
