"""VGG-19 for ImageNet: images of 224 x 224 pixels, 1000 classes; one layer of the pipeline is one block."""

from __future__ import annotations

from torch import nn

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
