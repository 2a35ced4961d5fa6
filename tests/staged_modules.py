"""Ordinary LightningModules whose blocks, losses or logs are a challenge to pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.modules import Block, SyntheticModule, TinyGPT


class Staged(SyntheticModule):
    """Vectors (batch, T, C) through four blocks, a head, and the mean squared error to given targets."""

    blocks_count = 4

    def __init__(self, dim: int = 8, length: int = 6, batch_size: int = 4, samples: int = 48, lr: float = 0.1) -> None:
        super().__init__(batch_size, samples, lr)
        self.dim, self.length = dim, length
        self.input = nn.Linear(dim, dim)
        self.blocks = self.make_blocks()
        self.head = nn.Linear(dim, 3)

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(Block(self.dim, 2, causal=False) for _ in range(self.blocks_count))

    def dataset(self, split: str) -> TensorDataset:
        count, generator = self._draw(split)
        x_BTC = torch.randn(count, self.length, self.dim, generator=generator)
        return TensorDataset(x_BTC, x_BTC[..., :3].cumsum(1).tanh())

    def through(self, x_BTC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return x_BTC

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.head(self.through(self.input(x_BTC)))

    def loss(self, batch: Any, stage: str) -> Tensor:
        x_BTC, y_BTC = batch
        return F.mse_loss(self(x_BTC), y_BTC)


class InSequential(Staged):
    def make_blocks(self) -> nn.Module:
        return nn.Sequential(*super().make_blocks())

    def through(self, x_BTC: Tensor) -> Tensor:
        return self.blocks(x_BTC)


class WithKeywords(Staged):
    """Blocks take a mask and a table by keyword; code runs between blocks, with a parameter of its own."""

    class Keyworded(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.inner = Block(dim, 2, causal=False)

        def forward(self, hidden: Tensor, *, mask: Tensor, table: Tensor) -> Tensor:
            return hidden + self.inner(hidden * mask + table)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.between = nn.LayerNorm(self.dim)
        self.table = nn.Parameter(0.1 * torch.randn(self.length, self.dim))

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(self.Keyworded(self.dim) for _ in range(self.blocks_count))

    def through(self, x_BTC: Tensor) -> Tensor:
        mask = (torch.arange(x_BTC.shape[1], device=x_BTC.device) % 3 > 0).to(x_BTC.dtype)[:, None]
        for block in self.blocks:
            x_BTC = self.between(block(hidden=x_BTC, mask=mask, table=self.table)) * 1.01
        return x_BTC


class WithTuples(Staged):
    """Blocks return a tuple: the state, a running sum that the loss uses, the layer's number."""

    class Tupled(nn.Module):
        def __init__(self, dim: int, number: int) -> None:
            super().__init__()
            self.inner, self.number = Block(dim, 2, causal=False), number

        def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor, int]:
            x = self.inner(x)
            return x, total + x.mean(-1), self.number

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(self.Tupled(self.dim, i) for i in range(self.blocks_count))

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = self.input(x_BTC)
        total_BT = x_BTC.new_zeros(x_BTC.shape[:2])
        for number, block in enumerate(self.blocks):
            x_BTC, total_BT, own = block(x_BTC, total_BT)
            assert own == number
        return self.head(x_BTC) + 0.1 * total_BT[..., None]


class Conditioned(Staged):
    """What every block receives is made by parameters before the blocks (adaLN)."""

    class Scaled(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.inner, self.scale = Block(dim, 2, causal=False), nn.Linear(dim, dim)

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            return self.inner(x * (1 + self.scale(c))[:, None])

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.condition = nn.Sequential(nn.Linear(self.dim, self.dim), nn.SiLU(), nn.Linear(self.dim, self.dim))

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(self.Scaled(self.dim) for _ in range(self.blocks_count))

    def through(self, x_BTC: Tensor) -> Tensor:
        c_BC = self.condition(x_BTC.mean(1))
        for block in self.blocks:
            x_BTC = block(x_BTC, c_BC)
        return x_BTC


class WithAuxiliaryLoss(Staged):
    """Each block leaves a balance loss in an attribute; the step adds them up."""

    class Balanced(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.inner, self.router = Block(dim, 2, causal=False), nn.Linear(dim, 2)

        def forward(self, x: Tensor) -> Tensor:
            share = self.router(x).softmax(-1)
            self.balance_loss = (share - 0.5).square().mean()
            return self.inner(x) * share[..., :1]

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(self.Balanced(self.dim) for _ in range(self.blocks_count))

    def loss(self, batch: Any, stage: str) -> Tensor:
        loss = super().loss(batch, stage)
        balance = sum(block.balance_loss for block in self.blocks)
        self.log(f"{stage}_balance", balance)
        return loss + 0.3 * balance


class WithSkips(Staged):
    """A U-Net's connections: outputs of early blocks meet late ones, and the loss sees all of them."""

    def through(self, x_BTC: Tensor) -> Tensor:
        kept = []
        for block in self.blocks[:2]:
            x_BTC = block(x_BTC)
            kept.append(x_BTC)
        for block in self.blocks[2:]:
            x_BTC = block(x_BTC + 0.5 * kept.pop())
        return x_BTC


class WithDeepSupervision(Staged):
    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC, seen = self.input(x_BTC), []
        for block in self.blocks:
            x_BTC = block(x_BTC)
            seen.append(x_BTC)
        return self.head(torch.stack(seen).mean(0))


class Frozen(Staged):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.input.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class Unfreezing(Staged):
    """Its first half trains from the second step on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.input.requires_grad_(False)
        self.blocks[:2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class LaterSkip(Staged):
    """From the second epoch on, the head sees the output of the first block as well."""

    def through(self, x_BTC: Tensor) -> Tensor:
        first = None
        for block in self.blocks:
            x_BTC = block(x_BTC)
            first = x_BTC if first is None else first
        return x_BTC + first if self.current_epoch > 0 else x_BTC


class OtherSteps(Staged):
    """What the head sees changes from batch to batch, which no record tells."""

    number = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number = batch_idx

    def through(self, x_BTC: Tensor) -> Tensor:
        first = x_BTC = self.blocks[0](x_BTC)
        for block in self.blocks[1:]:
            x_BTC = block(x_BTC)
        return x_BTC + first if self.number else x_BTC


class CountingBuffer(Staged):
    """A buffer of the LightningModule itself that each step changes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("steps", torch.zeros(()))

    def loss(self, batch: Any, stage: str) -> Tensor:
        self.steps += 1
        return super().loss(batch, stage)


class InEvalNorm(Staged):
    """Batch normalisation that is frozen."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = nn.BatchNorm1d(self.dim)
        self.norm.running_var.fill_(2.0)

    def forward(self, x_BTC: Tensor) -> Tensor:
        self.norm.eval()
        return self.head(self.norm(self.through(self.input(x_BTC)).transpose(1, 2)).transpose(1, 2))


class WithBatchNorm(InEvalNorm):
    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.head(self.norm(self.through(self.input(x_BTC)).transpose(1, 2)).transpose(1, 2))


class SumLoss(Staged):
    def loss(self, batch: Any, stage: str) -> Tensor:
        x_BTC, y_BTC = batch
        return 0.01 * F.mse_loss(self(x_BTC), y_BTC, reduction="sum")


class Contrastive(Staged):
    """Every sample's loss depends on all samples of the batch."""

    def loss(self, batch: Any, stage: str) -> Tensor:
        x_BTC, _ = batch
        z_BC = F.normalize(self(x_BTC).mean(1), dim=-1)
        return F.cross_entropy(z_BC @ z_BC.T / 0.1, torch.arange(len(z_BC), device=z_BC.device))


class NormOverBatch(Staged):
    def loss(self, batch: Any, stage: str) -> Tensor:
        x_BTC, y_BTC = batch
        out = self(x_BTC)
        return F.mse_loss(out - out.mean(0), y_BTC)


class Twice(Staged):
    def loss(self, batch: Any, stage: str) -> Tensor:
        return super().loss(batch, stage) + super().loss((batch[0] + 1, batch[1]), stage)


class WritesInput(Staged):
    def make_blocks(self) -> nn.Module:
        class InPlace(nn.Module):
            def __init__(self, dim: int) -> None:
                super().__init__()
                self.inner = nn.Linear(dim, dim)

            def forward(self, x: Tensor) -> Tensor:
                return x.add_(self.inner(x.clone()))

        return nn.ModuleList(InPlace(self.dim) for _ in range(self.blocks_count))


class ReadsValues(Staged):
    def loss(self, batch: Any, stage: str) -> Tensor:
        loss = super().loss(batch, stage)
        return loss * 0 if loss.isnan() else loss


class RaggedLabels(TinyGPT):
    """Targets with unequal numbers of ignored ones, one sample with none that count, and what is made of the loss."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(layers=4, **kwargs)

    def loss(self, batch: Any, stage: str) -> Tensor:
        (tokens_BT,) = batch
        targets_BT = tokens_BT[:, 1:].clone()
        length = tokens_BT[:, 0] % (self.length + 1)  # of each sample
        targets_BT[torch.arange(self.length, device=tokens_BT.device) >= length[:, None]] = -100
        logits_BTV = self(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        self.log(f"{stage}_ppl", loss.exp())
        self.log(f"{stage}_tokens", (targets_BT != -100).sum().float(), reduce_fx="sum")
        return loss


class Collecting(Staged):
    """Appends to lists in steps and reads them at the end of epochs; returns a dict; logs numbers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.train_losses: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, "train")
        self.train_losses.append(loss.detach())
        self.last_loss = loss.detach()
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        self.log_dict({"half": 0.5 * loss, "rmse": loss.sqrt()})
        return {"loss": loss, "twice": 2 * loss.detach(), "rows": batch[0].sum((1, 2)), "name": "collecting"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["name"] == "collecting"
        self.log("returned", outputs["twice"] + outputs["rows"].square().sum())

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_losses", torch.stack(self.train_losses).mean())
        self.log("last", self.last_loss)
        self.train_losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.outputs.append(out.flatten(1).sum(1))
        self.seen += len(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("val_sum", torch.cat(self.outputs).sum())
        self.log("val_seen", float(self.seen))
        self.outputs.clear()


class NestedBatches(Staged):
    """Batches are dicts with names, a table without a batch dimension and a number."""

    def _loader(self, split: str) -> DataLoader:
        def collate(items: list[Any]) -> dict[str, Any]:
            x, y = (torch.stack(parts) for parts in zip(*items, strict=True))
            names = [f"sample {i}" for i in range(len(x))]
            return {
                "data": {"x": x, "y": [y]},
                "names": names,
                "table": torch.ones(self.length, 1, dtype=x.dtype),
                "s": 2,
            }

        return DataLoader(self.dataset(split), batch_size=self.batch_size, collate_fn=collate)

    def train_dataloader(self) -> DataLoader:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader:
        return self._loader("val")

    def loss(self, batch: Any, stage: str) -> Tensor:
        data = batch["data"]
        assert len(batch["names"]) == len(data["x"])
        return F.mse_loss(self(data["x"] * batch["table"].to(data["x"])), data["y"][0]) * batch["s"]


class SquareMask(Staged):
    """As many samples as positions, and a mask over positions in each batch: only its name tells it from samples."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(length=4, batch_size=4, **kwargs)

    def train_dataloader(self) -> DataLoader:
        def collate(items: list[Any]) -> dict[str, Tensor]:
            x, y = (torch.stack(parts) for parts in zip(*items, strict=True))
            return {"x": x, "y": y, "mask": torch.arange(1.0, 17.0).view(4, 4)}

        return DataLoader(self.dataset("train"), batch_size=self.batch_size, collate_fn=collate)

    def loss(self, batch: Any, stage: str) -> Tensor:
        if stage == "val":
            return super().loss(batch, stage)
        mixed = batch["mask"].to(batch["x"]).softmax(-1) @ batch["x"]
        return F.mse_loss(self(mixed), batch["y"])


class DynamicLengths(TinyGPT):
    """Each batch has another length."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(layers=4, **kwargs)

    def loss(self, batch: Any, stage: str) -> Tensor:
        return super().loss(batch, stage)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        length = 4 + int(batch[0].sum()) % (self.length - 3)
        return [batch[0][:, : length + 1]]
