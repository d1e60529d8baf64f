"""Records: what is written is read, what two of them have is compared, and bad ones are refused."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_llm.parity.compare import bound_of, compare_records, not_compared
from dtensor_llm.parity.record import LINES, Record, RecordError, RecordWriter
from dtensor_llm.parity.run import Incomparable
from dtensor_llm.parity.verdict import BOUND

Tensors = dict[str, dict[str, Tensor]]


STEP = '{"step": 1, "loss": 2.0, '  # the beginning of a line


def vector(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def tensors(gradient: float = 1.0, weight: float = 2.0) -> Tensors:
    return {"gradient": {"a": vector(gradient, 3.0)}, "weight": {"a": vector(weight, 4.0)}}


def write(folder: Path, *steps: dict[str, Any], **about: Any) -> Record:
    record = RecordWriter(folder, **({"dtype": "float64"} | about))
    for step in steps:
        record.step(**step)
    return Record(folder)


def step(loss: float = 2.0, *, norm: float = 1.0, **given: Any) -> dict[str, Any]:
    return {"loss": loss, "gradient_norm": norm, **given}


# Writing and reading


def test_what_is_written_is_read(tmp_path: Path) -> None:
    record = write(tmp_path / "a", step(2.5, tensors=tensors()), step(2.25, norm=0.5), mesh="2x1x1")
    assert (record.about["mesh"], record.dtype) == ("2x1x1", torch.float64)
    assert (record.losses, record.gradient_norms) == ([2.5, 2.25], [1.0, 0.5])
    assert list(record.tensors_at) == [0]
    assert record.tensors_at[0]["weight"]["a"].equal(vector(2.0, 4.0))
    assert record.norms_at[0]["gradient"] == {"a": pytest.approx(10**0.5)}
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [LINES, "step-000001.pt"]


def test_record_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path, step())
    before = (tmp_path / LINES).read_bytes()
    with pytest.raises(RecordError, match="already holds a record; take another folder"):
        RecordWriter(tmp_path)
    assert (tmp_path / LINES).read_bytes() == before


def test_run_that_was_cut_short_while_it_wrote_is_read_to_there(tmp_path: Path) -> None:
    write(tmp_path, step(2.0), step(1.0))
    path = tmp_path / LINES
    path.write_text(path.read_text()[:-10])
    assert Record(tmp_path).losses == [2.0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "holds no record: there is no"),
        ([""], "line 1: not a JSON object"),
        (['{"step": 1, "loss": 2.0}'], "the first line is not that of a record"),
        (["HEAD"], "has no step"),
        (["HEAD", "{", '{"step": 2, "loss": 2.0}'], "line 2: not a JSON object"),
        (["HEAD", "[1]", "[2]"], "not lines of JSON objects"),
        (["HEAD", '{"step": 2, "loss": 2.0}'], "line 2: not step 1 with its loss"),
        (["HEAD", '{"step": 1}'], "line 2: not step 1 with its loss"),
        (["HEAD", '{"step": 1, "loss": true}'], "line 2: not step 1 with its loss"),
        (["HEAD", '{"step": 1, "loss": 1' + 400 * "0" + "}"], "line 2: not step 1 with its loss"),
        (["HEAD", STEP + '"gradient_norm": "x"}'], "line 2: gradient_norm 'x' is no number"),
        (["HEAD", STEP + '"norms": 3}'], "line 2: norms are not {quantity: {parameter: number}}"),
        (["HEAD", STEP + '"norms": {"weight": {"a": "x"}}}'], "line 2: norms are not {"),
        (["HEAD", STEP + '"tensors": "../a.pt"}'], "line 2: tensors '../a.pt' is not the name of"),
        (["HEAD", STEP + '"tensors": 3}'], "line 2: tensors 3 is not the name of a file"),
        (["HEAD, int64"], "dtype 'int64' is none of torch's floating point types, as float32 is"),
        (["HEAD, float99"], "dtype 'float99' is none of torch's floating point types"),
        (["\udcff"], "is not text in UTF-8"),
    ],
)
def test_what_is_no_record_is_refused(
    tmp_path: Path, lines: list[str] | None, message: str
) -> None:
    head = {"format": "training record", "version": 1}
    heads = {"HEAD": head} | {f"HEAD, {x}": {**head, "dtype": x} for x in ("int64", "float99")}
    if lines is not None:
        text = "\n".join(json.dumps(heads[line]) if line in heads else line for line in lines)
        (tmp_path / LINES).write_text(text + "\n", errors="surrogateescape")
    with pytest.raises(RecordError, match=re.escape(message)):
        Record(tmp_path)


def test_tensor_file_that_is_missing_or_cut_or_something_else_is_named(tmp_path: Path) -> None:
    write(tmp_path, step(tensors=tensors()))
    path = tmp_path / "step-000001.pt"
    for other in (
        [1, 2],
        {"weight": {}},
        {"weight": {"a": torch.empty(0)}},
        {"weight": {"a": torch.tensor([1])}},
        {"weight": {"a": 1.0}},
    ):
        torch.save(other, path)
        with pytest.raises(RecordError, match=r"step-000001\.pt: not {quantity: {param"):
            Record(tmp_path).tensors_at[0]
    path.write_text("not a file of torch")
    with pytest.raises(RecordError, match=r"step-000001\.pt holds more than tensors, or is damag"):
        Record(tmp_path).tensors_at[0]
    path.write_bytes(b"")
    with pytest.raises(RecordError, match=r"step-000001\.pt cannot be read: \w+"):
        Record(tmp_path).tensors_at[0]
    torch.save(tensors(), path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RecordError, match=r"step-000001\.pt cannot be read"):
        Record(tmp_path).tensors_at[0]
    path.unlink()
    with pytest.raises(RecordError, match=r"step-000001\.pt cannot be read"):
        Record(tmp_path).tensors_at[0]


def test_step_that_cannot_be_written_leaves_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RecordWriter(tmp_path)
    writer.step(loss=3.0, tensors=tensors())
    with pytest.raises(RecordError, match=r"step 2: not \{quantity: \{parameter: tensor\}\}"):
        writer.step(loss=2.0, tensors={"weight": {"a": torch.tensor([1j])}})

    def fill_the_disk(_: Any, path: Path) -> None:
        path.write_text("as far as it went")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fill_the_disk)
    with pytest.raises(RecordError, match=r"step-000003\.pt cannot be written: No space left on"):
        writer.step(loss=2.0, tensors=tensors())
    assert Record(tmp_path).losses == [3.0]
    assert {path.name for path in tmp_path.iterdir()} == {LINES, "step-000001.pt"}


# Comparing


def test_first_difference_is_named_by_step_quantity_tensor_and_index(tmp_path: Path) -> None:
    same = step(tensors=tensors())
    a = write(tmp_path / "a", same, step(tensors=tensors(weight=2.0 + 1e-6)), step(1.5))
    b = write(tmp_path / "b", same, step(tensors=tensors()), step(1.4), step(1.3))
    report = compare_records(a, b)
    assert not report.passed
    assert [(r.quantity, r.passed) for r in report.rows] == [
        ("loss", False),
        ("gradient norm", True),
        ("gradient", True),
        ("weight", False),
    ]
    first = report.first
    assert first is not None
    assert (first.quantity, first.worst, first.step, first.index) == ("weight", "a", 1, (0,))
    assert (first.value, first.expected) == (2.0 + 1e-6, 2.0)
    assert compare_records(b, b).passed


def test_norms_tell_where_tensors_are_not_recorded(tmp_path: Path) -> None:
    norms = {"weight": {"a": 5.0, "b": 1.0}}
    wrong = {"weight": {"a": 5.0, "b": 1.0 + 1e-6}}
    a = write(tmp_path / "a", step(norms=norms), step(norms=wrong), step(1.5))
    b = write(tmp_path / "b", step(norms=norms), step(norms=norms), step(1.0))
    first = compare_records(a, b).first
    assert first is not None
    assert (first.quantity, first.worst, first.step) == ("weight (2-norm)", "b", 1)
    assert first.error == pytest.approx(1e-6 / 5.0), "on the scale of the largest weight"


def test_loss_alone_can_be_compared(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, {"loss": 2.0}, {"loss": 1.0}) for name in "ab")
    report = compare_records(a, b)
    assert [row.quantity for row in report.rows] == ["loss"]
    assert report.passed


def test_other_parameters_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a", step(tensors={"weight": {"a": vector(1.0), "c": vector(1.0)}}))
    b = write(tmp_path / "b", step(tensors={"weight": {"a": vector(1.0), "b": vector(1.0)}}))
    both = "only in the first: c; only in the second: b"
    with pytest.raises(Incomparable, match=f"step 1, weight: .*{both}"):
        compare_records(a, b)
    c = write(tmp_path / "c", step(tensors={"weight": {"a": vector(1.0, 1.0), "b": vector(1.0)}}))
    with pytest.raises(Incomparable, match=r"weight of a: shape \(2,\) in the first, \(1,\)"):
        compare_records(c, b)


def test_bound_follows_the_coarser_dtype(tmp_path: Path) -> None:
    double = write(tmp_path / "a", step())
    single = write(tmp_path / "b", step(), dtype="float32")
    assert bound_of(double, double) == BOUND
    scale = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
    assert bound_of(double, single) == bound_of(single, double) == BOUND * scale
    a, b = (write(tmp_path / n, step(2.0 + d)) for n, d in (("c", 0.0), ("d", 1e-3)))
    assert not compare_records(a, b).passed
    assert compare_records(a, b, bound=1e-3).passed


def test_below_float32_there_is_no_bound_without_a_reference(tmp_path: Path) -> None:
    half, double = write(tmp_path / "a", step(), dtype="bfloat16"), write(tmp_path / "b", step())
    with pytest.raises(Incomparable, match="no fixed bound tells rounding from a bug"):
        compare_records(half, double)
    assert compare_records(half, double, bound=1e-3).passed
    assert compare_records(half, half, reference=double).passed


def test_reference_is_in_float64_and_the_same_training(tmp_path: Path) -> None:
    single = write(tmp_path / "a", step(), dtype="float32", train={"lr": 1e-3, "dtype": "float32"})
    with pytest.raises(Incomparable, match=r"is in torch\.float32: what judges .* is in float64"):
        compare_records(single, single, reference=single)
    other = write(tmp_path / "b", step(), train={"lr": 2e-3, "dtype": "float64"})
    with pytest.raises(Incomparable, match=r"is another training than .*: lr 0\.001 and 0\.002"):
        compare_records(single, single, reference=other)


def test_gradient_norms_are_compared_where_both_have_all(tmp_path: Path) -> None:
    a = write(tmp_path / "a", step(), {"loss": 2.0, "gradient_norm": None}, step(norm=3.0))
    b = write(tmp_path / "b", step(), step(), step(norm=5.0))
    first = compare_records(a, b).first
    assert first is not None
    assert (first.quantity, first.step, first.value, first.expected) == (
        "gradient norm",
        2,
        3.0,
        5.0,
    )
    c = write(tmp_path / "c", {"loss": 2.0}, {"loss": 2.0}, {"loss": 2.0})
    assert [row.quantity for row in compare_records(c, b).rows] == ["loss"]


def test_norms_are_compared_beside_the_tensors_of_other_quantities(tmp_path: Path) -> None:
    weight = {"weight": {"a": vector(1.0)}}
    a, b = (
        write(tmp_path / name, step(tensors=weight, norms={"gradient": {"a": norm}}))
        for name, norm in (("a", 1.0), ("b", 777.0))
    )
    assert [r.quantity for r in compare_records(a, b).rows if not r.passed] == ["gradient (2-norm)"]
    bad = write(tmp_path / "c", step(tensors=weight, norms={"gradient": {"a": float("nan")}}))
    assert not compare_records(bad, a).passed


def test_yardstick_that_lacks_what_it_is_to_judge_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "a", step(tensors=tensors()), dtype="float32")
    reference = write(tmp_path / "b", step(tensors=tensors()))
    bare = write(tmp_path / "c", {"loss": 2.0}, dtype="float32")
    lacking = "has not recorded gradient norm, gradient of step 1, weight of step 1 to judge by"
    with pytest.raises(Incomparable, match=lacking):
        compare_records(whole, bare, reference=reference)


def test_reference_lets_a_run_be_twice_as_far_off_as_one_device(tmp_path: Path) -> None:
    def run(name: str, off: float, dtype: str = "float32") -> Record:
        made = step(2.0 + off, norm=1.0 + off, tensors=tensors(1.0 + off, 2.0 + off))
        return write(tmp_path / name, made, dtype=dtype)

    reference, one_device = run("reference", 0.0, "float64"), run("one", 1e-6)
    assert compare_records(run("near", -1.9e-6), one_device, reference=reference).passed
    far = compare_records(run("far", 2.1e-6), one_device, reference=reference)
    assert [row.quantity for row in far.rows if not row.passed] == [
        row.quantity for row in far.rows
    ]


def test_control_lets_a_run_be_ten_times_as_far_off(tmp_path: Path) -> None:
    """Never less than the fixed bound; and of each quantity by what the control says of it."""

    def run(name: str, gradient: float, weight: float) -> Record:
        made = step(tensors=tensors(1.0 + gradient, 2.0 + weight))
        return write(tmp_path / name, made)

    other, control = run("other", 0.0, 0.0), run("control", 4e-12, 0.0)
    near, far, heavy = run("a", 3e-11, 0.0), run("b", 5e-11, 0.0), run("c", 0.0, 3e-11)
    assert not compare_records(near, other).passed
    assert compare_records(near, other, control=control).passed
    assert compare_records(other, other, control=other).passed
    for wrong, quantity in ((far, "gradient"), (heavy, "weight")):
        report = compare_records(wrong, other, control=control)
        assert [row.quantity for row in report.rows if not row.passed] == [quantity]
        assert report.first is not None and report.first.quantity == quantity


def test_control_is_the_same_training_and_has_all_that_is_judged(tmp_path: Path) -> None:
    whole = write(tmp_path / "a", step(tensors=tensors()), train={"lr": 1e-3})
    bare = write(tmp_path / "b", step(), train={"lr": 1e-3, "micro_batch_size": 1})
    with pytest.raises(Incomparable, match="has not recorded gradient of step 1, weight of step 1"):
        compare_records(whole, whole, control=bare)
    other = write(tmp_path / "c", step(tensors=tensors()), train={"lr": 2e-3})
    with pytest.raises(Incomparable, match=r"is another training than .*: lr 0\.001 and 0\.002"):
        compare_records(whole, whole, control=other)


def test_control_that_is_further_off_than_rounding_is_another_training(tmp_path: Path) -> None:
    """Whatever the first lines say: where they say nothing, too."""

    def run(name: str, off: float) -> Record:
        return write(tmp_path / name, step(tensors=tensors(1.0 + off)))

    other, wrong = run("other", 0.0), run("wrong", 1e-4)
    with pytest.raises(Incomparable, match=r"wrong is not .*other again: its gradient is 3\.3e-05"):
        compare_records(wrong, other, control=wrong)


def test_reference_judges_no_float64(tmp_path: Path) -> None:
    record = write(tmp_path, step())
    with pytest.raises(Incomparable, match="both records are in float64, and a reference judges l"):
        compare_records(record, record, reference=record)


def test_what_only_one_has_recorded_is_listed(tmp_path: Path) -> None:
    a = write(tmp_path / "a", step(tensors={"weights": {"a": vector(7.0)}, **tensors()}))
    b = write(tmp_path / "b", step(norms={"gradient": {"a": 1.0}, "other": {"a": 1.0}}))
    assert not_compared(a, b) == ["only A has: weight, weights", "only B has: other"]
    assert not_compared(a, a) == []


def test_files_are_read_once_for_differences_and_once_for_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each tensor: of B twice, of A once."""
    both = [write(tmp_path / name, *[step(tensors=tensors())] * 3) for name in "ab"]
    read: list[Path] = []

    def load(path: Path, **options: Any) -> Any:
        read.append(path)
        return loaded(path, **options)

    loaded = torch.load
    monkeypatch.setattr(torch, "load", load)
    assert compare_records(*both).passed
    assert Counter(path.parent.name for path in read) == {"a": 3, "b": 6}


def test_dtype_is_that_of_the_tensors_where_the_first_line_does_not_say_it(tmp_path: Path) -> None:
    weights = {"weight": {"a": vector(1.0, dtype=torch.bfloat16)}}
    RecordWriter(tmp_path).step(loss=1.0, tensors=weights)
    record = Record(tmp_path)
    assert record.dtype == torch.bfloat16
    with pytest.raises(Incomparable, match="below float32"):
        compare_records(record, record)
