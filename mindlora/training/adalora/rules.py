"""AdaLoRA's rules: what pet_config.use_adalora requires of the rest of a YAML."""

from typing import Iterator

from mindlora.core.yaml_file import PET
from mindlora.models.variants.adalora import ADALORA
from mindlora.run.checks.finding import Finding, error
from mindlora.run.yaml_run import WRAPPER, YamlRun


def check_rank_budget(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each setting with which the train step cannot allocate AdaLoRA's ranks."""
    key = f"{PET}.{ADALORA.field}"
    if not run.trains or not run.at(key) or run.pet_config.get("adapter_path"):
        return
    if not run.steps_by_mindlora:
        yield error(
            key,
            f"pet_config.{ADALORA.field} is True, but ranks are allocated by mindlora's train step, alone or in data "
            "parallel.",
            f"Set runner_wrapper.type: {WRAPPER} and parallel.parallel_mode: 0, or remove {ADALORA.field}.",
        )
    sink_size = run.setting("runner_config.sink_size")
    if run.setting("runner_config.sink_mode") and sink_size != 1:
        yield error(
            key,
            f"pet_config.{ADALORA.field} is True and runner_config.sink_size is {sink_size}: ranks are planned for "
            "each step, but data sinking does several at once.",
            "Set runner_config.sink_mode: False.",
        )
