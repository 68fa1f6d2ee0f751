"""FFN groups in processes of their own: tokens, weights, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from cluster_cases import Loader, free_executables, load, roomy
from cluster_checks import Done, Ran, serve
from ffn_cases import apart, greedy_requests, parts_of_steps, tokens_alone, with_tokenizer

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker


@pytest.mark.parametrize(
    ("heads", "attention", "ffn", "micro_batches"),
    [
        ("two", 1, 1, 2),
        pytest.param("three", 2, 1, 4, marks=pytest.mark.slow),
        pytest.param("two", 1, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_runs_give_the_tokens_of_one_device(
    loader: Loader,
    expected: dict[str, list[Done]],
    tmp_path: Path,
    heads: str,
    attention: int,
    ffn: int,
    micro_batches: int,
) -> None:
    """Prompts in chunks beside decodes, greedy and drawn, with a prefix cache."""
    llm = loader.load(heads, **apart(ffn, attention, micro_batches=micro_batches))
    assert serve(llm, run_dir=tmp_path) == expected[heads]
    found = Ran.last(tmp_path)
    assert found.metrics["late_compiles"] == 0
    described = found.record.run["instances"]["x"]
    assert described["process"] == "p and f"
    (stage,) = described["stages"]
    assert (stage["ffn"]["group"], len(stage["ffn"]["devices"])) == ("f", ffn)
    steps = parts_of_steps(tmp_path / "1")
    assert all(parts == min(micro_batches, rows) for rows, parts in steps)


def test_weights_are_where_they_are_used(loader: Loader) -> None:
    """Bytes by hand: three matrices of 32 x 64 in each of four layers, in float32."""
    worker = loader.load("two", **apart(micro_batches=2)).cluster.engines["x"].worker
    assert isinstance(worker, PipelineWorker)
    assert [process.name for process in worker.processes] == ["p", "f"]
    (stage,) = worker.stages
    assert stage.plan.ffn
    assert stage.plan.ffn.weight_bytes == 4 * 3 * 32 * 64 * 4
    # Four projections of attention, norms, embedding and head.
    attention = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 32)
    assert stage.plan.weight_bytes == 4 * (attention + 2 * 260 * 32 + 32)
    assert stage.plan.ffn.kv_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_runs_give_the_greedy_tokens_of_single(
    name: str, tiny_folder: Path, tmp_path: Path
) -> None:
    model = with_tokenizer(name, tiny_folder, tmp_path / "model")
    expected = tokens_alone(model, tmp_path)
    for count in (1, 2, 4):
        llm = load(model, tmp_path, **apart(micro_batches=count, max_model_len=128))
        assert serve(llm, greedy_requests(), tmp_path / str(count)) == expected
        assert max(parts for _, parts in parts_of_steps(tmp_path / str(count) / "1")) == count
    free_executables()


def two_stages() -> dict[str, Any]:
    given = apart(micro_batches=2)
    given["groups"] = {name: {"process": "own"} for name in "pqfg"}
    given["instances"]["x"]["stages"] = [
        {"group": "p", "layers": 3, "ffn": "f"},
        {"group": "q", "layers": 1, "ffn": "g"},
    ]
    return given | {"system": "pipeline_parallel"}


def decodes_alone() -> dict[str, Any]:
    """Prompts are computed by an instance in the loop's process."""
    given = apart(micro_batches=2)
    given["groups"]["d"] = {}
    given["instances"]["y"] = {"group": "d"} | roomy(16)
    return given | {"system": {"name": "disaggregated", "prefill": "y", "decode": "x"}}


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "make"), [("three", two_stages), ("two", decodes_alone)])
def test_stages_in_other_processes_and_hand_offs(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path, heads: str, make: Any
) -> None:
    assert serve(loader.load(heads, **make()), run_dir=tmp_path) == expected[heads]


def test_opt_is_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    model = with_tokenizer("opt", tiny_folder, tmp_path / "model")
    with pytest.raises(JaxinferError, match=r"ffn: f: the layers of OPTForCausalLM are not"):
        load(model, tmp_path, **apart(max_model_len=128))


def test_an_emulated_link_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    links = [{"between": ["p", "f"], "gb_s": 1}]
    message = r"links: p - f would have to be emulated layer by layer, f has the FFN of p"
    with pytest.raises(JaxinferError, match=message):
        load(tiny_folder, tmp_path, **apart() | {"links": links})
