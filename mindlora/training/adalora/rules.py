"""AdaLoRA: what pet_config.use_adalora needs from the rest of a YAML."""

from typing import Any, Iterator, Mapping

from mindlora.core.yaml_file import PET, TRAINING_MODES, value_at
from mindlora.models.variants.adalora import ADALORA
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.key_ranges import setting
from mindlora.run.checks.training import WRAPPER, accumulates_here, train_step


def check_rank_budget(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each setting with which the train step cannot allocate AdaLoRA's ranks."""
    key = f"{PET}.{ADALORA.field}"
    trains = config.get("run_mode") in TRAINING_MODES
    if not trains or not value_at(config, key) or value_at(config, f"{PET}.adapter_path"):
        return
    if train_step(config) != WRAPPER or not accumulates_here(config):
        yield error(
            key,
            f"pet_config.{ADALORA.field} is True, and ranks are allocated by mindlora's train step, alone or in data "
            "parallel.",
            f"Set runner_wrapper.type: {WRAPPER} and parallel.parallel_mode: 0, or remove {ADALORA.field}.",
        )
    sink_size = setting(config, "runner_config.sink_size")
    if setting(config, "runner_config.sink_mode") and sink_size != 1:
        yield error(
            key,
            f"pet_config.{ADALORA.field} is True and runner_config.sink_size is {sink_size}: ranks are planned for "
            "each step, and data sinking does several at once.",
            "Set runner_config.sink_mode: False.",
        )
