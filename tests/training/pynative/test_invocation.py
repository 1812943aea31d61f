"""aLoRA under MindFormers' PyNative Trainer: on which tokens it acts, how it resumes, what its files say."""

import json

import numpy as np
import pytest

from mindlora import cli
from mindlora.data.mindrecord import write_mindrecord
from mindlora.files.adapters.convert import Heads, convert_adapter
from tests.support import pynative_runs, tiny_runs
from tests.support.pynative_runs import only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS, BEGIN = 4, 3
INVOCATION = [5, 4, 5]
FROZEN = {"type": "ConstantWarmUpLR", "learning_rate": 0.0, "warmup_steps": 0}
ALORA = {"alora_invocation_tokens": INVOCATION}
# Each step takes rows of one micro-batch after those of another, whose invocation is elsewhere.
PARTS = {"training": {"steps": STEPS, "local_batch_size": 2, "global_batch_size": 4, "seed": 1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base, rows in which the invocation is in many places, and rows that begin with it."""
    folder = tmp_path_factory.mktemp("invocation")
    pynative_runs.write_base(folder / "base", folder / "hf")
    tokens, labels = pynative_runs.counting_rows(16)
    places = np.random.default_rng(3).integers(0, 8, len(tokens))
    for name, starts in (("rows", places), ("first", 0 * places)):
        changed = tokens.copy()
        for row, start in zip(changed, starts):
            row[start : start + len(INVOCATION)] = INVOCATION
        pairs = zip(changed[:, :-1], labels[:, 1:])
        rows = ({"input_ids": ids, "labels": row} for ids, row in pairs)
        write_mindrecord(rows, str(folder / f"{name}.mindrecord"))
    return folder


def ids_with_invocation():
    ids = np.random.default_rng(0).integers(10, tiny_runs.VOCABULARY, (2, tiny_runs.SEQUENCE))
    ids[0, BEGIN : BEGIN + len(INVOCATION)] = INVOCATION
    return ids.tolist()


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what refused it, or None."""
    base = {"load_path": str(folder / "base"), "no_load_optim": True}
    halfway = {"load_path": str(folder / "whole_saved" / "iteration_00000002")}
    # Name -> data, what is loaded, other nodes.
    runs = {
        "whole": ("rows", base, {**PARTS, "pet_config": ALORA}),
        "resumed": ("rows", halfway, {**PARTS, "pet_config": ALORA}),
        "nf4": ("rows", base, {"pet_config": {**ALORA, "quantize_base": "nf4"}}),
        "all_tokens": ("first", base, {}),
        "from_the_first": ("first", base, {"pet_config": ALORA}),
        "whole_untrained": ("first", base, {"lr_scheduler": FROZEN}),
        "nf4_untrained": ("first", base, {"lr_scheduler": FROZEN, "pet_config": {"quantize_base": "nf4"}}),
        "nowhere": ("first", base, {"pet_config": {"alora_invocation_tokens": [5, 5, 5]}}),
        "dora": ("first", base, {"pet_config": {**ALORA, "use_dora": True}}),
    }
    configs = []
    for name, (data, loaded, nodes) in runs.items():
        saved = {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": 2}
        callbacks = [
            {"type": "LoraCheckpoint", "save_steps": STEPS, "directory": str(folder / f"{name}_peft")},
            {"type": "RecordLosses", "directory": str(folder / name)},
            {"type": "RecordLogits", "ids": ids_with_invocation(), "path": str(folder / f"{name}.npy")},
        ]
        nodes = {"checkpoint": {**saved, **loaded}, "callbacks": callbacks, **nodes}
        configs.append(pynative_runs.tiny_config("qwen3", folder / f"{data}.mindrecord", STEPS, **nodes))
    return dict(zip(runs, pynative_runs.series(configs, folder)))


@pytest.mark.parametrize("name", ["whole", "nf4"])
@shows("alora", "qwen3", trainer="pynative")
def test_it_acts_from_its_tokens_on_alone(folder, messages, name):
    logits = [np.load(folder / f"{run}.npy") for run in (name, f"{name}_untrained")]
    tuned, base = (array.reshape(2, tiny_runs.SEQUENCE, -1) for array in logits)
    changed = (tuned != base).any(-1)
    assert not changed[0, :BEGIN].any() and changed[0, BEGIN:].all() and not changed[1].any()
    assert np.abs(tuned - base).max() > 0.01


def test_on_rows_that_begin_with_its_tokens_it_trains_as_plain_lora(folder, messages):
    found, expected = (pynative_runs.losses(folder / name) for name in ("from_the_first", "all_tokens"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    found, expected = (pynative_runs.trained(folder / name) for name in ("from_the_first", "all_tokens"))
    for name, array in expected.items():
        # Adam makes a step of its full length of a gradient near zero too, whatever its last bits are.
        np.testing.assert_allclose(found[name], array, atol=1e-3, err_msg=name)


def test_a_resumed_run_is_the_rest_of_the_whole_one(folder, messages):
    assert messages["resumed"] is None
    whole, resumed = (pynative_runs.losses(folder / name) for name in ("whole", "resumed"))
    assert len(whole) == STEPS and resumed == whole[2:]
    whole, resumed = (pynative_runs.trained(folder / name) for name in ("whole", "resumed"))
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)


def test_its_files_say_from_which_tokens_on_it_acts(folder, messages, capsys):
    step, converted = folder / "whole_saved" / f"iteration_{STEPS:08d}", folder / "converted"
    convert_adapter(str(step), str(converted), "peft", heads=Heads(4, 2, 12))
    for path in (converted, folder / "whole_peft" / f"step_{STEPS}"):
        settings = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        assert settings["alora_invocation_tokens"] == INVOCATION
    # It has no merged form.
    where = {"base": folder / "hf", "adapter": step, "output": folder / "merged"}
    merging = ["base", "merge", *(word for name, path in where.items() for word in (f"--{name}", str(path)))]
    assert cli.main(merging) == 1 and "(aLoRA), which has no merged form" in capsys.readouterr().err


def test_rows_without_its_tokens_and_other_variants_are_refused(messages):
    found = "rows without the tokens [5, 5, 5] of pet_config.alora_invocation_tokens"
    assert found in messages["nowhere"] and "The adapter would learn nothing" in messages["nowhere"]
    assert "alora_invocation_tokens" in messages["dora"] and "use_dora" in messages["dora"]
