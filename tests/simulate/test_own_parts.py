"""GPUs and models of one's own, in run files and hardware files; what their links give rings."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.config.nodes import NodeOptions
from jaxinfer.config.run_file import RunFile, as_run_file, load_run_file
from jaxinfer.hardware.catalogue import Catalogue, Gpu, find_gpu, find_model
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

ROOT = Path(__file__).parents[2]
WORK = [BenchRequest(None, 900 + 50 * n, 40, 0.01 * n) for n in range(20)]
CARD = find_gpu("A10").model_dump()
MODEL = find_model("llama-3-8b").model_dump()


def config(model: str, kind: str | None, **sections: Any) -> RunFile:
    return as_run_file(
        {
            "model": model,
            "groups": {"g": {"kind": kind} if kind else {}},
            "instances": {"x": {"group": "g"}},
        }
        | sections
    )


def hardware(path: Path, **sections: Any) -> dict[str, object]:
    """The section ``simulate`` with a file of one node."""
    node = {"gpu": "my-card", "gpus": 1, "nic_gb_s": 1.0}
    file = path / "hardware.yaml"
    data = {"source": "none", "latency_s": 0.0, "nodes": {"n": node}} | sections
    file.write_text(yaml.safe_dump(data))
    return {"simulate": {"hardware": str(file), "groups": {"g": {"node": "n"}}}}


def test_ones_own_are_what_shipped_ones_with_their_numbers_are(tmp_path: Path) -> None:
    own = {"gpus": {"my-card": CARD}, "models": {"mine": MODEL}}
    expected = simulate(config("llama-3-8b", "A10"), WORK).wall_s
    assert simulate(config("mine", "my-card", **own), WORK).wall_s == expected
    faster = {"gpus": {"my-card": CARD | {"memory_gb_s": 1200.0}}}
    assert simulate(config("llama-3-8b", "my-card", **faster), WORK).wall_s < expected
    # In a hardware file, in the run file beside it, and one of each.
    for here, there in ((own, {}), ({}, own), ({"models": own["models"]}, {"gpus": own["gpus"]})):
        found = simulate(config("mine", None, **here, **hardware(tmp_path, **there)), WORK)
        assert found.wall_s == expected


CPU = ROOT / "configs" / "cpu" / "single.yaml"


@pytest.mark.parametrize("file", [CPU, ROOT / "configs" / "cronus" / "cronus.yaml"])
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"gpus": {"A10": CARD}}, "gpus.A10: configs/gpus.yaml has that name; give it another"),
        (
            {"models": {"llama-3-8b": MODEL}},
            "models.llama-3-8b: configs/models.yaml has that name; give it another",
        ),
        ({"gpus": {"c": CARD | {"memory_gb": 0}}}, "gpus.c.memory_gb is 0, must be greater than"),
        (
            {"gpus": {"c": CARD | {"wats": 1}}},
            "gpus.c.wats: unknown option, did you mean 'watts'",
        ),
        ({"gpus": {"c": {"link": "NVLink"}}}, "gpus.c.bf16_tflops is missing"),
        ({"gpus": ["c"]}, "gpus is ['c'], must be a mapping"),
        (
            {"models": {"m": MODEL | {"num_experts": 4}}},
            "models.m: num_experts_per_tok is 0, of 4 experts",
        ),
        (
            {"models": {"m": MODEL | {"num_key_value_heads": 7}}},
            "models.m.num_key_value_heads is 7, must divide num_attention_heads, 32",
        ),
        (
            {"models": {"m": MODEL | {"hidden_size": 4100}}},
            "models.m.head_dim is missing: hidden_size, 4100, is no multiple of",
        ),
        ({"models": {"m": MODEL | {"head_dim": 0}}}, "models.m.head_dim is 0, must be greater"),
        (
            {"gpus": {"c": CARD | {"link": "NVLnk4"}}},
            "gpus.c.link: 'NVLnk4': did you mean 'NVLink'?",
        ),
        (
            {"gpus": {"c": CARD | {"link": "ethernet"}}},
            "gpus.c.link: 'ethernet': must be one of NVLink, PCIe, ",
        ),
    ],
)
def test_mistakes_carry_their_path_in_either_world(
    file: Path, sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = yaml.safe_load(file.read_text()) | sections
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(data))
    with pytest.raises(JaxinferError) as error:
        load_run_file(run_file)
    assert str(error.value).startswith(f"{run_file}: {message}")


def test_a_real_runs_file_may_have_them() -> None:
    own = {"gpus": {"my-card": CARD}, "models": {"mine": MODEL}}
    found = load_run_file(CPU, [f"{name}={json.dumps(section)}" for name, section in own.items()])
    assert found.own == Catalogue({"my-card": Gpu(**CARD)}, {"mine": find_model("llama-3-8b")})


def test_a_name_in_both_files_is_refused(tmp_path: Path) -> None:
    own = {"gpus": {"my-card": CARD}, "models": {"mine": MODEL}}
    both = hardware(tmp_path, **own)
    for section, name in (("gpus", "my-card"), ("models", "mine")):
        run_file = config("llama-3-8b", None, **{section: own[section]}, **both)
        with pytest.raises(JaxinferError, match=rf"{section}\.{name}: the run file has that name"):
            simulate(run_file, WORK)


def test_a_name_that_is_neither_has_its_neighbour() -> None:
    own = {"gpus": {"my-card": CARD}, "models": {"mine": MODEL}}
    with pytest.raises(JaxinferError, match="no GPU 'my-kard': did you mean 'my-card'"):
        simulate(config("mine", "my-kard", **own), WORK)
    with pytest.raises(JaxinferError, match=r"no folder with config\.json; did you mean 'mine'"):
        simulate(config("miner", "my-card", **own), WORK)


def test_a_nodes_link_has_collectives_of_its_own() -> None:
    known = Catalogue({"c": Gpu(**CARD | {"all_reduce_gb_s": 9.0, "all_reduce_s": 4e-6})})

    def collective(**options: float) -> tuple[float, float]:
        node = NodeOptions(gpu="c", gpus=2, nic_gb_s=1.0, **options)  # type: ignore[arg-type]
        return node.as_gpu(known).collective

    assert collective() == (9.0, 4e-6)
    assert collective(all_reduce_gb_s=5.0, all_reduce_s=0.0) == (5.0, 0.0)
    # The card's measured rate is that of its own link.
    assert collective(link_gb_s=12.0) == (12.0, 4e-6)


def test_a_roofline_takes_what_is_stated_of_collectives() -> None:
    """Two all-reduces of 7 tokens of 4096 16-bit numbers in each of 5 layers, as rings of two."""
    work = Work(7, 0, 1, 0, 0, [(100, 7)])

    def seconds(**stated: float) -> float:
        gpu = Gpu(**CARD | {"link_gb_s": 32.0} | stated)
        sizes = find_model("llama-3-8b"), 5, False, 2, 2, KernelEfficiency(1.0, 1.0)
        return RooflineStage(gpu, *sizes, *gpu.stated_collective).seconds(work)

    moved = 5 * 2 * 7 * 4096 * 2
    assert seconds(all_reduce_gb_s=8.0) - seconds() == pytest.approx(moved * (1 / 8e9 - 1 / 32e9))
    assert seconds(all_reduce_s=3e-6) - seconds() == pytest.approx(5 * 2 * 3e-6)


def test_a_pool_that_is_given_may_take_all_of_the_memory() -> None:
    """0.9 of 24.1 GB leave room for 2,700 pages of 2 MiB beside 16.06 GB of weights, not 3,000."""
    reserve = {"simulate": {"reserve_gb": 0.0}}

    def pages(num_pages: int | None) -> Any:
        instance = {"group": "g", "page_size": 16, "num_pages": num_pages}
        given = config("llama-3-8b", "A10", instances={"x": instance}, **reserve)
        return simulate(given, WORK).num_pages

    fits = int((0.9 * 23028 * 2**20 - 16.06e9) // (16 * 131072))
    assert pages(None) == pytest.approx(fits, abs=5)
    assert pages(3000) == 2999
    with pytest.raises(JaxinferError, match=r"24\.1 of 24\.1 GB hold 16\.06 GB of weights"):
        pages(4000)
