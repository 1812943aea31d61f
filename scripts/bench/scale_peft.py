"""PEFT on PyTorch, for scale.py: trains LoRA on all linear layers.

python scale_peft.py BASE ROWS TIMES RANK STEPS DTYPE     writes when the base was loaded and each step ended to TIMES
"""

import json
import sys
import time

import numpy as np
import peft
import torch
import transformers


def main() -> None:
    """Trains on one row per step, with AdamW."""
    base, rows, times, rank, steps, dtype = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    config = peft.LoraConfig(r=int(rank), lora_alpha=int(rank), target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
    ends = [time.time()]
    for row in np.load(rows)[: int(steps)]:
        # As in mindlora's rows, each token except the last predicts the next.
        tokens = torch.tensor(row[None], dtype=torch.long)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        ends.append(time.time())
    with open(times, "w", encoding="utf-8") as file:
        json.dump(ends, file)


if __name__ == "__main__":
    main()
