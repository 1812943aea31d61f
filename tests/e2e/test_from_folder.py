"""The way of the README from a model's folder and rows to an adapter and its answers, on tiny models in bfloat16."""

import json
import re
import shlex

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from tests.support import forked
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.llama_checkpoints import HEAD_DIM, HIDDEN, HUGGING_FACE, llama, save_base
from tests.support.runs import ROOT, python, succeeded
from tests.support.what_runs import shows

VOCABULARY = 384
# The README's, and one of MindFormers' legacy models in its place.
NAMED, OTHER = "Qwen3-0.6B", "Llama-3.2-1B"
PROGRAMS = {"mindlora": "mindlora.cli", "mindlora-run": "mindlora.training.launch.launcher"}


def commands(first, last):
    """Returns the commands of the README's block that begins and ends with these words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [block.strip().splitlines() for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S)]
    return next(block for block in blocks if block[0].startswith(first) and block[-1].startswith(last))


def run(command, folder):
    """Runs a command of mindlora, and returns what it printed."""
    program, *words = shlex.split(command, comments=True)
    return succeeded(python(["-m", PROGRAMS[program], *words], folder))


def write_model(folder, qwen3):
    """Writes a model as Hugging Face has it: a Qwen3, whose two tables are one, or a Llama."""
    tensors = llama(BFLOAT16, tied=qwen3)
    config = {**HUGGING_FACE, "vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    shapes = {name: (VOCABULARY, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight") if name in tensors}
    if qwen3:
        own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": HEAD_DIM}
        config.update(own, tie_word_embeddings=True)
        norms = [f"model.layers.{layer}.self_attn.{norm}.weight" for layer in range(2) for norm in ("q_norm", "k_norm")]
        shapes.update(dict.fromkeys(norms, (HEAD_DIM,)))
    for name, shape in shapes.items():
        tensors[name] = from_float32(np.random.default_rng(0).normal(size=shape).astype(np.float32), BFLOAT16)
    save_base(folder, tensors, **config)
    chat_tokenizer(CHATML).save_pretrained(folder)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(NAMED, marks=shows("served", "qwen3")),
        pytest.param(OTHER, marks=[shows("served", "llama"), pytest.mark.long]),
    ],
)
def model(request):
    """The folder of the model."""
    return request.param


@pytest.fixture(scope="module")
def trained(model, library, tmp_path_factory):
    """The folder in which the README's three commands ran."""
    folder = tmp_path_factory.mktemp("readme")
    write_model(folder / model, qwen3=model == NAMED)
    rows = [{"instruction": f"How many cats, {number}?", "output": "There are 2 cats."} for number in range(8)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    way = commands("mindlora data", "mindlora-run")
    assert len(way) == 3
    with pytest.MonkeyPatch.context() as patch:
        # A user has set neither.
        for variable in ("MINDLORA_GRAPH_CACHE", forked.GRAPHS):
            patch.delenv(variable)
        patch.setenv("XDG_CACHE_HOME", str(folder / "caches"))
        for command in way:
            run(command.replace(NAMED, model), folder)
    return folder


def test_three_commands_make_an_adapter(trained):
    history = (trained / "output" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [step["loss"] for step in map(json.loads, history) if "loss" in step]
    assert len(losses) == 3 and all(map(np.isfinite, losses))
    adapter = load_file(trained / "output" / "lora_checkpoint" / "best" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 7 * 2 and all(array.any() for array in adapter.values())


def test_training_keeps_its_graphs_in_the_user_s_folder(trained):
    assert list((trained / "caches" / "mindlora" / "graphs").glob("*.mindir"))


@pytest.fixture(scope="module")
def answered(trained, model):
    """Two processes that answered with the README's command, and kept the graphs for each other."""
    asked = commands("mindlora generate", "mindlora serve")[0].replace(NAMED, model)
    _, *words = shlex.split(f"{asked} --max-tokens 4 --json --verbose", comments=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINDLORA_GRAPH_CACHE", str(trained / "graphs"))
        return [python(["-m", PROGRAMS["mindlora"], *words], trained) for _ in range(2)]


def test_the_folder_answers_with_the_adapter(answered):
    """Serving compares the adapter's fingerprint of the base with the folder's: it was trained on these weights.

    The report is all that a program finds on stdout: MindSpore's libraries print to the descriptor themselves.
    """
    report = json.loads(succeeded(answered[0]))
    assert [answer["adapter"] for answer in report["answers"]] == [None, "best"]
    assert not any(answer["error"] for answer in report["answers"])


def test_a_second_start_takes_its_graphs_from_the_cache_and_answers_alike(answered, trained):
    first, second = answered
    texts = [[answer["text"] for answer in json.loads(succeeded(start))["answers"]] for start in (first, second)]
    assert texts[0] == texts[1]
    compiled = list((trained / "graphs").glob("*.mindir"))
    assert second.stderr.count("was taken from") == len(compiled) > 0 and "was taken from" not in first.stderr
