"""Hidden states of prompts, on a real engine, and requests that go by predicted lengths."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from tiny_model import TINY_OPTIONS

from jaxinfer import LLM, SamplingParams
from jaxinfer.config.run_file import RunFile
from jaxinfer.lab.predict.classifier import Training
from jaxinfer.lab.predict.length_classifier import About, save, train_on_prompts
from scripts.reproduce.predictor.hidden import prompt_states


def test_the_first_token_follows_from_it(tiny_folder: Path) -> None:
    """Prompts of one step and of several, more of them than run at once."""
    llm = LLM(str(tiny_folder), progress=False, **TINY_OPTIONS)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for length in (1, 5, 40, 9, 100, 3, 8, 17)]
    x_ND = prompt_states(llm, prompts, progress=False)
    stage: Any = llm.engine.stages[0]
    model: Any = nnx.merge(stage.plan.graphdef, stage.parameters)
    with jax.default_matmul_precision("highest"):
        tokens = np.asarray(model.logits(x_ND)).argmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, progress=False)
    assert [output.outputs[0].token_ids[0] for output in outputs] == tokens.tolist()
    assert len(set(tokens.tolist())) > 2


def test_short_answers_go_first_on_a_real_engine(tiny_folder: Path, tmp_path: Path) -> None:
    """Prompts of ones have long answers, those of twos short ones; one runs at a time."""
    about = About(model="tiny", vocab_size=260, granularity=8, cap=16, rows=64, num_hidden=8)
    known = [[token] * length for token in (1, 2) for length in range(2, 18)]
    lengths = [12 if prompt[0] == 1 else 4 for prompt in known]
    options = Training(epochs=40, learning_rate=1e-2)
    save(train_on_prompts(known, lengths, about, options), about, tmp_path / "c.safetensors")
    policies = {"order": "jaxinfer.lab.predict.order:shortest_answer_first"}
    predictor = {
        "name": "jaxinfer.lab.predict.length_classifier:LengthClassifier",
        "path": str(tmp_path / "c.safetensors"),
    }
    config = {
        "model": str(tiny_folder),
        "engine": TINY_OPTIONS | {"max_num_seqs": 1, "policies": policies},
        "workload": {"predictor": predictor},
    }
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": [token] * 5} for token in (1, 2, 1, 2, 2)]
    llm = LLM.from_config(RunFile.model_validate(config), progress=False)
    ended = [o.prompt_index for o in llm.generate_iter(prompts, params, progress=False)]
    assert ended == [1, 3, 4, 0, 2]
