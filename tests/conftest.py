"""Shared by all tests: a quiet MindSpore, and each test's output away from the checkout."""

import contextlib
import functools
import gc
import logging
import os
import shutil
import sys
import tempfile

# Before MindSpore is imported: no spinning worker threads on few cores, and errors alone in its log.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("GLOG_v", "3")
# Processes that find each other ask again after a second, not after three to five.
os.environ.setdefault("MS_RETRY_INTERVAL_LOWER", "1")
os.environ.setdefault("MS_RETRY_INTERVAL_UPPER", "1")
# MindSpore 2.9 can be far slower in convolutions where its oneDNN may use AVX-512 (docs/diffusion.md).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# Before Hugging Face's libraries are: no test asks the network for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Where Python is told to keep no bytecode, each process of a run compiles all of mindlora again: a sixth of a tiny run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Side by side, each process has one of the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else MindFormers, once a test has imported it, logs into output/ under whatever folder a later test works in.
os.environ.setdefault("LOG_MF_PATH", tempfile.mkdtemp(prefix="mindlora-test-log-"))

import pytest  # noqa: E402

# Else an assert in a module that holds no test says nothing of its values.
pytest.register_assert_rewrite(
    "tests.support.networks",
    "tests.support.plain_networks",
    "tests.support.refusals",
    "tests.support.saved_adapters",
    "tests.support.served_requests",
    "tests.support.tiny_runs",
)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.support import forked, what_runs  # noqa: E402

# Folders whose files share what takes long to make: PEFT's answers, a server, kernels compiled for the model.
# With several processes (pytest -n 2) all of such a folder runs in one of them.
TOGETHER = ("tests/clients", "tests/peers", "tests/trackers", "tests/ops/ascendc", "tests/ops/ascendc_model")
# What takes longest, so that none of it is left at the end.
FIRST = ("tests/e2e", "tests/ascend_backend", *TOGETHER, "tests/training", "tests/scripts", "tests/test_document")
# What `-m quick` runs, for each change: these folders and the files beside this one.
QUICK = ("data/", "files/", "models/", "run/checks/", "run/configs/")
# What takes ten seconds and more of a core there.
NOT_QUICK = (
    *("files/adapters/test_damaged_adapters.py", "files/adapters/test_files_fuzz.py"),
    *("files/adapters/test_peft_corpus.py", "test_documented_runs.py"),
)
# What takes twenty seconds and more of a core, and CI leaves out.
LONG = (
    "tests/ascend_backend/test_mindformers_data.py::test_rows_that_mindformers_packs",
    "tests/ascend_backend/test_training.py::test_the_llama_yaml_trains",
    "tests/e2e/test_adapters.py::test_each_adapter",
    "tests/e2e/test_alora.py::test_two_processes",
    "tests/e2e/test_classifier_runs.py::test_two_processes",
    "tests/e2e/test_eval.py",
    "tests/e2e/test_guarded_runs.py::test_poisoned_batches",
    "tests/e2e/test_preference_runs.py::test_two_processes",
    "tests/e2e/test_qlora.py::test_it_ends_at_the_loss",
    "tests/e2e/test_rl_ranks.py::test_a_resumed_run",
    "tests/examples/test_text_to_image.py::test_the_program_runs",
    "tests/ops/test_ascend_pynative.py::test_the_source_compiles",
    "tests/training/adalora/test_runs.py::test_two_processes",
    "tests/scripts/test_bench_scale.py",
    "tests/scripts/test_bench_start.py",
    "tests/test_documented_runs.py::test_commands_with_a_model_are_done",
    "tests/test_documents.py::test_what_dividing_a_model_saves_is_what_plan_says",
    "tests/training/rl/test_distillation.py::test_a_resumed_run_learns_the_same_from_its_teacher",
    "tests/training/several/test_mcore_runs.py",
    "tests/training/several/test_rl_runs.py::test_a_llama_s_adapter",
    "tests/training/several/test_rl_runs.py::test_an_adapter_learns_the_whole_distribution",
)


def _is_quick(path):
    """Returns whether a test file is one of those that `-m quick` runs."""
    file = os.path.relpath(path, os.path.dirname(os.path.abspath(__file__))).replace(os.sep, "/")
    return ("/" not in file or file.startswith(QUICK)) and not file.startswith(NOT_QUICK)


def pytest_ignore_collect(collection_path, config):
    """With `-m quick`, leaves the other files alone: to import them takes as long as the quick tests."""
    if config.option.markexpr == "quick" and collection_path.is_file() and not _is_quick(collection_path):
        return True
    return None


def pytest_configure(config):
    """Makes the folder of graphs for all runs, and lets pytest-xdist keep the order of the tests below."""
    if forked.GRAPHS not in os.environ:
        os.environ[forked.GRAPHS] = tempfile.mkdtemp(prefix="mindlora-test-graphs-")
        config.add_cleanup(functools.partial(shutil.rmtree, os.environ[forked.GRAPHS], ignore_errors=True))
    # No command of a test keeps its graphs where a user's are.
    os.environ.setdefault("MINDLORA_GRAPH_CACHE", "")
    config.addinivalue_line("markers", "quick: what a change runs while it is made; tests/conftest.py says which files")
    config.addinivalue_line("markers", "shows: a feature at work; tests/support/what_runs.py has the names")
    config.addinivalue_line("markers", "long: what CI leaves out; tests/conftest.py says which tests")
    if getattr(config.option, "numprocesses", None):
        config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives each process of pytest-xdist whole files, or whole folders of TOGETHER, so that fixtures are made once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)

    return ByFile(config, log)


def pytest_collection_modifyitems(config, items):
    """Marks what is quick and what is long; with several processes, puts the tests of FIRST first."""
    for item in items:
        if _is_quick(item.path):
            item.add_marker("quick")
        if item.nodeid.startswith(LONG):
            item.add_marker("long")
    what_runs.record(items, ran=False)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Records what a test has shown, for the page that says what runs."""
    report = (yield).get_result()
    if report.when == "call" and report.passed:
        what_runs.record([item], ran=True)


@pytest.fixture(autouse=True)
def _working_folder(tmp_path, monkeypatch):
    # MindFormers writes output/ under the working folder.
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _plain_log():
    # Once a test has imported the plug-in, the core's messages go to MindFormers' log; each test starts without that.
    logger = logging.getLogger("mindlora")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _no_configuration():
    # What mindlora-run would be told by its YAML, an earlier test of this process may have left.
    remembered = sys.modules.get("mindlora.training.run_configuration")
    if remembered:
        remembered.remember_configuration({})


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_not_searched_again():
    # MindSpore calls the garbage collector before each graph that it compiles, which took longer than to compile.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _pynative_takes_one_core():
    # Else its threads spin while they wait for each other: twenty times the work, of cores that other tests need.
    # What runs in a process of its own is not told, and launches its operators as a user's program does.
    mindspore = sys.modules.get("mindspore")
    if mindspore:
        mindspore.runtime.launch_blocking()


def _set_mode(mode):
    mindspore = sys.modules.get("mindspore")
    if mindspore and mindspore.get_context("mode") != mode:
        mindspore.set_context(mode=mode)


@pytest.fixture(scope="module", autouse=True)
def _each_module_begins_in_pynative():
    # As MindSpore does: else tests that name no mode compile graphs where a module before them has left graph mode.
    _set_mode(1)


@pytest.fixture(autouse=True)
def _the_mode_of_a_test_ends_with_it():
    mindspore = sys.modules.get("mindspore")
    before = mindspore.get_context("mode") if mindspore else 1
    yield
    _set_mode(before)


@contextlib.contextmanager
def in_mode(mode):
    """Runs what it holds in graph mode (0) or in PyNative (1)."""
    import mindspore as ms

    before = ms.get_context("mode")
    ms.set_context(mode=mode)
    try:
        yield mode
    finally:
        ms.set_context(mode=before)


@pytest.fixture(params=[0, 1], ids=["graph", "pynative"])
def mode(request):
    """Runs a test in graph mode and in PyNative."""
    with in_mode(request.param):
        yield request.param


@pytest.fixture(scope="module")
def module_in_graph_mode(mindformers):
    """Runs the tests of a module, and what its fixtures make, in graph mode."""
    with in_mode(0):
        yield


@pytest.fixture
def graph_mode():
    """Runs a test in graph mode alone."""
    with in_mode(0):
        yield


@pytest.fixture
def pynative_mode():
    """Runs a test in PyNative alone."""
    with in_mode(1):
        yield


@pytest.fixture(scope="session")
def library():
    """The CPU library, built where it is missing or older than its sources; one that is given is taken as it is."""
    # Imported here: some tests need no MindSpore.
    from mindlora.ops import build
    from tests.support import native
    from tests.support.operator_process import GIVEN_LIBRARY

    if not GIVEN_LIBRARY and not build.is_current(native.LIBRARY):
        build.build(native.LIBRARY)
    return native.library()


@pytest.fixture(scope="session")
def mindformers(tmp_path_factory):
    """The package, imported where its log may go."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("mindformers"))
    try:
        import mindformers as package
    finally:
        os.chdir(before)
    return package


@pytest.fixture(scope="session")
def make_llama(mindformers):
    """Returns a function that builds a LlamaForCausalLM small enough for a CPU; keys override its LlamaConfig's."""
    from tests.support.cpu_llama import ON_CPU

    def make(**keys):
        config = {
            "batch_size": 1,
            "seq_length": 16,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "n_kv_heads": 2,
            "vocab_size": 64,
            "intermediate_size": 48,
            "pad_token_id": 0,
            **ON_CPU,
            **keys,
        }
        return mindformers.LlamaForCausalLM(mindformers.LlamaConfig(**config))

    return make


@pytest.fixture
def semi_auto_parallel():
    """Four devices in name, so that strategies can be set; nothing is run on them."""
    import mindspore as ms

    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=4, global_rank=0)
    yield
    ms.reset_auto_parallel_context()


@pytest.fixture
def saved(tmp_path):
    """An adapter folder of ``saved_adapters.network(seed=2)``."""
    from mindlora import save_lora
    from tests.support.saved_adapters import network

    path = str(tmp_path / "adapter")
    save_lora(network(seed=2), path)
    return path


@pytest.fixture
def saved_ckpt(tmp_path):
    """The same as a .ckpt file."""
    from mindlora import save_lora
    from tests.support.saved_adapters import network

    path = str(tmp_path / "adapter.ckpt")
    save_lora(network(seed=2), path, format="ckpt")
    return path


@pytest.fixture
def reference(request, library):
    """The reference.py of the operator that the test file is named after, or that it calls OPERATOR."""
    from tests.support.references import reference_of

    return reference_of(getattr(request.module, "OPERATOR", request.module.__name__.rpartition("test_")[2]))


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    """A folder with a small tokenizer of Hugging Face's, trained on the two rows."""
    from mindlora.data import alpaca, tokenizers
    from tests.support.instruction_rows import CHINESE, ENGLISH

    path = tmp_path_factory.mktemp("tokenizer") / "bpe"
    texts = [record[field] for record in (CHINESE, ENGLISH) for field in alpaca.FIELDS] * 2
    tokenizers.train_tokenizer(texts, 300, str(path))
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    """The tokenizer itself."""
    from mindlora.data import tokenizers

    return tokenizers.load_tokenizer(tokenizer_path)
