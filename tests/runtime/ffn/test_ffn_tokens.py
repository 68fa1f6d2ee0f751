"""Greedy tokens of whole runs whose FFN is on another group, by architecture."""

from pathlib import Path

import pytest
from cluster_cases import free_executables, load
from cluster_checks import Ran, serve
from ffn_cases import (
    LENGTHS,
    greedy_requests,
    parts_of_steps,
    sections,
    tokens_alone,
    with_tokenizer,
)


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [
        ("mixtral", (2,)),
        *(
            pytest.param(name, (1, 2, 4), marks=pytest.mark.slow)
            for name in ("llama", "qwen3", "mixtral")
        ),
    ],
    ids=str,
)
def test_runs_give_the_greedy_tokens_of_single(
    name: str, micro_batches: tuple[int, ...], tiny_folder: Path, tmp_path: Path
) -> None:
    model = with_tokenizer(name, tiny_folder, tmp_path / "model")
    expected = tokens_alone(model, tmp_path)
    assert [len(done.tokens) for done in expected] == [output for _, output in LENGTHS]
    for count in micro_batches:
        llm = load(model, tmp_path, **sections(micro_batches=count, max_model_len=128))
        assert serve(llm, greedy_requests(), tmp_path / str(count)) == expected
        steps = parts_of_steps(tmp_path / str(count) / "1")
        assert all(parts == min(count, rows) for rows, parts in steps)
        assert Ran.last(tmp_path / str(count)).metrics["late_compiles"] == 0
    free_executables()
