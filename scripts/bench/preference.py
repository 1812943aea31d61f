"""A step of preference training (DPO) against a step of fine-tuning on the same tokens: time and memory.

Both train the same Llama with a new LoRA, in float32 and graph mode on a CPU, with mindlora's train step. The reference
is one more forward without gradient, so the bound of the time is fine-tuning plus that forward, which is measured too;
with a reference stored in the data, it is only fine-tuning. The sides take turns step by step in one process. Memory is
the peak resident memory of a process that runs only one side's steps, started anew each round.
    python scripts/bench.py preference --json figures.json
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any, Callable, Dict, List

from bench import train
from bench.common import add_number, child_command, compare, take_turns, text

SFT, FORWARD = "fine-tuning", "forward of the reference"
DPO, KEPT = "DPO", "DPO, reference kept with the data"
GOALS = {"time": 1.1, "memory": 1.1}
TRAINED = (SFT, DPO, KEPT)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_number(parser, "--rounds", 12, 2, "measured steps of each side")
    add_number(parser, "--processes", 3, 1, "processes of each side, for the memory")
    add_number(parser, "--steps", 6, 2, "steps of such a process")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the tables and returns the figures."""
    size = size_of(args)
    memory = measure_memory(args)
    with quiet_folder():
        times = measure_time(size, args.rounds)
    figures = {"size": size, "times": times, **memory}
    print(text(times))
    print(
        f"\n{'largest resident memory, MiB':<44}{'median':>9}{'of ' + SFT:>16}\n"
        + "\n".join(f"{side:<44}{figures['MiB'][side]:>9.0f}{figures['of_sft'][side]:>16.3f}" for side in TRAINED)
        + f"\n(goal: time at most {GOALS['time']} of the bound, memory at most {GOALS['memory']} of fine-tuning's)"
    )
    return figures


def size_of(args: argparse.Namespace) -> Dict[str, int]:
    """Returns the sizes of the model; a batch is two rows, one pair."""
    return {**(train.QUICK_SIZE if args.quick else train.FULL_SIZE), "batch_size": 2}


@contextlib.contextmanager
def quiet_folder():
    """Works in a temporary folder, where MindFormers may log and write."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with open("log.txt", "w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            yield


def sides(size: Dict[str, int], names: List[str]) -> Dict[str, Callable[[], Any]]:
    """Returns name -> a step of that side."""
    import mindspore as ms
    import numpy as np

    from mindlora.training.launch import hooks  # noqa: F401  pet_type lora is mindlora's
    from mindlora.training.preference.loss import preference_loss
    from mindlora.training.preference.settings import preference_settings

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    ((rows, labels),) = train.batches(size, 1)
    pair = [column.reshape((1, *column.shape)) for column in (rows, labels)]
    answers = np.tile(np.array([[[0], [1]]], np.int32), (1, 1, rows.shape[1]))
    answers[..., 0] = -1
    columns = [*pair, ms.Tensor(answers), ms.Tensor(np.ones((1, 1), np.int32))]
    made = {}
    for name in names:
        network = train.build(size, lora=True)
        if name == FORWARD:
            made[name] = (preference_loss(network, preference_settings({})).reference.set_train(), (rows, labels))
        elif name == SFT:
            made[name] = (train.train_step(network, 1e-4), (rows, labels))
        else:
            node = {"loss": "dpo", "precomputed_reference": name == KEPT}
            inputs = [*columns, ms.Tensor(np.zeros(pair[0].shape, np.int32))] if name == KEPT else columns
            made[name] = (train.train_step(network, 1e-4, preference=node), inputs)
    return {name: lambda cell=cell, inputs=inputs: cell(*inputs) for name, (cell, inputs) in made.items()}


def measure_time(size: Dict[str, int], rounds: int) -> Dict[str, Any]:
    """Returns the sides' times, and their ratios to the bounds."""
    steps = sides(size, [SFT, FORWARD, DPO, KEPT])

    def bound():
        return steps[SFT](), steps[FORWARD]()

    names = "bound: fine-tuning, then the forward"
    compared = {SFT: steps[SFT], names: bound, DPO: steps[DPO], KEPT: steps[KEPT]}
    shape = "hidden {hidden_size}, {num_layers} layers, sequence {seq_length}, 2 rows, rank {rank}".format(**size)
    ratios = {
        "DPO / bound": (DPO, names),
        "DPO, reference kept / fine-tuning": (KEPT, SFT),
        "bound / fine-tuning": (names, SFT),
    }
    return compare(f"{shape}; float32, graph mode", compared, (), rounds, f"goal: at most {GOALS['time']}", ratios)


def measure_memory(args: argparse.Namespace) -> Dict[str, Any]:
    """Returns each side's peak resident memory in MiB, the median of its processes, and its ratio to SFT's."""
    words = ["--steps", str(args.steps), *(["--quick"] if args.quick else [])]

    def process(side):
        result = subprocess.run(
            child_command("preference", *words, "--child", side), capture_output=True, text=True, check=True
        )
        return json.loads(result.stdout.splitlines()[-1])["MiB"]

    calls = {side: lambda side=side: process(side) for side in TRAINED}
    found = take_turns(calls, args.processes, warm_up=0)
    medians = {side: statistics.median(values) for side, values in found.items()}
    return {"MiB": medians, "MiB_all": found, "of_sft": {side: medians[side] / medians[SFT] for side in TRAINED}}


def child(args: argparse.Namespace, words: List[str]) -> None:
    """Runs the steps of the side that ``words`` names, and prints this process's peak resident memory."""
    (side,) = words
    with quiet_folder():
        (step,) = sides(size_of(args), [side]).values()
        for _ in range(args.steps):
            for output in step():
                if hasattr(output, "asnumpy"):
                    output.asnumpy()
    with open("/proc/self/status", encoding="utf-8") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    print(json.dumps({"MiB": peak / 1024}), file=sys.stdout)
