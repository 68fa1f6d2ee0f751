"""Options of an engine that have to fit each other."""

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import InstanceConfig, instance_options
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import as_run_file
from jaxinfer.files.shipped import SHIPPED


@pytest.mark.parametrize("buckets", [(8,), (4, 8), (6, 7, 8)])
def test_buckets_rise_from_the_rows_to_the_budget(buckets: tuple[int, ...]) -> None:
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=8, token_buckets=buckets)
    assert options.token_buckets == buckets


@pytest.mark.parametrize("buckets", [(), (4,), (3, 8), (4, 4, 8), (6, 4, 8), (4, 8, 16)])
def test_other_buckets_are_refused(buckets: tuple[int, ...]) -> None:
    with pytest.raises(JaxinferError, match=r"must rise from max_num_seqs, 4, or more to max_num"):
        EngineOptions(max_num_seqs=4, max_num_batched_tokens=8, token_buckets=buckets)


def test_stages_share_the_running_requests() -> None:
    stages = [{"group": "g"}] * 4
    sizes = {"max_num_batched_tokens": 8, "max_num_seqs": 32}
    assert InstanceConfig.model_validate({"stages": stages, **sizes}).num_stages == 4
    for place, count in (
        ({"stages": stages}, 33),
        ({"stages": stages[:1]}, 9),
        ({"group": "g"}, 9),
    ):
        with pytest.raises(JaxinferError, match=r"^max_num_batched_tokens is 8, must be at least"):
            InstanceConfig.model_validate({**place, **sizes, "max_num_seqs": count})


def test_all_running_requests_decode_in_one_step() -> None:
    assert EngineOptions(max_num_seqs=8, max_num_batched_tokens=8).max_num_seqs == 8
    with pytest.raises(JaxinferError, match=r"^max_num_batched_tokens is 7, must be at least"):
        EngineOptions(max_num_seqs=8, max_num_batched_tokens=7)


def test_an_engine_by_name_sets_its_options() -> None:
    known = yaml.safe_load((SHIPPED / "engines.yaml").read_text())
    for name, theirs in known.items():
        found = EngineOptions(like=name)
        as_given = EngineOptions(**theirs)
        assert found.model_copy(update={"like": None}) == as_given


def test_own_options_count_before_those_of_an_engine() -> None:
    own = EngineOptions(
        like="trtllm-1.2", max_num_batched_tokens=4096, policies={"order": "shortest_prompt_first"}
    )
    assert own.max_num_batched_tokens == 4096
    assert own.max_num_seqs == EngineOptions(like="trtllm-1.2").max_num_seqs
    assert own.policies.order == "shortest_prompt_first"
    assert own.policies.batching == {"name": "mixed", "whole_prompts": True}


def test_own_paging_is_joined_with_theirs() -> None:
    theirs = EngineOptions(like="vllm-0.32").paging
    assert (theirs.take, theirs.twins) == ("step", True)
    own = EngineOptions.model_validate({"like": "vllm-0.32", "paging": {"twins": False}}).paging
    assert own == theirs.model_copy(update={"twins": False})


def test_all_instances_are_like_the_engine() -> None:
    data = {
        "engine": {"like": "vllm-0.19"},
        "groups": {"g": {}},
        "instances": {"a": {"group": "g"}},
    }
    instance = as_run_file(data).instances["a"]
    assert instance.max_num_batched_tokens == 8192
    assert instance_options(instance, 1).max_in_flight == 3
    assert instance_options(EngineOptions(), 1).max_in_flight == 2


def test_an_engine_that_is_none() -> None:
    with pytest.raises(JaxinferError, match=r"^like: no engine 'vllm-9': .*vllm-0\.19"):
        EngineOptions(like="vllm-9")


def test_a_real_instance_has_two_steps_in_flight_at_most() -> None:
    EngineOptions(max_in_flight=2).check_real()
    EngineOptions(max_in_flight=3, launch_ahead=False).check_real()
    with pytest.raises(JaxinferError, match=r"^max_in_flight is 3, must be at most 2: a decode's"):
        EngineOptions(max_in_flight=3).check_real()
