"""convert_adapter: turns an adapter of any known form into any form that can be written."""

import dataclasses
import os
from typing import Any, Dict, Iterable, Mapping, Optional, Sequence, Tuple

from mindlora.core.errors import AdapterError, LoraError
from mindlora.files.adapters import expert_pairs, joined_pairs, llama_cpp, parts
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft
from mindlora.files.adapters.dialects.dialect import Dialect
from mindlora.files.adapters.dialects.peft_config import Extras
from mindlora.files.adapters.dialects.registry import FORMS
from mindlora.files.adapters.known_base import KnownBase, known_base
from mindlora.files.adapters.matching import rename, rename_for
from mindlora.models import names
from mindlora.models.architectures.architecture import HF, LEGACY, MCORE, JoinedCell
from mindlora.models.architectures.joined_rows import RowLayout

EXPERT_FORMS = ("stacked", "single")


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes of the model's attention, needed to split and join its cells; None for unknown sizes.

    ``q_rank`` is q_lora_rank of DeepSeek-V3. ``layouts`` maps a joined cell, such as w_qkv, to the model's order of its
    rows, if that differs from its record.
    """

    heads: Optional[int] = None
    kv_heads: Optional[int] = None
    head_dim: Optional[int] = None
    q_rank: Optional[int] = None
    layouts: Mapping[str, RowLayout] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ConvertAdapterReport:
    """The result of convert_adapter: paths and forms read and written, counts, and the pairs' settings.

    ``left_out`` names the base's own tables that the file held and the new form has no place for.
    """

    source: str
    dialect: str
    output: str
    form: str
    pairs: int
    saved_modules: int
    ranks: Tuple[int, ...]
    alphas: Tuple[float, ...]
    left_out: Tuple[str, ...] = ()

    def __str__(self) -> str:
        content = pairs_in_words(self.pairs, self.ranks, self.alphas, self.saved_modules)
        written = f"{self.source} ({self.dialect}) -> {self.output} ({self.form}): {content}."
        if not self.left_out:
            return written
        return (
            f"{written} It leaves out the table that the pair was trained on ({', '.join(self.left_out)}), which PEFT "
            "saves beside it: use the adapter on a base with the same table."
        )


def pairs_in_words(pairs: int, ranks: Sequence[int], alphas: Sequence[float], saved_modules: int) -> str:
    """Returns the contents of a written adapter for reports: counts of pairs and parameters, distinct settings."""
    modules = f" and {saved_modules} parameters of saved modules" if saved_modules else ""
    ranks_in_words = ", ".join(map(str, ranks))
    alphas_in_words = ", ".join(f"{alpha:g}" for alpha in alphas)
    return f"{pairs} pairs of rank {ranks_in_words}, lora_alpha {alphas_in_words}{modules}"


def convert_adapter(
    source: str,
    output: str,
    to: str,
    lora_alpha: Optional[float] = None,
    heads: Heads = Heads(),
    concatenate: bool = False,
    allow_pickle: bool = False,
    overwrite: bool = False,
    part: Optional[str] = None,
    target_paths: Optional[str] = None,
    architecture: Optional[str] = None,
    experts: Optional[str] = None,
    base_config: Optional[Mapping[str, Any]] = None,
) -> ConvertAdapterReport:
    """Writes the adapter at ``source`` in another form, with every value the same bit for bit.

    The exceptions are pairs of different scales that share one afterwards, in a joined pair (``concatenate``) or in
    forms "slora", "mcore" and "pynative": their B are rescaled and rounded to their dtype. So are the B for "pynative"
    where lora_alpha must be a whole number and is not. In "mcore" and "pynative", which have one rank for all cells,
    pairs of a smaller rank get zeros, which are taken off again when the file is read. A convolution in three matrices
    (kohya's lora_mid) becomes one in two. A GGUF file has float32 values, one scale, and llama.cpp's order of
    rows.

    Args:
        source (str): Any form that adapter_files.read takes.
        output (str): Where to write.
        to (str): "peft", "mindformers", "ckpt", "slora", "mcore", "pynative", "diffusers" or "kohya", as in
            adapter_files.write; "gguf" for llama.cpp (see adapters.llama_cpp.write).
        lora_alpha (float): For a source that does not state it. Default: None.
        heads (Heads): Needed if w_qkv is split (for "peft") or joined, and for a Llama's "gguf", unless
            ``base_config`` has them, or the adapter's base is a local folder. Default: nothing known.
        concatenate (bool): Join the pairs of wq, wk, wv into one of w_qkv, and those of w1, w3 into one of
            w_gate_hidden, for a model that was built with qkv_concat: True. Default: False.
        allow_pickle (bool): Whether a .bin may be read. Default: False.
        overwrite (bool): Whether ``output`` may be replaced. Default: False.
        part (str): The part of Stable Diffusion to convert, "unet", "text_encoder" or "text_encoder_2"; for a source
            whose paths do not name their part, the part itself. Default: None, all parts.
        target_paths (str): Text file with the paths of the network's cells, one per line, for a source in kohya's
            form of a model that mindlora does not know. Default: None.
        architecture (str): The model_type in the base's config.json, such as qwen3. Default: None, which
            takes it from the base's folder, its name or the adapter's cells; a Llama if none of them decides.
        experts (str): "stacked" for one pair per stacked weight of a layer's routed experts,
            "single" for pairs of each expert. Default: None, as in ``source``; stacked for
            "mindformers", "ckpt" and "pynative", which have no others.
        base_config (mapping): The content of the base's config.json, which gives its kind and sizes where
            ``architecture`` and ``heads`` do not. Default: None, that of the adapter's base if it is a local folder.

    Returns:
        ConvertAdapterReport.

    Raises:
        LoraError: ``output`` exists, is ``source``, or does not suit the form ``to``; also what adapter_files.read and
            adapter_files.write raise.
    """
    check_free(source, output, overwrite)
    is_gguf = to == llama_cpp.FORM
    _check_output(output, to)
    parts.check_part(part)
    # A GGUF file has the cells of PEFT's folder.
    form = FORMS[peft.Peft.form if is_gguf else to]
    # Parts that only PEFT's form has a place for.
    extras = Extras(token_rows=to == peft.Peft.form, invocation_tokens=to == peft.Peft.form)
    wanted = parts.Wanted(part, parts.read_paths(target_paths))
    adapter = adapter_files.read(source, allow_pickle, wanted, extras)
    if lora_alpha is not None:
        adapter.set_alpha(lora_alpha)
    base = _named_for(form, adapter, source, architecture, base_config)
    heads = _completed(heads, base.config)
    _arrange_experts(adapter, experts, form)
    if concatenate:
        _concatenate(adapter, heads, form, to)
    else:
        adapter = with_cells_of(adapter, form.form, heads)
    left_out = _leave_base_tables(adapter) if is_gguf or not form.holds_modules else ()
    if is_gguf:
        tied = base.config.get("tie_word_embeddings") is True
        kind = architecture or base.config.get("model_type")
        llama_cpp.write(adapter, output, llama_cpp.Base(kind, heads.heads, heads.kv_heads, tied))
    else:
        adapter_files.write(adapter, output, to)
    counts = len(adapter.paths), len(adapter.saved_modules)
    alphas = tuple(sorted(set(adapter.alphas.values())))
    return ConvertAdapterReport(source, adapter.dialect, output, to, *counts, adapter.ranks, alphas, left_out)


def _check_output(output: str, to: str) -> None:
    if to == llama_cpp.FORM:
        llama_cpp.check_output(output)
    else:
        adapter_files.check_adapter_output(output, to)


def _named_for(
    form: Dialect, adapter: Adapter, source: str, architecture: Optional[str], base_config: Optional[Mapping[str, Any]]
) -> KnownBase:
    """Renames an adapter's cells to the names from which a form is written, and returns what is known of its base."""
    if form.world:
        parts.of_one_model(adapter, source)
    if form.world in (HF, MCORE):
        # A checkpoint of an mcore network keeps its own paths.
        rename(adapter, names.canonical(adapter.paths))
    base = known_base(adapter, architecture, base_config)
    kind = base.architecture
    if kind and not kind.legacy:
        if form.world == LEGACY:
            raise AdapterError(
                f"MindFormers has {kind.title} ({base.reason}) as an mcore model alone, and format {form.form!r} has "
                "the names of its legacy models. Write format 'mcore', which MindFormers' own LoRA reads, or 'peft', "
                "which mindlora loads."
            )
        rename_for(adapter, kind)
    return base


def _concatenate(adapter: Adapter, heads: Heads, form: Dialect, to: str) -> None:
    """Joins all pairs that can be joined, for a model with qkv_concat."""
    if form.world == HF:
        raise AdapterError(f"PEFT has no joined modules: leave concatenate (--concat) out for format {to!r}.")
    _join_all(adapter, heads, adapter.paths)


def _leave_base_tables(adapter: Adapter) -> Tuple[str, ...]:
    """Removes the base's own tables from an adapter, for a form that has no place for them, and returns their names."""
    tables = tuple(adapter.base_tables)
    for name in tables:
        del adapter.saved_modules[name]
    return tables


def _arrange_experts(adapter: Adapter, experts: Optional[str], form: Dialect) -> None:
    if experts not in (None, *EXPERT_FORMS):
        raise LoraError(f"experts is {experts!r}, which is none of {', '.join(EXPERT_FORMS)}.")
    if experts == "stacked" or experts is None and form.stacks_experts:
        expert_pairs.stack_pairs(adapter)
    elif experts == "single":
        expert_pairs.unstack_pairs(adapter)


def check_free(source: str, output: str, overwrite: bool) -> None:
    """Raises LoraError if ``output`` is ``source`` or holds it, or exists and ``overwrite`` is False."""
    if os.path.exists(source) and os.path.exists(output) and os.path.samefile(source, output):
        raise LoraError(f"{output} is both the input and the output. Give another path.")
    if os.path.realpath(source).startswith(os.path.join(os.path.realpath(output), "")):
        raise LoraError(f"{output} holds the input {source}, which would be replaced with it. Give another path.")
    if os.path.lexists(output) and not overwrite:
        raise LoraError(f"{output} exists already. Give another path, or replace it with overwrite (--overwrite).")


def _completed(heads: Heads, config: Dict[str, Any]) -> Heads:
    """Returns ``heads`` with missing sizes taken from Hugging Face's config.json."""
    # Without head_dim, the rows of the weights give the size of a head, which need not be hidden_size / heads.
    return dataclasses.replace(
        heads,
        heads=heads.heads or config.get("num_attention_heads"),
        kv_heads=heads.kv_heads or config.get("num_key_value_heads"),
        head_dim=heads.head_dim or config.get("head_dim"),
        q_rank=heads.q_rank or config.get("q_lora_rank"),
    )


def with_cells_of(adapter: Adapter, to: str, heads: Heads) -> Adapter:
    """Returns ``adapter``, which may be changed, with cells split or joined as in the form ``to``."""
    world = FORMS[to].world
    if world == HF:
        split_all(adapter, heads)
    elif world == MCORE:
        _join_all(adapter, heads, adapter.paths)
    return FORMS[to].prepared(adapter)


def split_all(adapter: Adapter, heads: Heads) -> None:
    """Gives ``adapter`` the cells of Hugging Face's model: splits joined cells that it lacks, and joins parts."""
    for path in adapter.paths:
        if names.joined_parts(path) and not names.in_hugging_face(path):
            layout = heads.layouts.get(names.joined_cell(path).name)
            joined_pairs.split_pairs(
                adapter, path, heads.kv_heads, heads.head_dim, heads.q_rank, layout, heads=heads.heads
            )
    parts_alone = [path for path in adapter.paths if names.joined_path(path) and not names.in_hugging_face(path)]
    _join_all(adapter, heads, parts_alone)


def _join_all(adapter: Adapter, heads: Heads, paths: Iterable[str]) -> None:
    """Replaces those pairs at ``paths`` that are members of joined cells by one pair for each joined cell."""
    for path in dict.fromkeys(filter(None, map(names.joined_path, paths))):
        _join_into(adapter, path, names.joined_cell(path), heads)


def _join_into(adapter: Adapter, path: str, cell: JoinedCell, heads: Heads) -> None:
    """Replaces the pairs of the members of the joined ``cell`` at ``path`` by one pair."""
    members = names.joined_parts(path)
    rows = {member: len(adapter.tensors[member, "B"]) for member in members if (member, "B") in adapter.tensors}
    counts = [rows.get(member) for member in members]
    layout = heads.layouts.get(cell.name)
    total = (layout or cell.layout).total(counts, heads.heads, heads.kv_heads, heads.head_dim)
    if total is None:
        raise AdapterError(
            f"{path} joins {', '.join(members)}, but the adapter has only "
            f"{', '.join(rows)}, so the rows of the others are not known. Name the model's folder or YAML (--base)."
        )
    joined_pairs.join_pairs(adapter, path, total, heads.kv_heads, layout)
