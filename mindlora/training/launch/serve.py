"""Building an engine that serves the model of a YAML."""

from typing import Any, Mapping, Optional, Sequence

from mindformers.core.context import build_context
from mindformers.tools.register import MindFormerConfig

from mindlora.core.errors import ConfigError
from mindlora.data.tokenizers import load_tokenizer
from mindlora.models.architectures.classifiers import task_of
from mindlora.models.lora_config import expand_pet_type
from mindlora.run.checks.cpu import check_serving
from mindlora.run.checks.files import check_quantized_base
from mindlora.run.checks.finding import refuse
from mindlora.run.checks.pet_config import refuse_pet_config
from mindlora.run.yaml_run import YamlRun
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.build import make_engine
from mindlora.serving.engine import Engine
from mindlora.serving.packed_adapter import rank_needed
from mindlora.serving.settings import MAX_RANK, EngineSettings
from mindlora.training import log  # noqa: F401  importing it sends mindlora's messages to MindFormers' log
from mindlora.training.launch.launcher import build_config


def build_engine(
    config: str,
    overrides: Sequence[str] = (),
    tokenizer: Optional[str] = None,
    registry: Optional[AdapterRegistry] = None,
    sizes: Optional[Mapping[str, Any]] = None,
    model_name: Optional[str] = None,
    chosen: Sequence[str] = (),
) -> Engine:
    """Builds the model of a YAML for serving; use the YAML with which the adapter was trained.

    Args:
        config (str): Path of a MindFormers YAML.
        overrides (sequence of str): As on mindlora-run's command line: ("--load_checkpoint", "base.ckpt", ...).
        tokenizer (str): A folder or file: see mindlora.data.tokenizers.load_tokenizer. Default: None, that of the
            YAML (processor.tokenizer), or one beside the checkpoint.
        registry (AdapterRegistry): The adapters. Default: None, no adapters.
        sizes (mapping): Fields of EngineSettings that differ from their defaults. Default: None.
        model_name (str): The base's name for callers. Default: None, the YAML's trainer.model_name.
        chosen (sequence of str): Adapters of the registry that will be used: unless ``sizes`` has max_rank, slots have
            room for the largest of their ranks. Default: ().

    Returns:
        Engine, not started.

    Raises:
        LoraError: A setting is wrong, or a file cannot be read.
    """
    yaml = build_config(["--config", config, "--run_mode", "predict", *overrides])
    model = yaml.model
    if not model or not model.model_config:
        raise ConfigError("The YAML has no model.model_config: give a complete MindFormers YAML.")
    pet_config = model.model_config.pet_config or {}
    if pet_config:
        expand_pet_type(pet_config)
        refuse_pet_config(pet_config)
    run = YamlRun(yaml)
    task = task_of(run.head_class)
    if task is not None:
        # The adapters bring their heads along, on the language model inside a classifier.
        if run.is_mcore:
            model.model_config.architectures = task.language_model
            model.model_config.pop("num_labels", None)
        else:
            model.arch.type = task.language_model
        run = YamlRun(yaml)
    refuse(check_serving(run))
    if run.is_mcore:
        model = {"model_config": run.model}
    if yaml.use_parallel:
        raise ConfigError(
            "use_parallel is True: mindlora serves on one device. Set use_parallel: False (--use_parallel False)."
        )
    sizes = {"seq_length": model["model_config"].get("seq_length"), **(sizes or {})}
    if registry is not None and chosen and "max_rank" not in sizes:
        joins_cells = bool(model["model_config"].get("qkv_concat"))
        ranks = [rank_needed(registry.path(name), joins_cells) for name in chosen]
        sizes["max_rank"] = max(EngineSettings.max_rank, min(MAX_RANK, max(ranks)))
    settings = EngineSettings(**sizes)
    refuse(check_quantized_base(run))
    # Graphs are the fast mode. MindFormers refuses to predict with O1, which its training YAMLs use.
    yaml.context.mode = 0
    if (yaml.context.jit_config or {}).get("jit_level") == "O1":
        yaml.context.jit_config["jit_level"] = "O0"
    # The network has a cache, whatever the YAML trains with. On Ascend, MindFormers' context then prepares
    # the environment of its inference kernels; on a CPU, where they do not run, it would bind the process to cores.
    if not run.is_mcore:
        yaml.model.model_config.use_past = None if yaml.context.device_target == "CPU" else True
    tokenizer = tokenizer or run.tokenizer
    if tokenizer is None:
        raise ConfigError(
            "The YAML names no tokenizer (processor.tokenizer.tokenizer_file is empty), and there is none beside "
            "load_checkpoint: give --tokenizer."
        )
    loaded = load_tokenizer(tokenizer)
    set_up_context(yaml)
    return make_engine(
        model,
        yaml.load_checkpoint,
        loaded,
        # An empty folder counts too.
        AdapterRegistry() if registry is None else registry,
        settings,
        quantize_base=pet_config.get("quantize_base"),
        quantize_exclude=pet_config.get("quantize_exclude"),
        model_name=model_name or run.base_name,
    )


def set_up_context(yaml: MindFormerConfig) -> None:
    """Sets up MindSpore according to the YAML's context; raises ConfigError if this machine does not allow it."""
    try:
        build_context(yaml)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        # A device's limits raise RuntimeError; settings that MindFormers rejects raise ValueError.
        lacks_device = isinstance(error, RuntimeError) and yaml.context.device_target != "CPU"
        advice = "Set --device_target CPU to run on a CPU." if lacks_device else "Correct the YAML's node context."
        raise ConfigError(f"The YAML's context cannot be used here: {reason} {advice}") from error
