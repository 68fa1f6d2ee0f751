"""Step times interpolated from tables of measured operators, as in Vidur (section 4.2)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Self

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ITEMSIZE, Gpu, ModelShape
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.attention_grid import At, AttentionGrid, GridValues
from jaxinfer.simulate.costs.joint import Exchange, JointExperts, experts_curve
from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear, add_up
from jaxinfer.simulate.costs.skew import Skew
from jaxinfer.simulate.costs.table_files import (
    EXPERTS,
    FIRST,
    LAST,
    OPTIONAL,
    PER_LAYER,
    PER_SEQUENCE,
    attention_points,
    expert_points,
    find_degree,
    operator_points,
    unread_files,
)


class AttentionTable:
    """Microseconds of one layer's attention.

    Args:
        points: times by prefill_chunk, kv_prefill or prefill_key, n_decode, kv_decode.
        keyed: whether points are by prefill_key, the mean number of entries that a chunk's tokens
            see; otherwise by kv_prefill, the number of entries before the chunk.
        grids: earlier results for the same points, by kind of batch.
        skew: additional time of decodes of unequal lengths; None if only their mean counts.

    Raises:
        JaxinferError: there are no batches with only a chunk, or none with only decodes.
    """

    def __init__(
        self,
        points: Mapping[At, float],
        keyed: bool,
        grids: Mapping[str, GridValues] | None = None,
        skew: Skew | None = None,
    ) -> None:
        self.skew = skew
        self._own = 0.0 if keyed else 0.5
        kinds: dict[str, dict[At, float]] = {"chunks alone": {}, "decodes alone": {}, "both": {}}
        for at, micros in points.items():
            kind = "both" if at[0] and at[2] else "chunks alone" if at[0] else "decodes alone"
            kinds[kind][at] = micros
        for kind in ("chunks alone", "decodes alone"):
            if not kinds[kind]:
                raise JaxinferError(f"has no {kind}")
        self.grids = {
            kind: AttentionGrid(found, self._key, (grids or {}).get(kind))
            for kind, found in kinds.items()
            if found
        }
        self._chunks, self._decodes = self.grids["chunks alone"], self.grids["decodes alone"]
        self._both = self.grids.get("both")
        self._last: tuple[Work | None, float] = None, 0.0

    @property
    def measured(self) -> dict[str, float]:
        """The largest measured value of each quantity of a step."""
        (prompt, *_), (_, _, rows, entries) = self._chunks.ends, self._decodes.ends
        return {"prompt tokens": prompt, "decodes": rows, "entries per decode": entries}

    def _key(self, chunk: float, y: float) -> float:
        return y + self._own * chunk

    def __call__(self, work: Work) -> float:
        """Return microseconds of all rows.

        Chunks count as one chunk with their tokens and pairs.
        """
        last, micros = self._last
        if work is not last:  # The stages of one instance ask for the same values.
            micros = self._micros(work)
            self._last = work, micros
        return micros

    def _micros(self, work: Work) -> float:
        n = work.singles
        context = work.single_context / n if n else 0.0
        chunk = key = 0.0
        if work.chunks:
            chunk = sum([count for _, count in work.chunks])
            key = sum([count * (start + count / 2) for start, count in work.chunks]) / chunk
        y = key - self._own * chunk
        micros = self._at(chunk, y, n, context)
        if self.skew and work.single_span and n > 1:
            least, most = work.single_span
            if most > least:
                rate = (context - least) / (most - least)
                share = self.skew.share(chunk, n, rate, most, max(key - chunk / 2, 0.0))
                if share:
                    micros += share * max(self._at(chunk, y, n, most) - micros, 0.0)
        return micros

    def of_decodes(self, rows: int) -> Callable[[float], float]:
        """Return microseconds of a step that only decodes, as a function of the mean context."""
        return self._decodes.along(0.0, 0.0, rows)

    def _at(self, chunk: float, y: float, n: int, context: float) -> float:
        """Return microseconds of a batch whose decodes all see the same context."""
        if not chunk:
            return self._decodes(0.0, 0.0, n, context) if n else 0.0
        if n and self._both:
            return self._both(chunk, y, n, context)
        alone = self._chunks(chunk, y, 0.0, 0.0)
        return alone + self._decodes(0.0, 0.0, n, context) if n else alone


@dataclass(frozen=True)
class OperatorTables:
    """The contents of the files for one degree of tensor parallelism.

    Attributes:
        dense: curve of each operator by tokens.
        heads: curve of each operator by sequences.
        not_read: files that no step's time needs.
    """

    dense: Mapping[str, PiecewiseLinear]
    heads: Mapping[str, PiecewiseLinear]
    attention: AttentionTable
    not_read: Sequence[str]
    _sums: dict[tuple[int, bool, bool, bool], PiecewiseLinear] = field(default_factory=dict)

    @classmethod
    def read(cls, tp: Path, with_skew: bool = False, experts: bool = False) -> Self:
        """Read the operators from a folder such as ``tp1``; times of experts are kept separately.

        Args:
            experts: whether the model has experts instead of a feed-forward layer.

        Raises:
            JaxinferError: a table is missing, lacks an operator or has an unknown one.
        """
        not_read = unread_files(tp, experts)
        dense, heads = (
            {name: PiecewiseLinear(y) for name, y in operator_points(tp, file, experts).items()}
            for file in ("dense", "per_sequence")
        )
        points, keyed = attention_points(tp)
        skew = Skew.read(tp) if with_skew else None
        not_read = [name for name in not_read if not (skew and name == "skew_fit.csv")]
        try:
            return cls(dense, heads, AttentionTable(points, keyed, skew=skew), not_read)
        except JaxinferError as error:
            raise JaxinferError(f"{tp}: attention.csv {error}") from None

    def per_token(
        self, layers: int, first: bool, last: bool, experts: bool = True
    ) -> PiecewiseLinear:
        """Return microseconds of a stage's operators except attention, by tokens; computed once.

        Args:
            experts: whether to include the experts' operators.
        """
        stage = layers, first, last, experts
        if stage not in self._sums:
            counts = {name: n for name, n in self.per_layer.items() if experts or name != "moe"}
            each = [(self.dense[name], layers * n) for name, n in counts.items()]
            once = [(self.dense[name], 1) for name in (*FIRST * first, *LAST * last)]
            self._sums[stage] = add_up(each + once)
        return self._sums[stage]

    @property
    def per_layer(self) -> dict[str, int]:
        """How often each available operator runs in a layer."""
        counts = PER_LAYER | OPTIONAL | EXPERTS
        return {name: n for name, n in counts.items() if name in self.dense}


@lru_cache(maxsize=16)
def _read(
    tp: Path, with_skew: bool, experts: bool, files: Sequence[tuple[str, int, int]]
) -> OperatorTables:
    """Read the operators once, until the files change.

    A search asks for them thousands of times.
    """
    return OperatorTables.read(tp, with_skew, experts)


def read_operators(tp: Path, with_skew: bool = False, experts: bool = False) -> OperatorTables:
    """Read the operators of a folder such as ``tp1``; see ``OperatorTables.read``."""
    found = [(path.name, path.stat()) for path in sorted(tp.glob("*.csv*"))]
    files = tuple((name, s.st_mtime_ns, s.st_size) for name, s in found)
    return _read(tp, with_skew, experts, files)


@dataclass(frozen=True)
class Collectives:
    """Seconds of collectives between the devices that share each layer, where no table has them.

    Attributes:
        step_s: seconds per step.
        token_s: seconds per token.
        head_s: seconds per step that yields tokens.
        sampled_s: seconds per row that yields a token.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    head_s: float = 0.0
    sampled_s: float = 0.0

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step."""
        found = self.step_s + self.token_s * work.tokens
        return found + self.head_s + self.sampled_s * work.sampled if work.sampled else found


def rings(
    gpu: Gpu, model: ModelShape, devices: int, itemsize: int, layers: int, first: bool, last: bool
) -> Collectives:
    """Model all-reduces in rings: two per layer and one for the embedding; logits are gathered.

    Args:
        first: whether the stage has the embedding.
        last: whether it has the head. Each device has a part of the vocabulary.
    """
    gb_s, each_s = gpu.collective
    byte_s = (devices - 1) / devices / (gb_s * 1e9)
    count = 2 * layers + first
    token_s = 2 * count * model.hidden_size * itemsize * byte_s
    return Collectives(
        count * each_s, token_s, last * each_s, last * model.vocab_size * itemsize * byte_s
    )


class TableStage:
    """Step times of a pipeline stage from tables of its operators.

    Args:
        found: tables for this model, this GPU and this number of ``devices``.
        source: file or folder that they were read from.
        devices: degree of tensor parallelism.
        itemsize: bytes per number of hidden states and logits.
        layers: number of layers.
        first: whether the stage has the embedding.
        last: whether the stage has the head.
        step_s: seconds that the engine adds to each step.
        sequence_s: seconds that the engine adds for each sequence.
        sharers: number of instances that share the experts, including this one.

    Attributes:
        read: contents of the tables, as JSON values.
        measured: largest measured value of each quantity of a step.
        joint: times of the experts that several instances share; None if they share none.
        asks_spans: whether times depend on the spread of a step's contexts.
    """

    def __init__(
        self,
        found: OperatorTables,
        source: str,
        model: ModelShape,
        gpu: Gpu,
        devices: int,
        itemsize: int,
        layers: int,
        first: bool,
        last: bool,
        step_s: float = 0.0,
        sequence_s: float = 0.0,
        sharers: int = 1,
    ) -> None:
        self._layers, self._step_s, self._sequence_s = layers, step_s, sequence_s
        self._tokens = found.per_token(layers, first, last, experts=sharers == 1)
        self.joint: JointExperts | None = None
        if sharers > 1:
            exchange = Exchange.of(gpu, model, sharers, itemsize)
            self.joint = JointExperts(found.dense["moe"], exchange, layers)
        self._sampled = add_up((found.heads[name], 1) for name in PER_SEQUENCE) if last else None
        self._attention = found.attention
        self.asks_spans = found.attention.skew is not None
        self._collectives = Collectives()
        self.read: dict[str, object] = {
            "folder": source,
            "per_layer": found.per_layer | {"attention": 1},
            "per_step": [*FIRST * first, *LAST * last],
            "per_sequence": list(PER_SEQUENCE * last),
            "tokens": [self._tokens.x[0], self._tokens.x[-1]],
            "attention": {
                kind: {"points": grid.size - grid.filled, "filled_in": grid.filled}
                for kind, grid in self._attention.grids.items()
            },
            "not_read": list(found.not_read),
        }
        self.measured = {
            "tokens": min(curve.x[-1] for curve in found.dense.values()),
            **self._attention.measured,
        }
        if devices > 1 and "all_reduce" not in found.dense:
            self._collectives = rings(gpu, model, devices, itemsize, layers, first, last)
            gb_s, each_s = gpu.collective
            self.read["collectives"] = {"gb_s": gb_s, "each_s": each_s, "all_reduces_per_layer": 2}

    @classmethod
    def open(cls, folder: Path, part: StagePart, costs: SimulateOptions) -> Self:
        """Read the stage's operators from a folder for this model and GPU.

        Raises:
            JaxinferError: a table is missing, lacks an operator or has an unknown one.
        """
        tp = find_degree(folder, part.devices)
        experts = part.model.num_experts > 0
        skew = Skew.is_in(tp) if costs.skew is None else costs.skew
        found = read_operators(tp, skew, experts)
        if experts:
            curve = experts_curve(expert_points(tp), part.model, part.sharers * part.devices)
            found = replace(found, dense={**found.dense, "moe": PiecewiseLinear(curve)}, _sums={})
        return cls.of(found, str(tp), part, costs)

    @classmethod
    def of(
        cls, found: OperatorTables, source: str, part: StagePart, costs: SimulateOptions
    ) -> Self:
        """Make the stage from operators that were already read."""
        return cls(
            found, source, part.model, part.gpu, part.devices, ITEMSIZE,
            part.layers, part.first, part.last, costs.step_s, costs.sequence_s, part.sharers,
        )  # fmt: skip

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step, without experts if they are shared."""
        micros = self._layers * self._attention(work) + self._tokens(work.tokens)
        if self._sampled and work.sampled:
            micros += self._sampled(work.sampled)
        seconds = micros * 1e-6 + self._step_s + self._sequence_s * work.sequences
        return seconds + self._collectives.seconds(work)

    def decode_seconds(self, rows: int) -> Callable[[int], float]:
        """Return the seconds of a step of ``rows`` decodes, as a function of their KV entries.

        Only the mean of the entries counts.
        """
        layers, attention = self._layers, self._attention.of_decodes(rows)
        dense, head = self._tokens(rows), self._sampled(rows) if self._sampled else 0.0
        step_s, rows_s = self._step_s, self._sequence_s * rows
        more = self._collectives.seconds(Work(rows, rows, rows, rows, 0, [], rows))
        return lambda seen: (
            (layers * attention(seen / rows) + dense + head) * 1e-6 + step_s + rows_s + more
        )
