"""The tensors that a training step keeps for its backward, layer by layer, and those that it recomputes instead.

The kept tensors were read from MindSpore's optimized graphs of MindFormers' legacy Llama (2.9.0 and 1.9.0): the
outputs of forward operators that an operator of the backward takes. tests/run/plan counts them again and compares. For
other models the same rules are mere arithmetic.
"""

import dataclasses
import re
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from mindlora.core.errors import ConfigError
from mindlora.models.names import role_of
from mindlora.models.weights import Weight
from mindlora.run.checks.cpu import held_dtype
from mindlora.run.plan.division import Division
from mindlora.run.plan.fragments import LayerTensors, LossTensors, loss_tensors
from mindlora.run.plan.run import Run, layer_of
from mindlora.run.plan.units import bytes_of
from mindlora.run.yaml_run import YamlRun

_QUERIES = ("wq", "wk", "wv", "w_qkv", "wq_down", "wkv_down")
_LATENTS = ("wq_up", "wkv_up")
_GATES = ("w1", "w3", "w_gate_hidden")
_EXPERTS = ("weight1", "weight2")
# The meaning of select_recompute: True in MindFormers' legacy models.
_SELECTED = (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")


class Recomputation(NamedTuple):
    """The operators that the backward recomputes.

    Attributes:
        layers (frozenset of int): Layers that keep only their input.
        operators (dict): Pattern of a path below a layer -> the other layers in which it is recomputed.
    """

    layers: "frozenset[int]"
    operators: Dict[str, "frozenset[int]"]

    def skips(self, layer: int, path: str) -> bool:
        """Returns whether the output of the operator at ``path`` below a layer is recomputed instead of kept."""
        return any(layer in layers and _matches(pattern, path) for pattern, layers in self.operators.items())


NOTHING_RECOMPUTED = Recomputation(frozenset(), {})


def read_recomputation(yaml: YamlRun, division: Division, count: int) -> Recomputation:
    """Returns the recomputation of a YAML's recompute_config for a model of ``count`` layers.

    Raises ConfigError if a value is neither True, False nor a list that suits the stages of the pipeline.
    """
    by_index = bool(yaml.at("swap_config.swap"))
    layers = _layers(yaml.at("recompute_config.recompute"), "recompute", division, count, by_index)
    key = "select_recompute"
    value = yaml.at(f"recompute_config.{key}")
    chosen: Dict[str, Set[int]] = {}
    if isinstance(value, dict):
        for pattern, asked in value.items():
            chosen[pattern] = _layers(asked, f"{key}.{pattern}", division, count, by_index)
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        chosen = {pattern: set(range(count)) for pattern in value}
    else:
        chosen = dict.fromkeys(_SELECTED, _layers(value, key, division, count, by_index))
    operators = {pattern: frozenset(of - layers) for pattern, of in chosen.items() if of - layers}
    return Recomputation(frozenset(layers), operators)


def _layers(value: Any, key: str, division: Division, count: int, by_index: bool) -> Set[int]:
    if value is None or isinstance(value, bool):
        return set(range(count)) if value else set()
    if by_index and _are_numbers(value):
        return {layer for layer in value if 0 <= layer < count}
    rows = _by_stage(value)
    if rows is None or len(rows) != division.pipeline:
        raise ConfigError(
            f"recompute_config: {key} is {value!r}: it must be True, False, or a list with the number of layers to "
            f"recompute in each of the {division.pipeline} stages of the pipeline."
        )
    recomputed: Set[int] = set()
    for stage, number in enumerate(rows):
        of_stage = division.layers(count, stage)
        recomputed |= set(of_stage if number is True else of_stage[: int(number)])
    return recomputed


def _by_stage(value: Any) -> Optional[List[Any]]:
    """Returns the number of layers that each stage recomputes; with interleaving, summed over its chunks."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if _are_numbers(value):
        return list(value)
    if all(isinstance(row, (list, tuple)) and _are_numbers(row) and len(row) == len(value[0]) for row in value):
        return [sum(map(int, column)) for column in zip(*value)]
    return None


def _are_numbers(values: Sequence[Any]) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, int) and value >= 0 for value in values)


def _matches(pattern: str, path: str) -> bool:
    """Returns whether each part of a pattern matches a part of ``path`` from its beginning, as in MindFormers."""
    parts: Tuple[str, ...] = tuple(re.split(r"\\?\.(?![*+?])", pattern))
    names = path.split(".")
    return len(parts) <= len(names) and all(re.fullmatch(part, name) for part, name in zip(parts, names))


class Kept(NamedTuple):
    """A tensor of ``size`` bytes on one device that is kept for the backward.

    Attributes:
        path (str): The operator that computes it, below its layer.
        size (int): Its bytes on one device.
        instead (int): Bytes kept in its place if that operator is recomputed.
    """

    path: str
    size: int
    instead: int = 0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a layer's tensors on one device.

    Attributes:
        tokens (int): Tokens of a micro-batch.
        outside (int): Tokens outside the products, where sequence parallelism divides them.
        hidden (int): Width of the residual stream.
        queries, keys (int): Width of q and of k, v.
        attended (int): Width of the input of attention's output projection.
        heads (int): Query heads.
        inner (int): Width of the feed-forward network.
        repeats (bool): Whether k and v are repeated for the heads that share them, without fused attention.
    """

    tokens: int
    outside: int
    hidden: int
    queries: int
    keys: int
    attended: int
    heads: int
    inner: int
    repeats: bool

    @classmethod
    def of(cls, run: Run) -> "Sizes":
        """Returns the sizes of a run's layers."""
        parts = run.division.model
        attention = run.attention
        return cls(
            run.tokens,
            run.tokens // (parts if run.division.sequence else 1),
            run.hidden,
            attention.queries // parts,
            attention.keys // parts,
            attention.output // parts,
            attention.heads // parts,
            _inner(run) // parts,
            attention.queries != attention.keys,
        )


def _any_trained(weights: Iterable[Weight]) -> bool:
    return any(weight.trained for weight in weights)


def _inner(run: Run) -> int:
    """Returns the width of the widest feed-forward network; for experts, the sum over a token's experts."""
    expert = next((size[2] for path, size in run.experts.items() if role_of(path) == "weight2"), 0)
    widths = {"shared_experts" in path: size[1] for path, size in run.linear.items() if role_of(path) == "w2"}
    return max(widths.get(False, 0), widths.get(True, 0) + run.chosen_experts * expert)


class Activations:
    """The tensors that each layer of a run keeps."""

    def __init__(self, run: Run, weights: List[Weight]):
        self.run = run
        self.sizes = Sizes.of(run)
        self.compute = bytes_of(run.compute_dtype)
        self.held = held_dtype(run.yaml)
        self.is_legacy = run.architecture.legacy
        self.norm = bytes_of(run.dtype(f"layernorm_compute_{'type' if self.is_legacy else 'dtype'}", "float32"))
        self.softmax = bytes_of(run.dtype("softmax_compute_type", "float32"))
        # mindlora's operators for training on a CPU: mindlora/training/model/cpu_cells.py.
        self.has_cpu_operators = run.yaml.on_cpu and run.model.get("type") == "LlamaConfig"
        self.fuses_norms = not self.is_legacy or run.model.get("fused_rms_norm") is not False and not run.yaml.on_cpu
        self.fuses_attention = not self.is_legacy or bool(run.model.get("use_flash_attention"))
        self.recomputes_scores = self.has_cpu_operators and not self.fuses_attention and self.computes_in_float32()
        chosen = run.chosen_experts
        self.widths = {role_of(path): size[1] for path, size in run.linear.items() if role_of(path) in _LATENTS}
        self.widths |= {role_of(path): chosen * size[2] for path, size in run.experts.items()}
        self.weights: Dict[int, List[Weight]] = {}
        for weight in weights:
            layer = layer_of(weight.path)
            self.weights.setdefault(-1 if layer is None else layer, []).append(weight)

    def computes_in_float32(self) -> bool:
        """Returns whether attention computes products and softmax in float32."""
        return self.run.compute_dtype == self.run.dtype("softmax_compute_type", "float32") == "float32"

    @property
    def layer_input(self) -> int:
        """Bytes of a layer's input."""
        return self.compute * self.sizes.outside * self.sizes.hidden

    def first_trained(self) -> int:
        """Returns the first layer with a trained parameter; the number of layers if there is none."""
        if _any_trained(weight for weight in self.weights.get(-1, []) if weight.role == "tok_embeddings"):
            return -1
        for layer in sorted(self.weights):
            if layer >= 0 and _any_trained(self.weights[layer]):
                return layer
        return len(self.weights)

    def kept_by(self, layer: int, recomputation: Recomputation) -> int:
        """Returns the bytes that a layer keeps from its forward to its backward."""
        return sum(self.layer_tensors(layer, recomputation).kept)

    def whole_layer(self, layer: int) -> int:
        """Returns the bytes that a layer keeps without recomputation."""
        return sum(self.layer_tensors(layer, NOTHING_RECOMPUTED).made)

    def head(self) -> int:
        """Returns the bytes that are kept after the last layer, without the loss."""
        sizes = self.sizes
        total = (self.compute if self.is_legacy else self.norm) * sizes.outside * sizes.hidden
        if not self.has_cpu_operators:
            total += 4 * sizes.outside
        if _any_trained(weight for weight in self.weights.get(-1, []) if weight.role == "lm_head"):
            total += self.compute * sizes.tokens * sizes.hidden
        return total

    def masks(self) -> int:
        """Returns the bytes of shared tensors: the mask and the angles of the rotary embedding."""
        length = self.run.seq_length
        mask = 0
        if self.fuses_attention or self.recomputes_scores:
            element = 4 if self.recomputes_scores else 1
            mask = self.run.yaml.rows * self.run.rows_of_model * length * length * element
        if self.run.model.get("use_attn_mask_compression") or self.run.model.get("use_eod_attn_mask_compression"):
            mask = 2048 * 2048
        head_size = self.run.attention.queries // self.run.attention.heads
        return mask + 2 * length * head_size * bytes_of(self.run.dtype("rotary_dtype", "float32"))

    @property
    def logits(self) -> Tuple[int, int]:
        """Bytes of the logits computed at a time, in float32 and in the compute dtype."""
        vocabulary = self.run.outputs
        division = self.run.division
        parts = 1 if division.whole_vocabulary or vocabulary % division.model else division.model
        elements = self.sizes.tokens * vocabulary // parts
        if self.run.piece:
            elements = self.run.piece * self.run.rows_of_head
        return 4 * elements, self.compute * elements

    @property
    def loss(self) -> LossTensors:
        """The tensors of the logits' shape in the loss."""
        fuses = not self.run.yaml.on_cpu and self.run.yaml.at("context.jit_config.jit_level") == "O1"
        return loss_tensors(self.is_legacy, fuses, self.run.piece is not None)

    @property
    def beside_logits(self) -> int:
        """Bytes that the loss keeps beside logits: the gradient of the head's input, if the loss is in pieces."""
        if self.run.piece is None:
            return 0
        # The gradients of the pieces, and all of them joined.
        total = 2 * self.of_hidden
        # The sum over the pieces, and the product of one piece, in float32.
        return total + (2 * 4 * self.run.rows_of_head * self.sizes.hidden if self.run.trains_head else 0)

    @property
    def of_hidden(self) -> int:
        """Bytes of the gradient of the head's input, if the loss is in pieces; otherwise 0."""
        return self.compute * self.run.tokens_of_head * self.sizes.hidden if self.run.piece else 0

    @property
    def inside_of_layer(self) -> Tuple[int, int]:
        """Bytes of the gradients at a layer's peak: of its output, and of the input of its w2."""
        return self.layer_input, self.compute * self.sizes.tokens * self.sizes.inner

    @property
    def decoded(self) -> int:
        """Bytes for decoding a 4-bit weight: two copies in float32, which the CPU's operator does not need."""
        if self.run.yaml.on_cpu:
            return 0
        return max((2 * 4 * weight.count for weight in self.run.weights if weight.dtype == "uint8"), default=0)

    def layer_tensors(self, layer: int, recomputation: Recomputation) -> LayerTensors:
        """Returns the tensors that a layer computes for its backward, and those that it keeps until then."""
        if layer < self.first_trained():
            return LayerTensors((), ())
        made = tuple(self.tensors(layer))
        sizes = tuple(tensor.size for tensor in made)
        if layer in recomputation.layers:
            return LayerTensors(sizes, (self.layer_input,))
        skipped = (tensor.instead if recomputation.skips(layer, tensor.path) else tensor.size for tensor in made)
        return LayerTensors(sizes, tuple(skipped))

    def tensors(self, layer: int) -> Iterator[Kept]:
        """Yields the tensors that a layer keeps without recomputation."""
        by_leaf: Dict[str, List[Weight]] = {}
        for weight in self.weights.get(layer, []):
            by_leaf.setdefault(weight.role, []).append(weight)
        trained = {leaf for leaf, weights in by_leaf.items() if _any_trained(weights)}
        # Gradients flow only to layers behind the first trained parameter.
        before = layer > self.first_trained()
        queries = before or bool(trained.intersection(("attention_norm", *_QUERIES, *_LATENTS)))
        attended = queries or "wo" in trained
        gates = attended or bool(trained.intersection(("ffn_norm", *_GATES, "weight1")))
        yield from self._norm("attention_norm", before, trained)
        yield from self._inputs("attention_norm.rcast", "attention", _QUERIES, by_leaf)
        for leaf in _LATENTS:
            yield from self._inputs(f"attention.{leaf}.reshape", "attention", (leaf,), by_leaf)
        if queries:
            yield from self._head_norms(by_leaf)
            yield from self._attention()
        yield from self._inputs("attention.merger_head_transpose", "attention", ("wo",), by_leaf)
        yield from self._norm("ffn_norm", attended, trained)
        yield from self._inputs("ffn_norm.rcast", "feed_forward", _GATES, by_leaf)
        if gates:
            yield from self._feed_forward()
        # The input of w2 is reshaped after feed_forward.mul: it stays, even if mul is recomputed.
        yield from self._inputs("feed_forward.w2.reshape", "feed_forward", ("w2",), by_leaf)
        for leaf in _EXPERTS:
            yield from self._inputs(f"mlp.experts.{leaf}", "mlp.experts", (leaf,), by_leaf)
        yield from self._casts(by_leaf, {"wo": queries, "w2": gates, **dict.fromkeys(_QUERIES, before)}, attended)

    def _norm(self, path: str, needed: bool, trained: Set[str]) -> Iterator[Kept]:
        if needed or path in trained:
            tokens = self.sizes.outside
            hidden = self.sizes.hidden
            kept = tokens * hidden * self.compute
            if self.has_cpu_operators:
                yield Kept(path, kept)
                return
            # The legacy models' fused one casts again in the backward; the others keep the cast copy.
            casts_again = self.fuses_norms and self.is_legacy
            yield Kept(f"{path}.cast", kept if casts_again else tokens * hidden * self.norm, kept)
            yield Kept(f"{path}.rsqrt", tokens * (4 if self.fuses_norms else self.norm))

    def _head_norms(self, by_leaf: Dict[str, List[Weight]]) -> Iterator[Kept]:
        """Yields the tensors that Qwen3's norms of each head's q and k keep: their inputs, cast to their dtype."""
        head_size = self.run.attention.queries // self.run.attention.heads
        for leaf, width in (("q_layernorm", self.sizes.queries), ("k_layernorm", self.sizes.keys)):
            if any(weight.shape == (head_size,) for weight in by_leaf.get(leaf, [])):
                tokens = self.sizes.tokens
                yield Kept(f"attention.{leaf}.cast", tokens * width * self.norm, tokens * width * self.compute)
                yield Kept(f"attention.{leaf}.rsqrt", tokens * width // head_size * 4)

    def _attention(self) -> Iterator[Kept]:
        sizes = self.sizes
        element = self.compute
        tokens = sizes.tokens
        is_fused = self.fuses_attention or self.recomputes_scores
        repeated = sizes.queries if sizes.repeats and not is_fused else sizes.keys
        yield Kept("attention.apply_rotary_emb.add", element * tokens * sizes.queries)
        yield Kept("attention.keys", element * tokens * repeated)
        yield Kept("attention.values", element * tokens * repeated)
        if self.fuses_attention:
            yield Kept("attention.flash_attention", element * tokens * sizes.queries)
            # The maximum and the sum of each row of scores, eight times each.
            yield Kept("attention.flash_attention", 2 * 8 * 4 * tokens * sizes.heads)
        elif not self.recomputes_scores:
            scores = tokens * self.run.seq_length * sizes.heads
            yield Kept("attention.softmax", scores * self.softmax)
            if self.softmax != element:
                yield Kept("attention.softmax_cast", scores * element)

    def _feed_forward(self) -> Iterator[Kept]:
        size = self.compute * self.sizes.tokens * self.sizes.inner
        yield Kept("feed_forward.w1.matmul", size)
        # The output of silu is reshaped too.
        yield Kept("feed_forward.w1.reshape", size)
        yield Kept("feed_forward.w3.matmul", size)

    def _inputs(
        self, path: str, parent: str, leaves: Tuple[str, ...], by_leaf: Dict[str, List[Weight]]
    ) -> Iterator[Kept]:
        """Yields the tensors that cells with the same input keep: the input once, and those of each cell's adapter."""
        drops = bool(self.run.lora and self.run.lora.lora_dropout)
        shared = False
        for leaf in leaves:
            weights = [weight for weight in by_leaf.get(leaf, []) if weight.trained]
            adapter = [weight for weight in weights if weight.adapter]
            width = self._input_width(leaf)
            needs_input = any(self._reads_input(weight) for weight in weights)
            if adapter and drops and not self.run.yaml.on_cpu:
                # MindSpore's Dropout keeps its mask, one bit per element, and its output.
                yield Kept(f"{parent}.{leaf}.dropout", self.sizes.tokens * width * self.compute)
                yield Kept(f"{parent}.{leaf}.dropout", self.sizes.tokens * width // 8)
                needs_input = any(not weight.adapter and weight.part == "weight" for weight in weights)
            shared = shared or needs_input
            if adapter and not (drops and self.run.yaml.on_cpu):
                rank = max(self.run.ranks(adapter[0].path), default=0)
                # A token is among the inputs of each of its experts, which multiply it by A of every adapter.
                copies = self.run.chosen_experts * max(1, len(self.run.adapters)) if leaf in _EXPERTS else 1
                yield Kept(f"{parent}.{leaf}.low_rank", self.compute * self.sizes.tokens * rank * copies)
            norms = [weight for weight in adapter if self.run.lora and weight.part == self.run.lora.variant.row_norms]
            if norms:
                # The gradient of a row's norm needs the cell's output, of which it is a factor.
                rows = max(weight.shape[0] for weight in norms)
                yield Kept(f"{parent}.{leaf}.mul", self.compute * self.sizes.tokens * rows)
        if shared:
            tokens = self.sizes.outside if path.endswith("norm.rcast") else self.sizes.tokens
            yield Kept(path, self.compute * tokens * self._input_width(leaves[0]))

    def _reads_input(self, weight: Weight) -> bool:
        if weight.adapter and self.run.lora:
            return self.run.lora.variant.reads_input(weight.part)
        return weight.part == "weight"

    def _input_width(self, leaf: str) -> int:
        return {"wo": self.sizes.attended, "w2": self.sizes.inner, **self.widths}.get(leaf, self.sizes.hidden)

    def _casts(self, by_leaf: Dict[str, List[Weight]], needed: Dict[str, bool], gates_need: bool) -> Iterator[Kept]:
        """Yields compute-dtype copies of parameters that are stored in another dtype, and TrainedRead's copies."""
        for leaf, weights in by_leaf.items():
            for weight in weights:
                factor = weight.adapter and self.run.lora is not None and weight.part in self.run.lora.variant.factors
                reads_a_copy = self.run.yaml.on_cpu and factor
                is_computed_in = weight.dtype == self.run.compute_dtype and not reads_a_copy
                is_read_as_held = weight.dtype == "uint8" or weight.dtype == self.held and not weight.adapter
                if len(weight.shape) < 2 or is_read_as_held or is_computed_in:
                    continue
                parts = self.run.division.part_of(leaf, weight.part, weight.shape)
                if weight.adapter or needed.get(leaf, gates_need):
                    parent = "feed_forward" if leaf in ("w2", *_GATES) else "attention"
                    yield Kept(f"{parent}.{leaf}.cast", self.compute * weight.elements // parts)
