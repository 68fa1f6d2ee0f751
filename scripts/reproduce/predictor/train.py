"""Trains and evaluates a predictor of answers' lengths on a model's own answers."""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer import LLM
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.config.workload import Workload
from jaxinfer.lab.predict.classifier import Training, classify, train
from jaxinfer.lab.predict.features import LengthBuckets, bag_of_tokens
from jaxinfer.lab.predict.length_classifier import (
    About,
    LengthClassifier,
    LengthClassifierOptions,
    load,
    save,
    train_on_prompts,
)
from jaxinfer.simulate.run import simulate
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.workload.lengths import read_workload
from scripts.reproduce.claims import Target, agrees
from scripts.reproduce.predictor.evaluate import (
    held_out,
    most_frequent,
    paired_bootstrap,
    table_by_length,
    wilson,
)
from scripts.reproduce.predictor.hidden import prompt_states
from scripts.tables import Row

CLASSIFIER = "jaxinfer.lab.predict.length_classifier:LengthClassifier"
BASELINES = {"majority": "majority class", "table": "table by prompt length"}
FOLDS, LENGTH_ROWS, SEED = 5, 4, 0
GRANULARITIES = (32, 64)
CLASSIFIER_FILE, TRACE_FILE = "classifier.safetensors", "trace.jsonl"


@dataclass(frozen=True)
class Examples:
    """Prompts as token ids, with the lengths of their answers and the sources of the prompts."""

    prompts: Sequence[list[int]]
    lengths: Sequence[int]
    sources: Sequence[str]
    cap: int


def read_examples(lines: Path, answers: Path, model: str) -> Examples:
    """Read lines up to the first without an answer.

    Later answers exist only because they are short.
    """
    lengths = {}
    for line in answers.read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        if answer["error"] is None:
            lengths[answer["custom_id"]] = answer["response"]["body"]["usage"]["completion_tokens"]
    tokenizer = load_tokenizer(open_checkpoint(model))
    asked = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    prompts, known, sources, cap = [], [], [], 0
    for number, line in enumerate(asked, 1):
        length = lengths.get(line.get("custom_id", f"line-{number}"))
        if length is None:
            break
        prompts.append(tokenizer.encode_chat(line["messages"]))
        known.append(length)
        sources.append(line["metadata"]["source"])
        cap = line["max_completion_tokens"]
    return Examples(prompts, known, sources, cap)


def predictors(
    examples: Examples, about: About, states_ND: np.ndarray | None
) -> dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    """Return functions by name; each learns from examples and predicts the classes of others."""
    buckets = about.buckets
    class_N = np.asarray([buckets.of(length) for length in examples.lengths])
    length_N = np.asarray([len(prompt) for prompt in examples.prompts])
    bag_NF = np.stack([bag_of_tokens(prompt, about.rows) for prompt in examples.prompts])

    def majority(known: np.ndarray, asked: np.ndarray) -> np.ndarray:
        return np.full(len(asked), most_frequent(class_N[known]))

    def table(known: np.ndarray, asked: np.ndarray) -> np.ndarray:
        return table_by_length(length_N[known], class_N[known], length_N[asked], LENGTH_ROWS)

    def by_source(known: np.ndarray, asked: np.ndarray) -> np.ndarray:
        source_N = np.asarray(examples.sources)
        of = {name: most_frequent(class_N[known][source_N[known] == name]) for name in source_N}
        return np.asarray([of[name] for name in source_N[asked]])

    def learned(
        x_NF: np.ndarray, hidden: int, options: Training, known: np.ndarray, asked: np.ndarray
    ) -> np.ndarray:
        model = train(x_NF[known], class_N[known], buckets.count, hidden, options)
        return classify(model, x_NF[asked])

    found: dict[str, Any] = {
        BASELINES["majority"]: majority,
        BASELINES["table"]: table,
        "table by source": by_source,
        "classifier": partial(learned, bag_NF, about.num_hidden, Training()),
    }
    if states_ND is not None:
        x_ND = states_ND - states_ND.mean(0)
        x_ND /= x_ND.std(0) + 1e-6
        found["probe of the hidden state"] = partial(
            learned, x_ND, 0, Training(weight_decay=1.0, learning_rate=1e-3)
        )
    return found


def evaluate(examples: Examples, about: About, states_ND: np.ndarray | None) -> list[Row]:
    """Return a row for each predictor, with its baselines on the same examples."""
    buckets = about.buckets
    length_N = np.asarray(examples.lengths)
    class_N = np.asarray([buckets.of(length) for length in examples.lengths])
    count = len(class_N)
    found = {
        name: held_out(predict, count, FOLDS, SEED)
        for name, predict in predictors(examples, about, states_ND).items()
    }
    rows = []
    for name, predicted_N in found.items():
        right_N = predicted_N == class_N
        low, high = wilson(int(right_N.sum()), count)
        lower_N = np.asarray([buckets.bounds(int(each))[0] for each in predicted_N])
        row: Row = {"granularity": about.granularity, "predictor": name}
        row |= {"accuracy": right_N.mean(), "low": low, "high": high}
        for base in ("majority", "table"):
            base_N = found[BASELINES[base]] == class_N
            less, more = paired_bootstrap(right_N, base_N, SEED)
            row |= {f"over {base}, low": less, f"over {base}, high": more}
        row |= {"mean error of lower end": np.abs(lower_N - length_N).mean()}
        for source in sorted(set(examples.sources)):
            row[source] = right_N[np.asarray(examples.sources) == source].mean()
        rows.append(row)
    return rows


def accuracy(run_file: Path, examples: Examples, out: Path) -> tuple[list[Row], list[Target]]:
    """Return the accuracy on prompts not trained on (five folds); save the first size's classifier.

    Args:
        out: folder for the classifier, a trace of prompts that it has not seen, and hidden states.
    """
    model = load_run_file(run_file).require_model()
    states_ND = _states(run_file, examples, out / "states.npy")
    vocab_size = open_checkpoint(model).config.vocab_size
    rows: list[Row] = []
    for size in GRANULARITIES:
        about = About(model=model, vocab_size=vocab_size, granularity=size, cap=examples.cap)
        rows += evaluate(examples, about, states_ND)
    learned = [row for row in rows if not row["predictor"].startswith(("majority", "table"))]
    first = GRANULARITIES[0]
    _tell(examples, LengthBuckets(first, examples.cap))
    about = About(model=model, vocab_size=vocab_size, granularity=first, cap=examples.cap)
    _save(examples, about, out)
    return [_rounded(row) for row in rows], [*map(_target, learned)]


def _states(run_file: Path, examples: Examples, kept: Path) -> np.ndarray:
    if kept.exists() and len(found := np.load(kept)) >= len(examples.prompts):
        return found[: len(examples.prompts)]
    states_ND: np.ndarray = prompt_states(LLM.from_config(run_file), examples.prompts)
    np.save(kept, states_ND)
    return states_ND


def _rounded(row: Row) -> Row:
    return {k: round(float(v), 4) if isinstance(v, float) else v for k, v in row.items()}


def _target(row: Row) -> Target:
    """Return the target that the interval of the gain over both baselines lies above 0."""
    gains = [row[f"over {base}, low"] for base in BASELINES]
    claim = f"{row['predictor']} beats both baselines, granularity {row['granularity']}"
    ours, met = str(round(row["accuracy"], 4)), min(gains) > 0
    return agrees(claim, ours, met, "bootstrap interval of 95 % of the gain above 0")


def _tell(examples: Examples, buckets: LengthBuckets) -> None:
    shares = np.bincount([buckets.of(n) for n in examples.lengths], minlength=buckets.count)
    print(f"{len(examples.lengths)} answers; of each class of {buckets.granularity}: {shares}")
    quantiles = np.quantile(examples.lengths, [0.05, 0.25, 0.5, 0.75]).round()
    print(f"lengths at 5, 25, 50, 75 %: {quantiles}\n")


def _save(examples: Examples, about: About, out: Path) -> None:
    """Save the classifier, trained on two thirds, and a trace of the others."""
    known = len(examples.prompts) * 2 // 3
    model = train_on_prompts(examples.prompts[:known], examples.lengths[:known], about, Training())
    path = out / CLASSIFIER_FILE
    save(model, about, path)
    with (out / TRACE_FILE).open("w", encoding="utf-8") as file:
        for prompt, length in zip(examples.prompts[known:], examples.lengths[known:], strict=True):
            file.write(json.dumps({"prompt_token_ids": prompt, "max_tokens": length}) + "\n")
    predictor = LengthClassifier(LengthClassifierOptions(path=str(path)))
    start = time.process_time()
    for prompt in examples.prompts:
        predictor.bucket_of(prompt)
    took = (time.process_time() - start) / len(examples.prompts)
    print(f"\n{path}: {path.stat().st_size / 1e3:.0f} kB, {took * 1e6:.0f} us of CPU per request")


def runs(run_files: Mapping[str, Path], out: Path, draws: int = 20) -> list[Row]:
    """Simulate run files on the results of ``accuracy``, with and without predictions.

    In each draw, all requests are present at the start, in a different order.

    Args:
        run_files: run files by the names of their policies.
    """
    _, about = load(out / CLASSIFIER_FILE)
    own = {"name": CLASSIFIER, "path": str(out / CLASSIFIER_FILE)}
    exact = {"granularity": about.granularity, "accuracy": 1.0}
    predictors = {"none": None, "classifier": own, "true bucket": exact}
    work = read_workload(out / TRACE_FILE)
    orders = [random.Random(draw).sample(work, len(work)) for draw in range(draws)]
    rows = []
    for policy, run_file in run_files.items():
        seconds = {}
        for name, each in predictors.items():
            config = _predicting(run_file, each)
            seconds[name] = np.asarray([simulate(config, o).e2e_mean or 0.0 for o in orders])
        for name, each_D in seconds.items():
            gain_D = 100 * (each_D / seconds["none"] - 1)
            error = 1.96 * gain_D.std(ddof=1) / np.sqrt(draws)
            rows.append(
                {
                    "policy": policy,
                    "predictor": name,
                    "mean time to the last token (s)": round(float(each_D.mean()), 2),
                    "to none, paired (%)": f"{gain_D.mean():+.1f} -+ {error:.1f}",
                }
            )
    return rows


def _predicting(run_file: Path, predictor: Mapping[str, object] | None) -> RunFile:
    """Return the run file with a predictor, or without."""
    config = load_run_file(run_file)
    workload = config.workload.model_copy(update={"predictor": predictor})
    given = workload.model_dump(exclude_unset=True)
    return config.model_copy(update={"workload": Workload.model_validate(given)})
