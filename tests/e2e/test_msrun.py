"""scripts/msrun_launcher.sh: two processes train what one trains on the joined batch; failures are reported."""

import json
import pathlib
import re
import socket
import subprocess

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from mindlora.files.base.quantize import quantize_checkpoint
from mindlora.training.report.history import read_history
from tests.e2e.conftest import PYNATIVE
from tests.support.event_files import scalars_of
from tests.support.runs import (
    LAUNCHER,
    LORA_YAML,
    ROOT,
    ROWS,
    SIZE_FLAGS,
    environment,
    files,
    python,
    succeeded,
    write_rows,
)
from tests.support.what_runs import shows

SCRIPT, ENTRY = ROOT / "scripts" / "msrun_launcher.sh", ROOT / "scripts" / "run_mindformer.py"
BATCH_SIZE = 4
# Adam divides by the size of the gradient, which would hide a gradient twice as large; with a large eps it does not.
TRAINING = [
    "--config",
    LORA_YAML,
    *SIZE_FLAGS,
    "--model.model_config.pet_config.target_modules",
    ".*wq|.*w2",
    "--train_dataset.data_loader.shuffle",
    "False",
    "--epochs",
    "1",
    "--optimizer.eps",
    "1.0",
    "--lr_schedule.learning_rate",
    "4.0",
    "--lr_schedule.lr_end",
    "2.0",
]
STEPS = ROWS // (2 * BATCH_SIZE)


def msrun(folder, *arguments):
    """Runs the script in ``folder``, without mindlora installed."""
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=folder,
        env=environment(installed=False),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def unevenly_counted(tmp_path_factory):
    """A MindRecord of counting rows, of which the later ones have ever fewer labels in the loss."""
    path = tmp_path_factory.mktemp("unevenly_counted") / "train.mindrecord"
    write_rows(path, step=5, counted=np.linspace(1, 0.1, ROWS))
    return path


@pytest.fixture(scope="module")
def on_a_base(base, tmp_path_factory):
    """The flags for the tiny base in 4 bits, which every process loads whole."""
    quantized = str(tmp_path_factory.mktemp("quantized") / "base.safetensors")
    quantize_checkpoint(str(base), quantized)
    form = ("--model.model_config.pet_config.quantize_base", "nf4", "--load_ckpt_format", "safetensors")
    return [*form, "--load_checkpoint", quantized]


@pytest.fixture(scope="module")
def two(unevenly_counted, on_a_base, tmp_path_factory):
    """The folder of a run with two processes, each of which takes its batch in two micro-batches."""
    folder = tmp_path_factory.mktemp("two")
    tracked = "callbacks:\n  - {type: Trackers, report_to: tensorboard}\n"
    text = pathlib.Path(LORA_YAML).read_text(encoding="utf-8").replace("callbacks:\n", tracked)
    (folder / "tracked.yaml").write_text(text, encoding="utf-8")
    command = [
        ENTRY,
        *TRAINING,
        *("--config", folder / "tracked.yaml"),
        *on_a_base,
        "--train_dataset_dir",
        unevenly_counted,
        "--batch_size",
        BATCH_SIZE // 2,
        "--gradient_accumulation_steps",
        2,
        "--use_parallel",
        "True",
        "--parallel_config.data_parallel",
        "2",
        "--output_dir",
        folder / "output",
    ]
    run = msrun(folder, " ".join(map(str, command)), "2", free_port(), "log", "True", "300")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def one(unevenly_counted, on_a_base, tmp_path_factory):
    """The folder of a run with one process and batches twice as large."""
    folder = tmp_path_factory.mktemp("one")
    succeeded(
        python(
            [
                *LAUNCHER,
                *TRAINING,
                *PYNATIVE,
                *on_a_base,
                "--train_dataset_dir",
                unevenly_counted,
                "--batch_size",
                2 * BATCH_SIZE,
                "--output_dir",
                folder / "output",
            ],
            folder,
        )
    )
    return folder


def test_two_processes_see_the_rows_that_one_sees_in_each_batch(data):
    """MindDataset deals out the rows in turn, so the batches of two processes make one batch of a single process."""
    import mindspore.dataset as ds

    def batches(size, **shard):
        rows = ds.MindDataset(str(data.train), columns_list=["input_ids"], shuffle=False, **shard).batch(size)
        return [batch for (batch,) in rows.create_tuple_iterator(num_epochs=1, output_numpy=True)]

    joined_batches = batches(2 * BATCH_SIZE)
    first, second = (batches(BATCH_SIZE, num_shards=2, shard_id=rank) for rank in range(2))
    assert len(joined_batches) == len(first) == len(second) == STEPS
    for joined, a, b in zip(joined_batches, first, second):
        assert (joined[::2] == a).all() and (joined[1::2] == b).all()


@shows("lora", "llama", place="processes")
def test_two_processes_train_what_one_trains_on_the_joined_batch(one, two):
    assert base_values(one) == base_values(two)
    ones, twos = adapter(one), adapter(two)
    assert ones.keys() == twos.keys()
    assert all(np.abs(values).max() > 1e-4 for values in ones.values())
    assert max(np.abs(ones[name] - twos[name]).max() for name in ones) <= 5e-6
    # Both report the mean over all counted tokens of both, which is the loss of the single process.
    losses = [step_losses((two / "log" / f"worker_{rank}.log").read_text()) for rank in range(2)]
    assert len(losses[0]) == STEPS and losses[0] == losses[1]
    recorded = read_history(str(one / "output")).series("loss")[1]
    np.testing.assert_allclose(losses[0], recorded, atol=2e-6)


def test_rank_0_alone_writes(two):
    logs = [(two / "log" / f"worker_{rank}.log").read_text() for rank in range(2)]
    assert ["Adapter of step" in log for log in logs] == [True, False]
    assert ["The run is in" in log for log in logs] == [True, False]
    history = read_history(str(two / "output"))
    assert history.series("loss")[0].tolist() == list(range(1, STEPS + 1))
    assert (history.series("bytes_exchanged")[1] > 0).all() and history.runs[0]["run"]["machine"]["processes"] == 2
    assert {name.split("/")[1] for name in files(two / "output") if name.startswith("lora_checkpoint")} == {
        "best",
        f"step_{STEPS}",
    }


def test_rank_0_alone_sends_to_trackers(two):
    (events,) = two.rglob("events.out.tfevents*")
    assert events.parent == two / "output" / "tensorboard"
    scalars = scalars_of(events.parent)
    steps, losses = read_history(str(two / "output")).series("loss")
    assert [scalars["loss", step] for step in steps] == pytest.approx(list(losses), rel=1e-6)


def test_a_failure_of_the_workers_is_reported(tmp_path):
    (tmp_path / "worker.py").write_text("raise SystemExit('mindlora-run: error: there is no data.')")
    run = msrun(tmp_path, "worker.py", "2", free_port(), "log", "True", "60")
    assert run.returncode != 0
    # Whichever worker fails first ends the other, so the last line says whose log has the reason.
    last = re.fullmatch(
        r"msrun_launcher\.sh: error: msrun ended with exit code \d+, see (log/worker_\d\.log)\.",
        run.stderr.splitlines()[-1],
    )
    assert "mindlora-run: error: there is no data." in (tmp_path / last[1]).read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "it takes 1, 2, 6 or 9 arguments, and got 0."),
        ([f"{ENTRY}", "2", "8118", "log"], "it takes 1, 2, 6 or 9 arguments, and got 4."),
        ([f"{ENTRY}", "two"], "WORKER_NUM is 'two', it must be a number from 1 to 999999."),
        ([f"{ENTRY}", "1"], f"one worker needs no msrun: python {ENTRY}"),
        ([f"{ENTRY}", "2", "80", "log", "True", "9"], "MASTER_PORT is '80', it must be a number from 1024 to 65535."),
        ([f"{ENTRY}", "2", "8118", "log", "yes", "9"], "JOIN is 'yes', it must be True or False."),
        (
            [f"{ENTRY}", "4", "8", "127.0.0.1", "8118", "0", "log", "True", "9"],
            "LOCAL_WORKER is '8', it must be a number from 1 to 4.",
        ),
        (["nowhere.py --config x.yaml", "2"], "nowhere.py, which EXECUTE_ORDER starts with, is not a file in"),
        ([f"{ENTRY} 'x", "2"], "EXECUTE_ORDER cannot be split into words"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, arguments, message):
    run = msrun(tmp_path, *arguments)
    assert run.returncode == 1
    assert message in run.stderr.splitlines()[-1]
    assert ("Usage" in run.stderr) == (len(arguments) not in (1, 2, 6, 9))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def recorded_msrun(tmp_path):
    """Returns a function that runs the script with a python that only prints how msrun was called."""
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "python"
    stub.write_text(f"""#!/usr/bin/env bash
if [ "$1" = -c ]; then
    [[ $2 == *mindspore* ]] && exit 0
    exec "{environment()["PATH"].split(":")[0]}/python" "$@"
fi
printf '%s\\n' "$@"
exit 7
""")
    stub.chmod(0o755)

    def run(*arguments):
        values = environment(installed=False)
        values["PATH"] = f"{tmp_path / 'bin'}:{values['PATH']}"
        done = subprocess.run(
            ["bash", SCRIPT, *arguments],
            cwd=tmp_path,
            env=values,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 7
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            [],
            {
                "worker_num": "8",
                "local_worker_num": "8",
                "master_addr": "127.0.0.1",
                "master_port": "8118",
                "node_rank": "0",
                "log_dir": "output/msrun_log",
                "join": "True",
                "cluster_time_out": "7200",
            },
        ),
        (["4"], {"worker_num": "4", "local_worker_num": "4", "join": "True"}),
        (
            ["4", "9001", "my log", "False", "30"],
            {
                "worker_num": "4",
                "local_worker_num": "4",
                "master_port": "9001",
                "log_dir": "my log",
                "join": "False",
                "cluster_time_out": "30",
            },
        ),
        (
            ["16", "8", "10.0.0.2", "9001", "1", "l", "True", "30"],
            {
                "worker_num": "16",
                "local_worker_num": "8",
                "master_addr": "10.0.0.2",
                "master_port": "9001",
                "node_rank": "1",
                "log_dir": "l",
                "join": "True",
                "cluster_time_out": "30",
            },
        ),
    ],
)
def test_msrun_gets_what_the_positions_mean(recorded_msrun, arguments, expected):
    order = f"{ENTRY} --config 'a b.yaml' --model.model_config.pet_config.target_modules .*wq|.*wk --x \"$(exit 3)\""
    words = recorded_msrun(order, *arguments)
    assert words[:2] == ["-m", "mindspore.parallel.cluster.run"]
    found = dict(word[2:].split("=", 1) for word in words[2 : words.index("python")])
    assert {key: found[key] for key in expected} == expected
    assert words[words.index("python") :] == [
        "python",
        str(ENTRY),
        "--config",
        "a b.yaml",
        "--model.model_config.pet_config.target_modules",
        ".*wq|.*wk",
        "--x",
        "$(exit 3)",
    ]


# Helpers


def adapter(folder):
    return load_file(folder / "output" / "lora_checkpoint" / f"step_{STEPS}" / "adapter_model.safetensors")


def base_values(folder):
    """Returns the fingerprint of the base's values in an adapter file."""
    path = folder / "output" / "lora_checkpoint" / f"step_{STEPS}" / "adapter_model.safetensors"
    with safe_open(path, framework="np") as file:
        values = json.loads(file.metadata()["mindlora"])["base_fingerprint"]["values"]
    assert re.fullmatch("[0-9a-f]{16}", values)
    return values


def step_losses(text):
    return [float(loss) for loss in re.findall(r"loss:\[([\d.]+)/", text)]
