"""LoraConfig's AdaLoRA: PEFT's defaults, presets, and what it cannot be combined with."""

import dataclasses

import pytest

from mindlora import LoraConfig
from mindlora.core.errors import ConfigError
from mindlora.core.numerics.rank_schedule import DEFAULTS, BudgetSettings

ADALORA = {"use_adalora": True}


def test_it_has_pefts_defaults_and_the_rank_is_init_r():
    config = LoraConfig(**ADALORA)
    assert config.budget_settings == BudgetSettings(12, 8, 0, 0, 1, 0.85, 0.85, 0.5)
    assert config.lora_rank == 12
    config = LoraConfig(**ADALORA, init_r=6, target_r=4, alpha_pattern={"wq": 3})
    assert (config.lora_rank, config.for_cell("wq").lora_alpha, config.for_cell("wq").init_r) == (6, 3, 6)
    # Copies like this one are made for a cell.
    assert dataclasses.replace(config, lora_alpha=3).budget_settings == config.budget_settings


@pytest.mark.parametrize("preset, target, first", [("small_dataset", 8, 12), ("large_dataset", 16, 24)])
def test_a_preset_s_rank_is_what_it_ends_with(preset, target, first):
    given = {"target_modules": "wq", "preset": preset, **ADALORA}
    config = LoraConfig.from_pet_config(given)
    assert (config.target_r, config.init_r, config.lora_rank) == (target, first, first)
    assert LoraConfig.from_pet_config({**given, "init_r": 30, "target_r": 20}).init_r == 30


@pytest.mark.parametrize("field", DEFAULTS)
def test_its_fields_have_no_effect_without_it(field):
    with pytest.raises(ConfigError) as error:
        LoraConfig(**{field: 1})
    assert str(error.value) == (
        f"{field} is 1, but use_adalora is not set, so it has no effect. Set use_adalora: True, or remove it."
    )


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"use_adalora": "yes"}, "use_adalora is 'yes': it must be True or False."),
        ({**ADALORA, "use_dora": True}, "use_adalora is True and use_dora is True, which AdaLoRA does not have."),
        ({**ADALORA, "use_vera": True}, "use_adalora is True and use_vera is True, which AdaLoRA does not have."),
        ({**ADALORA, "use_rslora": True}, "use_adalora is True and use_rslora is True, which AdaLoRA does not have."),
        (
            {**ADALORA, "freeze_lora_a": True},
            "use_adalora is True and freeze_lora_a is True, which AdaLoRA does not have.",
        ),
        (
            {**ADALORA, "rank_pattern": {"wq": 2}},
            "use_adalora is True and rank_pattern is {'wq': 2}, which AdaLoRA does not have.",
        ),
        ({**ADALORA, "lora_init": "pissa"}, "use_adalora is True and lora_init is 'pissa', which AdaLoRA does not"),
        ({**ADALORA, "lora_a_init": "normal"}, "use_adalora is True and lora_a_init is 'normal', which AdaLoRA does"),
        (
            {**ADALORA, "lora_rank": 16},
            "use_adalora is True and lora_rank is 16: AdaLoRA begins with init_r and ends with target_r on average. "
            "Leave lora_rank out.",
        ),
        ({**ADALORA, "target_r": 16}, "target_r is 16 and init_r is 12: AdaLoRA only takes ranks away."),
        ({**ADALORA, "deltaT": 0}, "deltaT is 0: it must be a whole number of at least 1."),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(ConfigError) as error:
        LoraConfig(**fields)
    assert str(error.value).startswith(message)
