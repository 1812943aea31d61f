"""Values of LoraConfig that are refused: each error has the field's name, its value and what it must be."""

import mindspore as ms
import pytest

from mindlora import LoraConfig, LoraError
from mindlora.core.errors import ConfigError


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"r": 16}, "LoraConfig has no field 'r'. Did you mean 'lora_rank'?"),
        *(
            (
                {"alora_invocation_tokens": value},
                f"alora_invocation_tokens is {value!r}: it must be a list of token numbers, those of the text from "
                "which on the adapter acts.",
            )
            for value in ([], 7, "7", [7.0], [True], [-1], {7: 1})
        ),
        *(
            (
                {"alora_invocation_tokens": [7], field: value},
                f"alora_invocation_tokens is set and {field} is {value!r}: {reason}. Leave one of them out.",
            )
            for field, value, reason in (
                ("use_dora", True, "only plain LoRA acts on some tokens alone"),
                ("use_vera", True, "only plain LoRA acts on some tokens alone"),
                ("modules_to_save", ["norm"], "they would change all tokens, those before the invocation too"),
                ("lora_init", "pissa", "it changes the base, or makes up for a change, for all tokens"),
            )
        ),
        *(
            (
                {"lora_init": "mica", field: value},
                f"lora_init is 'mica', which trains A alone, and {field} is {value!r}: {reason}. Leave one of them "
                "out.",
            )
            for field, value, reason in (
                ("freeze_lora_a", True, "nothing of the adapter would train"),
                ("use_dora", True, "only plain LoRA trains with a B that stays as it is"),
                ("alora_invocation_tokens", [7], "an adapter with a B that stays as it is acts on all tokens"),
            )
        ),
        (
            {"quantize_base": "nf4", "lora_init": "mica"},
            "quantize_base is 'nf4' and lora_init is 'mica': it needs the weight in float. Leave one of "
            "them out; for a quantized base there is lora_init: loftq.",
        ),
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
            "unterminated subpattern at position 0. Write, for example, .*wq.",
        ),
        (
            {"target_modules": "*wq"},
            "target_modules is '*wq', which is not a regular expression: nothing to repeat at position 0. Write, "
            "for example, .*wq.",
        ),
        ({"target_modules": []}, "target_modules is []: it must be a non-empty list of names."),
        ({"target_modules": 7}, "target_modules is 7: it must be a non-empty list of names."),
        ({"target_modules": {"wq": 1}}, "target_modules is {'wq': 1}: it must be a non-empty list of names."),
        ({"target_modules": ["wq", 3]}, "target_modules holds 3: each item must be a name."),
        ({"target_modules": ["wq", ""]}, "target_modules holds '': each item must be a name."),
        ({"exclude_modules": ""}, "exclude_modules is an empty string: name at least one linear cell."),
        (
            {"exclude_modules": "["},
            "exclude_modules is '[', which is not a regular expression: unterminated character set at position 0. "
            "Write, for example, .*wq.",
        ),
        ({"exclude_modules": []}, "exclude_modules is []: it must be a non-empty list of names."),
        ({"exclude_modules": [None]}, "exclude_modules holds None: each item must be a name."),
        ({"freeze_include": "lm_head*"}, "freeze_include is 'lm_head*': it must be a non-empty list of names."),
        ({"freeze_include": []}, "freeze_include is []: it must be a non-empty list of names."),
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
            "loftq, loftq_iter_N, mica, olora, orthogonal, pissa, pissa_niter_N.",
        ),
        (
            {"lora_init": True},
            "lora_init is True, which is not known. Known: gaussian, kaiming, loftq, loftq_iter_N, "
            "mica, olora, orthogonal, pissa, pissa_niter_N.",
        ),
        (
            {"lora_init": "loftq"},
            "lora_init is 'loftq', which makes up for the error of quantizing the base, but the base is "
            "not quantized. Set quantize_base: nf4, or use 'pissa'.",
        ),
        (
            {"lora_init": "loftq_iter_3"},
            "lora_init is 'loftq_iter_3', which makes up for the error of quantizing the base, "
            "but the base is not quantized. Set quantize_base: nf4, or use 'pissa'.",
        ),
        (
            {"lora_init": True, "quantize_base": "nf4"},
            "lora_init is True, which is not known. Known: gaussian, kaiming, "
            "loftq, loftq_iter_N, mica, olora, orthogonal, pissa, pissa_niter_N.",
        ),
        (
            {"lora_init": "gaussian", "lora_a_init": "normal"},
            "lora_init is 'gaussian' and lora_a_init is 'normal': both set the initial values. Keep one of them.",
        ),
        (
            {"lora_init": "kaiming", "lora_b_init": "ones"},
            "lora_init is 'kaiming' and lora_b_init is 'ones': both set the initial values. Keep one of them.",
        ),
        (
            {"lora_init": "pissa", "lora_b_init": "zeros"},
            "lora_init is 'pissa' and lora_b_init is 'zeros': both set the initial values. Keep one of them.",
        ),
        ({"freeze_lora_a": "True"}, "freeze_lora_a is 'True': it must be True or False."),
        (
            {"freeze_lora_a": True, "lora_a_init": "zeros", "lora_b_init": "ones"},
            "freeze_lora_a is True and lora_a_init is zeros: if A stays zero, B gets no gradient. Leave "
            "lora_a_init at its default.",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_name_and_value(fields, message):
    with pytest.raises(ConfigError) as error:
        LoraConfig(**fields)
    assert str(error.value) == message
    assert isinstance(error.value, LoraError) and isinstance(error.value, ValueError)


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
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head': it must be a non-empty list of names."),
    ],
)
def test_a_field_for_single_cells_that_is_wrong_is_refused(fields, message):
    with pytest.raises(ConfigError) as error:
        LoraConfig(**fields)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"d_initial": 0.1},
            "d_initial is 0.1, but use_vera is not set, so it has no effect. Set use_vera: True, or remove it.",
        ),
        ({"projection_prng_key": 0}, "projection_prng_key is 0, but use_vera is not set, so it has no effect."),
        ({"use_vera": 1}, "use_vera is 1: it must be True or False."),
        (
            {"use_vera": True, "use_dora": True},
            "use_vera is True and use_dora is True, which VeRA does not have. Leave one of them out.",
        ),
        (
            {"use_vera": True, "rank_pattern": {"wq": 2}},
            "use_vera is True and rank_pattern is {'wq': 2}, which VeRA does not",
        ),
        (
            {"use_vera": True, "lora_a_init": "normal"},
            "use_vera is True and lora_a_init is 'normal', which VeRA does not",
        ),
        (
            {"use_vera": True, "lora_alpha": 32},
            "use_vera is True and lora_alpha is 32: VeRA's trained vectors are its scale. Leave lora_alpha out.",
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


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"quantize_base": "nf5"}, "quantize_base is 'nf5', which is not known. Known: as_stored, nf4."),
        ({"quantize_base": True}, "quantize_base is True, which is not known. Known: as_stored, nf4."),
        ({"quantize_exclude": ["wq"]}, "quantize_exclude is ['wq'], but quantize_base is not set, so nothing is "),
        (
            {"quantize_base": "nf4", "quantize_exclude": []},
            "quantize_exclude is []: it must be a non-empty list of names",
        ),
        (
            {"quantize_base": "nf4", "lora_init": "pissa"},
            "quantize_base is 'nf4' and lora_init is 'pissa': it needs the "
            "weight in float. Leave one of them out; for a quantized base there is lora_init: loftq.",
        ),
        (
            {"lora_init": "loftq"},
            "lora_init is 'loftq', which makes up for the error of quantizing the base, but the base is "
            "not quantized. Set quantize_base: nf4, or use 'pissa'.",
        ),
    ],
)
def test_a_quantized_base_refuses_by_name(fields, message):
    for make in (
        lambda: LoraConfig(**fields),
        lambda: LoraConfig.from_pet_config({"pet_type": "lora", "target_modules": "all-linear", **fields}),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value).startswith(message)
