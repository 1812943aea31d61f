"""The lines of a device's memory, worked out by hand, and how devices divide them."""

import json

import pytest

from mindlora.core.errors import ConfigError
from mindlora.run.plan.alternatives import layouts_of
from mindlora.run.plan.memory import kv_cache_per_token, memory_of
from mindlora.run.plan.run import read_run
from tests.support import mcore_networks, moe_networks
from tests.support.planned_runs import LORA, SEVERAL, TINY, adapted, run_of, yaml_of

SHARDED = {"use_parallel": True, "parallel": {"parallel_mode": 1}}
# Eight layers of eight heads, so that everything can be divided by 8, and large enough for optimizer parallelism.
LARGE = {
    "num_layers": 8,
    "num_heads": 8,
    "n_kv_heads": 8,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 512,
}
WHOLE = {"runner_wrapper": {"type": "LoraTrainOneStepCell", "loss_in_pieces": False}}
ADAPTER = 2 * 8 * (4 * 32 + 2 * (32 + 16) + 3 * (32 + 48))


def lines(run):
    """Returns name up to a comma -> bytes of the lines of a run's device."""
    return {line.name.partition(",")[0].partition(":")[0]: line.size for line in memory_of(run).lines}


def test_adapter_gradients_and_moments_are_of_the_adapters_size():
    found = lines(run_of())
    assert sum(weight.elements for weight in run_of().weights if weight.adapter) == ADAPTER
    assert (found["adapter"], found["gradients"], found["optimizer"]) == (4 * ADAPTER, 4 * ADAPTER, 8 * ADAPTER)


@pytest.mark.parametrize(
    "optimizer, states", [("AdamW", 8), ("PmaAdamW", 12), ("Momentum", 4), ("Adam", 8), ("somebody's", 8)]
)
def test_each_optimizer_has_its_states(optimizer, states):
    assert lines(run_of(optimizer={"type": optimizer}))["optimizer"] == states * ADAPTER


@pytest.mark.parametrize("kind", ["AdamW", "PmaAdamW", "Adam", "AdamWeightDecay", "Adagrad", "Momentum", "SGD"])
def test_the_states_are_those_that_the_optimizer_allocates(kind, make_llama):
    from mindformers.core import optim
    from mindspore import nn

    pet = {**LORA, "param_init_type": "float16"} if kind in ("AdamW", "Adam", "Momentum") else LORA
    trained = adapted(make_llama(**{**TINY, "type": None}), pet).trainable_params()
    made = getattr(optim, kind, None) or getattr(nn, kind)
    built = made(trained, **({"learning_rate": 0.1, "momentum": 0.9} if kind == "Momentum" else {}))
    known = {p.name for p in trained}
    states = [p for p in built.get_parameters() if p.name not in known and p.size > 1]
    assert sum(p.nbytes for p in states) == lines(run_of({}, pet, optimizer={"type": kind}))["optimizer"]


def test_several_adapters_are_counted_as_they_are_built(make_llama):
    from mindspore import nn

    from mindlora import LoraConfig
    from mindlora.training.several.stack import stack_adapters
    from mindlora.training.several.train_step import StackedAdamW

    shared = {key: value for key, value in SEVERAL.items() if key != "adapters"}
    network = make_llama(**{**TINY, "type": None})
    stack = stack_adapters(network, [LoraConfig.from_pet_config({**shared, **own}) for own in SEVERAL["adapters"]])
    run = run_of(pet=SEVERAL)
    assert {w.name: w.shape for w in run.weights} == {p.name: tuple(p.shape) for p in network.get_parameters()}
    optimizer = StackedAdamW(network.trainable_params(), nn.CosineDecayLR(0.1, 0.2, 3))
    found = lines(run)
    adapters = sum(p.nbytes for p in network.trainable_params())
    assert (found["adapter"], found["gradients"]) == (adapters, adapters)
    assert found["optimizer"] == sum(p.nbytes for p in (*optimizer.exp_avg, *optimizer.exp_avg_sq))
    own = [parameter for each in stack.networks for parameter in each.trainable_params()]
    # Each adapter's A, B and two moments.
    assert found["copies of each adapter and its moments"] == 3 * sum(p.nbytes for p in own)
    assert sum(w.count for w in run.weights if w.adapter) == sum(p.size for p in own)
    assert run.tokens == 3 * run_of().tokens


def test_what_cannot_carry_several_adapters():
    with pytest.raises(ConfigError, match="tok_embeddings cannot carry several adapters.* Add it to exclude_modules"):
        lines(run_of(pet={**SEVERAL, "target_modules": ".*tok_embeddings|.*wq"}))


PREFERENCE = {"type": "LoraTrainOneStepCell", "preference": {"loss": "dpo"}}


def test_a_reference_takes_its_logits_and_a_copy_of_what_was_loaded_to_train():
    logits = 4 * 2 * 2 * TINY["seq_length"] * TINY["vocab_size"]
    nodes = {"runner_config": {"batch_size": 2}, "runner_wrapper": PREFERENCE}
    assert lines(run_of(**nodes))["reference"] == logits
    loaded = run_of(pet={**LORA, "adapter_path": "somewhere"}, **nodes)
    assert lines(loaded)["reference"] == logits + 4 * ADAPTER
    for node in ({"loss": "orpo"}, {"precomputed_reference": True}):
        wrapper = {**PREFERENCE, "preference": node}
        assert "reference" not in lines(run_of(**{**nodes, "runner_wrapper": wrapper}))


def test_on_an_npu_the_logits_of_a_reference_are_given_back_before_those_of_the_step():
    nodes = {"runner_config": {"batch_size": 2}, "runner_wrapper": PREFERENCE, "context": {"device_target": "Ascend"}}
    assert lines(run_of(**nodes))["reference"] == 0
    assert lines(run_of(pet={**LORA, "adapter_path": "somewhere"}, **nodes))["reference"] == 4 * ADAPTER


@pytest.mark.parametrize("level, tensors", [("O0", 4), ("O1", 3), (None, 4)])
def test_at_jit_level_o1_the_loss_holds_one_tensor_less(level, tensors):
    config = {"jit_config": {"jit_level": level}} if level else {}
    context = {"device_target": "Ascend", **config}
    logits = 4 * 2 * TINY["seq_length"] * 4096
    assert lines(run_of({"vocab_size": 4096}, context=context, **WHOLE))["logits and loss"] == tensors * logits
    on_cpu = lines(run_of({"vocab_size": 4096}, context={"device_target": "CPU", **config}, **WHOLE))
    assert on_cpu["logits and loss"] == 4 * logits


def test_fragments_are_planned_where_the_logits_leave_holes():
    # 1.5 GiB of logits in float32, twice as much as in 16 bits: in blocks of 2 GiB, beside each only a quarter is left.
    model = {"vocab_size": 3 * 2**23, "compute_dtype": "bfloat16"}
    on_npu = run_of(model, context={"device_target": "Ascend"}, runner_config={"batch_size": 1})
    assert lines(on_npu)["fragments of MindSpore's memory pool"] > 2**29
    assert "fragments of MindSpore's memory pool" not in lines(run_of(model))


def test_a_pair_that_is_not_packed_is_two_rows_of_the_model():
    one = lines(run_of(runner_config={"batch_size": 2}))
    pairs = lines(run_of(runner_config={"batch_size": 1}, runner_wrapper=PREFERENCE))
    assert pairs["activations"] == one["activations"] and pairs["logits and loss"] == one["logits and loss"]


@pytest.mark.parametrize("model_class, has_bias", [("Sequence", False), ("Token", True)])
def test_a_classifier_is_planned_with_its_head(model_class, has_bias, mindformers):
    from mindlora.training.classifier import model as classifiers

    name = f"LlamaFor{model_class}Classification"
    config = yaml_of({"num_labels": 3})
    config["model"]["arch"] = {"type": name}
    run = read_run(config)
    built = getattr(classifiers, name)(mindformers.LlamaConfig(**{**TINY, "type": None, "num_labels": 3}))
    adapted(built, {**LORA, "modules_to_save": ["score"]})
    assert {w.name: w.shape for w in run.weights} == {p.name: tuple(p.shape) for p in built.get_parameters()}
    trained = {weight.name for weight in run.weights if weight.trained and not weight.adapter}
    assert trained == {"score.weight", *(["score.bias"] if has_bias else [])}
    # Three labels take less than the gradients of a layer.
    assert "gradients inside of a layer (more than logits and loss)" in lines(run)
    assert run.head.why_whole == "the output head gives scores of labels"


def test_states_that_are_swapped_take_nothing_on_the_device():
    assert lines(run_of(optimizer={"type": "AdamW", "swap": True}))["optimizer"] == 0


def test_accumulation_holds_a_second_gradient_and_the_activations_of_one_micro_batch():
    one, four = (
        run_of(
            runner_config={"batch_size": 2, "gradient_accumulation_steps": n}, train_dataset={"drop_remainder": True}
        )
        for n in (1, 4)
    )
    assert lines(four)["gradients"] == 2 * lines(one)["gradients"]
    assert lines(four)["activations"] == lines(one)["activations"]


def test_the_whole_network_trained_in_bfloat16_has_gradients_and_moments_in_float32():
    run = run_of({"param_init_type": "bfloat16", "compute_dtype": "bfloat16"}, {})
    count = sum(weight.elements for weight in run.weights)
    assert (lines(run)["gradients"], lines(run)["optimizer"]) == (4 * count, 8 * count)


def test_logits_and_loss_are_four_float32_tensors():
    assert lines(run_of(**WHOLE))["logits and loss"] == 4 * 4 * 2 * 16 * 64


@pytest.mark.parametrize(
    "pet, of_head",
    [
        (LORA, 0),
        ({**LORA, "target_modules": ".*lm_head"}, 0),
        ({**LORA, "modules_to_save": ["lm_head"]}, 2 * 4 * 32 * 4096),
    ],
    ids=["frozen", "adapted", "saved"],
)
def test_a_loss_in_pieces_is_three_tensors_of_a_piece(pet, of_head):
    wrapper = {"type": "LoraTrainOneStepCell", "loss_in_pieces": 8}
    run = run_of({"vocab_size": 4096}, pet, runner_wrapper=wrapper)
    # Beside them the gradient of the hidden states, twice, and of the head the sum and what is added to it.
    assert lines(run)["logits and loss"] == 3 * 4 * 8 * 4096 + 2 * 4 * 32 * 32 + of_head
    assert run.piece == 8 and str(run.head).startswith("Head and loss: 8 tokens at a time")


@pytest.mark.parametrize(
    "reason, pet, nodes",
    [
        ("runner_wrapper.loss_in_pieces is False", LORA, WHOLE),
        ("the output head has an adapter of DoRA", {**LORA, "target_modules": ".*lm_head", "use_dora": True}, {}),
        (
            "the output head has an adapter beside a weight that trains",
            {**LORA, "target_modules": ".*lm_head", "freeze_exclude": ["*lm_head*"]},
            {},
        ),
        ("the train step is MindFormers' own", LORA, {"runner_wrapper": {"type": "MFTrainOneStepCell"}}),
        ("the train step is MindFormers' own", LORA, {**SHARDED, "parallel": {"parallel_mode": 2}}),
        (
            "the train step is MindFormers' own",
            LORA,
            {**SHARDED, "runner_config": {"batch_size": 2, "gradient_accumulation_steps": 2}},
        ),
        (
            "the output head has an adapter with lora_dropout and is divided among devices",
            {**LORA, "target_modules": ".*lm_head", "lora_dropout": 0.1},
            SHARDED,
        ),
    ],
)
def test_where_the_logits_of_all_tokens_are_made(reason, pet, nodes):
    run = run_of({}, pet, **nodes)
    assert (run.head.why_whole, run.piece) == (reason, None)


@pytest.mark.parametrize(
    "model, whole_head, rows, tokens",
    [({}, False, 2048, 32), ({}, True, 4096, 16), ({"vocab_size": 4095}, False, 4095, 16)],
    ids=["by its vocabulary", "whole", "a vocabulary that cannot be divided"],
)
def test_a_head_in_pieces_is_divided_by_its_vocabulary_or_by_tokens(model, whole_head, rows, tokens):
    division = {"model_parallel": 2, "vocab_emb_dp": whole_head}
    run = run_of({"vocab_size": 4096, **model}, **SHARDED, parallel_config=division)
    assert (run.rows_of_head, run.tokens_of_head) == (rows, tokens) and run.piece == tokens
    assert lines(run)["logits and loss"] == 3 * 4 * tokens * rows + 2 * 4 * tokens * 32


def test_a_recomputed_layer_counts_where_it_is_larger_than_the_loss():
    run = run_of({"vocab_size": 8}, recompute_config={"recompute": True})
    assert "a layer that is recomputed (more than logits and loss)" in lines(run)


def test_recomputation_keeps_the_inputs_of_the_layers():
    kept = memory_of(run_of(recompute_config={"recompute": True}))
    nothing, three = memory_of(run_of()), memory_of(run_of({"num_layers": 3}, recompute_config={"recompute": [2]}))
    assert kept.kept_at_least == lines(run_of(recompute_config={"recompute": True}))["activations"]
    assert nothing.kept_at_most == lines(run_of())["activations"] > kept.kept_at_least
    assert three.kept_at_least < lines(run_of({"num_layers": 3}, recompute_config={"recompute": [2]}))["activations"]


def test_the_cache_of_predict_is_that_of_the_built_network(make_llama):
    keys = {"use_past": True, "num_blocks": 10, "block_size": 4, "compute_dtype": "float16"}
    network = make_llama(**{**TINY, **keys, "type": None})
    built = sum(p.nbytes for p in network.get_parameters() if p.name.endswith(("key_cache", "value_cache")))
    run = run_of(keys, run_mode="predict")
    assert lines(run)["KV cache of 40 tokens"] == 40 * kv_cache_per_token(run) == built
    assert "gradients" not in lines(run) and "optimizer" not in lines(run)


def test_two_devices_of_model_parallelism_have_half_of_each_cell():
    alone, shared = run_of(LARGE), run_of(LARGE, **SHARDED, parallel_config={"model_parallel": 2})
    assert lines(shared)["adapter"] < lines(alone)["adapter"]
    table, norms = 512 * 256 * 4, (2 * 8 + 1) * 256 * 4
    cells = lines(alone)["base"] - 2 * table - norms
    assert lines(shared)["base"] == cells // 2 + 2 * table + norms
    assert {line.basis for line in memory_of(shared).lines} == {"arithmetic"}
    split = run_of(LARGE, **SHARDED, parallel_config={"model_parallel": 2, "vocab_emb_dp": False})
    assert lines(split)["base"] == cells // 2 + table + norms


def test_a_stage_of_a_pipeline_has_its_layers_and_its_micro_batches():
    alone = run_of(LARGE)
    parts = {"pipeline_stage": 2, "micro_batch_num": 4}
    shared = run_of(LARGE, **SHARDED, parallel_config=parts)
    table = 512 * 256 * 4
    assert lines(shared)["base"] < lines(alone)["base"] - table
    # Two micro-batches are in flight on the first stage, each with half of the layers.
    assert lines(shared)["activations"] == pytest.approx(lines(alone)["activations"], rel=0.1)


def test_optimizer_parallelism_divides_the_base_and_gathers_it_for_use():
    alone = run_of(LARGE)
    nodes = {"use_parallel": True, "parallel": {"parallel_mode": 1, "enable_parallel_optimizer": True}}
    kept = run_of(LARGE, **nodes, parallel_config={"data_parallel": 4})
    again = {"recompute": True, "parallel_optimizer_comm_recompute": True}
    gathered = run_of(LARGE, **nodes, parallel_config={"data_parallel": 4}, recompute_config=again)
    assert lines(kept)["base"] < lines(alone)["base"] / 2
    name = "base gathered for use (optimizer parallelism)"
    assert lines(gathered)[name] < lines(kept)[name] / 4


def test_experts_are_divided_among_devices():
    model = {**moe_networks.QWEN3_MOE, "type": "Qwen3MoeConfig", "hidden_size": 64}
    yaml = {"run_mode": "finetune", "model": {"model_config": model}}
    nodes = {**SHARDED, "parallel_config": {"data_parallel": 2, "expert_parallel": 2}, "use_legacy": False}
    alone, shared = read_run(yaml), read_run({**yaml, **nodes})
    experts = sum(weight.size for weight in alone.weights if ".experts." in weight.name)
    assert lines(alone)["base"] - lines(shared)["base"] == experts // 2
    with pytest.raises(ConfigError, match="data_parallel x model_parallel 2 by expert_parallel 4"):
        read_run({**yaml, **nodes, "parallel_config": {"data_parallel": 2, "expert_parallel": 4}})


def test_the_adapter_of_an_embedding_is_divided_as_its_table_is():
    pet = {"pet_type": "lora", "lora_rank": 4, "target_modules": ["word_embeddings"]}
    named = {"model_type": "qwen3", "architectures": "Qwen3ForCausalLM"}
    model = {**mcore_networks.TINY, **named, "pet_config": pet}
    step = {"type": "LoraTrainOneStepCell"}
    yaml = {"run_mode": "finetune", "use_legacy": False, "model": {"model_config": model}, "runner_wrapper": step}
    nodes = {**SHARDED, "parallel_config": {"model_parallel": 2}}
    alone, shared = lines(read_run(yaml))["adapter"], lines(read_run({**yaml, **nodes}))["adapter"]
    vocabulary, hidden = model["vocab_size"], model["hidden_size"]
    assert (alone, shared) == (4 * 4 * (vocabulary + hidden), 4 * 4 * (vocabulary // 2 + hidden))


def test_the_table_of_devices_says_what_cannot_be_divided():
    one, three = layouts_of(run_of(LARGE), [1, 3])
    assert one.data == one.optimizer == one.model == memory_of(run_of(LARGE)).total
    assert three.model is None and three.notes == ("3 devices, model parallel: num_heads 8 by model_parallel 3",)
    assert three.yaml is None and three.data == one.data


def test_the_yamls_own_division_scales_with_the_rows():
    run = run_of(LARGE, **SHARDED, parallel_config={"model_parallel": 2, "data_parallel": 2})
    two, four = layouts_of(run, [2, 4])
    assert two.yaml == four.yaml == memory_of(run).total == two.model


@pytest.mark.parametrize("node", [{"recompute": [1, 1]}, {"recompute": "yes"}, {"select_recompute": {"wq": [1, 2]}}])
def test_a_recomputation_that_does_not_suit_the_stages_is_an_error(node):
    with pytest.raises(ConfigError, match="in each of the 1 stages of the pipeline"):
        memory_of(run_of(recompute_config=node))


def test_a_model_that_a_folder_describes_is_planned_by_its_sizes(tmp_path):
    named = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**named, **mcore_networks.TINY}), "utf-8")
    node = {"seq_length": 16, "params_dtype": "float32"}
    described = {"use_legacy": False, "pretrained_model_dir": str(tmp_path), "model": {"model_config": node}}
    whole = {"use_legacy": False, "model": {"model_config": {**named, **mcore_networks.TINY}}}
    runs = [read_run({"run_mode": "finetune", **yaml}) for yaml in (described, whole)]
    shapes = [{weight.name: weight.shape for weight in run.weights} for run in runs]
    assert shapes[0] == shapes[1] and (64, 32) in shapes[0].values()
