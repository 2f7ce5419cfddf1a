"""Small models with what makes pipelines hard: tied weights, skip connections, nested modules, several inputs and outputs."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

import torch
import torch.nn.functional as F
from torch import nn

Case = Tuple[nn.Module, Dict[str, torch.Tensor], torch.Tensor]
ROWS = 8
MICRO_BATCH = 2
NORM = 0.5


def tokens(vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (ROWS, 12))


def gpt2() -> Case:
    """Tied embeddings: the first and the last stage hold the same weight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config), {"input_ids": tokens(61), "attention_mask": torch.ones(ROWS, 12, dtype=torch.long)}, tokens(61)


def gpt2_labels() -> Case:
    """The model computes the loss: the last stage reads an input."""
    model, inputs, target = gpt2()
    return model, {**inputs, "labels": target}, target


def llama() -> Case:
    """Nested modules, and rotary embeddings that every layer reads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=53, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config), {"input_ids": tokens(53)}, tokens(53)


def llama6() -> Case:
    """As many layers as torchtitan's debug model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config), {"input_ids": tokens(64)}, tokens(64)


def resnet50() -> Case:
    """Several lists of layers, and BatchNorm."""
    from torchvision.models import resnet50

    # Blocks begin as the identity: otherwise, BatchNorm of two rows amplifies rounding.
    return resnet50(num_classes=10, zero_init_residual=True), {"x": torch.randn(ROWS, 3, 64, 64)}, torch.randint(10, (ROWS,))


class UNet(nn.Module):
    """A U-Net: the output of the first layer is read by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1, stride=2)])
        self.middle = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Linear(16 * 64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        high = torch.relu(self.down[0](image))
        low = torch.relu(self.down[1](high))
        low = torch.relu(low + self.middle(low))
        whole = torch.cat([torch.relu(self.up(low)), high], dim=1)
        result: torch.Tensor = self.head(whole.flatten(1))
        return result


def unet() -> Case:
    return UNet(), {"image": torch.randn(ROWS, 1, 8, 8)}, torch.randint(10, (ROWS,))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )
        self.skip = nn.Identity() if before == width else nn.Conv2d(before, width, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.main(x) + self.skip(x))


def resnet() -> Case:
    """Residual blocks with BatchNorm."""
    blocks = nn.Sequential(*[Block(a, b) for a, b in [(3, 8), (8, 8), (8, 16), (16, 16)]])
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(blocks, head), {"input": torch.randn(ROWS, 3, 8, 8)}, torch.randint(10, (ROWS,))


MODELS: Dict[str, Callable[[], Case]] = {"resnet": resnet, "gpt2": gpt2, "gpt2_labels": gpt2_labels, "llama": llama, "unet": unet}
OTHERS: Dict[str, Callable[[], Case]] = {"llama6": llama6, "resnet50": resnet50}


def made(name: str) -> Case:
    """A model, its inputs and targets: the same in every process."""
    torch.manual_seed(7)
    return {**MODELS, **OTHERS}[name]()


def forget(model: nn.Module) -> None:
    """Puts the parameters on the meta device."""
    made: Dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                made.setdefault(id(value), nn.Parameter(value.detach().to("meta"), value.requires_grad))
                setattr(module, name, made[id(value)])


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of what the model returns."""
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def plain(name: str, steps: int) -> Tuple[list[float], float]:
    """The losses of the model without a pipeline, and the norm of the last gradients."""
    model, inputs, target = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        # BatchNorm uses the statistics of micro-batches; to other models they make no difference.
        value = torch.zeros(())
        for at in range(0, ROWS, MICRO_BATCH):
            rows = slice(at, at + MICRO_BATCH)
            output = model(**{name: tensor[rows] for name, tensor in inputs.items()})
            part = output.loss if "labels" in inputs else loss(output, target[rows])
            value = value + part * MICRO_BATCH / ROWS
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        found.append(value.item())
    return found, norm.item()
