"""TRL, in the peers' environment: losses, gradients and training steps of its trainers on given rows and adapters.

``python trl_side.py request.json`` with {"model", "tokenizer", "folder", "pairs", "judged", "lora", "cases", "steps"};
``cases`` is name -> {"trainer", "arguments"}. It writes to ``folder``: adapter/, an adapter with random A and B, with
which losses and gradients are computed, and results.npz: "<case>.loss", "<case>.<name of a gradient>", and, after
``steps`` of AdamW from that adapter with the first case, "losses" and "trained.<name>".
"""

import json
import sys

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS = {
    "dpo": (DPOConfig, DPOTrainer),
    "kto": (KTOConfig, KTOTrainer),
    "cpo": (CPOConfig, CPOTrainer),
    "orpo": (ORPOConfig, ORPOTrainer),
}


def make_trainer(request, kind, arguments, rows):
    """Returns a trainer of a new adapter on the model."""
    config, trainer = TRAINERS[kind]
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    settings = config(
        output_dir=request["folder"],
        per_device_train_batch_size=len(rows),
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=False,
        bf16=False,
        **arguments,
    )
    tokenizer = AutoTokenizer.from_pretrained(request["tokenizer"])
    # KTO and DPO would copy an adapter that has been trained, and compare with it.
    adapter = LoraConfig(task_type="CAUSAL_LM", **request["lora"])
    dataset = Dataset.from_list(rows)
    if kind in ("cpo", "orpo"):
        return trainer(get_peft_model(model, adapter), args=settings, train_dataset=dataset, processing_class=tokenizer)
    return trainer(model, args=settings, train_dataset=dataset, processing_class=tokenizer, peft_config=adapter)


def adapter_of(model):
    """Returns name -> parameter of the adapter that trains."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def set_random(model):
    """Gives the adapter random values, the same in each call."""
    generator = torch.Generator().manual_seed(3)
    for _, parameter in sorted(adapter_of(model).items()):
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


def loss_of(trainer, kind, batch):
    """Returns the loss as the trainer computes it."""
    if kind == "orpo":
        # TRL takes the cross entropy of the prompt too; its parts give that of the answers, as in the paper.
        chosen, rejected, *_ = trainer.concatenated_forward(trainer.model, batch)
        return -chosen.mean() - trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    if kind == "cpo":
        return trainer.get_batch_loss_metrics(trainer.model, batch)[0]
    return trainer.compute_loss(trainer.model, batch)


def main(path):
    torch.set_num_threads(1)
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    results = {}
    for number, (name, case) in enumerate(request["cases"].items()):
        kind = case["trainer"]
        trainer = make_trainer(request, kind, case["arguments"], request["judged" if kind == "kto" else "pairs"])
        model = trainer.model
        model.train()
        set_random(model)
        batch = collate(trainer)
        loss = loss_of(trainer, kind, batch)
        loss.backward()
        results[f"{name}.loss"] = loss.detach().numpy()
        for parameter_name, parameter in adapter_of(model).items():
            results[f"{name}.{parameter_name}"] = parameter.grad.numpy().copy()
        if number == 0:
            model.save_pretrained(request["folder"] + "/adapter")
            results.update(trained(trainer, kind, batch, request["steps"]))
    np.savez(request["folder"] + "/results.npz", **results)


def collate(trainer):
    """Returns all rows as one batch, in their order."""
    rows = [trainer.train_dataset[number] for number in range(len(trainer.train_dataset))]
    return trainer.data_collator(rows)


def trained(trainer, kind, batch, steps):
    """Returns the losses of some steps, and the adapter after them."""
    parameters = adapter_of(trainer.model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(trainer, kind, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return {"losses": np.array(losses), **{f"trained.{name}": p.detach().numpy() for name, p in parameters.items()}}


if __name__ == "__main__":
    main(sys.argv[1])
