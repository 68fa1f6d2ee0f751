"""``jaxinfer shard``: compares the costs of layouts before anything runs."""

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from jaxinfer.commands.common import new_results, say, with_pictures
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.errors import JaxinferError

if TYPE_CHECKING:
    from jaxinfer.hardware.catalogue import Gpu, ModelShape
    from jaxinfer.lab.sharding.search import AxisAssignment, PricedLayout
    from jaxinfer.lab.sharding.study import LayoutFinding, LayoutQuestion
    from jaxinfer.models.layouts import Layout
    from jaxinfer.sharding.links import Link

# Largest number of prompt tokens, or sequences, for which layouts are compared.
MOST = 65536


@click.command()
@click.option(
    "--model", required=True, help="Model: name in configs/models.yaml, folder, or config.json."
)
@click.option(
    "--mesh",
    required=True,
    metavar="X=4,Y=2",
    help="Axes of the mesh and their sizes, outermost first.",
)
@click.option(
    "--layouts", help="Layouts to compare: names or Python files, with commas (default: all nine)."
)
@click.option(
    "--for", "target", help="Target to compile for: cpu:8, h100:8, v5e:2x4 (default: cpu)."
)
@click.option(
    "--card", help="GPU: name in configs/gpus.yaml (default: that of --for, else H100-SXM)."
)
@click.option(
    "--domain",
    type=click.IntRange(min=1),
    help="GPUs joined by the GPU's own link (default: those of --card).",
)
@click.option(
    "--network",
    metavar="GB_S",
    help="Bandwidth of a GPU to other domains (default: that of --card).",
)
@click.option(
    "--link", "links", multiple=True, metavar="AXIS=GB_S", help="Bandwidth along one axis."
)
@click.option(
    "--phase",
    type=click.Choice(["prefill", "decode", "both"]),
    default="both",
    help="Phase to compare (default: both).",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=2048,
    help="Tokens of the prompt (default: 2048).",
)
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    default=64,
    help="Sequences that decode (default: 64).",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=2048,
    help="Tokens in the KV cache of each sequence (default: 2048).",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    help="Format of weights, activations and KV (default: bfloat16).",
)
@click.option("--search", is_flag=True, help="Also search all assignments of weights to mesh axes.")
@click.option("--out", help="New folder for tables, a picture and parts of run files.")
@with_pictures
@with_json
def shard(
    model: str,
    mesh: str,
    layouts: str | None,
    target: str | None,
    card: str | None,
    domain: int | None,
    network: str | None,
    links: tuple[str, ...],
    phase: str,
    tokens: int,
    sequences: int,
    context: int,
    dtype: str,
    search: bool,
    out: str | None,
    pictures: str | None,
    as_json: bool,
) -> None:
    """Compare layouts of a model on a mesh: bytes, collectives and estimated seconds.

    For each layout, one layer is compiled, without weights. Seconds come from a roofline model.
    """
    from jaxinfer.lab.sharding.compiling import PHASES
    from jaxinfer.lab.sharding.search import layout_file
    from jaxinfer.lab.sharding.study import LayoutQuestion
    from jaxinfer.lab.sharding.targets import CompileTarget, check_installed

    sizes = _mesh(mesh)
    devices = math.prod(sizes.values())
    compiler = CompileTarget.read(target or f"cpu:{devices}")
    if compiler.devices != devices:
        raise JaxinferError(
            f"--for {compiler}: {compiler.devices} devices, --mesh {mesh} has {devices}"
        )
    for option, given in (("--pictures", pictures), ("--search", search)):
        if given and not out:
            raise JaxinferError(f"{option} writes files to --out, which is missing")
    check_installed(compiler)
    kind, gpu = _card(card or compiler.card, f"--card {card}" if card else f"--for {compiler}")
    gpu = _with_network(kind, gpu, domain, network)
    question = LayoutQuestion(
        _model(model),
        sizes,
        gpu,
        compiler,
        PHASES if phase == "both" else (phase,),
        tokens,
        sequences,
        context,
        dtype,
        _links(links, sizes, gpu),
    )
    axes = " x ".join(f"{axis}={n}" for axis, n in sizes.items())
    title = f"{model}, {axes} of {kind}{_in_domains(question)}, {dtype}"
    chosen = _layouts(layouts, question.model)
    searched = _search(question) if search else {}
    chosen |= {name: each.layout(tuple(sizes)) for name, each in searched.items()}
    if out:
        with new_results(Path(out)):
            for name, each in searched.items():
                text = layout_file(each, tuple(sizes))
                (Path(out) / f"{name}.py").write_text(text, encoding="utf-8")
            _report(question, chosen, title, Path(out), pictures or "png", as_json)
    else:
        _report(question, chosen, title, None, "", as_json)


def _report(
    question: "LayoutQuestion",
    layouts: "Mapping[str, Layout]",
    title: str,
    out: Path | None,
    kind: str,
    as_json: bool,
) -> None:
    from jaxinfer.lab.sharding.cache import FOLDER
    from jaxinfer.lab.sharding.crossings import crossings, fastest, token_counts
    from jaxinfer.lab.sharding.picture import draw_seconds
    from jaxinfer.lab.sharding.study import seconds_of, study, where_it_fits
    from jaxinfer.lab.sharding.table import (
        UNITS,
        all_rows,
        fastest_lines,
        link_line,
        tables,
        write_csvs,
    )
    from jaxinfer.report.progress import LoadProgress

    with LoadProgress(True) as bar:
        part = f"compiling layers for {question.target}"
        findings, refused = study(
            question, layouts, FOLDER.expanduser(), lambda left: bar.update(part, left)
        )
    seconds = {
        phase: {
            each.layout: seconds_of(question, layouts[each.layout], phase)
            for each in findings
            if each.phase == phase
        }
        for phase in question.phases
    }
    counts = token_counts(MOST)
    fitting = {
        phase: {
            name: where_it_fits(question, layouts[name], phase, of)
            for name, of in of_layouts.items()
        }
        for phase, of_layouts in seconds.items()
    }
    best = {phase: fastest(of, counts) for phase, of in fitting.items()}
    runs = {name: not {*"SC"} & layout.kv.keys() for name, layout in layouts.items()}
    parts = run_file_parts(question, [each for each in findings if runs[each.layout]], out)
    if as_json:
        first = {phase: [{"from": n, "layout": name} for n, name in f] for phase, f in best.items()}
        print_json({"layouts": all_rows(question, findings, refused), "fastest": first})
    else:
        console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
        for table in tables(question, findings, refused, title):
            console.print(table)
            console.print()
        of_files = (line for text in parts.values() for line in text)
        for line in (UNITS, link_line(question), *fastest_lines(best), *of_files):
            console.print(line, soft_wrap=True, markup=False)
    if out:
        crossed = {p: crossings(s, counts) for p, s in seconds.items()}
        write_csvs(out, question, findings, refused, crossed)
        for phase, lines in parts.items():
            (out / f"{phase}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        asked = {"prefill": question.tokens, "decode": question.sequences}
        picture = out / f"seconds.{kind}"
        draw_seconds(picture, seconds, fitting, best, counts, asked, title)
        if not as_json:
            console.print(f"tables, picture and parts of run files: {out}/", markup=False)


def _search(question: "LayoutQuestion") -> "dict[str, AxisAssignment | PricedLayout]":
    """Return the fastest assignment of each phase, by the name of its layout, if there is one."""
    from jaxinfer.lab.sharding.search import LayoutSearch
    from jaxinfer.report.progress import LoadProgress

    found = {}
    search = LayoutSearch(
        question.model, question.mesh, question.card, question.links, question.itemsize
    )
    with LoadProgress(True) as bar:
        for phase in question.phases:
            part = f"layouts of weights for {phase}"
            best = search.best(question.asked(phase), partial(bar.update, part))
            if best:
                found[f"search_{phase}"] = best.assignment
                say(f"search_{phase}: {best.assignment}")
            else:
                say(f"search_{phase}: no layout fits")
    return found


def run_file_parts(
    question: "LayoutQuestion", findings: "list[LayoutFinding]", out: Path | None
) -> dict[str, list[str]]:
    """Return, for each phase, lines of a run file that choose the fastest layout that fits.

    Args:
        findings: results of layouts that engines support.
        out: folder of files with layouts that were found by a search.
    """
    from jaxinfer.lab.sharding.table import fits

    found = {}
    axes = ", ".join(f"{axis}: {size}" for axis, size in question.mesh.items())
    for phase in question.phases:
        fitting = [each for each in findings if each.phase == phase and fits(question, each)]
        if fitting:
            best = min(fitting, key=lambda each: each.seconds.total)
            file = out / f"{best.layout}.py" if out else None
            layout = file if file and file.exists() else best.layout
            found[phase] = [
                f"# {phase}: the fastest that fits, of those that engines have",
                f"groups: {{{phase}: {{devices: {question.target.devices}, mesh: {{{axes}}}}}}}",
                f"instances: {{{phase}: {{group: {phase}}}}}",
                f"engine: {{layout: {layout}}}",
            ]
    return found


def _mesh(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis.isidentifier() or not size.isdecimal():
            raise JaxinferError(f"--mesh {text}: {part!r}: must be axes and sizes, as x=4,y=2")
        if int(size) < 1:
            raise JaxinferError(f"--mesh {text}: axis {axis} has {size} devices, must be 1 or more")
        if axis in sizes:
            raise JaxinferError(f"--mesh {text}: axis {axis} is given twice")
        sizes[axis] = int(size)
    return sizes


def _links(texts: tuple[str, ...], mesh: Mapping[str, int], gpu: "Gpu") -> "dict[str, Link]":
    from jaxinfer.sharding.links import links_of

    links = links_of(gpu, mesh)
    for text in texts:
        axis, _, rate = text.partition("=")
        if axis not in mesh:
            raise JaxinferError(f"--link {text}: no axis {axis!r}, --mesh has {', '.join(mesh)}")
        links[axis] = replace(links[axis], gb_s=_gb_s(f"--link {text}", rate, f"{axis}=50"))
    return links


def _gb_s(option: str, rate: str, example: str) -> float:
    try:
        gb_s = float(rate)
    except ValueError:
        gb_s = 0.0
    if not 0 < gb_s < math.inf:
        raise JaxinferError(f"{option}: must be 10^9 bytes per second, as {example}")
    return gb_s


def _with_network(kind: str, gpu: "Gpu", domain: int | None, network: str | None) -> "Gpu":
    """Return the card with other domains, or with another network between them."""
    own: dict[str, object] = {} if domain is None else {"domain": domain}
    if network is not None:
        own["network_gb_s"] = _gb_s(f"--network {network}", network, "50")
    if own and gpu.is_torus:
        raise JaxinferError(f"--domain, --network: {kind} has a torus: --link AXIS=GB_S")
    if network is not None and not (domain or gpu.domain):
        raise JaxinferError(f"--network {network}: {kind} has no domains: add --domain 8")
    return gpu.model_copy(update=own)


def _in_domains(question: "LayoutQuestion") -> str:
    from jaxinfer.sharding.links import axes_between_domains

    domain = question.card.domain
    return f" in domains of {domain}" if axes_between_domains(question.mesh, domain) else ""


def _model(name: str) -> "ModelShape":
    """Return a model by its name, its folder, or its config.json."""
    from jaxinfer.checkpoints.modelled import model_shape
    from jaxinfer.hardware.catalogue import Catalogue

    path = Path(name)
    model = model_shape(str(path.parent) if path.name == "config.json" else name, Catalogue())
    if model.windowed_layers:
        raise JaxinferError(f"{name}: has layers with windows, which are not studied")
    if model.stored_bits:
        raise JaxinferError(
            f"{name}: has weights of {model.stored_bits}, must have those of --dtype: take a "
            "config.json without quantization_config"
        )
    return model


def _card(name: str, option: str) -> "tuple[str, Gpu]":
    """Find a card by its name, in any case, or the first one whose name begins with it."""
    from jaxinfer.hardware.catalogue import find_gpu, gpu_names

    lower = name.lower()
    known = [each for each in gpu_names() if each.lower() == lower]
    known += [each for each in gpu_names() if each.lower().startswith(f"{lower}-")]
    found = known[0] if known else name
    try:
        return found, find_gpu(found)
    except JaxinferError as error:
        raise JaxinferError(f"{option}: {error}") from None


def _layouts(text: str | None, model: "ModelShape") -> "dict[str, Layout]":
    from jaxinfer.models.layout_files import load_layout
    from jaxinfer.models.layouts import LAYOUTS, PRICED
    from jaxinfer.sharding.shapes import check_layout

    found = {}
    # Without experts, layouts that cut experts equal other layouts.
    shipped = [
        name
        for name, layout in LAYOUTS.items()
        if model.num_experts or not any("E" in rule.axes for rule in layout.parameters)
    ]
    for name in text.split(",") if text is not None else [*shipped, *PRICED]:
        name = name.strip()
        if not name or name in found:
            raise JaxinferError(
                f"--layouts {text}: {f'{name!r} is given twice' if name else 'a name is missing'}"
            )
        found[name] = load_layout(name)
        try:
            check_layout(found[name], model)
        except JaxinferError as error:
            raise JaxinferError(f"layout {name}: {error}") from None
    return found
