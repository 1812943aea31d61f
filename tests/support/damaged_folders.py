"""Damaged adapter folders: invalid configurations, and files that are missing or are not files."""

import os

from tests.support.adapter_samples import CONFIG, WEIGHTS, folder, make, peft_tensors, safetensors
from tests.support.damaged_cases import FORMAT, add, sound, with_tensors

# Configurations -------------------------------------------------------------------------------------------------

for field, values in (
    ("lora_alpha", (0, -1, float("nan"), float("inf"), "3", None, True, [3], 10**400)),
    ("r", (0, -2, "2", None, True, 2.5, float("nan"), {"a": 2})),
):
    for value in values:
        add(
            f"{field} {str(value)[:9]!r}",
            with_tensors(lambda _: None, **{field: value}),
            FORMAT,
            CONFIG,
            f"{field} is {value!r}"[:200],
            "it must be a ",
        )
for field, value in (
    ("use_dora", "false"),
    ("lora_bias", True),
    ("layer_replication", [[0, 1]]),
    ("bias", "some"),
    ("peft_type", "IA3"),
    ("init_lora_weights", "pissa_niter_4"),
    ("use_rslora", "false"),
    ("lora_dropout", 2),
    ("target_modules", 5),
    ("layers_to_transform", "0"),
    ("modules_to_save", "x"),
    ("rank_pattern", [1]),
    ("alpha_pattern", {"(": 1}),
    ("base_model_name_or_path", 5),
):
    add(f"{field} {value!r}", with_tensors(lambda _: None, **{field: value}), FORMAT, CONFIG, f": {field} ")
for name, content, words in (
    ("a list", b"[2, 3]", "holds a list instead of a JSON object"),
    ("empty", b"", "is not JSON"),
    ("not UTF-8", b'{"r": 2, "lora_alpha": 3, "x": "\xe9"}', "is not JSON: 'utf-8' codec"),
    ("cut", b'{"r": 2, "lora_al', "is not JSON"),
    ("keys twice", b'{"r": 2, "r": 3}', "has r twice"),
    ("deep nesting", b'{"r":' + b"[" * 50_000, "is not JSON"),
    ("zeros", bytes(100), "is not JSON"),
    ("5000 digits", b'{"r": ' + b"1" * 5000 + b"}", "is not JSON: Exceeds the limit"),
):

    def write_config(path, content=content):
        folder(path, peft_tensors(make()))
        (path / CONFIG).write_bytes(content)
        return str(path)

    add(f"config: {name}", write_config, FORMAT, CONFIG, words)

# Files and folders ----------------------------------------------------------------------------------------------


def changed(change):
    def make_it(path):
        folder(path, peft_tensors(make()))
        return str(change(path) or path)

    return make_it


def replaced(name, how):
    """Replaces a file with what ``how`` makes."""

    def change(path):
        (path / name).unlink()
        how(path / name)

    return changed(change)


def two_candidates(path):
    for name in ("a.safetensors", "b.safetensors"):
        (path / name).write_bytes(safetensors(*sound()))
    (path / WEIGHTS).unlink()
    (path / "mindformers_adapter_config.json").write_text("{}")


NO_FILE = "is not a file but a folder, a device, or a broken link"
add("config is missing", changed(lambda path: (path / CONFIG).unlink()), FORMAT, f"{CONFIG} is missing")
add("config is a folder", replaced(CONFIG, os.mkdir), FORMAT, CONFIG, NO_FILE)
add("config is a loop of links", replaced(CONFIG, lambda name: name.symlink_to(name)), FORMAT, CONFIG, NO_FILE)
add("weights are a folder", replaced(WEIGHTS, os.mkdir), FORMAT, WEIGHTS, NO_FILE)
add("weights are a loop of links", replaced(WEIGHTS, lambda name: name.symlink_to(name)), FORMAT, WEIGHTS, NO_FILE)
add(
    "weights are a link that leads nowhere",
    replaced(WEIGHTS, lambda name: name.symlink_to("x")),
    FORMAT,
    WEIGHTS,
    NO_FILE,
)
add("weights are a pipe", replaced(WEIGHTS, os.mkfifo), FORMAT, WEIGHTS, NO_FILE)
add("an empty folder", lambda path: str(path), FORMAT, f"holds no {WEIGHTS}. It holds: nothing.")
add(
    "a folder of something else",
    changed(lambda path: (path / WEIGHTS).rename(path / "model.safetensors") and None),
    FORMAT,
    f"holds no {WEIGHTS}. It holds: {CONFIG}, model.safetensors.",
)
add("a folder with two candidates", changed(two_candidates), FORMAT, "both in a.safetensors and in b.")
add("nothing there", lambda path: str(path / "absent"), FORMAT, "absent does not exist.")
add("a file in a path of folders", changed(lambda path: path / CONFIG / "adapter"), FORMAT, "adapter does not exist.")
add("another kind of file", changed(lambda path: path / CONFIG), FORMAT, CONFIG, "must be an adapter folder or a")
