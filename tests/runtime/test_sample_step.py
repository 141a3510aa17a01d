"""The second half of a step with logits that are the same in every step: each answer can be computed by hand."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.model.logit_rules import MOST_OUTPUTS, RowRules
from jaxoverlap.model.scores import SCORE_WORDS
from jaxoverlap.outputs import TokenScore
from jaxoverlap.request import Request
from jaxoverlap.runtime.packing import row_params
from jaxoverlap.runtime.row_state import RowState
from jaxoverlap.runtime.rules_seats import bias_of, token_counts
from jaxoverlap.runtime.sample_step import ReadyToSample, sample
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.plan import RowStatus
from jaxoverlap.scheduler.scores import commit_scores

V, ROWS = 8, 4
A, B, C, EOS = 0, 1, 2, 7


@partial(jax.jit, static_argnames="with_rules")
def _step(state, ready, rules, allowed, with_rules):
    return sample(state, ready, rules, allowed) if with_rules else sample(state, ready)


class FixedLogits:
    """Rows whose model always says the same. `step` gives each row's token and status."""

    def __init__(self, logits: list[list[float]], sampling: list[SamplingParams], prompts=None, eos=()) -> None:
        self.logits = np.full((ROWS, V), -50.0, dtype=np.float32)
        prompts = prompts or [[B]] * len(sampling)
        self.state, self.rules = RowState.blank(ROWS, 1, 1), RowRules.blank(ROWS, V)
        self.requests, params = [], np.zeros((ROWS, self.state.params.shape[1]), dtype=np.int32)
        for row, (values, wish, prompt) in enumerate(zip(logits, sampling, prompts, strict=True)):
            self.logits[row, : len(values)] = values
            stop_ids = (*wish.stop_token_ids, *(() if wish.ignore_eos else eos))
            request = Request(row, np.array(prompt, np.int32), wish, wish.max_tokens or 100, stop_ids, wish.seed or 0)
            self.requests.append(request)
            params[row] = row_params(request, 0)
            counts = token_counts(request.prompt_ids, len(prompt), V)
            self.rules = self.rules.seat(row, counts, bias_of(wish, V))
        self.count = len(sampling)
        alive = jnp.arange(ROWS) >= self.count
        self.state = RowState(
            self.state.last_token, self.state.seq_len + 5, self.state.num_outputs, alive, self.state.page_table, params
        )

    def step(self, *, with_rules: bool = True, allowed: np.ndarray | None = None):
        state = self.state
        ready = ReadyToSample(
            logits=jnp.asarray(self.logits),
            rows=jnp.where(state.finished, ROWS, jnp.arange(ROWS, dtype=jnp.int32)),
            seq_len=state.seq_len + 1,
        )
        allowed = np.full((ROWS, 1), -1, dtype=np.int32) if allowed is None else allowed
        self.state, output, scores, rules = _step(state, ready, self.rules, allowed, with_rules)
        self.rules = rules or self.rules
        self.scores = np.asarray(scores)
        return np.asarray(output)[: self.count]

    def tokens(self, steps: int, **options) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in range(self.count)]
        for _ in range(steps):
            for row, (token, status) in enumerate(self.step(**options).tolist()):
                if status not in (RowStatus.VOID, RowStatus.NO_TOKEN, RowStatus.BAD_LOGITS):
                    outputs[row].append(token)
        return outputs


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0} | changes))


def tokens_of(logits: list[float], steps: int, prompt=(C,), **wish) -> list[int]:
    return FixedLogits([logits], [greedy(**wish)], [list(prompt)]).tokens(steps)[0]


# ---------------------------------------------------------------- penalties


def test_a_presence_penalty_counts_the_token_just_sampled():
    assert tokens_of([1.0, 0.5], 6, presence_penalty=0.6) == [A, B, A, A, A, A]


def test_a_frequency_penalty_grows_with_every_occurrence():
    # A: 1.0, 0.7, 0.4, 0.1; B: 0.5, 0.2
    assert tokens_of([1.0, 0.5], 6, frequency_penalty=0.3) == [A, A, B, A, B, A]


def test_a_repetition_penalty_is_applied_once_for_each_distinct_id():
    assert tokens_of([1.0, 0.6], 6, repetition_penalty=2.0) == [A, B, A, A, A, A]


def test_a_repetition_penalty_counts_the_prompt_and_the_others_do_not():
    assert tokens_of([1.0, 0.6], 1, prompt=[A, A], repetition_penalty=2.0) == [B]
    assert tokens_of([1.0, 0.6], 1, prompt=[A, A], presence_penalty=2.0, frequency_penalty=2.0) == [A]


def test_a_repetition_penalty_multiplies_a_negative_logit():
    assert tokens_of([-1.0, -1.9], 3, repetition_penalty=2.0) == [A, B, A]
    assert tokens_of([-1.0, -2.1], 3, repetition_penalty=2.0) == [A, A, A]


def test_a_penalised_row_beside_free_ones_changes_nothing_for_them():
    penalised, free = greedy(presence_penalty=0.6), greedy()
    together = FixedLogits([[1.0, 0.5]] * 3, [free, penalised, free], [[C]] * 3).tokens(6)
    assert together == [[A] * 6, [A, B, A, A, A, A], [A] * 6]


def test_counts_stop_at_their_highest_and_never_reach_the_prompts_bit():
    many = np.full(MOST_OUTPUTS + 5, A)
    counts = token_counts(np.concatenate([[B, A], many]), 2, V)
    assert counts[A] == 0x8000 | MOST_OUTPUTS and counts[B] == 0x8000
    rules = RowRules(jnp.asarray(counts)[None], jnp.zeros((1, V))).count(jnp.array([0]), jnp.array([A]))
    assert rules.counts[0, A] == counts[A]


# ---------------------------------------------------------------- bias, allowed and banned ids


def test_a_bias_moves_the_choice_and_its_row_only():
    rows = FixedLogits([[1.0, 0.5]] * 2, [greedy(logit_bias={B: 0.6}), greedy()])
    assert rows.tokens(2) == [[B, B], [A, A]]


def test_only_allowed_ids_come_and_banned_ones_never():
    assert tokens_of([3.0, 2.0, 1.0], 2, allowed_token_ids=[B, C]) == [B, B]
    assert tokens_of([3.0, 2.0, 1.0], 2, banned_token_ids=[A]) == [B, B]
    assert tokens_of([3.0, 2.0, 1.0], 2, allowed_token_ids=[A, C], banned_token_ids=[A]) == [C, C]
    assert tokens_of([3.0, 2.0, 1.0], 2, banned_token_ids=[A], logit_bias={A: 100.0}) == [B, B]


def test_an_allowed_set_is_never_left_by_sampling():
    rows = FixedLogits([[0.0] * V], [SamplingParams(temperature=5.0, seed=3, allowed_token_ids=[2, 5])])
    assert set(rows.tokens(60)[0]) == {2, 5}


def test_a_mask_forbids_for_its_row_only():
    rows = FixedLogits([[3.0, 2.0, 1.0]] * 3, [greedy()] * 3)
    allowed = np.full((ROWS, 1), -1, dtype=np.int32)
    allowed[1] = 1 << C
    assert rows.step(allowed=allowed)[:, 0].tolist() == [A, C, A]


def test_rules_that_leave_nothing_end_their_row_only():
    rows = FixedLogits([[3.0, 2.0]] * 2, [greedy(), greedy()])
    allowed = np.full((ROWS, 1), -1, dtype=np.int32)
    allowed[0] = 0
    assert rows.step(allowed=allowed)[:, 1].tolist() == [RowStatus.NO_TOKEN, RowStatus.RUNNING]
    assert rows.step()[:, 1].tolist() == [RowStatus.VOID, RowStatus.RUNNING]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_logits_end_their_row_only_whatever_its_rules(bad):
    rows = FixedLogits([[3.0, 2.0]] * 2, [greedy(presence_penalty=1.0, banned_token_ids=[C]), greedy()])
    rows.logits[0, B] = bad
    assert rows.step()[:, 1].tolist() == [RowStatus.BAD_LOGITS, RowStatus.RUNNING]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_ends_its_row_only(temperature):
    wish = SamplingParams(temperature=temperature, seed=1, repetition_penalty=2e-38)
    rows = FixedLogits([[3.0, 50.0]] * 2, [wish, greedy()])  # id 1 is in the prompts
    assert rows.step()[:, 1].tolist() == [RowStatus.BAD_LOGITS, RowStatus.RUNNING]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_id_does_not_come_where_its_penalty_overflows(temperature):
    wish = SamplingParams(temperature=temperature, seed=1, repetition_penalty=2e-38, banned_token_ids=[B])
    assert FixedLogits([[3.0, 50.0]], [wish]).step().tolist() == [[A, RowStatus.RUNNING]]


def test_a_step_with_rules_for_nobody_is_the_plain_step():
    wishes = [greedy(), SamplingParams(temperature=1.3, seed=5), SamplingParams(top_p=0.8, seed=6)]
    logits = np.random.default_rng(0).normal(size=(3, V)).tolist()
    plain, ruled = (FixedLogits(logits, wishes).tokens(12, with_rules=flag) for flag in (False, True))
    assert plain == ruled


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("prompt_len", [1, 100])
def test_min_tokens_keeps_the_end_away_for_so_many_outputs(prompt_len):
    wish = greedy(min_tokens=5, max_tokens=9)
    rows = FixedLogits([[1.0, 0, 0, 0, 0, 0, 0, 9.0]], [wish], [[C] * prompt_len], eos=[EOS])
    found = [rows.step(with_rules=False)[0].tolist() for _ in range(6)]
    assert [token for token, _ in found] == [A] * 5 + [EOS]
    assert found[-1][1] == RowStatus.STOP and found[-2][1] == RowStatus.RUNNING


def test_min_tokens_keeps_the_callers_stop_ids_away_too():
    rows = FixedLogits([[1.0, 9.0]], [greedy(min_tokens=2, stop_token_ids=[B], max_tokens=9)])
    assert rows.tokens(4)[0] == [A, A, B]


def test_ignoring_the_end_keeps_every_id_within_reach():
    rows = FixedLogits([[1.0, 0, 0, 0, 0, 0, 0, 9.0]], [greedy(ignore_eos=True, max_tokens=3)], eos=[EOS])
    assert rows.tokens(4)[0] == [EOS] * 3


# ---------------------------------------------------------------- log-probabilities


def scores_of(rows: FixedLogits, tokens: np.ndarray) -> list[list[TokenScore]]:
    commit_scores(rows.requests, tokens.tolist(), rows.scores[: rows.count])
    return [request.scores for request in rows.requests]


def test_log_probabilities_are_those_of_the_models_own_logits():
    wishes = [
        greedy(logprobs=3),
        greedy(logprobs=0, banned_token_ids=[A]),
        greedy(),
        SamplingParams(temperature=3.0, seed=1, logprobs=20, presence_penalty=1.0),
    ]
    rows = FixedLogits(np.random.default_rng(1).normal(size=(4, V)).tolist(), wishes)
    tokens = rows.step()[:, 0]
    expected = np.asarray(jax.nn.log_softmax(jnp.asarray(rows.logits)))
    found = scores_of(rows, tokens)
    assert found[2] == [] and not rows.scores[2].any()
    for row, num_top in ((0, 3), (1, 0), (3, 20)):
        (score,) = found[row]
        assert score.token_id == tokens[row]
        np.testing.assert_allclose(score.logprob, expected[row, tokens[row]], atol=1e-5)
        assert score.rank == 1 + (rows.logits[row] > rows.logits[row, tokens[row]]).sum()
        order = np.argsort(-rows.logits[row], kind="stable")[:num_top]
        assert [token_id for token_id, _ in score.top][: len(order)] == order.tolist()
        np.testing.assert_allclose([p for _, p in score.top][: len(order)], expected[row, order], atol=1e-5)


def test_a_vocabulary_smaller_than_the_alternatives_asked_for_gives_what_there_is():
    rows = FixedLogits([[1.0, 0.5]], [greedy(logprobs=20)])
    ((score,),) = scores_of(rows, rows.step()[:, 0])
    assert len(score.top) == V


def test_nobody_who_does_not_ask_pays_for_log_probabilities():
    from jaxoverlap.model.scores import score_tokens

    nothing = jnp.zeros((2, V)), jnp.zeros(2, jnp.int32), jnp.full(2, -1, jnp.int32)
    primitives = [equation.primitive.name for equation in jax.make_jaxpr(score_tokens)(*nothing).jaxpr.eqns]
    assert "cond" in primitives and not {"exp", "top_k", "while"} & set(primitives)
    assert score_tokens(*nothing).shape == (2, SCORE_WORDS)
