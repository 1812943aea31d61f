"""Division: how parameters, layers and rows are divided among devices."""

import dataclasses
from typing import Any, Mapping, Optional, Tuple

from mindlora.run.checks.parallel import PARALLEL, undivided_by_devices
from mindlora.run.yaml_run import YamlRun

# MindSpore's optimizer parallelism leaves smaller parameters as they are (parallel_optimizer_threshold).
_SMALLEST_SHARD = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Division:
    """The number of devices, and the share of each.

    Attributes:
        data (int): Devices, or groups of them, with their own rows.
        model (int): Devices that share each layer (model_parallel).
        pipeline (int): Devices with their own layers (pipeline_stage).
        context (int): Devices that share the tokens of a row (context_parallel).
        micro_batches (int): Micro-batches in the pipeline (micro_batch_num).
        sharded (bool): Whether MindSpore divides cells in this parallel_mode.
        optimizer (bool): Whether parameters are divided among the data-parallel devices, and gathered where they are
            used (enable_parallel_optimizer).
        gathers_again (bool): Whether they are gathered again in the backward instead of kept
            (parallel_optimizer_comm_recompute).
        sequence (bool): Whether model-parallel devices share the tokens outside the products (use_seq_parallel).
        whole_vocabulary (bool): Whether each has the whole embedding and output head (vocab_emb_dp).
        experts (int): Devices that share a layer's routed experts, each with some of them (expert_parallel).
        offset (tuple of int): Additional layers of each stage; empty for none.
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
    def of_yaml(cls, yaml: YamlRun) -> "Division":
        """Returns the division of a YAML whose keys mindlora.run.checks has accepted."""
        if not yaml.in_parallel:
            return cls()
        data = yaml.setting("parallel_config.data_parallel")
        if not yaml.is_sharded:
            return cls(data)
        whole = yaml.at("parallel_config.vocab_emb_dp")
        recompute = yaml.at("recompute_config") or {}
        return cls(
            data,
            model=yaml.setting("parallel_config.model_parallel"),
            pipeline=yaml.setting("parallel_config.pipeline_stage"),
            context=yaml.setting("parallel_config.context_parallel"),
            micro_batches=yaml.setting("parallel_config.micro_batch_num"),
            sharded=True,
            optimizer=bool(yaml.at("parallel.enable_parallel_optimizer")),
            gathers_again=bool(recompute.get("recompute") and recompute.get("parallel_optimizer_comm_recompute")),
            sequence=bool(yaml.at("parallel_config.use_seq_parallel")),
            # MindFormers' mcore models do not know it.
            whole_vocabulary=not yaml.is_mcore and (whole is None or bool(whole)),
            experts=yaml.setting("parallel_config.expert_parallel"),
            offset=yaml.stage_offset,
        )

    @property
    def divides_parameters(self) -> bool:
        """Whether a device has only a part of the parameters."""
        return self.optimizer or max(self.model, self.pipeline, self.experts) > 1

    @property
    def devices(self) -> int:
        """The total number of devices."""
        return self.data * self.model * self.pipeline * self.context

    def problem(self, model: Mapping[str, Any]) -> Optional[str]:
        """Returns a sentence on why the model of a model_config cannot be divided in this way, or None."""
        numbers = (self.data, self.model, self.context, self.experts, self.pipeline)
        problems = undivided_by_devices(model, dict(zip(PARALLEL, numbers)), self.offset)
        return problems[0] if problems else None

    def layers(self, count: int, stage: int) -> range:
        """Returns the numbers of the layers in a stage of the pipeline, of ``count`` layers in total."""
        sizes = [count // self.pipeline + extra for extra in self.offset or (0,) * self.pipeline]
        begin = sum(sizes[:stage])
        return range(begin, begin + sizes[stage])

    def in_flight(self, stage: int) -> int:
        """Returns the number of micro-batches whose activations a stage holds at a time, in a 1F1B schedule."""
        return min(self.micro_batches, self.pipeline - stage)

    def part_of(self, leaf: str, part: str, shape: Tuple[int, ...]) -> int:
        """Returns the number of parts into which model or expert parallelism divides a parameter.

        ``leaf`` ends the path of its cell, under the legacy model's names; ``part`` is "weight", "bias", "A" or
        "B", or for routed experts "weight1" or "weight2".
        """
        if leaf == "tok_embeddings" and part == "A":
            # Only mcore models take an adapter on an embedding that is divided; it is divided as its table is.
            return 1 if self.whole_vocabulary or shape[1] % self.model else self.model
        if leaf in ("lm_head", "tok_embeddings"):
            return 1 if self.whole_vocabulary or shape[0] % self.model or part in "AB" else self.model
        if leaf in _EXPERTS:
            return self.experts
        if leaf in _BY_COLUMNS:
            return self.model if part in ("weight", "A") else 1
        return self.model if leaf in _BY_ROWS and part in ("weight", "bias", "B") else 1

    def shards_of(self, leaf: str, size: int, rows: int) -> int:
        """Returns the number of parts into which optimizer parallelism divides a parameter.

        Bytes and rows are per device; ``leaf`` is as in part_of.
        """
        # MindFormers excludes the embedding, and experts that are already divided have no replica left.
        if leaf in _EXPERTS and self.experts > 1:
            return 1
        if not self.optimizer or size < _SMALLEST_SHARD or rows % self.data or leaf == "tok_embeddings":
            return 1
        return self.data


_BY_ROWS = ("wq", "wk", "wv", "w_qkv", "wq_up", "wkv_up", "w1", "w3", "w_gate_hidden")
_BY_COLUMNS = ("wo", "w2")
# The cell of the base's stacked weights, and those of their adapters.
_EXPERTS = ("experts", "weight1", "weight2")
