"""Every planted bug is caught, and the report names the quantity and the tensor that it broke."""

import pytest

from parity_tests.faults import FAULTS, Fault
from parity_tests.harness import parity, small_config


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault) -> None:
    config = small_config(fault.mesh, **fault.options)
    with fault.plant():
        report = parity(config)
    failed = {row.quantity: row for row in report.rows if not row.passed}
    assert fault.quantity in failed, f"{fault.name} was not seen:\n{report}"
    assert fault.tensors in failed[fault.quantity].worst, report


def configurations() -> list[tuple[str, dict[str, object]]]:
    """What the faults are planted in, each once."""
    found = {repr((f.mesh, f.options)): (f.mesh, dict(f.options)) for f in FAULTS}
    return list(found.values())


@pytest.mark.parametrize(("mesh", "options"), configurations())
def test_same_configuration_passes_without_the_fault(mesh: str, options: dict[str, object]) -> None:
    report = parity(small_config(mesh, **options))
    assert report.passed, report
