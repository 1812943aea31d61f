"""A frozen base that stays in 16 bits while it trains on a CPU: which runs can have one, and what is said of it."""

from typing import Iterator, Optional

from mindlora.core.fields import dtype_name
from mindlora.run.checks.finding import Finding, error, note
from mindlora.run.keys import MODEL
from mindlora.run.yaml_run import YamlRun

_PRODUCTS = "pet_config.product_dtype"
_NARROW = ("float16", "bfloat16")


def dtype_key(run: YamlRun) -> str:
    """Returns the key of model_config that says in which dtype the weights of linear cells are held."""
    return "params_dtype" if run.is_mcore and "param_init_type" not in run.model else "param_init_type"


def held_dtype(run: YamlRun) -> Optional[str]:
    """Returns the dtype of 16 bits in which a run on a CPU holds its base, where the YAML names one that it can hold.

    The weights of linear cells and embeddings then stay in it; all else is computed in float32.
    """
    found = run.model.get(dtype_key(run))
    if not run.on_cpu or found is None or why_not_held(run):
        return None
    dtype = dtype_name(found, dtype_key(run))
    return dtype if dtype in _NARROW else None


def why_not_held(run: YamlRun) -> str:
    """Returns what of a run on a CPU does not go with a base in 16 bits; "" if nothing does."""
    lora = run.language.lora
    if lora is None:
        return "weights of 16 bits do not train there, and without a pet_config all do"
    if run.mode == "predict":
        return "run_mode predict computes in float32"
    if not run.in_graph_mode:
        return "context.mode is not 0"
    architecture = run.architecture
    is_llama = architecture is not None and "LlamaConfig" in architecture.model_types
    if not is_llama and not (run.is_mcore and architecture is not None and not architecture.experts):
        return "of the models of MindFormers, Llama and Qwen3 hold one"
    if run.legacy_experts > 1:
        return "routed experts multiply in float32"
    if run.preference is not None:
        return "the reference of runner_wrapper.preference computes in float32"
    if lora.adapters:
        return "several adapters (pet_config.adapters) compute in float32"
    for field in ("modules_to_save", "freeze_exclude"):
        if getattr(lora, field):
            return f"pet_config.{field} trains weights of the base"
    if lora.compute_dtype not in (None, "float32"):
        return f"pet_config.compute_dtype is {lora.compute_dtype}"
    if lora.variant.row_norms:
        return f"{lora.variant.name} needs the norms of its rows in float32"
    return ""


def check_held_base(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for a product_dtype that has no effect, and a note on a base that stays in 16 bits."""
    lora = run.language.lora
    if lora is None:
        return
    held = held_dtype(run)
    if held is None and run.on_cpu and run.model.get(dtype_key(run)) not in (None, "float32", "fp32"):
        # check_cpu says why the base cannot be held so.
        return
    key = f"{run.language_key}.{_PRODUCTS}"
    if lora.product_dtype != "float32" and not run.on_cpu:
        yield error(
            key,
            f"product_dtype is {lora.product_dtype}, which is for a CPU.",
            "Remove it: elsewhere compute_dtype of model_config is what linear cells multiply in.",
        )
    elif lora.product_dtype != "float32" and held != lora.product_dtype:
        yield error(
            key,
            f"product_dtype is {lora.product_dtype} and the base is in {held or 'float32'}.",
            f"Set {MODEL}.{dtype_key(run)}: {lora.product_dtype}, which keeps the base in {lora.product_dtype}, or "
            "remove it.",
        )
    elif held is not None:
        yield note(
            f"{MODEL}.{dtype_key(run)}",
            f"The base stays in {held} on the CPU: linear cells multiply by its weights as they are, with products in "
            f"{lora.product_dtype}, and all else is computed in float32.",
            f"{_PRODUCTS}: bfloat16 is faster on a processor with AMX, and rounds what linear cells take."
            if held == "bfloat16" and lora.product_dtype == "float32"
            else "",
        )
