"""recipes/generate.py as a user calls it: what it answers, what it takes from the weights, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from conf.cli import compose_config, main
from conf.schema import Config, DType
from conf.weight_sources import with_source
from corpus.tokenizer_folder import byte_tokenizer
from engine.answers import Job, open_job
from engine.checkpoint_folder import write_manifest
from engine.weights_import import import_weights
from recipes import generate
from tests.engine.inferences import saved
from tests.engine.launched import ROOT

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_folder(folder: Path) -> Path:
    """A model of 265 ids with a tokenizer of 259: bytes, an end of text, and the two tokens of ChatML."""
    saved("qwen2", folder, vocab_size=265, max_position_embeddings=64)
    backend = Tokenizer.from_str(byte_tokenizer().to_str())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("weights") / "model")


def composed(*words: str) -> Config:
    return compose_config(with_source(words, device=lambda: "cpu"))


def job_of(*words: str) -> Job:
    return open_job(composed(*words))


@pytest.fixture
def called(monkeypatch, capsys):
    """(exit code, stderr) of the recipe, refused before torch.distributed starts."""

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["generate.py", *words])
        with pytest.raises(SystemExit) as end:
            main(generate.run, trains=False)
        found = capsys.readouterr()
        assert found.out == "" and "Traceback" not in found.err
        return end.value.code, found.err

    return call


BAD = {
    "no weights": (["prompt=x"], "initialize_from has no value; name the weights: a run, a checkpoint"),
    "empty": (["initialize_from=", "prompt=x"], "initialize_from has no value"),
    "not there": (
        ["initialize_from=/no/where", "prompt=x"],
        "initialize_from=/no/where: /no/where is no folder; name a",
    ),
    "temperature": (["FOLDER", "prompt=x", "generate.temperature=-0.5"], "generate.temperature=-0.5 must be 0 or more"),
    "top_p": (["FOLDER", "prompt=x", "generate.top_p=0"], "generate.top_p=0 must be above 0 and at most 1"),
    "top_p above": (["FOLDER", "prompt=x", "generate.top_p=1.5"], "generate.top_p=1.5 must be above 0 and at most 1"),
    "top_k": (["FOLDER", "prompt=x", "generate.top_k=-1"], "generate.top_k=-1 must be 0 or more"),
    "nothing new": (["FOLDER", "prompt=x", "generate.max_new_tokens=0"], "generate.max_new_tokens=0 must be positive"),
    "typo": (["FOLDER", "prompt=x", "generate.temprature=1"], "did you mean generate.temperature?"),
    "ranks": (["FOLDER", "prompt=x", "parallel.tp=2"], "1 rank runs, not a multiple of parallel.tp=2"),
    "no prompt": (["FOLDER"], "there is no prompt; give prompt="),
    "empty stop": (["FOLDER", "prompt=x", "generate.stop=['']"], "generate.stop has an empty text"),
    "too long": (
        ["FOLDER", f"prompt={'x' * 64}"],
        "generate.prompts.0: it has 64 tokens, and model.max_position_embedd",
    ),
    "no such file": (["FOLDER", "generate.prompts_file=/no/file.txt"], "generate.prompts_file=/no/file.txt cannot be"),
    "no such rows": (["FOLDER", "generate.prompts_file=/no/file.jsonl"], "/no/file.jsonl"),
    "system": (["FOLDER", "prompt=x", "generate.system=Be kind."], "generate.system is a message of a conversation"),
    "output": (
        ["FOLDER", "prompt=x", "generate.output=/no/out.jsonl"],
        "generate.output=/no/out.jsonl: there is no fold",
    ),
    "tokenizer": (["FOLDER", "prompt=x", "data.tokenizer=/no/tokenizer"], "data.tokenizer=/no/tokenizer"),
    "adapter": (
        ["FOLDER", "prompt=x", "lora.initialize_from=/no/adapter"],
        "lora.initialize_from=/no/adapter is no PEFT",
    ),
    "fp16": (["FOLDER", "prompt=x", "precision=fp16"], "precision.dtype=fp16 is not supported on CPU"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_one_line_and_code_2_before_anything_starts(name, called, folder):
    words, said = BAD[name]
    code, err = called(*[f"initialize_from={folder}" if word == "FOLDER" else word for word in words])
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and said in err, err


def test_every_prompt_that_cannot_be_is_named_by_its_place(called, folder, tmp_path):
    rows = ['{"prompt": "ok"}', '{"messages": [{"role": "user", "content": "?"}]}', json.dumps({"text": "y" * 99})]
    (tmp_path / "asked.jsonl").write_text("\n".join(rows) + "\n")
    code, err = called(f"initialize_from={folder}", f"generate.prompts_file={tmp_path / 'asked.jsonl'}")
    assert code == 2 and err.splitlines() == [
        f"error: {tmp_path / 'asked.jsonl'}:2: it holds messages; set generate.chat=true",
        f"error: {tmp_path / 'asked.jsonl'}:3: it has 99 tokens, and model.max_position_embeddings=64 leaves no room "
        "for more; use at most 63",
    ]


@pytest.mark.parametrize("name", ["none.txt", "none.jsonl"])
def test_a_file_without_a_prompt_is_named_beside_other_prompts_too(folder, tmp_path, name):
    path = tmp_path / name
    path.write_text("\n\n")
    with pytest.raises(ValueError, match=f"generate.prompts_file={path} holds no prompt"):
        job_of(f"initialize_from={folder}", "prompt=a", f"generate.prompts_file={path}")


def test_a_file_of_text_is_a_prompt_a_line_and_ids_that_the_model_lacks_are_named(folder, tmp_path):
    (tmp_path / "asked.txt").write_text("\ufeffone\r\n\n  \ntwo, 'three'\n", encoding="utf-8")
    words = ["prompt=zero", f"generate.prompts_file={tmp_path / 'asked.txt'}"]
    assert [prompt.given for prompt in job_of(f"initialize_from={folder}", *words).prompts] == [
        "zero", "one", "two, 'three'"
    ]  # fmt: skip
    small = saved("llama gqa", tmp_path / "small")
    with pytest.raises(ValueError) as caught:
        job_of(f"initialize_from={small}", "data.tokenizer=byte", "prompt=!", "prompt=a")
    assert str(caught.value) == (
        "generate.prompts.1: token 97 of data.tokenizer=byte is none of model.vocab_size=61; use the tokenizer of "
        "these weights"
    )


@pytest.mark.parametrize(
    "text", ["def f(x, y): # 'a' \"b\"", "${HOME} \\${x} \\", "{a: [b]}, c=d", "two\nlines", "'", "漢字 😀", ""]
)
def test_a_prompt_is_taken_as_it_is_typed(text, folder):
    [first, second] = job_of(f"initialize_from={folder}", f"prompt={text}", "prompt=and, this").prompts
    assert (first.given, second.given) == (text, "and, this")
    assert bytes(first.ids) == text.encode() if text else first.ids == (256,)  # nothing: as a document begins


def test_a_message_stands_in_the_template_and_the_end_of_a_turn_ends_the_answer(folder, tmp_path):
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": [
        {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}
    ]}) + "\n")  # fmt: skip
    job = job_of(
        f"initialize_from={folder}", "prompt=hi", "generate.chat=true", "generate.system=S",
        f"generate.prompts_file={tmp_path / 'asked.jsonl'}",
    )  # fmt: skip
    begin, end = "<|im_start|>", "<|im_end|>\n"
    assert [prompt.text for prompt in job.prompts] == [
        f"{begin}system\nS{end}{begin}user\nhi{end}{begin}assistant\n",
        f"{begin}system\nS{end}{begin}user\n1{end}{begin}assistant\n2{end}{begin}user\n3{end}{begin}assistant\n",
    ]
    assert job.prompts[0].ids[:2] == (257, ord("s")) and 258 in job.prompts[0].ids
    assert job.end_ids == {256, 258}


def test_tokens_that_end_a_text_are_those_of_the_generation_config_too(folder, tmp_path):
    copy = chat_folder(tmp_path / "copy")
    (copy / "generation_config.json").write_text('{"eos_token_id": [256, 10]}')
    assert job_of(f"initialize_from={copy}", "prompt=x").end_ids == {256, 10}
    assert job_of(f"initialize_from={folder}", "prompt=x").end_ids == {256}


def test_model_format_and_tokenizer_are_the_sources_unless_the_command_line_says_others(folder, tmp_path):
    config = composed(f"initialize_from={folder}")
    assert (config.model.family.value, config.model.vocab_size, config.precision.dtype) == ("qwen2", 265, DType.fp32)
    assert config.data.tokenizer == str(folder) and config.data.sequence_length == 64
    config = composed(f"initialize_from={folder}", "precision=bf16", "data.tokenizer=byte", "model.rope_theta=3")
    assert (config.precision.dtype, config.data.tokenizer, config.model.rope_theta) == (DType.bf16, "byte", 3.0)
    assert composed(f"initialize_from={folder}", "model=gpt2_tiny").model.name == "gpt2_tiny"
    about = json.loads((folder / "config.json").read_text())
    for dtype, wanted in (("bfloat16", DType.bf16), ("float16", DType.fp32)):  # a CPU does not compute in fp16
        (tmp_path / dtype).mkdir()
        (tmp_path / dtype / "config.json").write_text(json.dumps(about | {"dtype": dtype}))
        assert composed(f"initialize_from={tmp_path / dtype}").precision.dtype is wanted


def test_an_imported_folder_and_adapters_beside_it_say_what_they_are(folder, tmp_path):
    import_weights(folder, tmp_path / "imported", ignored=(), say=str)
    config = composed(f"initialize_from={tmp_path / 'imported'}")
    assert (config.model.family.value, config.model.vocab_size, config.precision.dtype) == ("qwen2", 265, DType.fp32)
    assert config.data.tokenizer == str(tmp_path / "imported" / "weights")
    assert job_of(f"initialize_from={tmp_path / 'imported'}", "prompt=hi").prompts[0].ids == (104, 105)
    about = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    config = composed(f"initialize_from={folder}", f"lora.initialize_from={tmp_path}")
    assert (config.lora.rank, config.lora.alpha, config.lora.target_modules) == (3, 5.0, ["q_proj", "down_proj"])
    assert composed(f"initialize_from={folder}", f"lora.initialize_from={tmp_path}", "lora.rank=9").lora.rank == 9


def test_a_run_is_its_newest_checkpoint_with_what_it_was_trained_with(tmp_path):
    for step, tokenizer in ((2, "byte"), (10, "it's a folder")):
        path = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True)
        saved_config = {
            "model": {"name": "m", "family": "gpt2", "num_layers": 3}, "precision": {"dtype": "bf16"},
            "data": {"tokenizer": tokenizer, "sequence_length": 48}, "lora": {"rank": 4, "target_modules": ["c_attn"]},
        }  # fmt: skip
        write_manifest(path, {"format": 1, "config": saved_config})
    config = composed(f"initialize_from={tmp_path / 'run'}")
    assert (config.model.num_layers, config.precision.dtype, config.lora.rank) == (3, DType.bf16, 4)
    assert config.lora.target_modules == ["c_attn"]
    assert (config.data.tokenizer, config.data.sequence_length) == ("it's a folder", 48)
    config = composed(f"initialize_from={tmp_path / 'run' / 'checkpoints' / 'step-00000002'}", "lora=none")
    assert (config.data.tokenizer, config.lora.rank) == ("byte", 0)


def run_recipe(*words: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "recipes/generate.py", *words], cwd=ROOT, capture_output=True, timeout=120,
        env={key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        | {"DS_ACCELERATOR": "cpu"} | environ,
    )  # fmt: skip


def test_text_is_streamed_to_standard_output_and_kept_in_a_file_the_same(folder, tmp_path):
    out = tmp_path / "out.jsonl"
    words = [
        f"initialize_from={folder}", "prompt=one", "prompt=two", "generate.num_samples=2", "generate.batch_size=3",
        "generate.max_new_tokens=9",
    ]  # fmt: skip
    done = run_recipe(*words, f"generate.output={out}", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
    assert [(row["prompt"], row["sample"], row["prompt_tokens"]) for row in rows] == [
        ("one", 0, 3), ("one", 1, 3), ("two", 0, 3), ("two", 1, 3)
    ]  # fmt: skip
    assert len({row["text"] for row in rows}) == 4
    for row in rows:
        assert len(row["tokens"]) == 9 if row["finish_reason"] == "length" else row["tokens"][-1] == 256
        assert max(row["tokens"]) < 259
    assert done.stdout.decode() == "".join(
        f"--- {number} of 4: {row['prompt']}\n{row['prompt']}{row['text']}\n"
        for number, row in enumerate(rows, start=1)
    )
    assert done.stderr.startswith(b"model    model: ") and b"tokens/s" in done.stderr
    with pytest.raises(ValueError, match="exists; name another file, or set"):
        job_of(*words, f"generate.output={out}")
    job_of(*words, f"generate.output={out}", "generate.overwrite=true")
