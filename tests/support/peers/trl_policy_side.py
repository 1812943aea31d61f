"""TRL, in the peers' environment: advantages, losses and gradients of GRPOTrainer and RLOOTrainer on given numbers.

``python trl_policy_side.py request.json`` with {"folder", "rewards", "log_probs", "old_log_probs",
"reference_log_probs", "completions", "cases"}; ``cases`` is name -> {"algorithm", "arguments"}. The trainers' own code
scores and computes; what is replaced is the text that they sample, the rewards and the log-probabilities, so that all
of it is in float64. It writes results.json: name -> {"advantages", "mask", "loss", "gradient", "metrics"}.
"""

import json
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

TRAINERS = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}


def first(completions, **columns):
    """A reward function that is not called."""


def second(completions, **columns):
    """A reward function that is not called."""


class GivenLogProbs:
    """What the trainers take for the log-probabilities: of the policy that sampled and of the reference while answers
    are scored, and of the policy that trains, with a gradient, in the loss.
    """

    def __init__(self, request, trainer):
        for name in ("log_probs", "old_log_probs", "reference_log_probs"):
            setattr(self, name, torch.tensor(request[name], dtype=torch.float64))
        self.log_probs.requires_grad_()
        self.trainer = trainer
        self.scores = True

    def __call__(self, model, *arguments, **keywords):
        if not self.scores:
            values = self.log_probs
        else:
            values = self.reference_log_probs if model is self.trainer.ref_model else self.old_log_probs
        return values, torch.zeros_like(values), None


def make_trainer(request, case):
    """Returns a trainer of a case, on a model that is not asked anything."""
    config, trainer = TRAINERS[case["algorithm"]]
    settings = config(
        output_dir=request["folder"],
        per_device_train_batch_size=len(request["rewards"]),
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=False,
        bf16=False,
        **case["arguments"],
    )
    return trainer(
        model=request["folder"] + "/model",
        reward_funcs=[first, second],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * len(request["rewards"])),
        processing_class=PreTrainedTokenizerFast.from_pretrained(request["folder"] + "/tokenizer"),
    )


def computed(request, case):
    """Returns what a trainer makes of the numbers."""
    trainer = make_trainer(request, case)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rewards = torch.tensor(request["rewards"], dtype=torch.float64)
    completions = request["completions"]
    sampled = completions if case["algorithm"] == "rloo" else (completions, None)
    trainer._generate_single_turn = lambda *arguments: sampled
    trainer._calculate_rewards = lambda *arguments: rewards
    given = trainer._get_per_token_logps_and_entropies = GivenLogProbs(request, trainer)
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(completions))
    given.scores = False
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return {
        "advantages": inputs["advantages"].tolist(),
        "mask": inputs["completion_mask"].tolist(),
        "loss": loss.item(),
        "gradient": given.log_probs.grad.tolist(),
        "metrics": {name: values[-1] for name, values in trainer._metrics["train"].items()},
    }


def save_model(folder):
    """Saves a model of one layer and a tokenizer of a few words."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder + "/tokenizer")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=8, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder + "/model")


def main(path):
    torch.set_num_threads(1)
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    save_model(request["folder"])
    results = {name: computed(request, case) for name, case in request["cases"].items()}
    with open(request["folder"] + "/results.json", "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1])
