"""adapter_config.json: what is read from each field."""

import logging

import pytest

from mindlora.core.errors import AdapterFormatError
from mindlora.files.adapters.dialects import peft_config
from mindlora.models.variants.registry import LORA
from tests.support.peft_configs import PLAIN, read, written

Q, K = "model.layers.0.attention.wq", "model.layers.0.self_attn.k_proj"


def test_the_least_that_a_config_can_hold(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "mindlora"):
        config = read(tmp_path)
    assert config == peft_config.PeftConfig(8, 16.0, 0.0, False, LORA, 0, {}, {}, (), {}, None)
    assert (config.rank_of(Q), config.alpha_of(Q)) == (8, 16.0)
    assert not caplog.records


@pytest.mark.parametrize("r, alpha", [(8, 16), (8.0, 16.0), (1, 0.5), (1, 1e-300), (3, 2**60)])
def test_numbers_may_be_whole_or_not(tmp_path, r, alpha):
    config = read(tmp_path, r=r, lora_alpha=alpha)
    assert (config.rank, config.alpha) == (r, alpha)
    assert type(config.rank) is int and type(config.alpha) is float


@pytest.mark.parametrize("value, expected", [(0, 0.0), (0.5, 0.5), (None, 0.0), (0.0, 0.0)])
def test_dropout(tmp_path, value, expected):
    dropout = read(tmp_path, lora_dropout=value).dropout
    assert dropout == expected and type(dropout) is float


@pytest.mark.parametrize("value, expected", [(True, True), (False, False), (None, False)])
def test_rslora(tmp_path, value, expected):
    assert read(tmp_path, use_rslora=value).use_rslora is expected


@pytest.mark.parametrize(
    "field, value",
    [
        ("target_modules", ["q_proj", "v_proj"]),
        ("target_modules", r"model\.layers\.\d+\.self_attn\.(q|v)_proj"),
        ("target_modules", "all-linear"),
        ("exclude_modules", ["lm_head"]),
        ("exclude_modules", ".*lm_head"),
        ("layers_to_transform", 3),
        ("layers_to_transform", [0, 2]),
        ("layers_pattern", "layers"),
        ("layers_pattern", ["layers", "h"]),
    ],
)
def test_fields_that_select_modules_are_kept_as_they_are(tmp_path, field, value):
    assert read(tmp_path, **{field: value}).selection == {field: value}
    assert read(tmp_path, **{field: None}).selection == {}


def test_patterns_are_matched_as_peft_does(tmp_path):
    config = read(
        tmp_path,
        rank_pattern={"q_proj": 4, r"layers\.[1-9]\..*k_proj": 2.0, "^lm_head": 3},
        alpha_pattern={"self_attn.k_proj": 1, "k_proj": 7},
    )
    assert [config.rank_of(path) for path in (Q, K, K.replace("0", "5"), "lm_head", "draft.lm_head", "xq_proj")] == [
        4,
        8,
        2,
        3,
        8,
        8,
    ]
    assert all(type(config.rank_of(path)) is int for path in (Q, K.replace("0", "5")))
    # If several match, the first one wins.
    assert [config.alpha_of(path) for path in (Q, K, "k_proj")] == [16.0, 1.0, 7.0]
    assert read(tmp_path, rank_pattern=None, alpha_pattern=None).rank_of(Q) == 8


@pytest.mark.parametrize("value, expected", [(None, ()), ([], ()), (["lm_head", "norm"], ("lm_head", "norm"))])
def test_modules_to_save(tmp_path, value, expected):
    assert read(tmp_path, modules_to_save=value).modules_to_save == expected


@pytest.mark.parametrize(
    "value, expected", [("meta-llama/Llama-2-7b", "meta-llama/Llama-2-7b"), ("", None), (None, None)]
)
def test_base_model(tmp_path, value, expected):
    assert read(tmp_path, base_model_name_or_path=value).base_model == expected


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_initializers_that_leave_the_base_unchanged(tmp_path, value):
    assert read(tmp_path, init_lora_weights=value).rank == 8


def test_what_peft_0_20_writes_of_a_plain_adapter_is_read_without_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "mindlora"):
        read(
            tmp_path,
            alora_invocation_tokens=None,
            alpha_pattern={},
            arrow_config=None,
            auto_mapping=None,
            bias="none",
            corda_config=None,
            ensure_weight_tying=False,
            eva_config=None,
            exclude_modules=None,
            fan_in_fan_out=False,
            inference_mode=True,
            init_lora_weights=True,
            kasa_config=None,
            layer_replication=None,
            layers_pattern=None,
            layers_to_transform=None,
            loftq_config={},
            lora_bias=False,
            lora_ga_config=None,
            megatron_config=None,
            megatron_core="megatron.core",
            modules_to_save=None,
            monteclora_config=None,
            peft_type="LORA",
            peft_version="0.20.0",
            qalora_group_size=16,
            rank_pattern={},
            revision=None,
            target_parameters=None,
            task_type="CAUSAL_LM",
            trainable_token_indices=None,
            use_bdlora=None,
            use_dora=False,
            use_qalora=False,
            use_rslora=False,
            velora_config=None,
        )
    assert not caplog.records


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_unknown_fields_that_are_switched_off_are_kept(tmp_path, value):
    config = peft_config.read(written(tmp_path, {**PLAIN, "use_zeta": value}))
    assert config.rank == 8 and config.kept["use_zeta"] == value


def test_fields_of_other_programs_that_change_nothing_are_kept(tmp_path):
    fields = {"lora_dtype": "float32", "lorap_emb_lr": 1e-6, "lorap_lr_ratio": 16.0, "transformers_version": "5.0.0"}
    assert peft_config.read(written(tmp_path, {**PLAIN, **fields})).kept.items() >= fields.items()


@pytest.mark.parametrize("value", [True, 0, 0.5, "on", ["a"], {"rank": 0}])
def test_unknown_fields_with_a_value_are_refused_by_name(tmp_path, value):
    """PEFT adds variants of LoRA as fields: those of its next version would load as plain LoRA."""
    path = written(tmp_path, {**PLAIN, "zeta_config": value, "other": None})
    with pytest.raises(AdapterFormatError) as error:
        peft_config.read(path)
    assert str(error.value) == (
        f"{path} has fields that mindlora does not know, and which may change what the adapter computes: zeta_config "
        f"({value!r}). It knows those of PEFT up to 0.21. Update mindlora; or remove what another program has written "
        "for itself."
    )
    refusals = []
    assert peft_config.read(path, peft_config.Extras(refusals=refusals)).rank == 8 and len(refusals) == 1
