"""Division: how parameters, layers and rows are divided among devices."""

import dataclasses
from typing import Any, Dict, List, Optional, Tuple

from mindlora.common.fields import COUNT, check_number
from mindlora.common.run_modes import SHARDING_MODES
from mindlora.common.yaml_file import value_at
from mindlora.errors import ConfigError

# MindSpore's optimizer parallelism leaves smaller parameters as they are (parallel_optimizer_threshold).
_SMALLEST_SHARD = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Division:
    """How many devices there are, and what each has.

    Attributes:
        data (int): Devices, or groups of them, with rows of their own.
        model (int): Devices that share each layer (model_parallel).
        pipeline (int): Devices that have layers of their own (pipeline_stage).
        context (int): Devices that share the tokens of a row (context_parallel).
        micro_batches (int): Micro-batches in the pipeline (micro_batch_num).
        sharded (bool): Whether parallel_mode is one in which MindSpore divides cells.
        optimizer (bool): Whether parameters are divided among the data-parallel devices, and gathered where they are
            used (enable_parallel_optimizer).
        gathers_again (bool): Whether they are gathered again in the backward, and not kept
            (parallel_optimizer_comm_recompute).
        sequence (bool): Whether model-parallel devices share the tokens outside of the products (use_seq_parallel).
        whole_vocabulary (bool): Whether each has the whole embedding and output head (vocab_emb_dp).
        experts (int): Devices that share a layer's routed experts, each with some of them (expert_parallel).
        offset (tuple of int): How many layers more than the others each stage has; empty for none.
    """

    data: int = 1
    model: int = 1
    pipeline: int = 1
    context: int = 1
    micro_batches: int = 1
    sharded: bool = False
    optimizer: bool = False
    gathers_again: bool = False
    sequence: bool = False
    whole_vocabulary: bool = True
    experts: int = 1
    offset: Tuple[int, ...] = ()

    @classmethod
    def of_yaml(cls, config: Dict[str, Any]) -> "Division":
        """Returns the division that a YAML describes.

        Raises:
            ConfigError: A number in parallel_config is not one of at least 1.
        """
        if not config.get("use_parallel"):
            return cls()
        sharded = value_at(config, "parallel.parallel_mode") in SHARDING_MODES
        if not sharded:
            return cls(data=_number(config, "data_parallel"))
        recompute = bool(value_at(config, "recompute_config.recompute"))
        offset = value_at(config, "model.model_config.offset")
        whole = value_at(config, "parallel_config.vocab_emb_dp")
        return cls(
            _number(config, "data_parallel"),
            _number(config, "model_parallel"),
            _number(config, "pipeline_stage"),
            _number(config, "context_parallel"),
            _number(config, "micro_batch_num"),
            True,
            bool(value_at(config, "parallel.enable_parallel_optimizer")),
            recompute and bool(value_at(config, "recompute_config.parallel_optimizer_comm_recompute")),
            bool(value_at(config, "parallel_config.use_seq_parallel")),
            # MindFormers' mcore models do not know it.
            config.get("use_legacy") is not False and (whole is None or bool(whole)),
            _number(config, "expert_parallel"),
            tuple(offset) if isinstance(offset, list) and all(isinstance(part, int) for part in offset) else (),
        )

    @property
    def divides_parameters(self) -> bool:
        """Whether a device has only a part of the parameters."""
        return self.optimizer or max(self.model, self.pipeline, self.experts) > 1

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return self.data * self.model * self.pipeline * self.context

    def check(self, model: Dict[str, Any]) -> None:
        """Raises ConfigError, as MindFormers would, if the sizes of a model cannot be divided in this way."""
        problem = self.problem(model)
        if problem:
            raise ConfigError(f"The sizes of the model cannot be divided: {problem}.")

    def problem(self, model: Dict[str, Any]) -> Optional[str]:
        """Returns in words which size of a model cannot be divided in this way, or None.

        Args:
            model (dict): The node model_config.
        """
        hidden, heads = (_first(model, keys) for keys in (("hidden_size",), ("num_heads", "num_attention_heads")))
        key_values = _first(model, ("n_kv_heads", "num_key_value_heads")) or heads
        head_size = model.get("head_dim")
        divided: List[Tuple[str, Any, str, int]] = [
            ("num_heads", heads, "n_kv_heads", key_values),
            ("hidden_size", None if head_size else hidden, "num_heads", heads or 1),
            ("num_heads", heads, "model_parallel", self.model),
            ("n_kv_heads", key_values, "model_parallel", self.model),
            ("hidden_size", hidden, "model_parallel", self.model),
            ("intermediate_size", model.get("intermediate_size"), "model_parallel", self.model),
            ("seq_length", model.get("seq_length"), "context_parallel", self.context),
            ("data_parallel x model_parallel", self.data * self.model, "expert_parallel", self.experts),
            ("num_experts", model.get("num_experts"), "expert_parallel", self.experts),
        ]
        for name, size, by, parts in divided:
            if isinstance(size, int) and isinstance(parts, int) and parts and size % parts:
                return f"{name} {size} by {by} {parts}"
        layers = _first(model, ("num_layers", "num_hidden_layers"))
        if layers and sum(self.offset) != layers % self.pipeline:
            return f"num_layers {layers} by pipeline_stage {self.pipeline}, without an offset that takes the rest"
        return None

    def layers(self, count: int, stage: int) -> range:
        """Returns the numbers of the layers that a stage of the pipeline has, of ``count`` layers in all."""
        sizes = [count // self.pipeline + extra for extra in self.offset or (0,) * self.pipeline]
        begin = sum(sizes[:stage])
        return range(begin, begin + sizes[stage])

    def in_flight(self, stage: int) -> int:
        """Returns how many micro-batches' activations a stage holds at a time, with a 1F1B schedule."""
        return min(self.micro_batches, self.pipeline - stage)

    def part_of(self, leaf: str, part: str, shape: Tuple[int, ...]) -> int:
        """Returns into how many parts model parallelism or expert parallelism divides a parameter.

        Args:
            leaf (str): The last part of the path of its cell, under the legacy model's names.
            part (str): "weight", "bias", "A" or "B"; of routed experts, "weight1" or "weight2".
            shape (tuple of int): Its shape.
        """
        if leaf in ("lm_head", "tok_embeddings"):
            return 1 if self.whole_vocabulary or shape[0] % self.model or part in "AB" else self.model
        if leaf in _EXPERTS:
            return self.experts
        if leaf in _BY_COLUMNS:
            return self.model if part in ("weight", "A") else 1
        return self.model if leaf in _BY_ROWS and part in ("weight", "bias", "B") else 1

    def shards_of(self, leaf: str, size: int, rows: int) -> int:
        """Returns into how many parts optimizer parallelism divides a parameter.

        Args:
            leaf (str): As in part_of.
            size (int): Its bytes on a device.
            rows (int): Its rows on a device.
        """
        # MindFormers takes the embedding out of it, and experts that are divided already have no replica left.
        if leaf in _EXPERTS and self.experts > 1:
            return 1
        if not self.optimizer or size < _SMALLEST_SHARD or rows % self.data or leaf == "tok_embeddings":
            return 1
        return self.data


_BY_ROWS = ("wq", "wk", "wv", "w_qkv", "wq_up", "wkv_up", "w1", "w3", "w_gate_hidden")
_BY_COLUMNS = ("wo", "w2")
# The cell of the base's stacked weights, and those of their adapters.
_EXPERTS = ("experts", "weight1", "weight2")


def _number(config: Dict[str, Any], key: str) -> int:
    value = value_at(config, f"parallel_config.{key}")
    value = 1 if value is None else value
    check_number(value, f"parallel_config.{key}", COUNT)
    return int(value)


def _first(model: Dict[str, Any], keys: Tuple[str, ...]) -> Any:
    return next((model[key] for key in keys if model.get(key) is not None), None)
