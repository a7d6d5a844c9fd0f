"""Inception-V3 for ImageNet: images of 299 x 299 pixels, 1000 classes.

Written from Szegedy et al., "Rethinking the Inception Architecture" (2015), and the channel counts that its
authors' published code gives. The auxiliary classifier is left out: it hangs off the middle of the chain and
serves only as a regulariser.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.zoo.vision import Head


class Convolution(nn.Sequential):
    """A convolution with batch norm and activation.

    Args:
        inputs: channels.
        outputs: channels.
        kernel: height and width, or one number for both.
        stride: of the convolution.
        same: whether the image keeps its size (at stride 1).
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, same: bool = True
    ) -> None:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if same else (0, 0)
        super().__init__(
            nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=0.001),
            nn.ReLU(inplace=True),
        )


class Branches(nn.Module):
    """Several ways from the same input, whose channels are set side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, image: Tensor) -> Tensor:
        """The channels of all branches."""
        return torch.cat([branch(image) for branch in self.branches], dim=1)


def pooled(inputs: int, outputs: int) -> nn.Module:
    """The mean over 3 x 3 pixels, and a 1 x 1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), Convolution(inputs, outputs, 1))


def block_35(inputs: int, pool: int) -> Branches:
    """A block on 35 x 35 pixels (figure 5 of the paper)."""
    return Branches(
        Convolution(inputs, 64, 1),
        nn.Sequential(Convolution(inputs, 48, 1), Convolution(48, 64, 5)),
        nn.Sequential(Convolution(inputs, 64, 1), Convolution(64, 96, 3), Convolution(96, 96, 3)),
        pooled(inputs, pool),
    )


def reduce_35() -> Branches:
    """From 35 x 35 to 17 x 17 pixels (figure 10)."""
    return Branches(
        Convolution(288, 384, 3, 2, same=False),
        nn.Sequential(Convolution(288, 64, 1), Convolution(64, 96, 3), Convolution(96, 96, 3, 2, same=False)),
        nn.MaxPool2d(3, 2),
    )


def block_17(width: int) -> Branches:
    """A block on 17 x 17 pixels, with 7 x 7 convolutions taken apart (figure 6)."""
    row, column = (1, 7), (7, 1)
    return Branches(
        Convolution(768, 192, 1),
        nn.Sequential(
            Convolution(768, width, 1), Convolution(width, width, row), Convolution(width, 192, column)
        ),
        nn.Sequential(
            Convolution(768, width, 1),
            Convolution(width, width, column),
            Convolution(width, width, row),
            Convolution(width, width, column),
            Convolution(width, 192, row),
        ),
        pooled(768, 192),
    )


def reduce_17() -> Branches:
    """From 17 x 17 to 8 x 8 pixels."""
    return Branches(
        nn.Sequential(Convolution(768, 192, 1), Convolution(192, 320, 3, 2, same=False)),
        nn.Sequential(
            Convolution(768, 192, 1),
            Convolution(192, 192, (1, 7)),
            Convolution(192, 192, (7, 1)),
            Convolution(192, 192, 3, 2, same=False),
        ),
        nn.MaxPool2d(3, 2),
    )


def block_8(inputs: int) -> Branches:
    """A block on 8 x 8 pixels, with a wide bank of filters (figure 7)."""

    def split() -> Branches:
        return Branches(Convolution(384, 384, (1, 3)), Convolution(384, 384, (3, 1)))

    return Branches(
        Convolution(inputs, 320, 1),
        nn.Sequential(Convolution(inputs, 384, 1), split()),
        nn.Sequential(Convolution(inputs, 448, 1), Convolution(448, 384, 3), split()),
        pooled(inputs, 192),
    )


def inception_v3() -> Divisible:
    """Inception-V3 without its auxiliary classifier, table 1 of the paper.

    23,834,568 parameters: torchvision's without the auxiliary classifier. Keras counts 23,851,784, which has
    34,432 running statistics and lacks the 17,216 scales of batch norm.
    """
    return Divisible(
        Convolution(3, 32, 3, 2, same=False),
        Convolution(32, 32, 3, same=False),
        Convolution(32, 64, 3),
        nn.MaxPool2d(3, 2),
        Convolution(64, 80, 1),
        Convolution(80, 192, 3, same=False),
        nn.MaxPool2d(3, 2),
        block_35(192, 32),
        block_35(256, 64),
        block_35(288, 64),
        reduce_35(),
        block_17(128),
        block_17(160),
        block_17(160),
        block_17(192),
        reduce_17(),
        block_8(1280),
        block_8(2048),
        Head(2048, dropout=0.5),
    )
