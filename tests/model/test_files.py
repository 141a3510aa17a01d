"""The two file formats, down to the bytes."""

from __future__ import annotations

import json
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxoverlap.errors import ModelError
from jaxoverlap.model.gguf_file import GgufFile
from jaxoverlap.model.safetensors_file import SafetensorsFile
from tests.tiny_models import gguf_metadata, gguf_tensors, make_model, save_gguf


def write_safetensors(path, header: dict | bytes, data: bytes):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BF16_BITS = np.array(
    [0x0000, 0x8000, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x8001, 0x7F7F, 0x7F80, 0xFF80, 0x3F80], np.uint16
)


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_bfloat16_comes_out_bit_for_bit_at_any_offset(tmp_path, shift):
    # NaNs with payloads, both zeros, denormals, the largest value, infinities.
    header = {"pad": entry("U8", [shift], 0, shift), "w": entry("BF16", [11], shift, shift + 22)}
    raw = json.dumps(header)
    raw = raw.ljust(-(-len(raw) // 8) * 8).encode()  # so that `shift` is what misaligns
    file = SafetensorsFile(write_safetensors(tmp_path / "f", raw, b"\0" * shift + BF16_BITS.tobytes()))
    found = file.read("w")
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.view(np.uint16), BF16_BITS)


def test_what_the_library_writes_is_read(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal((7,)).astype(np.float16),
        "c": rng.standard_normal((2, 1, 4)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(2.5, np.float32),
    }
    save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "f")
    assert set(file.names) == set(tensors)
    for name, tensor in tensors.items():
        found = file.read(name)
        assert (found.shape, found.dtype, file.shape(name)) == (tensor.shape, tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(found, tensor)


@pytest.mark.parametrize(
    ("header", "data", "named"),
    [
        ({"w": entry("F32", [4], 0, 16)}, b"\0" * 12, "truncated: tensor 'w' ends at byte 16"),
        ({"w": entry("F32", [5], 0, 16)}, b"\0" * 16, r"'w' has 16 bytes.*F32 of shape \(5,\) has 20"),
        ({"w": entry("F32", [4], 16, 0)}, b"\0" * 16, "'w' spans bytes 16 to 0"),
        ({"w": entry("F64", [2], 0, 16)}, b"\0" * 16, "'w' has dtype F64.*allowed: BF16, F16, F32"),
        ({"w": {"dtype": "F32"}}, b"", "'w' has an unreadable header"),
        ({"w": 3}, b"", "'w' has an unreadable header"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}, b"0000", "'w' has an unreadable header"),
        ({"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"0000", "'w' has an unreadable header"),
        ({"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"0000", "'w' has an unreadable header"),
        ({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"0000", "'w' has an unreadable header"),
        ({"w": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, b"0000", "'w' has an unreadable header"),
        ({"w": entry("F32", [4], 0, 16)}, b"\0" * 17, "'w' ends at byte 16 of the data, which has 17"),
        ({}, b"\0", "the header ends at byte 0 of the data, which has 1"),
        ({"w": entry("F32", [4], 4, 20)}, b"\0" * 20, "'w' begins at byte 4 of the data, but the header ends at 0"),
        (
            {"w": entry("F32", [4], 0, 16), "v": entry("F32", [4], 12, 28)},
            b"\0" * 28,
            "'v' begins at byte 12 of the data, but tensor 'w' ends at 16",
        ),
        (
            {"w": entry("F32", [4], 0, 16), "v": entry("F32", [4], 0, 16)},
            b"\0" * 16,
            "'v' begins at byte 0 of the data, but tensor 'w' ends at 16",
        ),
        (b'{"w":' + b"[" * 200_000, b"", "unreadable safetensors header"),
        (b'{"w": 1, "w": 2}', b"", "'w' appears twice"),
        (b"[1]", b"", "expected a JSON object"),
        (b"{not json", b"", "unreadable safetensors header"),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path, header, data, named):
    path = write_safetensors(tmp_path / "f.safetensors", header, data)
    with pytest.raises(ModelError, match=named) as caught:
        SafetensorsFile(path).read("w")
    assert "f.safetensors" in str(caught.value)


def test_tensors_may_be_listed_in_any_order(tmp_path):
    header = {"b": entry("F32", [1], 4, 8), "a": entry("F32", [0], 4, 4), "c": entry("F32", [1], 0, 4)}
    file = SafetensorsFile(write_safetensors(tmp_path / "f", header, np.array([1, 2], np.float32).tobytes()))
    assert [file.read(name).tolist() for name in "abc"] == [[], [2.0], [1.0]]


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, struct.pack("<Q", 1000) + b"{}"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    path = tmp_path / "f.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"f\.safetensors"):
        SafetensorsFile(path)
    with pytest.raises(ModelError, match=r"gone\.safetensors"):
        SafetensorsFile(tmp_path / "gone.safetensors")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return save_gguf(make_model("llama-llama3-rope"), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_gguf_header_is_read_like_the_package_s_reader(tiny_gguf):
    ours, theirs = GgufFile(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    assert len(expected["tokenizer.ggml.tokens"]) > 300
    assert set(ours.names) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        assert ours.shape(tensor.name) == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(ours.read(tensor.name), tensor.data)


def test_every_metadata_type_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    numbers = {"uint8": 200, "int8": -5, "uint16": 60000, "int16": -300, "uint32": 2**31, "int32": -(2**30)}
    numbers |= {"uint64": 2**60, "int64": -(2**60), "float32": 0.5, "float64": 0.1, "bool": True, "string": "日本 🔥"}
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("texts", ["", "é"])
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = GgufFile(tmp_path / "f.gguf").metadata
    assert found == numbers | {
        "general.architecture": "llama", "floats": [0.5, -1.5], "texts": ["", "é"], "nested": [[1, 2], [3]],
    }  # fmt: skip


def test_a_file_cut_anywhere_is_refused(tiny_gguf, tmp_path):
    content = tiny_gguf.read_bytes()
    whole = GgufFile(tiny_gguf)
    cut = tmp_path / "cut.gguf"
    header = len(whole.header)
    for size in [0, 3, 7, 20, 100, header // 2, header - 1]:
        cut.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GgufFile(cut)
    cut.write_bytes(content[:-64])
    file = GgufFile(cut)
    with pytest.raises(ModelError, match="truncated: tensor '"):
        [file.read(name) for name in file.names]


@pytest.mark.parametrize(
    ("at", "new", "named"),
    [(0, b"GGML", "no GGUF file"), (4, b"\x01\0\0\0", "GGUF version 1"), (4, b"\0\0\0\x03", "GGUF version 50331648")],
)
def test_other_files_and_versions_are_refused(tiny_gguf, tmp_path, at, new, named):
    content = bytearray(tiny_gguf.read_bytes())
    content[at : at + len(new)] = new
    (tmp_path / "f.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=named):
        GgufFile(tmp_path / "f.gguf")


def test_a_tensor_or_key_twice_is_refused(tiny_gguf, tmp_path):
    path = tmp_path / "f.gguf"
    content = tiny_gguf.read_bytes()
    path.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_up\.weight' appears twice"):
        GgufFile(path)
    path.write_bytes(content.replace(b"llama.attention.key_length", b"llama.embedding_length\0\0\0\0"))
    GgufFile(path)  # another name, if a strange one
    path.write_bytes(content.replace(b"llama.vocab_size", b"llama.block_coun"))
    GgufFile(path)
    path.write_bytes(content.replace(b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.bos_token_id"))
    with pytest.raises(ModelError, match=r"'tokenizer\.ggml\.bos_token_id' appears twice in the metadata"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("shift", "named"), [(0, "two tensors begin at byte"), (32, r"'token_embd\.weight' ends at byte .*another begins")]
)
def test_gguf_tensors_that_overlap_are_refused(tiny_gguf, tmp_path, shift, named):
    content = bytearray(tiny_gguf.read_bytes())
    embedding, norm = (
        content.index(struct.pack("<Q", len(n)) + n) for n in (b"token_embd.weight", b"blk.0.attn_norm.weight")
    )
    (begin,) = struct.unpack_from("<Q", content, embedding + 8 + len(b"token_embd.weight") + 4 + 2 * 8 + 4)
    struct.pack_into("<Q", content, norm + 8 + len(b"blk.0.attn_norm.weight") + 4 + 8 + 4, begin + shift)
    (tmp_path / "f.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=named):
        GgufFile(tmp_path / "f.gguf").read("token_embd.weight")


def gguf_with(key: str, kind: int, value: bytes) -> bytes:
    """A file of one key and no tensors."""
    return (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key.encode() + struct.pack("<I", kind) + value + bytes(64)
    )


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (gguf_with("general.alignment", 4, struct.pack("<I", 0)), "general.alignment is 0"),
        (gguf_with("general.alignment", 5, struct.pack("<i", -32)), "general.alignment is -32"),
        (gguf_with("general.alignment", 8, struct.pack("<Q", 1) + b"a"), "general.alignment is 'a'"),
        (gguf_with("general.alignment", 7, b"\1"), "general.alignment is True"),
        (gguf_with("a", 9, struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)), "damaged GGUF header"),
        (gguf_with("a", 9, struct.pack("<IQ", 4, 2**62)), "damaged GGUF header"),
        (gguf_with("a", 9, struct.pack("<IQ", 8, 2**62)), "damaged GGUF header"),
    ],
    ids=range(7),
)
def test_damaged_gguf_headers_are_refused(tmp_path, content, named):
    (tmp_path / "f.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=named):
        GgufFile(tmp_path / "f.gguf")


def test_unknown_quantisation_is_refused_by_name(tiny_gguf, tmp_path):
    content = tiny_gguf.read_bytes()
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8  # behind one dimension and its size
    (tmp_path / "f.gguf").write_bytes(content[:at] + struct.pack("<I", 999) + content[at + 4 :])
    with pytest.raises(ModelError, match=r"'output_norm\.weight' has unknown GGML type 999"):
        GgufFile(tmp_path / "f.gguf").read("output_norm.weight")


def test_the_writer_permutes_only_llama():
    # The tests above rest on it: else "GGUF equals safetensors" could hold with nothing undone.
    llama, qwen2 = make_model("llama"), make_model("qwen2")
    for model, equal in ((llama, False), (qwen2, True)):
        q = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
        assert np.array_equal(gguf_tensors(model)["blk.0.attn_q.weight"], q) is equal
    assert gguf_metadata(make_model("mistral"))["general.architecture"] == "llama"
