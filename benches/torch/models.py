"""The models of the benchmark of torch's pipeline runtime: six with unequal layers, and three with equal ones.

The layers are what one would count to split a model by hand: blocks, convolutions with their activation, linear layers.
Embeddings and heads belong to the layer next to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Subject:
    """A model with data."""

    model: nn.Module
    inputs: Dict[str, torch.Tensor]
    """One micro-batch."""
    layers: List[str]
    """Paths of the layers, in order."""
    loss: Any = None
    """`loss(output, target)`; None if the model returns its loss."""
    target: Any = None


def labels(vocabulary: int, rows: int, length: int) -> Dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, (rows, length))
    return {"input_ids": ids, "labels": ids.clone()}


def classes(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


def gpt(layers: int, width: int, heads: int, vocabulary: int, rows: int, length: int) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_layer=layers, n_embd=width, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = GPT2LMHeadModel(config)
    return Subject(model, labels(vocabulary, rows, length), [f"transformer.h.{at}" for at in range(layers)])


def gpt2() -> Subject:
    """GPT-2 with 124M parameters."""
    return gpt(12, 768, 12, 50257, 2, 128)


def gpt_vocabulary() -> Subject:
    """A narrow GPT whose head has the vocabulary of GPT-2."""
    return gpt(12, 384, 6, 50257, 2, 128)


def llama() -> Subject:
    """A Llama with 8 layers of 512."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, tie_word_embeddings=False
    )
    return Subject(LlamaForCausalLM(config), labels(8000, 4, 128), [f"model.layers.{at}" for at in range(8)])


class ConvNet(nn.Module):
    """VGG-16: 13 convolutions and 3 linear layers."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        widths, pools = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512], {1, 3, 6, 9, 12}
        layers: List[nn.Module] = []
        before = 3
        for at, width in enumerate(widths):
            pool = [nn.MaxPool2d(2)] if at in pools else []
            layers.append(nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), *pool))
            before = width
        flat = 512 * (size // 32) ** 2
        layers += [nn.Sequential(nn.Flatten(), nn.Linear(flat, 4096), nn.ReLU()), nn.Sequential(nn.Linear(4096, 4096), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(4096, classes))

    def forward(self, image: torch.Tensor) -> Any:
        return self.layers(image)


def vgg16() -> Subject:
    """VGG-16 on images of 64 x 64."""
    return Subject(
        ConvNet(64, 1000), {"image": torch.randn(8, 3, 64, 64)}, [f"layers.{at}" for at in range(16)], classes, torch.randint(1000, (8,))
    )


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )
        is_same = stride == 1 and before == 4 * width
        self.skip = nn.Identity() if is_same else nn.Sequential(nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.main(x) + self.skip(x))


def resnet(blocks: List[int], size: int, rows: int) -> Subject:
    layers: List[nn.Module] = []
    before = 64
    for at, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(before, 64 << at, 2 if at > 0 and number == 0 else 1))
            before = 256 << at
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))
    names = [f"1.{at}" for at in range(len(layers))]
    model = nn.Sequential(stem, nn.Sequential(*layers), head)
    return Subject(model, {"input": torch.randn(rows, 3, size, size)}, names, classes, torch.randint(1000, (rows,)))


def resnet50() -> Subject:
    """ResNet-50 on images of 128 x 128."""
    return resnet([3, 4, 6, 3], 128, 8)


class Pyramid(nn.Module):
    """Linear layers, each half as wide as the one before."""

    def __init__(self, widths: List[int]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:])])

    def forward(self, features: torch.Tensor) -> Any:
        return self.layers(features)


def pyramid() -> Subject:
    """A perceptron of eight layers, from 4096 features to 16 classes."""
    widths = [4096, 2048, 1024, 1024, 512, 256, 128, 64, 16]
    return Subject(
        Pyramid(widths), {"features": torch.randn(256, 4096)}, [f"layers.{at}" for at in range(8)], classes, torch.randint(16, (256,))
    )




def whisper() -> Subject:
    """Whisper with four layers per side: the encoder reads 750 frames, the decoder 64 tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=4096, d_model=256, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=1024, decoder_ffn_dim=1024, max_source_positions=750, dropout=0.0, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )
    model = WhisperForConditionalGeneration(config)
    inputs = {"input_features": torch.randn(2, 80, 1500), "decoder_input_ids": torch.randint(4096, (2, 64)), "labels": torch.randint(4096, (2, 64))}
    return Subject(model, inputs, [f"model.{side}.layers.{at}" for side in ("encoder", "decoder") for at in range(4)])


def t5() -> Subject:
    """T5 with six layers per side: 256 tokens to read, 32 to write."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=8192, d_model=384, d_kv=64, d_ff=1536, num_layers=6, num_heads=6, dropout_rate=0.0, use_cache=False
    )
    inputs = {"input_ids": torch.randint(8192, (2, 256)), "decoder_input_ids": torch.randint(8192, (2, 32)), "labels": torch.randint(8192, (2, 32))}
    model = T5ForConditionalGeneration(config)
    return Subject(model, inputs, [f"{side}.block.{at}" for side in ("encoder", "decoder") for at in range(6)])


class Captioner(nn.Module):
    """A vision transformer whose patches are the prefix of a small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 16, 16)
        self.vision = nn.ModuleList([self.layer(384, 6) for _ in range(8)])
        self.pool = nn.Linear(384, 192)
        self.words = nn.Embedding(4096, 192)
        self.text = nn.ModuleList([self.layer(192, 3) for _ in range(8)])
        self.head = nn.Linear(192, 4096)

    @staticmethod
    def layer(width: int, heads: int) -> nn.Module:
        return nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, image: torch.Tensor, words: torch.Tensor) -> Any:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for layer in self.vision:
            x = layer(x)
        # Nine patches become one.
        prefix = self.pool(x[:, :189].unflatten(1, (21, 9)).mean(2))
        x = torch.cat([prefix, self.words(words)], 1)
        for layer in self.text:
            x = layer(x)
        return self.head(x[:, 21:])


def tokens(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def captioner() -> Subject:
    """A vision transformer of 8 layers before a language model of 8 narrow layers."""
    inputs = {"image": torch.randn(2, 3, 224, 224), "words": torch.randint(4096, (2, 32))}
    names = [f"{side}.{at}" for side in ("vision", "text") for at in range(8)]
    return Subject(Captioner(), inputs, names, tokens, torch.randint(4096, (2, 32)))


UNEQUAL: Dict[str, Callable[[], Subject]] = {
    "vgg16": vgg16, "gpt-vocabulary": gpt_vocabulary, "whisper": whisper, "t5": t5, "pyramid": pyramid, "captioner": captioner,
}
EQUAL: Dict[str, Callable[[], Subject]] = {"gpt2": gpt2, "resnet50": resnet50, "llama": llama}


def made(name: str) -> Subject:
    """The subject: the same in every process."""
    torch.manual_seed(0)
    subject = {**UNEQUAL, **EQUAL}[name]()
    subject.model.train()
    return subject
