"""The probe refuses what mixes samples, by name, and finds the rule of what cannot be followed."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.pipeline.probe import Outcome, check_decomposes
from lightning_4d.parallel.pipeline.reduction import Plan
from tests.parallel.pipeline.cases import ROWS, TIME, WIDTH, Head, assert_same, in_parts, make_batch, whole
from tests.parallel.pipeline.test_reduction import LOSSES


def proof(tail, batch, plan, mode="auto", head=None):
    """What the engine would do: the tail on random hidden states of some rows."""
    torch.manual_seed(0)
    head = head or Head().double()

    def run(trace, draw, start, stop):
        generator = torch.Generator().manual_seed(draw)
        hidden = torch.randn(ROWS, TIME, WIDTH, dtype=torch.float64, generator=generator)[start:stop].requires_grad_()
        part = {key: value[start:stop].clone() for key, value in batch.items()}
        with trace:
            trace.rows(hidden)
            trace.entries(*part.values())
            return Outcome(*tail(head, hidden, part))

    return lambda: check_decomposes(run, ROWS, plan, mode)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", LOSSES)
def test_every_known_loss_is_proven(name):
    batch, plan = make_batch("some"), Plan()
    given = in_parts(LOSSES[name], batch, (1, 2, 4, 5), plan, prove=proof(LOSSES[name], batch, plan))
    assert_same(given, whole(LOSSES[name], batch))
    assert len(plan.rules) == 1


def contrastive(head, hidden, batch):
    z = F.normalize(head(hidden).mean(1), dim=-1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z))), {}


def batch_norm(head, hidden, batch):
    x = head(hidden).mean(1)
    x = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
    return F.cross_entropy(x, batch["classes"]), {}


def norm_of_batch_mean(head, hidden, batch):
    return head(hidden).mean((0, 1)).square().sum(), {}


def mean_over_rows_then_sum(head, hidden, batch):
    return head(hidden).mean(0).sum(), {}


def standardised(head, hidden, batch):
    x = head(hidden)
    return ((x - x.mean()) ** 2).mean(), {}


def neighbours(head, hidden, batch):
    return (head(hidden).roll(1, 0) - head(hidden)).square().mean(), {}


def first_sample(head, hidden, batch):
    return F.mse_loss(head(hidden), batch["target"]), {"first": hidden[0, 0, 0]}


def clipped_by_batch(head, hidden, batch):
    x = head(hidden)
    return (x / x.detach().abs().max()).square().mean(), {}


def median(head, hidden, batch):
    return F.mse_loss(head(hidden), batch["target"]), {"median": hidden.median()}


def vector(head, hidden, batch):
    return F.mse_loss(head(hidden), batch["target"]), {"vector": hidden.mean(-1)}


def exponential_of_number(head, hidden, batch):
    loss = F.mse_loss(head(hidden), batch["target"])
    return loss, {"ppl": math.exp(loss.item())}


def number_in_loss(head, hidden, batch):
    loss = F.mse_loss(head(hidden), batch["target"])
    return loss * math.sqrt(float(loss.detach())), {}


def other_operations(head, hidden, batch):
    loss = F.mse_loss(head(hidden), batch["target"])
    return (loss if len(hidden) > 6 else 2 * loss), {}


def norm_in_loss(head, hidden, batch):
    return head(hidden).norm() + F.mse_loss(head(hidden), batch["target"]), {}


def condition(head, hidden, batch):
    loss = F.mse_loss(head(hidden), batch["target"], reduction="sum")
    return (loss * 2 if loss > 100 else loss), {}


def sampled_negatives(head, hidden, batch):
    z = head(hidden).mean(1)
    return F.triplet_margin_loss(z, batch["target"][:, 0], z[torch.randperm(len(z))]), {}


REFUSED = {
    contrastive: "the loss.*mixes samples.*cross_entropy",
    batch_norm: "the loss.*mixes samples.*cross_entropy",
    norm_of_batch_mean: "the loss.*mixes samples.*'sum'",
    mean_over_rows_then_sum: "the loss.*mixes samples.*'sum'",
    standardised: "the loss.*computed with a value of the whole batch",
    clipped_by_batch: "the loss.*computed with a value of the whole batch",
    neighbours: "the loss.*mixes samples",
    first_sample: "the logged value 'first'.*no proven rule",
    median: "the logged value 'median'.*no proven rule",
    vector: "the logged value 'vector'.*the shape \\[12, 5\\]",
    exponential_of_number: "the logged value 'ppl'.*Python number",
    number_in_loss: "the loss.*Python number",
    other_operations: "other operations on 12 rows",
    norm_in_loss: "the loss.*gradient of .*norm.* does not add up",
    condition: "the loss or a logged value.*other operations",
    sampled_negatives: "the loss.*mixes samples",
}


@pytest.mark.parametrize("tail", REFUSED, ids=lambda tail: tail.__name__)
def test_refused_by_name(tail):
    with pytest.raises(UnsupportedError, match=REFUSED[tail]):
        proof(tail, make_batch("some"), Plan())()


def divided_by_rows(head, hidden, batch):
    loss = F.mse_loss(head(hidden), batch["target"], reduction="sum") / hidden.size(0)
    return loss, {
        "rows": len(hidden),
        "tokens": float(hidden.numel()),
        "width": hidden.size(-1),
        "mean": float(loss.detach()),
    }


def divided_by_valid(head, hidden, batch):
    logits, labels = head(hidden).flatten(0, 1), batch["labels"].flatten()
    count = int((labels != -100).sum())
    return F.cross_entropy(logits, labels, reduction="sum") / count, {
        "count": count,
        "most": float(logits.detach().max()),
    }


class _Opaque(torch.autograd.Function):
    """A kernel that torch functions do not show."""

    @staticmethod
    def forward(ctx, x, reduction):
        ctx.save_for_backward(x)
        ctx.scale = 1 / x.numel() if reduction == "mean" else 1.0
        return torch.from_numpy((x.detach().numpy() ** 2 * ctx.scale).sum(keepdims=True)).view(())

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 * ctx.saved_tensors[0] * ctx.scale, None


def opaque(reduction):
    return lambda head, hidden, batch: (_Opaque.apply(head(hidden), reduction), {})


class _Program(torch.autograd.Function):
    """A loss with more than one operation after the reduction, inside its forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum() / (2 * x.numel())

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] / ctx.saved_tensors[0].numel()


def program_in_function(head, hidden, batch):
    loss = _Program.apply(head(hidden))
    return 0.5 * loss, {"loss": loss}


def noise_per_row(head, hidden, batch):
    noise = torch.randn_like(hidden)
    return F.mse_loss(F.dropout(head(hidden), 0.5), batch["target"]) + noise.mean(), {}


def numbers_from_tensors(head, hidden, batch):
    logits, labels = head(hidden).flatten(0, 1), batch["labels"].flatten()
    valid = (labels != -100).sum().item()
    hits = (logits.argmax(-1) == labels).sum().item()
    loss = F.cross_entropy(logits, labels, reduction="sum") / valid
    return loss, {
        "accuracy": hits / valid,
        "percent": 100 * (hits / valid),
        "valid": valid,
        "loss": float(loss.detach()),
    }


def mean_by_numpy(head, hidden, batch):
    loss = F.mse_loss(head(hidden), batch["target"])
    return loss, {"mean": hidden.detach().numpy().mean().item(), "most": hidden.detach().numpy().max().item()}


def without_integers(batch):
    return {key: value for key, value in batch.items() if value.is_floating_point()}


def with_integers(batch):
    return batch


@pytest.mark.parametrize(
    ("tail", "entries"),
    [
        (divided_by_rows, with_integers),
        (divided_by_valid, with_integers),
        (numbers_from_tensors, with_integers),
        (opaque("sum"), with_integers),
        (opaque("mean"), without_integers),
        (program_in_function, without_integers),
        (mean_by_numpy, without_integers),
    ],
    ids=["rows", "valid", "numbers from tensors", "opaque sum", "opaque mean", "program in function", "numpy"],
)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (1, 2, 4, 5)], ids=str)
def test_rules_found_by_the_probe(tail, entries, sizes):
    batch, plan = entries(make_batch("some")), Plan()
    assert_same(in_parts(tail, batch, sizes, plan, prove=proof(tail, batch, plan)), whole(tail, batch))


@pytest.mark.parametrize(
    ("tail", "name"), [(opaque("mean"), "the loss"), (program_in_function, "the loss"), (mean_by_numpy, "value 'mean'")]
)
def test_an_opaque_mean_may_be_over_valid_targets(tail, name):
    with pytest.raises(UnsupportedError, match=name):
        proof(tail, make_batch(), Plan())()


def squeezed(head, hidden, batch):
    return F.mse_loss(head(hidden)[:, :1, :1].squeeze(), batch["sign"].squeeze()), {}


def test_a_squeeze_needs_parts_of_more_than_one_row():
    batch, plan = make_batch(), Plan()
    assert_same(in_parts(squeezed, batch, (4, 6, 2), plan, prove=proof(squeezed, batch, plan)), whole(squeezed, batch))
    with pytest.raises(UnsupportedError, match=r"they differ between two microbatches|not proven"):
        in_parts(squeezed, batch, (4, 7, 1), plan, prove=proof(squeezed, batch, plan))


def test_random_numbers_per_row_and_dropout_are_no_mixing():
    proof(noise_per_row, make_batch(), Plan())()


def test_the_probe_leaves_randomness_and_gradients_alone():
    head, batch = Head().double(), make_batch()
    prove = proof(noise_per_row, batch, Plan(), head=head)
    states = torch.get_rng_state(), random.getstate()
    prove()
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert all(p.grad is None for p in head.parameters())


def test_the_users_word_is_taken_for_the_loss_but_not_for_logs():
    proof(contrastive, make_batch(), Plan(), mode="mean")()
    with pytest.raises(UnsupportedError, match="'first'"):
        proof(first_sample, make_batch(), Plan(), mode="mean")()
