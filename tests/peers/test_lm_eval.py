"""lm-evaluation-harness asks mindlora and its own model ``hf`` the same: choices, likelihoods and texts agree."""

import glob
import json
import os
import re
import subprocess
import sys

import pytest

from mindlora.core.errors import LoraError
from tests.support import forked, served_llama
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.runs import environment, succeeded

SEQ_LENGTH = 64
CHOICES = [["cats", "no dogs", "2"], ["how many", "dogs there are"], ["and", "温太医"], ["cats there", "many dogs"]]
ROWS = [
    {"context": f"{start} {end}", "choices": choices, "answer": number % len(choices), "text": text * (1 + 3 * number)}
    for number, (start, end, choices, text) in enumerate(
        zip(["how many", "and", "no", "There are"], ["cats", "dogs ", "cats there", "2"], CHOICES, ["no cats. "] * 4)
    )
]
MULTIPLE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": metric, "aggregation": "mean"} for metric in ("acc", "acc_norm")],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}
UNTIL = {
    "output_type": "generate_until",
    "doc_to_text": "{{context}}",
    "doc_to_target": "{{text}}",
    "generation_kwargs": {"until": ["s"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean"}],
}
TASKS = {"local_choices": MULTIPLE, "local_texts": ROLLING, "local_answers": UNTIL}
COMMAND = "import sys; from mindlora.cli.eval import harness; sys.exit(harness())"
SIDE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "support", "peers", "lm_eval_side.py")


def has_lm_eval(python):
    # To import it takes seconds.
    found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lm_eval') is None)"
    return subprocess.run([python, "-c", found], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def folder(library, tmp_path_factory):
    """A tiny Llama with adapters, and three tasks on local rows."""
    folder = tmp_path_factory.mktemp("harness")
    with pytest.MonkeyPatch.context() as patch:
        # With an adapter, ``hf`` cuts the vocabulary of the model to that of the tokenizer.
        patch.setattr(served_llama, "VOCABULARY", len(chat_tokenizer(CHATML)))
        served_llama.write_llama(str(folder))
    # transformers looks for this name.
    os.rename(folder / "base" / "model-0.safetensors", folder / "base" / "model.safetensors")
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    for name, task in TASKS.items():
        files = {"test": str(folder / "rows.jsonl")}
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({**common, **task}), encoding="utf-8")
    return folder


def words(model, model_args, folder):
    """Returns the words of lm-eval's command line."""
    found = ["run", "--model", model, "--model_args", model_args, "--tasks", ",".join(TASKS), "--device", "cpu"]
    return [*found, "--include_path", str(folder), "--output_path", str(folder / model), "--log_samples"]


def answers(model, folder):
    """Returns {task: [what each request got]}."""
    found = {}
    for name in TASKS:
        (path,) = glob.glob(str(folder / model / "**" / f"samples_{name}_*.jsonl"), recursive=True)
        with open(path, encoding="utf-8") as file:
            samples = sorted(map(json.loads, file), key=lambda sample: sample["doc_id"])
        found[name] = [got for sample in samples for got in sample["resps"]]
    return found


@pytest.fixture(scope="module")
def mindlora_and_hf(folder, peer):
    """What both models get, with an adapter: tables and answers of each."""
    peers = os.environ.get("MINDLORA_PEERS_PYTHON")
    for python, extra in ((sys.executable, "pip install 'mindlora[eval]'"), (peers, "tests/peers/requirements.txt")):
        if python is None or not has_lm_eval(python):
            pytest.skip(f"{python} has no lm-eval: {extra}")
    served = f"config=run.yaml,adapter=adapters/first,seq_length={SEQ_LENGTH}"
    loaded = f"pretrained=base,peft=adapters/first,dtype=float32,max_length={SEQ_LENGTH}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "hub")}
    run = forked.run(["-c", COMMAND, *words("mindlora", served, folder)], folder, {**environment(), **offline})
    tables = succeeded(run), peer.run(program=SIDE, arguments=[folder, *words("hf", loaded, folder)])
    return [(printed, answers(model, folder)) for printed, model in zip(tables, ("mindlora", "hf"))]


def test_choices_and_likelihoods_are_those_of_hf(mindlora_and_hf):
    (_, ours), (_, theirs) = mindlora_and_hf
    assert len(ours["local_choices"]) == len(theirs["local_choices"]) == sum(map(len, CHOICES))
    for (mine,), (its,) in zip(ours["local_choices"], theirs["local_choices"]):
        assert float(mine[0]) == pytest.approx(float(its[0]), abs=1e-4) and mine[1] == its[1]
    # Sums over up to 200 tokens, in several windows.
    for (mine,), (its,) in zip(ours["local_texts"], theirs["local_texts"]):
        assert float(mine) == pytest.approx(float(its), rel=1e-6, abs=1e-4)


def test_texts_are_those_of_hf(mindlora_and_hf):
    (_, ours), (_, theirs) = mindlora_and_hf
    assert ours["local_answers"] == theirs["local_answers"]
    assert len({str(text) for text in ours["local_answers"]}) > 1


def test_the_tables_are_printed_and_equal(mindlora_and_hf):
    tables = [
        [line for line in printed.splitlines() if line.startswith("|") and "local_" in line]
        for printed in (mindlora_and_hf[0][0], mindlora_and_hf[1][0])
    ]
    assert len(tables[0]) == len(TASKS) and tables[0] == tables[1]


@pytest.mark.parametrize(
    "model_args, told",
    [
        ("adapter=adapters/first", "model_args must name one model: give config=YAML or model=FOLDER"),
        ("config=run.yaml,seq_lenght=4", "model_args has seq_lenght, which mindlora does not know. Did you mean"),
        ("config=run.yaml,slots=many", "model_args: argument --slots: invalid int value: 'many'"),
        ("config=nowhere.yaml", "--config nowhere.yaml does not exist"),
    ],
)
def test_wrong_arguments_are_named(folder, monkeypatch, model_args, told):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'mindlora[eval]'")
    from mindlora.cli.harness import HarnessModel

    monkeypatch.chdir(folder)
    with pytest.raises(LoraError, match=re.escape(told)):
        HarnessModel.create_from_arg_string(model_args)
