"""pet_config of a YAML read into LoraConfig: keys, presets, pet_type, and what is refused."""

import pytest

from mindlora import LoraConfig
from mindlora.core.errors import ConfigError
from mindlora.models.lora_config import PRESETS

PET = {"pet_type": "lora", "target_modules": ".*wq"}


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
        "target_parameters": None,
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
        "pet_config has an unknown key 'lora_rnak'. Did you mean 'lora_rank'? Known: alora_invocation_tokens, "
        "alpha_pattern, beta1, beta2, "
        "compute_dtype, d_initial, deltaT, exclude_layers, exclude_modules, freeze_exclude, freeze_include, "
        "freeze_lora_a, init_r, layers_to_transform, lora_a_init, lora_alpha, lora_b_init, lora_dropout, lora_init, "
        "lora_rank, modules_to_save, orth_reg_weight, param_init_type, pet_type, preset, projection_prng_key, "
        "quantize_base, quantize_exclude, rank_pattern, target_modules, target_parameters, target_r, tfinal, tinit, "
        "use_adalora, use_dora, use_miss, use_rslora, use_vera."
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
    assert "Did you mean" not in str(error.value) and "'zzz'. Known: alora_invocation_tokens" in str(error.value)


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


@pytest.mark.parametrize("field", ["use_vera", "use_miss"])
def test_the_alpha_of_a_preset_is_not_for_a_variant_without_a_scale(field):
    config = LoraConfig.from_pet_config({**PET, "preset": "small_dataset", field: True})
    assert (config.lora_rank, config.lora_alpha, config.lora_dropout, config.scale) == (8, 8, 0.2, 1.0)
    with pytest.raises(ConfigError, match=f"{field} is True and lora_alpha is 32: .* Leave lora_alpha out."):
        LoraConfig.from_pet_config({**PET, "preset": "small_dataset", field: True, "lora_alpha": 32})


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
        ("LoRA", "pet_type is 'LoRA', which is not known. Did you mean 'lora'? Known: lora, qlora."),
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
    with pytest.raises(ConfigError, match="^quantize_base is 'int8', which is not known. Known: as_stored, nf4.$"):
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
