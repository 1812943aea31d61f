"""Tiny models with a tokenizer and adapters on disk, and `mindlora serve` on them as a process of its own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
import types

import httpx
import numpy as np
import yaml

from mindlora.core.numerics.dtypes import to_float32
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from tests.conftest import ROOT
from tests.support import forked, mcore_checkpoints
from tests.support.chat_templates import CHATML, HERMES_TOOLS, chat_tokenizer
from tests.support.llama_checkpoints import FFN, HEAD_DIM, HIDDEN, HUGGING_FACE, ROWS, llama, save_base

LORA_YAML = os.path.join(ROOT, "configs", "tiny", "lora_llama_tiny_cpu.yaml")
VOCABULARY, LAYERS = 384, 2
# It shows the names of tools: their schemas would be most of a sequence.
TEMPLATE = HERMES_TOOLS.replace("tools | tojson", "tools | map(attribute='function.name') | join(' ')")
READY = 600  # Seconds that no start takes, on a busy machine either; one that fails is seen at once.
# Rank and cells of each adapter; one of them on some cells alone.
ADAPTERS = {"first": (4, ("attention.wq", "feed_forward.w2")), "second": (8, ("attention.wo",))}
WIDTHS = {"attention.wq": (HIDDEN, HIDDEN), "attention.wo": (HIDDEN, HIDDEN), "feed_forward.w2": (FFN, HIDDEN)}
# In a Qwen3-MoE, pairs of experts take the place of those of the feed-forward network.
EXPERT_INNER, EXPERTS = 12, 3
OF_EXPERTS = {"mlp.experts.weight1": (HIDDEN, 2 * EXPERT_INNER), "mlp.experts.weight2": (EXPERT_INNER, HIDDEN)}


def write_llama(folder, length=96, head_dim=HEAD_DIM):
    """Writes run.yaml, base/ (with a tokenizer) and adapters/ into a folder; returns it. Sequences have ``length``.

    Weights are the same for any ``head_dim``, and so are their shapes.
    """
    heads, kv_heads = (ROWS[name] // head_dim for name in ("q_proj", "k_proj"))
    rng = np.random.default_rng(0)
    tensors = llama(np.dtype("<f4"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = rng.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
    tensors = {name: array * 0.3 if array.ndim == 2 else np.ones_like(array) for name, array in tensors.items()}
    config = {"vocab_size": VOCABULARY, "max_position_embeddings": length, **HUGGING_FACE}
    config.update(num_attention_heads=heads, num_key_value_heads=kv_heads)
    base = save_base(os.path.join(folder, "base"), tensors, **config)
    _save_tokenizer(base)
    with open(LORA_YAML, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    sizes = {"seq_length": length, "hidden_size": HIDDEN, "num_layers": LAYERS, "vocab_size": VOCABULARY}
    config["model"]["model_config"].update(sizes, intermediate_size=FFN, num_heads=heads, n_kv_heads=kv_heads)
    config.update(load_checkpoint=base)
    with open(os.path.join(folder, "run.yaml"), "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    _write_adapters(folder)
    return folder


def write_qwen3_moe(folder, length=96):
    """As write_llama, without run.yaml: base/ is a Qwen3-MoE as Hugging Face has it."""
    heads, kv_heads, head_dim = HUGGING_FACE["num_attention_heads"], HUGGING_FACE["num_key_value_heads"], 8
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    norms = {"model.norm.weight": HIDDEN}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        shapes.update({f"{start}self_attn.{name}.weight": (count * head_dim, HIDDEN) for name, count in rows.items()})
        shapes[f"{start}self_attn.o_proj.weight"] = (HIDDEN, heads * head_dim)
        shapes[f"{start}mlp.gate.weight"] = (EXPERTS, HIDDEN)
        shapes[f"{start}mlp.experts.gate_up_proj"] = (EXPERTS, 2 * EXPERT_INNER, HIDDEN)
        shapes[f"{start}mlp.experts.down_proj"] = (EXPERTS, HIDDEN, EXPERT_INNER)
        norms.update({f"{start}self_attn.{name}.weight": head_dim for name in ("q_norm", "k_norm")})
        norms.update({f"{start}{name}.weight": HIDDEN for name in ("input_layernorm", "post_attention_layernorm")})
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors.update({name: np.ones(size, np.float32) for name, size in norms.items()})
    config = {
        **HUGGING_FACE,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": VOCABULARY,
        "head_dim": head_dim,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_INNER,
        "norm_topk_prob": True,
        "max_position_embeddings": length,
    }
    _save_tokenizer(save_base(os.path.join(folder, "base"), tensors, **config))
    _write_adapters(folder)
    return folder


def _save_tokenizer(base):
    tokenizer = chat_tokenizer(TEMPLATE)
    assert len(tokenizer) <= VOCABULARY
    tokenizer.save_pretrained(base)


def _write_adapters(folder):
    """Writes those of ADAPTERS, and half of one."""
    for seed, name in enumerate(ADAPTERS, 1):
        write_adapter(folder, name, seed)
    shutil.copytree(os.path.join(folder, "adapters", "first"), os.path.join(folder, "adapters", "damaged"))
    path = os.path.join(folder, "adapters", "damaged", "adapter_model.safetensors")
    os.truncate(path, os.path.getsize(path) // 2)


def write_qwen3(folder):
    """Writes a folder as Hugging Face has a Qwen3, with a tokenizer; returns it."""
    tensors = {name: to_float32(array) * 0.3 for name, array in mcore_checkpoints.qwen3().items()}
    rng = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = rng.normal(size=(VOCABULARY, mcore_checkpoints.HIDDEN)).astype(np.float32)
    sizes = {"hidden_size": mcore_checkpoints.HIDDEN, "intermediate_size": mcore_checkpoints.INNER}
    config = {"model_type": "qwen3", "vocab_size": VOCABULARY, "num_hidden_layers": 2, **sizes}
    save_base(folder, tensors, **config, max_position_embeddings=96, **mcore_checkpoints.CONFIG)
    chat_tokenizer(CHATML).save_pretrained(folder)
    return folder


def write_adapter(folder, name, seed, kind=None, labels=0):
    """Writes an adapter in PEFT's form, with values that change what the model says; ``kind`` is one of ADAPTERS.

    With ``labels``, it is a classifier.
    """
    rng, tensors, alphas = np.random.default_rng(seed), {}, {}
    rank, cells = ADAPTERS[kind or name]
    if not os.path.exists(os.path.join(folder, "run.yaml")):
        cells = [cell for one in cells for cell in (OF_EXPERTS if one.startswith("feed_forward") else (one,))]
    for layer in range(LAYERS):
        for cell in cells:
            path, (wide, high) = f"model.layers.{layer}.{cell}", {**WIDTHS, **OF_EXPERTS}[cell]
            stack = (EXPERTS,) if cell in OF_EXPERTS else ()
            tensors[path, "A"] = rng.normal(size=(*stack, rank, wide)).astype(np.float32) * 0.3
            tensors[path, "B"] = rng.normal(size=(*stack, high, rank)).astype(np.float32) * 0.3
            alphas[path] = 2.0 * rank
    head = {"score.weight": rng.normal(size=(labels, HIDDEN)).astype(np.float32)} if labels else {}
    files.write(Adapter(tensors, alphas, saved_modules=head), os.path.join(folder, "adapters", name), "peft")


def run_here(program, folder):
    """Runs the source of a program in a process forked from this one; returns its exit code and what it wrote."""
    ended = forked.run(["-c", program], folder, {**os.environ, "PYTHONPATH": ROOT})
    return ended.returncode, ended.stderr


@contextlib.contextmanager
def serving(folder, *options, source=("--config", "run.yaml", "--adapters", "adapters"), run=run_here):
    """Runs `mindlora serve` while the context lasts; yields its URL, and ``log``, a function that returns its lines.

    ``source`` is what it serves, ``run`` is as run_here. Ends it by SIGTERM, and expects exit code 0.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log, process = os.path.join(folder, "requests.jsonl"), os.path.join(folder, "pid")
    words = ["serve", *source, "--port", str(port), "--request-log", log]
    program = (
        f"import os; open({process!r}, 'w').write(str(os.getpid()))\n"
        f"from mindlora import cli; raise SystemExit(cli.main({[*words, *options]!r}))"
    )
    ended = []
    thread = threading.Thread(target=lambda: ended.append(run(program, folder)))
    thread.start()
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, lambda: ended and ended[0][1])
        yield types.SimpleNamespace(url=url, log=lambda: _lines(log), pid=_number(process))
    finally:
        if not ended:
            os.kill(_number(process), signal.SIGTERM)
        thread.join()
    code, text = ended[0]
    assert code == 0, text


def _number(path):
    with open(path, encoding="utf-8") as file:
        return int(file.read())


def _lines(log):
    with open(log, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def wait_until_ready(url, ended):
    """Waits until a server takes requests; ``ended`` returns why it will not, or something false."""
    end = time.monotonic() + READY
    # Reading the machine's certificates, for https, would take longer than all requests.
    with httpx.Client(base_url=url, verify=False) as client:
        while time.monotonic() < end:
            assert not ended(), ended()
            with contextlib.suppress(httpx.TransportError):
                if client.get("/ready").status_code == 200:
                    return
            time.sleep(0.02)
    raise AssertionError("the server was not ready in time")
