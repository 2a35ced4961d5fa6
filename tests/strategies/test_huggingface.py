"""Hugging Face models, built from their configuration, train on any layout with DDP's numbers. Needs `transformers`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_4d import NDStrategy
from lightning_4d.parallel.blocks import find_blocks
from tests.harness import compare, reference, train

pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}


def build(kind: str) -> Any:
    import transformers as hf

    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
    if kind == "qwen2 tied":
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA, tie_word_embeddings=True))
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))
    if kind.startswith("phi3"):  # one weight for queries, keys and values, another for gate and up
        keys = 2 if kind == "phi3 grouped" else 4
        config = {**LLAMA, "num_key_value_heads": keys, "pad_token_id": 0}
        return hf.Phi3ForCausalLM(hf.Phi3Config(**config))
    if kind == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**SIZES))
    if kind == "t5":
        return hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0))
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5))


class HuggingFace(LightningModule):
    """Trains on padded sequences, or on images; the model computes its own loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.model = build(kind)

    def training_step(self, batch, batch_idx):
        tokens, mask, images = batch
        if self.kind == "vit":
            loss = self.model(pixel_values=images, labels=tokens[:, 0] % 5).loss
        else:
            labels = tokens.masked_fill(mask == 0, -100)
            loss = self.model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        self.log("train_loss", loss)
        return loss

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(1, 64, (48, 12), generator=generator)
        mask = (torch.arange(12)[None] < torch.randint(5, 13, (48, 1), generator=generator)).long()
        images = torch.randn(48, 3, 16, 16, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(tokens, mask, images), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["llama", "qwen2 tied", "gpt2", "bert", "t5", "vit"])
def test_equals_ddp(pool, kind):
    assert len(find_blocks(build(kind))) in (3, 4)
    module = partial(HuggingFace, kind)
    expected = reference(pool, 4, module, strategy="ddp_find_unused_parameters_true")
    actual = pool.run(4, train, module, partial(NDStrategy, data_parallel_replicate_size=2))
    compare(actual, expected, rtol=1e-10)


class WithoutDropout(HuggingFace):
    """Attention dropout on parts is independent of that on whole tensors, so the numbers could not be compared."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2 tied", "gpt2", "bert", "phi3", "phi3 grouped"])
def test_tensor_parallel_equals_one_process(pool, kind):
    module = partial(WithoutDropout, kind)
    expected = reference(pool, 1, module)[0]
    for actual in pool.run(2, train, module, partial(NDStrategy, tensor_parallel_size=2)):
        compare(actual, expected, rtol=1e-6)  # these models compute their loss in float32


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2 tied", "gpt2", "bert", "t5", "vit"])
def test_context_parallelism_equals_ddp(pool, kind):
    module = partial(HuggingFace, kind)
    expected = reference(pool, 2, module, strategy="ddp_find_unused_parameters_true")
    actual = pool.run(4, train, module, partial(NDStrategy, context_parallel_size=2))
    for rank, mine in enumerate(actual):
        compare(mine, expected[rank // 2], rtol=1e-10)
