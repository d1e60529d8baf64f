"""Cross-entropy summed over tokens, and the one number that divides it.

The loss of a step is (sum of token losses) / (valid tokens in the global batch). The count is known
before the backward pass, so that a rank, a microbatch or an accumulation step divides by the same
number and every reduction after it is a plain sum. A mean of means would weigh a token by the
company it keeps: with a sum of 3 over 1 token here and of 12 over 6 tokens there, the mean is 15/7
and not (3 + 2)/2.

Shapes: b sequence, t token, v vocabulary.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dtensor_llm.data import IGNORED_LABEL


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p(label) over the labels that are not -100.

    `logits` b t v, `labels` b t; returns a scalar in the logits' dtype (float32 for lower ones).
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(
        rearrange(logits, "b t v -> (b t) v"),
        rearrange(labels, "b t -> (b t)"),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )


def count_valid_tokens(labels: Tensor, groups: Iterable[dist.ProcessGroup] = ()) -> Tensor:
    """Number of labels that are not -100 in the global batch, whose parts the `groups` hold.

    Comm: one all-reduce of an int64 over each group, no backward.
    """
    count = (labels != IGNORED_LABEL).sum()
    for group in groups:
        dist.all_reduce(count, group=group)
    return count


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """-log softmax at the label, with the vocabulary sharded over a group.

    Paper: Shoeybi et al., arXiv 1909.08053, section 3: instead of gathering b t v logits, the ranks
    exchange three numbers per token: the largest logit, the sum of exponentials, the label's logit.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, labels: Tensor, start: int, group: dist.ProcessGroup
    ) -> Tensor:
        largest = logits.amax(dim=-1)  # b t
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[..., None]
        own = (labels >= start) & (labels < start + logits.shape[-1])  # b t, False where ignored
        column = torch.where(own, labels - start, 0)[..., None]
        label_logit = shifted.gather(-1, column)[..., 0].where(own, 0.0)
        exponentials = shifted.exp_()  # b t v/tp
        sums = torch.stack([exponentials.sum(dim=-1), label_logit])  # 2 b t
        dist.all_reduce(sums, group=group)
        denominator, label_logit = sums
        probabilities = exponentials.div_(denominator[..., None])
        valid = labels != IGNORED_LABEL
        ctx.save_for_backward(probabilities, column, own, valid)
        return (denominator.log() - label_logit).where(valid, 0.0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # b t
        probabilities, column, own, valid = ctx.saved_tensors  # type: ignore[attr-defined] # torch's stub lacks it
        minus_one_hot = -own[..., None].to(probabilities.dtype)
        grad_logits = probabilities.scatter_add(-1, column, minus_one_hot)
        return grad_logits * grad.where(valid, 0.0)[..., None], None, None, None


def vocabulary_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, first_row: int, group: dist.ProcessGroup
) -> Tensor:
    """`summed_cross_entropy` where each rank of `group` holds some columns of the logits.

    `logits` b t v/tp are the columns from `first_row` of the vocabulary on; shards may be uneven.
    `labels` b t are the same on every rank, and so is the scalar that is returned.

    Comm: forward all-reduce MAX of b t and SUM of 2 b t numbers over `group`; backward none.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = _VocabularyParallelCrossEntropy.apply(logits, labels, first_row, group)
    return losses.sum()
