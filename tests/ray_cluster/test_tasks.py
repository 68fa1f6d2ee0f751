"""Simulations, and batches of a dataset, over a Ray cluster."""

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from tiny_model import TINY_OPTIONS

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.commands.capacity import capacity
from jaxinfer.ray import Generator
from jaxinfer.ray.tasks import RayMap
from jaxinfer.runtime.processes.ray_client import import_ray

pytestmark = pytest.mark.slow
RUN = {
    "model": "llama-3-8b",
    "engine": {"max_num_seqs": 1, "max_num_batched_tokens": 1024, "max_model_len": 1024},
    "groups": {"g": {"kind": "A10"}},
    "instances": {"i": {"group": "g"}},
}


def test_calls_run_on_all_nodes_in_their_order_also_where_one_is_lost(cluster: Any) -> None:
    # Nested, it travels whole: the nodes have no tests.
    def slow_square(number: int) -> int:
        time.sleep(1)
        if number == 13:
            raise JaxinferError("13: no")
        return number**2

    ray_map = RayMap(cluster.address)
    assert ray_map.cores == 2
    lost = cluster.list_all_nodes()[-1]
    found = []
    for square in ray_map(slow_square, range(8)):
        found.append(square)
        if square == 1:
            cluster.remove_node(lost, allow_graceful=False)
    assert found == [n**2 for n in range(8)]
    with pytest.raises(JaxinferError, match=r"^13: no$"):
        list(ray_map(slow_square, [1, 13]))


def test_capacity_over_a_cluster_is_that_of_this_machine(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "work.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "512,1\n" * 300)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    asked = [
        str(tmp_path / "run.yaml"),
        "--workload",
        str(tmp_path / "work.csv"),
        "--slo",
        "ttft=1",
    ]

    def line(*more: str) -> str:
        result = CliRunner().invoke(capacity, [*asked, *more], catch_exceptions=False)
        return result.stdout.splitlines()[-1]

    assert line("--ray", cluster.address) == line()
    assert line().startswith("capacity: ")


def test_no_cluster_is_one_line() -> None:
    pytest.importorskip("ray.cluster_utils")
    with pytest.raises(JaxinferError, match=r"no Ray cluster at 127\.0\.0\.1:1: .*refused"):
        RayMap("127.0.0.1:1")


def test_a_folder_of_the_name_ray_is_not_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with pytest.raises(JaxinferError, match=r"pip install -e '\.\[ray\]'"):
        import_ray()


def test_a_dataset_gets_the_answers_that_a_list_gets(
    cluster: Any, tiny: LLM, tiny_folder: Path
) -> None:
    import ray
    from ray import data

    greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    prompts = [f"prompt {'x' * n}" for n in range(12)]
    ray.init(cluster.address, log_to_driver=False)
    asked = data.from_items(
        [{"prompt": p, "sampling_params": {"max_tokens": 1 + n}} for n, p in enumerate(prompts)]
        + [{"prompt": "y" * 300, "sampling_params": {"max_tokens": 1}}]
    )
    options = {"model": str(tiny_folder), "sampling_params": greedy} | TINY_OPTIONS
    answered = asked.map_batches(
        Generator, fn_constructor_kwargs=options, batch_size=4, concurrency=2, num_cpus=0.5
    )
    rows = {row["prompt"]: row for row in answered.take_all()}
    assert "300 tokens" in rows.pop("y" * 300)["error"]
    params = [SamplingParams(**greedy | {"max_tokens": 1 + n}) for n in range(12)]
    expected = tiny.generate(prompts, params, progress=False)
    for output in expected:
        row = rows.pop(output.prompt)
        assert row["generated_text"] == output.outputs[0].text
        assert list(row["generated_tokens"]) == output.outputs[0].token_ids
        assert row["error"] is None
    assert not rows
