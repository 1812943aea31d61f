"""Training runs of one small layer on MindSpore's Ascend backend: what a row of a table of them says."""

import copy
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import yaml

from mindlora import LoraConfig
from mindlora.data.mindrecord import write_mindrecord
from mindlora.files.base.quantize import quantize_checkpoint
from mindlora.run.yaml_run import YamlRun
from tests.conftest import ROOT
from tests.support.ascend_backend.runner import Run, run_yaml
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.cpu_llama import ON_CPU
from tests.support.llama_checkpoints import save_base
from tests.support.mcore_networks import IN_FLOAT32

LLAMA = "configs/llama3/lora_llama3_8b.yaml"
QWEN3 = "configs/qwen3/lora_qwen3_8b.yaml"
QWEN3_MOE = "configs/qwen3/lora_qwen3_30b_a3b.yaml"
SEQUENCE, VOCABULARY, BOUNDARY = 64, 512, 1
_TOKENS = {"seq_length": SEQUENCE, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 256, "intermediate_size": 512}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
_LEGACY = {**_TOKENS, **_SIZES, "num_layers": 1, "num_heads": 4, "n_kv_heads": 4}
_MCORE = {**_TOKENS, **_SIZES, **_HEADS, "num_hidden_layers": 1}


class Row(NamedTuple):
    """A row of a table of runs.

    Attributes:
        config: The YAML, from the checkout.
        keys: What differs in it: dotted key -> value.
        ranks, rank: How many devices there are, and which of them runs.
        rows: Rows of the data. With data_parallel 8 in the semi-automatic mode, 16 are two steps.
        data: What they are: a key of DATA.
        prepare: What writes other files of the run into its folder, and changes its YAML accordingly; None for nothing.
        values: Whether weights get their values, which what computes with them needs.
        saves: Whether this rank writes the adapter. DoRA's is not: it looks at trained values first, and a
            dry run has none.
        refused: What mindlora-run says instead of training; None for a run that trains.
        always: Whether it runs without being asked for.
    """

    config: str = LLAMA
    keys: Mapping[str, Any] = {}
    ranks: int = 1
    rank: int = 0
    rows: int = 16
    data: str = "tokens"
    prepare: Optional[Callable[[pathlib.Path, Dict[str, Any]], None]] = None
    values: bool = False
    saves: bool = True
    refused: Optional[str] = None
    always: bool = False


def _tokens(rng: np.random.Generator, length: int) -> Dict[str, np.ndarray]:
    ids = rng.integers(5, VOCABULARY, length + 1).astype(np.int32)
    return {"input_ids": ids, "labels": ids}


def _packed(rng: np.random.Generator, length: int) -> Dict[str, np.ndarray]:
    row = _tokens(rng, length)
    row["input_ids"][[0, 20, 40]] = BOUNDARY
    return {**row, "boundary": np.array([BOUNDARY], np.int32)}


def _packed_with_ends(rng: np.random.Generator, length: int) -> Dict[str, np.ndarray]:
    return {**_packed(rng, length), "actual_seq_len": np.array([20, 40, length], np.int32)}


def _pair(rng: np.random.Generator, length: int) -> Dict[str, np.ndarray]:
    ids = np.stack([_tokens(rng, length)["input_ids"] for _ in range(2)])
    answers = np.full_like(ids, -1)
    answers[:, 30:] = [[0], [1]]
    return {"input_ids": ids, "labels": ids, "answers": answers, "pairs": np.ones(1, np.int32)}


def _labeled(rng: np.random.Generator, length: int) -> Dict[str, np.ndarray]:
    row = _tokens(rng, length)
    return {**row, "labels": row["labels"] % 2}


# A row of a MindRecord, for each kind of data.
DATA = {
    "tokens": _tokens,
    "packed": _packed,
    "packed, with ends": _packed_with_ends,
    "pairs": _pair,
    "labels of two classes": _labeled,
}


def tokenizer(folder: pathlib.Path, config: Dict[str, Any]) -> None:
    """Writes tokenizer/, whose tokens the models have."""
    chat_tokenizer(CHATML).save_pretrained(folder / "tokenizer")


def loftq(folder: pathlib.Path, config: Dict[str, Any]) -> None:
    """Makes the run one from LoftQ's adapter, which is made together with the base in 4 bits."""
    fields = dict(config["model"]["model_config"]["pet_config"], lora_init="loftq")
    del fields["pet_type"]
    base, quantized, adapter = (str(folder / name) for name in ("base", "nf4.safetensors", "loftq"))
    _write_base(base, config)
    quantize_checkpoint(base, quantized, adapter=adapter, config=LoraConfig(**fields))
    _start_from(config, quantized, {"adapter_path": adapter})


def eva(folder: pathlib.Path, config: Dict[str, Any]) -> None:
    """Makes the run one from the adapter of mindlora eva, whose cells have ranks of their own."""
    base, adapter, path = (str(folder / name) for name in ("base", "eva", "eva.yaml"))
    _write_base(base, config)
    cpu = copy.deepcopy(config)
    cpu["model"]["model_config"].update(IN_FLOAT32 if _is_mcore(config) else ON_CPU)
    cpu["context"]["device_target"] = "CPU"
    cpu["load_checkpoint"] = base
    pathlib.Path(path).write_text(yaml.safe_dump(cpu), encoding="utf-8")
    command = [sys.executable, "-m", "mindlora.cli", "eva", path, "--output", adapter, "--rows", "8", "--json"]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    made = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    _start_from(config, base, json.loads(made.stdout.splitlines()[-1])["keys"])


def _start_from(config: Dict[str, Any], base: str, keys: Mapping[str, Any]) -> None:
    """Changes a YAML so that its run starts from a base, and from the adapter that ``keys`` of pet_config describe."""
    pet = config["model"]["model_config"]["pet_config"]
    pet.update(keys)
    if YamlRun(config).is_sharded:
        # MindFormers slices a base by files that all ranks write, and a dry run has one rank.
        pet["on_base_mismatch"] = "ignore"
    else:
        config["load_checkpoint"] = base


def qwen3_in_4_bits(folder: pathlib.Path, config: Dict[str, Any]) -> None:
    """Makes the run of a Qwen3 one on a base in 4 bits, under mcore's names."""
    base, quantized = str(folder / "base"), str(folder / "nf4.safetensors")
    _write_base(base, config)
    quantize_checkpoint(base, quantized)
    _start_from(config, quantized, {"quantize_base": "nf4"})


def _is_mcore(config: Mapping[str, Any]) -> bool:
    return config.get("use_legacy") is False


def _write_base(folder: str, config: Mapping[str, Any]) -> None:
    """Writes the base of a run, a Llama or a Qwen3, under Hugging Face's names."""
    hidden, inner, layer = _SIZES["hidden_size"], _SIZES["intermediate_size"], "model.layers.0."
    shapes: Dict[str, Tuple[int, ...]] = dict.fromkeys(("model.embed_tokens", "lm_head"), (VOCABULARY, hidden))
    shapes.update({f"{layer}self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"})
    shapes.update({f"{layer}mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")})
    shapes[f"{layer}mlp.down_proj"] = (hidden, inner)
    for norm in ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm"):
        shapes[norm] = (hidden,)
    described: Dict[str, Any] = {}
    if _is_mcore(config):
        shapes.update({f"{layer}self_attn.{part}_norm": (_HEADS["head_dim"],) for part in "qk"})
        described = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **_HEADS}
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_base(folder, tensors, **described)


def parallel(data: int = 8, model: int = 1, stages: int = 1, mode: int = 1, **others: Any) -> Dict[str, Any]:
    """Returns the keys that divide a run among devices; mode 0 is data parallel, 1 semi-automatic."""
    sizes = {"data_parallel": data, "model_parallel": model, "pipeline_stage": stages, "micro_batch_num": stages}
    sizes.update(others)
    context = {"parallel.parallel_mode": mode, "parallel.full_batch": mode == 1}
    return {**context, **{f"parallel_config.{name}": value for name, value in sizes.items()}}


def callbacks(*added: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    """Returns a list of callbacks that saves the adapter at the second step, with ``added`` ones."""
    return [{"type": "MFLossMonitor"}, {"type": "LoraCheckpoint", "save_steps": 2, "keep_last": 1}, *added]


def small_yaml(row: Row, folder: pathlib.Path) -> Dict[str, Any]:
    """Returns the YAML of a row, with one small layer and data of its own."""
    config = copy.deepcopy(yaml.safe_load((pathlib.Path(ROOT) / row.config).read_text("utf-8")))
    model = config["model"]["model_config"]
    model.update(_MCORE if _is_mcore(config) else _LEGACY)
    if "num_experts" in model:
        model.update(_EXPERTS)
    config["runner_config"].update(epochs=1, batch_size=1, sink_mode=False)
    config.update(auto_trans_ckpt=False, use_parallel=row.ranks > 1)
    config["callbacks"] = callbacks() if row.saves else [{"type": "MFLossMonitor"}]
    for key, value in row.keys.items():
        node = config
        *path, leaf = key.split(".")
        for name in path:
            node = node.setdefault(name, {})
        node[leaf] = value
    rng = np.random.default_rng(0)
    data = str(folder / "rows.mindrecord")
    length = model["seq_length"]
    write_mindrecord((DATA[row.data](rng, length) for _ in range(row.rows)), data)
    config["train_dataset"]["data_loader"]["dataset_dir"] = data
    config["train_dataset_task"]["dataset_config"] = config["train_dataset"]
    if row.prepare is not None:
        row.prepare(folder, config)
    return config


def train(row: Row, folder: pathlib.Path, *flags: str) -> Run:
    """Runs mindlora-run on the YAML of a row."""
    config = small_yaml(row, folder)
    return run_yaml(config, *flags, folder=folder, ranks=row.ranks, rank=row.rank, values=row.values)


def saved_folders(folder: pathlib.Path) -> List[str]:
    """Returns what LoraCheckpoint has left: step folders of whole adapters, or of a rank's slices."""
    root = folder / "out"
    found = [path.relative_to(root) for path in root.rglob("step_*") if path.is_dir()]
    return sorted(os.fspath(path) for path in found)
