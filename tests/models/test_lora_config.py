"""LoraConfig: the values that it accepts, its defaults, its scale, and its settings for single cells."""

import dataclasses
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore.common.initializer import Normal

from mindlora import LoraConfig


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_rank": 1},
        {"lora_rank": 4096},
        {"lora_alpha": 1},
        {"lora_alpha": 2.5},
        {"lora_dropout": 0},
        {"lora_dropout": 0.999},
        {"target_modules": "wq|wk"},
        {"target_modules": ["wq"]},
        {"target_modules": ("wq",)},
        {"exclude_modules": ["lm_head"]},
        {"freeze_include": ["*norm*"]},
        {"freeze_exclude": ("lm_head.weight",)},
        {"lora_a_init": "normal"},
        {"lora_a_init": Normal(0.1)},
        {"lora_a_init": "zeros", "lora_b_init": "ones"},
        {"lora_a_init": ms.Tensor(np.ones((8, 4), np.float32))},
        {"lora_init": "pissa_niter_16"},
        {"lora_init": "olora"},
        {"lora_init": "kaiming", "lora_a_init": "kaiming_uniform", "lora_b_init": "zero"},
        {"lora_init": "gaussian", "lora_b_init": "zeros"},
        {"lora_init": "orthogonal", "freeze_lora_a": True},
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(fields):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = LoraConfig(**fields)
    for field, value in fields.items():
        assert getattr(config, field) is value


@pytest.mark.parametrize(
    "given, kept",
    [
        ("float32", "float32"),
        ("fp32", "float32"),
        ("FP16", "float16"),
        ("float16", "float16"),
        ("bf16", "bfloat16"),
        ("BFloat16", "bfloat16"),
        (ms.float32, "float32"),
        (ms.float16, "float16"),
        (ms.bfloat16, "bfloat16"),
    ],
)
def test_dtypes_are_taken_by_any_of_their_names(given, kept):
    config = LoraConfig(param_init_type=given, compute_dtype=given)
    assert (config.param_init_type, config.compute_dtype) == (kept, kept)


def test_defaults_are_those_of_the_documentation():
    config = LoraConfig()
    assert config.to_dict() == {
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": None,
        "target_parameters": None,
        "exclude_modules": None,
        "quantize_base": None,
        "quantize_exclude": None,
        "lora_init": None,
        "lora_a_init": None,
        "lora_b_init": None,
        "param_init_type": "float32",
        "compute_dtype": None,
        "use_rslora": False,
        "use_dora": False,
        "use_vera": False,
        "use_miss": False,
        "d_initial": None,
        "projection_prng_key": None,
        "use_adalora": False,
        "init_r": None,
        "target_r": None,
        "tinit": None,
        "tfinal": None,
        "deltaT": None,
        "beta1": None,
        "beta2": None,
        "orth_reg_weight": None,
        "alora_invocation_tokens": None,
        "freeze_lora_a": False,
        "rank_pattern": None,
        "alpha_pattern": None,
        "layers_to_transform": None,
        "modules_to_save": None,
        "freeze_include": None,
        "freeze_exclude": None,
    }


@pytest.mark.parametrize("rank, alpha, scale", [(8, 16, 2.0), (16, 8, 0.5), (3, 7, 7 / 3)])
def test_scale_is_alpha_by_rank(rank, alpha, scale):
    assert LoraConfig(lora_rank=rank, lora_alpha=alpha).scale == scale


@pytest.mark.parametrize("rslora", [False, True])
def test_what_is_saved_of_an_initialization_that_changes_the_base(rslora):
    config = LoraConfig(
        lora_rank=4,
        lora_alpha=6,
        lora_init="pissa",
        use_rslora=rslora,
        target_modules="wq",
        rank_pattern={"wq": 3},
        alpha_pattern={"wv": 5},
    )
    saved = config.as_saved()
    assert saved.lora_rank == 8 and saved.rank_pattern == {"wq": 6} and saved.lora_init is None
    for path in ("a.wq", "a.wv", "a.wo"):
        assert saved.for_cell(path).scale == pytest.approx(config.for_cell(path).scale, rel=1e-15)
    assert config.lora_rank == 4 and config.rank_pattern == {"wq": 3}
    plain = LoraConfig(lora_init="gaussian")
    assert plain.as_saved() is plain and LoraConfig(lora_init="olora").as_saved().rank_pattern is None


def test_an_alpha_below_one_warns_and_points_at_the_caller():
    with pytest.warns(UserWarning) as caught:
        LoraConfig(lora_rank=8, lora_alpha=1e-4)
    assert [str(warning.message) for warning in caught] == [
        "lora_alpha is 0.0001, which looks like a learning rate: the scale lora_alpha / lora_rank becomes 1.25e-05. "
        "Use a value such as 8 to 64, and set the learning rate in lr_schedule."
    ]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("rank, alpha, scale", [(16, 16, 4.0), (9, 6, 2.0), (2, 3, 3 / 2**0.5)])
def test_rslora_divides_by_the_root_of_the_rank(rank, alpha, scale):
    assert LoraConfig(lora_rank=rank, lora_alpha=alpha, use_rslora=True).scale == scale


@pytest.mark.parametrize(
    "path, rank, alpha",
    [
        ("model.layers.0.attention.wq", 4, 16),
        ("model.layers.10.attention.wq", 8, 16),
        ("model.layers.3.attention.wv", 2, 5),
        ("model.layers.3.feed_forward.w2", 8, 7),
        ("lm_head", 8, 16),
        ("my_wv", 8, 16),
    ],
)
def test_patterns_match_a_path_from_a_dot_onwards(path, rank, alpha):
    config = LoraConfig(
        lora_rank=8,
        lora_alpha=16,
        rank_pattern={r"layers\.0\.attention\.wq": 4, "v_proj": 2, "wv": 3},
        alpha_pattern={"attention.wv": 5, r".*\.w2": 7},
    )
    cell = config.for_cell(path)
    assert (cell.lora_rank, cell.lora_alpha) == (rank, alpha)


def test_vera_fills_in_its_initial_values_and_its_seed():
    config = LoraConfig(lora_rank=256, use_vera=True)
    assert (config.d_initial, config.projection_prng_key, config.scale) == (0.1, 0, 1)
    # Copies like this one are made for a cell or a saved adapter.
    assert dataclasses.replace(config, lora_rank=256) == config
    config = LoraConfig(lora_rank=4, use_vera=True, d_initial=-1, projection_prng_key=7)
    assert (config.d_initial, config.projection_prng_key) == (-1, 7)
