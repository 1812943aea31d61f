"""A step under MindFormers' PyNative Trainer with mindlora's LoRA against MindFormers' own LoRA.

Each side is a run of MindFormers' Trainer on a Qwen3, in its own process, with the same data, weights, A and B, in
float32 on a CPU, with the stand-ins of tests/support/pynative_cpu.py for kernels that a CPU lacks. The runs take turns
step by step: while one trains, the others wait. A step is everything that the Trainer does for it: data, forward,
backward, optimizer and callbacks. MindFormers' LoRA takes part twice: no ratio is more accurate than the difference of
these two's ratio from 1. All runs are started several times, since a process's speed depends on its memory layout. It
needs MindFormers 2.0 or 2.1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Sequence, Tuple

from bench import ROOT
from bench.common import add_number, child_command, compare_clocks, take_turns, text

OURS, THEIRS, AGAIN = "mindlora", "MindFormers", "MindFormers, again"
FULL_SIZE = {"hidden": 1024, "inner": 2752, "layers": 2, "heads": 16, "vocabulary": 4096, "tokens": 512, "rank": 16}
QUICK_SIZE = {"hidden": 64, "inner": 96, "layers": 2, "heads": 4, "vocabulary": 64, "tokens": 32, "rank": 4}
ROWS, WARM_UP = 16, 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_number(parser, "--runs", 3, 1, "runs of each side, one after the other")
    add_number(parser, "--steps", 8, 6, "measured steps of a run")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the table and returns the figures."""
    size = QUICK_SIZE if args.quick else FULL_SIZE
    times: Dict[str, List[Tuple[float, ...]]] = {side: [] for side in (THEIRS, OURS, AGAIN)}
    for _ in range(args.runs):
        for side, steps in steps_of_runs(args, size).items():
            times[side] += steps
    clocks: Dict[str, Dict[str, Sequence[float]]] = {}
    losses = {}
    for side, steps in times.items():
        wall, cpu, losses[side] = zip(*steps)
        clocks[side] = {"wall": wall, "cpu": cpu}
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses[OURS], losses[THEIRS]))
    title = "hidden size {hidden}, {layers} layers, {tokens} tokens, rank {rank} on linear_qkv and linear_proj, float32"
    remark = f"{args.runs} runs of {args.steps} steps of each; goal: {OURS} / {THEIRS} at most 1.03; losses "
    remark += f"of both differ by at most {difference:.1e} of themselves"
    table = compare_clocks(
        title.format(**size),
        clocks,
        remark,
        {f"{OURS} / {THEIRS}": (OURS, THEIRS), f"{AGAIN} / {THEIRS}": (AGAIN, THEIRS)},
    )
    print(text(table))
    return {"size": size, "tables": [table], "difference_of_losses": difference}


def steps_of_runs(args: argparse.Namespace, size: Dict[str, int]) -> Dict[str, List[Tuple[float, ...]]]:
    """Starts a run of each side; returns the times of its steps, and its losses, by side."""
    sides: Dict[str, Side] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_rows(os.path.join(folder, "rows.mindrecord"), size)
        try:
            for side in (THEIRS, OURS, AGAIN):
                sides[side] = Side(side, folder, args)
            return take_turns({name: side.step for name, side in sides.items()}, args.steps, WARM_UP)
        finally:
            for run in sides.values():
                run.end()


def write_rows(path: str, size: Dict[str, int]) -> None:
    """Writes rows of tokens that count up by threes, with shifted labels."""
    import numpy as np

    from mindlora.data.mindrecord import write_mindrecord

    starts = np.random.default_rng(0).integers(0, size["vocabulary"], (ROWS, 1))
    tokens = (starts + 3 * np.arange(size["tokens"] + 1)) % (size["vocabulary"] - 1) + 1  # 0 pads
    rows = tokens.astype(np.int32)
    write_mindrecord(({"input_ids": row[:-1], "labels": row[1:]} for row in rows), path)


class Side:
    """A run of MindFormers' Trainer in a separate process, which waits before each step."""

    def __init__(self, side: str, folder: str, args: argparse.Namespace):
        flags = [f"--steps={args.steps}", *(["--quick"] if args.quick else [])]
        self.log = os.path.join(folder, f"{side}.txt")
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                child_command("pynative", *flags, "--child", side, os.path.join(folder, "rows.mindrecord")),
                cwd=folder,
                env={**os.environ, "PYTHONPATH": ROOT},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._answer()

    def step(self) -> Tuple[float, float, float]:
        """Makes the run do one step; returns the wall-clock seconds, the CPU seconds and the loss."""
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return tuple(self._answer())

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            with open(self.log, encoding="utf-8") as log:
                raise SystemExit(f"A run ended:\n{log.read()[-3000:]}")
        return json.loads(line)


def child(args: argparse.Namespace, words: List[str]) -> None:
    """Trains the side and file that ``words`` names; the parent says when each step begins."""
    side, data = words
    # MindFormers logs to stdout.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from tests.support import pynative_cpu, pynative_launcher

    pynative_cpu.install()
    pynative_launcher.register_callbacks()
    register_pace(answers)
    from mindformers.pynative.trainer import Trainer

    if side == OURS:
        from mindlora.training.pynative import hooks  # noqa: F401
    Trainer(configuration(data, args)).train()


def register_pace(answers: Any) -> None:
    """Registers the callback Pace in MindFormers: it waits before each step, and reports the last step's time."""
    import numpy as np
    from mindformers.pynative.callback import TrainerCallback
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    @MindFormerRegister.register(MindFormerModuleType.CALLBACK)
    class Pace(TrainerCallback):
        """A callback that waits for the parent before each step."""

        def __init__(self) -> None:
            self.loss = 0.0
            self.start = time.perf_counter(), time.process_time()

        def on_step_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
            """Reports the last step, and waits."""
            seconds = [time.perf_counter() - self.start[0], time.process_time() - self.start[1]]
            print(json.dumps([*seconds, self.loss]), file=answers, flush=True)
            sys.stdin.readline()
            self.start = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, loss: Any = None, **kwargs: Any) -> None:
            """Reads the loss, which waits for the step."""
            self.loss = float(np.ravel(loss.asnumpy() if hasattr(loss, "asnumpy") else loss)[0])


def configuration(data: str, args: argparse.Namespace) -> Dict[str, Any]:
    """Returns the content of all sides' YAML."""
    from tests.support.pynative_runs import QWEN3, tiny_config

    size = QUICK_SIZE if args.quick else FULL_SIZE
    steps = args.steps + WARM_UP + 1
    model = {
        **QWEN3,
        "hidden_size": size["hidden"],
        "intermediate_size": size["inner"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["heads"],
        "head_dim": size["hidden"] // size["heads"],
        "vocab_size": size["vocabulary"],
        "seq_length": size["tokens"],
        "max_position_embeddings": size["tokens"],
    }
    lora = {
        "target_modules": r"self_attention\.linear_(qkv|proj)$",
        "lora_rank": size["rank"],
        "lora_alpha": 2 * size["rank"],
        "lora_dropout": 0.0,  # MindFormers' dropout has no kernel for a CPU.
    }
    config = tiny_config(
        "qwen3",
        data,
        steps,
        lora_config=lora,
        # This benchmark compares the LoRA; the benchmark loss compares the other part.
        pet_config={"loss_in_pieces": False},
        training={"steps": steps, "local_batch_size": 1, "global_batch_size": 1, "seed": 1},
        lr_scheduler={"type": "ConstantWarmUpLR", "learning_rate": 1e-4, "warmup_steps": 0},
        callbacks=[{"type": "FillWeights"}, {"type": "Pace"}],
    )
    return {**config, "model": model}
