"""KaSA's adapters: what they add to a base, against NumPy, and damaged ones. tests/peers has PEFT's own."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mindlora.core.errors import ShapeMismatchError, UnexpectedTensorsError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import initial_pairs
from mindlora.files.adapters.dialects.peft_config import Extras

RANK, ALPHA, OUT, IN = 2, 6, 5, 4
NAME = "base_model.model.model.layers.0.self_attn.q_proj.{}"
Q = "model.layers.0.attention.wq"
CONFIG = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "kasa_config": {"beta": 1e-4}}
A, B, DIAGONAL = NAME.format("lora_A.weight"), NAME.format("lora_B.weight"), NAME.format("lora_diag")


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    shapes = {A: (RANK, IN), B: (OUT, RANK), DIAGONAL: (RANK,)}
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}


def read(folder, tensors, config=CONFIG, **extras):
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return adapter_files.read(str(folder), extras=Extras(**{"initial_pairs": True, **extras}))


def test_the_smallest_singular_values_go_and_the_diagonal_is_in_b(tmp_path, tensors):
    weight = np.random.default_rng(1).normal(size=(OUT, IN)).astype(np.float32)
    adapter = read(tmp_path, tensors)
    initial_pairs.complete(adapter, initial_pairs.Base({Q}, {Q: weight}.__getitem__, lambda path: (None, None)))
    assert adapter.rank(Q) == 2 * RANK and adapter.initializer is adapter.initialization is None
    u, s, vt = np.linalg.svd(weight, full_matrices=False)
    kept = u[:, :-RANK] * s[:-RANK] @ vt[:-RANK]
    expected = kept + ALPHA / RANK * tensors[B] @ np.diag(tensors[DIAGONAL]) @ tensors[A]
    np.testing.assert_allclose(weight + adapter.delta(Q), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({DIAGONAL: None}, UnexpectedTensorsError, "holds one of lora_diag and lora_B of .*q_proj alone"),
        (
            {NAME.replace("q_", "v_").format("lora_diag"): np.ones(2, np.float32)},
            UnexpectedTensorsError,
            "v_proj alone",
        ),
        ({DIAGONAL: np.ones(3, np.float32)}, ShapeMismatchError, r"lora_diag is \[3\], and .*lora_B.weight \[5, 2\]"),
    ],
)
def test_damaged_files(change, error, message, tmp_path, tensors):
    kept = {key: array for key, array in {**tensors, **change}.items() if array is not None}
    with pytest.raises(error, match=message):
        read(tmp_path, kept)


def test_a_diagonal_that_the_configuration_does_not_declare_is_refused(tmp_path, tensors):
    with pytest.raises(UnexpectedTensorsError, match="not LoRA's: .*q_proj.lora_diag"):
        read(tmp_path, tensors, {**CONFIG, "kasa_config": None})


def test_inspect_says_what_it_is(tmp_path, tensors):
    refusals = []
    read(tmp_path, tensors, initial_pairs=False, refusals=refusals)
    assert "so the adapter belongs to a base without its smallest singular values" in refusals[0]
