"""TRL on PyTorch, for rl.py: GRPO with LoRA on all linear layers, sampled by transformers' generate.

python rl_trl.py BASE PROMPTS TIMES RANK STEPS COPIES     writes the seconds of each step, and of its sampling, to TIMES

With COPIES 2, a second, unused copy of the base is held too.
"""

import copy
import json
import sys
import time

import datasets
import peft
import torch
import transformers
import trl

ANSWERS, NEW, ROWS = 8, 32, 16


def words(prompts, completions, **columns):
    """Rates an answer by its number of words."""
    return [float(len(text.split())) for text in completions]


def main() -> None:
    """Trains, and writes the times."""
    base, prompts, times, rank, steps, copies = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    others = [copy.deepcopy(model) for _ in range(int(copies) - 1)]
    # All answers have this many tokens.
    model.generation_config.eos_token_id = None
    model.generation_config.min_new_tokens = NEW
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    with open(prompts, encoding="utf-8") as file:
        data = datasets.Dataset.from_list([json.loads(line) for line in file])
    config = trl.GRPOConfig(
        output_dir="trl_output",
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=len(data) * ANSWERS // ROWS,
        num_generations=ANSWERS,
        max_completion_length=NEW,
        max_steps=int(steps),
        learning_rate=2e-5,
        generation_kwargs={"min_new_tokens": NEW},
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        gradient_checkpointing=False,
        bf16=False,
        disable_tqdm=True,
    )
    adapter = peft.LoraConfig(r=int(rank), lora_alpha=int(rank), target_modules="all-linear", task_type="CAUSAL_LM")
    seconds = {"step": [], "sampling": []}

    class Timed(trl.GRPOTrainer):
        """A trainer that records how long answers take."""

        def _generate(self, *arguments, **keys):
            began = time.perf_counter()
            answers = super()._generate(*arguments, **keys)
            seconds["sampling"].append(time.perf_counter() - began)
            return answers

    class Clock(transformers.TrainerCallback):
        """A callback that records how long steps take."""

        def on_step_begin(self, args, state, control, **keys):
            """Starts the clock."""
            self.began = time.perf_counter()

        def on_step_end(self, args, state, control, **keys):
            """Stops the clock."""
            seconds["step"].append(time.perf_counter() - self.began)

    trainer = Timed(
        model,
        words,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[Clock()],
    )
    trainer.train()
    del others
    with open(times, "w", encoding="utf-8") as file:
        json.dump(seconds, file)


if __name__ == "__main__":
    main()
