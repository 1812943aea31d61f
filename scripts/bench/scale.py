"""Training at real size on a CPU: memory and time to the first step, against the plan and PEFT; generate.

Each side trains LoRA of rank 16 on all linear cells in its own process, from a temporary folder of random bfloat16
weights: mindlora-run as a user calls it, with the base in float32, in bfloat16, and in bfloat16 with products in
bfloat16; MindFormers' own LoRA with MindFormers' Trainer, from the same weights under its names; and PEFT, in float32
and in bfloat16, with the Python that MINDLORA_PEERS_PYTHON names. "Load" is the time from the command to the loaded
base, "compile" the extra time of the first step over a later one, "peak" the process's peak resident memory. PEFT has
no 4-bit weights on a CPU, MindFormers none at all. Then mindlora generate and transformers answer with one token each,
from the same folder in bfloat16.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import yaml

from bench import ROOT

PYTHON = "MINDLORA_PEERS_PYTHON"
TINY_YAML = os.path.join(ROOT, "configs", "tiny", "lora_llama_tiny_cpu.yaml")
GIB = 2**30
RANK = 16
# The goals: the plan's sum times this factor, plus this many GiB for the frameworks.
OVER_PLAN, FRAMEWORK = 1.15, 0.7


class Size(NamedTuple):
    """A Llama, and how it is trained."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tokens: int
    quantized: bool = False


SIZES = {
    "0.5B": Size(1280, 24, 20, 20, 3456, 32000, 256),
    "1.1B": Size(2048, 22, 32, 4, 5632, 32000, 256),
    "7B NF4": Size(4096, 32, 32, 32, 11008, 32000, 128, quantized=True),
}
# The sides that train, in this order; a quantized base is trained only by the first.
SIDES = ("mindlora", "mindlora bf16", "mindlora bf16 products", "MindFormers", "PEFT", "PEFT bf16")
QUICK_SIZES = {
    "quick": Size(1024, 2, 16, 4, 2816, 16000, 256),
    "quick NF4": Size(64, 2, 4, 2, 96, 128, 16, quantized=True),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="which of them (default: all)")
    parser.add_argument("--only", nargs="+", choices=SIDES, help="which sides train, with no answers (default: all)")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run, 2 or more (default: 4)")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints a line for each run and returns the figures."""
    sizes = QUICK_SIZES if args.quick else {name: SIZES[name] for name in args.sizes or SIZES}
    figures: Dict[str, Any] = {}
    print(f"{'':<28}{'load s':>8}{'compile s':>11}{'step s':>9}{'to step 1':>11}{'peak GiB':>10}{'plan GiB':>10}  goal")
    for name, size in sizes.items():
        with tempfile.TemporaryDirectory() as folder:
            write_weights(os.path.join(folder, "base"), size)
            write_rows(folder, size, args.steps)
            figures[name] = {}
            for side, measure in sides(size, folder, args.steps, args.only):
                figures[name][side] = measure()
                print(line(f"{name}, {side}", figures[name][side]), flush=True)
            if not size.quantized and not args.only:
                figures[name].update(measure_answers(name, size, folder))
    return {"sizes": {name: size._asdict() for name, size in sizes.items()}, "rank": RANK, "runs": figures}


def line(name: str, figures: Dict[str, float]) -> str:
    """Formats one run's figures as a line of the table."""
    text = f"{name:<28}{figures['load']:>8.1f}{figures['compile']:>11.1f}{figures['step']:>9.2f}"
    text += f"{figures['first']:>11.1f}{figures['peak'] / GIB:>10.2f}"
    if "plan" not in figures:
        return text
    return f"{text}{figures['plan'] / GIB:>10.2f}  peak at most {limit(figures['plan']) / GIB:.2f}"


def limit(plan: float) -> float:
    """Returns the goal for a CPU run's peak, in bytes."""
    return OVER_PLAN * plan + FRAMEWORK * GIB


def sides(
    size: Size, folder: str, steps: int, only: Optional[Sequence[str]]
) -> Iterator[Tuple[str, Callable[[], Dict[str, float]]]]:
    """Yields each side that trains a size, and the function that measures it in a folder with weights and rows."""
    measures: Dict[str, Callable[[], Dict[str, float]]] = {"mindlora": lambda: measure_mindlora(size, folder, {})}
    if not size.quantized:
        held = {"param_init_type": "bfloat16"}
        measures["mindlora bf16"] = lambda: measure_mindlora(size, folder, held)
        measures["mindlora bf16 products"] = lambda: measure_mindlora(size, folder, held, "bfloat16")
        measures["MindFormers"] = lambda: measure_mindformers(size, folder)
    if os.environ.get(PYTHON) and not size.quantized:
        measures["PEFT"] = lambda: measure_peft(folder, steps, "float32")
        measures["PEFT bf16"] = lambda: measure_peft(folder, steps, "bfloat16")
    for side, measure in measures.items():
        if only is None or side in only:
            yield side, measure


def measure_mindlora(
    size: Size, folder: str, keys: Dict[str, str], product_dtype: Optional[str] = None
) -> Dict[str, float]:
    """Returns the seconds and bytes of mindlora-run with further ``keys`` of model_config."""
    from mindlora.files.base.quantize import quantize_checkpoint
    from mindlora.run.plan.report import make_plan

    base = os.path.join(folder, "base")
    if size.quantized:
        quantize_checkpoint(base, os.path.join(folder, "nf4.safetensors"))
        base = os.path.join(folder, "nf4.safetensors")
    path = os.path.join(folder, "run.yaml")
    config = run_yaml(size, base, os.path.join(folder, "rows.mindrecord"))
    config["model"]["model_config"].update(keys)
    if product_dtype is not None:
        config["model"]["model_config"]["pet_config"]["product_dtype"] = product_dtype
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    output = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "-m", "mindlora.training.launch.launcher", "--config", path, "--output_dir", output]
    done = finished(command, folder)
    with open(os.path.join(output, "metrics.jsonl"), encoding="utf-8") as file:
        records = [record for record in map(json.loads, file) if "loss" in record]
    first = records[0]["tokens"] / records[0]["tokens_per_second"]
    times = [record["time"] for record in records]
    return {**timings(done.began, times[0] - first, times), "peak": done.peak, "plan": make_plan(path).needed}


def measure_mindformers(size: Size, folder: str) -> Dict[str, float]:
    """Returns the seconds and bytes of MindFormers' own LoRA on the same weights and rows."""
    from mindlora.files.base.convert import convert_base

    base = os.path.join(folder, "mindformers.safetensors")
    convert_base(os.path.join(folder, "base"), base, None, "mindformers")
    config = run_yaml(size, base, os.path.join(folder, "rows.mindrecord"))
    config["model"]["model_config"]["pet_config"] = {
        "pet_type": "lora",
        "lora_rank": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "target_modules": ".*wq|.*wk|.*wv|.*wo|.*w1|.*w2|.*w3",
        "compute_dtype": "float32",
        "param_init_type": "float32",
    }
    path, times = os.path.join(folder, "mindformers.yaml"), os.path.join(folder, "mindformers_times.json")
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    script = os.path.join(ROOT, "scripts", "bench", "scale_mindformers.py")
    done = finished([sys.executable, script, path, times], folder)
    os.remove(base)
    with open(times, encoding="utf-8") as file:
        began, *ends = json.load(file)
    return {**timings(done.began, began, ends), "peak": done.peak}


def measure_peft(folder: str, steps: int, dtype: str) -> Dict[str, float]:
    """Returns the seconds and bytes of PEFT's run with the same weights and tokens."""
    script = os.path.join(ROOT, "scripts", "bench", "scale_peft.py")
    times = os.path.join(folder, "times.json")
    words = [os.path.join(folder, "base"), os.path.join(folder, "rows.npy"), times, str(RANK), str(steps), dtype]
    done = finished([os.environ[PYTHON], script, *words], folder)
    with open(times, encoding="utf-8") as file:
        loaded, *ends = json.load(file)
    return {**timings(done.began, loaded, ends), "peak": done.peak}


def measure_answers(name: str, size: Size, folder: str) -> Dict[str, Dict[str, float]]:
    """Prints and returns the seconds and bytes of mindlora generate and of transformers, for one token each."""
    base = os.path.join(folder, "base")
    write_tokenizer(base, size)
    words = ["generate", "--model", base, "--prompt", "w3 w4", "--max-tokens", "1", "--seq-length", str(size.tokens)]
    figures = {"generate": answered([sys.executable, "-m", "mindlora.cli", *words], folder)}
    if os.environ.get(PYTHON):
        script = os.path.join(ROOT, "scripts", "bench", "scale_transformers.py")
        figures["transformers"] = answered([os.environ[PYTHON], script, base], folder)
    for side, found in figures.items():
        text = f"{name + ', ' + side:<28}{found['load']:>8.1f}{found['compile']:>11.1f}"
        print(f"{text}{'':>9}{found['first']:>11.1f}{found['peak'] / GIB:>10.2f}", flush=True)
    return figures


def answered(command: List[str], folder: str) -> Dict[str, float]:
    """Returns the seconds and bytes of a command that reports the start and end of its compilation."""
    done = finished(command, folder, ("compiling", "compiled"))
    loaded, compiled = done.moments
    first = done.ended - done.began
    return {"load": loaded - done.began, "compile": compiled - loaded, "first": first, "peak": done.peak}


def timings(began: float, loaded: float, ends: List[float]) -> Dict[str, float]:
    """Returns a run's durations, given when it began, had loaded its base and ended its steps."""
    step = statistics.median(later - earlier for earlier, later in zip(ends, ends[1:]))
    return {"load": loaded - began, "compile": ends[0] - loaded - step, "step": step, "first": ends[0] - began}


class Finished(NamedTuple):
    """A command that has ended.

    Attributes:
        began, ended (float): When the command began and ended.
        cpu (float): CPU seconds.
        peak (int): Peak resident memory in bytes.
        moments (tuple of float): When the command printed each of ``words``.
    """

    began: float
    ended: float
    cpu: float
    peak: int
    moments: Tuple[float, ...]


def finished(command: List[str], folder: str, words: Sequence[str] = (), graphs: str = "") -> Finished:
    """Runs a command; ``words`` are words to wait for in its output, ``graphs`` is its folder of graphs, if any."""
    moments: Dict[str, float] = {}
    lines: List[str] = []
    began = time.time()
    environment = {**os.environ, "PYTHONPATH": ROOT, "MINDLORA_GRAPH_CACHE": graphs}
    # pip precompiles installed packages; in a checkout, the first process writes the bytecode.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=folder, text=True, env=environment, **streams)
    for text in process.stdout:
        lines.append(text)
        for word in words:
            if word in text:
                moments.setdefault(word, time.time())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(lines)[-4000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    return Finished(began, time.time(), cpu, usage.ru_maxrss * 1024, tuple(moments[word] for word in words))


def run_yaml(size: Size, base: str, rows: str) -> Dict[str, Any]:
    """Returns the YAML of a run: the tiny YAML with another model."""
    with open(TINY_YAML, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    model = config["model"]["model_config"]
    model.update(
        seq_length=size.tokens,
        hidden_size=size.hidden,
        num_layers=size.layers,
        num_heads=size.heads,
        n_kv_heads=size.kv_heads,
        intermediate_size=size.intermediate,
        vocab_size=size.vocabulary,
        pad_token_id=0,
    )
    model["pet_config"].update(lora_rank=RANK, lora_alpha=RANK, lora_dropout=0.0, target_modules="all-linear")
    if size.quantized:
        model["pet_config"]["quantize_base"] = "nf4"
    config["runner_config"].update(epochs=1, batch_size=1)
    config["train_dataset"]["data_loader"].update(dataset_dir=rows, shuffle=False)
    # The YAML's anchor has become a copy here.
    config["train_dataset_task"]["dataset_config"] = config["train_dataset"]
    config["callbacks"] = [{"type": "MFLossMonitor"}]
    config.update(load_checkpoint=base, load_ckpt_format="safetensors")
    return config


def write_rows(folder: str, size: Size, count: int) -> None:
    """Writes random tokens, one row per step, as rows.mindrecord and rows.npy."""
    from mindspore.mindrecord import FileWriter

    rows = np.random.default_rng(0).integers(1, size.vocabulary, (count, size.tokens + 1)).astype(np.int32)
    np.save(os.path.join(folder, "rows.npy"), rows)
    writer = FileWriter(os.path.join(folder, "rows.mindrecord"), 1, overwrite=True)
    column = {"type": "int32", "shape": [size.tokens + 1]}
    writer.add_schema({"input_ids": column, "labels": column}, "rows")
    writer.write_raw_data([{"input_ids": row, "labels": row} for row in rows])
    writer.commit()


def write_weights(folder: str, size: Size) -> None:
    """Writes a Hugging Face folder of a Llama with random weights in bfloat16."""
    from mindlora.core.formats.safetensors_file import layout
    from mindlora.core.numerics.dtypes import BFLOAT16

    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(hugging_face_config(size), file)
    shapes = dict(parameter_shapes(size))
    header, offsets, _ = layout([(name, BFLOAT16, shape) for name, shape in shapes.items()])
    values = (0.02 * np.random.default_rng(0).standard_normal(2**20 + 7)).astype(np.float32).view(np.uint32)
    drawn = (values >> 16).astype(np.uint16)
    ones = np.uint16(0x3F80)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(header)
        for shape, offset in zip(shapes.values(), offsets):
            file.seek(offset)
            # The same million numbers again and again: their values do not matter here.
            bits = np.full(shape, ones) if len(shape) == 1 else np.resize(drawn, shape)
            file.write(bits.tobytes())


def write_tokenizer(folder: str, size: Size) -> None:
    """Writes a tokenizer with a word for each token beside the weights."""
    # Otherwise, transformers advises installing PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from bench.serving_model import tokenizer

    tokenizer(size.vocabulary).save_pretrained(folder)


def hugging_face_config(size: Size) -> Dict[str, Any]:
    """Returns the config.json of the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def parameter_shapes(size: Size) -> Iterator[Tuple[str, Tuple[int, ...]]]:
    """Yields the names and shapes of the model's parameters."""
    head = size.hidden // size.heads
    cells = {
        "self_attn.q_proj": (size.hidden, size.hidden),
        "self_attn.k_proj": (size.kv_heads * head, size.hidden),
        "self_attn.v_proj": (size.kv_heads * head, size.hidden),
        "self_attn.o_proj": (size.hidden, size.hidden),
        "mlp.gate_proj": (size.intermediate, size.hidden),
        "mlp.up_proj": (size.intermediate, size.hidden),
        "mlp.down_proj": (size.hidden, size.intermediate),
        "input_layernorm": (size.hidden,),
        "post_attention_layernorm": (size.hidden,),
    }
    yield "model.embed_tokens.weight", (size.vocabulary, size.hidden)
    for layer in range(size.layers):
        for cell, shape in cells.items():
            yield f"model.layers.{layer}.{cell}.weight", shape
    yield "model.norm.weight", (size.hidden,)
    yield "lm_head.weight", (size.vocabulary, size.hidden)
