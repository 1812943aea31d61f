"""resize_adapter and inspect --energy, against the svd of the whole matrix scale B A."""

import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from mindlora import inspect_adapter, resize_adapter
from mindlora.core.errors import AdapterError, ConfigError, NotFiniteError, ScaleMismatchError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.resize import resize
from tests.support import diffusion_adapters

# path -> (shape of A, shape of B); the last one's rank is above the smaller side of its weight.
SHAPES = {
    "model.layers.0.attention.wq": ((6, 24), (17, 6)),
    "model.layers.0.attention.wv": ((3, 24), (5, 3)),
    "model.layers.1.attention.wv": ((6, 24), (4, 6)),
    "model.tok_embeddings": ((6, 31), (24, 6)),
    "conv": ((6, 3, 2, 2), (7, 6, 1, 1)),
}


def make(dtype=np.float32, use_rslora=False):
    random = np.random.default_rng(0)
    tensors = {}
    for path, (a, b) in SHAPES.items():
        falling = 0.9 if path == "conv" else 0.4
        decay = (falling ** np.arange(a[0])).reshape(-1, *[1] * (len(a) - 1))
        tensors[path, "A"] = from_float32((random.normal(size=a) * decay).astype(np.float32), dtype)
        tensors[path, "B"] = from_float32(random.normal(size=b).astype(np.float32), dtype)
    alphas = {path: 2.0 * a[0] for path, (a, _) in SHAPES.items()}
    return Adapter(tensors, alphas, use_rslora=use_rslora, embeddings={"model.tok_embeddings"}, dropout=0.1)


@pytest.fixture
def adapter():
    made = make()
    adapter_files.write(made, "adapter", to="peft")
    return made


def matrix(adapter, path):
    """scale B A in float64, written out."""
    a, b = (adapter.tensors[path, half].astype(np.float64) for half in "AB")
    return adapter.scale(path) * b.reshape(len(b), -1) @ a.reshape(len(a), -1)


def kohya_rank(singular_values, sv_fro, limit):
    """The rank that kohya's resize script chooses with dynamic_method sv_fro, one singular value after the other."""
    whole, held = sum(value**2 for value in singular_values), 0.0
    for count, value in enumerate(singular_values, 1):
        held += value**2
        if held / whole >= sv_fro**2:
            return min(count, limit)
    return limit


def test_energy_shows_the_singular_values_of_the_change(adapter):
    report = inspect_adapter("adapter", energy=True)
    for cell in report.spectra:
        values = np.linalg.svd(matrix(adapter, cell.path), compute_uv=False)[: len(cell.singular_values)]
        assert len(cell.singular_values) == min(cell.rank, *matrix(adapter, cell.path).shape)
        np.testing.assert_allclose(cell.singular_values, values, rtol=1e-10, atol=1e-10 * values[0])
        assert cell.ranks == tuple(kohya_rank(values, math.sqrt(share), cell.rank) for share in (0.9, 0.95, 0.99))
    assert inspect_adapter("adapter").spectra is None
    assert "90%  95%  99%" in str(report) and "90%" not in str(inspect_adapter("adapter"))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_resized_cell_is_the_best_approximation_of_its_rank(use_rslora):
    before = make(use_rslora=use_rslora)
    adapter_files.write(before, "adapter", to="peft")
    report = resize_adapter("adapter", "small", rank=4)
    after = adapter_files.read("small")
    assert after.use_rslora is use_rslora and after.dropout == 0.1 and after.embeddings == before.embeddings
    for cell in report.cells:
        change = matrix(before, cell.path)
        u, s, vh = np.linalg.svd(change)
        assert (cell.rank_before, cell.rank) == (before.rank(cell.path), after.rank(cell.path))
        assert cell.rank == min(4, before.rank(cell.path), *change.shape)
        assert after.scale(cell.path) == pytest.approx(before.scale(cell.path), rel=1e-12)
        best = (u[:, : cell.rank] * s[: cell.rank]) @ vh[: cell.rank]
        np.testing.assert_allclose(matrix(after, cell.path), best, rtol=1e-5, atol=1e-6 * s[0])
        lost = math.sqrt(sum(s[cell.rank :] ** 2) / sum(s**2))
        assert cell.error == pytest.approx(lost, abs=1e-6)
        a, b = (after.tensors[cell.path, half] for half in "AB")
        if cell.rank < cell.rank_before:
            assert np.linalg.norm(a) == pytest.approx(np.linalg.norm(b), rel=1e-5)


@pytest.mark.parametrize("energy, limit", [(0.9, None), (0.95, 2), (0.999, None)])
def test_energy_chooses_each_rank_as_kohyas_sv_fro(adapter, energy, limit):
    report = resize_adapter("adapter", "small", energy=energy, rank=limit)
    ranks = {cell.path: cell.rank for cell in report.cells}
    for path, rank in ranks.items():
        values = np.linalg.svd(matrix(adapter, path), compute_uv=False)
        assert rank == kohya_rank(values, math.sqrt(energy), limit or adapter.rank(path))
        assert adapter_files.read("small").rank(path) == rank
    assert limit or len(set(ranks.values())) > 1


def test_the_report_counts_parameters_and_the_error_of_all_cells(adapter):
    report = resize_adapter("adapter", "small", rank=1)
    after = adapter_files.read("small")
    assert report.parameters_before == sum(array.size for array in adapter.tensors.values())
    assert report.parameters == sum(array.size for array in after.tensors.values())
    changes = [matrix(adapter, path).ravel() for path in SHAPES]
    differences = [(matrix(adapter, path) - matrix(after, path)).ravel() for path in SHAPES]
    expected = np.linalg.norm(np.concatenate(differences)) / np.linalg.norm(np.concatenate(changes))
    assert report.error == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
def test_a_resized_adapter_keeps_its_dtype_and_reports_the_rounding(dtype):
    adapter_files.write(make(dtype), "adapter", to="peft")
    report = resize_adapter("adapter", "small", energy=1.0, rank=5)
    after = adapter_files.read("small")
    assert {array.dtype for array in after.tensors.values()} == {dtype}
    # The rank of this cell was above what it could use, so nothing but rounding is lost.
    (wide,) = (cell for cell in report.cells if cell.path == "model.layers.1.attention.wv")
    assert wide.rank == 4 and 1e-5 < wide.error < 0.01


def test_cells_that_are_small_enough_are_copied_bit_for_bit(adapter):
    resize_adapter("adapter", "same", rank=64)
    after = adapter_files.read("same")
    # One cell's rank is above the smaller side of its weight, and so more than it can use.
    wide = "model.layers.1.attention.wv"
    assert after.rank(wide) == 4
    for key, array in adapter.tensors.items():
        assert key[0] == wide or array.tobytes() == after.tensors[key].tobytes()


def test_a_cell_without_any_change_keeps_rank_1():
    adapter = make()
    for path in SHAPES:
        adapter.tensors[path, "B"] = np.zeros_like(adapter.tensors[path, "B"])
    adapter_files.write(adapter, "zero", to="peft")
    assert {cell.ranks for cell in inspect_adapter("zero", energy=True).spectra} == {(0, 0, 0)}
    report = resize_adapter("zero", "small", energy=0.9)
    assert {cell.rank for cell in report.cells} == {1} and report.error == 0


def test_a_dtype_that_cannot_hold_the_smaller_rank_is_an_error():
    # A and B get equal norms, and A is the smaller one.
    halves = {("wq", "A"): np.full((2, 4), 6e4, np.float16), ("wq", "B"): np.full((900, 2), 6e4, np.float16)}
    with pytest.raises(NotFiniteError, match="A of wq would hold 3.29e.05, which is beyond float16"):
        resize(Adapter(halves, {"wq": 2.0}), rank=1)


def test_an_adapter_of_stable_diffusion_comes_out_in_diffusers_form(tmp_path):
    original = diffusion_adapters.make()
    adapter_files.write(original, "style.safetensors", to="kohya")
    report = resize_adapter("style.safetensors", "small", rank=2)
    found = adapter_files.read("small")
    assert found.dialect == "diffusers" and set(found.paths) == set(original.paths)
    assert {found.rank(path) for path in found.paths} == {2}
    for cell in report.cells:
        assert found.scale(cell.path) == original.scale(cell.path)


def test_what_cannot_be_resized_is_refused_and_nothing_is_written(adapter, tmp_path):
    with pytest.raises(ConfigError, match="give rank .*, energy .*, the share to keep, or both"):
        resize_adapter("adapter", "small")
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
            resize_adapter("adapter", "small", rank=wrong)
    for wrong in (0.0, 95, float("nan"), "0.9"):
        with pytest.raises(ConfigError, match="above 0 and at most 1, such as 0.95"):
            resize_adapter("adapter", "small", energy=wrong)
    path = "model.layers.0.attention.wq"
    for change, error, message in (
        ({(path, "A"): np.full((6, 24), np.nan, np.float32)}, NotFiniteError, "NaN or infinity"),
        ({("conv", "B"): np.ones((6, 3, 1, 1), np.float32)}, AdapterError, "with groups cannot be resized"),
    ):
        broken = make()
        broken.tensors.update(change)
        with pytest.raises(error, match=message):
            resize(broken, rank=2)
    dora = make()
    dora.tensors = {key: array for key, array in dora.tensors.items() if key[0] == path}
    dora.tensors[path, "magnitude"] = np.ones(17, np.float32)
    adapter_files.write(dora, "dora", to="peft")
    with pytest.raises(AdapterError, match="DoRA .*cannot be resized"):
        resize_adapter("dora", "small", rank=2)
    keys = {"A": "mindpet_delta_lora_a", "B": "mindpet_delta_lora_b"}
    save_file({f"{path}.{name}": adapter.tensors[path, half] for half, name in keys.items()}, "without.safetensors")
    with pytest.raises(ScaleMismatchError, match="lora_alpha"):
        resize_adapter("without.safetensors", "small", rank=2)
    assert not (tmp_path / "small").exists()
    assert inspect_adapter("without.safetensors", energy=True).spectra[0].singular_values is None
    resize_adapter("without.safetensors", "small", rank=2, alpha=4.0)
