"""Faults of schedules: of several stages on a rank, of split backwards, of an order from a file."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from dtensor_llm import parallelize, pipeline
from dtensor_llm.config import Config
from dtensor_llm.model import GPT
from dtensor_llm.optimizer import Optimizer, sum_of_squares
from dtensor_llm.parallel import pipeline_parallel, zero
from dtensor_llm.parallel.pipeline_parallel import Stage
from dtensor_llm.schedules.actions import Schedule
from dtensor_llm.stages import layers_of_stages
from dtensor_llm.train import Trainer
from parity_tests.faults.fault import fault
from parity_tests.harness import ROOT

forward, backward = partial(fault, "forward"), partial(fault, "backward")
reduction, randomness = partial(fault, "reduction"), partial(fault, "randomness")
data, update = partial(fault, "data"), partial(fault, "optimizer")

BACKWARDS_PARTLY_SPLIT = str(ROOT / "parity_tests" / "schedule_partly_split.csv")


@backward(
    "pipeline_parallel",
    "1x2x1",
    "gradient",
    sabotaged="blocks.1",
    symptom="The first loss is right, and with 1F1B on two ranks all is; GPipe learns slowly.",
    schedule="gpipe",
    micro_batch_size=2,
)
def one_receive_buffer_for_all_microbatches() -> Iterator[None]:
    """The activation of a microbatch is received where that of the one before lies.

    Its backward pass is still to come where all forwards are before all backwards.
    """
    shared: dict[Stage, Any] = {}

    def wrong(self: Stage, chunk: int) -> Any:
        received = self.args_recv_info[chunk]
        pipeline_parallel.make_room(received, self.device)
        for info in received:
            if not info.is_root_arg:
                first: Any = shared.setdefault(self, info.buffer)
                info.buffer = first.data  # not under the eyes of autograd
        return PipelineStage.get_fwd_recv_ops(self, chunk)

    with patch.object(Stage, "get_fwd_recv_ops", wrong):
        yield


@forward(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="blocks.1",
    symptom="Training works; the order of the layers depends on pp and on the schedule.",
    schedule="interleaved-1f1b",
    layers=4,
    tied_embeddings=False,
)
def rank_holds_neighbouring_layers() -> Iterator[None]:
    """Each rank takes one run of layers and cuts it up, and the stages go round in a loop.

    Layers 0 and 1 on rank 0 are stages 0 and 2 there: 0 2 1 3 is the order they are computed in.
    """
    cut = pipeline_parallel.layers_of_stages

    def wrong(config: Config) -> tuple[range, ...]:
        layers, runs = cut(config), iter(count())
        taken = {stage: next(runs) for own in pipeline.placement(config) for stage in own}
        return tuple(layers[taken[stage]] for stage in range(len(layers)))

    with patch.object(pipeline_parallel, "layers_of_stages", wrong):
        yield


@randomness(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="data or *dropout*",
    symptom="Right while a rank has one stage; then microbatches share their dropout masks.",
    schedule="interleaved-1f1b",
    layers=4,
    micro_batch_size=2,
    dropout=0.2,
)
def microbatches_counted_by_the_rank() -> Iterator[None]:
    """The places of a microbatch are those of the rank's n-th forward, whichever stage's it is."""
    run = Stage.forward_one_chunk
    forwards: dict[int, Iterator[int]] = defaultdict(count)  # of each rank

    def wrong(self: Stage, chunk: int, args: Any, places: dict[str, Tensor], **kw: Any) -> Any:
        shift = next(forwards[self.group_rank]) % len(self.args_recv_info) - chunk
        samples = places["samples"]
        return run(self, chunk, args, {"samples": samples + shift * len(samples)}, **kw)

    with patch.object(Stage, "forward_one_chunk", wrong):
        yield


@reduction(
    "data_parallel",
    "1x2x2",
    "gradient",
    sabotaged="blocks.2* or blocks.3* or final_norm* or head*",
    symptom="The upper half of the model has as many versions as replicas; one of them is saved.",
    schedule="looped-bfs",
    zero=0,
    layers=4,
    tied_embeddings=False,
)
def only_the_first_stage_of_a_rank_replicated() -> Iterator[None]:
    """Data parallelism is applied to a rank's first stage, as if there were no other."""
    apply = parallelize.apply_data_parallel

    def wrong(config: Config, stage: GPT, *where: Any) -> nn.Module:
        second_round = layers_of_stages(config)[config.parallel.mesh.pp].start
        is_first = all(int(number) < second_round for number in stage.blocks)
        return apply(config, stage, *where) if is_first else stage

    with patch.object(parallelize, "apply_data_parallel", wrong):
        yield


@backward(
    "pipeline_parallel",
    "1x2x1",
    "gradient",
    sabotaged="blocks.0",
    symptom="Nothing: a microbatch of many is missing, and in some weights only.",
    schedule="interleaved-zero-bubble",
    layers=4,
    micro_batch_size=2,
)
def last_put_off_weights_lost() -> Iterator[None]:
    """A step ends with what was put off of each stage's last microbatch still to be computed.

    On the first stage that is its whole backward: nobody waits for the gradient of its input.
    """
    run = Stage.backward_weight_one_chunk

    def wrong(self: Stage, chunk: int, last_backward: bool = False) -> None:
        if not last_backward:
            run(self, chunk, last_backward)

    with patch.object(Stage, "backward_weight_one_chunk", wrong):
        yield


@reduction(
    "zero",
    "1x2x2",
    "gradient",
    sabotaged="gradient",
    symptom="Right with ZeRO 0 and 3; the layers whose backward is split learn from less.",
    schedule="interleaved-zero-bubble",
    zero=1,
    layers=4,
    micro_batch_size=1,
)
def bucket_sent_before_the_weights_half() -> Iterator[None]:
    """A bucket counts the inputs' half of a backward, and the weights' half comes after it."""
    run = Stage.backward_one_chunk

    def wrong(self: Stage, chunk: int, **how: Any) -> None:
        run(self, chunk, **how)
        if not (how["full_backward"] or self.is_first):
            self.on_weights()

    def late(self: Stage, chunk: int, last_backward: bool = False) -> None:
        PipelineStage.backward_weight_one_chunk(self, chunk, last_backward)

    with (
        patch.object(Stage, "backward_one_chunk", wrong),
        patch.object(Stage, "backward_weight_one_chunk", late),
    ):
        yield


@forward(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="blocks.4",
    symptom="Training works; the checkpoint is of a model whose upper layers are in other places.",
    schedule="zbv",
    layers=8,
)
def upper_layers_numbered_from_the_top() -> Iterator[None]:
    """On the way up the V each stage runs its blocks from the last to the first."""
    cut = pipeline_parallel.cut

    def wrong(model: GPT, config: Config, rank: int) -> list[GPT]:
        lower, upper = cut(model, config, rank)
        upper.blocks = nn.ModuleDict(dict(reversed(list(upper.blocks.items()))))
        return [lower, upper]

    with patch.object(pipeline_parallel, "cut", wrong):
        yield


@reduction(
    "pipeline_parallel",
    "1x2x2",
    "gradient",
    "token_embedding",
    sabotaged="token_embedding.weight",
    symptom="The copies stay equal, and learn nothing from what the head does with them.",
    schedule="zbv",
    layers=4,
    tied_embeddings=True,
)
def copy_on_the_same_rank_not_added() -> Iterator[None]:
    """Gradients of a tied embedding are summed between ranks; both its copies are on one."""
    take = Optimizer.take_gradients

    def wrong(self: Optimizer) -> dict[str, Tensor]:
        with patch.object(self, "copies", {}):
            return take(self)

    with patch.object(Optimizer, "take_gradients", wrong):
        yield


@update(
    "pipeline_parallel",
    "1x2x2",
    "loss",
    sabotaged="head",
    symptom="The first step is right; from then on the head is that of the beginning.",
    schedule="zbv",
    layers=4,
    micro_batch_size=1,
)
def second_copy_is_left_behind() -> Iterator[None]:
    """Of a tied embedding that a rank holds twice, the head's copy is not updated."""
    step = Optimizer.step

    def wrong(self: Optimizer, *args: Any) -> Any:
        with patch.object(self, "copies", {}):
            return step(self, *args)

    with patch.object(Optimizer, "step", wrong):
        yield


@reduction(
    "pipeline_parallel",
    "1x2x1",
    "gradient norm",
    sabotaged="gradient norm",
    symptom="The norm is a little too large where a V has embedding and head on one rank.",
    schedule="zbv",
    layers=4,
    tied_embeddings=True,
)
def one_weight_counted_by_two_stages() -> Iterator[None]:
    """In the gradient norm, each of a rank's stages counts its weights: what they share, twice."""

    def wrong(self: Trainer) -> Tensor:
        shards = self.optimizer.shards
        names = [name for stage in self.parallel.stages for name in stage.weights()]
        gradients = [shards[name].grad for name in names]
        return sum_of_squares([gradient for gradient in gradients if gradient is not None])

    with patch.object(Trainer, "own_sum_of_squares", wrong):
        yield


@backward(
    "zero",
    "1x2x2",
    "gradient",
    sabotaged="gradient",
    symptom="The first loss is right, torch says nothing; weights learn from few microbatches.",
    schedule="dualpipev",
    zero=3,
    layers=4,
    micro_batch_size=1,
)
def weights_freed_before_a_split_backward() -> Iterator[None]:
    """FSDP's default: blocks are freed after forward, of which a split backward has no notion."""
    apply = zero.apply

    def wrong(model: GPT, mesh: DeviceMesh, device: Any, **options: Any) -> None:
        apply(model, mesh, device, **options | {"reshard": True})

    with patch.object(zero, "apply", wrong):
        yield


@data(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="loss",
    symptom="Right for microbatches whose forward overlaps with no backward; the loss stays high.",
    schedule="dualpipev",
    layers=4,
    micro_batch_size=1,
)
def labels_of_the_other_half_of_a_pair() -> Iterator[None]:
    """A forward that overlaps with a backward is compared with the labels of the backward's."""
    original: Any = pipeline_parallel.V_SHAPED["dualpipev"]

    class Wrong(original):
        def _maybe_compute_loss(
            self, stage: Any, output: Any, labels: list[Tensor] | None, chunk: int, more: Any
        ) -> None:
            if labels is not None:
                labels = list(labels)
                labels[chunk] = labels[self.other_half(stage.stage_index).get(chunk, chunk)]
            super()._maybe_compute_loss(stage, output, labels, chunk, more)

        def other_half(self, stage: int) -> dict[int, int]:
            pairs = [step.sub_actions for step in self.pipeline_order[self.rank] if step]
            return {
                pair[0].microbatch_index: pair[1].microbatch_index
                for pair in pairs
                if pair and pair[0].stage_index == stage
            }

    with patch.dict(pipeline_parallel.V_SHAPED, {"dualpipev": Wrong}):
        yield


@data(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="data or token_embedding",
    symptom="Right for the schedules that have a name: those take the microbatches in order.",
    schedule_csv=BACKWARDS_PARTLY_SPLIT,
    layers=4,
)
def tokens_dealt_in_the_order_of_a_file() -> Iterator[None]:
    """The first forward that a file lists gets the first tokens, whichever microbatch's it is."""
    run = pipeline_parallel.run_list

    def wrong(schedule: Schedule, *others: Any) -> PipelineScheduleMulti:
        runtime = run(schedule, *others)
        first = [a for a in schedule.actions(0) if (a.stage, a.kind) == (0, "F")]
        step = runtime._step_microbatches

        def step_wrongly(tokens: list[Any], *others: Any, **more: Any) -> None:
            dealt = {action.microbatch: x for action, x in zip(first, tokens, strict=True)}
            step([dealt[microbatch] for microbatch in range(len(dealt))], *others, **more)

        with_tokens = 0 in schedule.stages[runtime.rank]
        if with_tokens:
            vars(runtime)["_step_microbatches"] = step_wrongly
        return runtime

    with patch.object(pipeline_parallel, "run_list", wrong):
        yield
