"""A train step with LoRA against MindFormers' own LoRA and full fine-tuning, and the import time.

All sides run in one process and take turns step by step, on the same data, from the same values, with the same train
step, optimizer and threads, in float32 and graph mode on a CPU. A Qwen3 of the same sizes takes turns with them. The
tables have wall-clock time and CPU time, which other load on the machine disturbs less. MindFormers' LoRA takes part
twice: no ratio is more accurate than the difference of these two's ratio from 1. Then mindlora's train step with
AdapterHealth takes turns with the same step without it, ten steps at a time.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Tuple

from bench import ROOT
from bench.common import add_number, quartiles, spread, spreads, time_in_turns, wait

FULL_SIZE = {
    "hidden_size": 1024,
    "num_layers": 4,
    "num_heads": 16,
    "intermediate_size": 2752,
    "vocab_size": 4096,
    "seq_length": 512,
    "rank": 16,
    "batch_size": 1,
}
QUICK_SIZE = {
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 352,
    "vocab_size": 512,
    "seq_length": 64,
    "rank": 16,
    "batch_size": 1,
}
PARITY_SIZE = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "seq_length": 32,
    "rank": 8,
    "batch_size": 4,
}
OURS, THEIRS, AGAIN, FULL = "mindlora LoRA", "MindFormers LoRA", "MindFormers LoRA, again", "full fine-tuning"
QWEN3 = "mindlora LoRA on a Qwen3"
PARITY_STEPS, WARM_UP = 50, 6
WITHOUT, HEALTH, PERIOD = "ten steps", "ten steps with AdapterHealth", 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_number(parser, "--steps", 24, 6, "measured steps of each side")
    add_number(parser, "--imports", 9, 3, "fresh processes for the import")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the tables and returns the figures."""
    size = QUICK_SIZE if args.quick else FULL_SIZE
    imports = measure_import(args.imports)
    with tempfile.TemporaryDirectory() as folder:
        # MindFormers logs to stdout and writes output/ in the working folder.
        os.chdir(folder)
        with open("log.txt", "w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            steps, parity, health = measure_training(size, args.steps)
    figures = {
        "size": size,
        "measured_steps": args.steps,
        "train_step": steps,
        "ratio": ratios(steps),
        "loss_parity": parity,
        "health": health,
        "import": imports,
    }
    print(table(figures))
    return figures


def measure_import(processes: int) -> Dict[str, Any]:
    """Returns the seconds of `import mindspore`, and of mindlora after it, each time in a fresh process.

    mindlora imports a public name's module at its first use, so its figure is the time of importing all names.
    """
    script = (
        "import time; start = time.perf_counter(); import mindspore; middle = time.perf_counter(); "
        "from mindlora import *; print(middle - start, time.perf_counter() - middle)"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT}
    # pip precompiles installed packages; in a checkout, the first process writes the bytecode.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    pairs = []
    for _ in range(processes + 1):
        result = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        pairs.append(tuple(map(float, result.stdout.split()[-2:])))
    # The first process reads the files from disk.
    mindspore, mindlora = zip(*pairs[1:])
    return {"mindspore": spread(mindspore), "mindlora": spread(mindlora)}


def measure_training(size: Dict[str, int], steps: int) -> Tuple[Dict[str, Any], Dict[str, Any], Dict[str, Any]]:
    """Returns ({side: {"wall", "cpu": spread}}, loss parity, cost of AdapterHealth).

    MindFormers' own networks are built before mindlora takes over pet_type lora.
    """
    import mindspore as ms
    from mindformers.core.context.build_context import set_context

    # Creates MindFormers' context, which would otherwise be created, in PyNative mode, when the Qwen3 is built.
    set_context(use_legacy=True)
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    timed = {THEIRS: build(size, lora=True), FULL: build(size, lora=False), AGAIN: build(size, lora=True)}
    compared = {THEIRS: build(PARITY_SIZE, lora=True)}
    from mindlora.training.launch import hooks  # noqa: F401  from here on, pet_type lora is mindlora's

    timed[OURS] = build(size, lora=True)
    compared[OURS] = build(PARITY_SIZE, lora=True)
    check_kinds(timed)
    for networks in (timed, compared):
        for side in set(networks) - {THEIRS}:
            copy_values(networks[THEIRS], networks[side])

    parity = loss_parity({side: train_step(network, 5e-3) for side, network in compared.items()})
    cells = {side: train_step(network, 1e-4) for side, network in timed.items()}
    cells[QWEN3] = qwen3_step(size)
    inputs = batches(size, 1)[0]
    calls = {side: lambda cell=cell: cell(*inputs)[0] for side, cell in cells.items()}
    seconds = time_in_turns(calls, steps, WARM_UP)
    health = measure_health(timed[OURS], inputs, max(2, steps // 3))
    return spreads(seconds), parity, health


def measure_health(network: Any, inputs: Tuple[Any, ...], rounds: int) -> Dict[str, Any]:
    """Returns the seconds of ten steps without and with AdapterHealth, their ratio, and the callback's seconds."""
    plain = train_step(network, 1e-4)
    watched = train_step(network, 1e-4, record_gradient_norms=True)

    def without() -> None:
        for _ in range(PERIOD):
            wait(plain(*inputs))

    in_callback: List[float] = []
    sides = {WITHOUT: without, HEALTH: watched_steps(watched, inputs, in_callback)}
    figures = spreads(time_in_turns(sides, rounds, warm_up=1))
    callback = spread(in_callback[1:])
    return {
        "seconds": figures,
        "ratio": ratio_of_medians(figures[HEALTH], figures[WITHOUT]),
        "callback": callback,
        "callback_share": callback["median"] / figures[WITHOUT]["wall"]["median"],
    }


def watched_steps(cell: Any, inputs: Tuple[Any, ...], in_callback: List[float]) -> Callable[[], None]:
    """Returns a function that runs ten steps with AdapterHealth, as MindSpore's loop calls it.

    Each call appends the callback's seconds to ``in_callback``.
    """
    from mindspore.train.callback import RunContext
    from mindspore.train.callback._callback import InternalCallbackParam

    from mindlora.training.callbacks.registry import AdapterHealth

    params = InternalCallbackParam()
    params.update(train_network=cell, cur_step_num=0, epoch_num=1, batch_num=sys.maxsize)
    context = RunContext(params)
    health = AdapterHealth(every_steps=PERIOD)
    health.on_train_begin(context)
    health.on_train_epoch_begin(context)

    def steps() -> None:
        total = 0.0
        for _ in range(PERIOD):
            params.cur_step_num += 1
            start = time.perf_counter()
            health.on_train_step_begin(context)
            total += time.perf_counter() - start
            params.net_outputs = cell(*inputs)
            wait(params.net_outputs)
            start = time.perf_counter()
            health.on_train_step_end(context)
            total += time.perf_counter() - start
        in_callback.append(total)

    return steps


def build(size: Dict[str, int], lora: bool) -> Any:
    """Returns a MindFormers Llama; with ``lora``, it has the currently registered LoRA."""
    from mindformers.models import LlamaConfig, LlamaForCausalLM
    from mindformers.pet import get_pet_model

    config = LlamaConfig(
        **{key: value for key, value in size.items() if key not in ("rank", "batch_size")},
        compute_dtype="float32",
        layernorm_compute_type="float32",
        softmax_compute_type="float32",
        rotary_dtype="float32",
        param_init_type="float32",
        use_flash_attention=False,
        fused_rms_norm=False,
        use_rope_slice=True,
        pad_token_id=0,
    )
    network = LlamaForCausalLM(config)
    if lora:
        network = get_pet_model(
            network,
            {
                "pet_type": "lora",
                "lora_rank": size["rank"],
                "lora_alpha": 1.5 * size["rank"],
                "lora_dropout": 0.0,
                "target_modules": ".*wq|.*wk|.*wv|.*wo",
                "compute_dtype": "float32",
                "param_init_type": "float32",
            },
        )
    return network


def qwen3_step(size: Dict[str, int]) -> Any:
    """Returns the train step of a MindFormers mcore model with mindlora's LoRA on the same cells."""
    from mindformers.core.context.build_context import set_context
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM
    from mindformers.pet import get_pet_model

    dtypes = ("compute_dtype", "params_dtype", "layernorm_compute_dtype", "softmax_compute_dtype", "rotary_dtype")
    config = Qwen3Config(
        **{key: size[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "seq_length")},
        **dict.fromkeys(dtypes, "float32"),
        num_hidden_layers=size["num_layers"],
        num_attention_heads=size["num_heads"],
        num_key_value_heads=size["num_heads"],
        head_dim=size["hidden_size"] // size["num_heads"],
        max_position_embeddings=size["seq_length"],
        position_embedding_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=0,
    )
    # A YAML with use_legacy: False sets this; the Llamas' and AdapterHealth's steps are built without it.
    set_context(use_legacy=False)
    try:
        pet = {"pet_type": "lora", "lora_rank": size["rank"], "lora_alpha": 1.5 * size["rank"], "lora_dropout": 0.0}
        pet["target_modules"] = ".*linear_qkv|.*linear_proj"
        return train_step(get_pet_model(TrainingQwen3ForCausalLM(config), pet), 1e-4)
    finally:
        set_context(use_legacy=True)


def check_kinds(networks: Dict[str, Any]) -> None:
    """Asserts that each side has the cells that its name implies, computing in float32."""
    import mindspore as ms
    from mindpet.delta.lora import LoRADense as TheirDense

    from mindlora import LoRADense

    kinds = {}
    for side, network in networks.items():
        cells = [cell for _, cell in network.cells_and_names() if isinstance(cell, (LoRADense, TheirDense))]
        kinds[side] = {LoRADense if isinstance(cell, LoRADense) else TheirDense for cell in cells}
        assert all(cell.dtype == ms.float32 for cell in cells), side
    assert kinds == {OURS: {LoRADense}, THEIRS: {TheirDense}, AGAIN: {TheirDense}, FULL: set()}, kinds


def copy_values(source: Any, target: Any) -> None:
    """Copies the values of ``source`` to ``target`` by name."""
    import mindspore as ms

    values = {p.name: p.init_data().asnumpy() for p in source.get_parameters()}
    for parameter in target.get_parameters():
        parameter.init_data().set_data(ms.Tensor(values[parameter.name].copy()))


def train_step(network: Any, learning_rate: float, **wrapper: Any) -> Any:
    """Returns every side's train step: mindlora's, which runs on a CPU, with MindFormers' AdamW."""
    from mindformers.core.optim import AdamW

    from mindlora.training.step.train_step import LoraTrainOneStepCell

    network.set_train()
    cell = LoraTrainOneStepCell(
        network,
        AdamW(network.trainable_params(), learning_rate, weight_decay=0.0),
        use_clip_grad=True,
        max_grad_norm=1.0,
        scale_sense=1.0,
        **wrapper,
    )
    cell.set_train()
    return cell


def batches(size: Dict[str, int], count: int) -> List[Tuple[Any, Any]]:
    """Returns ``count`` batches of rows that count up by threes from a random start, as tokens and labels."""
    import mindspore as ms
    import numpy as np

    starts = np.random.default_rng(0).integers(0, size["vocab_size"], (count, size["batch_size"], 1))
    tokens = (starts + 3 * np.arange(size["seq_length"] + 1)) % (size["vocab_size"] - 1) + 1  # 0 pads
    return [(ms.Tensor(batch, ms.int32), ms.Tensor(batch, ms.int32)) for batch in tokens]


def loss_parity(cells: Dict[str, Any]) -> Dict[str, float]:
    """Returns the largest relative difference between mindlora's and MindFormers' losses over PARITY_STEPS."""
    data = batches(PARITY_SIZE, 10)
    losses = {}
    for side, cell in cells.items():
        losses[side] = [float(cell(*data[step % len(data)])[0].asnumpy()) for step in range(PARITY_STEPS)]
    differences = [abs(ours - theirs) / theirs for ours, theirs in zip(losses[OURS], losses[THEIRS])]
    return {
        "steps": PARITY_STEPS,
        "max_relative_difference": max(differences),
        "first_loss": losses[THEIRS][0],
        "last_loss": losses[THEIRS][-1],
    }


def ratios(step_figures: Dict[str, Any]) -> Dict[str, Dict[str, float]]:
    """Returns {pair of sides: {"wall", "cpu": ratio of medians}}."""
    pairs = {
        "mindlora / MindFormers": (OURS, THEIRS),
        "MindFormers again / MindFormers": (AGAIN, THEIRS),
        "MindFormers / full": (THEIRS, FULL),
        "mindlora / full": (OURS, FULL),
        "Qwen3 / Llama": (QWEN3, OURS),
    }
    return {
        name: ratio_of_medians(step_figures[first], step_figures[second]) for name, (first, second) in pairs.items()
    }


def ratio_of_medians(first: Dict[str, Any], second: Dict[str, Any]) -> Dict[str, float]:
    """Returns {"wall", "cpu": ratio of the medians of two sides}."""
    return {clock: first[clock]["median"] / second[clock]["median"] for clock in ("wall", "cpu")}


def table(figures: Dict[str, Any]) -> str:
    """Formats the figures as text."""
    size = figures["size"]
    imports = figures["import"]
    parity = figures["loss_parity"]
    health = figures["health"]
    lines = [
        "hidden {hidden_size}, {num_layers} layers, sequence {seq_length}, batch {batch_size}, "
        "vocabulary {vocab_size}, rank {rank} on q, k, v, o; float32, graph mode".format(**size),
        "",
        f"{'train step, milliseconds':<32}{'median':>9}{'quartiles':>19}{'min':>9}{'max':>9}{'CPU':>9}",
    ]
    for side in (OURS, THEIRS, AGAIN, FULL, QWEN3):
        clocks = figures["train_step"][side]
        greatest = 1e3 * clocks["wall"]["max"]
        lines.append(f"{side:<32}{quartiles(clocks['wall'])}{greatest:>9.3f}{1e3 * clocks['cpu']['median']:>9.3f}")
    remarks = {
        "mindlora / MindFormers": "  (goal: at most 1.00)",
        "MindFormers again / MindFormers": "  (noise)",
        "Qwen3 / Llama": "  (goal: at most 1.05)",
    }
    lines += ["", f"{'ratio of medians':<32}{'clock':>9}{'CPU':>9}"]
    lines += [
        f"{name:<32}{value['wall']:>9.3f}{value['cpu']:>9.3f}{remarks.get(name, '')}"
        for name, value in figures["ratio"].items()
    ]
    lines += [
        "",
        "import, seconds, fresh processes",
        f"{'mindspore':<32}{imports['mindspore']['median']:>9.3f}",
        f"{'mindlora, all of its names':<32}{imports['mindlora']['median']:>9.3f}  (goal: below 0.2; "
        f"{imports['mindlora']['min']:.3f} to {imports['mindlora']['max']:.3f})",
        "",
        f"loss, mindlora against MindFormers over {parity['steps']} steps from {parity['first_loss']:.3f} to "
        f"{parity['last_loss']:.3f}: largest relative difference {parity['max_relative_difference']:.1e} "
        "(goal: 1e-4)",
        "",
        "AdapterHealth every 10 steps: {:.3f} of the time without it, {:.3f} of the CPU time (goal: at most 1.02); the "
        "callback itself {:.1f} ms, {:.2%} of ten steps".format(
            health["ratio"]["wall"],
            health["ratio"]["cpu"],
            1e3 * health["callback"]["median"],
            health["callback_share"],
        ),
    ]
    return "\n".join(lines)
