"""The embedded model as files for other engines: as it is, and in float32 (Hugging Face, GGUF). Needs torch."""

from __future__ import annotations

from pathlib import Path

import gguf
from transformers import PreTrainedTokenizerFast

from jaxoverlap.model.default_model import default_model_path
from jaxoverlap.text.tokenizer import Tokenizer
from tests.real_model import transformers_model
from tests.tiny_models import write_gguf


def write_all(folder: Path) -> None:
    """`folder`/hf, `folder`/float32.gguf and `folder`/q4_1.gguf."""
    (folder / "q4_1.gguf").symlink_to(default_model_path())
    reader = gguf.GGUFReader(default_model_path())
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    transformers_model().save_pretrained(folder / "hf")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_source(metadata).backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.save_pretrained(folder / "hf")
    tensors = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    metadata["general.file_type"] = int(gguf.LlamaFileType.ALL_F32)
    metadata.pop("general.quantization_version", None)
    write_gguf(folder / "float32.gguf", metadata, tensors)
