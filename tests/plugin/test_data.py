"""From instruction triples and text to MindRecord: what is learned, what is left out, what is never half written."""
import json
import os
import pathlib
import signal
import subprocess
import sys

import mindspore.dataset
import numpy as np
import pytest

from mindlora import cli
from mindlora.plugin import data, instructions, tokenizers
from mindlora.plugin.instructions import DataError
from mindlora.plugin.tokenizers import SPECIAL_TOKENS, TokenizerError

UNK, BOS, EOS, PAD = range(4)
CHINESE = {"instruction": "这个温太医啊，也是古怪。", "input": "", "output": "你们俩话太多了，我该和温太医要一剂药。"}
ENGLISH = {"instruction": "Add the numbers.", "input": "2 and 3", "output": "2 and 3 make 5."}
# A folder with real files to try, besides those that the tests make.
REAL = pathlib.Path(os.environ.get("MINDLORA_TEST_DATA", "no folder is given"))


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "bpe"
    texts = [record[field] for record in (CHINESE, ENGLISH) for field in instructions.FIELDS] * 2
    tokenizers.train_tokenizer(texts, 300, str(path))
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    return tokenizers.load_tokenizer(tokenizer_path)


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text.txt").write_text("\n".join([*CHINESE.values(), *ENGLISH.values()] * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(input=str(folder / "text.txt"), model_prefix=str(folder / "tokenizer"),
                                             vocab_size=350, model_type="bpe", byte_fallback=True, minloglevel=2)
    return str(folder / "tokenizer.model")


def as_json(path, records):
    path.write_text(json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-8")
    return str(path)


def as_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def read_back(path):
    rows = mindspore.dataset.MindDataset(str(path), columns_list=["input_ids", "labels"], shuffle=False)
    return list(rows.create_dict_iterator(num_epochs=1, output_numpy=True))


def learned(row, tokenizer):
    return tokenizer.decode(row["labels"][row["labels"] != data.IGNORE_TOKEN_ID].tolist())


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# What is in a row

@pytest.mark.parametrize("record", [CHINESE, ENGLISH])
@pytest.mark.parametrize("template", ["alpaca", "plain"])
def test_only_the_output_and_eos_are_learned(tmp_path, tokenizer, record, template):
    output = tmp_path / "x.mindrecord"
    source = as_json(tmp_path / "in.json", [record])
    data.convert_alpaca(source, str(output), tokenizer, 400, template=template)
    row, = read_back(output)
    assert row["input_ids"].dtype == row["labels"].dtype == np.int32
    assert row["input_ids"].shape == row["labels"].shape == (401,)
    assert learned(row, tokenizer) == record["output"] + "</s>"
    tokens = row["input_ids"][row["input_ids"] != PAD]
    prompt = instructions.prompt_template(template).prompt(record)
    assert tokenizer.decode(tokens.tolist()) == "<s>" + prompt + record["output"] + "</s>"
    # In place: a label is the token at its own position.
    counted = row["labels"] != data.IGNORE_TOKEN_ID
    assert (row["labels"][counted] == row["input_ids"][counted]).all()
    assert counted.sum() == counted[:len(tokens)][::-1].argmin()


def test_columns_pad_and_mask_exactly():
    encoded = data.Encoded(np.array([1, 10, 11, 20, 2], np.int32), 3)
    columns = encoded.columns(6, pad_token_id=9, ignore_token_id=-1)
    assert columns["input_ids"].tolist() == [1, 10, 11, 20, 2, 9, 9]
    assert columns["labels"].tolist() == [-1, -1, -1, 20, 2, -1, -1]


def test_a_row_may_have_one_token_more_than_the_model(tmp_path, tokenizer):
    length = len(data.encode_row(ENGLISH, tokenizer, "plain").tokens)
    source = as_json(tmp_path / "in.json", [ENGLISH])
    report = data.convert_alpaca(source, str(tmp_path / "fits.mindrecord"), tokenizer, length - 1, template="plain")
    assert (report.rows, report.longest, report.skipped) == (1, length, {})
    message = rf"no row that can be used\. more than {length - 1} tokens: 1 \(row 1 at line 2\)"
    with pytest.raises(DataError, match=message):
        data.convert_alpaca(source, str(tmp_path / "short.mindrecord"), tokenizer, length - 2, template="plain")


def test_the_loss_of_llama_is_the_mean_over_the_labels(tmp_path, tokenizer):
    import mindspore as ms
    from mindformers import LlamaConfig, LlamaForCausalLM
    from mindformers.dataset import CausalLanguageModelDataset
    from mindformers.tools.register import MindFormerConfig

    mode = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    output = tmp_path / "x.mindrecord"
    report = data.convert_alpaca(as_json(tmp_path / "in.json", [ENGLISH, CHINESE]), str(output), tokenizer, 160,
                                 template="plain")
    dataset = CausalLanguageModelDataset(dataset_config=MindFormerConfig(
        data_loader={"type": "MindDataset", "dataset_dir": str(output), "shuffle": False}, batch_size=2,
        input_columns=["input_ids", "labels"], drop_remainder=True, num_parallel_workers=1,
        python_multiprocessing=False))
    input_ids, labels = next(dataset.create_tuple_iterator(num_epochs=1))
    network = LlamaForCausalLM(LlamaConfig(
        seq_length=160, batch_size=2, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32,
        vocab_size=report.vocab_size, pad_token_id=report.pad_token_id, use_flash_attention=False, fused_rms_norm=False,
        use_rope_slice=True, use_past=False, **{kind: "float32" for kind in (
            "compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype", "param_init_type")}))
    loss = float(network.set_train(True)(input_ids, labels).asnumpy().item())
    logits = network.set_train(False)(input_ids[:, :-1], labels[:, 1:])[0].asnumpy().astype(np.float64)
    ms.set_context(mode=mode)
    targets = labels.asnumpy()[:, 1:]
    counted = targets != data.IGNORE_TOKEN_ID
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert counted.sum() == report.trained_tokens
    assert loss == pytest.approx(-log_probabilities[counted, targets[counted]].mean(), rel=1e-5)


# Tokenizers

def test_a_trained_tokenizer_loads_in_transformers_and_reads_any_text_back(tokenizer_path):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer_path)
    assert tuple(loaded.convert_ids_to_tokens([UNK, BOS, EOS, PAD])) == SPECIAL_TOKENS
    assert (loaded.unk_token_id, loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (UNK, BOS, EOS, PAD)
    for text in ("  温太医\n\t 𠮷 é {x} 'quoted' ,  end ", "starts with a letter"):
        assert loaded.decode(tokenizers.encode(loaded, text)) == text
        assert loaded(text)["input_ids"] == [BOS] + tokenizers.encode(loaded, text)
    assert len(loaded) <= 300


def test_a_tokenizer_is_not_trained_over_other_things(tmp_path):
    folder = tmp_path / "t"
    tokenizers.train_tokenizer(["ab ab"], 260, str(folder))
    with pytest.raises(TokenizerError, match="exists already"):
        tokenizers.train_tokenizer(["ab ab"], 260, str(folder))
    tokenizers.train_tokenizer(["cd cd"], 261, str(folder), overwrite=True)
    assert len(tokenizers.load_tokenizer(str(folder))) == 261
    (folder / "weights.ckpt").write_text("precious")
    with pytest.raises(TokenizerError, match="other things.*weights.ckpt"):
        tokenizers.train_tokenizer(["ab ab"], 260, str(folder), overwrite=True)
    with pytest.raises(TokenizerError, match="259 is too small.*260"):
        tokenizers.train_tokenizer(["ab ab"], 259, str(tmp_path / "u"))
    with pytest.raises(TokenizerError, match="no text"):
        tokenizers.train_tokenizer(["", ""], 260, str(tmp_path / "u"))
    assert names(tmp_path) == ["t"]


def test_a_sentencepiece_model_goes_through_mindformers(tmp_path, sentencepiece_model):
    output = tmp_path / "x.mindrecord"
    source = as_json(tmp_path / "in.json", [CHINESE, ENGLISH])
    report = data.convert_alpaca(source, str(output), os.path.dirname(sentencepiece_model), 100, template="plain")
    loaded = tokenizers.load_tokenizer(sentencepiece_model)
    assert type(loaded).__module__.startswith("mindformers.")
    assert (report.rows, report.vocab_size, report.pad_token_id) == (2, 350, 0)
    for row, record in zip(read_back(output), (CHINESE, ENGLISH)):
        assert row["input_ids"][0] == loaded.bos_token_id
        # sentencepiece normalizes by NFKC unless trained otherwise, as Llama's own is.
        assert learned(row, loaded).strip() == record["output"].replace("，", ",") + "</s>"


def test_special_tokens_that_are_missing(tmp_path, tokenizer_path):
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(pathlib.Path(tokenizer_path, "tokenizer.json").read_bytes())
    source = as_json(tmp_path / "in.json", [ENGLISH])
    with pytest.raises(TokenizerError, match='no end-of-sequence token: set "eos_token"'):
        data.convert_alpaca(source, str(tmp_path / "x.mindrecord"), str(folder), 300)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    report = data.convert_alpaca(source, str(tmp_path / "x.mindrecord"), str(folder / "tokenizer.json"), 300)
    assert report.pad_token_id == EOS
    assert [note.split(":")[0] for note in report.notes] == ["the tokenizer has no begin-of-sequence token",
                                                             "the tokenizer has no pad token"]
    row, = read_back(report.output)
    assert row["input_ids"][0] != BOS and row["input_ids"][-1] == EOS and row["labels"][-1] == data.IGNORE_TOKEN_ID


@pytest.mark.parametrize("name, content, message", [
    ("missing", None, "there is no such file or folder"),
    ("notes.txt", "x", "file of another kind"),
    ("folder/readme.md", "x", r"No tokenizer in the folder .*holds readme\.md"),
    ("tokenizer.json", "{", "cannot load"),
    ("tokenizer.model", "junk", "sentencepiece cannot load"),
])
def test_what_is_no_tokenizer(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    path = path.parent if path.parent != tmp_path else path
    with pytest.raises(TokenizerError, match=message) as caught:
        tokenizers.load_tokenizer(str(path))
    assert str(path) in str(caught.value)


# Reading

def test_lines_of_every_layout(tmp_path):
    listed = tmp_path / "a.json"
    listed.write_text('\n[{"instruction": "a\\n[,{"},\n\n  {"x":\n1}, 3\n,"]"]\n')
    assert [row.place for row in instructions.read_rows(str(listed))] == [
        "row 1 at line 2", "row 2 at line 4", "row 3 at line 5", "row 4 at line 6"]
    lines = tmp_path / "a.jsonl"
    # U+2028 ends a line for str.splitlines, but not in JSON.
    lines.write_text('\ufeff{"instruction": "a\u2028b"}\r\n\n7\n', encoding="utf-8")
    assert instructions.read_rows(str(lines)) == [("line 1", {"instruction": "a\u2028b"}), ("line 3", 7)]
    seeds = as_jsonl(tmp_path / "s.jsonl", [
        {"id": 1, "instruction": "i", "instances": [{"input": "1", "output": "a"}, {"input": "2", "output": "b"}, 5]}])
    assert [(row.place, instructions.row_problem(row.record)) for row in instructions.read_rows(seeds)] == [
        ("line 1 (instance 1)", None), ("line 1 (instance 2)", None), ("line 1 (instance 3)", "not an object")]
    assert instructions.read_rows(seeds)[1].record == {"id": 1, "instruction": "i", "input": "2", "output": "b"}


@pytest.mark.parametrize("name, content, message", [
    ("a.json", b'[{"a": 1},\n {"b" 2}]', "not valid JSON at line 2, column 7"),
    ("a.jsonl", b'{"a": 1}\n\n{"b" 2}\n', "not valid JSON at line 3, column 6"),
    ("a.json", b'{"a": 1}', "holds a JSON dict, not a list"),
    ("a.json", b"[]", "holds no rows"),
    ("a.jsonl", b"\n", "holds no rows"),
    ("a.json", b"[\xff]", "not UTF-8: byte 1"),
    ("a.csv", b"a,b", r"ends in \.json .* or \.jsonl"),
    ("a.json", None, "There is no file"),
])
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        instructions.read_rows(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


BAD_RECORDS = [
    (5, "not an object"),
    ({"instruction": "a", "output": "b"}, 'no "input"'),
    ({"instruction": "a", "input": ""}, 'no "output"'),
    ({"input": "", "output": "b"}, 'no "instruction"'),
    ({"instruction": "a", "input": None, "output": "b"}, '"input" is not a string'),
    ({"instruction": "a", "input": "", "output": " \n"}, 'empty "output"'),
    ({"instruction": "", "input": " ", "output": "b"}, 'empty "instruction" and "input"'),
    ({"instruction": "\ud800", "input": "", "output": "b"}, "not valid Unicode"),
    ({"instruction": "a", "instances": []}, '"instances" is not a list with entries'),
    ({"instruction": "a", "input": "", "output": "b " * 400}, "more than 101 tokens"),
]


@pytest.mark.parametrize("record, reason", BAD_RECORDS)
def test_each_bad_row_is_skipped_and_named(tmp_path, tokenizer, record, reason):
    source = as_jsonl(tmp_path / "in.jsonl", [ENGLISH, record, ENGLISH])
    output = tmp_path / "x.mindrecord"
    report = data.convert_alpaca(source, str(output), tokenizer, 100, template="plain")
    assert report.skipped == {reason: ["line 2"]}
    assert f"skipped, {reason}: 1 (line 2)" in str(report)
    assert report.rows == len(read_back(output)) == 2


@pytest.mark.parametrize("record, reason", BAD_RECORDS)
def test_strict_writes_nothing(tmp_path, record, reason):
    source = as_jsonl(tmp_path / "in.jsonl", [ENGLISH, record])
    with pytest.raises(DataError, match="strict") as caught:
        data.convert_alpaca(source, str(tmp_path / "x.mindrecord"), str(tmp_path / "t"), 100, template="plain",
                            train_vocab_size=260, strict=True)
    assert f"{reason}: 1 (line 2)" in str(caught.value)
    assert names(tmp_path) == ["in.jsonl"]


def test_only_bad_rows_is_an_error(tmp_path, tokenizer):
    source = as_jsonl(tmp_path / "in.jsonl", [1] * 12)
    with pytest.raises(DataError, match=r"no row that can be used\. not an object: 12 \(line 1, .*line 10, \.\.\.\)"):
        data.convert_alpaca(source, str(tmp_path / "x.mindrecord"), tokenizer, 100)
    assert names(tmp_path) == ["in.jsonl"]


def test_truncate_cuts_the_output_but_never_the_prompt(tmp_path, tokenizer):
    long_output = {**ENGLISH, "output": "word " * 200}
    long_prompt = {**ENGLISH, "instruction": "word " * 200}
    source = as_jsonl(tmp_path / "in.jsonl", [ENGLISH, long_output, long_prompt])
    report = data.convert_alpaca(source, str(tmp_path / "x.mindrecord"), tokenizer, 100, template="plain",
                                 truncate=True)
    assert report.truncated == ["line 2"]
    assert report.skipped == {"a prompt of more than 100 tokens": ["line 3"]}
    cut = read_back(report.output)[1]
    assert len(cut["input_ids"]) == 101 and EOS not in cut["input_ids"] and cut["labels"][-1] == cut["input_ids"][-1]
    assert long_output["output"].startswith(learned(cut, tokenizer))
    # The shortest that can be learned from: all of the prompt and one token of the output.
    shortest = data.encode_row(ENGLISH, tokenizer, "plain").prompt_length
    source = as_json(tmp_path / "one.json", [ENGLISH])
    report = data.convert_alpaca(source, str(tmp_path / "y.mindrecord"), tokenizer, shortest, template="plain",
                                 truncate=True)
    assert (report.rows, report.trained_tokens) == (1, 1)
    with pytest.raises(DataError, match=f"a prompt of more than {shortest - 1} tokens"):
        data.convert_alpaca(source, str(tmp_path / "z.mindrecord"), tokenizer, shortest - 1, template="plain",
                            truncate=True)


# Templates

def test_templates():
    with_input, without_input = {"instruction": "{Do}", "input": "{it}"}, {"instruction": "{Do}", "input": ""}
    alpaca = instructions.prompt_template("alpaca")
    assert alpaca.prompt(with_input).endswith(
        "completes the request.\n\n### Instruction:\n{Do}\n\n### Input:\n{it}\n\n### Response:")
    assert alpaca.prompt(without_input).endswith("completes the request.\n\n### Instruction:\n{Do}\n\n### Response:")
    plain = instructions.prompt_template("plain")
    assert (plain.prompt(with_input), plain.prompt(without_input)) == ("{Do}\n{it}\n", "{Do}\n")
    own = instructions.prompt_template("{{Q}} {instruction}|{input}>")
    assert (own.prompt(with_input), own.prompt(without_input)) == ("{Q} {Do}|{it}>", "{Q} {Do}|>")


@pytest.mark.parametrize("text, message", [
    ("alpacca", "neither alpaca nor plain nor a text with {instruction}"),
    ("{input}", "neither alpaca"),
    ("{instruction} {output}", r"has \{output\}"),
    ("{instruction} {}", r"has \{\}"),
    ("{instruction.upper}", r"has \{instruction.upper\}"),
    ("{instruction!r}", "with a format or a conversion"),
    ("{instruction:>9}", "with a format or a conversion"),
    ("{instruction", "expected '}'"),
])
def test_wrong_templates(text, message):
    with pytest.raises(DataError, match=message):
        instructions.prompt_template(text)


def test_an_input_that_the_template_has_no_place_for_is_not_dropped_silently(tmp_path, tokenizer):
    source = as_json(tmp_path / "in.json", [CHINESE, ENGLISH])
    report = data.convert_alpaca(source, str(tmp_path / "x.mindrecord"), tokenizer, 200, template="{instruction}\n")
    assert (report.rows, report.skipped) == (1, {"the template has no {input}": ["row 2 at line 7"]})


# Writing

def test_holdout_takes_the_last_rows(tmp_path, tokenizer):
    records = [{"instruction": "i", "input": "", "output": f"answer {number}"} for number in range(10)]
    source = as_json(tmp_path / "in.json", records)
    report = data.convert_alpaca(source, str(tmp_path / "x.mindrecord"), tokenizer, 200, holdout=0.2)
    assert (report.rows, report.held_out_rows, report.held_out) == (8, 2, str(tmp_path / "x-heldout.mindrecord"))
    outputs = [learned(row, tokenizer) for row in read_back(report.output) + read_back(report.held_out)]
    assert outputs == [record["output"] + "</s>" for record in records]
    with pytest.raises(DataError, match="x-heldout.mindrecord exists already"):
        os.unlink(report.output)
        data.convert_alpaca(source, report.output, tokenizer, 200, holdout=0.2)
    with pytest.raises(DataError, match="holdout is 1.0"):
        data.convert_alpaca(source, str(tmp_path / "y.mindrecord"), tokenizer, 200, holdout=1.0)
    with pytest.raises(DataError, match="One row is too little"):
        data.convert_alpaca(as_json(tmp_path / "one.json", [CHINESE]), str(tmp_path / "y.mindrecord"), tokenizer, 400,
                            holdout=0.5)


def rows_of(value, count):
    return [{"input_ids": np.full(3, value, np.int32), "labels": np.full(3, value, np.int32)} for _ in range(count)]


def test_an_output_is_replaced_only_if_asked(tmp_path):
    path = str(tmp_path / "x.mindrecord")
    assert data.write_mindrecord(rows_of(1, 2500), path) == 2500
    with pytest.raises(DataError, match="exists already"):
        data.write_mindrecord(rows_of(2, 1), path)
    assert len(read_back(path)) == 2500
    data.write_mindrecord(rows_of(2, 4), path, overwrite=True)
    assert [row["labels"].tolist() for row in read_back(path)] == [[2, 2, 2]] * 4
    assert names(tmp_path) == ["x.mindrecord", "x.mindrecord.db"]


@pytest.mark.parametrize("bad", [
    {"input_ids": np.zeros(4, np.int32), "labels": np.zeros(3, np.int32)},
    {"input_ids": np.zeros(3, np.int32)},
    {"input_ids": np.zeros(3, np.int64), "labels": np.zeros(3, np.int64)},
])
def test_a_failed_write_leaves_what_was_there(tmp_path, bad):
    path = str(tmp_path / "x.mindrecord")
    data.write_mindrecord(rows_of(1, 2), path)
    with pytest.raises(DataError, match="Row 1202 "):
        data.write_mindrecord(rows_of(2, 1201) + [bad], path, overwrite=True)
    with pytest.raises(DataError, match="Row 1 .*int32|Row 2 "):
        data.write_mindrecord([bad] + rows_of(2, 1), path, overwrite=True)
    with pytest.raises(DataError, match="no row"):
        data.write_mindrecord([], path, overwrite=True)
    assert [row["labels"].tolist() for row in read_back(path)] == [[1, 1, 1]] * 2
    assert names(tmp_path) == ["x.mindrecord", "x.mindrecord.db"]


def test_a_failed_move_leaves_no_file_with_the_index_of_another(tmp_path, monkeypatch):
    path = str(tmp_path / "x.mindrecord")
    data.write_mindrecord(rows_of(1, 2), path)
    replace = os.replace

    def fail_at_the_end(source, target):
        if target == path:
            raise OSError("killed")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_at_the_end)
    with pytest.raises(OSError, match="killed"):
        data.write_mindrecord(rows_of(2, 4), path, overwrite=True)
    assert not os.path.exists(path)


def test_a_kill_leaves_nothing_under_the_name(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys\n"
        "import numpy as np\n"
        "from mindlora.plugin.mindrecord import write_mindrecord\n"
        "def rows():\n"
        "    for number in range(5000):\n"
        "        yield {'labels': np.zeros(3, np.int32)}\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_mindrecord(rows(), sys.argv[1])\n")
    finished = subprocess.run([sys.executable, str(script), str(tmp_path / "x.mindrecord")], check=False)
    assert finished.returncode == -signal.SIGKILL
    assert not [name for name in names(tmp_path) if name.startswith("x.")]


@pytest.mark.parametrize("name, message", [
    ("x.bin", "must end in .mindrecord"),
    ("a?b.mindrecord", "cannot be written.*should not contain"),
    ("folder.mindrecord", "is a folder"),
])
def test_outputs_that_cannot_be(tmp_path, name, message):
    (tmp_path / "folder.mindrecord").mkdir()
    with pytest.raises(DataError, match=message):
        data.write_mindrecord(rows_of(1, 1), str(tmp_path / name))
    assert names(tmp_path) == ["folder.mindrecord"]


# Plain text

def test_text_is_packed_without_a_gap(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(data, "_CHARACTERS_A_CALL", 40)
    text = "".join(f"Line {number}: 温太医 and the cat.\n" for number in range(30))
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    report = data.convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 64)
    rows = read_back(report.output)
    labels = np.concatenate([row["labels"] for row in rows])
    assert {row["input_ids"].shape for row in rows} == {(65,)}
    assert report.tokens == (labels != data.IGNORE_TOKEN_ID).sum()
    assert tokenizer.decode(labels[labels != data.IGNORE_TOKEN_ID].tolist()) == f"<s>{text}</s>"
    last = rows[-1]
    assert (last["input_ids"][last["labels"] == data.IGNORE_TOKEN_ID] == PAD).all() and PAD in last["input_ids"]
    for full in rows[:-1]:
        assert (full["input_ids"] == full["labels"]).all()


def test_paragraphs_are_documents_of_their_own(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text("the cat\nsat\n\n \nthe mat\n")
    report = data.convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 63, paragraphs=True)
    ids = np.concatenate([row["input_ids"] for row in read_back(report.output)])
    assert tokenizer.decode(ids[ids != PAD].tolist()) == "<s>the cat\nsat</s><s>the mat</s>"


def test_a_single_token_that_is_left_over_makes_no_row(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text("the cat")
    length = len(tokenizers.encode(tokenizer, "the cat")) + 2
    report = data.convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, length - 2)
    assert (report.rows, report.tokens, report.trained_tokens) == (1, length - 1, length - 2)


def test_text_without_text(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text(" \n")
    with pytest.raises(DataError, match="in.txt holds no text"):
        data.convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 8)
    with pytest.raises(DataError, match="seq_length is 0"):
        data.convert_text(str(tmp_path / "in.txt"), str(tmp_path / "x.mindrecord"), tokenizer, 0)


# The command

def test_the_command_trains_a_tokenizer_and_converts(tmp_path, capsys):
    source = as_json(tmp_path / "in.json", [ENGLISH, CHINESE, 5])
    output, folder = str(tmp_path / "x.mindrecord"), str(tmp_path / "t")
    command = ["data", "alpaca", "--input", source, "--output", output, "--tokenizer", folder, "--seq-length", "150",
               "--train-tokenizer", "280", "--template", r"{instruction}\n{input}\n", "--json"]
    assert cli.main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["output"], report["rows"], report["skipped"]) == (output, 2, {"not an object": ["row 3 at line 12"]})
    assert report["vocab_size"] == len(tokenizers.load_tokenizer(folder)) <= 280
    first = read_back(output)[0]
    loaded = tokenizers.load_tokenizer(folder)
    assert loaded.decode(first["input_ids"].tolist()).startswith("<s>Add the numbers.\n2 and 3\n2 and 3 make 5.</s>")

    assert cli.main(command) == 1
    assert capsys.readouterr() == ("", f"mindlora: error: The output {output} exists already: overwrite it expressly, "
                                       "or give another name.\n")
    os.unlink(output)
    assert cli.main(command) == 1
    assert capsys.readouterr().err.startswith(f"mindlora: error: {folder} exists already")
    assert not os.path.exists(output)
    assert cli.main(command + ["--overwrite"]) == 0


def test_the_command_converts_text_for_people(tmp_path, capsys, tokenizer_path):
    (tmp_path / "in.txt").write_text("the cat sat")
    command = ["data", "text", "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "x.mindrecord"),
               "--tokenizer", tokenizer_path, "--seq-length", "32"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "x.mindrecord: 1 rows of 33 tokens" in out and "pad_token_id: 3" in out


def test_errors_of_the_command_are_one_line(tmp_path, capsys, tokenizer_path):
    source = as_jsonl(tmp_path / "in.jsonl", [1, {"instruction": "a"}])
    command = ["data", "alpaca", "--output", str(tmp_path / "x.mindrecord"), "--seq-length", "32"]
    for more in (["--input", source, "--tokenizer", tokenizer_path],
                 ["--input", "missing.json", "--tokenizer", tokenizer_path],
                 ["--input", source, "--tokenizer", "missing"]):
        assert cli.main(command + more) == 1
        out, error = capsys.readouterr()
        assert out == "" and error.startswith("mindlora: error: ") and error.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        cli.main(command)
    assert caught.value.code == 2


@pytest.mark.parametrize("name, length, count", [("huanhuan.json", 1024, 3729), ("alpaca_seed_tasks.jsonl", 2048, 175)])
def test_real_files(tmp_path, name, length, count):
    if not (REAL / name).exists():
        pytest.skip(f"MINDLORA_TEST_DATA names no folder with {name}")
    report = data.convert_alpaca(str(REAL / name), str(tmp_path / "x.mindrecord"), str(tmp_path / "t"), length,
                                 train_vocab_size=1000)
    rows = instructions.read_rows(str(REAL / name))
    assert report.rows + sum(map(len, report.skipped.values())) == len(rows) == count
    tokenizer = tokenizers.load_tokenizer(str(tmp_path / "t"))
    skipped = {place for places in report.skipped.values() for place in places}
    kept = [row.record["output"] + "</s>" for row in rows if row.place not in skipped]
    assert [learned(row, tokenizer) for row in read_back(report.output)] == kept
