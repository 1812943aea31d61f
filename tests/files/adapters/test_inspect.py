"""inspect_adapter and compare_adapters: their numbers against the matrices that they never form."""

import dataclasses
import json

import numpy as np
import pytest

from mindlora.core.errors import AdapterFormatError, ScaleMismatchError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32, to_float32
from mindlora.core.text import WIDTH, columns, number
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.compare import compare_adapters
from mindlora.files.adapters.files import read_adapters
from mindlora.files.adapters.inspect import inspect_adapter
from mindlora.files.adapters.spectrum import delta_norm

WQ, WV = "model.layers.{}.attention.wq", "model.layers.{}.attention.wv"
SIZES = {"wq": (12, 10), "wv": (6, 10)}


def make(seed=0, rank=3, alpha=6.0, layers=2, dtype=np.float32, **fields):
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        for stem in (WQ, WV):
            path = stem.format(layer)
            out, width = SIZES[path.rpartition(".")[2]]
            tensors[path, "A"] = random.normal(size=(rank, width)).astype(dtype)
            tensors[path, "B"] = random.normal(size=(out, rank)).astype(dtype)
    alphas = {} if alpha is None else {path: alpha for path, _ in tensors}
    return Adapter(tensors, alphas=alphas, **fields)


@pytest.fixture
def stored(monkeypatch):
    """Returns a function that stores an adapter under a name, without reading a file."""
    held = {}
    monkeypatch.setattr(adapter_files, "read", lambda path, *_: held[path])

    def put(name, adapter):
        with open(name, "wb") as file:
            file.write(bytes(123))
        held[name] = adapter
        return name

    return put


def plain(report):
    """Returns the report after a round trip through JSON; NaN, which is not JSON, is an error."""
    return json.loads(json.dumps(dataclasses.asdict(report), allow_nan=False))


def test_inspect_reports_what_the_file_holds(tmp_path):
    fingerprint = {"shapes": "12ab", "values": "cd34"}
    adapter = make(use_rslora=True, dropout=0.1, base_model="org/llama", fingerprint=fingerprint)
    path = str(tmp_path / "adapter")
    adapter_files.write(adapter, path, to="peft")
    report = inspect_adapter(path)
    scale = 6 / np.sqrt(3)
    assert (report.form, report.ranks, report.alphas, report.use_rslora, report.dropout) == (
        "folder",
        (3,),
        (6.0,),
        True,
        0.1,
    )
    assert report.scales == (pytest.approx(scale),)
    assert report.targets == (
        "model.layers.{0..1}.attention.wq",
        "model.layers.{0..1}.attention.wv",
    ) or report.targets == ("model.layers.{0..1}.attention.wv", "model.layers.{0..1}.attention.wq")
    assert (report.tensors, report.parameters, report.dtypes) == (8, 2 * 3 * (22 + 16), ("float32",))
    assert report.tensor_bytes == 4 * report.parameters
    assert report.file_bytes == sum(file.stat().st_size for file in (tmp_path / "adapter").iterdir())
    assert (report.base_model, report.fingerprint, report.saved_modules, report.warnings) == (
        "org/llama",
        fingerprint,
        (),
        (),
    )
    assert {cell.path: cell.shape for cell in report.cells}[WV.format(1)] == (6, 10)
    for cell in report.cells:
        delta = adapter.delta(cell.path)
        assert cell.norm_delta == pytest.approx(np.linalg.norm(delta), rel=1e-5)
        assert cell.norm_a == pytest.approx(np.linalg.norm(adapter.tensors[cell.path, "A"]), rel=1e-6)
        assert cell.norm_b == pytest.approx(np.linalg.norm(adapter.tensors[cell.path, "B"]), rel=1e-6)
    text = str(report)
    for part in (
        "org/llama",
        "rsLoRA",
        "shapes 12ab, values cd34",
        "3.464",
        "folder",
        "228 parameters",
        number(report.cells[0].norm_delta),
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert plain(report)["cells"][0]["path"] == report.cells[0].path


def test_other_dtypes_and_ranks(stored):
    adapter = make(rank=2, layers=1)
    wide = make(seed=1, rank=4, alpha=2.0, layers=2)
    for key, array in wide.tensors.items():
        if ".1." in key[0]:
            adapter.tensors[key] = from_float32(array, BFLOAT16)
            adapter.alphas[key[0]] = 2.0
    report = inspect_adapter(stored("a.ckpt", adapter))
    assert (report.form, report.ranks, report.alphas, report.scales) == (".ckpt", (2, 4), (2.0, 6.0), (0.5, 3.0))
    assert report.dtypes == ("bfloat16", "float32") and report.file_bytes == 123
    assert report.tensor_bytes == sum(array.nbytes for array in adapter.tensors.values())
    for cell in report.cells:
        assert cell.norm_delta == pytest.approx(np.linalg.norm(adapter.delta(cell.path)), rel=1e-5)
        assert cell.norm_a == pytest.approx(np.linalg.norm(to_float32(adapter.tensors[cell.path, "A"])), rel=1e-6)


def test_an_untrained_adapter_is_warned_of(stored):
    adapter = make()
    adapter.tensors[WQ.format(1), "B"][:] = 0
    report = inspect_adapter(stored("a", adapter))
    assert report.warnings == (
        "A or B is all zero, so the adapter does nothing, as before any training, at 1 of 4 "
        "cells: model.layers.1.attention.wq.",
    )
    assert [cell.norm_delta for cell in report.cells if cell.path == WQ.format(1)] == [0.0]
    assert "warning" in str(report)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_values_are_warned_of_and_are_not_nan_in_json(stored, value):
    adapter = make(saved_modules={"lm_head.weight": np.full((4, 4), value, np.float32)})
    adapter.tensors[WV.format(0), "A"][1, 2] = value
    report = inspect_adapter(stored("a", adapter))
    assert report.warnings == (
        "A or B holds NaN or infinity at 1 of 4 cells: model.layers.0.attention.wv.",
        "Saved modules hold NaN or infinity: lm_head.weight.",
    )
    broken = {cell.path: cell for cell in report.cells}[WV.format(0)]
    assert broken.norm_a is None and broken.norm_delta is None and broken.norm_b > 0
    plain(report)
    assert report.saved_modules == ("lm_head.weight",) and report.parameters == 228 + 16


def test_an_unknown_alpha_leaves_the_change_unknown(stored):
    name = stored("a", make(alpha=None))
    report = inspect_adapter(name)
    assert (report.alphas, report.scales) == ((), ())
    assert report.warnings == ("The file does not state lora_alpha, so the scale is not known. Give it with --alpha.",)
    assert {(cell.norm_delta, cell.scale) for cell in report.cells} == {(None, None)}
    assert all(cell.norm_a > 0 for cell in report.cells)
    assert "not known" in str(report)
    plain(report)
    stored("a", make(alpha=None))
    assert inspect_adapter(name, alpha=6.0).cells == inspect_adapter(stored("b", make())).cells


def test_a_rank_above_the_side_of_the_weight_is_warned_of(stored):
    report = inspect_adapter(stored("a", make(rank=8)))
    assert report.warnings == (
        "The rank is above the smaller side of the weight, so part of it cannot have any effect, at 2 "
        "of 4 cells: model.layers.{0..1}.attention.wv.",
    )
    assert inspect_adapter(stored("b", make(rank=6))).warnings == ()


def test_norms_of_sums_and_differences():
    random = np.random.default_rng(0)
    parts = [
        (scale, random.normal(size=(rank, 9)), random.normal(size=(7, rank)))
        for scale, rank in ((0.5, 2), (-3.0, 4), (1.0, 1))
    ]
    assert delta_norm(*parts) == pytest.approx(np.linalg.norm(sum(scale * b @ a for scale, a, b in parts)), rel=1e-6)
    scale, a, b = parts[0]
    assert delta_norm((scale, a, b), (-scale, a, b)) < 1e-6


def test_equal_adapters_in_two_forms(tmp_path):
    adapter = make(base_model="org/llama")
    one, two = str(tmp_path / "one"), str(tmp_path / "two.ckpt")
    adapter_files.write(adapter, one, to="peft")
    adapter_files.write(adapter, two, to="ckpt")
    report = compare_adapters(one, two)
    assert report.equal and (report.only_in_first, report.only_in_second, report.saved_modules_changed) == ((), (), ())
    assert all(cell.equal and cell.difference_delta == 0 for cell in report.cells) and len(report.cells) == 4
    assert set(report.settings) == {"form"}
    assert "equal   yes" in str(report)


def test_values_that_differ(stored):
    first, second = make(0), make(0)
    second.tensors[WQ.format(1), "B"] = second.tensors[WQ.format(1), "B"] + np.float32(0.25)
    report = compare_adapters(stored("a", first), stored("b", second))
    assert not report.equal and report.settings == {}
    (changed,) = (cell for cell in report.cells if not cell.equal)
    assert changed.path == WQ.format(1) and changed.difference_a == 0
    assert changed.difference_b == pytest.approx(0.25 * np.sqrt(36), rel=1e-5)
    difference = np.linalg.norm(first.delta(changed.path) - second.delta(changed.path))
    assert changed.difference_delta == pytest.approx(difference, rel=1e-5)
    assert changed.relative == pytest.approx(difference / np.linalg.norm(first.delta(changed.path)), rel=1e-5)
    text = str(report)
    assert WQ.format(1) in text and WQ.format(0) not in text
    assert "4 in both, 3 of them equal bit for bit" in text and max(map(len, text.splitlines())) <= WIDTH


def test_one_bit_is_a_difference(stored):
    first, second = make(0), make(0)
    second.tensors[WQ.format(0), "A"][0, 0] = np.nextafter(second.tensors[WQ.format(0), "A"][0, 0], np.float32(9))
    report = compare_adapters(stored("a", first), stored("b", second))
    assert not report.equal and [cell.equal for cell in report.cells].count(False) == 1
    widened = make(0)
    widened.tensors = {key: array.astype(np.float64) for key, array in widened.tensors.items()}
    report = compare_adapters(stored("a", first), stored("c", widened))
    assert not report.equal and report.settings == {"dtype": ("float32", "float64")}
    assert {cell.difference_a for cell in report.cells} == {0.0} and not report.cells[0].equal


def test_the_same_bits_in_another_dtype_are_a_difference(stored):
    first, second = make(0, dtype=np.float16), make(0)
    second.tensors = {key: array.view(BFLOAT16) for key, array in first.tensors.items()}
    report = compare_adapters(stored("a", first), stored("b", second))
    assert not report.equal and not any(cell.equal for cell in report.cells)


@pytest.mark.parametrize("shorter", ["a", "b"])
def test_a_cell_that_one_lacks_is_a_difference(stored, shorter):
    adapters = {"a": make(0), "b": make(0)}
    for half in "AB":
        del adapters[shorter].tensors[WQ.format(1), half]
    report = compare_adapters(*(stored(name, adapter) for name, adapter in adapters.items()))
    assert not report.equal and all(cell.equal for cell in report.cells) and len(report.cells) == 3
    assert "only in" in str(report)


def test_the_names_of_version_0_1_still_read(stored):
    modules = {"lm_head.weight": np.ones((2, 2), np.float32)}
    first, second = (
        make(0, saved_modules=modules),
        make(0, saved_modules={"lm_head.weight": modules["lm_head.weight"] + 1}),
    )
    assert inspect_adapter(stored("a", first)).saved_modules == ("lm_head.weight",)
    assert compare_adapters("a", stored("b", second)).saved_modules_changed == ("lm_head.weight",)


def test_the_scale_alone_differs(stored):
    report = compare_adapters(stored("a", make(0)), stored("b", make(0, alpha=9.0)))
    assert not report.equal and report.settings == {"lora_alpha": ("6", "9"), "scale": ("2", "3")}
    for cell in report.cells:
        assert (cell.difference_a, cell.difference_b) == (0, 0) and cell.relative == pytest.approx(0.5, rel=1e-6)


def test_ranks_and_targets_that_differ(stored):
    first, second = make(0, rank=3), make(1, rank=5)
    for half in "AB":
        del first.tensors[WV.format(1), half], second.tensors[WQ.format(0), half]
    second.saved_modules = {"lm_head.weight": np.ones((2, 2), np.float32)}
    report = compare_adapters(stored("a", first), stored("b", second))
    assert report.only_in_first == (f"{WQ.format(0)} A", f"{WQ.format(0)} B")
    assert report.only_in_second == (f"{WV.format(1)} A", f"{WV.format(1)} B", "lm_head.weight")
    assert report.settings["rank"] == ("3", "5") and "targets" in report.settings
    for cell in report.cells:
        assert cell.difference_a is None and cell.difference_b is None
        expected = np.linalg.norm(first.delta(cell.path) - second.delta(cell.path))
        assert cell.difference_delta == pytest.approx(expected, rel=1e-5)
    plain(report)


def test_saved_modules_that_differ(stored):
    first, second = (make(0, saved_modules={"lm_head.weight": np.full((2, 2), value, np.float32)}) for value in (1, 2))
    report = compare_adapters(stored("a", first), stored("b", second))
    assert report.saved_modules_changed == ("lm_head.weight",) and not report.equal
    assert report.cells and all(cell.equal for cell in report.cells)


def test_what_cannot_be_compared_is_none(stored):
    first, second = make(0), make(1)
    first.tensors[WQ.format(0), "A"][0, 0] = np.nan
    second.tensors[WQ.format(1), "B"] = np.ones((13, 3), np.float32)
    first.tensors[WV.format(0), "B"][:] = 0
    cells = {cell.path: cell for cell in compare_adapters(stored("a", first), stored("b", second)).cells}
    assert cells[WQ.format(0)].difference_a is None and cells[WQ.format(0)].difference_delta is None
    assert cells[WQ.format(1)].difference_b is None and cells[WQ.format(1)].difference_delta is None
    assert cells[WV.format(0)].difference_delta > 0 and cells[WV.format(0)].relative is None
    report = compare_adapters("a", stored("c", make(1, alpha=None)))
    assert {cell.difference_delta for cell in report.cells} == {None}
    assert report.settings["lora_alpha"] == ("6", "not in the file")
    plain(report)
    str(report)


def test_alpha_is_for_the_adapter_that_lacks_it(stored):
    stored("known", make(0)), stored("unknown", make(1, alpha=None))
    known, unknown = read_adapters(["known", "unknown"], alpha=9.0)
    assert known.scale(WQ.format(0)) == 2 and unknown.scale(WQ.format(0)) == 3
    with pytest.raises(ScaleMismatchError, match="lora_alpha is 9, but the adapter has its own: 6."):
        read_adapters(["known"], alpha=9.0)


def test_reading_fails_as_the_reader_says(tmp_path):
    with pytest.raises(AdapterFormatError, match="does not exist"):
        inspect_adapter(str(tmp_path / "none"))


def test_tables_cut_long_paths_at_their_beginning():
    path = "model." + "deep." * 30 + "wq"
    table = columns(("cell", "norm"), [(path, "1.5"), ("lm_head", "10")])
    lines = table.splitlines()
    assert max(map(len, lines)) == WIDTH and lines[1].startswith("...") and "deep.wq   1.5" in lines[1]
    assert [number(value) for value in (None, 3, 16.0, 1 / 3, 1e-7, 65536.0)] == [
        "-",
        "3",
        "16",
        "0.3333",
        "1e-07",
        "65536",
    ]
