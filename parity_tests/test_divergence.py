"""The finder of the first divergence names what was sabotaged, and nothing where nothing was."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtensor_llm.config import Config
from dtensor_llm.model import GPT, MLP, Attention
from dtensor_llm.parity import Finding, Row, find_divergence
from dtensor_llm.parity.finder.finding import ROUNDING
from dtensor_llm.train import StepResult, Trainer
from dtensor_llm.worlds import World, threads
from dtensor_llm.worlds.processes_spawn import spawn
from parity_tests.covering import chosen
from parity_tests.faults import BY_NAME
from parity_tests.harness import SECONDS, batches_for, small_config
from reference.training import train as train_reference

# What is planted, the phase in which it must be found, and what must be guessed.
CASES = {
    "second_copy_is_left_behind": ("forward", ""),
    "row_parallel_reduction_dropped": ("forward", "the reduction over tp is missing"),
    "row_bias_added_by_every_rank": ("forward", "the bias counts 2 times"),
    "parallel_block_reduced_twice": ("forward", "2 times what is right, throughout: tp"),
    "bias_of_a_parallel_block_on_every_rank": ("gradient", "2 times what is right"),
    "positions_restart_in_every_shard": ("forward", "belongs to tokens 0 to 3, where tokens 4"),
    "fused_weight_split_by_thirds": ("forward", ""),
    "copies_of_heads_dealt_in_turns": ("weight", "belongs to rows"),
    "heads_permuted": ("forward", "heads and the entries of a head are exchanged"),
    "gelu_of_the_other_kind": ("forward", ""),
    "every_stage_normalizes_its_output": ("forward", ""),
    "block_on_both_sides_of_a_cut": ("forward", ""),
    "only_own_tokens_go_back": ("backward", "missing: zero for tokens"),
    "gradient_of_a_sum_is_summed": ("backward", "2 times what is right, throughout: tp"),
    "label_subtracted_by_every_rank": ("backward", "right but for entry"),
    "norm_gradients_not_reduced": ("gradient", "the reduction over tp is missing"),
    "pipeline_divides_by_microbatches": ("gradient", "1/the number of microbatches"),
    "zero_averages_over_dp": ("gradient", "0.5 times what is right, throughout: 1/dp"),
    "tied_gradients_not_summed": ("gradient", "the reduction over pp is missing"),
    "copied_gradients_not_summed": ("gradient", "the reduction over tp is missing"),
    "gathered_tokens_read_before_wait": ("gradient", "it is missing: all zero"),
    "gradients_not_zeroed": ("gradient", "what the step before had is still in it"),
    "only_the_last_microbatch_kept": ("gradient", ""),
    "scattered_sums_averaged": ("gradient", "0.5 times what is right, throughout: 1/dp"),
    "rows_not_summed_over_replicas": ("gradient", "the reduction over dp_replicate is missing"),
    "rows_off_by_one_where_uneven": ("gradient", "belongs to rows 31 to 60, where rows 30 to 59"),
    "bucket_read_before_it_is_there": ("gradient", ""),
    "message_reused_before_it_is_sent": ("gradient", ""),
    "deferred_gradients_not_held": ("gradient", ""),
    "ddp_reduces_all_microbatches_but_the_last": ("gradient", ""),
    "ddp_averages_over_dp": ("gradient", "0.5 times what is right, throughout: 1/dp"),
    "ddp_goes_by_the_model_inside": ("gradient", "the reduction over dp_shard is missing"),
    "updated_rows_not_gathered": ("update", "right but for rows 31"),
    "gathered_rows_in_another_order": ("update", "64 rows too late"),
    "loss_divided_by_local_tokens": ("loss", "is divided by 7, where 27 labels count"),
    "loss_reported_by_every_tp_rank": ("loss", "2 times what is right: tp"),
    "tied_weight_counted_twice": ("gradient norm", "token_embedding.weight counts twice"),
    "copies_counted_by_every_rank": ("gradient norm", "what tp ranks hold copies of counts twice"),
    "norms_and_biases_decay": ("update", ""),
    "gradients_never_clipped": ("update", "1/the factor of clipping"),
    "moments_of_another_weight": ("update", ""),
    "one_group_stays_on_the_host": ("update", ""),
    "gradients_read_before_they_arrive": ("update", "it is missing: all zero"),
    "moments_of_the_step_before": ("update", ""),
    "host_weights_copied_before_they_were_loaded": ("update", ""),
    "gathered_weights_outlive_the_step": ("forward", ""),
    "optimizer_steps_on_copies": ("update", ""),
    "every_rank_draws_the_first_shard": ("weight", "belongs to rows"),
    "dropout_mask_repeated_by_every_rank": ("forward", "another dropout mask: it is what belongs"),
    "dropout_mask_repeated_over_dp": ("forward", "belongs to sequences 0 to 3, where sequences 4"),
    "dropout_mask_repeated_by_every_microbatch": ("forward", "another dropout mask: it is what"),
    "data_repeated_by_every_dp_rank": ("data", "belongs to sequences 0 to 3, where sequences 4"),
    "labels_of_another_microbatch": ("data", "belongs to sequences"),
    "tokens_multiplied_before_they_arrive": ("forward", ""),
    "own_tokens_laid_first": ("forward", ""),
    "weights_learn_from_own_tokens": ("gradient", ""),
    "gradient_sent_before_it_is_whole": ("backward", ""),
    "block_broadcast_from_the_next_root": ("forward", ""),
    "norm_statistics_of_own_columns": ("forward", ""),
    "vocabulary_block_begins_too_early": ("forward", ""),
    "products_not_reduced_along_the_row": ("forward", ""),
    "weight_gradients_not_reduced_over_rows": ("gradient", ""),
    "gradients_not_broadcast_along_the_row": ("backward", ""),
    "vector_gradients_not_summed_over_rows": ("gradient", "reduction over tp_row is missing"),
    "one_receive_buffer_for_all_microbatches": ("backward", "right but for sequence 1"),
    "rank_holds_neighbouring_layers": ("forward", ""),
    "only_the_first_stage_of_a_rank_replicated": ("gradient", "the reduction over dp_shard is"),
    "last_put_off_weights_lost": ("backward", "no gradient arrives there"),
    "bucket_sent_before_the_weights_half": ("gradient", ""),
    "upper_layers_numbered_from_the_top": ("forward", ""),
    "copy_on_the_same_rank_not_added": ("gradient", ""),
    "one_weight_counted_by_two_stages": (
        "gradient norm",
        "token_embedding.weight counts twice",
    ),
    "weights_freed_before_a_split_backward": ("gradient", ""),
    "labels_of_the_other_half_of_a_pair": ("data", "belongs to sequence 0, where sequence 2"),
    "tokens_dealt_in_the_order_of_a_file": ("data", "belongs to sequences 4 to 7, where sequences"),
    "rows_of_the_grid_read_the_same_sequences": (
        "data",
        "belongs to sequences 0 to 3, where sequences 4 to 7",
    ),
}


def shown_by(name: str) -> set[Any]:
    """What the fast tier has somewhere: each phase on each axis, each guess, each strategy."""
    fault, (phase, guess) = BY_NAME[name], CASES[name]
    sizes = dataclasses.asdict(fault.config.parallel.mesh)
    axes = {axis for axis, size in sizes.items() if size > 1} or {""}
    return {(phase, axis) for axis in axes} | {guess, fault.strategy}


FAST = chosen({name: shown_by(name) for name in CASES})


def run(config: Config, main: Callable[[World], Any]) -> list[Any]:
    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


def find_here(config: Config, first: Row | None, world: World) -> Finding | None:
    return find_divergence(config, world, batches_for(config), train_reference, first)


def find(config: Config, first: Row | None = None) -> Finding | None:
    """The finding, which must be the same on every rank."""
    found = run(config, partial(find_here, config, first))
    assert all(each == found[0] for each in found)
    return found[0]


def first_at(step: int) -> Row:
    """The first difference of a report that says no more than the step."""
    return Row("weight", "head.weight", error=1.0, bound=0.0, step=step)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.full) for n in CASES]
)
def test_fault_is_found(name: str) -> None:
    fault = BY_NAME[name]
    phase, guess = CASES[name]
    with fault.plant():
        found = find(fault.config)
    assert found is not None
    assert found.phase == phase, found
    assert any(found.points_at(pattern) for pattern in fault.sabotaged.split(" or ")), found
    assert guess in found.diagnosis, found


def test_no_divergence_without_a_fault() -> None:
    config = small_config("2x1x1", micro_batch_size=4, dropout=0.2)
    assert find(config) is None
    said = find(config, first_at(step=1))
    assert said is not None and said.phase == ROUNDING
    assert "in float64 every number is the reference's to 1e-09" in str(said)


def from_step(first: int) -> Any:
    """A bug of the second block's MLP that waits until a step."""
    choose, forward = GPT.set_dropout, MLP.forward

    def told(self: GPT, *, seed: int, step: int) -> None:
        choose(self, seed=seed, step=step)
        if "1" in self.blocks:
            self.blocks["1"].mlp.is_wrong = step >= first

    def wrong(self: MLP, x: Tensor) -> Tensor:
        return forward(self, x) * (1.5 if getattr(self, "is_wrong", False) else 1.0)

    @contextmanager
    def planted() -> Iterator[None]:
        with patch.object(GPT, "set_dropout", told), patch.object(MLP, "forward", wrong):
            yield

    return planted()


@pytest.mark.parametrize("first", [None, first_at(step=2), first_at(step=3)])
def test_fault_of_a_later_step(first: Row | None) -> None:
    """Also where the report looked at a later step first: the state before it says so."""
    with from_step(2):
        found = find(small_config("1x2x1", steps=4), first)
    assert found is not None
    assert (found.step, found.phase, found.name) == (2, "forward", "blocks.1.mlp")
    assert found.coordinates == {"pp": 1} and found.microbatch == 0
    assert found.diagnosis == "1.5 times what is right, throughout"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_lower_precision_the_search_is_in_float64(dtype: str) -> None:
    config = small_config("1x1x1", dtype=dtype)
    said = find(config, first_at(step=1))
    assert said is not None and said.phase == ROUNDING and dtype in said.diagnosis
    with from_step(0):
        found = find(config, first_at(step=1))
    assert found is not None and (found.step, found.name) == (0, "blocks.1.mlp")
    assert found.error == pytest.approx(0.5, rel=1e-9)  # no rounding of the lower precision


def test_numbers_that_are_not_finite() -> None:
    """The run ends there, with no loss; the finder says which module made them."""

    def wrong(_: Attention, q: Tensor, k: Tensor, v: Tensor, samples: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y / (samples != 1)[:, None, None, None]

    with patch.object(Attention, "attend", wrong):
        found = find(small_config("2x1x1"))
    assert found is not None
    assert (found.step, found.phase, found.name) == (0, "forward", "blocks.0.attention")
    assert found.at == "blocks.0.attention.output" and found.what == "input"
    assert found.diagnosis == "128 of 1024 entries are not finite"


def find_planted(config: Config, name: str, world: World) -> Finding | None:
    """In a process of its own."""
    torch.set_num_threads(1)
    with BY_NAME[name].plant():
        return find_here(config, None, world)


def test_found_among_processes() -> None:
    """The reference runs on rank 0 alone, and what it saw is sent to the others."""
    name = "backward_all_reduce_dropped"
    config = BY_NAME[name].config
    found = spawn(2, partial(find_planted, config, name), timeout=SECONDS)
    assert found[0] is not None and found[0] == found[1]
    assert (found[0].phase, found[0].name, found[0].at) == ("backward", "head", "final_norm")
    assert "the reduction over tp is missing" in found[0].diagnosis


@pytest.mark.parametrize("rank", range(4))
def test_the_rank_that_differs_is_named(rank: int) -> None:
    """Whichever it is of four; the others do what is right."""
    update = Trainer.update

    def wrong(self: Trainer, result: StepResult) -> None:
        update(self, result)
        if self.world.rank == rank:
            self.optimizer.shards["blocks.1.mlp.up.weight"].data.add_(1e-3)

    with patch.object(Trainer, "update", wrong):
        found = find(small_config("1x1x4", zero=0))
    assert found is not None
    assert (found.phase, found.name, found.rank) == ("update", "blocks.1.mlp.up.weight", rank)
