"""Hugging Face models that compute their own loss, on padded batches: loss and gradients are the batch's."""

from __future__ import annotations

import pytest
import torch

from lightning_4d.parallel.pipeline.probe import Outcome, check_decomposes
from lightning_4d.parallel.pipeline.reduction import BatchReduction, Plan
from lightning_4d.parallel.pipeline.tail_trace import TailTrace

SMALL = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def _batch():
    torch.manual_seed(0)
    ids, mask = torch.randint(3, 90, (6, 9)), torch.ones(6, 9, dtype=torch.long)
    mask[1, 5:], mask[4, 3:] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return batch | {"next_sentence_label": torch.randint(0, 2, (6,))}


def _llama(transformers):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, pad_token_id=0, **SMALL))


def _bert(transformers):
    return transformers.BertForPreTraining(transformers.BertConfig(**SMALL))


def _step(model, batch):
    output = model(**batch)
    return output.loss, {"ppl": output.loss.detach().exp()}


@pytest.mark.parametrize(
    ("make", "entries"),
    [(_llama, ["input_ids", "attention_mask", "labels"]), (_bert, None)],
    ids=["llama: valid tokens", "bert: valid tokens and sentences"],
)
@pytest.mark.parametrize("sizes", [[2, 2, 2], [1, 2, 3]], ids=str)
def test_own_losses(make, entries, sizes):
    transformers = pytest.importorskip("transformers")
    batch = _batch()
    batch = {key: batch[key] for key in entries or batch}
    model, plan = make(transformers).double().eval(), Plan()
    loss, logged = _step(model, batch)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    def run(trace, draw, start, stop):
        part = {key: value[start:stop] for key, value in batch.items()}
        trace.entries(*part.values())
        with trace:
            return Outcome(*_step(model, part))

    pieces = list(zip(*(value.split(sizes) for value in batch.values())))
    reduction = BatchReduction(sizes, plan, prove=lambda: check_decomposes(run, 6, plan), entries=pieces)
    for index, piece in enumerate(pieces):
        trace = TailTrace()
        trace.entries(*piece)
        with trace:
            own = _step(model, dict(zip(batch, piece)))
        reduction.finish(index, trace, *own).backward()
    reduction.check()
    assert reduction.correction() is None
    torch.testing.assert_close(reduction.loss(), loss.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(reduction.logged()["ppl"], logged["ppl"], rtol=1e-5, atol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-12)
