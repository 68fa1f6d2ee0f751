"""A predictor of answers' lengths, trained on a model's own answers."""

from jaxinfer.config.run_file import load_run_file
from scripts.reproduce.predictor import lines as batch
from scripts.reproduce.reproduction import Inputs, Part, Reproduction
from scripts.tables import CONFIGS

PROMPTS, ANSWERS = "prompts.jsonl.gz", "answers.jsonl"
RUN_FILE = CONFIGS / "predict" / "answers.yaml"
MODELLED = {
    "shortest answer first, 8 at once": CONFIGS / "predict" / "shortest_answer.yaml",
    "peak admission, 120 pages": CONFIGS / "predict" / "peak.yaml",
}
LINES = "lines.jsonl"


def asked(inputs: Inputs) -> Part:
    """Prompts as lines of a batch, in OUT/lines.jsonl."""
    rows = batch.lines(inputs.path(PROMPTS), inputs.out / LINES)
    return Part(rows, files=[LINES])


def accuracy(inputs: Inputs) -> Part:
    """Accuracy on prompts not trained on, and the classifier; runs the model for hidden states."""
    from scripts.reproduce.predictor import train  # This imports JAX.

    answers = inputs.path(ANSWERS)
    inputs.rows("lines")
    model = load_run_file(RUN_FILE).require_model()
    examples = train.read_examples(inputs.out / LINES, answers, model)
    rows, claims = train.accuracy(RUN_FILE, examples, inputs.out)
    return Part(rows, claims, files=[train.CLASSIFIER_FILE, train.TRACE_FILE])


def runs(inputs: Inputs) -> Part:
    """Simulations with predictions and without."""
    from scripts.reproduce.predictor import train

    inputs.rows("accuracy")
    return Part(train.runs(MODELLED, inputs.out))


REPRODUCTION = Reproduction(
    paper="Predicting how long answers are",
    inputs={
        PROMPTS: "JSON lines of `prompt` and `source`, packed",
        ANSWERS: "what `jaxinfer run configs/predict/answers.yaml --input OUT/lines.jsonl --output "
        "DATA/answers.jsonl` has written for the part lines; it may be killed and given again",
    },
    parts={"lines": asked, "accuracy": accuracy, "runs": runs},
)
