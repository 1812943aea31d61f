"""Tiny runs that learn from rewards, through mindlora-run: their prompts, rewards and YAML."""

import json

from mindlora.data import tokenizers
from tests.support import tiny_runs
from tests.support.mcore_networks import tiny_config

# A cell of attention and one of the MLP; those of a Qwen3 are joined cells.
PET = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ".*linear_qkv|.*linear_fc1|.*wq|.*w1", "lora_dropout": 0.0}
SIZES = {"vocab_size": 300, "seq_length": 32, "eos_token_id": 1, "pad_token_id": 2, "bos_token_id": 0}
# What the answer to each prompt must be, with room for it in max_completion_length.
OUTPUTS = ({"regex": "[a-e]{1,4}"}, None, {"choice": ["the cat", "a bee"]}, '{"json": {"enum": ["e", 7]}}')
REWARDS = """
import json, re
KEEPS = {
    "regex": lambda pattern, text: re.fullmatch(pattern, text),
    "choice": lambda texts, text: text in texts,
    "json": lambda schema, text: json.loads(text) in schema["enum"],
}

def share_of_e(prompts, completions, **columns):
    assert columns["answer"] == ["e"] * len(prompts), columns
    for outputs, text in zip(columns["outputs"], completions):
        outputs = json.loads(outputs) if isinstance(outputs, str) else outputs
        assert all(KEEPS[kind](value, text) for kind, value in (outputs or {}).items()), (outputs, text)
    return [text.count("e") / max(len(text), 1) for text in completions]

def forgets(prompts, completions, **columns):
    return [0.0]
"""


def write_inputs(folder):
    """Writes tokenizer, prompts and rewards."""
    texts = ["the cat sees the tree", "she sees three bees", "a dog and a boat on a hill"] * 5
    made = tokenizers.fit_tokenizer(texts, SIZES["vocab_size"])
    made.save_pretrained(folder / "model")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    texts = ("the cat", "she sees", "a dog", "three bees")
    rows = [{"prompt": text, "answer": "e", "outputs": outputs} for text, outputs in zip(texts, OUTPUTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rows = [{**row, "completion": " sees"} for row in rows]
    (folder / "completed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# Six steps of two prompts.
RL = {
    "prompts": "prompts.jsonl",
    "reward_funcs": "rewards.py:share_of_e",
    "prompts_per_step": 2,
    "num_generations": 7,
    "max_completion_length": 8,
    "tokenizer": "model",
    "held_out_prompts": "prompts.jsonl",
    "held_out_steps": 2,
    "beta": 0.02,
    "max_disagreement": 1e-4,
    "structured_outputs": {"column": "outputs"},
}
# What changes in it for a run that learns a teacher's distribution.
OF_GKD = {
    **dict.fromkeys(("reward_funcs", "structured_outputs", "beta", "max_disagreement")),
    **{"prompts": "completed.jsonl", "num_generations": 5, "temperature": 0.9},
}


def config_of(
    resume=False, base=None, model=(), pet=(), model_type="qwen3", rate=None, epochs=3, callbacks=(), changes=(), **rl
):
    """Returns its YAML; ``model_type`` is "llama" or in mcore_networks.SIZES, ``base`` a file, if any; None takes a key
    of RL out."""
    callbacks = [*callbacks, {"type": "LoraCheckpoint", "save_steps": 2, "keep_last": 9}]
    if model_type == "llama":
        config = tiny_runs.tiny_config("", epochs, callbacks)
    else:
        config = tiny_config("", epochs, callbacks, {}, model_type)
    config.update(changes)
    pet_config = {"pet_type": "lora", **PET, **dict(pet)}
    config["model"]["model_config"].update({**SIZES, **dict(model), "pet_config": pet_config})
    config["runner_config"]["batch_size"] = 6
    config["lr_schedule"].update(learning_rate=rate or 5e-2, type="ConstantWarmUpLR", warmup_ratio=0.0)
    config["lr_schedule"].pop("lr_end", None)
    for node in ("train_dataset", "train_dataset_task"):
        del config[node]
    config["runner_wrapper"]["rl"] = {key: value for key, value in {**RL, **rl}.items() if value is not None}
    if base is not None:
        config.update(load_checkpoint=str(base), load_ckpt_format="safetensors")
    config["callbacks"][-1]["resume"] = resume
    return config


def start(folder, name, resume=False, **keys):
    """Runs it, with the keys of config_of; returns the process and its output folder."""
    return tiny_runs.launch(config_of(resume, **keys), folder / name), folder / name
