"""Speed and peak memory of base convert and base merge against the disk's speed, and the time of load_lora.

The base is synthetic: a Llama's shapes in bfloat16, in four files or in one. Every round measures the disk and each
command in turn, so that other load affects all of them alike. The page cache is emptied before each measurement, if
allowed, and writing ends with fdatasync. A command's speed is the size of its output over its total time, including
Python's start. It is compared with three times of the disk: writing as much; reading and then writing as much, which a
command has to do; and the kernel's own copy of the file, the lower bound for any copy.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np

from bench import ROOT
from bench.common import add_number, median_ratio, spread

FULL_SIZE = {"layers": 18, "hidden": 2048, "intermediate": 5632, "vocab": 32000, "rank": 16}
QUICK_SIZE = {"layers": 4, "hidden": 512, "intermediate": 1408, "vocab": 8192, "rank": 16}
LINEARS = {
    "self_attn.q_proj": "hh",
    "self_attn.k_proj": "hh",
    "self_attn.v_proj": "hh",
    "self_attn.o_proj": "hh",
    "mlp.gate_proj": "fh",
    "mlp.up_proj": "fh",
    "mlp.down_proj": "hf",
}
GOAL_SPEED, GOAL_MEMORY, GOAL_LOAD = 0.60, 1.30, 0.040
WRITE, READ, COPY = "disk, sequential write", "disk, sequential read", "disk, copy by the kernel"
SHARDS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--sections", nargs="+", choices=("files", "load"), default=["files", "load"])
    add_number(parser, "--rounds", 5, 3, "measured rounds")
    add_number(parser, "--layers", FULL_SIZE["layers"], QUICK_SIZE["layers"], "layers of the base; 18 make 2.1 GB")
    add_number(parser, "--load-layers", 12, 2, "layers of the network to load into")
    parser.add_argument(
        "--folder", help="work in a new folder inside this one (default: the system's temporary folder)"
    )


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the tables and returns the figures."""
    size = {**(QUICK_SIZE if args.quick else FULL_SIZE), "layers": args.layers}
    figures: Dict[str, Any] = {"size": size}
    with tempfile.TemporaryDirectory(prefix="bench-io-", dir=args.folder) as folder:
        if "files" in args.sections:
            figures["files"] = measure_files(folder, size, args.rounds)
    if "load" in args.sections:
        with tempfile.TemporaryDirectory(prefix="bench-io-", dir=args.folder) as folder:
            figures["load"] = measure_load(folder, {**size, "layers": args.load_layers}, 15)
    print(table(figures))
    return figures


def measure_files(folder: str, size: Dict[str, int], rounds: int) -> Dict[str, Any]:
    """Returns name -> {"seconds": spread, "speed", ...} for the disk and the commands."""
    nbytes = sum(2 * int(np.prod(shape)) for _, shape in shapes(size))
    free = shutil.disk_usage(folder).free
    if free < 5 * nbytes:
        sys.exit(f"{folder} has {free / 1e9:.0f} GB free; {5 * nbytes / 1e9:.0f} GB are needed.")
    paths = {form: os.path.join(folder, form) for form in ("sharded", "single", "adapter", "out")}
    largest = {form: make_base(paths[form], size, SHARDS if form == "sharded" else 1) for form in ("sharded", "single")}
    make_adapter(paths["adapter"], size)
    single_file = os.path.join(paths["single"], "model.safetensors")
    commands = {}
    for form in ("sharded", "single"):
        source, out = (single_file, paths["out"] + ".safetensors") if form == "single" else (paths[form], paths["out"])
        commands[f"base convert, {form}"] = form, out, ["base", "convert", source, out, "--to", "mindformers"]
        commands[f"base merge, {form}"] = (
            form,
            out,
            ["base", "merge", "--base", source, "--adapter", paths["adapter"], "--output", out],
        )
    seconds: Dict[str, List[float]] = {name: [] for name in (WRITE, READ, COPY, *commands)}
    memory = dict.fromkeys(commands, 0)
    for turn in range(rounds + 1):
        raw = os.path.join(folder, "raw")
        taken = {WRITE: write_disk(raw, nbytes), READ: read_disk(single_file), COPY: copy_on_disk(single_file, raw)}
        for name, (_, out, words) in commands.items():
            drop_caches()
            taken[name], peak = mindlora(words)
            memory[name] = max(memory[name], peak)
            shutil.rmtree(out) if os.path.isdir(out) else os.remove(out)
        # The first round warms up.
        if turn:
            for name in seconds:
                seconds[name].append(taken[name])
    result = {
        name: {"seconds": spread(values), "speed": nbytes / statistics.median(values)}
        for name, values in seconds.items()
    }
    both = [read + write for read, write in zip(seconds[READ], seconds[WRITE])]
    for name, (form, _, _) in commands.items():
        # Ratios within each round, since the disk's speed varies.
        result[name]["ratio_to_write"] = median_ratio(seconds[WRITE], seconds[name])
        result[name]["ratio_to_both"] = median_ratio(both, seconds[name])
        result[name]["ratio_to_copy"] = median_ratio(seconds[COPY], seconds[name])
        result[name]["memory"] = memory[name]
        result[name]["largest_shard"] = largest[form]
    return {"bytes": nbytes, "rounds": rounds, "cold": drop_caches(), "measured": result}


def shapes(size: Dict[str, int]) -> Iterator[Tuple[str, Tuple[int, ...]]]:
    """Yields (name, shape) of a Llama's parameters, with Hugging Face's names."""
    sizes = {"h": size["hidden"], "f": size["intermediate"]}
    yield "model.embed_tokens.weight", (size["vocab"], size["hidden"])
    for layer in range(size["layers"]):
        for name, (rows, columns) in LINEARS.items():
            yield f"model.layers.{layer}.{name}.weight", (sizes[rows], sizes[columns])
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", (size["hidden"],)
    yield "model.norm.weight", (size["hidden"],)
    yield "lm_head.weight", (size["vocab"], size["hidden"])


def make_base(folder: str, size: Dict[str, int], count: int) -> int:
    """Writes the synthetic base in ``count`` files; returns the size of the largest."""
    from mindlora.core.formats.safetensors_file import write
    from mindlora.core.numerics.dtypes import BFLOAT16, from_float32

    values = from_float32(np.random.default_rng(0).normal(0, 0.02, 2**22).astype(np.float32), BFLOAT16)
    os.makedirs(folder)
    entries = [(name, BFLOAT16, shape) for name, shape in shapes(size)]
    step = -(-len(entries) // count)
    weight_map = {}
    largest = 0
    for number in range(count):
        part = entries[number * step : (number + 1) * step]
        file = f"model-{number + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        write(os.path.join(folder, file), part, (piece for _, _, shape in part for piece in pieces(values, shape)))
        weight_map.update({name: file for name, _, _ in part})
        largest = max(largest, os.path.getsize(os.path.join(folder, file)))
    if count > 1:
        with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump({"weight_map": weight_map}, file)
    return largest


def pieces(values: np.ndarray, shape: Tuple[int, ...]) -> Iterator[np.ndarray]:
    left = int(np.prod(shape))
    while left:
        yield values[: min(left, len(values))]
        left -= min(left, len(values))


def make_adapter(folder: str, size: Dict[str, int]) -> None:
    """Writes an adapter in PEFT's form for all seven linear cells of each layer."""
    from mindlora.core.formats.safetensors_file import write_arrays

    rng = np.random.default_rng(1)
    rank = size["rank"]
    tensors = {}
    for name, shape in shapes(size):
        if "_proj" in name:
            path = "base_model.model." + name[: -len(".weight")]
            tensors[f"{path}.lora_A.weight"] = rng.normal(0, 0.02, (rank, shape[1])).astype(np.float32)
            tensors[f"{path}.lora_B.weight"] = rng.normal(0, 0.02, (shape[0], rank)).astype(np.float32)
    os.makedirs(folder)
    write_arrays(os.path.join(folder, "adapter_model.safetensors"), tensors)
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(
            {
                "peft_type": "LORA",
                "r": rank,
                "lora_alpha": 2 * rank,
                "target_modules": [name.rpartition(".")[2] for name in LINEARS],
            },
            file,
        )


def write_disk(path: str, nbytes: int) -> float:
    """Returns the seconds that writing ``nbytes`` bytes takes, fdatasync included."""
    block = np.random.default_rng(2).bytes(4 * 2**20)
    drop_caches()
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, nbytes, len(block)):
            file.write(block[: nbytes - begin])
        os.fdatasync(file.fileno())
    taken = time.perf_counter() - start
    os.remove(path)
    return taken


def read_disk(path: str) -> float:
    """Returns the seconds that reading a file takes."""
    drop_caches()
    block = bytearray(4 * 2**20)
    start = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
    return time.perf_counter() - start


def copy_on_disk(source: str, path: str) -> float:
    """Returns the seconds that the kernel's own copy of a file takes, fdatasync included."""
    drop_caches()
    start = time.perf_counter()
    with open(source, "rb") as read, open(path, "wb") as written:
        left = os.path.getsize(source)
        while left:
            left -= os.copy_file_range(read.fileno(), written.fileno(), min(left, 8 * 2**20))
        os.fdatasync(written.fileno())
    taken = time.perf_counter() - start
    os.remove(path)
    return taken


def drop_caches() -> bool:
    """Empties the page cache, and returns whether that was allowed."""
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
            file.write("3")
    except OSError:
        return False
    return True


def mindlora(words: List[str]) -> Tuple[float, int]:
    """Runs ``mindlora ...`` in a separate process; returns its seconds and peak resident memory in bytes."""
    script = (
        "import sys; from mindlora.cli import main; code = main(sys.argv[1:]); "
        "print(open('/proc/self/status').read(), file=sys.stderr); sys.exit(code)"
    )
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", script, *words],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    taken = time.perf_counter() - start
    if result.returncode:
        sys.exit(result.stderr)
    # Not getrusage: its peak includes this process's memory at the time of the fork.
    peak = next(line for line in result.stderr.splitlines() if line.startswith("VmHWM"))
    return taken, int(peak.split()[1]) * 1024


def measure_load(folder: str, size: Dict[str, int], times: int) -> Dict[str, Any]:
    """Returns the seconds of load_lora into a network of nn.Dense, and of a plain copy of the same size."""
    import mindspore as ms
    from mindspore import nn

    import mindlora

    sizes = {"h": size["hidden"], "f": size["intermediate"]}

    class Layer(nn.Cell):
        def __init__(self):
            super().__init__()
            for name, (rows, columns) in LINEARS.items():
                setattr(
                    self,
                    name.rpartition(".")[2],
                    nn.Dense(sizes[columns], sizes[rows], weight_init="zeros", has_bias=False),
                )

    class Network(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layers = nn.CellList([Layer() for _ in range(size["layers"])])

    ms.set_context(device_target="CPU")
    network = Network()
    mindlora.apply_lora(
        network, mindlora.LoraConfig(target_modules=".*_proj", lora_rank=size["rank"], lora_alpha=2 * size["rank"])
    )
    path = os.path.join(folder, "adapter")
    mindlora.save_lora(network, path)
    weights = os.path.join(path, "adapter_model.safetensors")
    source = np.fromfile(weights, np.uint8)
    target = np.empty_like(source)
    loading = []
    copying = []
    for _ in range(times + 2):
        start = time.perf_counter()
        mindlora.load_lora(network, path)
        middle = time.perf_counter()
        np.copyto(target, source)
        loading.append(middle - start)
        copying.append(time.perf_counter() - middle)
    return {"bytes": source.nbytes, "layers": size["layers"], "load": spread(loading[2:]), "copy": spread(copying[2:])}


def table(figures: Dict[str, Any]) -> str:
    """Formats the figures as text."""
    lines = []
    if "files" in figures:
        files = figures["files"]
        lines += [
            "hidden {hidden}, {layers} layers, intermediate {intermediate}, vocabulary {vocab}, bfloat16; rank "
            "{rank} on all seven linears".format(**figures["size"]),
            f"{files['bytes'] / 1e9:.2f} GB, {SHARDS} files or one; {files['rounds']} rounds; page cache "
            f"{'emptied before each' if files['cold'] else 'NOT emptied: reads are from memory'}",
            "",
            f"{'':<26}{'median s':>9}{'min':>7}{'max':>7}{'MB/s':>7}{'of write':>10}{'of both':>9}{'of copy':>9}"
            f"{'memory':>8}{'shard':>8}",
        ]
        for name, row in files["measured"].items():
            seconds = row["seconds"]
            line = (
                f"{name:<26}{seconds['median']:>9.2f}{seconds['min']:>7.2f}{seconds['max']:>7.2f}"
                f"{row['speed'] / 1e6:>7.0f}"
            )
            if "memory" in row:
                line += (
                    f"{row['ratio_to_write']:>10.2f}{row['ratio_to_both']:>9.2f}{row['ratio_to_copy']:>9.2f}"
                    f"{row['memory'] / 2**20:>6.0f}Mi"
                    f"{row['memory'] / row['largest_shard']:>7.2f}x"
                )
            lines.append(line)
        lines.append(
            "of write: of the speed of writing alone; of both: of reading, then writing; of copy: of the kernel's copy."
        )
        lines.append(f"Goals: at least {GOAL_SPEED:.2f}; memory at most {GOAL_MEMORY:.2f} x the largest shard.")
    if "load" in figures:
        load = figures["load"]
        lines += [
            "",
            f"load_lora, {load['bytes'] / 1e6:.0f} MB into {load['layers']} layers, warm: "
            f"{load['load']['median'] * 1e3:.1f} ms ({load['load']['min'] * 1e3:.1f} to "
            f"{load['load']['max'] * 1e3:.1f}; goal {GOAL_LOAD * 1e3:.0f}); a copy in memory of as much: "
            f"{load['copy']['median'] * 1e3:.1f} ms",
        ]
    return "\n".join(lines)
