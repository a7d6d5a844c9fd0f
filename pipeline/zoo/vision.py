"""VGG-19 and ResNet-152 for ImageNet: images of 224 x 224 pixels, 1000 classes.

Written from the papers' tables; one layer of the pipeline is one block, so that everything that must stay
together (a residual connection) does.
"""

from __future__ import annotations

from torch import Tensor, nn

from arborcast.pipeline.model.divisible import Divisible

CLASSES = 1000


class ConvolutionReLU(nn.Sequential):
    """A 3 x 3 convolution that keeps the image's size, and its activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True))


def vgg19() -> Divisible:
    """VGG-19, configuration E of Simonyan and Zisserman (2014), table 1.

    143,667,240 parameters (144 million in table 2 of the paper; exactly so in torchvision).
    """
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            layers.append(ConvolutionReLU(channels, width))
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers.append(
        nn.Sequential(nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout())
    )
    layers.append(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()))
    layers.append(nn.Linear(4096, CLASSES))
    return Divisible(layers)


class Bottleneck(nn.Module):
    """Three convolutions (1 x 1, 3 x 3, 1 x 1) around which the input is added.

    Args:
        inputs: channels.
        width: channels of the 3 x 3 convolution; four times as many come out.
        stride: of the 3 x 3 convolution, and of the projection of the input.
    """

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, image: Tensor) -> Tensor:
        """The sum of both ways."""
        total: Tensor = self.relu(self.branch(image) + self.shortcut(image))
        return total


class Stem(nn.Sequential):
    """The first convolution, which brings 224 pixels down to 56."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )


class Head(nn.Sequential):
    """The mean over the image, and the classes."""

    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        regular = [nn.Dropout(dropout)] if dropout else []
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *regular, nn.Linear(channels, CLASSES))


def resnet(blocks: tuple[int, int, int, int]) -> Divisible:
    """A residual network of bottlenecks, He et al. (2015), table 1.

    The stride stands at the 3 x 3 convolution, as in every framework's version, not at the first 1 x 1.
    """
    layers: list[nn.Module] = [Stem()]
    channels = 64
    for group, count in enumerate(blocks):
        for block in range(count):
            width = 64 << group
            layers.append(Bottleneck(channels, width, 2 if group and not block else 1))
            channels = 4 * width
    layers.append(Head(channels))
    return Divisible(layers)


def resnet152() -> Divisible:
    """ResNet-152: 60,192,808 parameters (60.2 million; exactly so in torchvision)."""
    return resnet((3, 8, 36, 3))
