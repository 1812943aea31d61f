"""TRL, in the peers' environment: GKDTrainer's loss of given logits, and its gradient, in float64.

``python trl_divergence_side.py request.json`` with {"student", "teacher", "labels", "temperature", "betas", "results"}.
It writes ``results``: a list with {"loss", "gradient"} for each beta.
"""

import json
import sys

import torch
from trl.experimental.gkd import GKDTrainer


def main():
    """Reads the request and writes the results."""
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    teacher = torch.tensor(request["teacher"], dtype=torch.float64)
    labels = torch.tensor(request["labels"])
    results = []
    for beta in request["betas"]:
        student = torch.tensor(request["student"], dtype=torch.float64, requires_grad=True)
        keys = {"beta": beta, "temperature": request["temperature"]}
        loss = GKDTrainer.generalized_jsd_loss(student, teacher, labels, **keys)
        loss.backward()
        results.append({"loss": loss.item(), "gradient": student.grad.tolist()})
    with open(request["results"], "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
