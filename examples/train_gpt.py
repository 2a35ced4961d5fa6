"""Train a small byte-level GPT on a folder of text, under whatever strategy the YAML file names.

    python examples/train_gpt.py fit --config examples/configs/hsdp.yaml      # 4 processes, 2 replicas x 2 shards
    python examples/train_gpt.py fit --config examples/configs/ddp.yaml       # 4 processes, plain Lightning DDP
    python examples/train_gpt.py fit --config examples/configs/single.yaml    # one process
    python examples/train_gpt.py fit --config examples/configs/hsdp.yaml --data.path ~/books --trainer.max_steps 1000
    python examples/train_gpt.py fit --help

What the three runs have in common (model size, data, loggers, callbacks) is in `configs/common.yaml`, which every run
reads first. The default text is the source code of the Python standard library of the running interpreter.

Shape suffixes: B batch, T sequence, C channels (`dim`), H heads, D channels of one head, V vocabulary (the 256 bytes).
"""

from __future__ import annotations

import math
import os
import sysconfig
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_4d  # noqa: F401  (registers the short names: `strategy: hsdp`, ...)

VOCABULARY = 256  # a token is a byte
FILE_END = b"\0"  # follows every file; source code and prose do not contain it, so it also means "a file starts here"


# ---------------------------------------------------------------------------------------------------------------- model


def apply_rope(x_BHTD: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate every pair (i, i + D/2) of the last dim by `position * base**(-2i/D)`; positions are 0 ... T-1.

    The dot product of a rotated query and a rotated key then depends on their distance only (Su et al. 2021,
    arXiv:2104.09864). Angles are float32 (float64 for float64 inputs); the result has the dtype of the input.
    """
    T, D = x_BHTD.shape[-2:]
    dtype = torch.promote_types(x_BHTD.dtype, torch.float32)
    frequency_D = base ** (-torch.arange(0, D, 2, device=x_BHTD.device, dtype=dtype) / D)
    angle_TD = torch.outer(torch.arange(T, device=x_BHTD.device, dtype=dtype), frequency_D)
    cos, sin = angle_TD.cos(), angle_TD.sin()
    left, right = x_BHTD.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x_BHTD.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions: (B, T, C) -> (B, T, C)."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            projection(x_BTC).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y_BHTD = F.scaled_dot_product_attention(apply_rope(q_BHTD), apply_rope(k_BHTD), v_BHTD, is_causal=True)
        return self.o_proj(y_BHTD.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU feed-forward layer (Shazeer 2020, arXiv:2002.05202): (B, T, C) -> (B, T, C)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))


class Block(nn.Module):
    """Pre-norm Transformer block: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, dim: int, n_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, n_heads)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC)))
        return x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))


def mlp_width(dim: int) -> int:
    """Hidden channels that give SwiGLU's three matrices about the 8 * dim**2 weights of a 4x GELU layer."""
    return 32 * round(8 * dim / 3 / 32)


class GPT(LightningModule):
    """A decoder-only Transformer over bytes.

    Args:
        dim: Channels of the residual stream.
        n_layers: Number of blocks.
        n_heads: Attention heads; must divide `dim` into heads of an even width (rotary positions pair channels).
        dropout: Probability with which a channel of a block's two contributions is zeroed in training.
        block_size: Context in bytes that `generate` looks back on. The command line takes it from the data.
        learning_rate: Peak of the schedule: linear warm-up, then a cosine down to a tenth of the peak.
        warmup_steps: Optimizer steps until the peak.
        weight_decay: AdamW's decay of matrices and embeddings; norms are not decayed.
        betas: AdamW's averaging factors.
    """

    def __init__(
        self,
        dim: int = 128,
        n_layers: int = 4,
        n_heads: int = 4,
        dropout: float = 0.0,
        block_size: int = 128,
        learning_rate: float = 3e-3,
        warmup_steps: int = 20,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        if dim % (2 * n_heads):
            raise ValueError(
                f"model.dim={dim} with model.n_heads={n_heads}: every head needs an even number of channels; "
                f"use dim={2 * n_heads * max(1, round(dim / (2 * n_heads)))} or another number of heads"
            )
        self.save_hyperparameters()
        self.block_size = block_size
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.betas = betas
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, n_heads, mlp_width(dim), dropout) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.val_accuracy = MulticlassAccuracy(num_classes=VOCABULARY, average="micro", validate_args=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights as GPT-2 does, normal and narrower where a block adds to the residual stream.

        GPT-2's standard deviation 0.02 belongs to its 768 channels; with `dim` channels, sums are as wide at
        0.02 * sqrt(768 / dim). At the small sizes used here this learns much faster than 0.02.
        """
        std = 0.02 * math.sqrt(768 / self.embedding.embedding_dim)
        residual_std = std / math.sqrt(2 * len(self.blocks))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=residual_std if name.endswith(("o_proj", "down_proj")) else std)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next byte, (B, T, V), for tokens (B, T) of an integer dtype."""
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch in nats per byte."""
        tokens_BT, targets_BT = batch
        loss = cross_entropy(self(tokens_BT), targets_BT)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log `val_loss` (nats per byte) and `val_accuracy` (share of bytes whose most likely guess is right)."""
        tokens_BT, targets_BT = batch
        logits_BTV = self(tokens_BT)
        self.val_accuracy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        self.log("val_loss", cross_entropy(logits_BTV, targets_BT), prog_bar=True, sync_dist=True)
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a decayed and an undecayed group, and a schedule that moves every optimizer step."""
        steps = self.trainer.estimated_stepping_batches
        if math.isinf(steps):
            raise ValueError("the cosine schedule needs the length of training: set trainer.max_steps or max_epochs")
        optimizer = torch.optim.AdamW(self.parameter_groups(), lr=self.learning_rate, betas=self.betas)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.lr_factor(step, int(steps)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices and embeddings, which are decayed, and the rest (norms), which are not."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]

    def lr_factor(self, step: int, total_steps: int) -> float:
        """Share of the peak learning rate at `step`: linear warm-up, then half a cosine down to 0.1."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    @torch.no_grad()
    def generate(self, prompt: bytes | str, n: int, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Continue `prompt` by `n` sampled bytes and return both.

        Where the parameters are sharded, every rank has to call this together. All ranks return the same bytes:
        they draw from a generator of their own, which leaves the global one, and with it the training, untouched.
        """
        text = list(prompt.encode() if isinstance(prompt, str) else prompt) or list(FILE_END)
        generator = torch.Generator(self.device).manual_seed(seed)
        was_training = self.training
        self.eval()
        for _ in range(n):
            logits_BTV = self(torch.tensor([text[-self.block_size :]], device=self.device))
            probability_V = (logits_BTV[0, -1].float() / temperature).softmax(dim=-1)
            text.append(int(torch.multinomial(probability_V, 1, generator=generator)))
        self.train(was_training)
        return bytes(text)


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean over all bytes, in nats."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


# ----------------------------------------------------------------------------------------------------------------- data

STANDARD_LIBRARY_SKIPS = ("site-packages", "dist-packages", "test", "tests", "idle_test")  # folders, by name
# fmt: off
TEXT_SUFFIXES = [
    ".txt", ".md", ".rst", ".tex", ".org", ".html", ".css",
    ".py", ".js", ".ts", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".go", ".rs", ".rb", ".sh", ".sql",
]
# fmt: on


def find_files(root: Path, suffixes: Sequence[str], skip_folders: Iterable[str] = ()) -> list[Path]:
    """Files under `root` that end in one of `suffixes`, in the order of their names; hidden folders are skipped.

    Raises:
        FileNotFoundError, NotADirectoryError: There is no such folder.
        ValueError: The folder holds no such file.
    """
    if not root.exists():
        raise FileNotFoundError(f"data.path={root}: no such folder; give the path of a folder that holds text files")
    if not root.is_dir():
        raise NotADirectoryError(f"data.path={root}: a folder is needed, not a file; this one is in {root.parent}")
    skip = set(skip_folders)
    files: list[Path] = []
    others: Counter[str] = Counter()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith((".", "__pycache__"))]
        paths = [Path(folder, name) for name in names]
        files += [path for path in paths if path.suffix in suffixes and path.is_file()]
        others.update(path.suffix for path in paths if path.suffix not in suffixes)
    if not files:
        raise ValueError(
            f"data.path={root}: no file ends in {', '.join(suffixes)}; "
            f"set data.suffixes to what is there: {[suffix for suffix, _ in others.most_common(5)]}"
        )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def split_files(files: Sequence[Path], root: Path, val_fraction: float) -> tuple[list[Path], list[Path]]:
    """Whole files into (train, validation) by a hash of their names below `root`: the same on every machine.

    A file keeps its side when others are added. The validation side gets at least one file.

    Raises:
        ValueError: No file is left for training.
    """

    def position(path: Path) -> float:
        return zlib.crc32(path.relative_to(root).as_posix().encode()) / 2**32

    val = [path for path in files if position(path) < val_fraction] or [min(files, key=position)]
    train = [path for path in files if path not in set(val)]
    if not train:
        raise ValueError(
            f"data.path={root}, data.val_fraction={val_fraction}: {len(files)} file(s) leave nothing to train on, "
            "since training and validation never share a file; use two files or more, or a smaller fraction"
        )
    return train, val


def read_files(files: Sequence[Path]) -> Tensor:
    """The bytes of all files, each followed by FILE_END, as one uint8 tensor, whatever their encoding."""
    sizes = [path.stat().st_size for path in files]
    buffer = bytearray(sum(sizes) + len(files))  # of zeros: every byte between two files is a FILE_END already
    start = 0
    for path, size in zip(files, sizes):
        with path.open("rb") as file:
            file.readinto(memoryview(buffer)[start : start + size])
        start += size + len(FILE_END)
    return torch.frombuffer(buffer, dtype=torch.uint8)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: item i is (input, target), two int64 tensors of `block_size` bytes, one byte apart.

    The windows start at even distances. By default they touch: an epoch predicts every byte once.

    Raises:
        ValueError: The text is shorter than one window.
    """

    def __init__(self, text: Tensor, block_size: int, max_windows: int | None = None, name: str = "text") -> None:
        available = (len(text) - 1) // block_size
        if available < 1:
            raise ValueError(
                f"data.block_size={block_size}: the {name} has {len(text)} bytes and a window needs block_size + 1; "
                f"use data.block_size={max(1, len(text) - 1)} or less, or more text"
            )
        self.text = text
        self.block_size = block_size
        self.count = min(available, max_windows or available)
        self.stride = (available // self.count) * block_size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        window = self.text[start : start + self.block_size + 1].long()
        return window[:-1], window[1:]


class TextFolder(LightningDataModule):
    """The text files of a folder as bytes, split by file into training and validation.

    Args:
        path: The folder. None: the Python standard library of the running interpreter, without tests and site-packages.
        suffixes: Which files count. None: `.py` in the standard library, else the common text and source suffixes.
        block_size: Bytes that the model sees at once.
        batch_size: Windows per process and step.
        val_fraction: About this share of the files is for validation.
        max_val_windows: Validate on at most so many windows, spread evenly over the validation text. None: all.
        num_workers: Loader processes per training process.
    """

    def __init__(
        self,
        path: str | None = None,
        suffixes: list[str] | None = None,
        block_size: int = 128,
        batch_size: int = 16,
        val_fraction: float = 0.1,
        max_val_windows: int | None = 512,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("block_size", block_size), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"data.{name}={value}: must be at least 1")
        if not 0 < val_fraction < 1:
            raise ValueError(f"data.val_fraction={val_fraction}: must be above 0 and below 1, for example 0.1")
        self.root = Path(path).expanduser() if path else Path(sysconfig.get_paths()["stdlib"])
        self.suffixes = suffixes or (TEXT_SUFFIXES if path else [".py"])
        self.skip_folders = () if path else STANDARD_LIBRARY_SKIPS
        self.block_size = block_size
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.max_val_windows = max_val_windows
        self.num_workers = num_workers
        self.train_windows: ByteWindows | None = None
        self.val_windows: ByteWindows | None = None

    def setup(self, stage: str) -> None:
        """Read what `stage` needs, once, on every process (a few MB; nothing has to be prepared by one for all)."""
        files = find_files(self.root, self.suffixes, self.skip_folders)
        train, val = split_files(files, self.root, self.val_fraction)
        if stage == "fit" and self.train_windows is None:
            self.train_windows = ByteWindows(read_files(train), self.block_size, name="training text")
        if self.val_windows is None:
            self.val_windows = ByteWindows(read_files(val), self.block_size, self.max_val_windows, "validation text")

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """All training windows, shuffled. Lightning gives every data-parallel rank its part."""
        assert self.train_windows is not None, "Lightning calls setup('fit') first"
        return DataLoader(self.train_windows, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The validation windows, in order."""
        assert self.val_windows is not None, "Lightning calls setup first"
        return DataLoader(self.val_windows, self.batch_size, num_workers=self.num_workers)


# --------------------------------------------------------------------------------------------------------------- script


class SampleText(Callback):
    """Print text that the trained model writes, at the end of `fit`.

    Args:
        prompt: What the model continues.
        n_bytes: How many bytes it writes; 0 for none.
        temperature: Below 1 prefers likely bytes, above 1 unlikely ones.
    """

    def __init__(self, prompt: str = "def ", n_bytes: int = 200, temperature: float = 0.7) -> None:
        self.prompt = prompt
        self.n_bytes = n_bytes
        self.temperature = temperature

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All ranks sample, since together they hold the parameters; the first one prints."""
        if not self.n_bytes or not isinstance(pl_module, GPT):
            return
        if getattr(trainer.strategy, "has_stages", False):
            return  # no rank holds all blocks; load the checkpoint into one process to sample
        text = pl_module.generate(self.prompt, self.n_bytes, self.temperature)
        if trainer.is_global_zero:
            print(f"\n--- sampled text ---\n{text.replace(FILE_END, b'').decode(errors='replace')}\n---", flush=True)


class GPTCommandLine(LightningCLI):
    """Lightning's command line with the sampling callback, and one `block_size` for data and model."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--sample_text.*`; take `model.block_size` from `data.block_size`."""
        parser.add_lightning_class_args(SampleText, "sample_text")
        parser.link_arguments("data.block_size", "model.block_size")


def main(args: ArgsType = None) -> LightningCLI:
    """Run `fit`, `validate`, ... as the command line (or `args`) says and return the finished command-line object."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # slicing a tensor needs no loader processes
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning 2.6 uses a name that torch has renamed
    common = {"default_config_files": [str(Path(__file__).with_name("configs") / "common.yaml")]}
    return GPTCommandLine(
        GPT,
        TextFolder,
        args=args,
        auto_configure_optimizers=False,  # the module configures its own
        parser_kwargs={"fit": common, "validate": common},
    )


if __name__ == "__main__":
    main()
