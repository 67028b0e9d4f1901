"""Folders in and out: bit for bit, a tensor at a time, and what is wrong with one refused by name before any byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, BertForPreTraining

from conf.huggingface import model_of
from conf.schema import ModelConfig
from corpus.tokenizer import ByteTokenizer, FastTokenizer, train_bpe
from engine.safetensors_files import TensorFolder
from engine.weights_export import export_weights, open_stored
from engine.weights_import import import_weights, source_folder
from recipes import convert
from tests.model.reference import small_model
from tests.model.test_huggingface import CASES, batch, their_config, theirs

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Runs:
    """What a pickle may be: it calls what it likes as it is read (here a failure that no reader would name so)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exit, ("the pickle ran",)


def silent(line: str) -> None:
    pass


def saved(case: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, **how: Any) -> ModelConfig:
    model = small_model(**CASES[case])
    theirs(model).to(dtype).save_pretrained(folder, **how)
    return model


def exported(source: Path, out: Path, **how: Any) -> Any:
    given: dict[str, Any] = dict(dtype=None, max_bytes=10**9, tokenizer=None, say=silent)
    return export_weights(open_stored(source), out, **(given | how))


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(ours) == sorted(wanted)
    for name, tensor in wanted.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_every_family_goes_in_and_out_unchanged(case: str, tmp_path: Path) -> None:
    dtype = DTYPES[list(CASES).index(case) % len(DTYPES)]
    saved(case, tmp_path / "a", dtype=dtype, max_shard_size="100KB")
    import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    exported(tmp_path / "b", tmp_path / "c", max_bytes=100_000)
    assert_same(values_of(tmp_path / "c"), values_of(tmp_path / "a"))
    assert len(list((tmp_path / "c").glob("model-*.safetensors"))) > 1
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in "ac"]
    assert configs[0] == configs[1]
    auto = AutoModelForMaskedLM if "bert" in case else AutoModelForCausalLM
    network, info = auto.from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    # fp32 in between, with the values of the folder's own number format
    tokens, _ = batch(small_model(**CASES[case]))
    whole = auto.from_pretrained(tmp_path / "b" / "weights", dtype=torch.float32)
    assert torch.equal(whole(tokens).logits, network.float()(tokens).logits)


def test_an_export_in_another_format_says_so_in_its_config(tmp_path: Path) -> None:
    saved("qwen3", tmp_path / "a", dtype=torch.float32)
    import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    exported(tmp_path / "b", tmp_path / "c", dtype="bf16")
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "bfloat16"
    wanted = {name: tensor.bfloat16() for name, tensor in values_of(tmp_path / "a").items()}
    assert_same(values_of(tmp_path / "c"), wanted)


def test_a_value_that_fp16_does_not_hold_is_refused_by_name(tmp_path: Path) -> None:
    saved("llama gqa", tmp_path / "a", dtype=torch.float32)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values up to 1e\+05, which fp16 does not hold"):
        exported(tmp_path / "b", tmp_path / "c", dtype="fp16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_base_model_without_its_prefix_and_with_old_buffers_is_read(tmp_path: Path) -> None:
    saved("gpt2", tmp_path / "a", dtype=torch.float32)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(bare, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    done = import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    assert done.aside == ("h.0.attn.bias",)
    assert_same(values_of(tmp_path / "b" / "weights"), tensors)
    exported(tmp_path / "b", tmp_path / "c")
    del bare["h.0.attn.bias"]
    assert_same(values_of(tmp_path / "c"), bare)


def test_berts_parts_for_other_tasks_are_left_out_by_name_and_tensorflows_names_are_known(tmp_path: Path) -> None:
    """As google-bert's folders are: BertForPreTraining's pooler and next-sentence head, gamma and beta, tied copies."""
    model = saved("bert", tmp_path / "a", dtype=torch.float32)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    whole = BertForPreTraining(their_config(model)).state_dict()
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    given = {}
    for name, tensor in (whole | tensors).items():
        (end,) = [end for end in old if name.endswith(end)] or [""]
        given[name.removesuffix(end) + old.get(end, "")] = tensor.clone()
    given["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    given["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    given["bert.embeddings.position_ids"] = torch.zeros(1, 32)
    save_file(given, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "a" / "config.json").read_text()) | {"architectures": ["BertForPreTraining"]}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"pooler_type": "first_token_transform"}))
    done = import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    assert done.aside == (
        "bert.embeddings.position_ids", "bert.pooler.dense.bias", "bert.pooler.dense.weight",
        "cls.predictions.decoder.bias", "cls.predictions.decoder.weight", "cls.seq_relationship.bias",
        "cls.seq_relationship.weight",
    )  # fmt: skip
    assert_same(values_of(tmp_path / "b" / "weights"), tensors)
    given["cls.predictions.decoder.bias"][3] += 1
    save_file(given, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^the head is tied, but cls\.predictions\.decoder\.bias is not cls\.predict"):
        import_weights(tmp_path / "a", tmp_path / "c", ignored=(), say=silent)
    del given["cls.predictions.decoder.bias"], given["cls.predictions.transform.dense.weight"]
    given["classifier.weight"] = torch.zeros(2, 64)
    save_file(given, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"no tensor cls\.predictions\.transform\.dense\.weight\n.*no tensor classifier"
    ):
        import_weights(tmp_path / "a", tmp_path / "c", ignored=(), say=silent)


def test_a_pickle_of_older_versions_is_read_without_running_it(tmp_path: Path) -> None:
    model = saved("llama gqa", tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "a" / "pytorch_model.bin")
    import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    exported(tmp_path / "b", tmp_path / "c")
    assert_same(values_of(tmp_path / "c"), tensors)
    assert open_stored(tmp_path / "b").config.model.num_layers == model.num_layers
    torch.save({"model.norm.weight": Runs()}, tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read .* save it again with transformers"):
        import_weights(tmp_path / "a", tmp_path / "d", ignored=(), say=silent)
    (tmp_path / "a" / "pytorch_model.bin").rename(tmp_path / "a" / "pytorch_model.bin.index.json")
    with pytest.raises(ValueError, match=r"several pytorch_model-\*\.bin; save them again"):
        import_weights(tmp_path / "a", tmp_path / "d", ignored=(), say=silent)


def test_a_tied_head_of_its_own_is_left_out_where_it_is_the_embedding_and_else_refused(tmp_path: Path) -> None:
    saved("llama mqa, tied", tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    assert import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent).aside == ("lm_head.weight",)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tied to the embedding, but lm_head\.weight is not model\.embed_tokens"):
        import_weights(tmp_path / "a", tmp_path / "c", ignored=(), say=silent)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(65)


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.weight"] = torch.ones(2)


def whole_numbers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (drop, r"it has no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (widen, r"model\.norm\.weight is \[65\], the model needs \[64\]"),
        (add, r"this model has no tensor model\.layers\.0\.mlp\.experts\.weight"),
        (whole_numbers, r"model\.norm\.weight is I8; weights in F32, BF16, F16 are supported"),
    ],
)
def test_wrong_tensors_are_refused_by_name_and_leave_nothing(change: Any, line: str, tmp_path: Path) -> None:
    saved("llama gqa", tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=line):
        import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_files_that_are_cut_off_or_missing_are_named(tmp_path: Path) -> None:
    saved("llama gqa", tmp_path / "a", max_shard_size="100KB")
    first, second = sorted((tmp_path / "a").glob("model-*.safetensors"))[:2]
    whole = first.read_bytes()
    for keep, line in ((len(whole) - 2, "is cut off: its tensors end at byte"), (5, "is no whole safetensors file")):
        first.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match=rf"{first.name} {line}"):
            import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    first.write_bytes(whole[:8] + b"x" * (len(whole) - 8))
    with pytest.raises(ValueError, match=rf"{first.name} is no safetensors file: its header cannot be read"):
        import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=rf"{first.name} has no tensor .*, which model\.safetensors\.index\.json says"):
        import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    first.unlink()
    with pytest.raises(ValueError, match=rf"{first.name} is missing; model\.safetensors\.index\.json names it"):
        import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_changed_import_is_not_exported(tmp_path: Path) -> None:
    saved("llama gqa", tmp_path / "a")
    import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    place = TensorFolder(tmp_path / "b" / "weights").places["model.norm.weight"]
    with place.file.open("r+b") as file:
        file.seek(place.begin)
        file.write(b"\1")
    with pytest.raises(ValueError, match=r"is damaged: the values of model\.norm\.weight are not those"):
        exported(tmp_path / "b", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_an_existing_folder_is_not_written_into(tmp_path: Path) -> None:
    saved("llama gqa", tmp_path / "a")
    import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    with pytest.raises(ValueError, match=r"b exists; name a folder that does not"):
        import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)


def test_a_name_that_the_hub_does_not_answer_for_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **named: Any) -> str:
        raise OSError("no route to host\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"^there is no folder owner/name, and the hub .* \(no route to host\); .*$"):
        source_folder("owner/name")
    with pytest.raises(ValueError, match=r"\./owner/name is neither a folder nor a name on the hub"):
        source_folder("./owner/name")


BIG = dict(num_layers=24, hidden_size=512, ffn_hidden_size=2048, num_attention_heads=8, num_key_value_heads=8)
PEAK = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from engine.weights_export import export_weights, open_stored
from engine.weights_import import import_weights
begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import_weights(Path("a"), Path("b"), ignored=(), say=print)
export_weights(open_stored(Path("b")), Path("c"), dtype=None, max_bytes=10**9, tokenizer=None, say=print)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) * 1024)
"""


def test_no_more_than_a_few_tensors_are_in_memory(tmp_path: Path) -> None:
    model = small_model(**BIG)
    network = theirs(model).bfloat16()
    network.save_pretrained(tmp_path / "a", max_shard_size="40MB")
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, "-c", PEAK, root], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    largest, whole = 4 * 2048 * 512, 4 * sum(p.numel() for p in network.parameters())
    # A tensor as read, its fp32 copy, what is written: 10 of the largest leave room for the allocator; the whole is 96.
    assert int(done.stdout.splitlines()[-1]) < 10 * largest < whole / 8


TEXT = "def f(x):\n\treturn x + 1  # naïve 漢字 🙂 \0 end" * 3


def test_our_tokenizers_are_exported_as_ones_that_transformers_loads(tmp_path: Path) -> None:
    saved("llama gqa", tmp_path / "a")
    import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    assert exported(tmp_path / "b", tmp_path / "none").notes == [
        "no tokenizer: the folder that was imported had none; --tokenizer names one"
    ]
    exported(tmp_path / "b", tmp_path / "c", tokenizer="byte")
    ours, loaded = ByteTokenizer(), AutoTokenizer.from_pretrained(tmp_path / "c")
    assert loaded(TEXT)["input_ids"] == ours.encode([TEXT])[0].tolist()
    assert loaded.decode(ours.encode([TEXT])[0].tolist()) == TEXT
    assert (loaded.eos_token_id, len(loaded)) == (ours.eod_id, ours.size)
    trained = train_bpe([TEXT], size=300)
    trained.save(str(tmp_path / "tokenizer.json"))
    exported(tmp_path / "b", tmp_path / "d", tokenizer=str(tmp_path / "tokenizer.json"))
    loaded, bpe = AutoTokenizer.from_pretrained(tmp_path / "d"), FastTokenizer(trained, name="bpe", eod_id=0)
    assert loaded(TEXT)["input_ids"] == bpe.encode([TEXT])[0].tolist() and loaded.eos_token_id == 0
    (note,) = exported(tmp_path / "b", tmp_path / "e", tokenizer="./gone").notes
    assert note.startswith("no tokenizer: data.tokenizer=./gone")


def test_a_folders_tokenizer_and_generation_config_come_along(tmp_path: Path) -> None:
    saved("llama gqa", tmp_path / "a")
    train_bpe([TEXT], size=300).save(str(tmp_path / "a" / "tokenizer.json"))
    (tmp_path / "a" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "a" / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    assert import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent).has_tokenizer
    exported(tmp_path / "b", tmp_path / "c")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


def test_the_command_line_says_what_it_did_and_refuses_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved("gpt_neox", tmp_path / "a")
    assert convert.main(["import", "a", "b"]) == 0
    said = capsys.readouterr().out
    assert "imported " in said and "gpt_neox, 74,880 parameters in 28 tensors of BF16" in said
    assert "python recipes/pretrain.py model=./b initialize_from=b\n" in said
    assert convert.main(["export", "b", "c", "--max-shard-size", "50KB", "--tokenizer", "byte"]) == 0
    assert "load      AutoModelForCausalLM and AutoTokenizer.from_pretrained('c')" in capsys.readouterr().out
    assert convert.main(["config", "a", "mine", "--out", "model/mine.yaml"]) == 0
    assert "family: gpt_neox" in (tmp_path / "model" / "mine.yaml").read_text()
    capsys.readouterr()
    for words, line in (
        (["import", "nothing"], "error: nothing is neither a folder nor a name on the hub (OWNER/NAME)"),
        (["import", "a", "b"], f"error: {tmp_path / 'b'} exists; name a folder that does not"),
        (
            ["export", "a", "d"],
            f"error: {tmp_path / 'a'} holds no complete checkpoint; name a checkpoint step-N, a run",
        ),
        (["config", "a", "mine", "--out", "model/mine.yaml"], "error: model/mine.yaml exists; choose another name"),
        (["config", "a", "a/b"], "error: NAME=a/b cannot be; use a letter"),
    ):
        assert convert.main(words) == 2
        assert capsys.readouterr().err.startswith(line)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"mystery": 1, "hidden_act": "tanh"}))
    assert convert.main(["import", "a", "e"]) == 2
    assert [line[:20] for line in capsys.readouterr().err.splitlines()] == [
        'error: hidden_act="t',
        "error: mystery is no",
    ]
    assert not (tmp_path / "e").exists()


def test_the_model_of_an_import_is_the_folders(tmp_path: Path) -> None:
    saved("qwen2, some windows", tmp_path / "a")
    import_weights(tmp_path / "a", tmp_path / "b", ignored=(), say=silent)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert open_stored(tmp_path / "b").config.model == model_of(config, name="a")
