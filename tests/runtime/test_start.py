"""Starting up: how much memory the pool takes, how many steps are compiled, and that a second start reuses them."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxoverlap.config import EngineConfig
from jaxoverlap.errors import ConfigError, UnsupportedError
from jaxoverlap.model.logit_rules import RowRules
from jaxoverlap.runtime import compile_cache, container
from jaxoverlap.runtime.buckets import Buckets
from jaxoverlap.runtime.executables import SampleShape
from jaxoverlap.runtime.memory import CPU_BUDGET_BYTES, check_pool_fits, kv_memory_bytes, let_jax_take
from jaxoverlap.runtime.runner import choose_attention
from pallas_kernels import choice, trial
from tests.tiny import CONFIG, make_runner, scheduler_config

GIB = 2**30


def gpu(limit: float, used: float):
    stats = {"bytes_limit": int(limit * GIB), "bytes_in_use": int(used * GIB)}
    return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


SHARE, OLD_SHARE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def no_share_of_jax(monkeypatch):
    for name in (SHARE, OLD_SHARE):
        monkeypatch.setenv(name, "")  # also undoes what a test sets


def test_in_a_process_of_ours_jax_takes_the_share_of_a_gpu_that_the_engine_is_to_use(monkeypatch):
    let_jax_take(0.8)
    assert os.environ[SHARE] == "0.8"
    # Of a GPU of 125 GiB JAX has 100: a tenth of it is for steps.
    assert kv_memory_bytes(EngineConfig(gpu_memory_fraction=0.8), gpu(100, 16)) == pytest.approx(74 * GIB)
    for name in (OLD_SHARE, SHARE):  # what somebody has set is not changed
        monkeypatch.setenv(SHARE, "")
        monkeypatch.setenv(OLD_SHARE, "")
        monkeypatch.setenv(name, "0.5")
        let_jax_take(0.8)
        assert {os.environ[SHARE], os.environ[OLD_SHARE]} == {"0.5", ""}
        assert kv_memory_bytes(EngineConfig(gpu_memory_fraction=0.8), gpu(100, 16)) == pytest.approx(74 * GIB)
        assert kv_memory_bytes(EngineConfig(gpu_memory_fraction=0.25), gpu(100, 16)) == pytest.approx(29 * GIB)


def test_in_a_program_of_somebody_else_the_pool_keeps_within_what_jax_has():
    """75 GiB of a GPU of 100."""
    assert kv_memory_bytes(EngineConfig(), gpu(75, 16)) == pytest.approx(51.5 * GIB)
    assert kv_memory_bytes(EngineConfig(gpu_memory_fraction=0.5), gpu(75, 16)) == pytest.approx(29 * GIB)
    assert kv_memory_bytes(EngineConfig(kv_memory_gib=3), gpu(75, 74)) == 3 * GIB


def test_on_a_gpu_the_pool_leaves_room_for_the_rules_of_all_rows():
    reserved = RowRules.num_bytes(EngineConfig().rows_on("gpu"), 2**17)
    rules = RowRules.blank(2, 8)
    assert RowRules.num_bytes(2, 8) == rules.counts.nbytes + rules.bias.nbytes
    assert reserved == 256 * 2**17 * 6
    assert kv_memory_bytes(EngineConfig(), gpu(100, 16), reserved) == pytest.approx(74 * GIB - reserved)
    with pytest.raises(ConfigError, match=r"nothing beside the 9\.1 GiB used"):
        kv_memory_bytes(EngineConfig(), gpu(10, 8.9), reserved)


def test_a_gpu_with_nothing_left_says_what_to_change():
    with pytest.raises(ConfigError, match=r"gpu_memory_fraction: 0\.9 of 13\.3 GiB, of which JAX has 10\.0, .* 9\.5"):
        kv_memory_bytes(EngineConfig(), gpu(10, 9.5))
    silent = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    with pytest.raises(ConfigError, match="kv_memory_gib"):
        kv_memory_bytes(EngineConfig(), silent)


def test_on_a_cpu_the_pool_is_modest():
    assert 0 < kv_memory_bytes(EngineConfig(), jax.devices("cpu")[0]) <= CPU_BUDGET_BYTES


@pytest.mark.parametrize("setting", [{"num_pages": 10**9}, {"kv_memory_gib": 1e6}])
def test_a_pool_that_the_machine_has_no_memory_for_is_refused_instead_of_killed(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=f"^{name}: .* the KV pool would take 931322.57 GiB, and .* GiB of memory"):
        check_pool_fits(EngineConfig(**setting), jax.devices("cpu")[0], 10**15)
    check_pool_fits(EngineConfig(**setting), jax.devices("cpu")[0], 10**6)
    check_pool_fits(EngineConfig(**setting), gpu(10, 1), 10**15)  # its allocator says so


V2 = {"proc/self/cgroup": "0::/pod/c\n", "sys/fs/cgroup/pod/c/memory.max": "max\n"}
V1 = {"proc/self/cgroup": "9:cpu:/\n4:memory:/docker/abc\n"}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        (V2, None),
        (V2 | {"sys/fs/cgroup/pod/memory.max": "5000", "sys/fs/cgroup/pod/memory.current": "1200"}, 3800),
        # In a container of its own the path begins at it, or is one of the host's that is not there.
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "900", "sys/fs/cgroup/memory.current": "950"}, 0),
        (
            V1
            | {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "3096",
                "sys/fs/cgroup/memory/memory.stat": "cache 700\ntotal_inactive_file 500\n",
            },
            1500,
        ),
    ],
)
def test_a_container_leaves_what_its_limit_and_its_use_say(tmp_path, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container.available_bytes(tmp_path) == left


def test_a_small_container_gets_a_small_pool(monkeypatch):
    monkeypatch.setattr(container, "available_bytes", lambda: 2 * GIB)
    assert kv_memory_bytes(EngineConfig(), jax.devices("cpu")[0]) == GIB // 2


def test_no_more_pages_than_all_rows_can_use():
    config = EngineConfig(max_running=4, max_model_len=100)
    resolved = config.resolve(platform="cpu", vocab_size=9, model_len=256, page_bytes=1, kv_memory_bytes=10**9)
    assert resolved.scheduler.limits.num_pages == 4 * 7
    with pytest.raises(ConfigError, match="no room for KV pages"):
        config.resolve(platform="cpu", vocab_size=9, model_len=256, page_bytes=10**6, kv_memory_bytes=10**5)


HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0")


def test_kernels_for_another_device_are_refused_at_start(monkeypatch):
    monkeypatch.setattr(choice, "MOSAIC_JAX", (0, 0))
    blackwell = SimpleNamespace(platform="gpu", compute_capability="10.0")
    for device, found in ((jax.devices("cpu")[0], "is a cpu"), (blackwell, "has 10.0")):
        with pytest.raises(UnsupportedError, match=f"attention: 'mosaic' is for Hopper GPUs.*this device {found}"):
            choose_attention("mosaic", device, CONFIG, 16, jnp.bfloat16)


def test_kernels_that_a_newer_jax_is_needed_for_are_refused_at_start(monkeypatch):
    monkeypatch.setattr(choice, "MOSAIC_JAX", (99, 0))
    with pytest.raises(UnsupportedError, match=r"attention: 'mosaic' needs jax 0\.11 or newer.*this is jax"):
        choose_attention("mosaic", HOPPER, CONFIG, 16, jnp.bfloat16)


@pytest.mark.parametrize("wrong", [None, "decode attention differs by nan"])
def test_mosaic_is_tried_at_start_and_refused_where_it_is_wrong(monkeypatch, wrong):
    monkeypatch.setattr(choice, "MOSAIC_JAX", (0, 0))
    monkeypatch.setattr(trial, "disagreement", lambda implementation, shape, device: wrong)
    if wrong is None:
        assert choose_attention("mosaic", HOPPER, CONFIG, 16, jnp.bfloat16) == "mosaic"
    else:
        with pytest.raises(UnsupportedError, match="mosaic was tried on this device: decode attention differs by nan"):
            choose_attention("mosaic", HOPPER, CONFIG, 16, jnp.bfloat16)


def test_a_model_that_the_kernels_do_not_take_is_refused_at_start(monkeypatch):
    monkeypatch.setattr(trial, "disagreement", lambda implementation, shape, device: None)
    odd = replace(CONFIG, head_dim=12)
    cpu = jax.devices("cpu")[0]
    with pytest.raises(UnsupportedError, match="attention: head dim: got 12, 'triton' takes multiples of 8 from 16"):
        choose_attention("triton", cpu, odd, 16, jnp.float32)
    assert choose_attention("auto", cpu, odd, 16, jnp.float32) == "xla"
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    assert choose_attention("auto", gpu, odd, 16, jnp.bfloat16) == "xla"
    assert choose_attention("auto", gpu, CONFIG, 16, jnp.bfloat16) == "triton"


def test_kernels_that_fail_their_trial_are_not_taken_and_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr(trial, "disagreement", lambda implementation, shape, device: "decode attention differs by nan")
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    assert choose_attention("auto", gpu, CONFIG, 16, jnp.bfloat16) == "xla"
    assert "triton was tried on this device: decode attention differs by nan" in caplog.text
    assert choose_attention("triton", gpu, CONFIG, 16, jnp.bfloat16) == "triton"  # who insists gets it


@pytest.mark.parametrize("max_running", [1, 3, 32, 256])
@pytest.mark.parametrize("budget", [1, 100, 512, 2048])
@pytest.mark.parametrize("least", [1, 16, 512])
def test_the_number_of_executables_is_bounded_by_the_documented_formula(max_running, budget, least):
    prefill = math.log2(max(budget / least, 1)) + 2
    mixed = math.log(max_running, 4) * (math.log2(max(min(budget, 64) / 16, 1)) + 2)
    config = scheduler_config(max_running=max_running, max_batched_tokens=budget)
    shapes = list(Buckets(config, min_prefill_tokens=least))
    assert len(shapes) == len(set(shapes)) <= math.log2(max_running) + 2 + prefill + mixed


def test_a_cache_folder_that_nobody_asked_for_and_that_can_not_be_used_is_done_without(tmp_path, monkeypatch, caplog):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setattr(compile_cache, "jax", SimpleNamespace(config=SimpleNamespace()))  # which was told of no folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert compile_cache.enable(None) is None
    assert "compile_cache: off" in caplog.text and "Not a directory" in caplog.text
    with pytest.raises(ConfigError, match=r"compile_cache: .*file/xla can't be used"):
        compile_cache.enable(blocked / "xla")


def test_a_second_start_finds_its_steps_compiled(tmp_path):
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    hits: list[str] = []
    runner = make_runner()
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
    try:
        assert compile_cache.enable(str(tmp_path / "cache")) == tmp_path / "cache"
        for expected in (0, 1):
            hits.clear()
            jax.clear_caches()
            runner.executables._compile(SampleShape(2, with_rules=False))
            assert len(hits) == expected
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.mark.parametrize("program", [None, "told"])
def test_an_engine_that_wants_another_cache_or_none_does_not_get_the_one_before(tmp_path, monkeypatch, program):
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    try:
        told = program and str(tmp_path / program)
        jax.config.update(_SETTINGS[0], told)
        settings = [told, *list(before.values())[1:]]
        for folder, expected in (
            (tmp_path / "a", tmp_path / "a"),
            ("off", None),
            (tmp_path / "b", tmp_path / "b"),
            (None, tmp_path / (program or "home/jaxoverlap/xla")),
            (tmp_path / "b", tmp_path / "b"),
            ("off", None),
        ):
            assert compile_cache.enable(folder) == expected
            now = [getattr(jax.config, name) for name in _SETTINGS]
            assert now == (settings if folder == "off" else [str(expected), 0.0, -1])
        compile_cache.enable(tmp_path / "a")
        jax.config.update(_SETTINGS[0], str(tmp_path / "later"))  # by the program
        assert compile_cache.enable("off") is None
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "later")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compile_cache: .*file/cache"):
        compile_cache.enable(str(tmp_path / "file" / "cache"))


def test_two_sizes_for_one_pool_are_refused():
    with pytest.raises(ConfigError, match="num_pages and kv_memory_gib"):
        EngineConfig(num_pages=4, kv_memory_gib=1)


def test_off_leaves_the_compilation_cache_alone():
    before = [getattr(jax.config, name) for name in _SETTINGS]
    assert compile_cache.enable("off") is None
    assert [getattr(jax.config, name) for name in _SETTINGS] == before
