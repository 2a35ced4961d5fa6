"""Losses and logged values over microbatches are those of the batch: values, and all gradients."""

from __future__ import annotations

import gc
import math
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.pipeline import combine as combine_module
from lightning_4d.parallel.pipeline import leaves, seeds
from lightning_4d.parallel.pipeline.reduction import BatchReduction, Plan
from lightning_4d.parallel.pipeline.tail_trace import TailTrace
from tests.parallel.pipeline.cases import CLASSES, Head, assert_same, in_parts, make_batch, whole

EQUAL, UNEQUAL = (4, 4, 4), (1, 2, 4, 5)
CUTS = [(EQUAL, "no"), (EQUAL, "empty"), (UNEQUAL, "some"), (UNEQUAL, "empty")]


def _flat(logits, batch):
    return logits.flatten(0, 1), batch["labels"].flatten()


def pair(function, *, of=lambda x: x, **options):
    """A loss of logits and dense targets."""
    return lambda head, hidden, batch: (function(of(head(hidden)), of(batch["target"]), **options), {})


def per_sample(function):
    """A loss of one vector per sample."""
    return lambda head, hidden, batch: (function(head(hidden).mean(1), batch), {})


def cross_entropy(**options):
    def tail(head, hidden, batch):
        return F.cross_entropy(*_flat(head(hidden), batch), **options), {}

    return tail


def weighted_cross_entropy(head, hidden, batch):
    return F.cross_entropy(*_flat(head(hidden), batch), weight=head.class_weight, label_smoothing=0.1), {}


def sequence_cross_entropy(head, hidden, batch):
    return nn.CrossEntropyLoss()(head(hidden).transpose(1, 2), batch["labels"]), {}


def nll(head, hidden, batch):
    return F.nll_loss(head(hidden).log_softmax(-1).transpose(1, 2), batch["labels"], weight=head.class_weight), {}


def masked_mean(head, hidden, batch):
    losses, mask = head(hidden).square().mean(-1), batch["mask"]
    return (losses * mask).sum() / mask.sum(), {"tokens": mask.sum()}


def masked_mean_clamped(head, hidden, batch):
    losses, mask = head(hidden).square().mean(-1), batch["mask"]
    return 0.5 * (losses * mask).sum() / mask.sum().clamp(min=1), {}


def selected_mean(head, hidden, batch):
    return head(hidden)[batch["mask"].bool()].square().mean(), {}


def logged_values(head, hidden, batch):
    logits = head(hidden)
    loss = F.cross_entropy(*_flat(logits, batch))
    correct = logits.argmax(-1) == batch["labels"]
    valid = batch["labels"] != -100
    norms = hidden.detach().norm(dim=-1)
    logged = {
        "loss": loss,
        "ppl": loss.detach().exp(),
        "bits": loss / math.log(2),
        "item": loss.item(),
        "twice": 2 * loss.item() + 1,
        "accuracy": correct[valid].float().mean(),
        "hits": (correct & valid).sum(),
        "ratio": (correct & valid).sum() / valid.sum(),
        "largest": logits.max(),
        "least": logits.amin(),
        "norm": norms.mean(),
        "length": hidden.norm(),
        "l1": torch.linalg.vector_norm(hidden, 1),
        "std": logits.std(),
        "var": torch.var(logits, correction=0),
        "any": correct.any(),
        "all": valid.all(),
        "lse": logits.logsumexp((0, 1, 2)),
        "stack": torch.stack([loss, logits.mean()]).mean(),
        "temperature": head.scale,
        "clamped": loss.clamp(max=0.5),
        "where": torch.where(loss > 1, loss, loss * 2),
        "nanmean": logits.nanmean(),
        "keepdim": logits.mean((0, 1, 2), keepdim=True).squeeze(),
        "learning_rate": 0.1,
    }
    return loss, logged


def several_heads(head, hidden, batch):
    logits = head(hidden)
    a, b = F.cross_entropy(*_flat(logits, batch), reduction="sum"), head(hidden * 2).square().sum()
    return (a + 0.1 * b) / (batch["labels"] != -100).sum(), {"a": a, "b": b}


def learned_weights(head, hidden, batch):
    logits = head(hidden)
    a, b = F.mse_loss(logits, batch["target"]), logits.abs().mean()
    s = head.log_variance
    return torch.exp(-s[0]) * a + s[0] + torch.exp(-s[1]) * b + s[1], {"a": a}


def penalty(head, hidden, batch):
    total = F.mse_loss(head(hidden), batch["target"], reduction="sum")
    return total + 0.01 * sum(p.square().sum() for p in head.parameters()), {}


def accumulated(head, hidden, batch):
    total = torch.zeros((), dtype=hidden.dtype)
    for power in (1, 2, 3):
        total += head(hidden).pow(power).mean()
    return total, {"total": total}


def root_of_mean_square(head, hidden, batch):
    return F.mse_loss(head(hidden), batch["target"]).sqrt(), {}


def log_cosh(head, hidden, batch):
    return torch.log(torch.cosh(head(hidden) - batch["target"])).mean(), {}


def nested_means(head, hidden, batch):
    return head(hidden).square().mean(-1).sum(1).mean(), {}


def two_means(head, hidden, batch):
    logits = head(hidden)
    return F.mse_loss(logits, batch["target"]) + 1e-2 * logits.logsumexp(-1).square().mean(), {}


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x / x.numel()


def custom_function(head, hidden, batch):
    return 3 * _Custom.apply(head(hidden)), {}


def under_autocast(head, hidden, batch):
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return F.cross_entropy(*_flat(head(hidden), batch)), {}


def embedding_cosine(head, hidden, batch):
    x = head(hidden).mean(1)
    return F.cosine_embedding_loss(x, batch["target"].mean(1), batch["sign"], margin=0.1), {}


def changed_after(head, hidden, batch):
    loss = F.cross_entropy(*_flat(head(hidden), batch))
    logged = {"before": loss.detach().clone()}
    loss /= 2
    mean = head(hidden).mean()
    mean.mul_(3).add_(loss)
    loss += mean
    return loss, logged | {"loss": loss, "mean": mean}


def skips_what_a_mask_does_not_need(head, hidden, batch):
    mask = batch["mask"]
    if not bool((mask == 1).all()):
        hidden = hidden * mask[..., None]
    return F.mse_loss(head(hidden), batch["target"]), {}


def vector_of_scalars(head, hidden, batch):
    losses = torch.stack([F.mse_loss(head(hidden * k), batch["target"]) for k in (1, 2, 3)])
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=hidden.dtype)
    return (losses * weights).sum(), {
        "worst": losses.max(),
        "second": losses[1],
        "weighted": losses.softmax(0) @ losses,
    }


def linear_cross_entropy(head, hidden, batch):
    x, layer = head.norm(hidden).flatten(0, 1), head.head
    labels = batch["labels"].flatten()
    return F.linear_cross_entropy(x, layer.weight, labels, linear_bias=layer.bias), {}


def clamped(head, hidden, batch):
    return F.mse_loss(head(hidden), batch["target"] + 10 * hidden[:, :, :1]).clamp(max=100.0), {}


def flooded(head, hidden, batch):
    loss = F.cross_entropy(*_flat(head(hidden), batch))
    return (loss - 2.0).abs() + 2.0, {}


LOSSES = {
    "clamped": clamped,
    "flooded": flooded,
    "skipped mask": skips_what_a_mask_does_not_need,
    "vector of scalars": vector_of_scalars,
    "mse": pair(F.mse_loss),
    "mse sum": pair(F.mse_loss, reduction="sum"),
    "l1": pair(F.l1_loss),
    "smooth l1": pair(F.smooth_l1_loss, beta=0.3),
    "huber": pair(F.huber_loss, delta=0.3),
    "huber sum": pair(F.huber_loss, delta=0.3, reduction="sum"),
    "bce": pair(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y)),
    "bce logits": pair(F.binary_cross_entropy_with_logits),
    "kl mean": pair(lambda x, y: F.kl_div(x.log_softmax(-1), y)),
    "kl batchmean": pair(lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean")),
    "kl sum": pair(lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="sum")),
    "gaussian nll": pair(lambda x, y: F.gaussian_nll_loss(x, y, x.exp())),
    "poisson nll": pair(F.poisson_nll_loss),
    "soft margin": pair(F.soft_margin_loss),
    "hinge embedding": per_sample(lambda x, b: F.hinge_embedding_loss(x[:, 0], b["sign"])),
    "cosine embedding": embedding_cosine,
    "margin ranking": per_sample(lambda x, b: F.margin_ranking_loss(x[:, 0], x[:, 1], b["sign"], margin=0.2)),
    "multi margin": per_sample(lambda x, b: F.multi_margin_loss(x, b["classes"])),
    "multilabel margin": per_sample(
        lambda x, b: F.multilabel_margin_loss(x, b["classes"][:, None].expand(-1, CLASSES))
    ),
    "multilabel soft margin": per_sample(lambda x, b: F.multilabel_soft_margin_loss(x, b["target"].mean(1).round())),
    "triplet": per_sample(lambda x, b: F.triplet_margin_loss(x, b["target"][:, 0], b["target"][:, 1])),
    "probabilities": pair(
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(0, 1).softmax(-1), label_smoothing=0.1)
    ),
    "classes": per_sample(lambda x, b: F.cross_entropy(x, b["classes"])),
    "cross entropy": cross_entropy(),
    "cross entropy sum": cross_entropy(reduction="sum"),
    "cross entropy smooth": cross_entropy(label_smoothing=0.1),
    "cross entropy weighted": weighted_cross_entropy,
    "cross entropy of sequences": sequence_cross_entropy,
    "nll": nll,
    "masked mean": masked_mean,
    "masked mean clamped": masked_mean_clamped,
    "selected mean": selected_mean,
    "logged values": logged_values,
    "several heads": several_heads,
    "learned weights": learned_weights,
    "penalty": penalty,
    "accumulated": accumulated,
    "rmse": root_of_mean_square,
    "log cosh": log_cosh,
    "nested means": nested_means,
    "two means": two_means,
    "custom function": custom_function,
    "autocast": under_autocast,
    "dot": pair(lambda x, y: x.flatten().dot(y.flatten())),
    "sum of sum": pair(lambda x, y: ((x - y) ** 2).sum(-1).sum()),
}


if hasattr(F, "linear_cross_entropy"):
    LOSSES["linear cross entropy"] = linear_cross_entropy


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, early):
    for sizes, ragged in CUTS:
        batch = make_batch(ragged)
        given = in_parts(LOSSES[name], batch, sizes, Plan(unproven=True), early=early)
        assert_same(given, whole(LOSSES[name], batch))
        if early and name in TOTALS_OF_THE_BATCH:
            assert given.correction is None


TOTALS_OF_THE_BATCH = {
    "cross entropy",
    "cross entropy weighted",
    "nll",
    "masked mean",
    "masked mean clamped",
    "several heads",
    "mse",
}


# Several totals in one loss -----------------------------------------------------------------------------------------


def with_z_loss(head, hidden, batch):
    logits = head(hidden)
    loss = F.cross_entropy(*_flat(logits, batch))
    z = logits.logsumexp(-1).square().mean()
    return loss + 1e-1 * z, {"loss": loss, "z": z}


def two_targets(head, hidden, batch):
    logits, labels = head(hidden), batch["labels"]
    now = F.cross_entropy(logits.transpose(1, 2), labels)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return now + 0.3 * F.cross_entropy(logits.transpose(1, 2), shifted) + F.cross_entropy(
        logits.mean(1), batch["classes"]
    ), {}


def learned_weight_of_cross_entropy(head, hidden, batch):
    s = head.log_variance[0]
    return torch.exp(-s) * F.cross_entropy(*_flat(head(hidden), batch)) + s, {}


def shape_written_out(head, hidden, batch):
    rows, time, _ = hidden.shape
    logits = head(hidden).view(rows * time, CLASSES)
    return F.cross_entropy(logits, batch["labels"].view(rows * time)) + logits.mean(), {}


SEVERAL = [with_z_loss, changed_after, two_targets, learned_weight_of_cross_entropy]


@pytest.mark.parametrize("ragged", ["no", "some", "empty"])
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=str)
@pytest.mark.parametrize("tail", SEVERAL, ids=lambda tail: tail.__name__)
def test_several_totals_that_the_batch_alone_gives(tail, sizes, ragged):
    batch = make_batch(ragged)
    given = in_parts(tail, batch, sizes, Plan(unproven=True))
    assert_same(given, whole(tail, batch))
    assert given.correction is None


@pytest.mark.parametrize("tail", SEVERAL, ids=lambda tail: tail.__name__)
def test_several_totals_known_too_late_are_refused(tail):
    with pytest.raises(UnsupportedError, match=r"the loss: its terms are divided by totals .*num_microbatches=1"):
        in_parts(tail, make_batch("some"), EQUAL, Plan(unproven=True), early=False)


def test_a_total_that_does_not_fit_other_microbatches_is_no_early_total():
    batch = make_batch("some")
    assert_same(in_parts(shape_written_out, batch, EQUAL, Plan(unproven=True)), whole(shape_written_out, batch))
    with pytest.raises(UnsupportedError, match="its terms are divided by totals"):
        in_parts(shape_written_out, batch, UNEQUAL, Plan(unproven=True))


def pseudo_labels(head, hidden, batch):
    logits = head(hidden)
    sure = (logits.detach().softmax(-1).amax(-1) > 0.25).double()
    return (logits.square().mean(-1) * sure).sum() / sure.sum(), {"sure": sure.mean()}


def changed_in_place(head, hidden, batch):
    labels = batch["labels"].clone()
    labels[:, 0] = -100
    return F.cross_entropy(*_flat(head(hidden), {"labels": labels})), {}


@pytest.mark.parametrize("tail", [pseudo_labels, changed_in_place], ids=lambda tail: tail.__name__)
def test_one_late_total_is_corrected_at_the_end(tail):
    batch = make_batch("empty")
    given = in_parts(tail, batch, UNEQUAL, Plan(unproven=True))
    assert given.correction is not None
    assert_same(given, whole(tail, batch))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 5e-3)], ids=str)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "true"])
def test_half_precision(dtype, tolerance, autocast):
    def tail(head, hidden, batch):
        with torch.autocast("cpu", dtype, enabled=autocast):
            own = torch.float32 if autocast else dtype
            logits = head.to(own)(hidden.to(own))
            loss = F.cross_entropy(*_flat(logits, batch))
        return loss, {"loss": loss, "mean": logits.mean()}

    batch = make_batch("empty")
    given, expected = in_parts(tail, batch, UNEQUAL, Plan(unproven=True)), whole(tail, batch)
    assert given.loss.dtype == expected.loss.dtype
    for name, gradient in expected.gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(given.gradients[name].expand_as(gradient), gradient, rtol=0, atol=tolerance * scale)
    torch.testing.assert_close(given.loss, expected.loss, rtol=tolerance, atol=0)


def test_fp16_sums_stay_in_range():
    logits = torch.full((20000, 4), 8.0, dtype=torch.float16)
    logits[:, 0] = -8.0

    def tail(head, hidden, batch):
        return F.cross_entropy(hidden.half() + logits[: len(hidden)], batch["classes"]), {}

    batch = {"hidden": torch.zeros(20000, 4, dtype=torch.float64), "classes": torch.zeros(20000, dtype=torch.long)}
    given = in_parts(tail, batch, (10000, 10000), Plan(unproven=True))
    expected = F.cross_entropy(logits.float(), batch["classes"])
    torch.testing.assert_close(given.loss, expected.half())
    assert given.gradients["hidden"].isfinite().all()


def test_no_valid_target_at_all():
    batch = make_batch()
    batch["labels"][:] = -100
    for early in (True, False):
        given = in_parts(LOSSES["cross entropy"], batch, UNEQUAL, Plan(unproven=True), early=early)
        assert_same(given, whole(LOSSES["cross entropy"], batch))
        assert given.loss.isnan()


# Refusals, and the user's word --------------------------------------------------------------------------------------


def one_sided(head, hidden, batch):
    loss = F.mse_loss(head(hidden), batch["target"])
    return (loss if bool(loss > THRESHOLD) else loss * 2), {"loss": loss}


THRESHOLD = 1.0


def by_item(head, hidden, batch):
    loss = F.mse_loss(head(hidden), batch["target"])
    return (loss if loss.item() > THRESHOLD else loss * 2), {}


def constant_that_differs(head, hidden, batch):
    own = torch.from_numpy(batch["target"].numpy()[:, 0, :1].sum(keepdims=True)).view(())
    return F.mse_loss(head(hidden), batch["target"]) * own, {}


def number_that_differs(head, hidden, batch):
    return F.mse_loss(head(hidden), batch["target"]) * int(batch["labels"][0, 0] + 1), {}


def paths_that_differ(head, hidden, batch):
    loss = F.mse_loss(head(hidden), batch["target"])
    return (loss.exp() if len(hidden) == 4 else loss), {}


def selection_and_mean(head, hidden, batch):
    logits = head(hidden)
    return logits[batch["mask"].bool()].square().mean() + logits.mean(), {}


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (constant_that_differs, "it uses a tensor, or an `if` on one, that is not the same"),
        (number_that_differs, "Python number that was taken for a constant and is "),
        (paths_that_differ, "the operations on losses and logged values: they differ between two microbatches"),
        (selection_and_mean, "the loss: its terms are divided by totals"),
    ],
)
def test_what_differs_between_microbatches_is_refused(tail, message):
    with pytest.raises(UnsupportedError, match=message):
        in_parts(tail, make_batch("some"), UNEQUAL, Plan(unproven=True))


@pytest.mark.parametrize("tail", [one_sided, by_item], ids=lambda tail: tail.__name__)
def test_an_if_must_come_out_as_for_the_batch(tail, monkeypatch):
    batch = make_batch()
    loss = float(whole(LOSSES["mse"], batch).loss)
    monkeypatch.setitem(globals(), "THRESHOLD", loss * 0.5)
    assert_same(in_parts(tail, batch, EQUAL, Plan(unproven=True)), whole(tail, batch))
    monkeypatch.setitem(globals(), "THRESHOLD", loss * 1.001)
    with pytest.raises(UnsupportedError, match=r"an `if` on one|they differ between two microbatches"):
        in_parts(tail, batch, EQUAL, Plan(unproven=True))


def test_an_if_before_the_tail_need_not_come_out_alike():
    trace, mask = TailTrace(), torch.tensor([1.0, 1.0, 0.0])
    trace.rows(mask)
    with trace:
        assert not bool(mask.sum() == mask.numel())
        assert not trace.conditions
        trace.rows(mask * 2)
        assert not bool(mask.sum() == mask.numel())
        assert len(trace.conditions) == 1


def test_numbers_of_tensors_are_numbers():
    trace, mask = TailTrace(), torch.tensor([1, 1, 0])
    trace.rows(mask)
    with trace:
        count, mean = mask.sum().item(), mask.double().mean().item()
        assert (count, list(range(count)), [5, 6, 7][count], f"{count:d} {mean:.3f}") == (2, [0, 1], 7, "2 0.667")
        assert torch.zeros(count, 3)[:count].view(count * 3).shape == (6,)
        assert torch.full((), mean) == torch.tensor(mean)
        assert isinstance(count / 4, float)
        assert round(mean, 1) == 0.7
        assert pickle.loads(pickle.dumps((count, mean))) == (2, 2 / 3)
    assert trace.node(count) is not None
    trace.close()
    assert type(count + 1) is int
    assert type(mean * 2) is float


def test_a_trace_keeps_no_tensor_once_it_is_finished():
    batch, plan = make_batch(), Plan(unproven=True)
    trace = TailTrace()
    hidden = batch["hidden"].clone().requires_grad_()
    with trace:
        trace.rows(hidden, *batch.values())
        loss, logged = logged_values(Head().double(), hidden, batch)
    kept = weakref.ref(loss)
    root = BatchReduction([len(hidden)], plan).finish(0, trace, loss, {"item": logged["item"]})
    del loss, root
    logged = {"item": logged["item"]}
    gc.collect()
    assert kept() is None


def test_an_unproven_program_is_refused():
    with pytest.raises(UnsupportedError, match="not proven"):
        in_parts(LOSSES["mse"], make_batch(), EQUAL, Plan())


@pytest.mark.parametrize(("mode", "name"), [("mean", "mse"), ("sum", "mse sum"), ("mean", "classes")])
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=str)
def test_the_users_word(mode, name, sizes):
    batch = make_batch()
    assert_same(in_parts(LOSSES[name], batch, sizes, Plan(unproven=True), mode), whole(LOSSES[name], batch))


def test_the_users_word_on_a_loss_that_mixes_samples():
    def contrastive(head, hidden, batch):
        z = head(hidden).mean(1)
        return (z @ z.T).logsumexp(-1).mean(), {"mse": F.mse_loss(head(hidden), batch["target"])}

    batch = make_batch()
    given = in_parts(contrastive, batch, UNEQUAL, Plan(unproven=True), "mean")
    torch.testing.assert_close(given.logged["mse"], whole(LOSSES["mse"], batch).loss)


# A wrong weight turns these tests red -------------------------------------------------------------------------------


def _fault_in_a_count(patch):
    patch.setattr(leaves, "_target_weight", lambda target, *rest: torch.tensor(1.0, dtype=torch.float64))


def _fault_in_a_share(patch):
    root = seeds.Seeds.root

    def wrong(self, index, part, loss):
        return root(self, index, part, loss) * (1 + 1e-6 * index)

    patch.setattr(seeds.Seeds, "root", wrong)


def _fault_in_a_combination(patch):
    patch.setattr(combine_module, "_mean", lambda values, counts: torch.stack(list(values)).mean(0))


def _fault_in_the_correction(patch):
    patch.setattr(seeds.Seeds, "correction", lambda self, parts, batch: None)


FAULTS = {
    "a count": ("cross entropy", _fault_in_a_count),
    "a share": ("mse", _fault_in_a_share),
    "a combination": ("mse", _fault_in_a_combination),
    "the correction": ("cross entropy", _fault_in_the_correction),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, monkeypatch):
    name, inject = FAULTS[fault]
    batch = make_batch("some")
    expected = whole(LOSSES[name], batch)
    inject(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(in_parts(LOSSES[name], batch, UNEQUAL, Plan(unproven=True), early=False), expected)
