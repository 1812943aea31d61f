"""lora_init from a YAML: carried out on the loaded base, saved for the original base, resumed, evaluated; LoRA-FA."""

import types

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, freeze_base, initialize_adapters, load_lora, save_lora
from mindlora.core.errors import ConfigError
from mindlora.core.numerics import initializers
from mindlora.files.adapters import files as adapter_files
from mindlora.network import tree
from tests.support import mcore_networks, networks, tiny_runs
from tests.support.what_runs import shows

ROWS, STEPS = 12, 24  # Eight epochs of three steps.
PATHS = ["lm_head", "model.layers.0.attention.wq", "model.layers.0.feed_forward.w2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a function that runs a YAML with these keys of pet_config and these callbacks, in graph mode or not."""
    folder = tmp_path_factory.mktemp("initialization")
    tiny_runs.write_data(folder / "rows.mindrecord", ROWS)

    def launch(name, pet, callbacks, mode=0, **changes):
        config = tiny_runs.tiny_config(folder / "rows.mindrecord", 8, callbacks, **changes)
        config["context"]["mode"] = mode
        config["model"]["model_config"]["pet_config"].update(pet, target_modules=["wq", "w2", "lm_head"])
        return tiny_runs.launch(config, folder / name), folder / name

    return launch


@pytest.fixture(scope="module")
def pissa(run):
    """A run initialized by PiSSA, and one that was resumed in the middle of it."""
    checkpoint = {"type": "LoraCheckpoint", "save_steps": 8, "keep_last": 99}
    process, uninterrupted = run("uninterrupted", {"lora_init": "pissa"}, [checkpoint])
    assert process.returncode == 0, process.stderr[-2000:]
    middle = str(uninterrupted / "lora_checkpoint" / "step_16")
    resumed_process, resumed = run("resumed", {"lora_init": "pissa"}, [{**checkpoint, "resume": middle}])
    assert resumed_process.returncode == 0, resumed_process.stderr[-2000:]
    return types.SimpleNamespace(
        process=process, uninterrupted=uninterrupted, resumed_process=resumed_process, resumed=resumed
    )


@pytest.fixture(scope="module")
def mica(run):
    """A run initialized by MiCA, and one that was resumed in the middle of it."""
    checkpoint = {"type": "LoraCheckpoint", "save_steps": 8, "keep_last": 99}
    everything = {"type": "CheckpointMonitor", "prefix": "all", "save_checkpoint_steps": 100}
    process, whole = run("mica", {"lora_init": "mica"}, [checkpoint, everything], mode=1)
    assert process.returncode == 0, process.stderr[-2000:]
    middle = str(whole / "lora_checkpoint" / "step_16")
    changed = {**checkpoint, "resume": middle}
    resumed_process, resumed = run("mica_resumed", {"lora_init": "mica"}, [changed], mode=1)
    assert resumed_process.returncode == 0, resumed_process.stderr[-2000:]
    path = str(next((whole / "checkpoint").rglob("all*.ckpt")))
    return types.SimpleNamespace(process=process, whole=whole, resumed=resumed, tensors=ms.load_checkpoint(path))


@pytest.fixture(scope="module")
def frozen_a(run):
    """A run initialized by OLoRA, without LoraCheckpoint, in which only B trains."""
    process, output = run(
        "frozen",
        {"lora_init": "olora", "freeze_lora_a": True},
        [{"type": "CheckpointMonitor", "prefix": "all", "save_checkpoint_steps": 100}],
        mode=1,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    path = str(next((output / "checkpoint").rglob("all*.ckpt")))
    return types.SimpleNamespace(process=process, output=output, path=path, tensors=ms.load_checkpoint(path))


def assert_falling(losses):
    """Asserts that the last epoch's losses are below the first one's."""
    losses = list(losses.values())
    assert len(losses) == STEPS and np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.02


@shows("pissa", "llama")
def test_a_run_initializes_all_adapters_once(pissa):
    words = "Adapters initialized from the base by lora_init"
    lines = [line for line in pissa.process.stdout.splitlines() if words in line]
    assert len(lines) == 1 and "Adapters initialized from the base by lora_init: 3, at" in lines[0]
    assert_falling(tiny_runs.losses(pissa.uninterrupted))


def test_the_saved_adapters_hold_the_same_initial_pair(pissa):
    adapters = [
        adapter_files.read(str(pissa.uninterrupted / "lora_checkpoint" / name))
        for name in ("step_8", "step_24", "best")
    ]
    for path in PATHS:
        for half, axis in (("A", 0), ("B", 1)):
            trained, begun = zip(*(np.split(adapter.tensors[path, half], 2, axis) for adapter in adapters))
            assert begun[0].tobytes() == begun[1].tobytes() == begun[2].tobytes()
            assert (trained[0] != trained[1]).any()
    assert {adapter.initialization for adapter in adapters} == {"pissa"}
    assert {adapter.fingerprint["values"] for adapter in adapters} == {adapters[0].fingerprint["values"]}
    assert adapters[0].rank(PATHS[1]) == 16 and adapters[0].scale(PATHS[1]) == 12 / 8


def test_a_resumed_run_is_the_one_that_was_never_stopped(pissa):
    assert "Adapters initialized from the base by lora_init" not in pissa.resumed_process.stdout
    name = f"lora_checkpoint/step_{STEPS}"
    tiny_runs.assert_same_state(pissa.uninterrupted / name, pissa.resumed / name)
    losses = tiny_runs.losses(pissa.uninterrupted)
    assert tiny_runs.losses(pissa.resumed) == {step: losses[step] for step in range(17, STEPS + 1)}


def test_without_lora_checkpoint_they_start_too(frozen_a):
    assert frozen_a.process.stdout.count("Adapters initialized from the base by lora_init: 3") == 1
    for path in PATHS:
        a = frozen_a.tensors[f"{path}.mindpet_delta_lora_a"].asnumpy()
        # The first rows of R, upper triangular and unchanged since.
        np.testing.assert_allclose(np.tril(a[:, :8], -1), 0, atol=1e-6)
        assert a.any()


def test_a_frozen_a_has_no_optimizer_state(frozen_a):
    moments = {name for name in frozen_a.tensors if name.startswith(("adam_m.", "adam_v."))}
    assert len(moments) == 6 and all(name.endswith("lora_b") for name in moments)
    assert f"trainable params: {8 * (32 + 32 + 64):,} " in frozen_a.process.stdout
    assert_falling(tiny_runs.losses(frozen_a.output))


@shows("mica", "llama")
def test_mica_trains_a_alone_in_the_minor_directions_of_the_base(mica):
    assert mica.process.stdout.count("Adapters initialized from the base by lora_init: 3") == 1
    steps = [adapter_files.read(str(mica.whole / "lora_checkpoint" / name)) for name in ("step_8", "step_24")]
    for path in PATHS:
        weight = mica.tensors[f"{path}.weight"].asnumpy()
        for adapter in steps:
            np.testing.assert_array_equal(adapter.tensors[path, "B"], initializers.mica(weight, 8)[1])
        assert (steps[0].tensors[path, "A"] != steps[1].tensors[path, "A"]).any()
    moments = {name for name in mica.tensors if name.startswith(("adam_m.", "adam_v."))}
    assert len(moments) == 6 and all(name.endswith("lora_a") for name in moments)
    assert f"trainable params: {sum(adapter.tensors[path, 'A'].size for path in PATHS):,} " in mica.process.stdout
    assert_falling(tiny_runs.losses(mica.whole))


@shows("mica", "qwen3")
def test_mica_on_a_qwen3_trains_a_alone(tmp_path):
    tiny_runs.write_data(tmp_path / "rows.mindrecord", ROWS)
    checkpoint = {"type": "LoraCheckpoint", "save_steps": 3, "keep_last": 99}
    pet = {"lora_rank": 8, "lora_alpha": 16, "target_modules": ["linear_qkv", "linear_proj"], "lora_init": "mica"}
    process = tiny_runs.launch(
        mcore_networks.tiny_config(tmp_path / "rows.mindrecord", 2, [checkpoint], pet), tmp_path / "run"
    )
    assert process.returncode == 0, process.stderr[-2000:]
    first, last = (
        adapter_files.read(str(tmp_path / "run" / "lora_checkpoint" / step)) for step in ("step_3", "step_6")
    )
    for path in first.paths:
        np.testing.assert_array_equal(first.tensors[path, "B"], last.tensors[path, "B"])
        assert (first.tensors[path, "A"] != last.tensors[path, "A"]).any(), path
    # A cell of its own; the others are joined with others in the model, whose weight the directions are of.
    of_own = [path for path in first.paths if path.endswith(".wo")]
    assert of_own and all(initializers.has_orthonormal_columns(first.tensors[path, "B"]) for path in of_own)


@shows("mica", "llama")
def test_a_resumed_run_of_mica_is_the_one_that_was_never_stopped(mica):
    name = f"lora_checkpoint/step_{STEPS}"
    tiny_runs.assert_same_state(mica.whole / name, mica.resumed / name)
    losses = tiny_runs.losses(mica.whole)
    assert tiny_runs.losses(mica.resumed) == {step: losses[step] for step in range(17, STEPS + 1)}


def test_a_checkpoint_of_a_trained_adapter_is_not_started_over(run, frozen_a):
    process, _ = run("again", {"lora_init": "pissa"}, [{"type": "LoraCheckpoint"}], load_checkpoint=frozen_a.path)
    assert process.returncode == 1
    assert "B is not zero at " in process.stderr and "which lora_init 'pissa' would overwrite" in process.stderr


def pet_model(make_llama, **keys):
    """Returns MindFormers' network as a YAML with these keys of pet_config gives it, weights as seed 1 gives them."""
    from mindformers.pet import get_pet_model

    from mindlora.training.launch import hooks  # noqa: F401

    ms.set_seed(1)
    network = make_llama()
    networks.randomize([p for p in network.get_parameters() if p.name.endswith("weight") and "norm" not in p.name])
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(0.2 * parameter.asnumpy()))
    return (
        get_pet_model(
            network, {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 6, "target_modules": ".*wq|.*w2", **keys}
        )
        if keys
        else network
    )


@pytest.mark.parametrize(
    "keys, a_deviation, b_deviation",
    [
        ({"lora_init": "kaiming"}, 1 / np.sqrt(3 * 32), 0),
        ({"lora_init": "gaussian"}, 1 / 4, 0),
        ({"lora_init": "orthogonal"}, 0.1 * np.sqrt(0.5), 0.1 * np.sqrt(0.5)),
        ({"lora_a_init": "ones"}, 0, 0),
        ({"lora_b_init": "normal"}, 1 / np.sqrt(3 * 32), 0.01),
    ],
)
def test_each_start_of_a_pet_config_is_used(make_llama, keys, a_deviation, b_deviation):
    halves = zip(
        *(
            cell.lora_parameters()
            for path, cell in tree.lora_cells(pet_model(make_llama, **keys))
            if path.endswith("wq")
        )
    )
    a, b = (np.concatenate([parameter.asnumpy() for parameter in half]) for half in halves)
    np.testing.assert_allclose([a.std(), b.std()], [a_deviation, b_deviation], rtol=0.25)
    assert keys != {"lora_a_init": "ones"} or (a == 1).all()


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora", "mica"])
def test_each_start_of_a_pet_config_that_needs_the_base_is_used(make_llama, init):
    network = pet_model(make_llama, lora_init=init)
    before = {path: cell.weight.asnumpy().copy() for path, cell in tree.lora_cells(network)}
    assert len(initialize_adapters(network)) == 4
    for path, cell in tree.lora_cells(network):
        for parameter, expected in zip(cell.lora_parameters(), initializers.of_base(init, before[path], 4, 6 / 4)):
            np.testing.assert_array_equal(parameter.asnumpy(), expected)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_same_yaml_evaluates_what_it_trained(make_llama, tmp_path, rslora, pynative_mode):
    """With adapter_path, the network is built for the plain LoRA that was saved, whatever the initialization was."""
    trained = pet_model(make_llama)
    apply_lora(
        trained,
        LoraConfig(lora_rank=4, lora_alpha=6, target_modules=["wq", "w2"], lora_init="pissa", use_rslora=rslora),
    )
    freeze_base(trained)
    initialize_adapters(trained)
    networks.randomize([p for p in trained.trainable_params() if p.name.endswith("lora_b")])
    save_lora(trained, str(tmp_path / "adapter"))
    evaluated = pet_model(make_llama, lora_init="pissa", use_rslora=rslora, adapter_path=str(tmp_path / "adapter"))
    ids = Tensor(np.arange(16, dtype=np.int32)[None] + 3)
    expected, found = (network.set_train(False)(ids)[0].asnumpy() for network in (trained, evaluated))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert {cell.lora_rank for _, cell in tree.lora_cells(evaluated)} == {8}
    assert initialize_adapters(evaluated) == ()


@pytest.mark.parametrize("keys, frozen", [({"freeze_lora_a": True}, True), ({"lora_dropout": 0.0}, False)])
def test_mindformers_freezes_again_and_a_stays_frozen(make_llama, keys, frozen):
    trainable = {p.name.rpartition("_")[2] for p in pet_model(make_llama, **keys).trainable_params()}
    assert trainable == ({"b"} if frozen else {"a", "b"})


def test_a_frozen_a_is_saved_and_loaded(make_llama, tmp_path):
    network, other = (pet_model(make_llama, freeze_lora_a=True) for _ in range(2))
    networks.randomize(networks.adapters(network).values())
    save_lora(network, str(tmp_path / "adapter"))
    load_lora(other, str(tmp_path / "adapter"))
    assert networks.snapshot(other) == networks.snapshot(network)
    assert adapter_files.read(str(tmp_path / "adapter")).initialization is None
    assert {p.name for p in other.trainable_params()} == {p.name for p in network.trainable_params()}


def prepared(tmp_path, pet, callbacks, **changes):
    """Returns a YAML as mindlora-run passes it on."""
    import yaml
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.launch import preflight

    config = tiny_runs.tiny_config("unused", 2, callbacks, **changes)
    config["model"]["model_config"]["pet_config"].update(pet)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    config = MindFormerConfig(str(tmp_path / "run.yaml"))
    preflight.prepare(config)
    return config


@pytest.mark.parametrize(
    "pet, callbacks, added",
    [
        ({"lora_init": "pissa"}, [], True),
        ({"lora_init": "olora"}, [{"type": "ProgressBar"}], True),
        ({"lora_init": "pissa"}, [{"type": "LoraCheckpoint"}], False),
        ({"lora_init": "pissa_niter_4"}, [], True),
        ({"lora_init": "pissa"}, [{"type": "LoraInitialization"}], False),
        ({"lora_init": "mica"}, [], True),
        ({"lora_init": "mica"}, [{"type": "LoraCheckpoint"}], False),
        ({"lora_init": "gaussian"}, [], False),
        ({}, [], False),
        ({"lora_init": "pissa", "adapter_path": "somewhere"}, [], False),
    ],
)
def test_an_initialization_that_needs_the_base_gets_its_callback(tmp_path, pet, callbacks, added):
    config = prepared(tmp_path, pet, callbacks)
    from mindlora.training.callbacks.registry import ADDED

    types_ = sorted(callback["type"] for callback in config.callbacks)
    in_every_run = ["MFLossMonitor", *ADDED, *(["BaseCheck"] if "adapter_path" in pet else [])]
    assert types_ == sorted(
        ["LoraInitialization"] * added + in_every_run + [callback["type"] for callback in callbacks]
    )


def test_split_weights_are_refused(tmp_path):
    parallel = {"parallel_mode": 1, "enable_parallel_optimizer": True}
    with pytest.raises(ConfigError, match="^pet_config has lora_init pissa and parallel.enable_parallel_optimizer is"):
        prepared(tmp_path, {"lora_init": "pissa"}, [], parallel=parallel, use_parallel=True)
    with pytest.raises(ConfigError, match="^pet_config has lora_init mica and parallel.enable_parallel_optimizer is"):
        prepared(tmp_path, {"lora_init": "mica"}, [], parallel=parallel, use_parallel=True)
    prepared(tmp_path, {"lora_init": "gaussian"}, [], parallel=parallel, use_parallel=True)


def test_lora_checkpoint_initializes_where_there_is_one():
    from mindlora.training.callbacks import registry as plugin_callbacks

    network = networks.TinyModel(1)
    network.config = types.SimpleNamespace()
    apply_lora(network, LoraConfig(lora_rank=2, target_modules=["wq"], lora_init="pissa"))
    cell = dict(tree.lora_cells(network))["model.layers.0.attention.wq"]
    callback = plugin_callbacks.LoraInitialization()
    for callbacks, initialized in (([plugin_callbacks.LoraCheckpoint()], False), ([], True)):
        params = types.SimpleNamespace(train_network=network, list_callback=callbacks)
        callback.on_train_begin(types.SimpleNamespace(original_args=lambda params=params: params))
        assert (cell.initial_pair is not None) == initialized


def test_qlora_that_was_not_expanded_is_refused(make_llama):
    with pytest.raises(ConfigError, match="^pet_type is 'qlora', which only mindlora-run understands"):
        pet_model(make_llama, pet_type="qlora")
