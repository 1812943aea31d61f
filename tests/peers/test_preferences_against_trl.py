"""Preference training against TRL's trainers, on the same model, rows and adapter: losses, gradients and steps."""

import json
import os
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora
from mindlora.training.preference.conversion import convert_preference
from mindlora.training.step.token_gradients import TokenGradients
from tests.conftest import in_mode
from tests.peers.conftest import llama_keys
from tests.support.instruction_rows import as_jsonl
from tests.support.mcore_networks import save_for_transformers, scaled, tiny_qwen3, with_adapters
from tests.support.peers import cases
from tests.support.what_runs import shows

MODEL, LENGTH, STEPS = "grouped", 32, 5
SIDE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "support", "peers", "trl_side.py")
LORA = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.0}
# PEFT's names, and names here. A Qwen3's q, k and v are one cell, and so are gate and up, so these would train apart.
TARGETS = {
    "llama": {"q_proj": "wq", "v_proj": "wv", "down_proj": "w2"},
    "qwen3": {"o_proj": "linear_proj", "down_proj": "linear_fc2"},
}
# Name -> what TRL is told, and what the YAML says.
CASES = {
    "dpo": ("dpo", {"beta": 0.3}, {"loss": "dpo", "beta": 0.3}),
    "ipo": ("dpo", {"loss_type": "ipo", "beta": 0.4}, {"loss": "ipo", "beta": 0.4}),
    "hinge": ("dpo", {"loss_type": "hinge", "beta": 0.05}, {"loss": "hinge", "beta": 0.05}),
    "dpo-normalized": (
        "dpo",
        {"loss_type": "sigmoid_norm", "beta": 2.0},
        {"loss": "dpo", "beta": 2.0, "length_normalization": True},
    ),
    "dpo-sft": (
        "dpo",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7], "beta": 0.1},
        {"loss": "dpo", "sft_weight": 0.7},
    ),
    "kto": (
        "kto",
        {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8},
        {"loss": "kto", "beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8},
    ),
    "cpo": (
        "cpo",
        {"beta": 0.2, "cpo_alpha": 0.5, "label_smoothing": 0.1},
        {"loss": "cpo", "beta": 0.2, "sft_weight": 0.5, "label_smoothing": 0.1},
    ),
    "simpo": (
        "cpo",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0},
        {"loss": "simpo", "margin": 0.7},
    ),
    "orpo": ("orpo", {"beta": 0.3}, {"loss": "orpo", "beta": 0.3}),
}
# Judged answers, and pairs without a reference: of each a graph, which takes ten seconds to compile. That of pairs with
# one is in test_steps_of_training.
IN_GRAPH_MODE = ("kto", "orpo")


def words(rng, count):
    return " ".join(f"w{number}" for number in rng.integers(4, cases.VOCABULARY, count))


def rows():
    """Pairs and judged answers. All chosen answers have one length: TRL's cross entropy is a mean over their tokens."""
    rng = np.random.default_rng(1)
    pairs, judged = [], []
    for number, (prompt, rejected) in enumerate(((5, 3), (2, 9), (4, 6), (7, 1))):
        text = words(rng, prompt)
        pairs.append({"prompt": text, "chosen": f" {words(rng, 5)}", "rejected": f" {words(rng, rejected)}"})
        judged.append({"prompt": text, "completion": f" {words(rng, rejected)}", "label": number % 3 == 0})
    return pairs, judged


def save_tokenizer(folder):
    """Saves a tokenizer of one token for each word, with bos before a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    vocabulary.update({f"w{number}": number for number in range(4, cases.VOCABULARY)})
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(request):
    """The architecture of the model: MindFormers' legacy Llama in PyNative, or its mcore Qwen3 in graph mode."""
    with in_mode(ms.PYNATIVE_MODE if request.param == "llama" else ms.GRAPH_MODE):
        yield request.param


def make_qwen3():
    """Returns a Qwen3 whose weights are as large as those of PEFT's models here."""
    return scaled(tiny_qwen3(seq_length=LENGTH), 0.4)


@pytest.fixture(scope="module")
def model(family, request, mindformers, tmp_path_factory):
    """The folder of the model as transformers has it."""
    if family == "llama":
        return request.getfixturevalue("made").models[MODEL]
    return save_for_transformers(make_qwen3(), tmp_path_factory.mktemp("qwen3"), bos_token_id=1, eos_token_id=2)


@pytest.fixture(scope="module")
def trl(peer, family, model, tmp_path_factory):
    """The folder with what TRL computed, and the MindRecords of the same rows: name -> path."""
    folder = tmp_path_factory.mktemp("trl")
    save_tokenizer(folder / "tokenizer")
    pairs, judged = rows()
    request = {
        "model": str(model),
        "tokenizer": str(folder / "tokenizer"),
        "folder": str(folder),
        "pairs": pairs,
        "judged": judged,
        "lora": {**LORA, "target_modules": list(TARGETS[family])},
        "steps": STEPS,
        "cases": {name: {"trainer": kind, "arguments": told} for name, (kind, told, _) in CASES.items()},
    }
    (folder / "request.json").write_text(json.dumps(request))
    peer.run(program=SIDE, arguments=[str(folder / "request.json")])
    files = {}
    for name, records in (("pairs", pairs), ("judged", judged)):
        source = as_jsonl(folder / f"{name}.jsonl", records)
        files[name] = str(folder / f"{name}.mindrecord")
        convert_preference(source, files[name], str(folder / "tokenizer"), LENGTH)
    return folder, files, dict(np.load(folder / "results.npz"))


@pytest.fixture
def make_adapted(family, model, checkpoints, make_llama):
    """Returns a function that builds the network with a new adapter of LORA's shape."""
    targets = list(TARGETS[family].values())

    def make():
        if family == "qwen3":
            return with_adapters(make_qwen3(), lora_rank=4, lora_alpha=6, target_modules=targets)
        network = make_llama(**{**llama_keys(model), "seq_length": LENGTH})
        weights = ms.load_checkpoint(str(checkpoints(MODEL)), format="safetensors")
        ms.load_param_into_net(network, weights)
        apply_lora(network, LoraConfig(lora_rank=4, lora_alpha=6, target_modules=targets))
        freeze_base(network)
        return network

    return make


def columns_of(path, settings):
    data = ms.dataset.MindDataset(path, columns_list=list(settings.kind.columns), shuffle=False)
    (batch,) = data.batch(100).create_tuple_iterator(num_epochs=1)
    return batch


def adapted(name):
    """Returns (layer, PEFT's name of the cell, "a" or "b") of one of PEFT's parameters."""
    path, _, part = name.partition(".lora_")
    layer, leaf = re.search(r"layers\.(\d+)\..*\.(\w+)$", path).groups()
    return layer, leaf, part[0].lower()


def adapted_here(name):
    """What ``adapted`` returns, of one of the parameters here."""
    layer, cell, half = re.search(r"layers\.(\d+)\..*\.(\w+)\.mindpet_delta_lora_([ab])$", name).groups()
    (leaf,) = (theirs for targets in TARGETS.values() for theirs, ours in targets.items() if ours == cell)
    return layer, leaf, half


def loss_and_gradients(network, node, trl):
    from mindlora.training.preference.loss import preference_loss
    from mindlora.training.preference.settings import preference_settings

    folder, files, _ = trl
    settings = preference_settings(node)
    cell = preference_loss(network, settings)
    load_lora(network, str(folder / "adapter"))
    gradients = TokenGradients(cell, ms.ParameterTuple(network.trainable_params()), counts=11)
    gradients.set_train()
    batch = columns_of(files["pairs" if settings.kind.pairs else "judged"], settings)
    total, sums, found = gradients(Tensor(1, ms.float32), *batch)
    count = float(sums.asnumpy()[0])
    gradient = {adapted_here(p.name): g.asnumpy() / count for p, g in zip(network.trainable_params(), found)}
    return float(total.asnumpy()) / count, gradient


def of_family(name):
    return pytest.mark.parametrize("family", [name], indirect=True, scope="module")


def assert_equal(case, trl, make_adapted):
    """Asserts that loss and gradients of a case are TRL's."""
    loss, gradients = loss_and_gradients(make_adapted(), CASES[case][2], trl)
    results = trl[2]
    assert loss == pytest.approx(float(results[f"{case}.loss"]), rel=1e-6)
    expected = gradients_of(results, case)
    assert gradients.keys() == expected.keys()
    # Two networks in float32: their logits differ by as much before any loss.
    assert distance(gradients, expected) < 3e-6


@of_family("llama")
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients(case, trl, make_adapted):
    assert_equal(case, trl, make_adapted)


@of_family("qwen3")
@pytest.mark.parametrize("case", IN_GRAPH_MODE)
def test_losses_and_gradients_in_graph_mode(case, trl, make_adapted):
    assert_equal(case, trl, make_adapted)


def gradients_of(results, prefix):
    """(layer, PEFT's name of the cell, "a" or "b") -> array of what TRL wrote under a prefix."""
    found = {key.partition(".")[2]: value for key, value in results.items() if key.startswith(f"{prefix}.")}
    found.pop("loss", None)
    return {adapted(name): value for name, value in found.items()}


def distance(found, expected):
    """The norm of the difference of all arrays, of that of the expected ones."""
    difference = sum(np.square(found[name] - expected[name], dtype=np.float64).sum() for name in expected)
    return np.sqrt(difference / sum(np.square(value, dtype=np.float64).sum() for value in expected.values()))


@shows("preference", "llama", "qwen3")
def test_steps_of_training(trl, make_adapted):
    from mindformers.core.optim import AdamW

    from mindlora.training.preference.settings import preference_settings
    from mindlora.training.step.train_step import LoraTrainOneStepCell

    folder, files, results = trl
    network = make_adapted()
    node = CASES["dpo"][2]
    optimizer = AdamW(network.trainable_params(), 1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    step = LoraTrainOneStepCell(network, optimizer, preference=node)
    load_lora(network, str(folder / "adapter"))
    step.set_train()
    batch = columns_of(files["pairs"], preference_settings(node))
    losses = [float(step(*batch)[0].asnumpy()) for _ in range(STEPS)]
    np.testing.assert_allclose(losses, results["losses"], rtol=1e-5)
    expected = gradients_of(results, "trained")
    worst = max(np.abs(p.asnumpy() - expected[adapted_here(p.name)]).max() for p in network.trainable_params())
    assert worst < 1e-5
