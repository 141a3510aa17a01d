"""From files to an engine: what is decided on the way, and what is refused before weights are read."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.build import build_engine, end_ids
from jaxoverlap.errors import ConfigError, ModelError
from jaxoverlap.text.tokenizer import Tokenizer
from tests import tiny_models
from tests.server.tiny_folder import write_tiny_model
from tests.tiny import CONFIG
from tests.toy_tokenizer import EOS_ID

VOCAB_SIZE = CONFIG.vocab_size


def edit(path, **fields):
    """Sets fields of a JSON file; None removes one."""
    fields = {**(json.loads(path.read_text()) if path.exists() else {}), **fields}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def tokenizer(*ends):
    return Tokenizer(tiny_models.make_tokenizer(), eos_token_ids=ends)


def test_end_ids_are_those_of_configuration_and_tokenizer():
    assert end_ids(replace(CONFIG, eos_token_ids=(2, 7)), tokenizer(7, 4)) == (2, 4, 7)
    assert end_ids(replace(CONFIG, eos_token_ids=()), tokenizer()) == ()


def test_an_end_id_outside_the_table_is_left_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "jaxoverlap"):
        ids = end_ids(replace(CONFIG, eos_token_ids=(2, VOCAB_SIZE)), tokenizer(VOCAB_SIZE + 9))
    assert ids == (2,)
    assert f"{VOCAB_SIZE}, {VOCAB_SIZE + 9} is outside the model's {VOCAB_SIZE} ids" in caplog.text


def test_more_end_ids_than_a_request_may_have_are_refused():
    assert len(end_ids(replace(CONFIG, eos_token_ids=tuple(range(16))), tokenizer(15))) == 16
    with pytest.raises(ModelError, match=r"eos_token_id: 17 ids .*at most 16"):
        end_ids(replace(CONFIG, eos_token_ids=tuple(range(16))), tokenizer(16))


def test_a_folder_s_end_that_only_special_tokens_map_names_ends_requests(tmp_path):
    folder = write_tiny_model(tmp_path)
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "special_tokens_map.json", eos_token={"content": "</s>"})
    edit(folder / "generation_config.json", eos_token_id=[7])
    built = build_engine(EngineConfig(model=folder, num_pages=64), warm_up=False)
    assert built.engine.eos_token_ids == built.model_config.eos_token_ids == (7, EOS_ID)


def test_what_a_model_recommends_is_taken_unless_it_can_not_be_or_is_not_wanted(tmp_path, caplog):
    folder = write_tiny_model(tmp_path)
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    edit(folder / "generation_config.json", **values, min_p=7, max_new_tokens=9, do_sample=False)

    def defaults(generation_config):
        config = EngineConfig(model=folder, num_pages=64, generation_config=generation_config)
        return build_engine(config, warm_up=False).sampling_defaults

    with caplog.at_level(logging.WARNING, "jaxoverlap"):
        assert defaults("auto") == values
    assert "generation_config.json is not followed: min_p: 7" in caplog.text
    assert defaults("off") == {}
    with pytest.raises(ConfigError, match="generation_config: 'vllm' is not allowed; use one of auto, off"):
        EngineConfig(generation_config="vllm")


def test_too_many_end_ids_are_refused_before_weights_are_read(tmp_path):
    folder = write_tiny_model(tmp_path)
    edit(folder / "config.json", eos_token_id=list(range(20)))
    with pytest.raises(ModelError, match="eos_token_id: 21 ids"):
        build_engine(EngineConfig(model=folder), warm_up=False)


def test_max_model_len_may_be_what_rope_scaling_stretches_the_context_to(tmp_path):
    folder = write_tiny_model(tmp_path)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    edit(folder / "config.json", rope_scaling=yarn)
    lengths = {None: 256, 400: 400, 512: 512}
    for max_model_len, length in lengths.items():
        config = EngineConfig(model=folder, num_pages=64, max_model_len=max_model_len)
        assert build_engine(config, warm_up=False).resolved.scheduler.limits.max_model_len == length
    with pytest.raises(ConfigError, match=r"513 is not allowed.* is 256, and 512 with its rope scaling"):
        build_engine(EngineConfig(model=folder, num_pages=64, max_model_len=513), warm_up=False)


def test_what_has_no_effect_beside_the_other_settings_is_in_the_log(tmp_path, caplog):
    folder = write_tiny_model(tmp_path)
    build_engine(EngineConfig(model=folder, num_pages=64, schedule="serial", max_mixed_tokens=9), warm_up=False)
    assert "max_mixed_tokens has no effect: prompts have steps of their own" in caplog.messages
