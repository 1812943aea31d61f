"""Packed rows in a Llama and in a run: examples compute what they compute alone, and what cannot be is refused."""

import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.core.errors import ConfigError
from mindlora.data.conversion import Encoded
from mindlora.data.mindrecord import write_mindrecord
from mindlora.data.packing import Boundary, pack, packed_columns
from mindlora.training.report.history import read_history
from tests.support import tiny_runs
from tests.support.mcore_networks import MAKE, scaled, tiny_config, with_adapters
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.what_runs import shows

BOS, EOS, PAD = 1, 2, 3
LENGTH, SEQUENCE = 32, tiny_runs.SEQUENCE
BOUNDARIES = {"bos": Boundary(BOS, is_padding=False), "padding": Boundary(PAD, is_padding=True)}


def examples_of(boundary, count=11, longest=LENGTH + 1, seed=0):
    """Examples of odd and even lengths whose output, and in places the prompt, is learned."""
    rng = np.random.default_rng(seed)
    first = [] if boundary.is_padding else [boundary.token]
    rows = [np.r_[first, rng.integers(4, 60, length), EOS].astype(np.int32) for length in rng.integers(1, 15, count)]
    rows.append(np.r_[first, rng.integers(4, 60, longest - len(first))].astype(np.int32))
    return [Encoded(row, rng.random(len(row)) < 0.6) for row in rows]


def packed_rows(examples, boundary, seq_length=LENGTH):
    """The columns of the packed rows."""
    rows = pack(examples, boundary, seq_length)
    return list(packed_columns(rows, [row.columns(seq_length, PAD) for row in rows], boundary))


def single_rows(examples, seq_length=LENGTH):
    return [row.columns(seq_length, PAD) for row in examples]


def logits_of(network, rows, boundary, count):
    """Returns {tokens of an example: logits of its tokens}, computed in a batch of ``count`` rows; examples differ."""
    tokens = np.stack([row["input_ids"] for row in rows])
    # The model does not see the last token of a row.
    batch = np.resize(tokens[:, :-1], (count, LENGTH))
    logits, found = network(Tensor(batch))[0].asnumpy(), {}
    for row, values in zip(tokens, logits):
        starts = np.flatnonzero(row == boundary.token)
        for piece, part in zip(np.split(row, starts), np.split(values, starts)):
            example = piece[piece != PAD]
            if len(example):
                found[tuple(example)] = part[piece[: len(part)] != PAD]
    return found


@pytest.mark.parametrize("kind", BOUNDARIES)
def test_an_example_has_the_logits_that_it_has_alone(pynative_mode, make_llama, kind):
    for _ in range(2):
        check_logits(make_llama(seq_length=LENGTH, pad_token_id=PAD), kind)


@pytest.mark.parametrize("kind", BOUNDARIES)
def test_an_example_has_the_logits_that_it_has_alone_in_an_mcore_model(mindformers, kind):
    with mcore_in_pynative():
        check_logits(small_mcore_model("qwen3", LENGTH), kind)


def small_mcore_model(model, seq_length):
    """A model with adapters that add nothing yet."""
    base = scaled(MAKE[model](seq_length=seq_length, pad_token_id=PAD), 0.4)
    return with_adapters(base, lora_rank=2, lora_alpha=4, target_modules=["linear_proj"])


def check_logits(network, kind):
    """Checks a network with the mask against the same one without; the runs below have it in graphs."""
    from mindlora.training.step.packing import install_segment_mask, installed_boundary

    boundary = BOUNDARIES[kind]
    examples = examples_of(boundary)
    alone, packed = single_rows(examples), packed_rows(examples, boundary)
    assert len(packed) < len(alone) / 2
    network.set_train(False)
    expected, leaked = (logits_of(network, rows, boundary, len(alone)) for rows in (alone, packed))
    assert installed_boundary(network) is None
    install_segment_mask(network, boundary.token)
    assert installed_boundary(network) == boundary.token
    found, unpacked = (logits_of(network, rows, boundary, len(alone)) for rows in (packed, alone))
    assert found.keys() == expected.keys() and len(found) == len(examples)
    scale = max(np.abs(values).max() for values in expected.values())
    assert difference(found, expected) < 2e-6 * scale
    # Without the mask the examples see each other.
    assert difference(leaked, expected) > 0.05 * scale
    # What is not packed is as before.
    assert difference(unpacked, expected) < 2e-6 * scale


def difference(found, expected):
    # In a full row, the logits of the last token are missing.
    return max(np.abs(found[key] - expected[key][: len(found[key])]).max() for key in expected)


# A run


def mean_loss(network, rows):
    """The oracle in float64: the mean over the labels that count of rows that are not packed."""
    input_ids, labels = (np.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    logits = network(Tensor(input_ids[:, :-1]))[0].asnumpy().astype(np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = labels[:, 1:] != tiny_runs.IGNORED
    return -log_probabilities[counted, labels[:, 1:][counted]].mean()


@shows("packed", "llama")
def test_the_loss_of_a_run_is_that_of_the_examples_unpacked(tmp_path, make_llama, pynative_mode):
    network = make_llama(seq_length=SEQUENCE, num_layers=1, pad_token_id=PAD, rms_norm_eps=1e-5)
    check_losses(network, network, "bos", tiny_runs.tiny_config, tmp_path)


MCORE = [
    pytest.param(model, marks=[shows("packed", model), *others])
    for model, others in (("qwen3", []), ("qwen3_moe", [pytest.mark.long]), ("deepseek_v3", [pytest.mark.long]))
]


@pytest.mark.parametrize("model", MCORE)
def test_the_loss_of_an_mcore_run_is_that_of_the_examples_unpacked(model, tmp_path, mindformers):
    def config(data, epochs, callbacks, **changes):
        pet = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["linear_proj"]}
        return tiny_config(data, epochs, callbacks, pet, model, **changes)

    network = small_mcore_model(model, SEQUENCE)
    with mcore_in_pynative():
        check_losses(network, scaled(MAKE[model](), 0.4), "padding", config, tmp_path)


def check_losses(network, base, kind, tiny_config, tmp_path):
    """Checks the losses of a run on packed rows against those of a network with this base on the examples alone."""
    # So many examples that their rows are three micro-batches.
    boundary, count = BOUNDARIES[kind], {"bos": 29, "padding": 30}[kind]
    network.set_train(False)
    ms.save_checkpoint(base, str(tmp_path / "base.ckpt"))
    files, expected, counts = {}, {}, {}
    for seed, name in enumerate(("train", "held_out")):
        examples = examples_of(boundary, count, longest=SEQUENCE + 1, seed=seed)
        files[name], rows = str(tmp_path / f"{name}.mindrecord"), packed_rows(examples, boundary, SEQUENCE)
        write_mindrecord(rows, files[name])
        expected[name], counts[name] = mean_loss(network, single_rows(examples, SEQUENCE)), len(rows)
    assert counts["train"] % 3 == 0
    config = tiny_config(
        files["train"],
        1,
        [{"type": "HeldOutLoss", "dataset_dir": files["held_out"], "batch_size": 3}],
        load_checkpoint=str(tmp_path / "base.ckpt"),
    )
    # All rows in one step of three micro-batches, which changes nothing that the held-out loss could see.
    config["runner_config"].update(batch_size=counts["train"] // 3, gradient_accumulation_steps=3)
    config["lr_schedule"].update(learning_rate=1e-12, lr_end=1e-12)
    output = tmp_path / "output"
    process = tiny_runs.launch(config, output)
    assert process.returncode == 0, process.stderr[-3000:]
    history = read_history(str(output))
    for name, series in (("train", "loss"), ("held_out", "held_out_loss")):
        (loss,) = history.series(series)[1]
        assert loss == pytest.approx(expected[name], rel=2e-6)


# What is refused


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """MindRecords packed by bos and by padding, and one that is not packed."""
    folder = tmp_path_factory.mktemp("packed")
    rows = {kind: packed_rows(examples_of(boundary), boundary) for kind, boundary in BOUNDARIES.items()}
    rows["single"] = single_rows(examples_of(BOUNDARIES["bos"]))
    for kind, columns in rows.items():
        write_mindrecord(columns, str(folder / f"{kind}.mindrecord"))
    return {kind: str(folder / f"{kind}.mindrecord") for kind in rows}


def prepared(data, model=None, eval_data="", **changes):
    """Returns the YAML as mindlora-run prepares it."""
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.launch import preflight

    config = tiny_runs.tiny_config(data, 1, [], **changes)
    config["model"]["model_config"].update({"seq_length": LENGTH, **(model or {})})
    config["eval_dataset"]["data_loader"]["dataset_dir"] = eval_data
    config = MindFormerConfig(**config)
    preflight.prepare(config)
    return config


def test_boundary_of_files_and_folders(files, tmp_path):
    from mindlora.training.step.packing import boundary_of

    assert {kind: boundary_of(path) for kind, path in files.items()} == {"bos": BOS, "padding": PAD, "single": None}
    assert boundary_of([files["bos"], files["bos"]]) == BOS
    assert boundary_of(str(tmp_path)) is None
    folder = os.path.dirname(files["bos"])
    with pytest.raises(ConfigError, match=r"bos\.mindrecord is packed .*, but .*padding\.mindrecord is packed"):
        boundary_of(folder)
    with pytest.raises(ConfigError, match=r"single\.mindrecord is not packed, but .*bos\.mindrecord is packed"):
        boundary_of([files["single"], files["bos"]])
    (tmp_path / "x.mindrecord").write_text("text")
    with pytest.raises(ConfigError, match=r"x\.mindrecord cannot be read as a MindRecord"):
        boundary_of(str(tmp_path))


def test_preflight_takes_the_boundary_from_the_data(files):
    found = {kind: prepared(path).runner_wrapper.get("packed_boundary") for kind, path in files.items()}
    assert found == {"bos": BOS, "padding": PAD, "single": None}
    wrapper = {"type": "LoraTrainOneStepCell", "packed_boundary": PAD}
    assert prepared(files["padding"], runner_wrapper=wrapper).runner_wrapper.packed_boundary == PAD
    with pytest.raises(ConfigError, match="packed_boundary is 3, but train_dataset is packed .token 1 begins"):
        prepared(files["bos"], runner_wrapper=wrapper)
    context = {"mode": 0, "device_target": "Ascend"}
    with pytest.raises(ConfigError, match="runner_wrapper.type is MFTrainOneStepCell, which does not keep"):
        prepared(files["bos"], runner_wrapper={"type": "MFTrainOneStepCell"}, context=context)
    # Padding that the model does not know would be seen.
    with pytest.raises(ConfigError, match="pad_token_id is 0, but the padding in train_dataset is 3"):
        prepared(files["padding"], {"pad_token_id": 0})
    assert prepared(files["bos"], {"pad_token_id": 0}).runner_wrapper.packed_boundary == BOS


def test_preflight_refuses_to_evaluate_packed_data_without_a_mask(files):
    message = "eval_dataset is packed .token 3 begins an example., but MindFormers' evaluation would"
    for keys in ({"data": files["padding"], "run_mode": "eval"}, {"data": files["bos"], "do_eval": True}):
        with pytest.raises(ConfigError, match=message):
            prepared(eval_data=files["padding"], **keys)
    prepared(files["padding"], eval_data=files["padding"], do_eval=True)
    prepared(files["single"], eval_data=files["padding"])  # nothing is evaluated


def test_preflight_checks_what_flash_attention_is_told(files, tmp_path):
    model, path = {"use_eod_attn_mask_compression": True}, str(tmp_path / "rows.mindrecord")
    lengths = np.full(4, LENGTH, np.int32)
    rows = [*packed_rows(examples_of(BOUNDARIES["bos"]), BOUNDARIES["bos"])] * 2
    write_mindrecord(({**columns, "actual_seq_len": lengths} for columns in rows), path)
    with pytest.raises(ConfigError, match="input_columns lacks actual_seq_len"):
        prepared(files["bos"], model)
    dataset = {
        "data_loader": {"type": "MindDataset", "dataset_dir": path},
        "input_columns": ["input_ids", "labels", "actual_seq_len"],
        "drop_remainder": True,
    }
    with pytest.raises(ConfigError, match="runner_config.batch_size is 4: ends in actual_seq_len count"):
        prepared(path, model, train_dataset=dataset)
    runner = {"epochs": 1, "batch_size": 1, "gradient_accumulation_steps": 8}
    config = prepared(path, model, train_dataset=dataset, runner_config=runner)
    assert config.runner_wrapper.get("packed_boundary") is None


@pytest.mark.parametrize(
    "model, changes, message",
    [
        ({"use_eod_attn_mask_compression": True}, {}, "sets use_eod_attn_mask_compression: an mcore model keeps"),
        ({"use_flash_attention": False}, {}, "sets use_flash_attention: False: an mcore model keeps"),
        (
            {},
            {"use_parallel": True, "parallel": {"parallel_mode": 1}},
            "parallel.parallel_mode is 1: the mask of packed rows is made for mcore models alone or in data parallel",
        ),
    ],
)
def test_mcore_models_that_would_get_no_mask_of_their_tokens(model, changes, message, files):
    from mindlora.run.yaml_run import YamlRun
    from mindlora.training.step import packing

    config = tiny_config(files["bos"], 1, [], {"target_modules": "all-linear"}, **changes)
    config["model"]["model_config"].update(model)
    with pytest.raises(ConfigError, match=message):
        packing._check_mcore(YamlRun(config))


def test_models_that_make_no_mask_of_their_tokens(make_llama):
    from mindlora.training.step.packing import install_segment_mask

    network = make_llama(num_layers=1)
    network.config.use_ring_attention = network.config.use_attn_mask_compression = True
    with pytest.raises(ConfigError, match="sets use_attn_mask_compression, use_ring_attention: then no mask"):
        install_segment_mask(network, BOS)
    network.config.use_ring_attention = network.config.use_attn_mask_compression = False
    network.model.seq_split_num = 2
    with pytest.raises(ConfigError, match="sets parallel_config.seq_split_num: then"):
        install_segment_mask(network, BOS)
    other = Other()
    other.network = Other()
    with pytest.raises(ConfigError, match="the model is a Other: only MindFormers' LlamaForCausalLM and its mcore"):
        install_segment_mask(other, BOS)


class Other(nn.Cell):
    """A model other than a Llama."""


def test_held_out_data_must_be_packed_as_the_training_data(files, make_llama):
    from mindlora.training.step.packing import check_held_out, install_segment_mask

    network = make_llama(num_layers=1)
    check_held_out(network, files["single"])
    with pytest.raises(ConfigError, match=r"bos\.mindrecord is packed .*, but the training data is not packed so"):
        check_held_out(network, files["bos"])
    install_segment_mask(network, BOS)
    check_held_out(network, files["bos"])
    check_held_out(network, files["single"])
    with pytest.raises(ConfigError, match=r"padding\.mindrecord is packed .*, but the training data is not packed so"):
        check_held_out(network, files["padding"])
