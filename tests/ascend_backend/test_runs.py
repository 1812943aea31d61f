"""Training runs on MindSpore's Ascend backend: each reaches its second step and saves its adapter, or is refused.

Rows with ``always`` run always, the others with MINDLORA_ASCEND_RUNS=all.
"""

import pytest

from mindlora.training.report.history import read_history
from tests.support.ascend_backend import on_request
from tests.support.ascend_backend.small_runs import (
    QWEN3,
    QWEN3_MOE,
    Row,
    callbacks,
    eva,
    loftq,
    parallel,
    qwen3_in_4_bits,
    saved_folders,
    tokenizer,
    train,
)
from tests.support.what_runs import shows

PET = "model.model_config.pet_config"
DATA_PARALLEL, SEMI_AUTOMATIC = parallel(mode=0), parallel()
HELD_OUT = {"type": "HeldOutLoss", "dataset_dir": "rows.mindrecord", "every_steps": 2, "batch_size": 3}
MEASURING = callbacks(
    HELD_OUT,
    {"type": "Forgetting", "every_steps": 2, "samples": 3, "max_tokens": 2, "batch_size": 3},
    {"type": "AdapterHealth"},
    {"type": "RunReport"},
)
CONTROLLING = callbacks(
    HELD_OUT,
    {"type": "TrainingGuard"},
    {"type": "GracefulStop"},
    {"type": "GradientNormRate"},
    {"type": "ReduceOnPlateau"},
    {"type": "EarlyStopping"},
)
ANSWERING = callbacks(
    {
        "type": "SampleAnswers",
        "prompts": ["cats", "dogs"],
        "tokenizer": "tokenizer",
        "template": "{instruction}",
        "max_tokens": 2,
    }
)
QLORA = "configs/llama2/qlora_llama2_7b.yaml"
ONE_STAGE_PER_HALF = {"model.model_config.num_layers": 2, **parallel(1, 4, 2)}

# The README of MindFormers' Qwen3.
DOCUMENTED_BY_MINDFORMERS = {
    f"{PET}.target_modules": ".*word_embeddings|.*linear_qkv|.*linear_proj|.*linear_fc1|.*linear_fc2",
    f"{PET}.lora_a_init": "normal",
    f"{PET}.lora_b_init": "zeros",
    f"{PET}.lora_dropout": 0.1,
    f"{PET}.freeze_include": ["*"],
    f"{PET}.freeze_exclude": ["*lora*"],
}

CLASSIFIER = {"model.arch.type": "LlamaForSequenceClassification", "model.model_config.num_labels": 2}
QWEN3_CLASSIFIER = {
    "model.model_config.architectures": "Qwen3ForSequenceClassification",
    "model.model_config.num_labels": 2,
}
MISS = {f"{PET}.use_miss": True, f"{PET}.lora_alpha": None, f"{PET}.lora_dropout": 0.0}
VERA = {f"{PET}.use_vera": True, f"{PET}.lora_alpha": None, f"{PET}.lora_dropout": 0.0}
ADALORA = {f"{PET}.use_adalora": True, f"{PET}.lora_rank": None, f"{PET}.init_r": 4, f"{PET}.target_r": 2}
PISSA = {f"{PET}.lora_init": "pissa", f"{PET}.lora_dropout": 0.0}
NOISY_RSLORA_PLUS = {f"{PET}.use_rslora": True, f"{PET}.loraplus_lr_ratio": 16.0, f"{PET}.neftune_alpha": 5.0}
COMPRESSED = {"runner_wrapper.gradient_exchange": "float16"}
PREFERENCE = {
    "runner_wrapper.preference": {"loss": "dpo"},
    "train_dataset.input_columns": ["input_ids", "labels", "answers", "pairs"],
}
# A layer of Mixtral, as MindFormers' own YAML describes it.
MIXTRAL = {
    "moe_config": {
        "expert_num": 4,
        "num_experts_chosen": 2,
        "routing_policy": "TopkRouterV2",
        "enable_sdrop": True,
        "router_dense_type": "float32",
    },
    **parallel(4, 2, expert_parallel=2, use_seq_parallel=True),
}
# A dense layer of a DeepSeek-V3, and one that predicts a further token.
DEEPSEEK_V3 = {
    f"model.model_config.{key}": value
    for key, value in {
        "model_type": "deepseek_v3",
        "architectures": "DeepseekV3ForCausalLM",
        "head_dim": None,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "moe_grouped_gemm": True,
        "num_nextn_predict_layers": 1,
        "mtp_loss_scaling_factor": 0.3,
    }.items()
} | {f"{PET}.target_modules": ["linear_proj"]}
KEEPING_TWO = [{"type": "MFLossMonitor"}, {"type": "LoraCheckpoint", "save_steps": 2, "keep_last": 2}]
SEVERAL = [{"name": "slow", "learning_rate": 1e-4}, {"name": "small", "learning_rate": 1e-3, "lora_rank": 4}]

TRAINED = {
    # The shipped YAMLs: alone, and as the first and the last of 8 devices, in data parallel but for the experts.
    "llama alone": Row(rows=2),
    "llama, first of 8": Row(ranks=8),
    # Each device holds the whole adapter, and the first writes it.
    "llama, last of 8": Row(ranks=8, rank=7, saves=False),
    "llama at O0": Row(ranks=8, keys={"context.jit_config.jit_level": "O0"}),
    "llama, all linear cells": Row("configs/llama3/lora_llama3_8b_all_linear.yaml", ranks=8),
    "llama 2 7b": Row("configs/llama2/lora_llama2_7b.yaml", ranks=8),
    "llama 2 7b, all linear cells": Row("configs/llama2/lora_llama2_7b_all_linear.yaml", ranks=8),
    "llama 2 13b": Row("configs/llama2/lora_llama2_13b.yaml", ranks=8),
    "llama 2 13b, all linear cells": Row("configs/llama2/lora_llama2_13b_all_linear.yaml", ranks=8),
    "llama in 4 bits": Row(QLORA, rows=2, values=True),
    "eva alone": Row(rows=2, prepare=eva, values=True),
    "loftq alone": Row(QLORA, rows=2, prepare=loftq, values=True),
    "qwen3 alone": Row(QWEN3, rows=2),
    "qwen3, first of 8": Row(QWEN3, ranks=8),
    "qwen3, last of 8": Row(QWEN3, ranks=8, rank=7, saves=False),
    "qwen3 at O1": Row(QWEN3, ranks=8, keys={"context.jit_config.jit_level": "O1"}),
    "qwen3 in 4 bits": Row("configs/qwen3/qlora_qwen3_8b.yaml", rows=2, values=True),
    "qwen3 with experts, first of 8": Row(QWEN3_MOE, ranks=8, rows=4, always=True),
    "qwen3 with experts, last of 8": Row(QWEN3_MOE, ranks=8, rank=7, rows=4),
    "qwen3 with experts in 4 bits": Row("configs/qwen3/qlora_qwen3_30b_a3b.yaml", rows=2, values=True),
    # Layouts.
    "llama, model parallel 2": Row(ranks=8, rows=8, keys=parallel(4, 2)),
    "llama, a head divided by its vocabulary": Row(ranks=8, rows=8, keys=parallel(4, 2, vocab_emb_dp=False)),
    "llama, a divided head that trains": Row(
        ranks=8, rows=8, keys={**parallel(4, 2, vocab_emb_dp=False), f"{PET}.modules_to_save": ["lm_head"]}
    ),
    "llama, LoRA on a divided head": Row(
        ranks=8,
        rows=8,
        keys={
            **parallel(4, 2, vocab_emb_dp=False),
            f"{PET}.target_modules": ".*wq|.*lm_head",
            f"{PET}.lora_dropout": 0.0,
        },
    ),
    "qwen3, LoRA on a divided head, which is tied": Row(
        QWEN3,
        ranks=8,
        rows=8,
        keys={
            "model.model_config.tie_word_embeddings": True,
            f"{PET}.target_modules": ["embed_tokens", "lm_head"],
            f"{PET}.lora_dropout": 0.0,
            **parallel(4, 2),
        },
    ),
    "deepseek v3, further tokens and a divided head": Row(
        QWEN3, ranks=8, rows=8, keys={**DEEPSEEK_V3, **parallel(4, 2)}
    ),
    "llama, a pipeline of model parallel 4": Row(ranks=8, rank=7, rows=4, keys=ONE_STAGE_PER_HALF, always=True),
    "llama, optimizer parallel": Row(ranks=8, keys={**SEMI_AUTOMATIC, "parallel.enable_parallel_optimizer": True}),
    "llama, sequence parallel": Row(ranks=8, rows=8, keys=parallel(4, 2, use_seq_parallel=True)),
    "llama, context parallel": Row(ranks=8, rows=8, keys=parallel(4, context_parallel=2)),
    "llama with experts, its attention": Row(ranks=8, rows=8, keys=MIXTRAL),
    "llama, slices of the data": Row(
        ranks=8,
        rows=16,
        keys={**SEMI_AUTOMATIC, "parallel.full_batch": False, "parallel.dataset_strategy": [[8, 1], [8, 1]]},
    ),
    "qwen3, context and sequence parallel": Row(
        QWEN3, ranks=8, rows=4, keys=parallel(2, 2, context_parallel=2, use_seq_parallel=True)
    ),
    "qwen3, its embedding": Row(
        QWEN3,
        ranks=8,
        rows=4,
        keys={**DOCUMENTED_BY_MINDFORMERS, **parallel(2, 2, context_parallel=2, use_seq_parallel=True)},
        always=True,
    ),
    "qwen3, its embedding without sequence parallel": Row(
        QWEN3, ranks=8, rows=8, keys={**DOCUMENTED_BY_MINDFORMERS, **parallel(4, 2)}
    ),
    "qwen3, its embedding and its tied head": Row(
        QWEN3,
        ranks=8,
        rows=8,
        keys={
            "model.model_config.tie_word_embeddings": True,
            f"{PET}.target_modules": ["embed_tokens", "lm_head"],
            **parallel(4, 2),
        },
    ),
    "qwen3, its embedding and its tied head in a pipeline": Row(
        QWEN3,
        ranks=8,
        rank=7,
        rows=8,
        keys={
            "model.model_config.tie_word_embeddings": True,
            "model.model_config.num_hidden_layers": 2,
            f"{PET}.target_modules": ["embed_tokens", "lm_head"],
            **parallel(2, 2, 2),
        },
    ),
    "qwen3, a pipeline": Row(
        QWEN3, ranks=8, rank=7, rows=8, keys={"model.model_config.num_hidden_layers": 2, **parallel(2, 2, 2)}
    ),
    # What data parallel has, on a Llama and on a Qwen3.
    "dora, data parallel": Row(ranks=8, keys={**DATA_PARALLEL, f"{PET}.use_dora": True}, values=True, saves=False),
    "miss, data parallel": Row(ranks=8, keys={**DATA_PARALLEL, **MISS}),
    "qwen3 miss, data parallel": Row(QWEN3, ranks=8, keys={**DATA_PARALLEL, **MISS}),
    "pissa, data parallel": Row(ranks=8, keys={**DATA_PARALLEL, **PISSA}, values=True),
    "qwen3 pissa, data parallel": Row(QWEN3, ranks=8, keys={**DATA_PARALLEL, **PISSA}, values=True),
    "qwen3 dora, data parallel": Row(
        QWEN3, ranks=8, keys={**DATA_PARALLEL, f"{PET}.use_dora": True}, values=True, saves=False
    ),
    "qwen3 in 4 bits, data parallel": Row(
        "configs/qwen3/qlora_qwen3_8b.yaml", ranks=8, keys=DATA_PARALLEL, values=True
    ),
    "qwen3 dora in 4 bits, data parallel": Row(
        "configs/qwen3/qlora_qwen3_8b.yaml",
        ranks=8,
        keys={**DATA_PARALLEL, f"{PET}.use_dora": True},
        values=True,
        saves=False,
    ),
    "qwen3 with experts, data parallel": Row(
        QWEN3_MOE, ranks=8, keys=parallel(mode=0, expert_parallel=1, use_seq_parallel=False)
    ),
    "compressed exchange, data parallel": Row(ranks=8, keys={**DATA_PARALLEL, **COMPRESSED}),
    "qwen3, compressed exchange, data parallel": Row(QWEN3, ranks=8, keys={**DATA_PARALLEL, **COMPRESSED}),
    "accumulation, data parallel": Row(
        ranks=8, rows=32, keys={**DATA_PARALLEL, "runner_config.gradient_accumulation_steps": 2}
    ),
    "vera, data parallel": Row(ranks=8, keys={**DATA_PARALLEL, **VERA}),
    # VeRA's vectors of joined cells have no place in a PEFT folder.
    "qwen3 vera, data parallel": Row(
        QWEN3, ranks=8, keys={**DATA_PARALLEL, **VERA, f"{PET}.target_modules": ["o_proj", "down_proj"]}
    ),
    "adalora, data parallel": Row(ranks=8, keys={**DATA_PARALLEL, **ADALORA}),
    "qwen3 adalora, data parallel": Row(QWEN3, ranks=8, keys={**DATA_PARALLEL, **ADALORA}),
    "olora, data parallel": Row(
        ranks=8, keys={**DATA_PARALLEL, f"{PET}.lora_init": "olora", f"{PET}.lora_dropout": 0.0}, values=True
    ),
    "callbacks that control, data parallel": Row(ranks=8, keys={**DATA_PARALLEL, "callbacks": CONTROLLING}),
    "qwen3, callbacks that control, data parallel": Row(
        QWEN3, ranks=8, keys={**DATA_PARALLEL, "callbacks": CONTROLLING}
    ),
    "alora, data parallel": Row(ranks=8, keys={**DATA_PARALLEL, f"{PET}.alora_invocation_tokens": [5]}),
    "qwen3, noise and tied embeddings": Row(
        QWEN3,
        ranks=8,
        rows=8,
        keys={f"{PET}.neftune_alpha": 5.0, "model.model_config.tie_word_embeddings": True, **parallel(4, 2)},
    ),
    "qwen3 alora, data parallel": Row(QWEN3, ranks=8, keys={**DATA_PARALLEL, f"{PET}.alora_invocation_tokens": [5]}),
    "answers, data parallel": Row(ranks=8, keys={**DATA_PARALLEL, "callbacks": ANSWERING}, prepare=tokenizer),
    "eva, data parallel": Row(ranks=8, keys=DATA_PARALLEL, prepare=eva, values=True),
    "loftq, data parallel": Row(QLORA, ranks=8, keys=DATA_PARALLEL, prepare=loftq, values=True),
    "qwen3, eva, data parallel": Row(QWEN3, ranks=8, keys=DATA_PARALLEL, prepare=eva, values=True),
    "qwen3, loftq, data parallel": Row(
        "configs/qwen3/qlora_qwen3_8b.yaml", ranks=8, keys=DATA_PARALLEL, prepare=loftq, values=True
    ),
    "qwen3 on a base in 4 bits, data parallel": Row(
        QWEN3, ranks=8, keys=DATA_PARALLEL, prepare=qwen3_in_4_bits, values=True
    ),
    # What the semi-automatic mode has.
    "llama, semi-automatic": Row(ranks=8, keys=SEMI_AUTOMATIC),
    "llama, semi-automatic at O0": Row(ranks=8, keys={**SEMI_AUTOMATIC, "context.jit_config.jit_level": "O0"}),
    "qwen3, semi-automatic": Row(QWEN3, ranks=8, keys=SEMI_AUTOMATIC),
    "answers": Row(ranks=8, keys={**SEMI_AUTOMATIC, "callbacks": ANSWERING}, prepare=tokenizer),
    "answers, qwen3": Row(QWEN3, ranks=8, keys={**SEMI_AUTOMATIC, "callbacks": ANSWERING}, prepare=tokenizer),
    "eva": Row(ranks=8, keys=SEMI_AUTOMATIC, prepare=eva, values=True),
    "rslora, lora+ and noise": Row(ranks=8, keys={**SEMI_AUTOMATIC, **NOISY_RSLORA_PLUS}),
    "qwen3, rslora, lora+ and noise": Row(QWEN3, ranks=8, keys={**SEMI_AUTOMATIC, **NOISY_RSLORA_PLUS}),
    "lora-fa": Row(ranks=8, keys={**SEMI_AUTOMATIC, f"{PET}.freeze_lora_a": True}),
    "qwen3, lora-fa": Row(QWEN3, ranks=8, keys={**SEMI_AUTOMATIC, f"{PET}.freeze_lora_a": True}),
    "accumulation": Row(ranks=8, rows=32, keys={**SEMI_AUTOMATIC, "runner_config.gradient_accumulation_steps": 2}),
    "without clipping": Row(ranks=8, keys={**SEMI_AUTOMATIC, "runner_wrapper.use_clip_grad": False}),
    "callbacks that measure": Row(ranks=8, keys={**SEMI_AUTOMATIC, "callbacks": MEASURING}),
    "callbacks that measure, qwen3": Row(QWEN3, ranks=8, keys={**SEMI_AUTOMATIC, "callbacks": MEASURING}),
    "callbacks that measure, in a pipeline": Row(
        ranks=8, rank=7, rows=4, keys={**ONE_STAGE_PER_HALF, "callbacks": MEASURING}
    ),
    "packed rows": Row(ranks=8, data="packed", keys=SEMI_AUTOMATIC),
    "packed rows, data parallel": Row(ranks=8, data="packed", keys=DATA_PARALLEL),
    "qwen3, packed rows, data parallel": Row(QWEN3, ranks=8, data="packed", keys=DATA_PARALLEL),
    "packed rows by flash attention": Row(
        ranks=8,
        data="packed, with ends",
        keys={
            **SEMI_AUTOMATIC,
            "model.model_config.seq_length": 2048,
            "model.model_config.use_eod_attn_mask_compression": True,
            "train_dataset.input_columns": ["input_ids", "labels", "actual_seq_len"],
        },
    ),
    "a classifier": Row(
        ranks=8, data="labels of two classes", keys={**SEMI_AUTOMATIC, **CLASSIFIER, "callbacks": callbacks(HELD_OUT)}
    ),
    "qwen3, a classifier, data parallel": Row(
        QWEN3,
        ranks=8,
        data="labels of two classes",
        keys={**DATA_PARALLEL, **QWEN3_CLASSIFIER, "callbacks": callbacks(HELD_OUT)},
    ),
    # What is alone or in data parallel.
    "dpo, data parallel": Row(
        ranks=8, data="pairs", keys={**DATA_PARALLEL, **PREFERENCE, "callbacks": callbacks(HELD_OUT)}
    ),
    "qwen3, dpo, data parallel": Row(
        QWEN3, ranks=8, data="pairs", keys={**DATA_PARALLEL, **PREFERENCE, "callbacks": callbacks(HELD_OUT)}
    ),
    "qwen3, several adapters": Row(
        QWEN3,
        rows=2,
        keys={f"{PET}.adapters": SEVERAL, f"{PET}.lora_dropout": 0.0, "callbacks": KEEPING_TWO},
        values=True,
    ),
    "several adapters": Row(rows=2, keys={f"{PET}.adapters": SEVERAL, "callbacks": KEEPING_TWO}, values=True),
    "adapters on experts": Row(
        QWEN3_MOE,
        ranks=8,
        rows=4,
        keys={
            f"{PET}.target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            f"{PET}.lora_dropout": 0.0,
        },
    ),
}


REFUSED = {
    "dora, semi-automatic": Row(
        ranks=8, keys={**SEMI_AUTOMATIC, f"{PET}.use_dora": True}, refused="use_dora is not supported on sharded"
    ),
    "qwen3 in 4 bits, semi-automatic": Row(
        "configs/qwen3/qlora_qwen3_8b.yaml",
        ranks=8,
        keys=SEMI_AUTOMATIC,
        refused="is sharded, but NF4 weights are not supported there",
    ),
    "loftq, semi-automatic": Row(
        QLORA,
        ranks=8,
        keys=SEMI_AUTOMATIC,
        prepare=loftq,
        refused="is sharded, but NF4 weights are not supported there",
    ),
    "alora, semi-automatic": Row(
        ranks=8,
        keys={**SEMI_AUTOMATIC, f"{PET}.alora_invocation_tokens": [5]},
        refused="each device has tokens of its own",
    ),
    "dpo, semi-automatic": Row(
        ranks=8,
        data="pairs",
        keys={**SEMI_AUTOMATIC, **PREFERENCE},
        refused="which learns from preferences alone and in data parallel",
    ),
    "compressed exchange, semi-automatic": Row(
        ranks=8,
        keys={**SEMI_AUTOMATIC, **COMPRESSED},
        refused="gradients are compressed only between ranks that each hold the whole adapter",
    ),
    "adalora, semi-automatic": Row(
        ranks=8,
        keys={**SEMI_AUTOMATIC, f"{PET}.use_adalora": True, f"{PET}.lora_rank": None},
        refused="ranks are allocated by mindlora's train step, alone or in data parallel",
    ),
    "callbacks that control, semi-automatic": Row(
        ranks=8,
        keys={**SEMI_AUTOMATIC, "callbacks": CONTROLLING},
        refused="needs mindlora's train step, alone or in data parallel",
    ),
    "several adapters on 8 devices": Row(
        ranks=8,
        keys={f"{PET}.adapters": SEVERAL, "callbacks": KEEPING_TWO, **DATA_PARALLEL},
        refused="it was made for one device",
    ),
    "llama with experts, all linear cells": Row(
        ranks=8,
        rows=8,
        keys={**MIXTRAL, f"{PET}.target_modules": "all-linear"},
        refused="Linear holds 4 experts; LoRA on expert weights is not supported",
    ),
}


# What a row of TRAINED shows, beside LoRA.
SHOWN = {
    "llama in 4 bits": ["nf4"],
    "qwen3 in 4 bits": ["nf4"],
    "qwen3 with experts in 4 bits": ["nf4"],
    "eva": ["eva"],
    "loftq alone": ["loftq"],
    "qwen3, its embedding": ["embedding"],
    "dora, data parallel": ["dora"],
    "qwen3 dora, data parallel": ["dora"],
    "qwen3 dora in 4 bits, data parallel": ["dora", "nf4_variants"],
    "miss, data parallel": ["miss"],
    "qwen3 miss, data parallel": ["miss"],
    "vera, data parallel": ["vera"],
    "qwen3 vera, data parallel": ["vera"],
    "adalora, data parallel": ["adalora"],
    "qwen3 adalora, data parallel": ["adalora"],
    "pissa, data parallel": ["pissa"],
    "qwen3 pissa, data parallel": ["pissa"],
    "alora, data parallel": ["alora"],
    "qwen3 alora, data parallel": ["alora"],
    "lora-fa": ["lora_fa"],
    "qwen3, lora-fa": ["lora_fa"],
    "rslora, lora+ and noise": ["rslora", "lora_plus", "neftune"],
    "qwen3, rslora, lora+ and noise": ["rslora", "lora_plus", "neftune"],
    "qwen3, noise and tied embeddings": ["neftune"],
    "compressed exchange, data parallel": ["exchange"],
    "qwen3, compressed exchange, data parallel": ["exchange"],
    "callbacks that control, data parallel": ["guard"],
    "qwen3, callbacks that control, data parallel": ["guard"],
    "callbacks that measure": ["held_out", "forgetting"],
    "callbacks that measure, qwen3": ["held_out", "forgetting"],
    "answers": ["answers"],
    "answers, qwen3": ["answers"],
    "packed rows": ["packed"],
    "qwen3, packed rows, data parallel": ["packed"],
    "qwen3, a classifier, data parallel": ["classifier"],
    "qwen3, eva, data parallel": ["eva"],
    "qwen3, loftq, data parallel": ["loftq", "nf4"],
    "a classifier": ["classifier"],
    "dpo, data parallel": ["preference"],
    "qwen3, dpo, data parallel": ["preference"],
    "several adapters": ["several"],
    "qwen3, several adapters": ["several"],
    "adapters on experts": ["experts"],
}


def asked_for(table):
    """Returns the names of a table as parameters, with what they show; those that run on request are marked."""
    parameters = []
    for name, row in table.items():
        marks = [] if row.always else [on_request]
        if row.refused is None:
            model = "qwen3_moe" if "30b_a3b" in row.config else "qwen3" if "qwen3" in row.config else "llama"
            model = row.keys.get("model.model_config.model_type", model)
            marks += [shows(feature, model, place="ascend") for feature in ["lora", *SHOWN.get(name, [])]]
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.mark.parametrize("name", asked_for(TRAINED))
def test_it_trains_and_saves(name, tmp_path):
    done = train(TRAINED[name], tmp_path)
    assert done.returncode == 0, done.output[-3000:]
    assert "step:[    2/" in done.output
    assert done.on_cpu == ()
    assert ("The training data is packed" in done.output) == (TRAINED[name].data == "packed")
    if not TRAINED[name].rank:
        # The report says what the device had to hold, not what stays between two steps.
        memory = read_history(str(tmp_path / "out")).series("memory_bytes")[1]
        assert memory[-1] == done.peak_bytes and memory[0] > 0.99 * done.peak_bytes
    if "divided" in name:
        assert "Head and loss: some tokens at a time" in done.output
    # Sharded adapters are left in slices, since collectives move no data here.
    assert any(folder.endswith("step_2") for folder in saved_folders(tmp_path)) == TRAINED[name].saves


@pytest.mark.parametrize("name", asked_for(REFUSED))
def test_it_is_refused_by_name(name, tmp_path):
    done = train(REFUSED[name], tmp_path)
    assert done.returncode == 1 and REFUSED[name].refused in done.output, done.output[-3000:]
    assert "step:[" not in done.output
