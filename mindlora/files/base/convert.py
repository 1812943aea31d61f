"""convert_base: converts a base model's checkpoint from Hugging Face's names to MindFormers' and back.

Elements are copied as they are: MindFormers rotates pairs of positions as Hugging Face does, so no row of q or k moves.
"""

import dataclasses
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import dtype_name, named_dtype
from mindlora.core.text import examples, listed
from mindlora.files.base import joined, writer
from mindlora.files.base.quantized.decode import CONFIG_NOTE
from mindlora.files.base.reader import CONFIG, WORLDS, BaseCheckpoint
from mindlora.files.base.renaming import Plan, quantized_weights, taken_apart, tensor_of
from mindlora.files.base.writer import PYNATIVE, OutputTensor, check_checkpoint_output, is_file_name, write
from mindlora.models import names
from mindlora.models.architectures.architecture import HF, LEGACY, MCORE
from mindlora.models.architectures.llama import LLAMA
from mindlora.models.architectures.mcore_sizes import decoder_sizes
from mindlora.models.architectures.qwen import QWEN3, QWEN3_MOE
from mindlora.models.architectures.registry import by_hugging_face_type

TARGETS = (*WORLDS, PYNATIVE)
_NO_CONFIG = (
    "The checkpoint lacks a config.json, which transformers and vLLM need: name the model's folder or its YAML "
    "(--config), or copy it from the original model."
)
_EMBEDDING, _GATE = "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"
_QUERIES, _KEYS_OF_ATTENTION = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
# Key of transformers -> key of MindFormers' LlamaConfig, and the model's default.
_KEYS: Dict[str, Tuple[str, Any]] = {
    "num_attention_heads": ("num_heads", 32),
    "num_key_value_heads": ("n_kv_heads", None),
    "rms_norm_eps": ("rms_norm_eps", 1e-5),
    "rope_theta": ("theta", 10000.0),
    "max_position_embeddings": ("max_position_embedding", None),
    "bos_token_id": ("bos_token_id", 1),
    "eos_token_id": ("eos_token_id", 2),
    "pad_token_id": ("pad_token_id", 0),
}
# Key of transformers -> attribute of DecoderSizes, of an mcore model.
_OF_SIZES = {
    "vocab_size": "vocabulary",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class ConvertBaseReport:
    """The result of convert_base; str() gives it as text.

    Attributes:
        source, output (str): The two checkpoints.
        from_, to (str): The naming of each, "hf", "mindformers" or "mcore".
        files (tuple of str): The written files that hold tensors.
        tensors (int): Number of tensors written.
        bytes (int): Their size.
        skipped (tuple of str): Tensors of the source that every model computes itself.
        notes (tuple of str): The decision about tied embeddings, and what else was left out.
        seconds (float): How long it took.
    """

    source: str
    output: str
    from_: str
    to: str
    files: Tuple[str, ...]
    tensors: int
    bytes: int
    skipped: Tuple[str, ...]
    notes: Tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"{self.output}: {self.bytes / 1e9:.2f} GB from {WORLDS[self.from_]} names to {WORLDS[self.to]}; "
            f"tensors: {self.tensors}, files: {len(self.files)}; {self.seconds:.1f} s."
        ]
        if self.skipped:
            lines.append(f"Left out, since every model computes it for itself: {examples(self.skipped)}.")
        return "\n".join([*lines, *self.notes])


def convert_base(
    source: str,
    output: str,
    from_: Optional[str],
    to: str,
    concat: bool = False,
    tied: bool = False,
    heads: Optional[int] = None,
    kv_heads: Optional[int] = None,
    overwrite: bool = False,
    model_config: Optional[Mapping] = None,
    config: Optional[Mapping] = None,
    progress: Optional[Callable[[int, int], None]] = None,
    dtype: Optional[str] = None,
) -> ConvertBaseReport:
    """Renames every tensor of a base checkpoint; each keeps its bytes and its dtype, unless it is quantized.

    Weights in a quantized form (mindlora.files.base.quantized) are decoded in float32 and rounded to ``dtype``.

    With MindFormers' qkv_concat, q, k and v are one tensor w_qkv, whose rows are ordered by key-value head [heads of q
    that share it | k | v], and w1 and w3 are one tensor w_gate_hidden, in which their rows alternate. For Hugging Face,
    such tensors are always split.

    With tied embeddings, a Hugging Face checkpoint has no lm_head.weight. MindFormers' Llama looks for one unless its
    YAML says ``tie_word_embeddings: True``, so a copy of the embedding is written, which loads either way.

    Safetensors are read and written as a stream. A .ckpt is written as a stream too, but read into memory as a whole.

    Args:
        source (str): A folder of safetensors, with or without index, or a .safetensors or .ckpt file.
        output (str): A folder, divided into files like the source, or a .safetensors or .ckpt file.
        from_ (str): "hf", "mindformers" or "mcore", which is checked against the names; None detects it from them.
        to (str): "hf", "mindformers" or "mcore". For a model that MindFormers has only as an mcore model, such as
            Qwen3, "mindformers" means "mcore". "pynative" writes the folder that the PyNative trainer of MindFormers 2
            loads, for Qwen3, Qwen3-MoE and DeepSeek-V3.
        concat (bool): Whether to join w_qkv and w_gate_hidden, for "mindformers". Default: False.
        tied (bool): Whether to leave lm_head.weight out because it is the embedding. Default: False.
        heads, kv_heads (int): Numbers of attention and of key-value heads, for qkv_concat. Default: None, which takes
            them from the config.json beside the source, or from ``config``.
        overwrite (bool): Whether to replace an existing ``output``. Default: False.
        model_config (dict): model.model_config of a MindFormers YAML, from which a folder for Hugging Face gets its
            config.json if the source has none. Default: None.
        config (dict): The content of the model's config.json, if the source has none; a folder for Hugging
            Face gets it. Default: None.
        progress (callable): Takes the size of each written block and the total size, in bytes. Default: None.
        dtype (str): "float32", "float16" or "bfloat16": the dtype of decoded quantized weights. Default: None, the
            dtype in the config.json beside them, or float32.

    Returns:
        ConvertBaseReport.

    Raises:
        CheckpointError: The source cannot be read or holds an unknown name, the numbers of heads are needed
            but unknown, or ``output`` cannot be written.
        TruncatedAdapterError, AdapterFormatError: A file of the source is damaged.
    """
    started = time.perf_counter()
    if to not in TARGETS or from_ not in (None, *WORLDS):
        raise CheckpointError(
            f"from_ is {from_!r} and to is {to!r}: to must be one of {', '.join(map(repr, TARGETS))}, and from_ "
            f"None or one of {', '.join(map(repr, WORLDS))}."
        )
    check_checkpoint_output(output, [source], overwrite)
    with BaseCheckpoint(source, decode_to=named_dtype(dtype) if dtype else None) as base:
        if dtype and not base.decoded:
            raise CheckpointError(
                f"dtype is {dtype}, but {source} holds no quantized weights: each tensor keeps its dtype. Leave dtype "
                "(--dtype) out."
            )
        has_config = bool(base.config)
        base.config = base.config or dict(config or {})
        written = _world_of(base, to)
        _check_worlds(base, from_, to, concat)
        if to == PYNATIVE:
            _check_trainer(base, output)
        plan = Plan(base, written, concat, heads, kv_heads)
        notes = [*base.left_out, *_settle_head(base, plan, written, tied)]
        tensors = [tensor for shard in plan.shards for tensor in shard.tensors]
        companions = []
        contents = {}
        if to in (HF, PYNATIVE) and not is_file_name(output):
            companions = base.companions()
        if companions and base.decoded and has_config:
            contents[CONFIG] = base.config
            notes.append(CONFIG_NOTE)
        if to == HF and not is_file_name(output):
            if not has_config and base.config:
                contents[CONFIG] = base.config
            elif not has_config and model_config is not None:
                contents[CONFIG] = hugging_face_config([tensor[:3] for tensor in tensors], model_config)
            elif not has_config:
                notes.append(_NO_CONFIG)
        shards = plan.shards
        if to == PYNATIVE:
            shards = writer.shards_in_trainers_form(
                shards, {t.name: t.unit for t in tensors if names.is_expert_weight(t.name)}
            )
        files = write(output, shards, PYNATIVE if to == PYNATIVE else written, companions, contents, progress)
    return ConvertBaseReport(
        str(source),
        str(output),
        base.world,
        written,
        tuple(files),
        len(tensors),
        sum(tensor.nbytes for tensor in tensors),
        tuple(plan.skipped),
        tuple(notes),
        time.perf_counter() - started,
    )


def in_mindformers_names(base: BaseCheckpoint) -> Tuple[List[OutputTensor], List[str]]:
    """Returns the tensors of ``base`` as convert_base would write them for MindFormers, and its notes."""
    if base.world != HF:
        return [tensor_of(base, name) for name in base.tensors], base.left_out
    to = _world_of(base, LEGACY)
    plan = Plan(base, to, False, None, None)
    notes = [*base.left_out, *_settle_head(base, plan, to, False)]
    return [tensor for shard in plan.shards for tensor in shard.tensors], notes


def in_hugging_face_names(base: BaseCheckpoint, heads: int, kv_heads: int) -> List[OutputTensor]:
    """Returns the tensors of ``base`` as convert_base would write them for Hugging Face.

    Joined tensors are split by the numbers of heads. The weights of a layer's routed experts are stacked, as in
    transformers 5. For a quantized base see mindlora.files.base.renaming.
    """
    if base.world == HF:
        tensors = [tensor_of(base, name) for name in base.tensors]
    elif quantized_weights(base.tensors):
        tensors = taken_apart(base, heads, kv_heads)
    else:
        plan = Plan(base, HF, False, heads, kv_heads)
        tensors = [tensor for shard in plan.shards for tensor in shard.tensors]
    return joined.stack_experts(tensors, base.architecture.experts)


def _check_worlds(base: BaseCheckpoint, from_: Optional[str], to: str, concat: bool) -> None:
    if from_ not in (None, base.world) and not (from_ == LEGACY and base.world == MCORE):
        raise CheckpointError(
            f"{base.path} has {WORLDS[base.world]} names, not {WORLDS[str(from_)]}. Give --from "
            f"{base.world}, or another checkpoint."
        )
    if to == PYNATIVE and base.world == MCORE and not base.is_step:
        raise CheckpointError(
            f"{base.path} has mcore's names and shapes, from which the PyNative trainer's differ. Convert it --to hf "
            "first."
        )
    if _world_of(base, to) == base.world and not base.decoded:
        raise CheckpointError(f"{base.path} has {WORLDS[base.world]} names already: use it as it is.")
    if concat and to == "hf":
        raise CheckpointError(
            "Joined tensors (concat) have no name in Hugging Face's world. Leave concat (--concat) out."
        )


def _world_of(base: BaseCheckpoint, to: str) -> str:
    """Returns the naming of the form ``to``; "mindformers" means "mcore" for a model that has no legacy form."""
    return MCORE if to == PYNATIVE or to == LEGACY and not base.architecture.legacy else to


def _check_trainer(base: BaseCheckpoint, output: str) -> None:
    if base.architecture.legacy or not base.architecture.trains:
        raise CheckpointError(
            f"MindFormers' PyNative trainer does not have {base.architecture.title}, the model of {base.path}. Use "
            "--to mindformers and train with its graph mode."
        )
    if is_file_name(output):
        raise CheckpointError(f"The output {output} is a file, and MindFormers' trainer loads a folder. Give a folder.")


def _settle_head(base, plan, to, tied) -> List[str]:
    """Adds or removes the output head's weight where the embeddings are tied; returns notes for the report."""
    head = base.architecture.head_weight(base.world)
    written_head = base.architecture.head_weight(to)
    if head in base.tensors:
        if not tied:
            return []
        _check_tied(base, head)
        for shard in plan.shards:
            shard.tensors[:] = [tensor for tensor in shard.tensors if tensor.name != written_head]
        return [f"{written_head} is the embedding and was left out; the model must set tie_word_embeddings: true."]
    if base.config.get("tie_word_embeddings") is False:
        advice = base.advice_without_head
        raise CheckpointError(
            f"{base.path} lacks {head}, and its config.json says that the embeddings are not tied. {advice}"
        )
    # MindFormers' mcore models share the embedding as transformers does, if the configuration says so.
    if tied or to in (HF, MCORE):
        return [f"The checkpoint has no {head}; the model must set tie_word_embeddings: true."]
    table = base.architecture.embedding_table(to)
    for shard in plan.shards:
        shard.tensors.extend([tensor._replace(name=written_head) for tensor in shard.tensors if tensor.name == table])
    return [
        f"The embeddings are tied: {written_head} was written as a copy of them. With tie_word_embeddings: True in the "
        "YAML it is not needed, and --tied leaves it out."
    ]


def _check_tied(base, head):
    embedding = base.architecture.embedding_table(base.world)
    first = base.tensors.get(embedding)
    second = base.tensors[head]
    step = max(2**21 // max(second.size // second.shape[0], 1), 1)
    blocks = [(begin, min(begin + step, second.shape[0])) for begin in range(0, second.shape[0], step)]
    # Compared as bytes, so that NaN equals itself.
    if (
        first is None
        or first[:2] != second[:2]
        or any(base.read_rows(embedding, *rows).tobytes() != base.read_rows(head, *rows).tobytes() for rows in blocks)
    ):
        raise CheckpointError(
            f"{base.path}: {head} is not {embedding}, so tied would lose it. Leave tied (--tied) out."
        )


def hugging_face_config(tensors: Sequence[Tuple[str, Any, Tuple[int, ...]]], model_config: Mapping) -> Dict[str, Any]:
    """Returns the content of config.json for a checkpoint of Llama, Qwen2, Qwen3 or Qwen3-MoE.

    Args:
        tensors (sequence): (name, dtype, shape) of each tensor, under Hugging Face's names.
        model_config (mapping): model_config of a MindFormers YAML. Sizes of the tensors must not contradict it; heads,
            positions and token ids come from it alone.

    Raises CheckpointError if they disagree, for other models, and for extended rotary embeddings.
    """
    shapes = {name: shape for name, _, shape in tensors}
    kind = by_hugging_face_type(str(model_config.get("model_type")))
    is_mcore = kind in (QWEN3, QWEN3_MOE)
    if not is_mcore and (
        model_config.get("type", "LlamaConfig") not in LLAMA.model_types or not {_EMBEDDING, _GATE} <= shapes.keys()
    ):
        raise CheckpointError(
            f"No config.json can be made for model_config.type {model_config.get('type')}: only models of "
            f"{LLAMA.title}, {QWEN3.title} and {QWEN3_MOE.title} are described from a YAML. Copy config.json from the "
            "original model."
        )
    config = _of_mcore_model(kind, shapes, model_config) if is_mcore else _of_llama(shapes, model_config)
    config["hidden_act"] = "silu"
    config["tie_word_embeddings"] = "lm_head.weight" not in shapes
    config["torch_dtype"] = dtype_name(next(dtype for name, dtype, _ in tensors if name == _EMBEDDING))
    return config


def _of_llama(shapes, model_config):
    if model_config.get("extend_method") not in (None, "None", "none"):
        raise CheckpointError(
            f"No config.json can be made for extend_method {model_config['extend_method']}: copy config.json from the "
            "original model."
        )
    values = {**_shown(shapes), "intermediate_size": shapes[_GATE][0]}
    _compare(values, model_config, {"num_hidden_layers": "num_layers"})
    kind = "Qwen2" if "model.layers.0.self_attn.q_proj.bias" in shapes else "Llama"
    config: Dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        **values,
        **{theirs: model_config.get(ours, default) for theirs, (ours, default) in _KEYS.items()},
    }
    config["num_key_value_heads"] = config["num_key_value_heads"] or config["num_attention_heads"]
    config["max_position_embeddings"] = config["max_position_embeddings"] or model_config.get("seq_length", 2048)
    _check_heads(config, shapes, "num_heads", "n_kv_heads")
    return config


def _of_mcore_model(kind, shapes, model_config):
    sizes = decoder_sizes(kind, dict(model_config))
    needed = [_EMBEDDING, _QUERIES, _KEYS_OF_ATTENTION, *([] if sizes.experts else [_GATE])]
    missing = [name for name in needed if name not in shapes]
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {listed(missing)}, and the YAML describes a {kind.title}. Name the YAML of this "
            "model (--config), or copy config.json from the original model."
        )
    config: Dict[str, Any] = {
        "architectures": [kind.model_types[0]],
        "model_type": kind.hugging_face_types[0],
        **{key: getattr(sizes, size) for key, size in _OF_SIZES.items()},
        "attention_bias": sizes.has_bias,
        "max_position_embeddings": model_config.get("max_position_embeddings") or model_config.get("seq_length", 4096),
        **{key: model_config[key] for key in _TOKENS if model_config.get(key) is not None},
    }
    if sizes.experts:
        config.update(num_experts=sizes.experts, num_experts_per_tok=sizes.chosen, norm_topk_prob=sizes.sums_to_one)
        config.update(moe_intermediate_size=sizes.inner, intermediate_size=model_config.get("intermediate_size"))
        config.update(decoder_sparse_step=1, mlp_only_layers=[])
    else:
        config["intermediate_size"] = sizes.inner
    shown = _shown(shapes) if sizes.experts else {**_shown(shapes), "intermediate_size": shapes[_GATE][0]}
    _compare(shown, config, {})
    _check_heads(config, shapes, "num_attention_heads", "num_key_value_heads")
    return config


def _shown(shapes):
    """Returns the sizes that the tensors of every model show."""
    layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    vocabulary, hidden = shapes[_EMBEDDING]
    return {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": len(layers)}


def _compare(values, stated_by, ours):
    for key, value in values.items():
        stated = stated_by.get(ours.get(key, key))
        if stated is not None and stated != value:
            raise CheckpointError(
                f"The YAML has {ours.get(key, key)} {stated}, and the checkpoint {value}: name the YAML of this model."
            )


def _check_heads(config, shapes, heads_key, groups_key):
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    q, k = shapes[_QUERIES][0], shapes[_KEYS_OF_ATTENTION][0]
    if q * groups != k * heads or q != heads * config.get("head_dim", q // heads):
        raise CheckpointError(
            f"The YAML has {heads_key} {heads} and {groups_key} {groups}, and the checkpoint {q} rows of q and {k} of "
            "k: name the YAML of this model."
        )
