"""The networks of the comparisons with torch, written out: torchvision need not be installed."""

from __future__ import annotations

import torch
from torch import nn

ROWS, CLASSES, WORDS, LENGTH = 2, 1000, 8192, 64
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """A residual block: two convolutions, or three of which the outer ones are narrow."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool):
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            convolutions = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            convolutions = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        layers = [each for convolution in convolutions for each in (*convolved(*convolution), nn.ReLU())]
        self.way = nn.Sequential(*layers[:-1])
        short = stride == 1 and inputs == outputs
        self.shortcut = nn.Sequential() if short else nn.Sequential(*convolved(inputs, outputs, 1, stride))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.way(images) + self.shortcut(images))


def convolved(inputs: int, outputs: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    """Return a convolution and its normalization."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def resnet(blocks: tuple[int, ...], bottleneck: bool, width: int) -> nn.Module:
    """Return a residual network for images; ``width`` is that of the first blocks, 64 in the publication."""
    layers: list[nn.Module] = [*convolved(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for i in range(count):
            layers.append(Block(inputs, width << stage, 2 if stage and not i else 1, bottleneck))
            inputs = (width << stage) * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def resnet_18(width: int = 64) -> nn.Module:
    """Return ResNet-18: 11.7 million weights."""
    return resnet((2, 2, 2, 2), False, width)


def resnet_50(width: int = 64) -> nn.Module:
    """Return ResNet-50: 25.6 million weights."""
    return resnet((3, 4, 6, 3), True, width)


def transformer(width: int = 64) -> nn.Module:
    """Return a transformer of four layers that predicts words: 7.4 million weights."""
    size = 4 * width
    layers = [nn.TransformerEncoderLayer(size, 4, 4 * size, batch_first=True, dropout=0.0) for _ in range(4)]
    return nn.Sequential(nn.Embedding(WORDS, size), *layers, nn.Linear(size, WORDS))


def images(rank: int) -> Batch:
    """Return a batch of images and labels of a rank."""
    torch.manual_seed(rank)
    return torch.randn(ROWS, 3, 64, 64), torch.randint(CLASSES, (ROWS,))


def words(rank: int) -> Batch:
    """Return a batch of words of a rank, each with the one that comes next."""
    torch.manual_seed(rank)
    found = torch.randint(WORDS, (ROWS, LENGTH + 1))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of classes or words."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
