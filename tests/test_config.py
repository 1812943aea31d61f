"""LoraConfig: what it takes, and with which words it refuses the rest."""

import dataclasses
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore.common.initializer import Normal

from mindlora import LoraConfig, LoraError
from mindlora.config import PRESETS
from mindlora.errors import ConfigError

PET = {"pet_type": "lora", "target_modules": ".*wq"}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lora_rank": 0}, "lora_rank is 0: it must be a whole number of at least 1."),
        ({"lora_rank": -3}, "lora_rank is -3: it must be a whole number of at least 1."),
        ({"lora_rank": True}, "lora_rank is True: it must be a whole number of at least 1."),
        ({"lora_rank": 8.0}, "lora_rank is 8.0: it must be a whole number of at least 1."),
        ({"lora_rank": "8"}, "lora_rank is '8': it must be a whole number of at least 1."),
        ({"lora_rank": None}, "lora_rank is None: it must be a whole number of at least 1."),
        ({"lora_alpha": 0}, "lora_alpha is 0: it must be a number above 0."),
        ({"lora_alpha": -16}, "lora_alpha is -16: it must be a number above 0."),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan: it must be a number above 0."),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf: it must be a number above 0."),
        ({"lora_alpha": True}, "lora_alpha is True: it must be a number above 0."),
        ({"lora_alpha": "16"}, "lora_alpha is '16': it must be a number above 0."),
        ({"lora_dropout": -0.1}, "lora_dropout is -0.1: it must be a number in [0, 1)."),
        ({"lora_dropout": 1}, "lora_dropout is 1: it must be a number in [0, 1)."),
        ({"lora_dropout": 1.5}, "lora_dropout is 1.5: it must be a number in [0, 1)."),
        ({"lora_dropout": float("nan")}, "lora_dropout is nan: it must be a number in [0, 1)."),
        ({"lora_dropout": False}, "lora_dropout is False: it must be a number in [0, 1)."),
        ({"target_modules": ""}, "target_modules is an empty string: name at least one linear cell."),
        (
            {"target_modules": "(wq"},
            "target_modules is '(wq', which is not a regular expression: missing ), "
            "unterminated subpattern at position 0.",
        ),
        (
            {"target_modules": "*wq"},
            "target_modules is '*wq', which is not a regular expression: nothing to repeat at position 0.",
        ),
        ({"target_modules": []}, "target_modules is []: it must be a list of names that is not empty."),
        ({"target_modules": 7}, "target_modules is 7: it must be a list of names that is not empty."),
        ({"target_modules": {"wq": 1}}, "target_modules is {'wq': 1}: it must be a list of names that is not empty."),
        ({"target_modules": ["wq", 3]}, "target_modules holds 3: each item must be a name."),
        ({"target_modules": ["wq", ""]}, "target_modules holds '': each item must be a name."),
        ({"exclude_modules": ""}, "exclude_modules is an empty string: name at least one linear cell."),
        (
            {"exclude_modules": "["},
            "exclude_modules is '[', which is not a regular expression: unterminated character set at position 0.",
        ),
        ({"exclude_modules": []}, "exclude_modules is []: it must be a list of names that is not empty."),
        ({"exclude_modules": [None]}, "exclude_modules holds None: each item must be a name."),
        ({"freeze_include": "lm_head*"}, "freeze_include is 'lm_head*': it must be a list of names that is not empty."),
        ({"freeze_include": []}, "freeze_include is []: it must be a list of names that is not empty."),
        ({"freeze_exclude": [1]}, "freeze_exclude holds 1: each item must be a name."),
        ({"param_init_type": "float64"}, "param_init_type is 'float64': it must be one of float32, float16, bfloat16."),
        ({"param_init_type": None}, "param_init_type is None: it must be one of float32, float16, bfloat16."),
        (
            {"param_init_type": ms.int8},
            "param_init_type is mindspore.int8: it must be one of float32, float16, bfloat16.",
        ),
        ({"compute_dtype": "int8"}, "compute_dtype is 'int8': it must be one of float32, float16, bfloat16."),
        (
            {"lora_a_init": "zeros"},
            "lora_a_init and lora_b_init are both zeros: then no gradient ever reaches A or B. "
            "Keep lora_b_init 'zeros' and leave lora_a_init at its default.",
        ),
        (
            {"lora_a_init": "ZERO", "lora_b_init": "zero"},
            "lora_a_init and lora_b_init are both zeros: then no gradient "
            "ever reaches A or B. Keep lora_b_init 'zeros' and leave "
            "lora_a_init at its default.",
        ),
        (
            {"lora_init": "pisa"},
            "lora_init is 'pisa', which is not known. Did you mean 'pissa'? Known: gaussian, kaiming, "
            "loftq, loftq_iter_N, olora, orthogonal, pissa, pissa_niter_N.",
        ),
        (
            {"lora_init": True},
            "lora_init is True, which is not known. Known: gaussian, kaiming, loftq, loftq_iter_N, "
            "olora, orthogonal, pissa, pissa_niter_N.",
        ),
        (
            {"lora_init": "loftq"},
            "lora_init is 'loftq', which makes up for what quantizing the base loses, and the base is "
            "not quantized. Set quantize_base: nf4, or use 'pissa'.",
        ),
        (
            {"lora_init": "loftq_iter_3"},
            "lora_init is 'loftq_iter_3', which makes up for what quantizing the base loses, "
            "and the base is not quantized. Set quantize_base: nf4, or use 'pissa'.",
        ),
        (
            {"lora_init": True, "quantize_base": "nf4"},
            "lora_init is True, which is not known. Known: gaussian, kaiming, "
            "loftq, loftq_iter_N, olora, orthogonal, pissa, pissa_niter_N.",
        ),
        (
            {"lora_init": "gaussian", "lora_a_init": "normal"},
            "lora_init is 'gaussian' and lora_a_init 'normal': both say how the adapter starts. Keep one of them.",
        ),
        (
            {"lora_init": "kaiming", "lora_b_init": "ones"},
            "lora_init is 'kaiming' and lora_b_init 'ones': both say how the adapter starts. Keep one of them.",
        ),
        (
            {"lora_init": "pissa", "lora_b_init": "zeros"},
            "lora_init is 'pissa' and lora_b_init 'zeros': both say how the adapter starts. Keep one of them.",
        ),
        ({"freeze_lora_a": "True"}, "freeze_lora_a is 'True': it must be True or False."),
        (
            {"freeze_lora_a": True, "lora_a_init": "zeros", "lora_b_init": "ones"},
            "freeze_lora_a is True and lora_a_init zeros: an A that stays zero lets no gradient reach B. Leave lora_a_init at "
            "its default.",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_name_and_value(fields, message):
    with pytest.raises(ConfigError) as error:
        LoraConfig(**fields)
    assert str(error.value) == message
    assert isinstance(error.value, LoraError) and isinstance(error.value, ValueError)


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
def test_values_at_the_edge_of_what_is_right_are_taken(fields):
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
        "d_initial": None,
        "projection_prng_key": None,
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
def test_what_is_saved_of_a_start_that_changes_the_base(rslora):
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
        "Usual values are 8 to 64; the learning rate belongs in lr_schedule."
    ]
    assert caught[0].filename == __file__


def test_pet_config_becomes_fields():
    config = LoraConfig.from_pet_config(
        {
            "pet_type": "lora",
            "lora_rank": 4,
            "lora_alpha": 6,
            "lora_dropout": 0.1,
            "target_modules": ".*wq|.*wv",
            "exclude_modules": ["layers.0.attention.wq"],
            "quantize_base": "nf4",
            "quantize_exclude": ("w2",),
            "lora_a_init": "normal",
            "lora_b_init": "zeros",
            "param_init_type": "fp16",
            "compute_dtype": "float16",
            "freeze_include": ["a"],
            "freeze_exclude": ["b"],
            "use_rslora": True,
            "freeze_lora_a": True,
            "rank_pattern": {"wv": 2},
            "alpha_pattern": {"wq": 1.5},
            "layers_to_transform": (0, 1),
            "modules_to_save": ("lm_head",),
        }
    )
    assert config.to_dict() == {
        "lora_rank": 4,
        "lora_alpha": 6,
        "lora_dropout": 0.1,
        "target_modules": ".*wq|.*wv",
        "exclude_modules": ["layers.0.attention.wq"],
        "quantize_base": "nf4",
        "quantize_exclude": ["w2"],
        "lora_init": None,
        "lora_a_init": "normal",
        "lora_b_init": "zeros",
        "param_init_type": "float16",
        "compute_dtype": "float16",
        "freeze_include": ["a"],
        "freeze_exclude": ["b"],
        "use_rslora": True,
        "use_dora": False,
        "use_vera": False,
        "d_initial": None,
        "projection_prng_key": None,
        "freeze_lora_a": True,
        "rank_pattern": {"wv": 2},
        "alpha_pattern": {"wq": 1.5},
        "layers_to_transform": [0, 1],
        "modules_to_save": ["lm_head"],
    }


def test_pet_config_is_left_as_it_was_and_its_tuples_become_lists():
    given = {**PET, "target_modules": ("wq", "wv"), "preset": "small_dataset", "exclude_layers": ("lm_head",)}
    before = dict(given)
    config = LoraConfig.from_pet_config(given)
    assert given == before
    assert (config.target_modules, config.exclude_modules) == (["wq", "wv"], ["lm_head"])


def test_a_key_without_a_value_counts_as_not_given():
    config = LoraConfig.from_pet_config({**PET, "lora_rank": None, "preset": None, "exclude_layers": None})
    assert config == LoraConfig(target_modules=".*wq")


def test_an_unknown_key_is_refused_with_the_nearest_known_one():
    with pytest.raises(ConfigError) as error:
        LoraConfig.from_pet_config({**PET, "lora_rnak": 8})
    assert str(error.value) == (
        "pet_config has an unknown key 'lora_rnak'. Did you mean 'lora_rank'? Known: alpha_pattern, compute_dtype, "
        "d_initial, exclude_layers, exclude_modules, freeze_exclude, freeze_include, freeze_lora_a, "
        "layers_to_transform, lora_a_init, lora_alpha, lora_b_init, lora_dropout, lora_init, lora_rank, "
        "modules_to_save, param_init_type, pet_type, preset, projection_prng_key, quantize_base, quantize_exclude, "
        "rank_pattern, target_modules, use_dora, use_rslora, use_vera."
    )


@pytest.mark.parametrize(
    "key, meant",
    [
        ("lora_aplha", "lora_alpha"),
        ("target_module", "target_modules"),
        ("exclude_layer", "exclude_layers"),
        ("dropout", "lora_dropout"),
    ],
)
def test_the_suggestion_is_the_key_that_was_meant(key, meant):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'. Did you mean '{meant}'"):
        LoraConfig.from_pet_config({**PET, key: 1})


def test_a_key_like_no_other_gets_no_suggestion():
    with pytest.raises(ConfigError) as error:
        LoraConfig.from_pet_config({**PET, "zzz": 1})
    assert "Did you mean" not in str(error.value) and "'zzz'. Known: alpha_pattern" in str(error.value)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_sets_rank_alpha_and_dropout(name):
    config = LoraConfig.from_pet_config({**PET, "preset": name})
    assert (config.lora_rank, config.lora_alpha, config.lora_dropout) == {
        "small_dataset": (8, 32, 0.2),
        "large_dataset": (16, 64, 0.05),
    }[name]


def test_keys_beside_a_preset_override_it():
    config = LoraConfig.from_pet_config({**PET, "preset": "large_dataset", "lora_rank": 4, "lora_dropout": 0.0})
    assert (config.lora_rank, config.lora_alpha, config.lora_dropout) == (4, 64, 0.0)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError) as error:
        LoraConfig.from_pet_config({**PET, "preset": "small_datset"})
    assert str(error.value) == (
        "preset is 'small_datset', which is not known. Did you mean 'small_dataset'? "
        "Known: large_dataset, small_dataset."
    )


@pytest.mark.parametrize(
    "pet_type, message",
    [
        ("lroa", "pet_type is 'lroa', which is not known. Did you mean 'lora'? Known: lora, qlora."),
        ("LoRA", "pet_type is 'LoRA', which is not known. Known: lora, qlora."),
        ("adalora", "pet_type is 'adalora', which is not known. Did you mean 'lora'? Known: lora, qlora."),
        (3, "pet_type is 3, which is not known. Known: lora, qlora."),
    ],
)
def test_another_pet_type_is_refused(pet_type, message):
    with pytest.raises(ConfigError) as error:
        LoraConfig.from_pet_config({**PET, "pet_type": pet_type})
    assert str(error.value) == message


@pytest.mark.parametrize("more", [{}, {"quantize_base": None}, {"quantize_base": "nf4"}, {"quantize_exclude": ["w2"]}])
def test_qlora_is_lora_on_a_base_in_nf4(more):
    given = {**PET, "pet_type": "qlora", **more}
    config = LoraConfig.from_pet_config(given)
    assert config == LoraConfig.from_pet_config({**PET, **more, "quantize_base": "nf4"})
    assert given["pet_type"] == "qlora" and given.get("quantize_base") == more.get("quantize_base")


def test_qlora_on_another_base_is_refused():
    with pytest.raises(ConfigError, match="^quantize_base is 'int8', which is not known. Known: nf4.$"):
        LoraConfig.from_pet_config({**PET, "pet_type": "qlora", "quantize_base": "int8"})


def test_exclude_layers_is_the_older_name_of_exclude_modules():
    assert LoraConfig.from_pet_config({**PET, "exclude_layers": ["lm_head"]}).exclude_modules == ["lm_head"]
    with pytest.raises(ConfigError) as error:
        LoraConfig.from_pet_config({**PET, "exclude_layers": ["lm_head"], "exclude_modules": ["lm_head"]})
    assert str(error.value) == (
        "pet_config has both exclude_layers and exclude_modules: keep exclude_modules, "
        "exclude_layers is its older name."
    )


@pytest.mark.parametrize("target_modules", [{}, {"target_modules": None}])
def test_target_modules_must_be_there(target_modules):
    with pytest.raises(ConfigError) as error:
        LoraConfig.from_pet_config({"pet_type": "lora", **target_modules})
    assert str(error.value) == (
        "pet_config has no target_modules: name the linear cells that get an adapter, "
        "for instance '.*wq|.*wk|.*wv|.*wo' or 'all-linear'."
    )


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
def test_patterns_match_a_path_from_a_dot_on(path, rank, alpha):
    config = LoraConfig(
        lora_rank=8,
        lora_alpha=16,
        rank_pattern={r"layers\.0\.attention\.wq": 4, "v_proj": 2, "wv": 3},
        alpha_pattern={"attention.wv": 5, r".*\.w2": 7},
    )
    cell = config.for_cell(path)
    assert (cell.lora_rank, cell.lora_alpha) == (rank, alpha)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"use_rslora": 1}, "use_rslora is 1: it must be True or False."),
        ({"rank_pattern": ["wq"]}, "rank_pattern is ['wq']: it must map regular expressions on paths to values."),
        ({"rank_pattern": {"(": 4}}, "rank_pattern holds '(', which is not a regular expression: "),
        ({"rank_pattern": {3: 4}}, "rank_pattern holds 3, which is not a regular expression: "),
        ({"rank_pattern": {"wq": 0}}, "rank_pattern['wq'] is 0: it must be a whole number of at least 1."),
        ({"rank_pattern": {"wq": 1.5}}, "rank_pattern['wq'] is 1.5: it must be a whole number of at least 1."),
        ({"alpha_pattern": {"wq": -1}}, "alpha_pattern['wq'] is -1: it must be a number above 0."),
        ({"layers_to_transform": []}, "layers_to_transform is an empty list: name at least one layer, or leave it out"),
        ({"layers_to_transform": -1}, "layers_to_transform is -1: it must be a layer number, or a list of them."),
        (
            {"layers_to_transform": [0, "1"]},
            "layers_to_transform is '1': it must be a layer number, or a list of them.",
        ),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head': it must be a list of names that is not empty."),
    ],
)
def test_a_field_for_single_cells_that_is_wrong_is_refused(fields, message):
    with pytest.raises(ConfigError) as error:
        LoraConfig(**fields)
    assert str(error.value).startswith(message)


# VeRA -----------------------------------------------------------------------------------------------------------


def test_vera_fills_in_what_it_starts_from():
    config = LoraConfig(lora_rank=256, use_vera=True)
    assert (config.d_initial, config.projection_prng_key, config.scale) == (0.1, 0, 1)
    # As a copy of it is made, for a cell or a saved adapter.
    assert dataclasses.replace(config, lora_rank=256) == config
    config = LoraConfig(lora_rank=4, use_vera=True, d_initial=-1, projection_prng_key=7)
    assert (config.d_initial, config.projection_prng_key) == (-1, 7)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"d_initial": 0.1},
            "d_initial is 0.1, and use_vera is not set, so nothing is made from it. Set use_vera: True, or remove it.",
        ),
        ({"projection_prng_key": 0}, "projection_prng_key is 0, and use_vera is not set, so nothing is made from it."),
        ({"use_vera": 1}, "use_vera is 1: it must be True or False."),
        (
            {"use_vera": True, "use_dora": True},
            "use_vera is True and use_dora True, which VeRA does not have. Leave one of them out.",
        ),
        (
            {"use_vera": True, "rank_pattern": {"wq": 2}},
            "use_vera is True and rank_pattern {'wq': 2}, which VeRA does not",
        ),
        ({"use_vera": True, "lora_a_init": "normal"}, "use_vera is True and lora_a_init 'normal', which VeRA does not"),
        ({"use_vera": True, "quantize_base": "nf4"}, "use_vera is True and quantize_base 'nf4', which VeRA does not"),
        (
            {"use_vera": True, "lora_alpha": 32},
            "use_vera is True and lora_alpha 32: VeRA's trained vectors are its scale. Leave lora_alpha out.",
        ),
        (
            {"use_vera": True, "d_initial": 0},
            "d_initial is 0: it must be a number other than 0: from 0, no gradient reaches VeRA's vectors.",
        ),
        ({"use_vera": True, "d_initial": float("nan")}, "d_initial is nan: it must be a number other than 0"),
        (
            {"use_vera": True, "projection_prng_key": True},
            "projection_prng_key is True: it must be a whole number from 0",
        ),
        ({"use_vera": True, "projection_prng_key": -1}, "projection_prng_key is -1: it must be a whole number from 0"),
    ],
)
def test_vera_refuses_by_name(fields, message):
    with pytest.raises(ConfigError) as error:
        LoraConfig(**fields)
    assert str(error.value).startswith(message)
