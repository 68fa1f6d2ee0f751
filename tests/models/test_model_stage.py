"""Runs of layers, and which parameters a stage has."""

from dataclasses import replace
from pathlib import Path

import pytest
from flax import nnx

from jaxinfer.checkpoints.hugging_face import read_folder_config
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.stage import Layers, make_model, split

DATA = Path(__file__).parents[1] / "data" / "architectures"


def test_counts_become_runs() -> None:
    assert split(7, [2, 1, 4]) == [Layers(0, 2, 7), Layers(2, 3, 7), Layers(3, 7, 7)]
    for counts in ([2, 4], [4, 4]):
        with pytest.raises(AssertionError):
            split(7, counts)


def test_the_first_and_the_last() -> None:
    ends = [(part.first, part.last) for part in split(4, [1, 2, 1])]
    assert ends == [(True, False), (False, False), (False, True)]
    assert [(part.first, part.last) for part in split(4, [4])] == [(True, True)]


def test_overlaps_need_a_layer() -> None:
    middle = Layers(2, 4, 8)
    for other, shared in (
        (Layers(0, 2, 8), False),
        (Layers(0, 3, 8), True),
        (Layers(3, 8, 8), True),
        (Layers(4, 8, 8), False),
        (Layers(0, 8, 8), True),
    ):
        assert middle.overlaps(other) == other.overlaps(middle) == shared


def test_pieces_are_even_and_the_first_ones_longer() -> None:
    pieces = Layers(2, 10, 12).pieces(3)
    assert pieces == [Layers(2, 5, 12), Layers(5, 8, 12), Layers(8, 10, 12)]
    assert Layers(2, 10, 12).pieces(1) == [Layers(2, 10, 12)]


def test_paths_in_the_whole_model() -> None:
    part = Layers(3, 5, 8)
    for path, name in (
        ("layers.3.attn.q_DNH", "layers.0.attn.q_DNH"),
        ("layers.14.mlp.up_DF", "layers.11.mlp.up_DF"),
        ("embed_VD", "embed_VD"),
        ("norm.scale_D", "norm.scale_D"),
    ):
        assert part.name(path) == name
        assert part.path(name) == path


def parameters(config: ModelConfig, layers: Layers) -> set[str]:
    """Return the first names of the parameters' paths."""
    _, state = nnx.split(nnx.eval_shape(lambda: make_model(config, layers, nnx.Rngs(0))))
    return {str(path[0]) for path, _ in nnx.to_flat_state(state)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "before"), [("llama", {"embed_VD"}), ("opt", {"embed_VD", "position_XD"})]
)
def test_what_a_stage_has_besides_its_layers(name: str, before: set[str], tied: bool) -> None:
    config = replace(read_folder_config(DATA / name), tie_word_embeddings=tied)
    total = config.num_hidden_layers
    assert total >= 3
    first, middle, last = split(total, [1, total - 2, 1])
    head = {"embed_VD"} if tied else {"head_VD"}
    assert parameters(config, first) == {"layers"} | before
    assert parameters(config, middle) == {"layers"}
    assert parameters(config, last) == {"layers", "norm"} | head
    assert parameters(config, Layers(0, total, total)) == {"layers", "norm"} | before | head


def test_a_stage_has_its_own_layers_windows() -> None:
    config = read_folder_config(DATA / "gemma3")
    windows = tuple(range(10, 10 + config.num_hidden_layers))
    config = replace(config, windows=windows)
    layers = Layers(1, 3, config.num_hidden_layers)
    model = nnx.eval_shape(lambda: make_model(config, layers, nnx.Rngs(0)))
    assert model.config.windows == (11, 12)
    assert len(model.layers) == 2
