"""Classifiers with adapters, on Llama and Qwen2: scores of PEFT's adapters here, and of ours in PEFT."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.network.load_base import load_base
from tests.peers.conftest import TOKENS, llama_keys
from tests.support.peers import cases
from tests.support.peers.peer import read_json

LABELS = 3
LORA = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.0}
CLASSES = {"SEQ_CLS": "LlamaForSequenceClassification", "TOKEN_CLS": "LlamaForTokenClassification"}
# Texts of several lengths, padded at the end.
IDS = np.random.default_rng(3).integers(3, cases.VOCABULARY, (3, TOKENS)).astype(np.int32)
IDS[1, 9:] = IDS[2, 4:] = 0


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request, made, peer, tmp_path_factory):
    """The folder of a base, and what else MindFormers must know of it."""
    if request.param == "llama":
        return made.models["grouped"], {}
    folder = tmp_path_factory.mktemp("qwen2")
    config = {**cases.MODELS["grouped"][1], "use_sliding_window": False}
    peer.make_folder(folder=folder, kind="qwen2", config=config, seed=5)
    return folder, {"qkv_has_bias": True}


@pytest.fixture
def make_classifier(model, make_llama):
    """Returns a function that builds the classifier of a task with the base's weights."""

    def make(task, labels=LABELS):
        from mindformers import LlamaConfig

        from mindlora.training.classifier import model as classifiers
        from tests.support.cpu_llama import ON_CPU

        folder, keys = model
        keys = {**ON_CPU, **llama_keys(folder), **keys, "batch_size": 1, "pad_token_id": 0}
        network = getattr(classifiers, CLASSES[task])(LlamaConfig(**keys, num_labels=labels))
        load_base(network, str(folder))
        return network

    return make


def scores(network, task):
    """The scores of IDS as transformers gives them, without padding's: of a text, those of its last token."""
    network.set_train(False)
    found = network(Tensor(IDS))[0].asnumpy()
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
def test_an_adapter_of_peft_scores_here_as_in_peft(task, model, peer, make_classifier, tmp_path, pynative_mode):
    adapter = tmp_path / "adapter"
    peer.make_classifier_adapter(model=model[0], folder=adapter, task=task, labels=LABELS, config=LORA)
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
def test_an_adapter_of_a_new_head_scores_in_peft_as_here(task, model, peer, make_classifier, tmp_path, pynative_mode):
    network = make_classifier(task)
    config = LoraConfig(lora_rank=4, lora_alpha=6, target_modules=["wq", "w2"], modules_to_save=["score"])
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
    assert ms.get_context("mode") == ms.PYNATIVE_MODE


def test_a_pair_is_compared_by_the_rewards_that_peft_gives(model, peer, make_classifier, tmp_path, pynative_mode):
    from mindlora.training.preference.loss import preference_measures
    from mindlora.training.preference.settings import preference_settings
    from mindlora.training.preference.step import preference_loss

    adapter = tmp_path / "adapter"
    peer.make_classifier_adapter(model=model[0], folder=adapter, task="SEQ_CLS", labels=1, config=LORA)
    network = make_classifier("SEQ_CLS", labels=1)
    load_lora(network, str(adapter))
    settings = preference_settings({"loss": "reward"})
    loss = preference_loss(network, settings).set_train()
    ids = np.zeros((2, TOKENS + 1), np.int32)
    ids[:, :-1] = IDS[1:]
    answers = np.where(ids != 0, np.array([[0], [1]]), -1).astype(np.int32)
    # Prompts of three tokens.
    answers[:, :3] = -1
    columns = [ids, np.where(answers >= 0, ids, -100).astype(np.int32), answers]
    total, sums = loss(*(Tensor(column[None]) for column in columns), Tensor(np.ones((1, 1), np.int32)))
    chosen, rejected = peft_scores(peer, model, adapter, "SEQ_CLS", tmp_path, IDS[1:], 1)[:, 0]
    assert abs(float(total.asnumpy()) - np.logaddexp(0, rejected - chosen)) < 2e-5
    found = preference_measures(sums.asnumpy(), settings)
    np.testing.assert_allclose([found["reward_chosen"], found["reward_rejected"]], [chosen, rejected], atol=2e-5)
