"""Output head and cross entropy in pieces against all tokens at once: time and peak memory on a CPU.

Both sides compute loss and gradients as mindlora's train step does, from hidden states and labels, a fifth of which do
not count: "whole" with MindFormers' CrossEntropyLoss and mindlora's CPU operators, "pieces" with LabelLosses, or
AdaptedLabelLosses if the head has LoRA of rank 16. For the times, they take turns in one process, as in the benchmark
ops, with its tables; for the peak, each has its own process.
"""

import argparse
import json
import subprocess
import sys
from typing import Any, Dict, List

import mindspore as ms
import numpy as np
from mindformers.core.loss.loss import CrossEntropyLoss
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype

from bench.common import AGAIN, BASE, add_number, child_command, compare, load_average, text, wait
from mindlora.models.label_losses import tokens_at_once
from mindlora.network.cells.label_losses import AdaptedLabelLosses, LabelLosses
from mindlora.training.model.cpu_cells import use_cpu_cells
from mindlora.training.step.token_gradients import TokenGradients

HEADS = ("frozen", "trained", "adapted")
RANK = 16
SIDES = ("whole", "pieces")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_number(parser, "--rounds", 12, 2, "measured rounds of each table")
    add_number(parser, "--tokens", 1024, 48, "tokens of a batch")
    add_number(parser, "--channels", 512, 16, "width of the hidden states")
    add_number(parser, "--vocabularies", [32000, 152000], [700], "sizes of the vocabulary", nargs="+")
    parser.add_argument("--heads", choices=HEADS, nargs="+", default=["frozen"], help="default: frozen")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the tables and returns their figures."""
    figures: Dict[str, Any] = {"tables": [], "memory": []}
    for vocabulary in args.vocabularies:
        for head in args.heads:
            (table,) = in_a_process(args, "time", vocabulary, head)
            print(f"{text(table)}\n(load {table['load_average']})\n", flush=True)
            figures["tables"].append(table)
            peaks = {side: in_a_process(args, side, vocabulary, head)[0]["bytes"] for side in SIDES}
            whole, pieces = (peaks[side] / 2**20 for side in SIDES)
            print(f"peak beside the weights: whole {whole:,.0f} MiB, pieces {pieces:,.0f} MiB\n", flush=True)
            figures["memory"].append({"vocabulary": vocabulary, "head": head, **peaks})
    return figures


def in_a_process(args: argparse.Namespace, what: str, vocabulary: int, head: str) -> List[Dict[str, Any]]:
    """Runs a child process of this benchmark, and returns the JSON lines that it prints."""
    options = ["--rounds", str(args.rounds), "--tokens", str(args.tokens), "--channels", str(args.channels)]
    command = child_command("loss", *options, "--child", what, str(vocabulary), head)
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        sys.exit(f"error: {' '.join(command)} failed")
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def child(args: argparse.Namespace, words: List[str]) -> None:
    """Prints a line of JSON: a table of both sides' times, or one side's peak."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    what, vocabulary, head = words[0], int(words[1]), words[2]
    batch = labels_and_mask(args.tokens, vocabulary)
    if what != "time":
        print(json.dumps({"bytes": peak_of(step_of(what, args, vocabulary, head), batch)}), flush=True)
        return
    sides = {BASE: "whole", AGAIN: "whole", "pieces": "pieces"}
    piece = min(tokens_at_once(args.tokens, args.channels, vocabulary), args.tokens)
    table = compare(
        f"loss and gradients, {args.tokens} tokens of {args.channels}, vocabulary {vocabulary:,}, head {head}; "
        f"base: all tokens at once; pieces of {piece}",
        {name: step_of(side, args, vocabulary, head) for name, side in sides.items()},
        batch,
        args.rounds,
        "goal: 1.0 at a vocabulary of 32,000, 0.8 at 152,000",
    )
    print(json.dumps({**table, "load_average": load_average()}), flush=True)


class Head(nn.Cell):
    """(sum of the losses, number of tokens) from hidden states, a parameter, by one of SIDES."""

    def __init__(self, side: str, args: argparse.Namespace, vocabulary: int, head: str):
        super().__init__()
        rng = np.random.default_rng(0)
        hidden = rng.standard_normal((args.tokens, args.channels), np.float32)
        weight = 0.05 * rng.standard_normal((vocabulary, args.channels), np.float32)
        self.hidden = Parameter(Tensor(hidden), name="hidden")
        self.weight = Parameter(Tensor(weight), name="weight", requires_grad=head == "trained")
        self.is_whole = side == "whole"
        self.product = ops.MatMul(transpose_b=True)
        self.loss = CrossEntropyLoss(calculate_per_token_loss=True)
        self.losses = LabelLosses(mstype.float32, head == "trained")
        self.is_adapted = head == "adapted"
        if self.is_adapted:
            shapes = {"a": (RANK, args.channels), "b": (vocabulary, RANK)}
            self.a, self.b = (
                Parameter(Tensor(0.05 * rng.standard_normal(shape, np.float32)), name=name)
                for name, shape in shapes.items()
            )
            self.losses = AdaptedLabelLosses(mstype.float32)

    def construct(self, labels: Tensor, mask: Tensor):
        low_rank = self.product(self.hidden, self.a) if self.is_adapted else None
        if self.is_whole:
            logits = self.product(self.hidden, self.weight)
            logits = logits + self.product(low_rank, self.b) if self.is_adapted else logits
            return self.loss(logits, labels, mask)
        if self.is_adapted:
            losses = self.losses(self.hidden, low_rank, self.weight, self.b, labels)
        else:
            losses = self.losses(self.hidden, self.weight, labels)
        return (losses * mask).sum(), mask.sum()


class Step(nn.Cell):
    """Loss and gradients of a Head."""

    def __init__(self, head: Head):
        super().__init__(auto_prefix=False)
        self.gradients = TokenGradients(head, ParameterTuple(head.trainable_params()))
        self.one = Tensor(1, mstype.float32)

    def construct(self, labels: Tensor, mask: Tensor):
        return self.gradients(self.one, labels, mask)


def step_of(side: str, args: argparse.Namespace, vocabulary: int, head: str) -> Step:
    """Returns the step of one side."""
    network = Head(side, args, vocabulary, head)
    use_cpu_cells(network)
    return Step(network).set_train()


def labels_and_mask(tokens: int, vocabulary: int) -> List[Tensor]:
    """Returns labels, int32 [tokens], and the mask of those that count, float32 [tokens]."""
    rng = np.random.default_rng(1)
    mask = (rng.random(tokens) < 0.8).astype(np.float32)
    labels = np.where(mask > 0, rng.integers(0, vocabulary, tokens), -100)
    return [Tensor(labels.astype(np.int32)), Tensor(mask)]


def peak_of(step: Step, batch: List[Tensor]) -> int:
    """Returns how many bytes this process's peak in two steps exceeds its memory after compilation."""
    step.compile(*batch)
    # Resets the peak to the memory that is now resident.
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = peak()
    for _ in range(2):
        wait(step(*batch))
    return peak() - before


def peak() -> int:
    """Returns the peak of the resident memory of this process in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024
