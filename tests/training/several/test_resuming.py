"""From which step a run with several adapters goes on, by what each of them has saved and by adapters.json."""

import pytest

from mindlora.core.errors import ConfigError
from mindlora.training.several.resuming import find_saved, write_record

SETTINGS = {"slow": {"learning_rate": 1e-4}, "fast": {"learning_rate": 1e-3, "lora_rank": 2}}


def adapters(folder, settings=SETTINGS):
    return [{"name": name, "settings": own, "directory": str(folder / name)} for name, own in settings.items()]


def saved(folder, slow=(), fast=(), ended=None):
    """Writes what two adapters would have saved, and adapters.json; ``ended`` is the step at which fast was stopped."""
    for name, steps in (("slow", slow), ("fast", fast)):
        for step in steps:
            (folder / name / f"step_{step}").mkdir(parents=True)
            (folder / name / f"step_{step}" / "training_state.json").write_text("{}", encoding="utf-8")
    end = ended and {"step": ended, "reason": "diverged"}
    endings = {"slow": None, "fast": end}
    record = [{"name": name, "settings": own, "ended": endings[name]} for name, own in SETTINGS.items()]
    write_record(str(folder), record)


def found(folder, resume=True, settings=SETTINGS):
    """Returns name -> (step folder, whether it stays as it is)."""
    places = find_saved(str(folder), resume, adapters(folder, settings))
    return {name: (place.folder.rsplit("/", 1)[1], place.ended is not None) for name, place in places.items()}


@pytest.mark.parametrize(
    "slow, fast, ended, expected",
    [
        ((10, 20), (10, 20), None, (("step_20", False), ("step_20", False))),
        # Killed while the second of them was being saved.
        ((10, 20), (10,), None, (("step_10", False), ("step_10", False))),
        # One had been stopped before.
        ((10, 20), (10, 13), 13, (("step_20", False), ("step_13", True))),
        # Killed after one was stopped and before the others saved: it learns again up to there.
        ((10,), (10, 13), 13, (("step_10", False), ("step_10", False))),
    ],
)
def test_all_go_on_from_the_newest_step_that_all_have(tmp_path, slow, fast, ended, expected):
    saved(tmp_path, slow, fast, ended)
    assert found(tmp_path) == dict(zip(SETTINGS, expected))


def test_a_step_folder_of_one_of_them_stands_for_all(tmp_path):
    saved(tmp_path, (10, 20), (10, 20))
    assert found(tmp_path, str(tmp_path / "fast" / "step_10"))["slow"] == ("step_10", False)
    with pytest.raises(ConfigError, match="step_30, which is not a step folder of an adapter of .*Name one, such as"):
        found(tmp_path, str(tmp_path / "fast" / "step_30"))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"slow": SETTINGS["slow"]}, "only there: fast"),
        ({**SETTINGS, "third": {}}, "only in this run: third"),
        (
            {**SETTINGS, "slow": {"learning_rate": 2e-4}},
            r"with other settings: slow \({'learning_rate': 0.0001} there, {'learning_rate': 0.0002} here\)",
        ),
    ],
)
def test_other_adapters_are_refused(tmp_path, settings, message):
    saved(tmp_path, (10,), (10,))
    with pytest.raises(ConfigError, match=f"adapters.json names other adapters than pet_config.adapters.*{message}"):
        found(tmp_path, settings=settings)


def test_nothing_to_go_on_from(tmp_path):
    with pytest.raises(ConfigError, match="adapters.json does not exist, so no run with several adapters was saved"):
        found(tmp_path)
    saved(tmp_path, (10,))
    with pytest.raises(ConfigError, match="slow has saved step 10; fast has saved nothing. Set resume to False"):
        found(tmp_path)


def test_no_adapter_that_learns_is_left(tmp_path):
    saved(tmp_path, (10,), (10,))
    ended = [{"name": name, "settings": own, "ended": {"step": 10, "reason": ""}} for name, own in SETTINGS.items()]
    write_record(str(tmp_path), ended)
    with pytest.raises(ConfigError, match="at step 10 all adapters have stopped learning"):
        found(tmp_path)
