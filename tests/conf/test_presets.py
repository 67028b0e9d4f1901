"""Every YAML of conf/ is composed, planned and predicted; presets have the published sizes."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from conf.cli import compose_config
from conf.knobs import CONF, options
from conf.load import range_problems
from conf.schema import Config, Family
from parallel.memory import predict
from parallel.objectives import objective_of
from parallel.plan import ParallelPlan
from parallel.profile import read_record
from parallel.record import config_of
from parallel.sizes import parameter_count

compose_once = functools.cache(lambda *arguments: compose_config(arguments))
OTHERS = [(group, name) for group, names in options().items() for name in names if group not in ("model", "parallel")]

# Exact: openai-community/gpt2 and gpt2-medium, meta-llama's Llama 3.1 and 3.2, Mistral, Qwen2.5 and Qwen3 on
# huggingface.co, BERT as transformers builds google-bert/bert-base-uncased for masked language modelling, Pythia by
# arXiv:2304.01373 table 1. Rounded: the titles and tables of arXiv:1909.08053, 2005.14165, 2201.11990 and 2104.04473
# (1008.0 billion), to the digits they print.
PUBLISHED = {
    "gpt2_125m": 124_439_808,
    "gpt2_350m": 354_823_168,
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "llama_70b": 70_553_706_496,
    "llama_405b": 405_853_388_800,
    "mistral_7b": 7_241_732_096,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "pythia_160m": 162_322_944,
    "pythia_1_4b": 1_414_647_808,
    "pythia_6_9b": 6_857_302_016,
    "bert_110m": 109_514_298,
    "megatron_bert_336m": "336e6",
    "megatron_bert_1_3b": "1.3e9",
    "megatron_bert_3_9b": "3.9e9",
    "megatron_1_2b": "1.2e9",
    "megatron_2_5b": "2.5e9",
    "megatron_4_2b": "4.2e9",
    "megatron_8_3b": "8.3e9",
    "gpt3_6_7b": "6.7e9",
    "gpt3_175b": "175e9",
    "turing_nlg_530b": "530e9",
    "megatron_1t": "1008.0e9",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    model, published = compose_once(f"model={name}").model, PUBLISHED[name]
    count = parameter_count(model)
    if model.family is Family.megatron_bert:  # the paper's have a pooler and a sentence-order head beside
        count += (model.hidden_size + 2) * (model.hidden_size + 1)
    if isinstance(published, int):
        assert count == published
    else:
        digits, power = published.split("e")
        decimals = len(digits.partition(".")[2])
        assert round(count / 10 ** int(power), decimals) == float(digits)


def test_the_published_numbers_cover_every_preset_but_the_tiny_ones():
    assert set(options()["model"]) - set(PUBLISHED) == {"gpt2_tiny", "llama_tiny", "bert_tiny"}


@pytest.mark.parametrize("name", options()["model"])
def test_every_model_composes_plans_and_predicts(name):
    config = replace(compose_once(f"model={name}"))
    assert config.model.name == name and range_problems(config) == []
    config.objective = objective_of(config.model.family)
    plan = ParallelPlan.from_config(config, 8, device="cpu")
    assert predict(config, plan, device="cuda")[0].total > 0


def world_of(config: Config) -> int:
    return config.parallel.tp * config.parallel.pp


@pytest.mark.parametrize("name", options()["parallel"])
def test_every_profile_plans_what_its_record_was_made_of(name):
    parallel, record = compose_once(f"parallel={name}").parallel, read_record(name, CONF / "parallel")
    config, ranks = replace(config_of(record), parallel=parallel), record["conditions"]["cluster"]["ranks"]
    plan = ParallelPlan.from_config(config, ranks, device=record["predicted"]["device"])
    assert parallel.name == name and plan.data_parallel_size == ranks // (parallel.tp * parallel.pp)


@pytest.mark.parametrize(("group", "name"), OTHERS)
def test_every_other_option_composes_and_plans(group, name):
    given = ["data.sources.0.path=corpus.txt"] if (group, name) == ("data", "text") else []
    if (group, name) == ("data", "chat"):
        given = ["data.sources.0.path=chats.jsonl", "data.tokenizer=FOLDER"]
    if group == "cluster":
        given = ["cluster.devices_per_node=null"]
    config = compose_once(f"{group}={name}", *given)
    assert range_problems(config) == []
    ParallelPlan.from_config(config, world_of(config), device="cuda")


@pytest.mark.parametrize("name", options()["experiment"])
def test_an_experiment_says_its_hardware_and_command_and_goes_by_its_file_name(name):
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    assert "# Hardware:" in text and "# Command:" in text
    assert compose_once(f"experiment={name}").run.experiment == name


def test_every_yaml_opens_with_a_comment():
    for path in CONF.glob("**/*.yaml"):
        assert path.read_text().startswith("#"), path


def test_the_main_job_runs_on_four_ranks_of_a_cpu():
    config = compose_once("experiment=stdlib_tp2_pp2")
    plan = ParallelPlan.from_config(config, 4, device="cpu")
    assert (plan.tensor_model_parallel_size, plan.pipeline_model_parallel_size) == (2, 2) and not plan.warnings
