"""aLoRA in MindFormers' Trainer: each micro-batch has its own mask, in recomputed and shared layers and packed rows."""

import mindspore as ms
import numpy as np
import pytest
from mindformers.core.optim import AdamW
from mindformers.models.llama import LlamaConfig, LlamaForCausalLM
from mindformers.modules.transformer import transformer
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.data.mindrecord import first_rows
from mindlora.network.invocation import FIELD
from mindlora.network.repeated_layers import compile_layers_once
from mindlora.network.tree import lora_cells
from mindlora.run.checks.examine import check_contents, check_settings
from mindlora.run.checks.invocation import check_invocation
from mindlora.run.yaml_run import YamlRun
from mindlora.training.step.packing import install_segment_mask
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.conftest import in_mode
from tests.support import tiny_runs
from tests.support.cpu_llama import ON_CPU
from tests.support.runs import write_tokens

ROWS, LENGTH, VOCABULARY, STEPS, BEGIN = 4, 16, 64, 3, 4
INVOCATION = [7, 9]
LLAMA = {
    "seq_length": LENGTH,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "pad_token_id": 3,
    **ON_CPU,
}
# Where the rows of a batch have the invocation: each micro-batch of one row has another mask. LENGTH for nowhere.
STARTS = [3, 10, LENGTH, 6]


def batches():
    """Tokens of STEPS batches."""
    tokens = np.random.default_rng(0).integers(10, VOCABULARY, (STEPS, ROWS, LENGTH + 1)).astype(np.int32)
    for row, start in enumerate(STARTS):
        tokens[:, row, start : start + 2] = INVOCATION[: LENGTH + 1 - start]
    return tokens


def make_network(recompute=False, targets="all-linear", **keys):
    parallel = transformer.TransformerOpParallelConfig(recompute=transformer.TransformerRecomputeConfig(recompute))
    network = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **keys}, parallel_config=parallel))
    rng = np.random.default_rng(3)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(rng.normal(0, 0.1, parameter.shape).astype(np.float32)))
    apply_lora(network, LoraConfig(lora_rank=4, target_modules=targets, alora_invocation_tokens=INVOCATION))
    freeze_base(network)
    for parameter in network.trainable_params():
        parameter.set_data(Tensor(rng.normal(0, 0.1, parameter.shape).astype(np.float32)))
    compile_layers_once(network)
    return network


def trained(micro_batches, recompute=False):
    """Returns the losses of a run and its adapter, in one list of arrays."""
    network = make_network(recompute, ".*wq|.*w2")
    step = LoraTrainOneStepCell(network, AdamW(network.trainable_params(), 1e-2), micro_batches=micro_batches)
    step.set_train()
    losses = [float(step(Tensor(tokens), Tensor(tokens))[0].asnumpy()) for tokens in batches()]
    return [np.array(losses), *(parameter.asnumpy().copy() for parameter in network.trainable_params())]


def test_micro_batches_in_recomputed_layers_train_what_the_whole_batch_trains():
    with in_mode(ms.PYNATIVE_MODE):
        expected = trained(1)
    with in_mode(ms.GRAPH_MODE):
        found = trained(ROWS, recompute=True)
    for recomputed, whole in zip(found, expected):
        np.testing.assert_allclose(recomputed, whole, rtol=0, atol=2e-5)


def logits_of(network, tokens):
    """Returns the logits of a network in evaluation."""
    network.set_train(False)
    return network(Tensor(tokens))[0].asnumpy()


def test_nothing_before_the_invocation_depends_on_the_adapter():
    tokens = batches()[0][:, :LENGTH]
    with in_mode(ms.PYNATIVE_MODE):
        network = make_network()
        adapted = logits_of(network, tokens)
        for _, cell in lora_cells(network):
            cell.silence()
        plain = logits_of(network, tokens)
    for row, start in enumerate(STARTS):
        np.testing.assert_array_equal(adapted[row, :start], plain[row, :start])
        assert start == LENGTH or np.abs(adapted - plain)[row, start:].max(-1).min() > 1e-3


def test_packed_examples_give_what_they_give_alone():
    examples = batches()[0][:, : LENGTH // 2]
    examples[:, 0] = BEGIN
    examples[1, 2:4] = INVOCATION
    examples[3, 3:5] = INVOCATION
    with in_mode(ms.PYNATIVE_MODE):
        alone = logits_of(make_network(seq_length=LENGTH // 2), examples)
        network = make_network()
        install_segment_mask(network, BEGIN)
        packed = logits_of(network, examples.reshape((2, LENGTH)))
    np.testing.assert_allclose(packed.reshape(alone.shape), alone, rtol=0, atol=2e-5)


def test_a_loaded_adapter_learns_preferences_and_is_its_own_reference():
    """A step in two micro-batches, whose reference copies the adapter and reads the same mask, begins at log 2."""
    ids = np.stack([batches()[0], batches()[1]], 1)
    answers = np.full(ids.shape, -1, np.int32)
    answers[:, 0, 8:], answers[:, 1, 8:] = 0, 1
    labels = np.where(answers >= 0, ids, -100).astype(np.int32)
    batch = [Tensor(array) for array in (ids, labels, answers, np.ones((ROWS, 1), np.int32))]
    with in_mode(ms.PYNATIVE_MODE):
        network = make_network(num_layers=1)
        optimizer = AdamW(network.trainable_params(), 1e-2)
        step = LoraTrainOneStepCell(network, optimizer, micro_batches=2, preference={"loss": "dpo"})
        step.set_train()
        losses = [float(step(*batch)[0].asnumpy()) for _ in range(3)]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-6) and losses[2] < losses[1] < losses[0]


def found_in_rows(tmp_path, rows, tokens):
    """Returns what the checks find in a YAML with these invocation tokens, and rows whose last four labels count."""
    labels = np.where(np.arange(LENGTH + 1) >= LENGTH - 3, rows, -100).astype(np.int32)
    write_tokens(tmp_path / "rows.mindrecord", rows, labels)
    config = tiny_runs.tiny_config(tmp_path / "rows.mindrecord", 1, [], run_mode="finetune")
    config["model"]["model_config"]["pet_config"][FIELD] = tokens
    return [finding for finding in check_contents(YamlRun(config), first_rows) if FIELD in finding.key]


def test_rows_that_the_adapter_learns_nothing_from_are_found(tmp_path):
    rows = np.random.default_rng(1).integers(10, VOCABULARY, (4, LENGTH + 1)).astype(np.int32)
    rows[:, LENGTH - 6 : LENGTH - 3] = [8, *INVOCATION]
    assert found_in_rows(tmp_path, rows, INVOCATION) == []
    (finding,) = found_in_rows(tmp_path, rows, [7, 7])
    assert finding.severity == "error"
    assert str(finding).startswith(
        "train_dataset: rows without the tokens [7, 7] of pet_config.alora_invocation_tokens, or without labels that "
        "count behind them: 4 of the first 4. The adapter would learn nothing. Name [8, 7, 9], the tokens that all "
        "answers there follow, or the last of these."
    )
    # A row without them, and one in which the network does not get all of them.
    rows[:2, LENGTH - 4] = 10
    rows[1, LENGTH - 1 :] = INVOCATION
    (finding,) = found_in_rows(tmp_path, rows, INVOCATION)
    assert finding.severity == "warning"
    assert "count behind them: 2 of the first 4. The adapter learns nothing from these." in str(finding)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"run_mode": "predict"}, "use_past is True: MindFormers then gives the network each new token alone"),
        ({"arch": "LlamaForSequenceClassification"}, "is LlamaForSequenceClassification, whose head is of all tokens."),
    ],
)
def test_runs_in_which_a_network_does_not_get_all_tokens_are_refused(keys, message):
    config = tiny_runs.tiny_config("rows.mindrecord", 1, [], **{"run_mode": "finetune", **keys})
    config["model"]["model_config"]["pet_config"][FIELD] = [7]
    config["model"]["model_config"]["use_past"] = True
    config["model"]["arch"]["type"] = keys.get("arch", "LlamaForCausalLM")
    (finding,) = check_invocation(YamlRun(config))
    assert message in str(finding)


def test_the_checks_of_a_yaml_have_them(tmp_path):
    config = tiny_runs.tiny_config(tmp_path / "rows.mindrecord", 1, [], run_mode="predict")
    config["model"]["model_config"]["pet_config"][FIELD] = [7]
    config["model"]["model_config"]["use_past"] = True
    run = YamlRun(config)
    assert set(map(str, check_invocation(run))) <= set(map(str, check_settings(run)))
