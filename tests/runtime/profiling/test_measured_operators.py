"""``profile --operators`` on the tiny model: measured, written, checked, and simulated by."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny_model import TINY_OPTIONS

from jaxinfer import JaxinferError
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.commands.profile import Numbers
from jaxinfer.config.run_file import load_run_file
from jaxinfer.lab.operators import measure as operators
from jaxinfer.lab.operators.measure import choose_depths, the_instance
from jaxinfer.lab.operators.tables import profile_operators
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

ENGINE = TINY_OPTIONS | {"max_num_seqs": 4, "max_num_batched_tokens": 32, "token_buckets": [32]}


def run_file(folder: Path, model: Path, **more: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(json.dumps({"model": str(model), "engine": ENGINE, **more}))
    return path


@pytest.fixture
def measured(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tables of two degrees; the second by the shard of one device, as if there were one."""
    monkeypatch.setattr(operators, "ROUNDS", 1)
    found = operators.jax.devices
    monkeypatch.setattr(operators.jax, "devices", lambda *platform: found(*platform)[:1])
    out = tmp_path / "tables"
    profile_operators(load_run_file(str(run_file(tmp_path, tiny_folder)), []), [1, 2], None, out)
    return out


@pytest.mark.slow
def test_tables_of_this_device_are_written_and_simulated(measured: Path) -> None:
    meta = yaml.safe_load((measured / "meta.yaml").read_text())
    assert meta["engine"]["row_buckets"] == [4]
    assert meta["engine"]["token_buckets"] == [32]
    assert meta["engine"]["collectives"] == {1: True, 2: False}
    assert meta["measured"]["layers"] == [1, 2]
    walls = []
    for degree in (1, 2):
        config = load_run_file(str(measured / f"tp{degree}.yaml"), [])
        run = simulate(config, [BenchRequest(None, 40, 5, 0.0) for _ in range(6)])
        assert run.output_tokens == 30
        walls.append(run.wall_s)
    assert all(0 < wall < math.inf for wall in walls)


def test_one_instance_on_one_group_is_measured() -> None:
    place, apart = SimpleNamespace(group="g"), SimpleNamespace(is_apart=True)
    here = SimpleNamespace(is_apart=False, mesh=None)
    one = SimpleNamespace(places=[place], segments=1, layout="megatron")

    def cluster(group: Any = here, **instances: Any) -> Any:
        return SimpleNamespace(instances=instances, groups={"g": group})

    assert the_instance(cluster(a=one)) == "a"
    with pytest.raises(JaxinferError, match="instances are a, b: operators are measured of one"):
        the_instance(cluster(a=one, b=one))
    with pytest.raises(JaxinferError, match=r"instances\.a: has several stages or segments"):
        the_instance(cluster(a=SimpleNamespace(places=[place] * 2, segments=1)))
    with pytest.raises(JaxinferError, match=r"groups\.g: has a process of its own"):
        the_instance(cluster(apart, a=one))
    with pytest.raises(
        JaxinferError, match=r"instances\.a\.layout is fsdp: operators are measured"
    ):
        the_instance(cluster(a=SimpleNamespace(places=[place], segments=1, layout="fsdp")))
    with pytest.raises(JaxinferError, match=r"groups\.g\.mesh: operators are measured on one axis"):
        the_instance(cluster(SimpleNamespace(is_apart=False, mesh={"x": 1}), a=one))


def test_depths_have_the_same_shares_of_each_kind_of_layers(tiny_folder: Path) -> None:
    config = replace(
        open_checkpoint(str(tiny_folder)).config, num_hidden_layers=12, windows=(4, 4, None) * 4
    )
    assert choose_depths(replace(config, windows=(None,) * 12), None) == (4, 12)
    assert choose_depths(config, (3, 9)) == (3, 9)
    for wrong in ((4, 7), (3, 5), (1, 12)):
        with pytest.raises(JaxinferError, match="several kinds"):
            choose_depths(config, wrong)
    for wrong in ((3, 3), (6, 3), (3, 15)):
        with pytest.raises(JaxinferError, match="must rise, up to the model's 12"):
            choose_depths(config, wrong)
    with pytest.raises(JaxinferError, match="mixture of experts are not measured"):
        choose_depths(replace(config, num_experts=4), (3, 9))


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1, 3.0), (1, 9.0), (1, 4.0), (5, 8.0)], (3.0, 1.0)),  # Medians 4 and 8.
        ([(2, 5.0)], (5.0, 0.0)),
        ([(1, 6.0), (5, 2.0)], (4.0, 0.0)),  # Falling: a constant.
        ([(1, -2.0)], (0.0, 0.0)),
    ],
)
def test_host_time_is_a_line_over_sequences(
    points: list[tuple[int, float]], line: tuple[float, float]
) -> None:
    assert operators._line(points) == pytest.approx(line)


def test_numbers_are_whole_and_positive() -> None:
    assert Numbers().convert("1,2", None, None) == [1, 2]
    for wrong in ("0", "1,,2", "a", "-1", "1.5"):
        with pytest.raises(Exception, match="must be whole numbers from 1 on"):
            Numbers().convert(wrong, None, None)
