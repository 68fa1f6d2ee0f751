"""A batch of chats: the model, its template, its sampling, and the date belong to the job."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from test_batch_job import records
from tiny_model import TINY_OPTIONS, write_tiny_model

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.commands.app import cli
from jaxinfer.commands.batch_job import BatchJob
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import RunFile
from jaxinfer.text.tokenizer import Tokenizer


@pytest.fixture
def chats(tmp_path: Path) -> tuple[Path, Path]:
    """A model of one's own, whose template writes a date; and a file of four chats."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny_model(folder)
    template = "{{ strftime_now('%d %b %Y') }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    source = tmp_path / "chats.jsonl"
    lines = [{"messages": [{"role": "user", "content": str(i)}], "max_tokens": 2} for i in range(4)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder, source


def answer_first(folder: Path, source: Path, out: Path, **options: Any) -> None:
    """Start a job on a day long ago, of which two lines are answered."""
    config = RunFile(model=str(folder), engine=EngineOptions(**TINY_OPTIONS, **options))
    day = "2021-03-04T05:06:07"
    with BatchJob.open(config, str(source), str(out), force=False, started=day) as job:
        for line in list(job._source.lines(()))[:2]:
            job._results.append({"custom_id": line.custom_id, "error": None})


def weights(folder: Path) -> None:
    tensors = {n: -a for n, a in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")


def chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def sampling(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_k": 1}')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (weights, "model.safetensors of .*/model has changed since: bring the old files back"),
        (chat_template, "chat_template.jinja of .* has changed since"),
        (sampling, "generation_config.json of .* is new since"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "chat_template.* is gone since"),
    ],
)
def test_another_model_under_the_same_name_is_refused(
    chats: tuple[Path, Path], tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    folder, source = chats
    out = tmp_path / "out.jsonl"
    answer_first(folder, source, out)
    before = out.read_bytes()
    change(folder)
    asked = ["run", "--model", str(folder), "--input", str(source), "--output", str(out)]
    options = [f"--set=engine.{name}={value}" for name, value in TINY_OPTIONS.items()]
    result = CliRunner().invoke(cli, [*asked, *options])
    assert isinstance(result.exception, JaxinferError)
    assert re.search(f"holds results of another model: {said}", str(result.exception))
    assert out.read_bytes() == before


def test_the_folder_of_generation_config_counts(chats: tuple[Path, Path], tmp_path: Path) -> None:
    folder, source = chats
    other = tmp_path / "other"
    other.mkdir()
    sampling(other)
    out = tmp_path / "out.jsonl"
    answer_first(folder, source, out, generation_config=str(other))
    answer_first(folder, source, tmp_path / "again.jsonl", generation_config=str(other))
    (other / "generation_config.json").write_text('{"top_k": 2}')
    with pytest.raises(JaxinferError, match=r"other/generation_config\.json of .* has changed"):
        answer_first(folder, source, out, generation_config=str(other))


def test_a_job_of_an_older_version_is_refused(chats: tuple[Path, Path], tmp_path: Path) -> None:
    """Its first start did not note what the model was."""
    folder, source = chats
    out = tmp_path / "out.jsonl"
    answer_first(folder, source, out)
    sidecar = tmp_path / "out.jsonl.job.json"
    recorded = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps({k: recorded[k] for k in recorded.keys() - {"model_files"}}))
    with pytest.raises(JaxinferError, match="begun by an older version, which did not note"):
        answer_first(folder, source, out)


def test_all_of_a_job_has_the_date_of_its_first_start(
    chats: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rerun has it, too: ``run.json`` has it."""
    folder, source = chats
    out = tmp_path / "out.jsonl"
    answer_first(folder, source, out)
    prompts: list[str] = []
    encode = Tokenizer._ids

    def note(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        prompts.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_ids", note)
    config = RunFile(model=str(folder), engine=EngineOptions(**TINY_OPTIONS))
    with BatchJob.open(config, str(source), str(out), force=False) as job:
        assert job.num_resumed == 2
        job.run()
        recorded = json.loads((job.newest_run() / "run.json").read_text())
        assert prompts == ["04 Mar 2021: 2", "04 Mar 2021: 3"]
        prompts.clear()
        again = ["check", "rerun", str(job.newest_run()), "--out", str(tmp_path / "again")]
        assert "results: " in CliRunner().invoke(cli, again).output
    assert prompts == [f"04 Mar 2021: {i}" for i in range(4)]
    assert recorded["job_started"] == "2021-03-04T05:06:07"
    assert recorded["default_sampling"] == {}


def test_what_is_said_at_the_end(chats: tuple[Path, Path], tmp_path: Path) -> None:
    """The folder of this run, its files, and whose sampling held."""
    folder, source = chats
    sampling(folder)
    asked = ["run", "--model", str(folder), "--input", str(source), "--output", str(tmp_path / "o")]
    options = [f"--set=engine.{name}={value}" for name, value in TINY_OPTIONS.items()]
    result = CliRunner().invoke(cli, [*asked, *options, "--ledger"], catch_exceptions=False)
    said = f"run.json, steps.jsonl, requests.jsonl and ledger.jsonl: {tmp_path / 'o.runs' / '1'}"
    assert said in result.output
    assert "default sampling options of generation_config.json: top_k 1 (engine." in result.output
    closing = [line for line in result.output.splitlines() if line.startswith("requests: 4 of 4")]
    assert not any("tok/s" in line for line in closing)


def test_lines_get_the_model_s_sampling(chats: tuple[Path, Path], tmp_path: Path) -> None:
    """Lines without sampling parameters take the model's, unless it is left out (``vllm``)."""
    folder, _ = chats
    (folder / "generation_config.json").write_text('{"top_k": 1, "max_new_tokens": 5}')
    given = [
        {"prompt": "abc", "ignore_eos": True},
        {"prompt": "abc", "ignore_eos": True, "top_k": 0, "max_tokens": 7},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in given))
    texts = {}
    for choice in ("auto", "vllm"):
        engine = EngineOptions(**TINY_OPTIONS, generation_config=choice)
        out = tmp_path / choice
        config = RunFile(model=str(folder), engine=engine)
        with BatchJob.open(config, str(source), str(out), force=False) as job:
            job.run()
        bodies = {r["custom_id"]: r["response"]["body"] for r in records(out)}
        texts[choice] = [bodies[f"line-{i}"]["choices"][0]["text"] for i in (1, 2)]
        counts = [bodies[f"line-{i}"]["usage"]["completion_tokens"] for i in (1, 2)]
        assert counts == ([5, 7] if choice == "auto" else [253, 7])
    llm = LLM(str(folder), progress=False, **TINY_OPTIONS)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    assert texts["auto"][0] == llm.generate("abc", greedy, progress=False)[0].outputs[0].text
    alike = SamplingParams(temperature=0, max_tokens=5)
    messages = [{"role": "user", "content": "abc"}]
    for ask, asked in ((llm.generate, "abc"), (llm.chat, messages)):
        found, wanted = ask(asked, progress=False), ask(asked, alike, progress=False)
        assert found[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids
    assert texts["auto"][1] == texts["vllm"][1]
    assert texts["auto"][0] != texts["vllm"][0]
