"""Tokens counted in the loss per second, packed rows against rows with one example each.

Both sides train the same Llama with LoRA on the same examples, step by step in turn, in float32 and graph mode on a
CPU. A step takes as long whatever its rows hold, so packed rows can be faster by at most the ratio of the numbers of
rows; what is lost of that is the time for the mask that keeps the examples of a row apart. Beside it: how far the loss
of an example in a packed row is from its loss alone, and how much of the packed rows is padding.
    python scripts/bench.py packing --data FOLDER --json figures.json
"""

import argparse
import contextlib
import os
import tempfile
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from bench.common import add_number, median_ratio, quartiles, spreads, time_in_turns

# Else transformers advises installing PyTorch, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
FILES = ("alpaca_seed_tasks.jsonl", "huanhuan.json")
SINGLE, PACKED = "one example in a row", "packed"
SIZE = {"hidden_size": 256, "num_layers": 2, "num_heads": 4, "intermediate_size": 688, "vocab_size": 1000}
BATCH_SIZE, WARM_UP = 2, 2
# As the tokenizer that is trained here, and the conversion, have them.
PAD, IGNORED = 3, -100
GOALS = {"reached": 0.9, "difference": 1e-6, "padding": 0.03}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    folder = os.environ.get("MINDLORA_TEST_DATA")
    data = {"default": folder} if folder else {"required": True}
    parser.add_argument("--data", **data, help=f"folder with {' and '.join(FILES)} (default: $MINDLORA_TEST_DATA)")
    parser.add_argument("--files", nargs="+", default=FILES, metavar="FILE", help="instruction data in that folder")
    parser.add_argument("--seq-length", type=int, default=512)
    add_number(parser, "--rounds", 24, 4, "measured steps of each side")
    parser.add_argument("--compared", type=int, default=64, help="examples whose losses are compared (default: 64)")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the tables and returns the figures."""
    data = os.path.abspath(args.data)
    files: Dict[str, Any] = {}
    print(
        "hidden {hidden_size}, {num_layers} layers, vocabulary {vocab_size}, LoRA on all linear cells; "
        "float32, graph mode".format(**SIZE)
        + f"; batches of {BATCH_SIZE} rows of {args.seq_length}\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as work:
        # MindFormers logs to stdout and writes output/ in the working folder.
        os.chdir(work)
        with open("log.txt", "w", encoding="utf-8") as log:
            for name in args.files:
                with contextlib.redirect_stdout(log):
                    files[name] = measure(os.path.join(data, name), args)
                print(table(name, files[name]), flush=True)
    return {"size": SIZE, "goals": GOALS, "batch_size": BATCH_SIZE, "files": files}


def measure(path: str, args: argparse.Namespace) -> Dict[str, Any]:
    """Returns the figures of one file."""
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    reports = convert(path, args.seq_length)
    rows = {side: read(report.output) for side, report in reports.items()}
    boundary = reports[PACKED].packed_boundary
    steps = {}
    networks = {}
    for side in (SINGLE, PACKED):
        networks[side] = build(args.seq_length, networks.get(SINGLE))
        steps[side] = train_step(networks[side], boundary if side == PACKED else None)
    difference, without_mask = loss_differences(networks, rows, boundary, args.compared)
    draws = {side: np.random.default_rng(0) for side in steps}
    sides = {side: lambda side=side: steps[side](*batch(rows[side], draws[side]))[0] for side in steps}
    clocks = time_in_turns(sides, args.rounds, WARM_UP)
    seconds = {side: figures["wall"] for side, figures in spreads(clocks).items()}
    reached = {clock: median_ratio(clocks[SINGLE][clock], clocks[PACKED][clock]) for clock in ("wall", "cpu")}
    counted = {
        side: BATCH_SIZE * float((columns["labels"][:, 1:] != IGNORED).sum(1).mean()) for side, columns in rows.items()
    }
    tokens = reports[PACKED].tokens
    bound = reports[SINGLE].rows / reports[PACKED].rows
    return {
        "examples": reports[SINGLE].rows,
        "rows": {side: report.rows for side, report in reports.items()},
        "padding": {side: 1 - tokens / (report.rows * (args.seq_length + 1)) for side, report in reports.items()},
        "seconds": seconds,
        "counted_per_step": counted,
        "counted_per_second": {side: counted[side] / seconds[side]["median"] for side in sides},
        "bound": bound,
        "ratio": bound * reached["wall"],
        "reached": reached,
        "difference": difference,
        "difference_without_mask": without_mask,
    }


def convert(path: str, seq_length: int) -> Dict[str, Any]:
    """Writes the examples of a file one in a row and packed; returns the reports."""
    from mindlora.data.alpaca import convert_alpaca

    name = os.path.basename(path)
    target = os.path.abspath(f"{name}-{{}}.mindrecord")
    tokenizer = os.path.abspath(f"{name}-tokenizer")
    single = convert_alpaca(path, target.format("single"), tokenizer, seq_length, train_vocab_size=SIZE["vocab_size"])
    return {SINGLE: single, PACKED: convert_alpaca(path, target.format("packed"), tokenizer, seq_length, pack=True)}


def read(path: str) -> Dict[str, np.ndarray]:
    """Returns the columns of all rows of a MindRecord, int32 [rows, N + 1] each."""
    from mindspore.dataset import MindDataset

    rows = MindDataset(path, columns_list=["input_ids", "labels"], shuffle=False)
    columns = zip(*rows.create_tuple_iterator(num_epochs=1, output_numpy=True))
    return dict(zip(("input_ids", "labels"), map(np.stack, columns)))


def build(seq_length: int, source: Any = None) -> Any:
    """Returns a Llama with LoRA, which has the values of ``source`` if there is one."""
    import mindspore as ms
    from mindformers.models import LlamaConfig, LlamaForCausalLM

    from mindlora import LoraConfig, apply_lora, freeze_base

    dtypes = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype", "param_init_type")
    config = LlamaConfig(
        **SIZE,
        **dict.fromkeys(dtypes, "float32"),
        seq_length=seq_length,
        batch_size=BATCH_SIZE,
        use_flash_attention=False,
        fused_rms_norm=False,
        use_rope_slice=True,
        pad_token_id=PAD,
    )
    network = LlamaForCausalLM(config)
    apply_lora(network, LoraConfig(lora_rank=16, lora_alpha=32, target_modules="all-linear"))
    freeze_base(network)
    if source is not None:
        values = {parameter.name: parameter.init_data().asnumpy() for parameter in source.get_parameters()}
        for parameter in network.get_parameters():
            parameter.init_data().set_data(ms.Tensor(values[parameter.name].copy()))
    return network


def train_step(network: Any, boundary: Optional[int]) -> Any:
    """Returns the train step of mindlora-run, for packed rows if there is a boundary."""
    from mindformers.core.optim import AdamW

    from mindlora.plugin.graph.train_step import LoraTrainOneStepCell

    optimizer = AdamW(network.trainable_params(), 1e-4, weight_decay=0.0)
    cell = LoraTrainOneStepCell(
        network, optimizer, use_clip_grad=True, max_grad_norm=1.0, scale_sense=1.0, packed_boundary=boundary
    )
    return cell.set_train()


def batch(rows: Dict[str, np.ndarray], draw: np.random.Generator) -> List[Any]:
    """Returns a batch of rows drawn at random, as tokens and as labels."""
    import mindspore as ms

    chosen = draw.integers(0, len(rows["labels"]), BATCH_SIZE)
    return [ms.Tensor(rows[name][chosen]) for name in ("input_ids", "labels")]


def loss_differences(networks: Dict[str, Any], rows: Dict[str, Any], boundary: int, count: int) -> Tuple[float, float]:
    """Returns the largest difference of the mean losses that the same examples have packed and alone.

    The second difference is of packed rows in the network that does not keep their examples apart.
    """
    packed = losses_of_examples(networks[PACKED], rows[PACKED], boundary, count)
    mixed = losses_of_examples(networks[SINGLE], rows[PACKED], boundary, count)
    alone = losses_of_examples(networks[SINGLE], rows[SINGLE], boundary, len(rows[SINGLE]["labels"]), set(packed))
    assert packed.keys() == mixed.keys() == alone.keys()
    return (
        max(abs(packed[example] - alone[example]) for example in alone),
        max(abs(mixed[example] - alone[example]) for example in alone),
    )


def losses_of_examples(network: Any, rows: Any, boundary: int, count: int, chosen: Any = None) -> Dict[tuple, float]:
    """Returns {tokens of an example: its mean loss} of ``count`` examples or of those in ``chosen``."""
    import mindspore as ms

    network.set_train(False)
    losses: Dict[tuple, float] = {}
    pieces = [examples_of(*row, boundary) for row in zip(rows["input_ids"], rows["labels"])]
    kept = []
    for number, examples in enumerate(pieces):
        if chosen is None or chosen & {key for key, _ in examples}:
            kept.append(number)
    for start in range(0, len(kept), BATCH_SIZE):
        if len(losses) >= count:
            break
        # The last batch repeats a row, so that every batch has the same shape.
        numbers = np.resize(kept[start : start + BATCH_SIZE], BATCH_SIZE)
        logits = network(ms.Tensor(rows["input_ids"][numbers, :-1]))[0].asnumpy().astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        for number, values in zip(numbers, log_probabilities):
            labels = rows["labels"][number]
            for key, counted in pieces[number]:
                losses[key] = -values[counted - 1, labels[counted]].mean()
    network.set_train(True)
    return losses if chosen is None else {key: losses[key] for key in chosen}


def examples_of(tokens: np.ndarray, labels: np.ndarray, boundary: int) -> List[Tuple[tuple, np.ndarray]]:
    """Returns (tokens, positions of the labels that count) of each example of a row."""
    number = np.cumsum(tokens == boundary)
    examples = []
    for segment in np.unique(number):
        inside = number == segment
        counted = np.flatnonzero(inside & (labels != IGNORED))
        if len(counted):
            examples.append((tuple(tokens[inside & (tokens != PAD)]), counted))
    return examples


def table(name: str, figures: Dict[str, Any]) -> str:
    """Returns the figures of a file as text."""
    lines = [
        f"{name}: {figures['examples']} examples",
        f"{'':<24}{'rows':>8}{'padding':>10}{'step, ms':>9}{'quartiles':>19}{'min':>9}"
        f"{'counted/step':>14}{'counted/s':>12}",
    ]
    for side in (SINGLE, PACKED):
        lines.append(
            f"{side:<24}{figures['rows'][side]:>8}{figures['padding'][side]:>10.1%}"
            f"{quartiles(figures['seconds'][side])}{figures['counted_per_step'][side]:>14.1f}"
            f"{figures['counted_per_second'][side]:>12.1f}"
        )
    return "\n".join(
        [
            *lines,
            f"packed / single: {figures['ratio']:.2f}x of at most {figures['bound']:.2f}x, a share of "
            f"{figures['reached']['wall']:.3f} (goal: at least {GOALS['reached']}; by CPU time "
            f"{figures['reached']['cpu']:.3f})",
            f"padding after packing {figures['padding'][PACKED]:.1%} (goal: below {GOALS['padding']:.0%})",
            f"largest difference of the loss of an example packed and alone {figures['difference']:.1e} "
            f"(goal: {GOALS['difference']:.0e}; without the mask {figures['difference_without_mask']:.1e})",
            "",
        ]
    )
