"""Settings of an adapter from the YAML of its run, which the checkpoints of MindFormers lack."""

import dataclasses
from typing import Any, Dict, Mapping, Optional

from mindlora.core.errors import AdapterError, ConfigError, RankMismatchError, ScaleMismatchError
from mindlora.core.numerics import initializers
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads
from mindlora.models import names
from mindlora.models.architectures.joined_rows import PartAfterPart, QueryKeyValueInTurn, RowLayout
from mindlora.models.architectures.mcore_sizes import ModelConfig
from mindlora.models.lora_config import LoraConfig


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Facts about a run besides its files; without pet_config, lora_alpha applies to all cells."""

    config: Optional[LoraConfig] = None
    lora_alpha: Optional[float] = None
    heads: Heads = Heads()
    source: str = ""

    def __post_init__(self) -> None:
        if self.config and self.lora_alpha is not None:
            raise ScaleMismatchError(
                f"lora_alpha is given twice: as {self.lora_alpha:g} and by the pet_config of {self.source}. "
                "Leave one out."
            )
        if self.config and initializers.changes_base(self.config.lora_init):
            raise AdapterError(
                f"{self.source} has lora_init {self.config.lora_init}, which changed the base of the run: its "
                "checkpoint holds A and B for the changed base, and not the initial pair that makes a plain LoRA of "
                "them. Train with LoraCheckpoint in a run that is not sharded: it alone saves both."
            )

    def is_saved_module(self, name: str) -> bool:
        """Returns whether a parameter belongs to modules_to_save."""
        modules = (self.config and self.config.modules_to_save) or ()
        return any(names.belongs_to(name, module) for module in modules)

    def complete(self, adapter: Adapter, source: str) -> None:
        """Sets lora_alpha and the other settings of an adapter, unless its metadata states them.

        Raises ScaleMismatchError if nothing states lora_alpha or two things do, and RankMismatchError if the pet_config
        has another lora_rank than the adapter.
        """
        if self.lora_alpha is not None:
            adapter.set_alpha(self.lora_alpha)
        if adapter.alphas:
            return
        if self.config is None:
            raise ScaleMismatchError(
                f"{source} does not state lora_alpha: give the YAML of the run (--config run.yaml), or the number "
                "itself (--alpha)."
            )
        for path in adapter.paths:
            cell = self.config.for_cell(path)
            if cell.lora_rank != adapter.rank(path):
                raise RankMismatchError(
                    f"{source} has rank {adapter.rank(path)} at {path}, but {self.source} says {cell.lora_rank}. Give "
                    "the YAML of the adapter's run."
                )
            adapter.alphas[path] = float(cell.lora_alpha)
        adapter.use_rslora = self.config.use_rslora
        adapter.dropout = float(self.config.lora_dropout)


NOTHING_KNOWN = RunSettings()


def heads_of(model_config: Mapping[str, Any], given: Heads) -> Heads:
    """Returns the sizes of the attention: the given ones, and the others from a model_config of MindFormers.

    Where it lacks the size of a head, the rows of the adapter give it.
    """
    config = ModelConfig(dict(model_config), {})
    layouts: Dict[str, RowLayout] = {}
    if model_config.get("use_contiguous_weight_layout_attention"):
        layouts["w_qkv"] = QueryKeyValueInTurn()
    if model_config.get("use_interleaved_weight_layout_mlp") is False:
        layouts["w_gate_hidden"] = PartAfterPart()
    heads = given.heads or _whole(config["heads"])
    return Heads(
        heads,
        given.kv_heads or _whole(config["kv_heads"]) or heads,
        given.head_dim or _whole(config["head_dim"]),
        given.q_rank or _whole(config["q_rank"]),
        layouts,
    )


def pet_config_of(model_config: Mapping[str, Any], source: str) -> Dict[str, Any]:
    """Returns the pet_config in a model_config of MindFormers; ConfigError if it has none."""
    pet_config = model_config.get("pet_config")
    if not isinstance(pet_config, dict):
        raise ConfigError(f"{source} has no pet_config in model.model_config: give the YAML of a LoRA run.")
    return pet_config


def _whole(value: Any) -> Optional[int]:
    return value if type(value) is int and value > 0 else None
