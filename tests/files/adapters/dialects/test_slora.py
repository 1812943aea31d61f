"""The folder that MindFormers' slora serves from: one lora_alpha / r for all pairs, whatever their own ones are."""

import json
import math

import numpy as np
import pytest

from mindlora.core.errors import AdapterError, RankMismatchError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32, to_float32
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft_config, slora
from mindlora.files.adapters.dialects.dialect import File

Q, V = "model.layers.0.attention.wq", "model.layers.0.attention.wv"

FILE = File("folder", [], {}.__getitem__, {})


def adapter(ranks=(2, 2), alphas=(4, 4), dtype=np.float32, **fields):
    rng = np.random.default_rng(0)
    tensors = {
        (path, half): from_float32(rng.normal(size=(rank, 6) if half == "A" else (5, rank)).astype(np.float32), dtype)
        for path, rank in zip((Q, V), ranks)
        for half in "AB"
    }
    return Adapter(tensors, dict(zip((Q, V), map(float, alphas))), **fields)


def served(tensors, config):
    """What slora adds to W, by path: (lora_alpha / r) B A, in float64; it knows neither rslora nor patterns."""
    return {
        path: config["lora_alpha"]
        / config["r"]
        * to_float32(tensors[f"{path}.lora_b"]).astype(np.float64)
        @ to_float32(tensors[f"{path}.lora_a"]).astype(np.float64)
        for path in (Q, V)
    }


def meant(own):
    return {
        path: own.scale(path)
        * to_float32(own.tensors[path, "B"]).astype(np.float64)
        @ to_float32(own.tensors[path, "A"]).astype(np.float64)
        for path in (Q, V)
    }


@pytest.mark.parametrize(
    "ranks, alphas, rslora",
    [
        ((2, 2), (4, 4), False),
        ((2, 2), (4, 6), False),
        ((2, 4), (4, 4), False),
        ((4, 2), (7, 3), False),
        ((4, 4), (6, 6), True),
        ((4, 1), (6, 6), True),
    ],
)
@pytest.mark.parametrize("dtype, tolerance", [("<f4", 1e-6), ("<f2", 2e-3), (BFLOAT16, 2e-2)])
def test_what_is_served_is_what_was_trained(ranks, alphas, rslora, dtype, tolerance):
    own = adapter(ranks, alphas, np.dtype(dtype), use_rslora=rslora)
    tensors, config = slora.tensors(own), slora.config(own)
    assert set(tensors) == {f"{path}.lora_{half}" for path in (Q, V) for half in "ab"}
    assert all(array.dtype == np.dtype(dtype) for array in tensors.values())
    for path, delta in served(tensors, config).items():
        np.testing.assert_allclose(delta, meant(own)[path], rtol=0, atol=tolerance * np.abs(meant(own)[path]).max())


def test_where_all_scales_are_one_the_tensors_stay_bit_for_bit():
    own = adapter(alphas=(5, 5), dtype=BFLOAT16)
    for (path, half), array in own.tensors.items():
        assert slora.tensors(own)[f"{path}.lora_{half.lower()}"].tobytes() == array.tobytes()


def test_config_is_what_slora_takes():
    config = slora.config(adapter((4, 2), (16, 8), dropout=0, base_model="meta-llama/Llama-2-7b"))
    assert config == {
        "base_model_name_or_path": "meta-llama/Llama-2-7b",
        "bias": "none",
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": 4,
        "use_rslora": False,
        "target_modules": ["wq", "wv"],
        "task_type": "CAUSAL_LM",
    }
    # slora checks the types: an int for lora_alpha, a float for the dropout.
    assert type(config["lora_alpha"]) is int and type(config["lora_dropout"]) is float
    # With rslora the scale is lora_alpha / 2 at rank 4, so the lora_alpha of a plain scale is twice as large.
    assert slora.config(adapter((4, 4), (16, 16), use_rslora=True))["lora_alpha"] == 32


def test_an_alpha_that_is_not_an_integer_is_refused():
    with pytest.raises(AdapterError) as error:
        slora.config(adapter(alphas=(2.5, 2.5)))
    assert str(error.value) == "slora takes an integer lora_alpha, but at rank 2 it is 2.5 here. Write another format."


def test_saved_modules_are_refused():
    with pytest.raises(AdapterError) as error:
        slora.tensors(adapter(saved_modules={"lm_head.weight": np.zeros((2, 2), np.float32)}))
    assert (
        str(error.value)
        == "slora does not serve saved modules (modules_to_save): lm_head.weight. Write another format."
    )


@pytest.mark.parametrize("rslora", [False, True])
def test_alphas_that_are_read_give_each_pair_the_one_scale(tmp_path, rslora):
    own = adapter((4, 1), use_rslora=rslora)
    (tmp_path / "c.json").write_text(json.dumps({"r": 4, "lora_alpha": 6, "use_rslora": rslora}))
    slora.Slora().configure(own, peft_config.read(str(tmp_path / "c.json")), FILE)
    for path in (Q, V):
        assert own.scale(path) == pytest.approx(6 / math.sqrt(4) if rslora else 6 / 4, rel=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_a_rank_that_no_pair_has_is_refused(tmp_path, rank):
    own = adapter((4, 2))
    (tmp_path / "c.json").write_text(json.dumps({"r": rank, "lora_alpha": 6}))
    with pytest.raises(RankMismatchError) as error:
        slora.Slora().configure(own, peft_config.read(str(tmp_path / "c.json")), FILE)
    assert str(error.value) == (
        f"folder: the configuration declares rank {rank} and the tensors have 4. Use the configuration that was saved "
        "with the tensors."
    )
