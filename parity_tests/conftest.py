"""Options of the fuzz, and one thread a process: the runner starts a process for each core."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "draws of test_composition.py")
    group.addoption("--fuzz", type=int, default=60, metavar="N", help="how many draws (60)")
    group.addoption("--seed", type=int, default=0, metavar="S", help="what they are drawn from (0)")
    group.addoption(
        "--draw", type=int, default=None, metavar="I", help="only draw I, no other test"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a `draw` runs once for each."""
    if "draw" in metafunc.fixturenames:
        only = metafunc.config.getoption("--draw")
        draws = range(metafunc.config.getoption("--fuzz")) if only is None else [only]
        metafunc.parametrize("draw", draws, ids=lambda index: f"draw{index}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --draw no other test runs: the command that a failing draw prints repeats it alone."""
    if config.getoption("--draw") is None:
        return

    def is_draw(item: pytest.Item) -> bool:
        return "draw" in getattr(item, "fixturenames", ())

    config.hook.pytest_deselected(items=[item for item in items if not is_draw(item)])
    items[:] = filter(is_draw, items)
