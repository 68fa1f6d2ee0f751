"""Options of an engine that have to fit each other."""

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.engine import EngineOptions


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
