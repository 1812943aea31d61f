"""A run with several adapters on disk: adapters.json lists them and those that have ended; each saves itself."""

import os
from typing import Any, Dict, Mapping, NamedTuple, Sequence, Union

from mindlora.core import atomic
from mindlora.core.errors import ConfigError
from mindlora.core.json_files import parse_object, write_json
from mindlora.training.resume import training_state

RECORD = "adapters.json"


class SavedAdapter(NamedTuple):
    """The step folder from which one adapter of a run continues, or at which it stays.

    Attributes:
        folder (str): Its step folder.
        ended (dict or None): Where it stopped learning: the "step" and the "reason".
    """

    folder: str
    ended: Any


def write_record(directory: str, adapters: Sequence[Mapping[str, Any]]) -> None:
    """Writes adapters.json: each adapter's "name", its "settings", and, if it has stopped learning, "ended"."""
    os.makedirs(directory, exist_ok=True)
    with atomic.replace_file(os.path.join(directory, RECORD)) as path:
        write_json(path, {"adapters": list(adapters)})


def find_saved(
    directory: str, resume: Union[bool, str], adapters: Sequence[Mapping[str, Any]]
) -> Dict[str, SavedAdapter]:
    """Returns, by name, where each adapter continues: all at one step, except those that had ended by then.

    Args:
        directory (str): The folder of adapters.json.
        resume (bool or str): True for the newest step that all adapters have saved, or a step folder of one of them.
        adapters (sequence of dict): Each adapter's "name", "settings" and "directory" of step folders.

    Raises:
        ConfigError: The saved adapters are others, nothing was saved, or all adapters had ended.
    """
    ended = _ended(directory, adapters)
    steps = {adapter["name"]: _steps(adapter["directory"]) for adapter in adapters}
    if isinstance(resume, str):
        wanted = [_step_of(resume, directory, steps)]
    else:
        wanted = sorted(set().union(*steps.values()), reverse=True)
    for step in wanted:
        before = {name: end for name, end in ended.items() if end["step"] <= step}
        needed = {name: before[name]["step"] if name in before else step for name in steps}
        if len(before) == len(steps):
            raise ConfigError(
                f"{directory}: at step {step} all adapters have stopped learning, so nothing is left to train. Name an "
                "earlier step folder to resume from, or set resume to False for a new run."
            )
        if all(at in steps[name] for name, at in needed.items()):
            folders = {name: training_state.resume_folder(directory, steps[name][at]) for name, at in needed.items()}
            return {name: SavedAdapter(folder, before.get(name)) for name, folder in folders.items()}
    raise ConfigError(
        f"LoraCheckpoint: resume is {resume}, but {directory} has no step that all adapters have saved: "
        f"{'; '.join(_saved(name, found) for name, found in steps.items())}. Set resume to False for a new run."
    )


def _ended(directory, adapters) -> Dict[str, Dict[str, Any]]:
    """Returns name -> where an adapter had ended; raises ConfigError if the record has other adapters."""
    path = os.path.join(directory, RECORD)
    if not os.path.isfile(path):
        raise ConfigError(
            f"LoraCheckpoint: resume is set, but {path} does not exist, so no run with several adapters was saved "
            "there. Name its output folder, or leave resume out."
        )
    with open(path, encoding="utf-8") as file:
        saved = parse_object(file.read(), path, ConfigError)["adapters"]
    check_same_adapters(path, saved, adapters)
    return {each["name"]: each["ended"] for each in saved if each["ended"]}


def check_same_adapters(source: str, there: Sequence[Mapping[str, Any]], adapters: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError unless a run and a saved run have the same adapters, by "name" and "settings"."""
    saved = {each["name"]: each["settings"] for each in there}
    now = {adapter["name"]: adapter["settings"] for adapter in adapters}
    differences = {
        "only there": [name for name in saved if name not in now],
        "only in this run": [name for name in now if name not in saved],
        "with other settings": [
            f"{name} ({saved[name]} there, {settings} here)"
            for name, settings in now.items()
            if name in saved and saved[name] != settings
        ],
    }
    problems = [f"{problem}: {', '.join(names)}" for problem, names in differences.items() if names]
    if problems:
        raise ConfigError(
            f"{source} names other adapters than pet_config.adapters. {'; '.join(problems)}. Resume with the adapters "
            "of that run, or begin a new one in another output folder."
        )


def _steps(directory) -> Dict[int, str]:
    """Returns step -> folder of an adapter's saves."""
    folders = training_state.step_folders(directory)
    return {int(os.path.basename(folder)[len(training_state.STEP_PREFIX) :]): folder for folder in folders}


def _step_of(folder: str, directory: str, steps: Mapping[str, Mapping[int, str]]) -> int:
    """Returns the step of a folder that one of the adapters saved."""
    for found in steps.values():
        for step, path in found.items():
            if os.path.realpath(path) == os.path.realpath(folder):
                return step
    raise ConfigError(
        f"LoraCheckpoint: resume is {folder}, which is not a step folder of an adapter of {directory}. Name one, such "
        "as NAME/lora_checkpoint/step_20 there, or set resume to True for the newest step."
    )


def _saved(name: str, steps: Mapping[int, str]) -> str:
    return f"{name} has saved {', '.join(f'step {step}' for step in steps) or 'nothing'}"
