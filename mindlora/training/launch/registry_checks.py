"""Classes that a YAML names, which MindFormers looks up only when the network is built: callbacks, optimizer, ..."""

import difflib
import inspect
from typing import Any, Iterator, List, Optional, Sequence, Set, Tuple

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from mindlora.core.errors import LoraError
from mindlora.core.text import suggestion
from mindlora.run.checks.finding import Finding, error
from mindlora.run.yaml_run import YamlRun
from mindlora.training.launch import hooks  # noqa: F401  registers mindlora's classes

# Key of the YAML -> the kind of class that its ``type`` names: of any run, and of one that trains. MindFormers builds
# nothing of the second in other runs, and its YAMLs for predicting name optimizers that it no longer has.
_KINDS = {"metric": MindFormerModuleType.METRIC, "trainer": MindFormerModuleType.TRAINER}
_TRAINING_KINDS = {
    "optimizer": MindFormerModuleType.OPTIMIZER,
    "lr_schedule": MindFormerModuleType.LR,
    "runner_wrapper": MindFormerModuleType.WRAPPER,
}
# The same for what legacy models have.
_LEGACY_KINDS = {"model.arch": MindFormerModuleType.MODELS, "model.model_config": MindFormerModuleType.CONFIG}
_DATA_KINDS = {
    "{}_dataset.data_loader": MindFormerModuleType.DATASET_LOADER,
    "{}_dataset_task": MindFormerModuleType.DATASET,
}
# Settings that MindFormers' Trainer reads itself, beside the arguments of the class.
_READ_BY_TRAINER = {"lr_schedule": ("warmup_epochs",)}
# Callbacks whose arguments have a rule of run/checks.
_RULED = ("Trackers",)
# These take any argument and ignore what they do not know, so that a misspelt one has no effect. One that is as near to
# an argument as this is a misspelt one.
_NEAR = 0.85


def check_classes(run: YamlRun) -> Iterator[Finding]:
    """Yields a finding for each class that the YAML names and that does not exist, or lacks an argument it is given.

    Keys of the model that nothing reads are warnings: YAMLs of MindFormers' own have ``num_block`` and
    ``max_position_embeddings``.
    """
    # A run that learns from rewards has prompts for its data.
    data = run.mode if not run.trains else "train" if run.rl is None else None
    data_kinds = {key.format(data): kind for key, kind in _DATA_KINDS.items()} if data in ("train", "eval") else {}
    needed = {**({} if run.is_mcore else _LEGACY_KINDS), **data_kinds}
    for key, kind in {**_KINDS, **(_TRAINING_KINDS if run.trains else {}), **needed}.items():
        nodes = _nodes(run.at(key))
        if not any(node.get("type") for node in nodes) and (nodes or key in needed):
            yield error(key, f"{key} has no type, so MindFormers does not know what to build.")
        for node in nodes:
            yield from _unknown(key, kind, node)
            yield from _misspelt(key, kind, node)
    yield from _missing_rate(run)
    for where, callback in run.callbacks if run.trains else ():
        yield from _unknown(where, MindFormerModuleType.CALLBACK, callback)
        if callback.get("type") not in _RULED:
            yield from _wrong_arguments(where, callback) or _wrong_values(where, callback)


def _nodes(node: Any) -> List[dict]:
    return [item for item in (node if isinstance(node, list) else [node]) if isinstance(item, dict)]


def _class_of(kind: str, node: dict) -> Optional[type]:
    """Returns the class that a node names; None if it is not registered, or the user's own."""
    name = node.get("type")
    is_registered = name is not None and not node.get("auto_register") and MindFormerRegister.is_exist(kind, name)
    return MindFormerRegister.get_cls(kind, name) if is_registered else None


def _unknown(where: str, kind: str, node: dict) -> Iterator[Finding]:
    name = node.get("type")
    # A class of the user's own is registered when MindFormers imports the module that auto_register names.
    if name is None or node.get("auto_register") or MindFormerRegister.is_exist(kind, name):
        return
    hint = suggestion(str(name), sorted(_names(kind)))
    yield error(f"{where}.type", f"{where}.type is {name!r}, which is not registered.{hint}")


def _names(kind: str) -> List[str]:
    return [name for name in MindFormerRegister.registry.get(kind, {}) if not name.startswith("_")]


def _missing_rate(run: YamlRun) -> Iterator[Finding]:
    node = run.at("lr_schedule") or {}
    schedule = _class_of(MindFormerModuleType.LR, node)
    if schedule is None or node.get("learning_rate") is not None or run.pet_config.get("preset") or not run.trains:
        return
    if "learning_rate" in _required(schedule):
        fault = f"lr_schedule has no learning_rate, which {node['type']} needs."
        yield error("lr_schedule", fault, "Set it, or a preset in pet_config.")


def _misspelt(where: str, kind: str, node: dict) -> Iterator[Finding]:
    named = _class_of(kind, node)
    name = node.get("type")
    if named is None:
        return
    arguments = _settings(named)
    for argument in node:
        if argument not in ("type", *arguments, *_READ_BY_TRAINER.get(where, ())):
            near = difflib.get_close_matches(argument, sorted(set(arguments) - set(node)), n=1, cutoff=_NEAR)
            if near:
                fault = f"{where} has {argument!r}, which {name} does not know. Did you mean {near[0]!r}?"
                yield Finding("warning" if where in _LEGACY_KINDS else "error", f"{where}.{argument}", fault)


def _wrong_arguments(where: str, node: dict) -> List[Finding]:
    callback = _class_of(MindFormerModuleType.CALLBACK, node)
    arguments, takes_any = _parameters(callback) if callback else ([], True)
    unknown = [] if takes_any else [argument for argument in node if argument not in ("type", *arguments)]
    return [
        error(where, f"{where} has no argument {argument!r}.{suggestion(argument, arguments)}") for argument in unknown
    ]


def _wrong_values(where: str, node: dict) -> List[Finding]:
    """Builds a callback of mindlora's, which checks its settings and does nothing else."""
    callback = _class_of(MindFormerModuleType.CALLBACK, node)
    if callback is None or not callback.__module__.startswith("mindlora."):
        return []
    missing = [argument for argument in _required(callback) if argument not in node]
    if missing:
        return [error(where, f"{where} needs {' and '.join(missing)}.")]
    try:
        callback(**{argument: value for argument, value in node.items() if argument != "type"})
    except (LoraError, TypeError) as refusal:
        return [error(where, f"{where}: {refusal}")]
    return []


def _required(kind: type) -> Sequence[str]:
    """Returns the arguments of a class that have no default."""
    parameters = inspect.signature(kind).parameters.values()
    named = (argument for argument in parameters if argument.kind is argument.POSITIONAL_OR_KEYWORD)
    return [argument.name for argument in named if argument.default is argument.empty]


def _settings(kind: type) -> Set[str]:
    """Returns the names of a class's arguments, and of those that it passes on to the classes that it is made from."""
    try:
        arguments = set(inspect.signature(kind).parameters)
    except ValueError:
        # A class of C++ does not tell.
        arguments = set()
    bases = inspect.getmro(kind) if inspect.isclass(kind) else ()
    return arguments.union(*(_parameters(base)[0] for base in bases if inspect.isfunction(vars(base).get("__init__"))))


def _parameters(kind: type) -> Tuple[List[str], bool]:
    """Returns the names of a class's arguments, and whether it takes any others."""
    parameters = [
        parameter for name, parameter in inspect.signature(kind.__init__).parameters.items() if name != "self"
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD], takes_any
