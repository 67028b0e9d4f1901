"""The jobs of a sweep: Hydra's own basic sweeper is the reference for what they are and in which order."""

from __future__ import annotations

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from conf.cli import compose_config
from conf.knobs import CONF
from conf.load import ConfigError, range_problems
from conf.sweeps import expand
from launch.sweep_jobs import jobs_of


def hydras(words: list[str]) -> list[tuple[str, ...]]:
    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    return [tuple(job) for job in jobs]


@pytest.mark.parametrize(
    "words",
    [
        ["parallel=tp1_pp2,tp2_pp1", "train.lr=1e-4,3e-4"],
        ["train.lr=range(0.1,0.4,0.1)", "seed=sort(3,1,2)", "model=llama_tiny"],
        ["parallel=choice(tp1,tp2)", "train.train_iters=5", "seed=1,2,3"],
        ["data.sources=[{path: a},{path: b}]", "run.dir='a,b'", "seed=1,2"],  # neither a list nor quotes are a sweep
        ["telemetry.wandb.tags=[a b],[c]", 'run.dir="x y",z'],
        ["seed=1,2", "parallel=tp1,tp2", "seed=3,4"],  # the later counts, in the first one's place
        ["seed=1"],
    ],
)
def test_jobs_and_their_order_are_those_of_hydras_basic_sweeper(words):
    found = expand(words)
    parse = OverridesParser.create().parse_override
    assert [[parse(word).value() for word in job] for job in found] == [
        [parse(word).value() for word in job] for job in hydras(words)
    ]
    assert [[word.partition("=")[0] for word in job] for job in found] == [
        [word.partition("=")[0] for word in job] for job in hydras(words)
    ]


def test_the_issues_example_is_four_jobs():
    assert expand(["parallel=tp1_pp2,tp2_pp1", "train.lr=1e-4,3e-4"]) == [
        ("parallel=tp1_pp2", "train.lr=0.0001"),
        ("parallel=tp1_pp2", "train.lr=0.0003"),
        ("parallel=tp2_pp1", "train.lr=0.0001"),
        ("parallel=tp2_pp1", "train.lr=0.0003"),
    ]


def test_words_that_are_no_sweep_reach_every_job_as_typed():
    typed = ["run.dir='a  b'", "telemetry.wandb.tags=[ x,  'y z']", "~alerts.loss_spike", "model.rope_scaling={a: 1}"]
    assert expand([*typed, "seed=1,2"]) == [(*typed, "seed=1"), (*typed, "seed=2")]


def test_a_glob_is_what_hydra_finds():
    words = ["parallel=glob([tp*,llama*],exclude=*dual*)"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(words), None)
    assert expand(words) == [tuple(job) for job in jobs] and len(jobs) > 5


def test_a_glob_has_the_options_of_a_further_folder_too(tmp_path):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "tp1_mine.yaml").write_text("tp: 1\n")
    found = [job[0] for job in expand(["parallel=glob(tp1*,exclude=tp1_pp*)"], config_dir=str(tmp_path))]
    assert found == ["parallel=tp1", "parallel=tp1_mine"]


def test_shuffled_jobs_come_in_the_same_order_every_time():
    words = ["seed=shuffle(range(20))"]
    assert expand(words) == expand(words) != expand(["seed=range(20)"])


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("train.lrr=1,2", "train.lrr is not a knob; did you mean train.lr?"),
        ("parallel=tp1,tp3", "parallel=tp3 is not an option"),
        ("train.lr=1,", "cannot read 'train.lr=1,'"),
        ("train.lr=interval(1,2)", "train.lr=interval(1,2): an interval has no list of values"),
        ("seed=range(3,1)", "seed=range(3,1) has no value: no job would run"),
        ("seed=range(0,1000000000)", "seed=range(0,1000000000): 1,000,000,000 values are more than the 10,000"),
        ("parallel=glob(none*)", "parallel=glob(none*) has no value"),
        ("seed=range(1,3,0)", "seed=range(1,3,0): range() arg 3 must not be zero"),
        ("train.lr=range(1.0,3,0)", "train.lr=range(1.0,3,0): Invalid range values"),
        ("run.id=a,b", "every job of a sweep has a run.id of its own"),
        ("run.experiment=mine", "give --id mine"),
        ("hydra/launcher=joblib", "do not run these jobs"),
    ],
)
def test_what_cannot_be_is_one_line(word, line):
    with pytest.raises(ConfigError) as caught:
        jobs_of(["parallel=tp1", word], "s")
    assert line in str(caught.value) and len(caught.value.problems) == 1


def test_every_job_is_a_run_of_its_own_in_one_experiment_with_a_name_that_tells_it_apart():
    jobs = jobs_of(["parallel=tp1_pp2,tp2_pp1", "seed=7", "optimizer.beta2=0.9,0.95"], "lr-1")
    configs = [compose_config(job.overrides) for job in jobs]
    assert [config.run.id for config in configs] == ["lr-1-00", "lr-1-01", "lr-1-02", "lr-1-03"]
    assert [job.run_id for job in jobs] == [config.run.id for config in configs]
    assert {config.run.experiment for config in configs} == {"lr-1"} and not any(map(range_problems, configs))
    assert configs[2].telemetry.wandb.name == "parallel=tp2_pp1 optimizer.beta2=0.9"
    assert jobs[2].swept == ("parallel=tp2_pp1", "optimizer.beta2=0.9")
    assert {(config.resume, config.seed, config.telemetry.wandb.group) for config in configs} == {("auto", 7, None)}


def test_a_given_name_and_resume_stay_and_any_value_makes_a_name():
    words = ["telemetry.wandb.name=mine", "resume=never", "seed=1,2"]
    config = compose_config(jobs_of(words, "s")[0].overrides)
    assert (config.telemetry.wandb.name, config.resume) == ("mine", "never")
    for value in ("'it is'", r"'\${a}'", '"q\'q"', "x" * 400):
        config = compose_config(jobs_of([f"run.dir={value},b"], "s")[0].overrides)
        assert config.telemetry.wandb.name is not None and config.telemetry.wandb.name.startswith("run.dir=")
