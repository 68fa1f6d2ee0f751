"""Attention kernels on a GPU, side by side in one run, as shares of what the machine can do.

    python -m scripts.bench.kernels --json figures.json
    python -m scripts.bench.kernels --json figures.json --rehearse   # on a CPU: small, interpreted

bfloat16, 32 query and 8 KV heads of 128, pages of 64 tokens. Decodes: batches of 64 x 4,096 and
4 x 65,536 tokens of context, as a share of the measured copy bandwidth (keys and values are read
once). Chunked prefill: 2,048 new tokens after 8,192, as a share of the measured rate of matrix
products. Beside our kernels: the plain functions, jax's own paged decode,
``jax.nn.dot_product_attention`` (cuDNN) on the same data laid out contiguously, and torch's
flex_attention over pages of 128 tokens (--flex; it has to compile). Medians of rounds in
which the functions take turns, of several calls each, so that launching costs nothing; each result
is compared with the plain function's. A case has a process of its own, and another without Mosaic's
kernel should that end or hang it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Torch needs memory, too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import click
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.pallas_kernels import generic, hopper, kv_pages, reference
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.stage.machine_speed import copy_rate, product_rate

N, K, H, B = 32, 8, 128, 64
CALLS = 10
# Seconds for one case, compilation included; one that hangs is stopped.
CASE_S = 120
# Of the largest value: products of bfloat16.
TOLERANCE = 2e-2


class Run(NamedTuple):
    """A function to time: starts its work, and waits for it."""

    start: Callable[[], Any]
    wait: Callable[[Any], object] = jax.block_until_ready


class Case(NamedTuple):
    """Computations of a case, and the least seconds that the machine's rates allow.

    Attributes:
        runs: by name, the maker of each; peers last.
    """

    runs: dict[str, Callable[[], Run]]
    least: dict[str, float]


def seconds(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Medians of one call, of runs that have been compiled.

    As many calls are in flight as take a twentieth of a second; a slow one has few rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    calls: dict[str, int] = {}
    for number in range(rounds):
        for name, run in runs.items():
            if number >= 3 and calls[name] == 1:
                continue
            start = time.perf_counter()
            for _ in range(calls.get(name, 1)):
                last = run.start()
            run.wait(last)
            took = (time.perf_counter() - start) / calls.get(name, 1)
            if number:
                times[name].append(took)
            calls[name] = max(min(int(0.05 / took), CALLS), 1)
    return {name: statistics.median(found) for name, found in times.items()}


def pool(sequences: int, length: int) -> tuple[KVPages, jax.Array]:
    """Pages by token, in random order, and their table."""
    M = -(-length // B)
    order = np.random.default_rng(0).permutation(sequences * M)
    size = sequences * M + 1, K, B, H
    keys, values = (
        jax.random.normal(key, size, jnp.bfloat16) for key in jax.random.split(jax.random.key(0))
    )
    return KVPages(keys, values), jnp.asarray(1 + order.reshape(sequences, M), jnp.int32)


@jax.jit
def contiguous(pages_PKBH: jax.Array, table_SM: jax.Array) -> jax.Array:
    """[S, L, K, H]."""
    x_SMBKH = pages_PKBH[table_SM].swapaxes(2, 3)
    return x_SMBKH.reshape(len(table_SM), -1, *x_SMBKH.shape[3:])


@jax.jit
def in_8_bits(kv: KVPages) -> KVPages:
    """Quantise the pages to 8 bits, with scales of each page and head."""
    scales = [jnp.abs(x.astype(jnp.float32)).max((2, 3)) / 127 for x in kv[:2]]
    keys, values = (
        kv_pages.quantise(x.astype(jnp.float32), scale[..., None, None], jnp.dtype("int8"))
        for x, scale in zip(kv[:2], scales, strict=True)
    )
    return KVPages(keys, values, *scales)


def dense_kind(rehearse: bool) -> Literal["cudnn", "xla"]:
    """Name the attention to contiguous data."""
    return "xla" if rehearse else "cudnn"


def kernels(name: str, rehearse: bool) -> dict[str, Callable[..., jax.Array]]:
    """Our functions of that name that run here, the plain one first."""
    found = {"plain": getattr(reference, name)}
    found["generic"] = partial(getattr(generic, name), interpret=rehearse)
    capability = getattr(jax.devices()[0], "compute_capability", "")
    if capability == "9.0":
        found["hopper"] = getattr(hopper, name)
    return {how: jax.jit(run) for how, run in found.items()}


def decode_case(sequences: int, length: int, copied: float, rehearse: bool, flex: bool) -> Case:
    """One step of decodes."""
    kv, table = pool(sequences, length)
    q = jax.random.normal(jax.random.key(1), (sequences, N, H), jnp.bfloat16) * H**-0.5
    lengths = jnp.full((sequences,), length, jnp.int32)
    plain = kv._replace(keys=jnp.swapaxes(kv.keys, 2, 3))
    ours = kernels("decode_attention", rehearse)
    runs: dict[str, Callable[[], Run]] = {
        how: partial(Run, partial(run, q, plain if how == "plain" else kv, table, lengths))
        for how, run in ours.items()
    }
    runs["generic, int8"] = lambda: Run(partial(ours["generic"], q, in_8_bits(kv), table, lengths))
    kind = dense_kind(rehearse)
    attend = partial(jax.nn.dot_product_attention, implementation=kind, scale=1.0)
    dense = jax.jit(lambda q, k, v: attend(q[:, None], k, v)[:, 0])
    flat = [contiguous(pages, table) for pages in kv[:2]]
    runs[f"contiguous, {kind}"] = lambda: Run(partial(dense, q, *flat))
    if not rehearse:
        from jax.experimental.pallas.ops.gpu import paged_attention as shipped

        by_head = [pages.swapaxes(0, 1) for pages in kv[:2]]
        for block in (1, 2, 4):
            theirs = jax.jit(partial(shipped.paged_attention, pages_per_compute_block=block))
            runs[f"jax's, {block} pages"] = partial(
                Run, partial(theirs, q, *by_head, table, lengths)
            )
    if flex:
        runs["flex_attention"] = lambda: flex_attention(sequences, 1, length - 1)
    least = sequences * length * 2 * K * H * 2 / copied
    return Case(runs, dict.fromkeys(runs, least) | {"generic, int8": least / 2})


def chunk_case(new: int, before: int, multiplied: float, rehearse: bool, flex: bool) -> Case:
    """One chunk of a prompt."""
    kv, table = pool(1, before + new)
    q = jax.random.normal(jax.random.key(1), (new, N, H), jnp.bfloat16) * H**-0.5
    rest = jnp.array([before], jnp.int32), jnp.array([0, new], jnp.int32)
    plain = kv._replace(keys=jnp.swapaxes(kv.keys, 2, 3))
    runs: dict[str, Callable[[], Run]] = {
        how: partial(Run, partial(run, q, plain if how == "plain" else kv, table, *rest))
        for how, run in kernels("chunk_attention", rehearse).items()
    }
    length = before + new
    seen = jnp.arange(length)[None, :] <= before + jnp.arange(new)[:, None]
    kind = dense_kind(rehearse)
    attend = partial(jax.nn.dot_product_attention, implementation=kind, scale=1.0)
    dense = jax.jit(lambda q, k, v: attend(q[None], k, v, mask=seen[None, None])[0])
    flat = [contiguous(pages, table)[:, :length] for pages in kv[:2]]
    # The mask is an array of biases to cuDNN; without, it is given more to do, but less to read.
    runs[f"contiguous, {kind}"] = lambda: Run(partial(dense, q, *flat))
    whole = jax.jit(lambda q, k, v: attend(q[None], k, v)[0])
    runs[f"contiguous, {kind}, unmasked"] = lambda: Run(partial(whole, q, *flat))
    if flex:
        runs["flex_attention"] = lambda: flex_attention(1, new, before)
    pairs = new * before + new * (new + 1) / 2
    return Case(runs, dict.fromkeys(runs, 4 * N * H * pairs / multiplied))


def flex_attention(sequences: int, new: int, before: int) -> Run:
    """Torch's, causal, over pages of the size that its blocks have. The data are others."""
    import torch
    from torch.nn.attention import flex_attention as flex
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    page, length = 128, before + new
    each = -(-length // page)
    paged = PagedAttention(sequences * each, page, sequences, device="cuda")
    for number in range(sequences):
        paged.reserve(torch.tensor(number, device="cuda"), torch.tensor(length, device="cuda"))
    like = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(sequences, N, new, H, **like)
    k, v = (torch.randn(1, K, sequences * each * page, H, **like) for _ in "kv")

    def causal(b: Any, h: Any, row: Any, token: Any) -> Any:
        return row + before >= token

    mask = flex.create_block_mask(causal, sequences, None, new, each * page, BLOCK_SIZE=page)
    mask = paged.convert_logical_block_mask(mask)
    attend = torch.compile(flex.flex_attention, dynamic=False)
    start = partial(attend, q, k, v, block_mask=mask, enable_gqa=True, scale=1.0)
    return Run(start, lambda _: torch.cuda.synchronize())


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Seconds, the share of the machine's rate, and the largest difference from plain JAX.

    A run that fails has its error's first line, and the others are timed.
    """
    runs: dict[str, Run] = {}
    figures: dict[str, Any] = {}
    expected: Any = None
    for how, make in case.runs.items():
        try:
            run = make()
            found = run.start()
            run.wait(found)
        except Exception as error:  # Whatever it is, the figures have it.
            figures[how] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            continue
        runs[how], figures[how] = run, {}
        expected = found if how == "plain" else expected
        if how != "flex_attention" and "unmasked" not in how and expected is not None:
            off = jnp.abs(found - expected).max() / jnp.abs(expected).max()
            figures[how]["error"] = float(off)
    for how, took in seconds(runs, rounds).items():
        figures[how] |= {"seconds": took, "of_the_machine": case.least[how] / took}
    return figures


CASES: dict[str, Callable[[int, float, float, bool, bool], Case]] = {
    "decode 64 x 4096": lambda scale, copied, _, *how: decode_case(
        max(64 // scale, 2), 4096 // scale, copied, *how
    ),
    "decode 4 x 65536": lambda scale, copied, _, *how: decode_case(
        max(4 // scale, 2), 65536 // scale, copied, *how
    ),
    "chunk of 2048 after 8192": lambda scale, _, multiplied, *how: chunk_case(
        2048 // scale, 8192 // scale, multiplied, *how
    ),
}


def run_case(name: str, rounds: int, flex: bool, rehearse: bool, without: str) -> dict[str, Any]:
    """All runs of one case but ``without``, and the machine's rates."""
    copied = copy_rate(2**20 if rehearse else 2**30)
    multiplied = product_rate(512 if rehearse else 8192)
    case = CASES[name](64 if rehearse else 1, copied, multiplied, rehearse, flex)
    case.runs.pop(without, None)
    return {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "rehearsed": rehearse,
        "copy_gb_s": copied / 1e9,
        "product_tflops": multiplied / 1e12,
        "runs": measure(case, 2 if rehearse else rounds),
    }


def in_own_process(name: str, options: list[str], without: str) -> dict[str, Any] | str:
    """The case's figures, or how its process ended: a GPU's fault takes all of a process along."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        command = [sys.executable, __file__, *options, "--case", name, "--json", str(path)]
        try:
            done = subprocess.run([*command, "--without", without], timeout=CASE_S)
        except subprocess.TimeoutExpired:
            return f"stopped at {CASE_S} s"
        if done.returncode:
            return f"exit status {done.returncode}"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def is_wrong(how: str, run: Mapping[str, Any]) -> bool:
    """True if one of our kernels failed or is off by more than rounding."""
    ours = how in ("generic", "hopper")
    return ours and not run.get("error", float("inf")) < TOLERANCE


@click.command()
@click.option("--json", "json_path", required=True, help="File for the figures.")
@click.option("--rounds", default=20)
@click.option("--flex", is_flag=True, help="With torch's flex_attention.")
@click.option("--rehearse", is_flag=True, help="Small, and interpreted: on a CPU.")
@click.option("--case", type=click.Choice(list(CASES)), help="This one alone, in this process.")
@click.option("--without", default="", help="A run of the case to leave out.")
def main(
    json_path: str, rounds: int, flex: bool, rehearse: bool, case: str | None, without: str
) -> None:
    """Measure, print and write; exit with 1 if a kernel of ours has failed or is wrong."""
    if case:
        write(json_path, run_case(case, rounds, flex, rehearse, without))
        return
    options = ["--rounds", str(rounds), *["--flex"] * flex, *["--rehearse"] * rehearse]
    figures: dict[str, Any] = {}
    wrong = 0
    for name in CASES:
        found = in_own_process(name, options, without)
        if isinstance(found, str) and without != "hopper":
            ended, found = found, in_own_process(name, options, "hopper")
            if not isinstance(found, str):
                found["runs"]["first try"] = {"failed": ended}
                wrong += 1
        if isinstance(found, str):
            found = {"runs": {"all": {"failed": found}}}
            wrong += 1
        figures[name] = found
        write(json_path, figures)
        for how, of in found["runs"].items():
            wrong += is_wrong(how, of)
            said = of.get("failed")
            if said is None:
                said = f"{1000 * of['seconds']:.3f} ms, {of['of_the_machine']:.0%} of the machine's"
                said += f" rate, off by {of['error']:.1e}" if "error" in of else " rate"
            print(f"{name}: {how}: {said}", flush=True)
    raise SystemExit(wrong > 0)


def write(path: str, figures: dict[str, Any]) -> None:
    """Write the figures as JSON."""
    Path(path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
