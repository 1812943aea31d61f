"""Classifiers with adapters: scores of PEFT's adapters here, and of ours in PEFT."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.network.load_base import load_base
from mindlora.training.model.mcore_model import McoreRows
from tests.conftest import in_mode
from tests.peers.conftest import TOKENS, llama_keys
from tests.support.mcore_networks import keys_of_folder, save_for_transformers, scaled, tiny_classifier, tiny_qwen3
from tests.support.mcore_pynative import pynative_operators
from tests.support.peers import cases
from tests.support.peers.peer import read_json
from tests.support.what_runs import shows

LABELS = 3
_LORA = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.0}
_DENSE = {**_LORA, "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]}
_EXPERTS = {**_LORA, "target_parameters": cases.EXPERT_WEIGHTS}
# PEFT's adapters, and the keys of ours. An mcore model's q, k and v, or what leads to latents of them, are one cell.
ADAPTERS = {
    "llama": (_DENSE, {"target_modules": ["wq", "w2"]}),
    "qwen2": (_DENSE, {"target_modules": ["wq", "w2"]}),
    "qwen3": (_DENSE, {"target_modules": ["linear_qkv", "linear_fc2"]}),
    "qwen3_moe": (
        {**_EXPERTS, "target_modules": ["q_proj", "k_proj", "v_proj"]},
        {"target_modules": ["linear_qkv"], "target_parameters": ["mlp.experts"]},
    ),
    "deepseek_v3": (
        {**_EXPERTS, "target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"]},
        {"target_modules": ["linear_qb", "linear_kvb", "linear_proj"], "target_parameters": ["mlp.experts"]},
    ),
}
MCORE = ("qwen3", *cases.EXPERT_MODELS)
CLASSES = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
# Texts of several lengths, padded at the end.
IDS = np.random.default_rng(3).integers(3, cases.VOCABULARY, (3, TOKENS)).astype(np.int32)
IDS[1, 9:] = IDS[2, 4:] = 0


# A minute each: tests/e2e/test_classifier_runs.py trains one with each change.
_LONG = [pytest.param(model, marks=pytest.mark.long) for model in cases.EXPERT_MODELS]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", *_LONG])
def family(request):
    """The architecture: MindFormers' legacy Llama or its mcore Qwen3 in PyNative, or one with experts in graph mode."""
    mode = ms.GRAPH_MODE if request.param in cases.EXPERT_MODELS else ms.PYNATIVE_MODE
    with in_mode(mode), pynative_operators():
        yield request.param


@pytest.fixture(scope="module")
def model(family, made, peer, mindformers, tmp_path_factory):
    """The folder of a base, and what else MindFormers must know of it."""
    if family == "llama":
        return made.models["grouped"], {}
    if family == "qwen3":
        base = scaled(tiny_qwen3(num_hidden_layers=2), 0.4)
        return save_for_transformers(base, tmp_path_factory.mktemp("qwen3")), {"num_hidden_layers": 2}
    folder = tmp_path_factory.mktemp(family)
    if family in MCORE:
        peer.make_folder(folder=folder, kind=family, config=cases.EXPERT_MODELS[family], seed=5)
        return folder, keys_of_folder(folder)
    config = {**cases.MODELS["grouped"][1], "use_sliding_window": False}
    peer.make_folder(folder=folder, kind="qwen2", config=config, seed=5)
    return folder, {"qkv_has_bias": True}


@pytest.fixture
def make_classifier(model, family, make_llama):
    """Returns a function that builds the classifier of a task with the base's weights."""

    def make(task, labels=LABELS):
        if family in MCORE:
            network = tiny_classifier(family, CLASSES[task], labels, **model[1])
            load_base(network, str(model[0]))
            return network
        from mindformers import LlamaConfig

        from mindlora.training.classifier import model as classifiers
        from tests.support.cpu_llama import ON_CPU

        folder, keys = model
        keys = {**ON_CPU, **llama_keys(folder), **keys, "batch_size": 1, "pad_token_id": 0}
        network = getattr(classifiers, f"Llama{CLASSES[task]}")(LlamaConfig(**keys, num_labels=labels))
        load_base(network, str(folder))
        return network

    return make


def scores(network, task):
    """The scores of IDS as transformers gives them, without padding's: of a text, those of its last token."""
    network.set_train(False)
    found = network(Tensor(IDS))
    # An mcore model returns all rows as one.
    found = (found[0] if isinstance(found, tuple) else found).asnumpy().reshape(*IDS.shape, -1)
    if task == "TOKEN_CLS":
        return found[IDS != 0]
    last = (IDS != 0).sum(-1) - 1
    return found[np.arange(len(IDS)), last]


def peft_scores(peer, model, adapter, task, tmp_path, ids=IDS, labels=LABELS):
    path = tmp_path / "scores.npy"
    peer.classifier_logits(model=model[0], adapter=adapter, ids=ids.tolist(), path=path, task=task, labels=labels)
    found = np.load(path)
    return found[IDS != 0] if task == "TOKEN_CLS" else found


@pytest.mark.parametrize("task", CLASSES)
def test_an_adapter_of_peft_scores_here_as_in_peft(task, family, model, peer, make_classifier, tmp_path):
    adapter = tmp_path / "adapter"
    peer.make_classifier_adapter(model=model[0], folder=adapter, task=task, labels=LABELS, config=ADAPTERS[family][0])
    network = make_classifier(task)
    load_lora(network, str(adapter))
    found = scores(network, task)
    np.testing.assert_allclose(found, peft_scores(peer, model, adapter, task, tmp_path), atol=2e-5)
    assert np.abs(found).max() > 0.1
    # Saved again, it is PEFT's.
    save_lora(network, str(tmp_path / "again"))
    again = read_json(tmp_path / "again", "adapter_config.json")
    assert again["task_type"] == task and again["modules_to_save"] == ["score"]
    np.testing.assert_allclose(peft_scores(peer, model, tmp_path / "again", task, tmp_path), found, atol=2e-5)


@pytest.mark.parametrize("task", CLASSES)
@shows("classifier", "llama", "qwen3")
def test_an_adapter_of_a_new_head_scores_in_peft_as_here(task, family, model, peer, make_classifier, tmp_path):
    network = make_classifier(task)
    config = LoraConfig(lora_rank=4, lora_alpha=6, modules_to_save=["score"], **ADAPTERS[family][1])
    apply_lora(network, config)
    freeze_base(network, config)
    rng = np.random.default_rng(0)
    for parameter in network.trainable_params():
        parameter.set_data(Tensor(rng.normal(0, 0.2, parameter.shape).astype(np.float32)))
    trained = {parameter.name for parameter in network.trainable_params() if "lora" not in parameter.name}
    assert trained == {"score.weight"} | ({"score.bias"} if task == "TOKEN_CLS" else set())
    save_lora(network, str(tmp_path / "adapter"))
    expected = peft_scores(peer, model, tmp_path / "adapter", task, tmp_path)
    np.testing.assert_allclose(scores(network, task), expected, atol=2e-5)


class McoreRowsOf(nn.Cell):
    """What mindlora's wrapper does around an mcore model in training: it takes rows of one token more."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network, self.config = network, network.config
        self.rows = McoreRows(TOKENS)

    def construct(self, input_ids, labels):
        input_ids, labels = self.rows(input_ids, labels)
        return self.network(input_ids, labels=labels)


def test_a_pair_is_compared_by_the_rewards_that_peft_gives(model, peer, family, make_classifier, tmp_path):
    from mindlora.training.preference.loss import preference_loss, preference_measures
    from mindlora.training.preference.settings import preference_settings

    adapter = tmp_path / "adapter"
    peer.make_classifier_adapter(model=model[0], folder=adapter, task="SEQ_CLS", labels=1, config=ADAPTERS[family][0])
    network = make_classifier("SEQ_CLS", labels=1)
    load_lora(network, str(adapter))
    if family in MCORE:
        network = McoreRowsOf(network)
    settings = preference_settings({"loss": "reward"})
    loss = preference_loss(network, settings).set_train()
    ids = np.zeros((2, TOKENS + 1), np.int32)
    ids[:, :-1] = IDS[1:]
    answers = np.where(ids != 0, np.array([[0], [1]]), -1).astype(np.int32)
    # Prompts of three tokens.
    answers[:, :3] = -1
    columns = [ids, np.where(answers >= 0, ids, -100).astype(np.int32), answers]
    with in_mode(ms.GRAPH_MODE if family in MCORE else ms.PYNATIVE_MODE):
        total, sums = loss(*(Tensor(column[None]) for column in columns), Tensor(np.ones((1, 1), np.int32)))
    chosen, rejected = peft_scores(peer, model, adapter, "SEQ_CLS", tmp_path, IDS[1:], 1)[:, 0]
    assert abs(float(total.asnumpy()) - np.logaddexp(0, rejected - chosen)) < 2e-5
    found = preference_measures(sums.asnumpy(), settings)
    np.testing.assert_allclose([found["reward_chosen"], found["reward_rejected"]], [chosen, rejected], atol=2e-5)
