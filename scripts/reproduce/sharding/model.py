"""Steps of one phase under several layouts, by the simulator's roofline."""

from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.hardware.catalogue import Catalogue, ModelShape
from jaxinfer.models.layouts import ALL, LAYOUTS, Layout, Rule
from jaxinfer.serving.batch import Work
from jaxinfer.sharding.costs import LayoutCosts, LayoutFlow, Seconds
from jaxinfer.sharding.links import stated_links
from jaxinfer.simulate.costs.layout_roofline import LayoutStage


def _by_sequences(name: str) -> Layout:
    """Return section 3.3's multi-query attention by sequences, with the KV head on each device."""
    layout = LAYOUTS[name]
    rows = {
        letter: place for letter, place in layout.activations["residual"].items() if letter == "T"
    }
    activations = {**layout.activations, "heads": {"T": ALL}, "new_kv": rows, "kv": {}}
    *norms, layers = layout.parameters
    places = {letter: place for letter, place in layers.axes.items() if letter != "K"}
    parameters = (*norms, Rule(layers.pattern, places))
    return replace(layout, parameters=parameters, activations=activations, kv={})


# The paper's names: 1D and 2D weight-stationary, X- and XYZ-weight-gathered.
PAPERS: dict[str, Layout] = {
    "1D": LAYOUTS["megatron"],
    "2D": _by_sequences("weight_stationary_2d"),
    "X gathered": _by_sequences("weight_gathered"),
    "XYZ gathered": _by_sequences("fsdp"),
}


def prefill(prompts: int, tokens: int) -> Work:
    """Return the work of whole prompts in one step."""
    chunks = [(0, tokens)] * prompts
    return Work(prompts * tokens, 0, prompts, prompts, 0, chunks)


def decode(rows: int, context: int) -> Work:
    """Return the work of one token for each of ``rows`` sequences."""
    return Work(rows, rows, rows, rows, rows * context, [], rows)


def step(
    layout: Layout,
    model: ModelShape,
    card: str,
    mesh: Mapping[str, int],
    work: Work,
    weight_size: int = 2,
) -> Seconds:
    """Return the seconds of a step by parts, at the simulator's default efficiencies."""
    default, gpu = SimulateOptions(), Catalogue().gpu(card)
    flow, links = LayoutFlow(model, layout, mesh), stated_links(gpu, mesh)
    costs = LayoutCosts(flow, gpu, links, default.flops, default.bandwidth, weight_size=weight_size)
    return LayoutStage(costs, model.num_hidden_layers, last=True).spent(work)
