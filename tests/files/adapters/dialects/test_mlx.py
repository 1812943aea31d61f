"""mlx-lm's adapters: transposed matrices, a scale instead of alpha, and never taken for slora's by shapes alone."""

import json

import numpy as np
import pytest

from mindlora.core.errors import (
    AdapterError,
    AdapterFormatError,
    MissingTensorsError,
    RankMismatchError,
    UnexpectedTensorsError,
)
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.convert import convert_adapter
from mindlora.files.adapters.dialects import peft_config
from tests.support.adapter_samples import Q
from tests.support.diffusion_adapters import saved

NAME = "model.layers.0.self_attn.q_proj"
CONFIG = {
    "fine_tune_type": "lora",
    "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.1},
    "model": "mlx-community/Qwen2.5-0.5B-Instruct-4bit",
    "num_layers": 16,
}


def matrices(rank=2, ends=(6, 6)):
    rng = np.random.default_rng(0)
    return rng.normal(size=(ends[0], rank)).astype(np.float32), rng.normal(size=(rank, ends[1])).astype(np.float32)


def folder(tmp_path, config=None, name=NAME, **tensors):
    a, b = matrices()
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG if config is None else config))
    saved(tmp_path / "adapters.safetensors", {f"{name}.lora_a": a, f"{name}.lora_b": b, **tensors})
    return str(tmp_path)


def test_a_square_cell_is_read_as_mlx_computes_it(tmp_path):
    a, b = matrices()
    found = adapter_files.read(folder(tmp_path))
    assert (found.paths, found.dialect, found.dropout) == ([Q], "mlx-lm", 0.1)
    assert found.base_model == CONFIG["model"]
    # y = x W^T + scale (x a) b
    np.testing.assert_allclose(found.delta(Q), 20.0 * (a.astype("f8") @ b).T, rtol=0, atol=1e-5)
    assert found.tensors[Q, "A"].tobytes() == a.T.tobytes() and found.rank(Q) == 2


def test_a_checkpoint_of_the_run_and_a_conversion(tmp_path):
    path = folder(tmp_path / "in")
    (tmp_path / "in" / "adapters.safetensors").rename(tmp_path / "in" / "0000100_adapters.safetensors")
    report = convert_adapter(f"{path}/0000100_adapters.safetensors", str(tmp_path / "out"), "peft")
    assert (report.dialect, report.ranks, report.alphas) == ("mlx-lm", (2,), (40.0,))
    assert adapter_files.read(str(tmp_path / "out")).scale(Q) == 20.0


def test_an_alpha_of_older_versions_counts(tmp_path):
    config = {**CONFIG, "lora_parameters": {"rank": 2, "alpha": 16, "scale": 10.0, "dropout": 0.0}}
    assert adapter_files.read(folder(tmp_path, config)).scale(Q) == 10.0 * (16 / 2)


def test_dora_and_embeddings(tmp_path):
    dora = folder(
        tmp_path / "a", {**CONFIG, "fine_tune_type": "dora"}, **{f"{NAME}.m": np.arange(1, 7, dtype=np.float32)}
    )
    assert list(adapter_files.read(dora).row_norms(Q)) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(MissingTensorsError, match="fine_tune_type is 'dora', but the file holds no magnitudes"):
        adapter_files.read(folder(tmp_path / "b", {**CONFIG, "fine_tune_type": "dora"}))
    a, b = matrices(ends=(9, 6))
    embedding = {"model.embed_tokens.lora_a": a, "model.embed_tokens.lora_b": b}
    found = adapter_files.read(folder(tmp_path / "c", **embedding))
    np.testing.assert_allclose(found.delta("model.tok_embeddings"), 20.0 * (a @ b), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"fine_tune_type": "full"}, AdapterFormatError, "fine_tune_type is 'full', so there is no LoRA in it"),
        ({"lora_parameters": {"rank": 2}}, AdapterFormatError, r"lora_parameters\.scale of mlx-lm's .* is None"),
        ({"lora_parameters": {"rank": 4, "scale": 1.0}}, RankMismatchError, "rank 4, but the tensors have 2"),
        ({"lora_parameters": {"rank": 2, "scale": 1.0, "dropout": 1}}, AdapterFormatError, "dropout of mlx-lm's"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        adapter_files.read(folder(tmp_path, {**CONFIG, **change}))


def test_a_file_without_tensors_holds_no_adapter(tmp_path):
    path = folder(tmp_path)
    saved(tmp_path / "adapters.safetensors", {})
    with pytest.raises(AdapterFormatError, match="holds no LoRA tensor. It holds: nothing"):
        adapter_files.read(path)


def test_experts_and_whole_weights_are_refused(tmp_path):
    stacks = {f"model.experts.lora_{half}": np.ones((3, 2, 2), np.float32) for half in "ab"}
    with pytest.raises(AdapterFormatError, match=r"stacked experts, .*: model\.experts"):
        adapter_files.read(folder(tmp_path / "a", **stacks))
    with pytest.raises(UnexpectedTensorsError, match=r"mlx-lm trained in full: model\.norm\.weight"):
        adapter_files.read(folder(tmp_path / "b", **{"model.norm.weight": np.ones(6, np.float32)}))


def test_without_its_configuration_names_and_shapes_that_fit_two_forms_are_an_error(tmp_path):
    a, b = matrices()
    path = saved(tmp_path / "x.safetensors", {f"{NAME}.lora_a": a, f"{NAME}.lora_b": b})
    with pytest.raises(
        AdapterFormatError, match=r"can be mlx-lm's \(A \[in, r\]\) or MindFormers' slora's \(A \[r, in\]\)"
    ):
        adapter_files.read(path)
    # One cell that is not square tells; its names alone do not say lora_alpha.
    wide_a, wide_b = matrices(ends=(6, 9))
    wide = {"model.layers.0.mlp.up_proj.lora_a": wide_a, "model.layers.0.mlp.up_proj.lora_b": wide_b}
    found = adapter_files.read(saved(tmp_path / "y.safetensors", {f"{NAME}.lora_a": a, f"{NAME}.lora_b": b, **wide}))
    assert found.dialect == "mlx-lm" and found.rank(Q) == 2 and found.alphas == {}
    assert found.tensors[Q, "B"].tobytes() == b.T.tobytes()
    turned = {
        key: np.ascontiguousarray(array.T) for key, array in {**wide, f"{NAME}.lora_a": a, f"{NAME}.lora_b": b}.items()
    }
    assert adapter_files.read(saved(tmp_path / "z.safetensors", turned)).dialect == "MindFormers' slora"


def test_names_of_mindformers_are_slora_s_whatever_the_shapes(tmp_path):
    a, b = matrices()
    found = adapter_files.read(saved(tmp_path / "x.safetensors", {f"{Q}.lora_a": a.T, f"{Q}.lora_b": b.T}))
    assert found.dialect == "MindFormers' slora" and found.rank(Q) == 2


def test_its_configuration_is_named_where_peft_s_is_wanted(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(AdapterFormatError, match=r"is mlx-lm's configuration, not PEFT's\. Give its folder"):
        peft_config.read(str(tmp_path / "adapter_config.json"))
    with pytest.raises(AdapterError, match=r"holds no adapter_model\.safetensors"):
        adapter_files.read(str(tmp_path))
